"""Collections that go on from the counts of the one before find what a whole one finds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from casnap import NewStore, Retention, StateDict, Store
from casnap.errors import DamagedError, StorageFullError
from casnap.format.records import pack_key
from casnap.storage.collecting import recent_marks, reference_counts
from casnap.storage.collecting.gc import GcOptions, GcReport, collect
from casnap.storage.collecting.reference_counts import ReferenceCounts
from casnap.storage.collecting.whole_marks import WholeMarks
from casnap.storage.reading.repository import Repository
from tests.support.copies import interrupted
from tests.support.damaged import forget_cache
from tests.support.faults import backend_faults, elsewhere, held, littered_store
from tests.support.garbage import assert_tidy

pytestmark = pytest.mark.usefixtures("collected_by_hand")
CHUNK = 64 << 10


def chunks(*numbers: int) -> StateDict:
    """Return a state of some chunks that are equal wherever they have the same number."""
    return StateDict({f"w{i}": torch.full((CHUNK // 4,), float(n)) for i, n in enumerate(numbers)})


def gc(store: Store, counts: ReferenceCounts, **options: float) -> GcReport:
    return collect(store._view.repository, GcOptions(**options), None, counts)


def assert_as_counted_anew(store: Store, counts: ReferenceCounts) -> None:
    """Check that the counts are those of the newest root, whatever they went on from."""
    repository = store._view.repository
    root = repository.newest()
    counts.advance(repository, root, lambda *_: None)
    anew = ReferenceCounts()
    marks = WholeMarks(repository, root, lambda *_: None, counts=anew)
    assert counts._nodes == anew._nodes
    everything = {digest for digest, _, _ in marks.contents_of(set(marks.uses))}
    needed = counts.needed_of(everything)
    if any(ref.deltas for ref in root.segments):
        # The bases of deltas are never discounted.
        assert needed.issuperset(marks.needed_of(everything))
    else:
        assert counts._tally.change(everything) == anew._tally.change(everything)
        assert needed == marks.needed_of(everything).keys()


def test_unfinished_copies_count(tmp_path: Path) -> None:
    source = Store(tmp_path / "source", create=NewStore(chunk_size=CHUNK))
    source.take({"s": chunks(*range(8))}, "step_0")
    store, counts = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)), ReferenceCounts()
    store.take({"s": chunks(9)}, "kept")
    gc(store, counts)
    for after in (3, 6):
        interrupted(source, tmp_path / "store", after * CHUNK)
        assert_as_counted_anew(store, counts)
        assert gc(store, counts, grace=0, repack=1).condemned_packs == 0
    assert source.copy(to=store).present_bytes >= 5 * CHUNK
    assert_as_counted_anew(store, counts)
    assert store.check(data=True).ok


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(9))
def test_whatever_comes_and_goes(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    store.take({"s": chunks(1, 2, 3)}, "kept")
    gc(store, counts)
    for step in range(60):
        numbers = pick.sample(range(20), pick.randrange(1, 8))
        match pick.randrange(8):
            case 0 | 1 | 2:
                name = f"run_{pick.randrange(2)}/step_{step}"
                store.take({"s": chunks(*numbers)}, name, metadata={"long": "x" * 500})
            case 3:
                store.take({"s": chunks(*numbers)}, "other", overwrite=True)
            case 4:
                store.prune(Retention(keep_last=2))
            case 5:
                store.gc(grace=0, recode_after=pick.choice([None, 1]))
            case 6:
                gc(store, counts, grace=0, repack=pick.choice([0, 0.5, 1]))
            case _:
                assert_as_counted_anew(store, counts)
    assert_as_counted_anew(store, counts)
    gc(store, counts, grace=0)
    assert store.check(data=True).ok
    there = set(store._view.repository.view().packs)
    store.gc(grace=0, repack=0)
    has_deltas = any(ref.deltas for ref in store._view.repository.newest().segments)
    assert has_deltas or there == set(store._view.repository.view().packs)
    assert_tidy(tmp_path / "store")


def test_what_came_and_went_between_two_collections(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    store.take({"s": chunks(1)}, "kept")
    gc(store, counts)
    for step in range(5):
        store.take({"s": chunks(10 + step)}, f"step_{step}")
        store.delete(f"step_{step}")
    report = gc(store, counts, grace=0)
    assert report.freed_bytes > 5 * CHUNK
    assert store.gc(grace=0, repack=0).deleted_packs == 0
    assert_tidy(tmp_path / "store")


def test_what_another_collector_freed_before_it_was_counted(
    tmp_path: Path, cache_dir: Path
) -> None:
    """The nodes of what went cannot be read any more, so all is counted anew."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    for step in range(3):
        store.take({"s": chunks(step, 10 + step)}, f"step_{step}")
    gc(store, counts)
    store.delete("step_0")
    store.gc(grace=0)
    forget_cache(cache_dir)
    store = Store(tmp_path / "store")
    with pytest.raises(DamagedError):
        counts.advance(store._view.repository, store._view.repository.newest(), lambda *_: None)
    assert not counts.is_known
    gc(store, counts, grace=0)
    assert counts.is_known
    assert_as_counted_anew(store, counts)
    assert store.check(data=True).ok


