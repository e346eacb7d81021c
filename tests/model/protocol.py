"""Takes, deletes, collectors and readers on one store, with every interleaving of their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.model.collector import Collector
from tests.model.processes import ENDS, Delete, Reader, Take, Turn
from tests.model.records import Id, Process, Root, State, contents
from tests.model.rules import Rule

Spec = Take | Delete | Collector | Reader


@dataclass
class CommitModel:
    """A scenario: a store as it is at first, and the processes that run on it.

    Args:
        root: The first root; the files that it names exist.
        specs: Who runs, by name.
        roots: No root beyond this number is put.
        dropped: The rules that no process keeps.
        lost_answers: Whether the answer to a put may get lost.
        late_puts: Whether a put may come into force after its process stopped waiting for it.
        reduced: Whether a process whose draft has lost its number is seen as one that knows that.
            It could change nothing before it finds out, so nothing is missed; but a rule that is
            about such drafts cannot be dropped then, and traces read worse.
    """

    root: Root
    specs: Mapping[str, Spec]
    roots: int
    dropped: frozenset[Rule] = frozenset()
    lost_answers: bool = False
    late_puts: bool = False
    caches: bool = False
    """Whether a look may show any root since the last look of that process."""
    reduced: bool = False
    happened: set[str] = field(default_factory=set)
    """What came to pass somewhere, to show that a scenario is not empty."""

    def __post_init__(self) -> None:
        self._order = tuple(self.specs.items())

    def initial(self) -> State:
        return State(self.root, contents(self.root).files, tuple(Process() for _ in self.specs))

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for by, root in state.pending:
            changes = self.landed(state, root)
            stands = state.stands | {(by, root)}
            said = f"the root that {by} sent comes into force: {root}"
            yield said, self.settled(state._replace(stands=stands, **changes))
        for index, (name, spec) in enumerate(self._order):
            seen = state.processes[index].seen
            for shown in (state.newest, *(root for root in state.past if root.seq >= seen)):
                for said, after in spec.steps(Turn(self, state, index, name, shown)):
                    if after.newest.seq <= self.roots:
                        yield said, after

    def landed(self, state: State, root: Root) -> dict[str, Any]:
        """Return what changes when a root comes into force."""
        gone = {s.commit for s in state.newest.snapshots} - {s.commit for s in root.snapshots}
        back = {s.commit for s in root.snapshots} - {s.commit for s in state.newest.snapshots}
        removed = (state.removed | gone) - back
        changes = {"newest": root, "removed": removed.intersection(self.specs)}
        return {**changes, "past": (*state.past, state.newest)} if self.caches else changes

    def settled(self, state: State) -> State:
        """Forget what can make no difference any more."""
        newest = state.newest
        if state.pending:
            pending = frozenset(p for p in state.pending if p[1].seq > newest.seq)
            state = state._replace(pending=pending)
        if self.reduced:
            state = self._without_stale_drafts(state)
        if state.past:
            least = min((p.seen for p in state.processes if p.at not in ENDS), default=newest.seq)
            state = state._replace(past=tuple(root for root in state.past if root.seq >= least))
        unknown = state.files - contents(newest).files
        for process in state.processes:
            if not unknown:
                return state
            unknown -= process.files()
        for _, root in state.pending:
            unknown -= contents(root).files
        return state._replace(files=state.files - unknown) if unknown else state

    def _without_stale_drafts(self, state: State) -> State:
        for index, me in enumerate(state.processes):
            if me.draft is None or me.draft.seq > state.newest.seq or me.at == "doubt":
                continue
            name, spec = self._order[index]
            if all(by != name for by, _ in state.stands) and not isinstance(spec, Reader):
                processes = list(state.processes)
                retried = spec.retried(Turn(self, state, index, name))
                seen = me.draft.seq if self.caches else 0
                processes[index] = retried._replace(seen=seen)
                state = state._replace(processes=tuple(processes))
        return state

    # --- what has to hold ---------------------------------------------------------------------

    def violation(self, state: State) -> str | None:
        """Return the invariant that does not hold, and what it fails for."""
        return (
            self._not_durable(state.newest, state.files)
            or self._not_believable(state)
            or next(
                (
                    f"{name} fails to read what is there"
                    for name, p in self._named(state)
                    if p.at == "failed" and isinstance(self.specs[name], Reader)
                ),
                None,
            )
        )

    def _named(self, state: State) -> Iterable[tuple[str, Process]]:
        return zip(self.specs, state.processes, strict=True)

    def _not_durable(self, root: Root, files: frozenset[Id]) -> str | None:
        c = contents(root)
        readable = c.readable(c.live & files)
        for digest in c.needed:
            if digest not in readable:
                return f"I1: root {root.seq} needs {digest}, which is in no live pack that exists"
        if not c.files <= files:
            return f"I2: root {root.seq} names {min(c.files - files)}, which does not exist"
        return None

    def _not_believable(self, state: State) -> str | None:
        there = {s.commit for s in state.newest.snapshots}
        for name, process in self._named(state):
            spec = self.specs[name]
            if process.at == "failed" and self.caches:
                return f"L2: {name} takes for damage what it does not see yet"
            if process.at == "fenced" and isinstance(spec, Take) and spec.announces:
                return f"L1: {name} is fenced, which had announced itself"
            if process.at != "done":
                continue
            lost = name not in there and name not in state.removed
            if isinstance(spec, Take) and not (spec.copies or spec.recodes) and lost:
                return f"I3: {name} believes in a commit that is not in root {state.newest.seq}"
            if isinstance(spec, Delete) and spec.commit in there and not spec.keeps:
                return f"I3: {name} believes that it deleted {spec.commit}, which is there"
        return None
