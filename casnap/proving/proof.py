"""Proving a resume: two unbroken runs, and one that is killed and started again, compared."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from casnap import Diff, Store
from casnap.errors import CasnapError
from casnap.extending import amount, is_folder, is_taken, paths_in
from casnap.proving.attempts import Attempt, AttemptError, Held
from casnap.proving.causes import Cause, causes_of, environment_cause
from casnap.proving.records import records_in

PLACE = "{store}"
"""This text in the arguments of a command stands for the folder of the run."""
_TRIES = 3
_OF_RANK = "one rank's own, and the run may have gone on with other ranks"
_OF_NOISE = (
    "two unbroken runs differ in it, as in a time or a folder: seed it, if the training draws it"
)


@dataclass(frozen=True)
class Options:
    """How to prove a resume.

    Attributes:
        command: The command and its arguments, of which one or more contain ``{store}``.
        resume_command: The command after a kill, if it is another one.
        environment: The environment that the commands run in.
        room: The folder for all runs. It must be new, or empty.
        kills: How often the run is killed.
        snapshots: After how many snapshots each run is ended; None to let it end by itself.
        seed: The seed of the moments of the kills.
        timeout: Seconds that each attempt may take.
        say: Called with a line about what has happened.
        held: Holds signals back while processes run, so that they are killed before a signal
            raises.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    room: Path
    resume_command: Sequence[str] = ()
    kills: int = 3
    snapshots: int | None = None
    seed: int = 0
    timeout: float = 3600.0
    say: Callable[[str], None] = lambda line: None
    held: Held = lambda: nullcontext(lambda: False)


@dataclass(frozen=True)
class Run:
    """A run, with what it has stored.

    Attributes:
        name: Its folder in the store.
        names: The names of its snapshots, in the order in which they were taken, also of those that
            a retention has deleted since.
        seconds: How long all its attempts took.
        kills: The newest snapshot at each kill. Names that are taken more than once do not count.
        began_again: The newest snapshot at a kill after which the run took an older one anew; "" if
            it never did.
        replaced: The names that it took more than once, such as that of a last snapshot.
        failure: How an attempt after a kill failed, or that it did not end; "" if none did.
    """

    name: str
    names: list[str]
    seconds: float
    kills: list[str] = field(default_factory=list)
    began_again: str = ""
    replaced: frozenset[str] = frozenset()
    failure: str = ""


