"""A plan says what a collection does: from data alone, and any run does what its dry run tells."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casnap import NewStore, Store
from casnap.format.records import PackId, Root, SegmentId, SegmentRef, pack_key
from casnap.storage.collecting.gc import GcReport
from casnap.storage.collecting.plan import DAY, Needs, Plan, Waiting, plan_collection
from casnap.storage.collecting.whole_marks import WholeMarks
from casnap.storage.lookup.index import IndexView, PackSet
from casnap.storage.lookup.index_cache import MemoryCache
from casnap.storage.packs.pack_writer import new_id
from tests.support.faults import CHUNK, elsewhere, files, take
from tests.support.garbage import assert_tidy

pytestmark = pytest.mark.usefixtures("collected_by_hand")
YEARS = 3652 * DAY
NEWEST = 20


def view_of(packs: dict[PackId, int | None], fence: int = 0, lost: bytes = b"") -> IndexView:
    """Return the view of a root with some packs, each with the number of what condemned it."""
    segments = {SegmentId(new_id(1)): frozenset([pack]) for pack in packs}
    condemned = {bytes(pack): seq for pack, seq in packs.items() if seq is not None}
    refs = tuple(SegmentRef(ident, 1, 0) for ident in segments)
    root = Root(NEWEST, bytes(16), fence=fence, segments=refs, condemned=condemned, lost=lost)
    named = PackSet(segments.values())
    return IndexView(root, segments, named, named.without(condemned), MemoryCache())


def packs(count: int, base: int = 1) -> list[PackId]:
    return [PackId(new_id(base)) for _ in range(count)]


def age_of(seq: int) -> float:
    """Return the age of a root, if one was put each hour."""
    return (NEWEST - seq) * 3600.0


# --- from data alone ---------------------------------------------------------------------------


def test_what_nobody_needs_is_condemned_and_waits() -> None:
    dead, sparse, needed = packs(3)
    needs = Needs(dead=frozenset([dead]), sparse={sparse: 5})
    view = view_of(dict.fromkeys([dead, sparse, needed]))
    plan = plan_collection(view, needs, {}, Waiting(grace=DAY))
    assert plan.condemned == {dead, sparse}
    assert plan.copied == {sparse: 5}
    assert plan.waiting == dict.fromkeys([dead, sparse], NEWEST + 1)
    assert (plan.freed, plan.fence, plan.deleted) == (frozenset(), 0, {})
    assert plan.changes_root
    at_once = plan_collection(view, needs, {}, Waiting(grace=0))
    assert at_once.freed == {dead, sparse}
    assert (at_once.waiting, at_once.fence) == ({}, NEWEST + 1)
    # The segments of these two go, and the third stays as it is.
    assert (at_once.merged_segments, len(at_once.deleted)) == (2, 4)


@pytest.mark.parametrize(
    ("waiting", "left"),
    [
        (Waiting(grace=4 * 3600.0, age_of=age_of), [18]),
        (Waiting(grace=2 * 3600.0, age_of=age_of), []),
        (Waiting(grace=DAY, age_of=age_of), [10, 16, 18]),
        (Waiting(grace=DAY, condemned_until=16), [18]),
        (Waiting(grace=0, announced_bases=lambda: [12]), [16, 18]),
        (Waiting(grace=0, announced_bases=lambda: [12, 3]), [10, 16, 18]),
        # By a clock that is behind, all is of the future, and counts as new.
        (Waiting(grace=3600.0, age_of=lambda seq: age_of(seq) - YEARS), [21, 21, 21]),
        (Waiting(grace=3600.0, age_of=lambda seq: age_of(seq) + YEARS), []),
    ],
)
def test_what_waits_and_what_is_freed(waiting: Waiting, left: list[int]) -> None:
    old = dict(zip(packs(3), [10, 16, 18], strict=True))
    plan = plan_collection(view_of(dict(old)), Needs(sparse={}), {}, waiting)
    assert sorted(plan.waiting.values()) == left
    assert plan.freed == old.keys() - plan.waiting.keys()
    assert {pack_key(pack) for pack in plan.freed} <= plan.deleted.keys()
    assert all(seq <= plan.fence for pack, seq in old.items() if pack in plan.freed)


def test_what_is_needed_again_is_rescued() -> None:
    """Whatever the grace: it is not freed by the root that rescues it."""
    first, second = packs(2)
    needs = Needs(sparse={}, rescued=frozenset([first]), found=frozenset([b"a" * 32]))
    view = view_of({first: 5, second: 5}, lost=b"a" * 32 + b"b" * 32)
    plan = plan_collection(view, needs, {}, Waiting(grace=0))
    assert (plan.rescued, plan.freed) == ({first}, {second})
    assert plan.waiting == {}
    assert plan.lost == b"b" * 32


@pytest.mark.parametrize(("base", "fence"), [(3, 5), (5, 21), (20, 21)])
def test_orphans_that_a_fence_has_passed_need_no_root(base: int, fence: int) -> None:
    (pack,) = packs(1, base)
    view = view_of(dict.fromkeys(packs(1)), fence=5)
    plan = plan_collection(view, Needs(sparse={}), {pack_key(pack): pack}, Waiting(grace=0))
    assert plan.orphans == {pack_key(pack): pack}
    assert (plan.fence, plan.changes_root) == (fence, fence > 5)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, set[PackId]]:
    """Return a plan of any store, by any clock, and the packs that are needed."""
    seqs = st.integers(1, NEWEST)
    states = draw(st.lists(st.none() | seqs, max_size=6))
    named = dict(zip(packs(len(states)), states, strict=True))
    needed = draw(st.sets(st.sampled_from(sorted(named)))) if named else set()
    view = view_of(dict(named), fence=draw(st.integers(0, NEWEST)))
    unnamed = [PackId(new_id(base)) for base in draw(st.lists(seqs, max_size=4))]
    ages = draw(st.lists(st.floats(-YEARS, YEARS), min_size=NEWEST + 1, max_size=NEWEST + 1))
    bases = draw(st.lists(seqs, max_size=2))
    waiting = Waiting(
        grace=draw(st.sampled_from([0.0, 3600.0, DAY])),
        condemned_until=draw(st.none() | st.integers(0, NEWEST + 5)),
        age_of=ages.__getitem__,
        announced_bases=lambda: bases,
    )
    live = set(view.live)
    needs = Needs(
        dead=frozenset(live - needed),
        sparse={},
        rescued=frozenset(needed - live),
    )
    plan = plan_collection(view, needs, {pack_key(p): p for p in unnamed}, waiting)
    root = view.root
    assert root.fence <= plan.fence <= max(root.fence, min([NEWEST + 1, *bases]))
    return plan, needed


@given(plans())
def test_no_clock_frees_what_is_needed(drawn: tuple[Plan, set[PackId]]) -> None:
    plan, needed = drawn
    assert not needed & (plan.condemned | plan.freed | plan.waiting.keys())
    assert not needed & set(plan.deleted.values())
    assert set(plan.view.packs) == needed | plan.freed | plan.waiting.keys()
    assert all(int.from_bytes(ident[:6], "big") < plan.fence for ident in plan.deleted.values())
    assert plan.freed or plan.orphans or plan.fence == plan.view.root.fence


# --- a dry run and any other ------------------------------------------------------------------


def told(report: GcReport) -> dict[str, object]:
    """Return what a dry run tells too."""
    fields = asdict(report)
    for name in ("dry_run", "seconds", "processor_seconds", "warnings", "waiting_until"):
        del fields[name]
    return fields


@pytest.mark.parametrize("seed", range(4))
def test_a_dry_run_tells_what_is_then_done(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    path = tmp_path / "store"
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    for step in range(1, 16):
        take(store, step)
        if pick.random() < 0.7:
            store.delete(pick.choice(store.snapshots()).name)
        if pick.random() < 0.5:
            grace = pick.choice([0, 0, 3600])
            before = files(path)
            plan = Store(path).gc(grace=grace, repack=0, recode_after=None, dry_run=True)
            assert files(path) == before
            assert told(plan) == told(store.gc(grace=grace, repack=0, recode_after=None))
    store.gc(grace=0)
    assert_tidy(path)


def test_a_dry_run_waits_for_takes_under_way_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(2):
        take(store, step)
    repository = store._view.repository
    with repository.backend.announced(repository.newest().seq):
        store.delete("step_1")
        plan = store.gc(grace=0, dry_run=True)
        assert (plan.condemned_packs, plan.deleted_packs) == (plan.waiting_packs, 0)
        assert told(plan) == told(store.gc(grace=0))
    assert store.gc(grace=0, dry_run=True).deleted_packs == plan.waiting_packs


def test_a_dry_run_spares_what_takes_may_move(tmp_path: Path) -> None:
    """The fence has passed them already; they move their files, if these are still there."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(4):
        take(store, step)
    store.delete("step_1")
    store.gc(grace=0)
    store.delete("step_2")
    backend = store._view.repository.backend
    for base in (1, 2, 3):
        backend.write(pack_key(PackId(new_id(base))), bytes(1000))
    with backend.announced(2, at_once=True):
        plan = store.gc(grace=0, repack=0, dry_run=True)
        assert plan.deleted_packs < 3
        assert told(plan) == told(store.gc(grace=0, repack=0))
    assert store.gc(grace=0, dry_run=True).deleted_packs >= 2


def test_a_dry_run_does_not_take_for_garbage_what_is_committed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(3):
        take(store, step)
    store.delete("step_1")
    store.gc(grace=0)
    mark = WholeMarks.__init__

    def mark_slowly(*arguments: Any) -> None:
        mark(*arguments)
        elsewhere(lambda: take(store.uri, 9))()

    monkeypatch.setattr(WholeMarks, "__init__", mark_slowly)
    plan = store.gc(grace=0, dry_run=True)
    assert (plan.deleted_packs, plan.freed_bytes) == (0, 0)


def test_a_dry_run_tells_which_snapshots_are_recoded(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(4):
        take(store, step)
    assert store.gc(recode_after=3, dry_run=True).recoded_snapshots == 1
    assert store.gc(recode_after=3).recoded_snapshots == 1
    assert store.gc(recode_after=3, dry_run=True).recoded_snapshots == 0
