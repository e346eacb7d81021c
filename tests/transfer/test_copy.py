"""Copying snapshots into another store: what is sent, what is kept, and what is refused."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from casnap import NewStore, Retention, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.costs import LOCAL
from casnap.errors import (
    BackendError,
    DamagedError,
    InvalidNameError,
    NotAStoreError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StoreError,
    UnsupportedFormatError,
)
from casnap.format.records import NodeRef, UnfinishedCopy, pack_key, root_key
from casnap.storage.writing.copying import ChunkBuffer
from casnap.transfer import delta_copies
from casnap.transfer.copy import copy_snapshots
from casnap.transfer.copy_jobs import CopyJob, CopyOptions
from tests.support.bitwise import assert_same
from tests.support.copies import (
    assert_copied,
    copy_in_parts,
    filled,
    interrupted,
    opened,
    unfinished,
)
from tests.support.faults import CHUNK, app_state, assert_holds, assert_no_orphans, files, take
from tests.support.mounts import as_nobody
from tests.support.remote import RemoteDouble
from tests.support.written import configure, put_next_root


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return filled(tmp_path / "source")


# --- what is copied ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: path, lambda path: f"memory:/{path}"])
def test_all_snapshots_into_a_store_that_is_made(
    source: Store, tmp_path: Path, make: Callable[[Path], str]
) -> None:
    place = make(tmp_path / "copy")
    report = source.copy(to=place)
    assert report.copied == ["step_0", "step_1", "step_2"]
    assert (report.present, report.gone, report.dry_run) == ([], [], False)
    there = Store(place, create=False)
    assert there.chunk_size == source.chunk_size
    assert there.id != source.id
    assert_copied(source, there)
    assert [s.seq for s in there.snapshots()] == [1, 2, 3]


def test_only_what_is_missing_is_sent(source: Store, tmp_path: Path) -> None:
    first = source.copy("step_0", to=tmp_path / "copy")
    assert first.present_bytes == first.present_chunks == 0
    again = source.copy("step_0", to=tmp_path / "copy")
    assert (again.copied, again.present) == ([], ["step_0"])
    assert again.sent_bytes == again.sent_chunks == 0
    rest = source.copy(to=tmp_path / "copy")
    assert (rest.copied, rest.present) == (["step_1", "step_2"], ["step_0"])
    # A half never changes, and is not walked twice.
    assert rest.sent_bytes < 2 * 0.6 * first.sent_bytes
    assert rest.present_bytes >= 160_000
    assert_copied(source, tmp_path / "copy")


def test_a_snapshot_of_what_is_there_sends_its_tree_alone(tmp_path: Path) -> None:
    source = Store(tmp_path / "source").make()
    weights = {f"layer.{n}": torch.randn(1 << 18) for n in range(16)}
    source.take({"model": StateDict(**weights, step=1)}, "a")
    source.copy(to=tmp_path / "copy")
    source.take({"model": StateDict(**weights, step=2)}, "b")
    report = source.copy("b", to=tmp_path / "copy")
    assert report.sent_bytes < 0.01 * (16 << 20)
    assert report.present_bytes >= 16 << 20
    assert Store(tmp_path / "copy")["b"].stats.new_bytes == pytest.approx(
        report.sent_bytes, abs=9999
    )


def test_a_prefix_and_new_names(source: Store, tmp_path: Path) -> None:
    for step in range(2):
        source.take(app_state(step), f"runs/a/step_{step}", metadata={"step": step})
    there = Store(tmp_path / "copy", create=NewStore(chunk_size=CHUNK)).make()
    assert source.copy("runs/a", to=there).copied == ["runs/a/step_0", "runs/a/step_1"]
    assert source.copy("runs/a", to=there, rename="b").copied == ["b/step_0", "b/step_1"]
    assert source.copy("runs/a/step_1", to=there, rename="best").copied == ["best"]
    assert source.copy("step_2", to=there, rename="other/one").copied == ["other/one"]
    # Of views the names below their prefix count.
    view = Store(tmp_path / "source" / "runs").make()
    assert view.copy("a/step_0", to=Store(tmp_path / "copy" / "c")).copied == ["c/a/step_0"]
    assert view.copy(to=there, rename="all").copied == ["all/a/step_0", "all/a/step_1"]
    assert_holds(there["best"], 1)
    assert_holds(there["other/one"], 2)
    assert_holds(there["all/a/step_0"], 0)
    assert there.check(data=True).ok


def test_large_metadata_and_compressed_chunks(tmp_path: Path) -> None:
    source = Store(tmp_path / "source", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    metadata = {"step": 0, "notes": "x" * 10_000}
    source.take(app_state(0), "step_0", metadata=metadata)
    report = source.copy(to=tmp_path / "copy")
    there = Store(tmp_path / "copy").make()
    assert there["step_0"].metadata.user == metadata
    assert report.sent_bytes < 0.9 * there["step_0"].stats.logical_bytes
    assert_copied(source, there)
    # A writer that compresses does so with what it copies.
    plain = filled(tmp_path / "plain")
    small = Store(tmp_path / "small", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    assert plain.copy("step_0", to=small).sent_bytes < 0.9 * 240_000


def test_large_chunks_that_take_little_are_held_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas of large chunks, and many cores, take no more memory."""
    monkeypatch.setattr(delta_copies, "cores", lambda: 8)
    monkeypatch.setattr(LocalBackend, "costs", LOCAL._replace(delta_bytes=CHUNK))
    monkeypatch.setattr(delta_copies, "_LEAST", CHUNK // 4)
    monkeypatch.setattr(delta_copies, "_MOST_BYTES", 2 * CHUNK)
    held: dict[ChunkBuffer, int] = {}
    most = [0]
    read, clear = ChunkBuffer.read, ChunkBuffer.clear

    def count(buffer: ChunkBuffer, *args: Any) -> Any:
        raws = read(buffer, *args)
        held[buffer] = sum(map(len, raws.values()))
        most.append(sum(held.copy().values()))
        return raws

    def forget(buffer: ChunkBuffer) -> None:
        held.pop(buffer, None)
        clear(buffer)

    source, there = (
        Store(tmp_path / name, create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
        for name in ("a", "b")
    )
    w = torch.arange(16 * CHUNK // 4, dtype=torch.int32)
    for step in range(2):
        w += step
        source.take({"s": StateDict(w=w)}, f"step_{step}")
    source.copy("step_0", to=there)
    monkeypatch.setattr(ChunkBuffer, "read", count)
    monkeypatch.setattr(ChunkBuffer, "clear", forget)
    source.copy("step_1", to=there)
    assert CHUNK < max(most) <= 4 * CHUNK  # two threads, each with a chunk and its base
    assert torch.equal(there["step_1"].read_object("s/w"), w)


def test_between_remote_stores(source: Store, tmp_path: Path) -> None:
    bucket, other = RemoteDouble(f"{tmp_path}/a"), RemoteDouble(f"{tmp_path}/b")
    source.copy(to=bucket)
    Store(bucket).copy(to=other)
    Store(other).copy(to=tmp_path / "back")
    for place in (bucket, other, tmp_path / "back"):
        assert_copied(source, place)


def test_requests_for_a_snapshot_whose_weights_are_there(source: Store, tmp_path: Path) -> None:
    """On a host that knows the store, few requests are made, however many weights there are."""
    source.copy(to=RemoteDouble(f"{tmp_path}/a"))
    state = {"state": StateDict(**app_state(2)["state"].data, more=1)}
    source.take(state, "same", metadata={"step": 2})
    bucket = RemoteDouble(f"{tmp_path}/a")
    report = source.copy("same", to=bucket)
    assert report.sent_bytes < 10_000
    assert bucket.count <= 12, bucket.log


def test_a_dry_run(source: Store, tmp_path: Path) -> None:
    would = source.copy(to=tmp_path / "copy", dry_run=True)
    assert not (tmp_path / "copy").exists()
    done = source.copy(to=tmp_path / "copy")
    assert would.dry_run
    assert would.copied == done.copied
    assert would.sent_chunks == done.sent_chunks
    # What is done has the nodes of the table besides.
    assert 0 <= done.sent_bytes - would.sent_bytes < 5000
    take(source, 3)
    before = files(tmp_path / "copy")
    would = source.copy(to=tmp_path / "copy", dry_run=True)
    assert (would.copied, would.present) == (["step_3"], ["step_0", "step_1", "step_2"])
    assert files(tmp_path / "copy") == before
    done = source.copy(to=tmp_path / "copy")
    assert would.sent_chunks == done.sent_chunks
    assert would.present_bytes == done.present_bytes


def test_progress(source: Store, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    source.copy(to=tmp_path / "copy", progress=lambda *told: seen.append(told))
    total = sum(s.stats.logical_bytes for s in source.snapshots())
    assert {(what, of) for what, _, of in seen} == {("copying", total)}
    done = [n for _, n, _ in seen]
    assert done == sorted(done)
    assert done[-1] == total


def test_the_store_works_on(source: Store, tmp_path: Path) -> None:
    """A copy is a store like others: it takes, deletes, collects, and is copied back."""
    source.copy(to=tmp_path / "copy")
    there = Store(tmp_path / "copy").make()
    take(there, 3)
    there.delete("step_0")
    there.gc(grace=0)
    assert_no_orphans(tmp_path / "copy")
    assert there.copy("step_3", to=source).copied == ["step_3"]
    assert_copied(there, source)


def test_a_store_that_was_copied_by_hand_is_another_one(source: Store, tmp_path: Path) -> None:
    """It has the same id, at another place."""
    shutil.copytree(tmp_path / "source", tmp_path / "twin")
    take(source, 3)
    report = source.copy(to=tmp_path / "twin")
    assert (report.copied, len(report.present)) == (["step_3"], 3)
    assert_copied(source, tmp_path / "twin")


# --- parts ------------------------------------------------------------------------------------


def test_parts_leave_nothing(source: Store, tmp_path: Path) -> None:
    report = copy_in_parts(source, tmp_path / "copy")
    there = Store(tmp_path / "copy").make()
    assert there._view.repository.newest().seq > len(report.copied) == 3
    assert unfinished(there) == []
    assert_copied(source, there)
    there.gc(grace=0)
    assert_copied(source, there)


def test_an_unfinished_copy_is_kept_and_hidden(source: Store, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "copy", 150_000)
    there = Store(tmp_path / "copy").make()
    assert unfinished(there) == [source["step_0"].commit_id]
    assert there.snapshots() == []
    assert there.latest() is None
    assert there.usage() == []
    take(there, 7)
    assert [v.name for v in there.prune(Retention(keep_last=1)).verdicts] == ["step_7"]
    report = there.gc(grace=0)
    assert report.snapshots == 1
    found = there.check(data=True)
    assert found.ok
    assert found.snapshots == 1
    there.delete("step_7")
    there.gc(grace=0)
    # What was sent is not sent again, though it was collected without grace.
    whole = source.copy("step_0", to=tmp_path / "other")
    rest = source.copy("step_0", to=there)
    assert rest.present_bytes >= 2 * CHUNK
    assert rest.sent_bytes < whole.sent_bytes - CHUNK
    assert unfinished(there) == []
    assert_copied(source, there, {"step_0"})


def test_damage_to_an_unfinished_copy(source: Store, tmp_path: Path) -> None:
    """A check says so; and a root that names one by nonsense is damaged."""
    interrupted(source, tmp_path / "copy", 150_000)
    there = Store(tmp_path / "copy").make()
    root = there._view.repository.newest()
    [(commit, copy)] = root.copies.items()
    lost = msgspec.structs.replace(copy, parts=NodeRef(bytes(32), None))
    assert put_next_root(there._view.repository.backend, root, copies={commit: lost})
    [damage] = there.check().damages
    assert [h.snapshot for h in damage.hurts] == [f"the unfinished copy {commit.hex()}"]
    for bad in ({commit[1:]: copy}, {commit: UnfinishedCopy(NodeRef(b"x", None), 1.0)}):
        newest = there._view.repository.newest()
        assert put_next_root(there._view.repository.backend, newest, copies=bad)
        with pytest.raises(DamagedError, match="has a malformed unfinished copy"):
            Store(tmp_path / "copy").snapshots()
        (tmp_path / "copy/casnap-store" / root_key(newest.seq + 1)).unlink()
        shutil.rmtree(tmp_path / "copy/casnap-store/roots/copies")


def test_over_a_slow_link_parts_are_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent within a GiB is not sent again either."""
    monkeypatch.setattr("casnap.transfer.snapshot_copy._TURN_BYTES", 10 * CHUNK)
    source = Store(tmp_path / "source", create=NewStore(chunk_size=CHUNK)).make()
    weight = torch.randn(30 * CHUNK // 4)
    source.take({"state": StateDict(weight=weight)}, "step_0")
    interrupted(source, tmp_path / "copy", 25 * CHUNK, 1 << 30, part_seconds=0)
    there = Store(tmp_path / "copy").make()
    there.gc(grace=0)
    report = source.copy(to=there)
    assert (report.present_chunks, report.sent_chunks) == (20, 10 + 3)
    assert torch.equal(there["step_0"].read_object("state/weight"), weight)
    assert unfinished(there) == []


def test_a_tensor_larger_than_a_part(tmp_path: Path) -> None:
    source = Store(tmp_path / "source", create=NewStore(chunk_size=CHUNK)).make()
    weight = torch.randn(30 * CHUNK // 4)
    source.take({"state": StateDict(weight=weight)}, "step_0")
    interrupted(source, tmp_path / "copy", 25 * CHUNK, part_bytes=10 * CHUNK)
    there = Store(tmp_path / "copy").make()
    there.gc(grace=0)
    assert there.check(data=True).ok
    report = source.copy(to=there)
    assert (report.present_chunks, report.sent_chunks) == (20, 10 + 3)
    assert torch.equal(there["step_0"].read_object("state/weight"), weight)
    there.gc(grace=0)
    assert_no_orphans(tmp_path / "copy")


def test_chunks_of_a_few_bytes_are_kept_too(tmp_path: Path) -> None:
    """The last chunk of a tensor can be shorter than what an entry holds itself."""
    source = Store(tmp_path / "source", create=NewStore(chunk_size=CHUNK))
    state = {f"{i:02}": torch.randint(0, 256, (CHUNK + 7,), dtype=torch.uint8) for i in range(20)}
    source.take({"state": StateDict(state)}, "step_0")
    interrupted(source, tmp_path / "copy", 13 * CHUNK, part_bytes=4 * CHUNK)
    there = Store(tmp_path / "copy")
    there.gc(grace=0, repack=1.0)
    assert there.check(data=True).ok
    report = source.copy(to=there)
    # Three parts of four tensors, two chunks each.
    assert report.present_chunks == 24
    assert_same(there["step_0"].get_state_dict_for_key("state"), state)


def test_an_abandoned_copy_is_dropped_by_the_collector(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(source, tmp_path / "copy", 150_000)
    there = Store(tmp_path / "copy").make()
    there.gc(grace=0)
    assert len(unfinished(there)) == 1
    later = time.time() + 8 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert there.gc(grace=0, dry_run=True).freed_bytes > 2 * CHUNK
    assert len(unfinished(there)) == 1
    assert there.gc(grace=0).freed_bytes > 2 * CHUNK
    assert unfinished(there) == []
    assert_no_orphans(tmp_path / "copy")


# --- beside others ----------------------------------------------------------------------------


def test_a_snapshot_that_was_deleted_at_the_source(source: Store, tmp_path: Path) -> None:
    """It is an error if it is meant alone, and passed over among others."""
    chosen = [CopyJob(s.name, s.name, s.row) for s in source.snapshots()]
    source.delete("step_1")
    source.gc(grace=0, repack=0.9)
    with pytest.raises(SnapshotNotFoundError, match="step_1 was deleted or replaced"):
        copy_snapshots(
            source._view.repository, opened(tmp_path / "one")._view.repository, chosen[1:2]
        )
    assert Store(tmp_path / "one").snapshots() == []
    options = CopyOptions(skip_gone=True)
    report = copy_snapshots(
        source._view.repository, opened(tmp_path / "all")._view.repository, chosen, options
    )
    assert (report.copied, report.gone) == (["step_0", "step_2"], ["step_1"])
    assert_copied(source, tmp_path / "all")


def test_two_copies_at_once(source: Store, tmp_path: Path) -> None:
    """Each snapshot is there once, whichever of them copies it."""
    there = Store(tmp_path / "copy", create=NewStore(chunk_size=CHUNK)).make()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            copy_in_parts(tmp_path / "source", tmp_path / "copy")
        except BaseException as e:  # noqa: BLE001
            failed.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert unfinished(there) == []
    assert_copied(source, there)


# --- what is refused --------------------------------------------------------------------------


def test_a_name_that_another_snapshot_has(source: Store, tmp_path: Path) -> None:
    there = Store(tmp_path / "copy", create=NewStore(chunk_size=CHUNK)).make()
    take(there, 2)
    before = files(tmp_path / "copy")
    with pytest.raises(SnapshotExistsError, match="'step_2' already"):
        source.copy(to=there)
    with pytest.raises(SnapshotExistsError, match="'step_2' already"):
        source.copy("step_0", to=there, rename="step_2")
    with pytest.raises(SnapshotExistsError, match="'step_2' is a snapshot, so nothing"):
        source.copy("step_0", to=there, rename="step_2/below")
    there.take(app_state(5), "folder/step_5")
    with pytest.raises(SnapshotExistsError, match="is the folder of"):
        source.copy("step_0", to=there, rename="folder")
    assert [s.name for s in there.snapshots()] == ["step_2", "folder/step_5"]
    assert files(tmp_path / "copy", "packs") >= {f for f in before if f.startswith("packs")}


def test_a_name_that_the_source_takes_anew(source: Store, tmp_path: Path) -> None:
    """The error says what helps, and both ways do."""
    there = Store(tmp_path / "copy", create=NewStore(chunk_size=CHUNK)).make()
    source.copy(to=there)
    source.take(app_state(7), "step_2", overwrite=True)
    with pytest.raises(SnapshotExistsError, match=r"Delete it there, or copy .* another name") as e:
        source.copy(to=there)
    assert "overwrite" not in str(e.value)
    source.copy("step_2", to=there, rename="step_2_anew")
    there.delete("step_2")
    assert source.copy(to=there).copied == ["step_2"]
    for name in ("step_2", "step_2_anew"):
        assert there[name].commit_id == source["step_2"].commit_id
        assert_holds(there[name], 7)


def test_what_the_copy_prunes_comes_back(source: Store, tmp_path: Path) -> None:
    """A copy is what the source holds, as long as the source holds it."""
    there = Store(tmp_path / "copy", create=NewStore(chunk_size=CHUNK)).make()
    source.copy(to=there)
    there.prune(Retention(keep_last=1))
    assert source.copy(to=there).copied == ["step_0"]
    source.prune(Retention(keep_last=1))
    assert source.copy(to=there).copied == []
    assert "step_0" in there
    assert "step_0" not in source


def test_names_that_match_nothing(source: Store, tmp_path: Path) -> None:
    for name in ("step_9", "nothing/here"):
        with pytest.raises(SnapshotNotFoundError, match="nor any below"):
            source.copy(name, to=tmp_path / "copy")
    with pytest.raises(SnapshotNotFoundError, match="nearest: step_1"):
        source.copy("stap_1", to=tmp_path / "copy")
    with pytest.raises(SnapshotNotFoundError):
        Store(tmp_path / "source" / "run7").copy(to=tmp_path / "copy")
    for bad in ("", "..", "casnap-store/x"):
        with pytest.raises(InvalidNameError):
            source.copy(bad, to=tmp_path / "copy")
        with pytest.raises(InvalidNameError):
            source.copy("step_0", to=tmp_path / "copy", rename=bad)
    assert not (tmp_path / "copy").exists()


def test_the_same_store(source: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "source")
    for place in (source, tmp_path / "source", tmp_path / "source" / "below", tmp_path / "link"):
        with pytest.raises(StoreError, match="is the store that is copied from"):
            source.copy(to=place)
    bucket = RemoteDouble(f"{tmp_path}/a")
    source.copy(to=bucket)
    with pytest.raises(StoreError, match="is the store that is copied from"):
        Store(bucket).copy(to=RemoteDouble(f"{tmp_path}/a"))


def test_chunks_of_another_size(source: Store, tmp_path: Path) -> None:
    Store(tmp_path / "copy", create=NewStore(chunk_size=2 * CHUNK)).make()
    with pytest.raises(StoreError, match=r"chunks of 64 KiB, .* of 128 KiB.*--chunk-size 64K"):
        source.copy(to=tmp_path / "copy")


def test_places_that_cannot_be_used(source: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(NotAStoreError, match="is a file"):
        source.copy(to=tmp_path / "file")
    Store(tmp_path / "newer", create=NewStore(chunk_size=CHUNK)).make()
    configure(tmp_path / "newer", format=99)
    with pytest.raises(UnsupportedFormatError, match="update casnap"):
        source.copy(to=tmp_path / "newer")
    with pytest.raises(UnsupportedFormatError, match="update casnap"):
        Store(tmp_path / "newer").make()
    with pytest.raises(ValueError, match="storage_options"):
        source.copy(to=tmp_path / "copy", storage_options={"key": "x"})
    with pytest.raises(ValueError, match="open already"):
        source.copy(to=Store(tmp_path / "other"), storage_options={"key": "x"})
    assert not (tmp_path / "copy").exists()


def test_stores_that_may_only_be_read(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a one can be copied from, but not to."""
    Store(tmp_path / "closed", create=NewStore(chunk_size=CHUNK)).make()
    before = files(tmp_path / "closed")

    def copy() -> None:
        there = tmp_path / "of-nobody" / "copy"
        Store(tmp_path / "source").copy("step_0", to=there)
        assert_holds(Store(there)["step_0"], 0)
        with pytest.raises(BackendError, match="Permission denied; may this user have it"):
            Store(there).copy(to=tmp_path / "closed")
        with pytest.raises(StoreError, match="Permission denied"):
            Store(there).copy(to=tmp_path / "not-there")

    as_nobody(tmp_path, monkeypatch, copy)
    assert files(tmp_path / "closed") == before
    assert not (tmp_path / "not-there").exists()


def test_damage_at_the_source_is_told_and_not_copied(source: Store, tmp_path: Path) -> None:
    """What was copied before stands."""
    digests = {d for s in source.snapshots()[1:2] for d, _ in _chunks(s)}
    digests -= {d for s in source.snapshots()[:1] for d, _ in _chunks(s)}
    view = source._view.repository.view()
    place = source._view.repository.index.find(view, [min(digests)])[0]
    assert place is not None
    pack = tmp_path / "source" / "casnap-store" / pack_key(place.pack)
    content = bytearray(pack.read_bytes())
    content[place.offset] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(content)
    with pytest.raises(DamagedError, match="differ from what was written"):
        source.copy(to=tmp_path / "copy")
    there = Store(tmp_path / "copy").make()
    assert [s.name for s in there.snapshots()] == ["step_0"]
    assert there.check(data=True).ok


def _chunks(snapshot: object) -> list[tuple[bytes, int]]:
    contents = snapshot.contents  # type: ignore[attr-defined]
    return [c for path, entry in contents.entries() for c in contents.chunks(path, entry)]