class LeftOut(NamedTuple):
    """A difference between two runs that says nothing about resuming, so a proof ignores it.

    Attributes:
        role: Its role in a training, such as ``weights``.
        path: Its path; for an entry that one rank keeps for itself, only the rank and the key.
        why: Why it is left out, in words.
    """

    role: str
    path: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """How the snapshots of two runs differ, matched by name.

    Attributes:
        compared: How many snapshots were compared.
        differing: The names of the snapshots that differ, in order.
        lacking: The names of snapshots that only one of the runs has. If the proof has ended the
            runs, only snapshots that the second run lacks count.
        paths: All paths that differ, in any snapshot.
        roles: The roles of these paths in a training.
        first: What differs in the first snapshot that differs; None if none does.
        left_out: The differences that do not count.
    """

    compared: int
    differing: list[str]
    lacking: list[str]
    paths: frozenset[str]
    roles: frozenset[str]
    first: Diff | None = None
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both runs have stored the same, and anything at all."""
        return self.compared > 0 and not self.differing and not self.lacking


@dataclass(frozen=True)
class Proof:
    """The result of a proof: how its runs compare.

    Attributes:
        unbroken: The run that nobody killed.
        again: The second run that nobody killed.
        killed: The run that was killed and started again.
        noise: How the two unbroken runs differ.
        result: How the killed run differs from ``unbroken``, apart from the paths in ``noise``.
        causes: What the difference usually means.
        seed: The seed of the moments of the kills.
        hints: What the app state leaves out, as warnings of the first run say.
    """

    unbroken: Run
    again: Run
    killed: Run
    noise: Comparison
    result: Comparison
    causes: list[Cause]
    seed: int
    hints: list[str]

    @property
    def is_deterministic(self) -> bool:
        """Whether two unbroken runs have the same weights and moments."""
        is_all_there = self.noise.compared > 0 and not self.noise.lacking
        return is_all_there and not self.noise.roles & {"weights", "moments"}

    @property
    def ok(self) -> bool:
        """Whether the killed run has stored what the unbroken one has."""
        has_resumed = not self.killed.began_again and not self.killed.failure
        return self.is_deterministic and self.result.equal and has_resumed


def prove(options: Options) -> Proof:
    """Run a command whole, whole again, and killed; compare what the runs have stored.

    Raises:
        CasnapError: The folder is not new, the command does not say where to store, takes too few
            snapshots, fails by itself before a kill, or does not end.
    """
    check_command(options.command, options.resume_command)
    store = make_room(options.room)
    runs = _Runs(options, store)
    unbroken = runs.unbroken("unbroken")
    options.say(f"unbroken: {amount(len(unbroken.names), 'snapshot')} in {unbroken.seconds:.1f} s")
    again = runs.unbroken("again")
    ended_alone = options.snapshots is None
    noise = _compared(store, unbroken, again, ended_alone=ended_alone)
    others = ", ".join(sorted(noise.roles)) or "its snapshots"
    options.say(f"again: {'equal' if noise.equal else f'differs in {others}'}")

    def compared(killed: Run) -> Comparison:
        return _compared(
            store,
            unbroken,
            killed,
            noise.paths,
            ended_alone=ended_alone and not killed.failure,
            only_global=bool(options.resume_command),
        )

    killed = runs.killed("killed", unbroken, lambda run: compared(run).equal)
    kills = amount(len(killed.kills), "kill")
    options.say(f"killed: {amount(len(killed.names), 'snapshot')}, after {kills}")
    result = compared(killed)
    proof = Proof(unbroken, again, killed, noise, result, [], options.seed, runs.hints("unbroken"))
    return replace(proof, causes=_causes(store, proof))


def check_command(command: Sequence[str], resume_command: Sequence[str] = ()) -> None:
    """Check that each command exists, and has ``{store}`` in an argument.

    Raises:
        CasnapError: A command does not exist, or has no ``{store}``.
    """
    for each in filter(None, (command, resume_command)):
        if shutil.which(each[0]) is None:
            raise CasnapError(f"{each[0]} cannot be started: there is no such program")
        if not any(PLACE in argument for argument in each):
            raise CasnapError(
                f"no argument of `{' '.join(each)}` has {PLACE}: write it where the command takes "
                "the folder, or the path of the store, for its snapshots"
            )


def make_room(room: Path) -> Store:
    """Make the store that all runs share, in a folder that is new or empty.

    Raises:
        CasnapError: The folder is not empty, is no folder, or lies in a store.
    """
    if is_taken(room) and (not is_folder(room) or any(paths_in(room))):
        raise CasnapError(
            f"{room} is not new: a proof runs in a folder of its own, and touches no other store"
        )
    store = Store(room)
    if store.prefix:
        raise CasnapError(
            f"{room} lies in a store, {store.whole().uri}: a proof makes a store of its own, and "
            "touches no other one; name a folder elsewhere, by --room or TMPDIR"
        )
    return store.make()


def remove_room(room: Path) -> None:
    """Remove the folder of a proof."""
    shutil.rmtree(room, ignore_errors=True)


# --- the runs -----------------------------------------------------------------------------------


class _Watch:
    """Notes the snapshots of a run while it runs, since a retention may delete some."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self.seen: dict[str, str] = {}
        self.replaced = set[str]()
        self._first = self._last = 0.0

    @property
    def gap(self) -> float:
        """The seconds between two snapshots, on average."""
        return (self._last - self._first) / max(1, len(self.seen) - 1)

    def look(self) -> int:
        """Note the snapshots that are there now; return how many were noted so far."""
        before = len(self.seen)
        for snapshot in self._store.snapshots(self._run):
            name, commit = snapshot.name.removeprefix(f"{self._run}/"), snapshot.commit_id
            if self.seen.setdefault(name, commit) != commit:
                self.seen[name] = commit
                self.replaced.add(name)
        if len(self.seen) > before:
            self._last = time.monotonic()
            self._first = self._first or self._last
        return len(self.seen)


