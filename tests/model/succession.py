"""A model of nodes that continue one another's run at one mirror, without any of casnap's code.

A *node* has a disk, which is empty at first, and a process. It begins from scratch, or resumes: it
is handed a snapshot of the mirror, the newest one or an earlier one. It takes snapshots, which
*follow* the root of the mirror that it was handed its snapshot from; a pass copies one after the
other to the mirror, in one commit each, and then notes on the disk that it did. A node that never
moves again is dead; one that moves late still lives though others have succeeded it. A node may
also come back: a new process with the old disk, which resumes from what is newest of both sides.

A snapshot is its *line*: a letter for each step, of the process that made that step. So one is of
the same branch as a later one if its line is the beginning of the other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Rule(Enum):
    """What a correct node does; a model that drops the rule does what the value says."""

    SEEN = "a node takes over a run although another one has done so since it resumed"
    BY_SNAPSHOT = "a snapshot counts as following what its node has seen last"
    OWN_LIFE = "a node copies whatever it has as long as it writes the run"
    LATER_GO = "a copy replaces the one of its name, and the later ones stay"
    UNSEEN_GO = "copies that were made after a node resumed stay"
    ONE_COMMIT = "what is replaced goes in a commit before"


# Where a rule is dropped, two nodes may replace what is the other's for ever.
_MOST_ROOTS = 12


class Copy(NamedTuple):
    line: str
    seq: int
    by: int
    began: int
    """The root that the life of the run began with that this copy is of."""
    follows: int
    """The root that the first copy of that life followed."""


class Taken(NamedTuple):
    line: str
    follows: int
    lacking: bool = True


class Node(NamedTuple):
    line: str | None = None
    """What the process has trained; None before it begins."""
    follows: int = 0
    disk: tuple[Taken, ...] = ()
    comebacks: int = 0
    refused: tuple[Taken, ...] = ()
    """What the process knows to be refused, and has not noted on its disk."""


class State(NamedTuple):
    nodes: tuple[Node, ...]
    root: int = 0
    bucket: tuple[Copy, ...] = ()
    last_life: int = 0
    """The root that the last life of the run began with."""
    is_torn: bool = False
    """Whether a node took over from one whose run it had not seen."""


class SuccessionModel:
    """Some nodes at one mirror.

    Args:
        steps: How far each node trains.
        comebacks: How often each node may come back.
        keep_here: How many snapshots each disk keeps.
        keep_there: How many the mirror keeps.
        without: The rules that are dropped.

    Attributes:
        happened: What happened at all.
    """

    def __init__(
        self,
        steps: tuple[int, ...],
        comebacks: tuple[int, ...] = (),
        keep_here: int = 1,
        keep_there: int = 2,
        without: frozenset[Rule] = frozenset(),
    ) -> None:
        self.steps_of = steps
        self.comebacks = comebacks or (0,) * len(steps)
        self.keep_here = keep_here
        self.keep_there = keep_there
        self.without = without
        self.happened: set[str] = set()

    def initial(self) -> State:
        return State(tuple(Node() for _ in self.steps_of))

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.root == _MOST_ROOTS:
            return
        for i, node in enumerate(state.nodes):
            if node.line is None:
                yield from self._begin(state, i)
                continue
            if len(node.line) < self.steps_of[i]:
                yield self._take(state, i)
            lacking = [t for t in node.disk if t.lacking and t not in node.refused]
            if lacking:
                yield from self._copy(state, i, lacking[0])
            if node.comebacks < self.comebacks[i]:
                yield self._come_back(state, i)

    def _begin(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        yield f"{i} begins from scratch", _with(state, i, Node(""))
        for copy in state.bucket:
            yield f"{i} resumes from {copy.line}", _with(state, i, Node(copy.line, state.root))

    def _take(self, state: State, i: int) -> tuple[str, State]:
        node = state.nodes[i]
        assert node.line is not None
        line = node.line + ("abc", "ABC", "xyz")[node.comebacks][i]
        others = [t for t in node.disk if len(t.line) != len(line)]
        disk = [*others, Taken(line, node.follows)]
        # What is lacking is not pruned.
        disk = [t for t in disk[: -self.keep_here] if t.lacking] + disk[-self.keep_here :]
        return f"{i} takes {line}", _with(state, i, node._replace(line=line, disk=tuple(disk)))

    def _come_back(self, state: State, i: int) -> tuple[str, State]:
        node = state.nodes[i]
        newest = node.disk[-1] if node.disk else Taken("", 0)
        own = max((t.follows for t in node.disk), default=0)
        line, follows = newest.line, own
        if state.bucket:
            copy = state.bucket[-1]
            is_known = any(t.line == copy.line for t in node.disk)
            if not is_known and (copy.by != i and newest.follows < copy.began):
                line, follows = copy.line, state.root
                self.happened.add("comes back to what others did")
        back = node._replace(line=line, follows=follows, comebacks=node.comebacks + 1, refused=())
        return f"{i} comes back with {line}", _with(state, i, back)

    def _copy(self, state: State, i: int, taken: Taken) -> Iterator[tuple[str, State]]:
        node = state.nodes[i]
        if any(copy.line == taken.line for copy in state.bucket):
            yield f"{i} notes that {taken.line} is there", _with(state, i, _noted(node, taken))
            return
        placed = self._placed(state, i, taken)
        if placed is not None:
            # That it did so is noted in another step, before which the process may come back.
            yield f"{i} copies {taken.line}", placed
            return
        self.happened.add("told")
        yield f"{i} is told, and gives {taken.line} up", _with(state, i, _noted(node, taken))
        if node.comebacks < self.comebacks[i]:
            told = node._replace(refused=(*node.refused, taken))
            yield f"{i} is told of {taken.line}, and goes on", _with(state, i, told)

    def _placed(self, state: State, i: int, taken: Taken) -> State | None:
        """Return the state in which the mirror has a snapshot; None if it is refused."""
        node, bucket = state.nodes[i], state.bucket
        seq = state.root + 1
        follows = node.follows if Rule.BY_SNAPSHOT in self.without else taken.follows
        last = bucket[-1] if bucket else None
        is_mine = last is not None and last.by == i
        if (
            last is not None
            and is_mine
            and (follows >= last.follows or Rule.OWN_LIFE in self.without)
        ):
            began, first = last.began, last.follows
        elif last is None or follows >= last.began or Rule.SEEN in self.without:
            began, first = seq, follows
            if last is not None:
                self.happened.add("takes over")
        else:
            return None
        gone = set()
        for at, copy in enumerate(bucket):
            if len(copy.line) == len(taken.line):
                gone.add(copy)
                if copy.began < began and Rule.LATER_GO not in self.without:
                    later = [c for c in bucket[at:] if c.began < began]
                    gone.update(later)
                    self.happened.add("replaces later ones")
            if copy.began < began and copy.seq > follows and Rule.UNSEEN_GO not in self.without:
                gone.add(copy)
                self.happened.add("replaces unseen ones")
        kept = tuple(copy for copy in bucket if copy not in gone)
        if gone and Rule.ONE_COMMIT in self.without and len(kept) < len(bucket):
            return state._replace(root=seq, bucket=kept)
        kept = (*kept, Copy(taken.line, seq, i, began, first))[-self.keep_there :]
        is_torn = state.is_torn or began > state.last_life > first
        return state._replace(root=seq, bucket=kept, last_life=began, is_torn=is_torn)

    def violation(self, state: State) -> str | None:
        bucket = state.bucket
        if len(bucket) > self.keep_there:
            return "the mirror keeps too many"
        for copy in bucket:
            if not bucket[-1].line.startswith(copy.line):
                return f"branches mix: {copy.line} and {bucket[-1].line}"
        if state.root and not bucket:
            return "the mirror lost the run"
        if state.is_torn:
            return "a run was taken over by a node that had not seen it"
        return None


def _with(state: State, i: int, node: Node) -> State:
    return state._replace(nodes=(*state.nodes[:i], node, *state.nodes[i + 1 :]))


def _noted(node: Node, taken: Taken) -> Node:
    disk = tuple(t._replace(lacking=False) if t == taken else t for t in node.disk)
    return node._replace(disk=disk)
