"""Garbage is collected, and nothing else; damage, a lost answer or bad input free nothing."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    CasnapError,
    DamagedError,
    FencedError,
    SnapshotNotFoundError,
)
from casnap.format.records import PackId, pack_key, segment_key
from casnap.runtime.sizes import size
from casnap.storage.collecting.gc import GcOptions, collect
from casnap.storage.collecting.reference_counts import ReferenceCounts
from casnap.storage.collecting.whole_marks import WholeMarks
from casnap.storage.packs.pack_writer import new_id
from casnap.storage.reading.repository import Repository
from tests.support.cli_calls import document, failure, invoke
from tests.support.damaged import drop_from_index
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    assert_store,
    backend_faults,
    elsewhere,
    files,
    in_child,
    system_faults,
    take,
)
from tests.support.faulty import Fault, FaultyBackend, flip, lose_answer
from tests.support.garbage import assert_tidy, places_of

pytestmark = pytest.mark.usefixtures("collected_by_hand")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def stored(path: Path) -> int:
    """Return the bytes of packs and segments."""
    backend = LocalBackend(path)
    return sum(sum(backend.sizes(folder).values()) for folder in ("packs", "index"))


def test_what_only_a_deleted_snapshot_needs_is_freed(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
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
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
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
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
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
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    store.gc()
    again = take(store, 1)
    assert again.stats.new_bytes > 80_000
    store.gc(grace=0)
    assert_store(path, {0, 1})
    assert_tidy(path)


def test_packs_that_are_mostly_dead_are_copied(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    weights = torch.randn(100 * CHUNK // 4)
    store.take({"m": StateDict(w=weights)}, "whole")
    store.take({"m": StateDict(w=weights[: 10 * CHUNK // 4].clone())}, "part")
    tree = store["part"].contents.manifest.shared
    store.delete("whole")
    assert store.gc(grace=0, repack=0.0).repacked_packs == 0
    assert stored(path) > 100 * CHUNK
    plan = store.gc(grace=0, dry_run=True)
    assert plan.repacked_packs > 0
    said = invoke("gc", path, "--dry-run", "--grace", 0).stdout
    assert f"repacked: about {size(plan.copied_bytes)} copied" in said
    # The copies put roots of their own, which a dry run does not know.
    assert f"would be raised to root {plan.fence} or a later one" in said
    report = store.gc(grace=0)
    assert plan.fence is not None
    assert report.fence is not None
    assert plan.fence < report.fence
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
    store = Store(path, create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
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


def test_duplicates_go_once_the_newer_copy_is_proven(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    state = {"m": StateDict(w=torch.randn(20 * CHUNK // 4))}

    def take_too() -> None:
        assert in_child(lambda: Store(path).take(state, "b")) == 0

    with backend_faults(0, elsewhere(take_too), names=["put_if_absent"]):
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
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    take(store, 0)
    take(store, 1)
    store.gc(grace=0)
    before = files(path)
    for _ in range(3):
        report = store.gc(grace=0)
        assert (report.condemned_packs, report.deleted_packs, report.fence) == (0, 0, None)
        assert report.snapshots == 2
    assert files(path) == before


def test_a_store_without_snapshots(path: Path) -> None:
    store = Store(path).make()
    assert store.gc(grace=0).snapshots == 0
    take(store, 0)
    store.delete("step_0")
    assert store.gc(grace=0).freed_bytes > 0
    assert not [f for f in files(path) if f.startswith(("packs", "index", "tmp"))]
    take(store, 1)
    assert_store(path, {1})


def test_temporary_files_of_the_dead_go_and_those_of_the_living_stay(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    take(store, 0)
    left = path / "casnap-store/tmp" / ("0f" * 12)
    left.write_bytes(bytes(1000))
    foreign = path / "casnap-store/tmp" / "notes.txt"
    foreign.write_bytes(b"not ours")
    store.gc()
    assert left.exists()
    seen: list[int] = []

    def collect() -> None:
        seen.append(len(files(path, "tmp")))
        store._view.repository.backend.tidy(0)
        seen.append(len(files(path, "tmp")))

    with system_faults(0, collect, names=["link"]):
        take(Store(path), 1)
    # The file that is linked, and the one by which the take is announced.
    assert seen == [4, 3]
    assert not left.exists()
    assert foreign.exists()
    assert_store(path, {0, 1})


def test_foreign_files_are_never_deleted(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
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
        (path / "casnap-store" / key).parent.mkdir(exist_ok=True)
        (path / "casnap-store" / key).write_bytes(b"mine")
    store.gc(grace=0)
    assert all((path / "casnap-store" / key).exists() for key in foreign)


def test_a_take_that_begins_while_orphans_are_deleted_is_waited_for(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    for step in range(3):
        take(store, step)
    store.delete("step_1")
    # This raises the fence past the orphan that is made then.
    store.gc(grace=0)
    backend = store._view.repository.backend
    backend.write(pack_key(PackId(new_id(1))), bytes(1000))
    store.delete("step_2")
    base = store._view.repository.newest().seq
    with ExitStack() as under_way:

        def announce() -> None:
            under_way.enter_context(backend.announced(base, at_once=True))

        with backend_faults(0, announce, names=["delete_all"]):
            report = store.gc(grace=0)
    assert report.deleted_packs == 1
    assert report.waiting_packs
    assert store._view.repository.newest().fence <= base
    store.gc(grace=0)
    assert_tidy(path)


def test_a_grace_begins_with_the_root_that_condemns(path: Path) -> None:
    """Not with the one before, which may be hours old."""
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    before = time.time()
    for dry_run in (True, False):
        report = store.gc(grace=3600, dry_run=dry_run)
        assert report.waiting_until is not None
        assert before + 3600 <= report.waiting_until <= time.time() + 3600


# --- tries that are fenced ----------------------------------------------------------------------


def fenced_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have marks be of no more use once, as if another collector had moved what they read."""
    real, calls = getattr(WholeMarks, name), itertools.count()

    def fence(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise FencedError("on purpose")
        return real(*arguments)

    monkeypatch.setattr(WholeMarks, name, fence)


def test_segments_that_a_fenced_try_wrote_are_not_taken_for_orphans(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    for step in range(18):
        take(store, step)
    store.delete("step_1")
    fenced_once(monkeypatch, "advance")
    # The number of its root is taken, and what it goes on from then is gone.
    commit = elsewhere(lambda: Store(path).configure(codec="raw"))
    with backend_faults(0, commit, names=["put_if_absent"]):
        assert store.gc(grace=0, repack=0, recode_after=None).deleted_packs
    assert_tidy(path)
    assert_store(path, {0, *range(2, 18)})


def test_a_fenced_collection_of_all_is_again_one_of_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    for step in range(3):
        take(store, step)
    store.delete("step_1")
    repository = store._view.repository
    orphan = pack_key(PackId(new_id(1)))
    repository.backend.write(orphan, bytes(1000))
    fenced_once(monkeypatch, "advance")
    commit = elsewhere(lambda: Store(path).configure(codec="raw"))
    with backend_faults(0, commit, names=["put_if_absent"]):
        report = collect(repository, GcOptions(grace=0), counts=ReferenceCounts())
    assert report.live_chunks
    assert repository.backend.size_if_there(orphan) is None
    assert_tidy(path)


# --- the command ------------------------------------------------------------------------------


def test_the_command(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    assert "would be condemned" in invoke("gc", path, "--dry-run").stdout
    said = invoke("gc", path).stdout
    assert "condemned" in said
    assert "when the grace is over" in said
    with store._view.repository.backend.announced(1):
        assert "have ended" in invoke("gc", path, "--grace", "0").stdout
    report = document("gc", path, "--grace", "0")
    assert report["deleted_pack_count"] > 0
    assert report["freed_bytes"] > 80_000
    assert report["store"] == str(path)
    for wrong in (["--grace", "-3h"], ["--grace", "soon"], ["--repack", "300%"]):
        assert "write" in failure("gc", path, *wrong, status=2)
    assert_tidy(path)


def test_prune_with_gc_frees_what_it_forgets(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK)).make()
    for step in range(4):
        take(store, step)
    plan = document("prune", path, "--keep-last", 1, "--gc", "--grace", 0, "--dry-run")
    assert plan["gc"]["dry_run"]
    assert_store(path, {0, 1, 2, 3})
    said = invoke("prune", path, "--keep-last", 1, "--gc", "--grace", 0, "--yes").stdout
    assert "3 snapshots deleted" in said
    assert "freed" in said
    assert_store(path, {3})
    assert_tidy(path)


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [-1, math.nan, math.inf, True, timedelta(days=-1), "1"])
def test_durations_that_make_no_sense(path: Path, grace: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="grace"):
        Store(path).gc(grace=grace)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, True])
