"""Garbage is collected, and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casnap import Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    CasnapError,
    DamagedError,
    FencedError,
    NotAStoreError,
    SnapshotNotFoundError,
    StoreError,
    UnsupportedFormatError,
)
from casnap.format import CONFIG_KEY, pack_key, segment_key
from casnap.objects import Objects
from casnap.testing import Fault, FaultyBackend, flip, lose_answer, open_store
from tests.cli_calls import document, failure, invoke
from tests.faults import (
    CHUNK,
    app_state,
    assert_holds,
    assert_store,
    backend_faults,
    files,
    in_child,
    interrupt,
    system_faults,
    take,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def stored(path: Path) -> int:
    """Return the bytes of packs and segments."""
    return sum((path / f).stat().st_size for f in files(path) if f.startswith(("packs", "index")))


def assert_tidy(path: Path) -> None:
    """Check that no file is there that the newest root does not name, and none is missing."""
    view = Objects(LocalBackend(path)).view()
    named = {*map(pack_key, view.packs), *map(segment_key, view.segments)}
    assert {f for f in files(path) if f.startswith(("packs/", "index/", "tmp/"))} == named


def test_what_only_a_deleted_snapshot_needs_is_freed(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    store.gc(grace=0)
    alone = stored(path)
    for step in range(1, 6):
        take(store, step)
    for step in range(1, 6):
        store.delete(f"step_{step}")
    report = store.gc(grace=0)
    assert report.snapshots == 1
    assert report.condemned_packs > 0
    assert report.deleted_packs == report.condemned_packs
    assert report.freed_bytes > 5 * 80_000
    # The table and the manifest may be packed differently.
    assert abs(stored(path) - alone) < 10_000
    assert_tidy(path)
    assert_store(path, {0})


def test_nothing_is_freed_before_the_grace_is_over(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    before = files(path, "packs")
    first = store.gc(grace=timedelta(hours=1))
    assert first.condemned_packs
    assert (first.waiting_packs, first.deleted_packs) == (first.condemned_packs, 0)
    second = store.gc(grace=3600.0)
    assert (second.condemned_packs, second.deleted_packs) == (0, 0)
    assert second.waiting_bytes == first.condemned_bytes
    assert before <= files(path, "packs")
    third = store.gc(grace=0)
    assert third.deleted_packs == first.condemned_packs
    assert_tidy(path)
    assert_store(path, {0})


def test_a_deleted_snapshot_can_be_read_until_the_grace_is_over(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    reader = take(store, 1)
    store.delete("step_1")
    store.gc()
    assert_holds(reader, 1)
    store.gc(grace=0)
    with pytest.raises(SnapshotNotFoundError, match=r"step_1.*deleted.*collected"):
        reader.restore(app_state(0))
    with pytest.raises(SnapshotNotFoundError, match=r"step_1.*deleted.*collected"):
        reader.read_object("0/state/weight")


def test_what_is_condemned_is_taken_anew_and_then_kept(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    store.gc()
    again = take(store, 1)
    assert again.stats.new_bytes > 80_000
    store.gc(grace=0)
    assert_store(path, {0, 1})
    assert_tidy(path)


def test_a_take_takes_back_what_was_condemned_after_it_began(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    other = Store(path)

    def collect() -> None:
        if not done:
            done.append(other.delete("step_1"))
            other.gc()

    done: list[Any] = []
    with backend_faults(0, collect, names=["put_if_absent"]):
        snapshot = store.take(app_state(1), "again", metadata={"step": 1})
    assert snapshot.stats.new_bytes < 40_000
    assert not set(store.objects.newest().condemned) & {p.pack for p in places_of(store, snapshot)}
    store.gc(grace=0)
    assert_holds(snapshot, 1)
    assert_tidy(path)


def places_of(store: Store, snapshot: Snapshot) -> list[Any]:
    view = store.objects.view()
    contents = snapshot.contents
    digests = [d for path, e in contents.entries() for d, _ in contents.chunks(path, e)]
    return [p for p in store.objects.index.find(view, digests) if p is not None]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_take_that_the_fence_has_passed_goes_on(path: Path, asynchronous: bool) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    other = Store(path)

    def collect() -> None:
        if not done:
            done.append(other.delete("step_1"))
            # Deletes the packs that the take has written, which no root names.
            done.append(other.gc(grace=0))

    done: list[Any] = []
    with backend_faults(0, collect, names=["put_if_absent"]):
        if asynchronous:
            pending = store.async_take(app_state(2), "step_2", metadata={"step": 2})
            # Its packs were deleted before they could be moved, and the state is gone.
            with pytest.raises(FencedError, match="take again"):
                pending.wait()
            take(store, 2)
        else:
            take(store, 2)
    assert done[1].fence is not None
    assert_store(path, {0, 2})
    store.gc(grace=0)
    assert_store(path, {0, 2})
    assert_tidy(path)


def test_a_fenced_async_take_moves_its_packs(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    other = Store(path)
    done: list[Any] = []

    def fence() -> None:
        if not done:
            done.append(other.delete("step_1"))
            # It raises the fence, and dies before it deletes what the take has written.
            with (
                backend_faults(0, interrupt, names=["delete"], lasting=True),
                pytest.raises(KeyboardInterrupt),
            ):
                other.gc(grace=0)
            done.append(other.objects.newest().fence)

    with backend_faults(0, fence, names=["put_if_absent"]):
        snapshot = store.async_take(app_state(2), "step_2", metadata={"step": 2}).wait()
    assert done[1] > 2
    assert_holds(snapshot, 2)
    store.gc(grace=0)
    assert_store(path, {0, 2})
    assert_tidy(path)


def test_packs_that_are_mostly_dead_are_copied(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    weights = torch.randn(100 * CHUNK // 4)
    store.take({"m": StateDict(w=weights)}, "whole")
    store.take({"m": StateDict(w=weights[: 10 * CHUNK // 4].clone())}, "part")
    tree = store["part"].contents.manifest.shared
    store.delete("whole")
    assert store.gc(grace=0, repack=0.0).repacked_packs == 0
    assert stored(path) > 100 * CHUNK
    plan = store.gc(grace=0, dry_run=True)
    assert plan.repacked_packs > 0
    report = store.gc(grace=0)
    assert report.repacked_packs == plan.repacked_packs
    assert report.copied_bytes == plan.copied_bytes
    assert 10 * CHUNK < stored(path) < 12 * CHUNK
    assert store["part"].contents.manifest.shared == tree
    state = {"m": StateDict(w=torch.zeros(10 * CHUNK // 4))}
    store["part"].restore(state)
    assert torch.equal(state["m"]["w"], weights[: 10 * CHUNK // 4])
    assert_tidy(path)
    assert store.gc(grace=0).repacked_packs == 0


def test_compressed_chunks_are_repacked_compressed(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK, compress=True)
    weights = torch.randint(0, 4, (100 * CHUNK // 4,), dtype=torch.int32)
    store.take({"m": StateDict(w=weights)}, "whole")
    store.take({"m": StateDict(w=weights[: 10 * CHUNK // 4].clone())}, "part")
    store.delete("whole")
    report = Store(path).gc(grace=0)
    assert report.repacked_packs
    assert stored(path) < 3 * CHUNK
    state = {"m": StateDict(w=torch.zeros(10 * CHUNK // 4, dtype=weights.dtype))}
    store["part"].restore(state)
    assert torch.equal(state["m"]["w"], weights[: 10 * CHUNK // 4])


def test_a_pack_stays_whose_rest_cannot_be_copied(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    weights = torch.randn(40 * CHUNK // 4)
    store.take({"m": StateDict(w=weights)}, "whole")
    part = store.take({"m": StateDict(w=weights[: 4 * CHUNK // 4].clone())}, "part")
    store.delete("whole")
    place = places_of(store, part)[0]
    file = path / pack_key(place.pack)
    content = bytearray(file.read_bytes())
    content[place.offset] ^= 1
    file.write_bytes(content)
    for _ in range(3):
        report = Store(path).gc(grace=0)
        assert file.exists()
    assert report.repacked_packs == 0
    # The damage is repaired by hand.
    content[place.offset] ^= 1
    file.write_bytes(content)
    assert Store(path).gc(grace=0).repacked_packs > 0
    assert not file.exists()
    state = {"m": StateDict(w=torch.zeros(4 * CHUNK // 4))}
    Store(path)["part"].restore(state)
    assert torch.equal(state["m"]["w"], weights[: 4 * CHUNK // 4])
    assert_tidy(path)


def test_duplicates_go_once_the_newer_copy_is_proven(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    state = {"m": StateDict(w=torch.randn(20 * CHUNK // 4))}

    def take_too() -> None:
        assert in_child(lambda: Store(path).take(state, "b")) == 0

    with backend_faults(0, take_too, names=["put_if_absent"]):
        store.take(state, "a")
    assert stored(path) > 40 * CHUNK
    report = store.gc(grace=0)
    assert report.repacked_packs
    assert stored(path) < 22 * CHUNK
    for name in ("a", "b"):
        found = {"m": StateDict(w=torch.zeros(20 * CHUNK // 4))}
        store[name].restore(found)
        assert torch.equal(found["m"]["w"], state["m"]["w"])
    assert_tidy(path)


def test_a_collection_with_nothing_to_do_changes_nothing(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.gc(grace=0)
    before = files(path)
    for _ in range(3):
        report = store.gc(grace=0)
        assert (report.condemned_packs, report.deleted_packs, report.fence) == (0, 0, None)
        assert report.snapshots == 2
    assert files(path) == before


def test_a_dry_run_changes_nothing(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    for step in range(4):
        take(store, step)
    store.delete("step_1")
    (path / "tmp" / ("ab" * 12)).write_bytes(b"left behind")
    before = files(path)
    plans = [store.gc(grace=0, dry_run=True) for _ in range(2)]
    assert files(path) == before
    report = store.gc(grace=0)
    for plan in plans:
        assert plan.dry_run
        assert plan.condemned_packs == report.condemned_packs
        assert plan.condemned_bytes == report.condemned_bytes
        assert plan.live_bytes == report.live_bytes


def test_a_store_without_snapshots(path: Path) -> None:
    store = Store(path)
    assert store.gc(grace=0).snapshots == 0
    take(store, 0)
    store.delete("step_0")
    assert store.gc(grace=0).freed_bytes > 0
    assert not [f for f in files(path) if f.startswith(("packs", "index", "tmp"))]
    take(store, 1)
    assert_store(path, {1})


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    left = path / "tmp" / ("0f" * 12)
    left.write_bytes(bytes(1000))
    foreign = path / "tmp" / "notes.txt"
    foreign.write_bytes(b"not ours")
    store.gc()
    assert left.exists()
    seen: list[int] = []

    def collect() -> None:
        seen.append(len(files(path, "tmp")))
        store.objects.backend.tidy(0)
        seen.append(len(files(path, "tmp")))

    with system_faults(0, collect, names=["link"]):
        take(Store(path), 1)
    assert seen == [3, 2]
    assert not left.exists()
    assert foreign.exists()
    assert_store(path, {0, 1})


def test_foreign_files_are_never_deleted(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    foreign = [
        "packs/zz/" + "0" * 32,
        "packs/00/" + "0" * 31 + "1",
        "packs/00/" + "A" * 32,
        "packs/00/readme",
        "index/" + "0" * 31,
        "index/notes",
    ]
    for key in foreign:
        (path / key).parent.mkdir(exist_ok=True)
        (path / key).write_bytes(b"mine")
    store.gc(grace=0)
    assert all((path / key).exists() for key in foreign)


def test_a_dry_run_without_grace_says_what_will_be_freed(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    for step in range(4):
        take(store, step)
        if step:
            store.delete(f"step_{step}")
    plan, report = store.gc(grace=0, repack=0, dry_run=True), store.gc(grace=0, repack=0)
    assert plan.deleted_packs == report.deleted_packs > 0
    assert plan.waiting_packs == report.waiting_packs == 0
    assert 0 < plan.freed_bytes <= report.freed_bytes


def test_two_collectors_of_one_process_that_copy(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name, chunk_size=CHUNK) for name in "abc"]
    for store in stores:
        for part in range(40):
            weights = torch.randn(20 * CHUNK // 4)
            store.take({"m": StateDict(w=weights)}, f"whole_{part}")
            store.take({"m": StateDict(w=weights[: 5 * CHUNK // 4].clone())}, f"part_{part}")
            store.delete(f"whole_{part}")
    with ThreadPoolExecutor(3) as pool:
        for report in pool.map(lambda store: store.gc(grace=0), stores):
            assert report.repacked_packs >= 40
    for store in stores:
        assert store.check(data=True).ok


def test_a_lost_answer_and_a_bad_read_do_not_undo_a_root(path: Path) -> None:
    backend = FaultyBackend(LocalBackend(path))
    store = open_store(backend, chunk_size=CHUNK)
    for step in range(4):
        take(store, step)
    for step in range(3):
        store.delete(f"step_{step}")
    store.gc()
    fence_root = f"roots/0/{store.objects.newest().seq + 1}"
    lost = Fault(lose_answer(), ["put_if_absent"], keys=fence_root)
    hidden = Fault(flip(), ["read"], keys=fence_root)
    with backend.during(lost, hidden), contextlib.suppress(CasnapError):
        store.gc(grace=0)
    view = Objects(LocalBackend(path)).view()
    assert all((path / segment_key(ident)).exists() for ident in view.segments)
    assert_store(path, {3})
    Store(path).gc(grace=0)
    assert_tidy(path)
    assert_store(path, {3})


def test_an_old_root_that_cannot_be_read_costs_patience_alone(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    store.gc()
    condemning = newest_root(path)
    take(store, 2)
    condemning.write_bytes(condemning.read_bytes()[:-1] + b"?")
    Store(path).gc()
    assert Store(path).gc(grace=0).deleted_packs > 0
    assert_tidy(path)
    assert_store(path, {0, 2})


# --- bad input, damage ------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [-1, math.nan, math.inf, True, timedelta(days=-1), "1h"])
def test_durations_that_make_no_sense(path: Path, grace: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="grace"):
        Store(path).gc(grace=grace)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, True])
def test_shares_that_make_no_sense(path: Path, share: Any) -> None:
    with pytest.raises(ValueError, match="repack"):
        Store(path).gc(repack=share)


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / CONFIG_KEY).read_text())
    (path / CONFIG_KEY).write_text(json.dumps(config | changes))


def test_stores_that_must_not_be_collected(path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "not a casnap store" in failure("gc", tmp_path / "empty")
    with pytest.raises(NotAStoreError):
        Store(tmp_path / "empty", create=False)
    take(Store(path, chunk_size=CHUNK), 0)
    before = files(path)
    configure(path, put_if_absent=False)
    with pytest.raises(StoreError, match="exclusive"):
        Store(path).gc(grace=0)
    assert "--exclusive" in failure("gc", path)
    Store(path).gc(grace=0, dry_run=True, exclusive=True)
    assert files(path) == before
    configure(path, put_if_absent=True, write_features=["x"])
    with pytest.raises(UnsupportedFormatError, match="update casnap"):
        Store(path).gc(grace=0)
    configure(path, write_features=[], format=2)
    assert "update casnap" in failure("gc", path)
    assert files(path) == before


def newest_root(path: Path) -> Path:
    return max((path / "roots" / "0").iterdir(), key=lambda p: int(p.name))


@pytest.mark.parametrize("what", ["root", "segment", "tree", "segment-gone", "tree-gone"])
def test_what_cannot_be_read_stops_it(path: Path, cache_dir: Path, what: str) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    trees = [
        p for p in (path / "packs").rglob("*") if p.is_file() and b"CASNAPt1" in p.read_bytes()
    ]
    hurt = {
        "root": newest_root(path),
        "segment": next((path / "index").iterdir()),
        "tree": min(trees, key=lambda p: p.name),
    }[what.partition("-")[0]]
    if what.endswith("gone"):
        hurt.unlink()
    else:
        content = bytearray(hurt.read_bytes())
        content[: len(content) - 100] = bytes(len(content) - 100)
        hurt.write_bytes(content)
    for folder in cache_dir.iterdir():
        folder.rename(cache_dir.parent / f"old-{folder.name}")
    before = files(path)
    with pytest.raises(DamagedError) as e:
        Store(path).gc(grace=0)
    assert str(path) in str(e.value)
    assert files(path) == before
    assert "casnap" in failure("gc", path, "--grace", 0)
    assert files(path) == before


# --- at the same time -------------------------------------------------------------------------


def test_takes_deletes_and_collectors_at_once(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)

    def collect() -> None:
        own = Store(path)
        for _ in range(6):
            own.gc(grace=0, repack=0.9)

    def delete() -> None:
        own = Store(path)
        for step in range(1, 5):
            if f"step_{step}" in own:
                own.delete(f"step_{step}")

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(work) for work in (collect, collect, delete)]
        for step in range(1, 9):
            take_again_where_fenced(store, step)
        for other in others:
            other.result()
    steps = {s.metadata.user["step"] for s in store.snapshots()}
    assert steps >= {0, 5, 6, 7, 8}
    assert_store(path, steps)
    store.gc(grace=0)
    assert_tidy(path)
    assert_store(path, steps)


def take_again_where_fenced(store: Store, step: int) -> None:
    for _ in range(10):
        try:
            take(store, step)
        except FencedError:
            continue
        return
    raise AssertionError("collectors without any grace starve a take")


@given(st.data())
def test_marking_in_parts_marks_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from casnap import marks

    folder = tmp_path_factory.mktemp("parts")
    results = []
    steps = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True))
    gone = data.draw(st.sets(st.sampled_from(steps)))
    store = Store(folder / "s", chunk_size=CHUNK)
    for step in steps:
        take(store, step)
    for step in gone:
        store.delete(f"step_{step}")
    root = store.objects.newest()
    for part in (marks._PART, data.draw(st.integers(1, 50))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marks, "_PART", part)
            found = marks.Marks(store.objects, root, lambda *_: None)
            everything = {d for d, _, _ in found.contents_of(set(found.uses))}
            results.append(
                (
                    found.count,
                    found.nbytes,
                    found.uses,
                    found.snapshots,
                    found.needed_of(everything),
                )
            )
    assert results[0] == results[1]


# --- the command ------------------------------------------------------------------------------


def test_the_command(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    assert "would be condemned" in invoke("gc", path, "--dry-run").stdout
    said = invoke("gc", path).stdout
    assert "condemned" in said
    assert "when the grace is over" in said
    report = document("gc", path, "--grace", "0")
    assert report["deleted_packs"] > 0
    assert report["freed_bytes"] > 80_000
    assert report["store"] == str(path)
    for wrong in (["--grace", "-3h"], ["--grace", "soon"], ["--repack", "300%"]):
        assert "write" in failure("gc", path, *wrong, status=2)
    assert_tidy(path)


def test_prune_with_gc_frees_what_it_forgets(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    for step in range(4):
        take(store, step)
    plan = document("prune", path, "--keep-last", 1, "--gc", "--grace", 0, "--dry-run")
    assert plan["gc"]["dry_run"]
    assert_store(path, {0, 1, 2, 3})
    said = invoke("prune", path, "--keep-last", 1, "--gc", "--grace", 0, "--yes").stdout
    assert "3 snapshots forgotten" in said
    assert "freed" in said
    assert_store(path, {3})
    assert_tidy(path)