class _Runs:
    """Makes the runs of a proof."""

    def __init__(self, options: Options, store: Store) -> None:
        self._options = options
        self._store = store
        self._random = random.Random(options.seed)
        self._gap = 0.0

    def unbroken(self, name: str) -> Run:
        """Run the command to its end, or until it has taken enough snapshots.

        Raises:
            AttemptError: The run fails, does not end, or takes fewer than two snapshots.
        """
        watch, began = _Watch(self._store, name), time.monotonic()
        most = self._options.snapshots
        self._attempt(name).watch(lambda: watch.look() >= (most or 1 << 62), self._options.timeout)
        if watch.look() < 2:
            found = amount(len(watch.seen), "snapshot")
            raise AttemptError(
                f"the run took {found} below {self._options.room / name}; a proof needs two or "
                f"more. Does it store where {PLACE} stands? Let it take some more often. All that "
                f"it has printed is in {self._log(name)}"
            )
        self._gap = watch.gap
        seconds, replaced = time.monotonic() - began, frozenset(watch.replaced)
        return Run(name, list(watch.seen)[:most], seconds, replaced=replaced)

    def killed(self, name: str, unbroken: Run, is_equal: Callable[[Run], bool]) -> Run:
        """Run the command, kill it at random moments, and start it again until it ends.

        A run may end before its last kill. Then faults that only a late kill shows stay hidden, so
        another run is made, unless this one differs already.

        Args:
            name: Its folder in the store.
            unbroken: The run that nobody killed.
            is_equal: Whether a run has stored what the unbroken one has.

        Raises:
            CasnapError: The run ended before it could be killed, again and again.
        """
        found: Run | None = None
        for number in range(_TRIES):
            is_last = number == _TRIES - 1
            run, was_late = self._killed(f"{name}{number or ''}", unbroken, is_last=is_last)
            if run.kills:
                found = run
                if was_late or run.failure or run.began_again or not is_equal(run):
                    break
        if found is not None:
            return found
        raise CasnapError(
            "the run ended before it could be killed: it takes its last snapshot too soon after "
            "its first; let it run longer, or take snapshots more often"
        )

    def _killed(self, name: str, unbroken: Run, *, is_last: bool) -> tuple[Run, bool]:
        """Make a killed run; return it, and whether a kill came late enough."""
        options, watch, began = self._options, _Watch(self._store, name), time.monotonic()
        count = len(unbroken.names)
        once = [n for n in unbroken.names if n not in unbroken.replaced] or unbroken.names
        # A run that is killed as it takes the first one may not see that one, and begin again.
        begun = unbroken.names.index(once[:2][-1]) + 1
        aims = range(min(begun, count - 1), count)
        targets = self._targets(aims)
        gap = 0.0 if is_last else self._gap
        kills, began_again, failure, reached = list[str](), "", "", 0
        while True:
            at_start = watch.look()
            target = targets[len(kills)] if len(kills) < len(targets) else _Target(0, 0.0)
            aim = max(target.after, at_start + bool(kills)) if target.after else 0
            delay = self._random.uniform(0, gap) * target.lateness
            moment = _Moment(watch, aim, delay, options.snapshots)
            command = options.resume_command if kills and options.resume_command else None
            try:
                was_killed = self._attempt(name, command).watch(moment.look, options.timeout)
            except AttemptError as e:
                if not kills:
                    raise
                was_killed, failure = False, str(e)
            watch.look()
            # A trainer may not see the newest one either, if the kill cut off what it does after.
            unseen = {*kills[-1:]} - {once[0]}
            if kills and watch.replaced - unbroken.replaced - unseen and not began_again:
                began_again = kills[-1]
            watch.replaced.clear()
            if not was_killed or moment.is_complete:
                break
            # A retention may delete some before they are seen: the last one is the end as well.
            is_at_end = len(watch.seen) >= count or once[-1] in watch.seen
            if is_at_end and not unbroken.replaced:
                break  # nothing is left that a resume could get wrong
            kills.append(next((n for n in reversed(watch.seen) if n not in unbroken.replaced), ""))
            reached = len(watch.seen)
            options.say(f"killed after {kills[-1]}")
        seconds = time.monotonic() - began
        run = Run(name, list(watch.seen), seconds, kills, began_again, failure=failure)
        return run, len(targets) == 1 or reached >= aims[len(aims) // 2]

    def _targets(self, aims: range) -> list[_Target]:
        """Choose when to kill a run: after how many snapshots, in order.

        Each of several equal parts of the run gets a kill, since some faults show only after an
        early kill, or only after a late one. One more kill follows the next snapshot after one of
        these. It comes as soon as that snapshot exists, since the other kills might all come when
        nothing is under way, as between two accumulations of gradients.
        """
        count = min(self._options.kills, len(aims))
        parts = max(1, count - 1)
        cuts = [len(aims) * number // parts for number in range(parts + 1)]
        chosen = {self._random.choice(aims[a:b]) for a, b in pairwise(cuts)}
        neighbor = 0
        if count > 1:
            one = self._random.choice(sorted(chosen))
            neighbor = one + 1 if one + 1 in aims else one
            chosen |= {neighbor, neighbor - 1}
        others = [aim for aim in aims if aim not in chosen]
        chosen.update(self._random.sample(others, count - len(chosen)))
        return [_Target(each, float(each != neighbor)) for each in sorted(chosen)]

    def hints(self, name: str) -> list[str]:
        """Return what the app state leaves out, as warnings in the log of a run say."""
        from casnap.extending import LEFT_OUT  # it imports torch

        with self._log(name).open(errors="replace") as lines:
            found = (line.rstrip("\n").partition(LEFT_OUT) for line in lines)
            return list(dict.fromkeys(hint for _, is_hint, hint in found if is_hint))

    def _attempt(self, name: str, command: Sequence[str] | None = None) -> Attempt:
        place = str(self._options.room / name)
        filled = [each.replace(PLACE, place) for each in command or self._options.command]
        return Attempt(filled, self._options.environment, self._log(name), self._options.held)

    def _log(self, name: str) -> Path:
        return self._options.room / "logs" / f"{name}.log"


class _Target(NamedTuple):
    """When to kill a run.

    Attributes:
        after: After how many snapshots; 0 for not at all.
        lateness: The longest further wait, as a share of the time between two snapshots.
    """

    after: int
    lateness: float


class _Moment:
    """The moment at which a run is killed: some time after it has taken some snapshots.

    Args:
        watch: Looks at the snapshots of the run.
        aim: After how many snapshots to kill; 0 for not at all.
        delay: How many seconds after these snapshots to kill.
        most: After how many snapshots the run is complete; None if it ends by itself.
    """

    def __init__(self, watch: _Watch, aim: int, delay: float, most: int | None) -> None:
        self._watch = watch
        self._aim = aim
        self._delay = delay
        self._most = most
        self._due = float("inf")
        self.is_complete = False

    def look(self) -> bool:
        """Whether to kill the run now: it has enough snapshots, or the moment has come."""
        count = self._watch.look()
        if self._most is not None and count >= self._most:
            self.is_complete = True
            return True
        if self._aim and count >= self._aim:
            self._due = min(self._due, time.monotonic() + self._delay)
        return time.monotonic() >= self._due


# --- comparing ----------------------------------------------------------------------------------


def _compared(
    store: Store,
    first: Run,
    second: Run,
    ignored: frozenset[str] = frozenset(),
    *,
    ended_alone: bool,
    only_global: bool = False,
) -> Comparison:
    """Compare the snapshots of two runs.

    Args:
        store: The store that has both.
        first: The run to compare with.
        second: The run that is compared.
        ignored: Paths that are not compared.
        ended_alone: Whether the runs ended by themselves.
        only_global: Whether to leave out entries that single ranks keep for themselves.
    """
    a, b = ([n for n in run.names if f"{run.name}/{n}" in store] for run in (first, second))
    # What a run takes again under one name is that of its end.
    both = sorted((n for n in a if n in set(b)), key=lambda name: name in first.replaced)
    if ended_alone:
        lacking = [n for n in dict.fromkeys([*a, *b]) if n not in both]
    else:
        # A run that was ended may have taken one more, or a retention have deleted one less.
        lacking = [n for n in first.names if n not in second.names]
        # It may also have been ended before it took one anew under the same name.
        both = [name for name in both if name not in first.replaced]

    kept, left_out = dict[str, Diff](), dict[LeftOut, None]()
    for name in both:
        names = [f"{run.name}/{name}" for run in (first, second)]
        diff = store.diff(*names)
        records = records_in(diff, store, *names)
        kept[name] = Diff([])
        for change in diff.changes:
            path, why = change.path, records.get(change.path, "")
            if only_global and path.partition("/")[0].isdigit():
                path, why = _own_key(path), _OF_RANK
            elif path in ignored:
                why = _OF_NOISE
            if why:
                left_out[LeftOut(change.role, path, why)] = None
            else:
                kept[name].changes.append(change)
    differing = [name for name in both if kept[name].changes]
    found = [change for name in differing for change in kept[name].changes]
    shown = None
    if differing:
        names = [f"{run.name}/{differing[0]}" for run in (first, second)]
        paths = {change.path for change in kept[differing[0]].changes}
        measured = store.diff(*names, elements=True).changes
        shown = Diff([change for change in measured if change.path in paths])
    return Comparison(
        len(both),
        differing,
        lacking,
        frozenset(change.path for change in found),
        frozenset(change.role for change in found),
        shown,
        list(left_out),
    )


def _own_key(path: str) -> str:
    return "/".join(path.split("/")[:2])


def _causes(store: Store, proof: Proof) -> list[Cause]:
    causes = list[Cause]()
    if proof.killed.began_again:
        causes.append(
            Cause(
                "run",
                f"after the kill at {proof.killed.began_again} the run took older snapshots anew: "
                "it did not resume",
            )
        )
    if not proof.is_deterministic:
        causes.append(
            Cause(
                "run",
                "two unbroken runs differ too, so a resume cannot be told from chance: fix the "
                "seeds, PYTHONHASHSEED and the order of sets and files; see "
                "torch.use_deterministic_algorithms",
            )
        )
    if not proof.result.compared:
        causes.append(
            Cause(
                "run",
                "no name of a snapshot is in both runs: let the names follow from the step, and "
                "the retention keep more snapshots",
            )
        )
    elif proof.result.lacking and not proof.killed.failure:
        causes.append(
            Cause(
                "run",
                f"only one of the runs has {', '.join(proof.result.lacking[:4])}: it ended too "
                "soon or too late after a kill, or went on with another step",
            )
        )
    if proof.result.first is not None:
        name = proof.result.differing[0]
        before, after = (store[f"{run.name}/{name}"] for run in (proof.unbroken, proof.killed))
        causes += environment_cause(before.environment, after.environment)
        roles = {path: handle.role for path, handle in before.handles().items()}
        of_ranks = (each.path for each in proof.result.left_out if each.why == _OF_RANK)
        own_keys = sorted({path.partition("/")[2] for path in of_ranks})
        causes += causes_of(proof.result.first, roles, own_keys)
    # Last: a state that is restored wrongly may fail to be restored the next time.
    if proof.killed.failure:
        kill = proof.killed.kills[-1]
        causes.append(Cause("run", f"after the kill at {kill} {proof.killed.failure}"))
    return causes