def test_shares_that_make_no_sense(path: Path, share: Any) -> None:
    with pytest.raises(ValueError, match="repack"):
        Store(path).gc(repack=share)


# --- damage -----------------------------------------------------------------------------------


def test_a_pack_stays_whose_rest_cannot_be_copied(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    weights = torch.randn(40 * CHUNK // 4)
    store.take({"m": StateDict(w=weights)}, "whole")
    part = store.take({"m": StateDict(w=weights[: 4 * CHUNK // 4].clone())}, "part")
    store.delete("whole")
    place = places_of(store, part)[0]
    file = path / "casnap-store" / pack_key(place.pack)
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


def test_a_lost_answer_and_a_bad_read_do_not_undo_a_root(path: Path) -> None:
    backend = FaultyBackend(LocalBackend(path))
    store = Store(backend, create=NewStore(chunk_size=CHUNK))
    for step in range(4):
        take(store, step)
    for step in range(3):
        store.delete(f"step_{step}")
    store.gc()
    fence_root = f"roots/0/{store._view.repository.newest().seq + 1}"
    lost = Fault(lose_answer(), ["put_if_absent"], keys=fence_root)
    hidden = Fault(flip(), ["read"], keys=fence_root)
    with backend.during(lost, hidden), contextlib.suppress(CasnapError):
        store.gc(grace=0)
    view = Repository(LocalBackend(path)).view()
    assert all((path / "casnap-store" / segment_key(ident)).exists() for ident in view.segments)
    assert_store(path, {3})
    Store(path).gc(grace=0)
    assert_tidy(path)
    assert_store(path, {3})


def test_takes_that_go_on_do_not_keep_it_from_saying_what_is_damaged(path: Path) -> None:
    """Each marking sees a newer root, but the lost node stays lost."""
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    segment = store._view.repository.newest().segments[0]
    [(_, place), *_] = store._view.repository.index.segment(segment).records
    drop_from_index(store, place.pack)
    markings = []

    @elsewhere
    def go_on(what: str, done: int, _total: int) -> None:
        if (what, done) == ("reading the index", 0):
            markings.append(what)
            store.take({"s": StateDict(x=len(markings))}, f"other/{len(markings)}")

    with pytest.raises(DamagedError):
        Store(path).gc(progress=go_on)
    assert len(markings) < 3


def test_an_old_root_that_cannot_be_read_costs_patience_alone(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    store.gc()
    condemning = newest_root(path)
    take(store, 2)
    condemning.write_bytes(condemning.read_bytes()[:-1] + b"?")
    older = path / "casnap-store/roots/0/1"
    older.unlink()
    older.mkdir()
    Store(path).gc()
    assert Store(path).gc(grace=0).deleted_packs > 0
    assert_tidy(path)
    assert_store(path, {0, 2})


def newest_root(path: Path) -> Path:
    return max((path / "casnap-store/roots" / "0").iterdir(), key=lambda p: int(p.name))