def test_counts_that_were_cut_off_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    store.take({"s": chunks(1, 2)}, "kept")
    gc(store, counts)
    store.take({"s": chunks(1, 3)}, "new")
    store.delete("kept")

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "cache_nodes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            gc(store, counts)
    assert not counts.is_known
    gc(store, counts, grace=0)
    assert_as_counted_anew(store, counts)
    assert store.check(data=True).ok
    assert_tidy(tmp_path / "store")


@pytest.mark.parametrize("records_a_footer", [0, 512])
def test_packs_whose_footers_cannot_be_read_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records_a_footer: int
) -> None:
    """In large segments, footers say what new packs hold."""
    monkeypatch.setattr(recent_marks, "_RECORDS_A_FOOTER", records_a_footer)
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    store.take({"s": chunks(1)}, "kept")
    gc(store, counts)
    store.take({"s": chunks(2, 3)}, "gone")
    store.delete("gone")
    store.take({"s": chunks(4, 5)}, "new")
    old = set(store._view.repository.view().live)
    for pack in store._view.repository.view().live:
        file = tmp_path / "store/casnap-store" / pack_key(pack)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    gc(store, counts, grace=0)
    assert store["new"].read_object("s/w1")[0] == 5
    left = set(store._view.repository.view().packs) & old
    assert left == old if records_a_footer == 0 else left < old


def test_what_another_collector_deleted_before_it_was_copied_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the copies are based on is newer than the root that was marked."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    store.take({"s": chunks(0)}, "kept")
    gc(store, counts)
    store.take({"s": chunks(*range(1, 16))}, "whole")
    store.take({"s": chunks(1)}, "part")
    store.delete("whole")

    def delete_and_collect() -> None:
        other = Store(tmp_path / "store")
        other.delete("part")
        other.gc(grace=0)

    with backend_faults(
        0, elsewhere(delete_and_collect), names=["announced_bases"], after=True
    ) as calls:
        assert gc(store, counts, grace=0).repacked_packs == 0
    assert calls.struck
    assert "cannot be copied" not in caplog.text
    assert store["kept"].read_object("s/w0")[0] == 0
    assert store.check(data=True).ok
    assert_tidy(tmp_path / "store")


def test_many_are_sorted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_counts, "_PART", 10)
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    store.take({"s": chunks(*range(50))}, "one")
    counts = ReferenceCounts()
    gc(store, counts)
    store.take({"s": chunks(*range(25, 75))}, "two")
    store.delete("one")
    assert_as_counted_anew(store, counts)


def test_digests_that_begin_alike_share_a_count(tmp_path: Path) -> None:
    """So what nobody needs may stay, and what somebody needs never goes."""
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    counts = ReferenceCounts()
    store.take({"s": chunks(1)}, "kept")
    gc(store, counts)
    digest = bytes(range(32))
    like = digest[:8] + bytes(24)
    assert counts._tally.change([digest, like], 1) == [1, 2]
    assert counts._tally.change([digest], -1) == [1]
    assert counts.needed_of([like]) == {like}


def fill() -> None:
    raise StorageFullError("no space is left")


def test_a_full_disk_and_what_dead_takes_left(tmp_path: Path) -> None:
    """The collection that begins again lists all packs again: counts alone do not know of those."""
    path = littered_store(tmp_path / "store")
    with backend_faults(0, fill, names=["put_if_absent"]) as calls:
        gc(Store(path), ReferenceCounts(), grace=0, repack=0)
    assert calls.struck
    assert held(path) == {"step_3": 3, "step_4": 4}
    assert_tidy(path)


def test_what_found_no_space_is_copied_later(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    store.take({"s": chunks(*range(16))}, "whole")
    store.take({"s": chunks(1)}, "part")
    store.take({"s": chunks(100)}, "dead")
    store.delete("whole")
    store.delete("dead")
    counts = ReferenceCounts()
    with backend_faults(0, fill, names=["write"]) as calls:
        report = gc(store, counts, grace=0)
    assert calls.struck
    assert report.repacked_packs > 0
    assert gc(store, counts, grace=0).waiting_packs == 0
    assert store.gc(grace=0).deleted_packs == 0
    assert store.check(data=True).ok
