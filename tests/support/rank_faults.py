"""What each rank sees when one of them raises, dies, or hangs, wherever that happens.

``python -m tests.support.rank_faults`` runs all cases and prints, phase by phase, the table of
``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from casnap import NewStore, Store
from casnap.backends import LocalBackend
from tests.support.faults import CHUNK, assert_no_orphans, memory_folder
from tests.support.rank_cases import (
    RANKS,
    Case,
    Outcome,
    Place,
    app_state,
    assert_whole,
    do,
    suffer,
)
from tests.support.ranks import Pool, RankDied, World
from tests.support.yard import Seen, Yard, watch

# --- a case, from the start to the last look at the store -------------------------------------


class Result(NamedTuple):
    """What came of a case.

    Attributes:
        phase: In which phase the rank was hurt; empty if it was not, after so many calls.
        outcomes: What each rank saw; None for one that died.
        committed: Whether the snapshot is there.
    """

    phase: str
    outcomes: list[Outcome | None]
    committed: bool


def take_base(folder: str) -> None:
    do(Store(folder, create=NewStore(chunk_size=CHUNK)), "take", "base", app_state(0), 60)


def run_case(
    world: Callable[[int], World], template: Path, folder: Path, case: Case, timeout: float
) -> Result:
    """Run a case on a copy of a store with a snapshot; check all that must be true after it."""
    store = folder / "store"
    folder.mkdir()
    shutil.copytree(template, store)
    yard = Yard(folder / "yard")
    ranks = world(RANKS)
    outcomes = ranks.run(suffer, str(folder), case, timeout, expect_errors=True, timeout=300)
    phase = yard.text("struck")
    if case.kind == "kill" and phase:
        assert isinstance(outcomes[case.rank], RankDied), outcomes[case.rank]
        outcomes[case.rank] = None
        again = ranks.run(suffer_nothing, str(store), case.verb)
        assert all(seen.error == "" for seen in again), again
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, Outcome), outcome
        if outcome is not None and outcome.again is not None:
            assert outcome.again.error == "", f"{case}: {outcome.again}"
    committed = check_store(store, case)
    check_seen(case, phase, outcomes, committed, timeout)
    shutil.rmtree(folder)
    return Result(phase, outcomes, committed)


def suffer_nothing(path: str, verb: str) -> Seen:
    store = Store(LocalBackend(Path(path)))
    return watch(lambda: do(store, verb, "again", app_state(2), 60))


def check_store(path: Path, case: Case) -> bool:
    """Check that all that is there is whole, and all else can be collected."""
    store = Store(path, create=False)
    found = {snapshot.name: snapshot for snapshot in store.snapshots()}
    expected = {"base"} if case.verb == "restore" else {"base", "again"}
    assert found.keys() - {"new"} == expected
    for name, step in (("base", 0), ("new", 1), ("again", 2)):
        if name in found:
            assert_whole(found[name], step)
    store.gc(grace=0)
    assert_no_orphans(path)
    report = store.check(data=True)
    assert report.ok, report
    assert report.orphans == 0
    return "new" in found


CAUSES = {
    "raise": ("on purpose",),
    "kill": ("died",),
    "stop": ("did not answer within", "did not come within", "did not go on for"),
    "hang": ("did not answer within", "did not come within", "did not go on for"),
}


SILENT = ("stop", "hang")
"""The faults that others notice by waiting alone."""


def check_seen(
    case: Case, phase: str, outcomes: list[Outcome | None], committed: bool, timeout: float
) -> None:
    """Check what the survivors saw: who it was, why, and in time."""
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            continue
        seen = outcome.seen
        assert seen.seconds < SLACK + (timeout if case.kind in SILENT else 0), (
            f"{case}: rank {rank} needed {seen.seconds:.1f} s: {seen}"
        )
        if not phase:
            assert seen.error == "", f"{case}: rank {rank}: {seen}"
        if not seen.error:
            assert committed or case.verb == "restore", f"{case}: rank {rank} returned"
        elif rank != case.rank:
            assert any(cause in seen.text for cause in CAUSES[case.kind]), f"{case}: {seen}"
            assert f"rank {case.rank}" in seen.text, f"{case}: {seen}"
            assert seen.error in ("RankError", "BackendError"), f"{case}: {seen}"
            if seen.error == "RankError":
                assert seen.ranks == (case.rank,), f"{case}: {seen}"


SLACK = 30.0
"""Seconds that all may take beyond the timeout, on a machine that is busy."""


# --- all cases --------------------------------------------------------------------------------

TAKING = (
    "beginning a take",
    "sharing out the work",
    "hashing and writing",
    "assembling the manifest",
    "committing",
)
PHASES = {
    "take": TAKING,
    "async_take": TAKING,
    "restore": ("beginning a restore", "reading", "loading states"),
}
CALLS = {
    "take": ("write packs/*", "sync", "put_if_absent", "mark", "keep_copy"),
    "async_take": ("write packs/*", "sync", "put_if_absent", "mark", "keep_copy"),
    "restore": ("read_into",),
}


MOST = {"reading": 1, "loading": 1, "progress": 2}
"""How many places are tried of sequences that are long, or that the checks go on with."""


def sequences(verb: str, kind: str) -> Iterator[Place]:
    """Yield the first place of each sequence of places."""
    if kind != "hang":
        for phase in PHASES[verb]:
            yield Place("call", phase)
            yield Place("inside", phase)
    for call in CALLS[verb]:
        yield Place("before", call)
        if verb != "restore":
            yield Place("after", call)
    yield Place("reading")
    yield Place("progress")
    if verb == "restore":
        yield Place("loading")
    if kind in ("kill", "stop"):
        yield Place("end")


def all_results(
    world: Callable[[int], World],
    template: Path,
    folder: Path,
    timeout: float,
    *,
    every: int = 1,
    verbs: Sequence[str] = tuple(PHASES),
    kinds: Sequence[str] = tuple(CAUSES),
) -> Iterator[tuple[Case, Result]]:
    """Run all cases, or of each sequence of places only one of so many."""
    turn = itertools.count()
    for verb, kind, rank in itertools.product(verbs, kinds, (0, 1)):
        for place in sequences(verb, kind):
            most = MOST.get(place.how, 1000)
            for number in range(next(turn) % every % most, most, every):
                case = Case(verb, place._replace(number=number), kind, rank)
                result = run_case(world, template, folder / "case", case, timeout)
                if not result.phase:
                    break
                yield case, result


def saw(case: Case, result: Result) -> set[str]:
    """Return what the survivors saw, in words that are the same for all ranks."""
    texts = set()
    for rank, outcome in enumerate(result.outcomes):
        if outcome is None or rank == case.rank:
            continue
        text = outcome.seen.text.replace(f"rank {case.rank}", "rank *r*")
        text = re.sub(r"^the \w+ of '\w+': ", "", text)
        text = re.sub(r"within [\d.]+ s", "within *T* s", text)
        text = re.sub(r"for [\d.]+ s", "for *T* s", text)
        text = re.sub(r"\. When this rank looked.*", "", text)
        text = re.sub(r"\w+\([^)]*\) failed", "*call* failed", text)
        texts.add(text or "returned")
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Hurt ranks at all places, and print a table.")
    parser.add_argument("--timeout", type=float, default=2.0, help="what ranks wait for each other")
    parser.add_argument("--every", type=int, default=1, help="run only one case of so many")
    parser.add_argument("--verbs", nargs="*", default=list(PHASES))
    parser.add_argument("--kinds", nargs="*", default=list(CAUSES))
    options = parser.parse_args(arguments)
    rows: dict[tuple[str, str, str], list[tuple[Case, Result]]] = {}
    with memory_folder() as folder, Pool() as pool:
        os.environ["CASNAP_CACHE_DIR"] = str(folder / "cache")
        pool.world(RANKS).run(take_base, str(folder / "base"))
        for case, result in all_results(
            pool.world,
            folder / "base",
            folder,
            options.timeout,
            every=options.every,
            verbs=options.verbs,
            kinds=options.kinds,
        ):
            rows.setdefault((case.verb, result.phase, case.kind), []).append((case, result))
            print(case, saw(case, result), file=sys.stderr, flush=True)
    print("| | hurt while | how | cases | the survivors saw | longest | committed | lost |")
    print("|---|---|---|---|---|---|---|---|")
    for (verb, phase, kind), cases in rows.items():
        texts = sorted(set().union(*(saw(*one) for one in cases)))
        seconds = max(
            outcome.seen.seconds
            for case, result in cases
            for rank, outcome in enumerate(result.outcomes)
            if outcome is not None and rank != case.rank
        )
        committed = sum(result.committed for _, result in cases)
        print(
            f"| {verb} | {phase} | {kind} | {len(cases)} | {'; '.join(texts)} | {seconds:.1f} s "
            f"| {committed} | 0 |"
        )
    print(f"\n{sum(map(len, rows.values()))} cases")


if __name__ == "__main__":
    main()
