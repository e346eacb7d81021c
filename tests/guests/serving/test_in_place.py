"""A pull in place writes what has changed into one folder, which says whether it is whole."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import StateDict, Store
from casnap.errors import CasnapError, FileFormatError, StorageFullError
from casnap.serving import PullOptions, in_place, verify
from casnap.serving.version import CHANGING, RECORD, read_traces
from tests.support.bucket_runs import Host, Run
from tests.support.faults import (
    backend_faults,
    content_of,
    disk_full,
    in_child,
    memory_folder,
    system_faults,
)
from tests.support.mounts import NOBODY, needs_root, tmpfs
from tests.support.served import (
    assert_served,
    inodes,
    store_at,
    take,
    tensors_in,
    versions_of,
    weights,
)
from tests.support.sweep import sweep

CALLS = ["open", "pwrite", "posix_fallocate", "fsync", "link", "mkdir", "rename", "unlink", "rmdir"]
OPTIONS = PullOptions(max_shard_size=250_000, in_place=True)
ONE_FILE = PullOptions(in_place=True)


def is_whole(live: Path) -> bool:
    """Whether a folder says that it is a whole version; then check that it is one."""
    if (live / RECORD).exists():
        assert verify(live) == []
        return True
    with pytest.raises(FileFormatError, match="no whole version: a pull with --inplace"):
        verify(live)
    return False


def step_of(live: Path) -> int | None:
    """Return the step that a folder holds, whole; None if it says that it holds none."""
    if not is_whole(live):
        return None
    step = 1 if '"step_1"' in (live / RECORD).read_text() else 0
    assert_served(live, step)
    return step


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_shard_size": 250_000},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "max_shard_size": 100_000},
        {"tied": ["head"]},
    ],
)
def test_it_is_what_another_pull_makes(tmp_path: Path, options: dict[str, Any]) -> None:
    store, live, other = store_at(tmp_path / "store"), tmp_path / "live", tmp_path / "other"
    shared = torch.rand(40_000)
    for step in range(4):
        shared[:10] += step
        # A tensor comes and goes, so that the layout changes.
        extra = {"extra": torch.rand(9)} if step == 2 else {}
        take(store, step, head=shared, embed=shared, **extra)
        report = store.pull(live, options=PullOptions(in_place=True, **options))
        expected = store.pull(other, options=PullOptions(**options))
        assert report.changed == expected.changed
        assert (report.switched, report.equal) == (True, expected.equal)
        assert report.total_bytes == expected.total_bytes
        assert report.folder == str(live)
        assert not live.is_symlink()
        found, wanted = content_of(live), content_of(other.resolve())
        assert {p.name for p in found} == {p.name for p in wanted}
        for path, raw in found.items():
            assert path.name == RECORD or raw == wanted[other.resolve() / path.name], path
        assert verify(live) == []
        assert versions_of(live) == []
    assert not store.pull(live, options=PullOptions(in_place=True, **options)).switched


def test_only_what_has_changed_is_written(store: Store, live: Path) -> None:
    store.pull(live, options=OPTIONS)
    before, contents = inodes(live), content_of(live)
    times = {path: path.stat().st_mtime_ns for path in contents}
    take(store, 1)
    report = store.pull(live, options=OPTIONS)
    assert_served(live, 1)
    assert report.written_bytes == report.fetched_bytes <= (64 << 10) + 20
    small = {"config.json", "casnap-chunks", RECORD, "model.safetensors.index.json"}
    assert {n: i for n, i in inodes(live).items() if n not in small} == {
        n: i for n, i in before.items() if n not in small
    }
    kept = [path for path in contents if path.stat().st_mtime_ns == times[path]]
    assert report.linked_bytes == sum(path.stat().st_size for path in kept) > 0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("most_kept", [0, 1 << 30])
def test_deltas_are_applied_where_their_bases_lie(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_kept: int
) -> None:
    monkeypatch.setattr(in_place, "_MOST_KEPT", most_kept)
    host, live = Host(tmp_path, monkeypatch), tmp_path / "live"
    run.step()
    host.pull(ONE_FILE)
    inode = inodes(live)["model.safetensors"]
    for missed in (0, 0, 2):
        sent = sum(run.step() for _ in range(missed + 1))
        report = host.pull(ONE_FILE)
        assert report.received_bytes <= 1.1 * sent + (80 << 10)
        assert report.written_bytes == run.nbytes
        run.assert_served(live)
        assert inodes(live)["model.safetensors"] == inode


def test_equal_chunks_that_stay_are_not_written(tmp_path: Path) -> None:
    """A tensor of zeros has one chunk, which lies at many places."""
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    for step in range(2):
        take(store, step, zeros=torch.zeros(200_000))
        report = store.pull(live, options=ONE_FILE)
    assert report.written_bytes <= (64 << 10) + 20
    assert_same(live, weights(1) | {"zeros": torch.zeros(200_000)})


def assert_same(live: Path, expected: dict[str, torch.Tensor]) -> None:
    found = tensors_in(live)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert verify(live) == []


@pytest.mark.parametrize("most_kept", [0, 1 << 30])
def test_chunks_that_change_places(
    tmp_path: Path, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is written over the other one, which is needed too."""
    monkeypatch.setattr(in_place, "_MOST_KEPT", most_kept)
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    one, two = torch.rand(100_000), torch.rand(100_000)
    take(store, 0, a=one, b=two)
    store.pull(live, options=ONE_FILE)
    take(store, 0, "swapped", a=two, b=one)
    report = store.pull(live, options=ONE_FILE)
    assert most_kept == 0 or report.fetched_bytes == 0
    assert_same(live, weights(0) | {"a": two, "b": one})


def test_a_file_with_another_name_is_made_anew(store: Store, live: Path, tmp_path: Path) -> None:
    store.pull(live, options=ONE_FILE)
    kept = tmp_path / "kept"
    kept.hardlink_to(live / "model.safetensors")
    raw = kept.read_bytes()
    take(store, 1)
    store.pull(live, options=ONE_FILE)
    assert_served(live, 1)
    assert kept.read_bytes() == raw
    assert kept.stat().st_nlink == 1


def test_a_file_with_another_name_that_has_not_changed_stays(
    store: Store, live: Path, tmp_path: Path
) -> None:
    store.pull(live, options=ONE_FILE)
    kept = tmp_path / "kept"
    kept.hardlink_to(live / "model.safetensors")
    store.take({"model": StateDict(weights(0))}, "again")
    assert store.pull(live, options=ONE_FILE).written_bytes == 0
    assert_same(live, weights(0))
    assert kept.samefile(live / "model.safetensors")


def test_a_link_in_place_of_a_file_is_not_followed(
    store: Store, live: Path, tmp_path: Path
) -> None:
    store.pull(live, options=ONE_FILE)
    file, kept = live / "model.safetensors", tmp_path / "kept"
    file.rename(kept)
    file.symlink_to(kept)
    raw = kept.read_bytes()
    take(store, 1)
    store.pull(live, options=ONE_FILE)
    assert_served(live, 1)
    assert kept.read_bytes() == raw
    file.unlink()
    file.mkdir()
    take(store, 2)
    for options in (ONE_FILE, OPTIONS):
        with pytest.raises(FileFormatError, match=r"model\.safetensors is a folder; move it away"):
            store.pull(live, options=options)
        assert (live / RECORD).exists()


# --- damage -------------------------------------------------------------------------------------


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_damage_is_mended(store: Store, live: Path, step: int, dtype: str | None) -> None:
    options = PullOptions(max_shard_size=250_000, in_place=True, dtype=dtype)
    take(store, 1)
    for name in sorted(inodes(live)) if live.exists() else [None, *range(9)]:
        store.pull(live, "step_0", options=options)
        names = sorted(inodes(live))
        if name is None:
            continue
        if name >= len(names):
            break
        file = live / names[name]
        inode = file.stat().st_ino
        flip(file, file.stat().st_size // 2)
        report = store.pull(live, f"step_{step}", options=options)
        assert report.switched
        assert verify(live) == []
        expected = weights(step)
        found = tensors_in(live)
        assert all(torch.equal(found[n], t.to(found[n].dtype)) for n, t in expected.items())
        if file.suffix == ".safetensors":
            assert file.stat().st_ino == inode
            assert report.written_bytes <= 5 * (64 << 10)
        file.unlink()
        store.pull(live, "step_0", options=options)
        assert verify(live) == []


def test_files_that_no_record_names_any_more_go(store: Store, live: Path) -> None:
    store.pull(live, options=OPTIONS)
    flip(live / RECORD, 100)
    (live / "mine.txt").write_text("stays")
    store.pull(live, options=ONE_FILE)
    assert_served(live, 0)
    assert (live / "mine.txt").exists()


def test_damage_that_only_a_look_at_all_finds(store: Store, live: Path) -> None:
    store.pull(live, options=ONE_FILE)
    file = live / "model.safetensors"
    info = file.stat()
    flip(file, 200_000)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert not store.pull(live, options=ONE_FILE).switched
    assert verify(live) != []
    report = store.pull(live, options=ONE_FILE)
    assert (report.switched, report.written_bytes) == (True, 64 << 10)
    assert_served(live, 0)


# --- killed, full, without a store --------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Return a folder with a store of two steps."""
    with memory_folder() as folder:
        store = store_at(folder / "store")
        take(store, 0)
        take(store, 1)
        yield folder


@pytest.mark.parametrize("most_kept", [0, 1 << 30])
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call(
    base: Path, after: bool, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is whole, or says that it is not; the next pull takes from it what it can."""
    monkeypatch.setattr(in_place, "_MOST_KEPT", most_kept)
    store, seen = Store(base / "store"), set()
    with memory_folder() as place:
        live = place / "live"

        def work(number: int) -> None:
            with system_faults(number, names=CALLS, after=after):
                Store(base / "store").pull(live, "step_1", options=OPTIONS)

        for number in sweep(2):
            store.pull(live, "step_0", options=OPTIONS)
            status = in_child(partial(work, number))
            found = step_of(live)
            seen.add(found)
            if status == 0:
                break
            # To that step, or to another one.
            store.pull(live, f"step_{number % 2}", options=OPTIONS)
            assert_served(live, number % 2)
            assert not (live / CHANGING).exists()
        assert {1, None} <= seen


def test_the_first_one_killed_at_any_call(base: Path) -> None:
    """The folder appears when it is whole."""
    with memory_folder() as place:
        live = place / "live"

        def work(number: int) -> None:
            with system_faults(number, names=CALLS):
                Store(base / "store").pull(live, "step_0", options=OPTIONS)

        for number in sweep(3):
            status = in_child(partial(work, number))
            assert not live.exists() or step_of(live) == 0
            if status == 0:
                break
            # What is whole, and is of another step, is not kept.
            Store(base / "store").pull(live, "step_1", options=OPTIONS)
            assert_served(live, 1)
            assert versions_of(live) == []
            shutil.rmtree(live)


@pytest.mark.parametrize("most_kept", [0, 1 << 30])
def test_no_space_left(base: Path, most_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_MOST_KEPT", most_kept)
    store, seen = Store(base / "store"), set()
    with memory_folder() as place:
        live = place / "live"
        for number in sweep():
            store.pull(live, "step_0", options=OPTIONS)
            calls = ["pwrite", "posix_fallocate", "mkdir", "fsync", "rename"]
            with system_faults(number, disk_full, calls) as struck:
                said = ""
                try:
                    store.pull(live, "step_1", options=OPTIONS)
                except StorageFullError as e:
                    said = str(e)
            found = step_of(live)
            seen.add(found)
            if said and found != 1:
                assert ("is whole after the next pull" in said) == (found is None), said
            if not struck.struck:
                break
            store.pull(live, "step_1", options=OPTIONS)
            assert_served(live, 1)
    assert {0, None} <= seen


def test_a_disk_without_a_free_page(tmp_path: Path) -> None:
    """There is room for one version, and no more; and then for nothing."""
    store = store_at(tmp_path / "store")
    take(store, 0)
    with tmpfs(tmp_path / "small", "1m") as small:
        live = small / "live"
        store.pull(live, options=ONE_FILE)
        take(store, 1)
        store.pull(live, options=ONE_FILE)
        assert_served(live, 1)
        take(store, 2)
        with suppress(OSError), (small / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(StorageFullError, match=r"no space left.*live stays as it is"):
            store.pull(live, options=ONE_FILE)
        assert_served(live, 1)
        (small / "full").unlink()
        store.pull(live, options=ONE_FILE)
        assert_served(live, 2)


def test_a_store_that_goes_away(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before all is there; where memory is short, the folder says so."""
    seen = set()
    for most_kept in (1 << 30, 0):
        monkeypatch.setattr(in_place, "_MOST_KEPT", most_kept)
        with memory_folder() as place:
            live, options = place / "live", PullOptions(in_place=True, rename=["s/a/b/g"])
            store = Store(base / "store")
            for number in itertools.count():
                store.pull(live, "step_0", options=options)

                def lost() -> None:
                    raise CasnapError("the store is gone")

                gone = backend_faults(number, lost, ["read", "read_into"], lasting=True)
                with gone as calls, suppress(CasnapError):
                    Store(base / "store").pull(live, "step_1", options=options)
                seen.add((most_kept, is_whole(live)))
                store.pull(live, "step_1", options=options)
                assert verify(live) == []
                if not calls.struck:
                    break
    assert (1 << 30, False) not in seen
    assert (0, False) in seen


def test_a_pull_that_ended_on_the_way_to_another_version(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of that version are bases of deltas, as those of the old one are."""
    host, live = Host(tmp_path, monkeypatch), tmp_path / "live"
    run.step()
    host.pull(ONE_FILE)
    run.step()
    with system_faults(7, disk_full, ["pwrite"]), pytest.raises(StorageFullError):
        host.pull(ONE_FILE)
    assert not is_whole(live)
    first = run.step()
    report = host.pull(ONE_FILE)
    assert 0 < report.received_bytes <= 2.2 * first + (80 << 10)
    run.assert_served(live)


def test_what_a_pull_has_not_synced_is_synced_by_the_next(
    store: Store, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds all chunks whole, but they may be in memory alone."""
    store.pull(live, options=ONE_FILE)
    take(store, 1)
    file, real, synced = live / "model.safetensors", os.fsync, list[bool]()

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), file.stat()):
            synced.append(True)
            if len(synced) == 1:
                raise KeyboardInterrupt
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        store.pull(live, options=ONE_FILE)
    report = store.pull(live, options=ONE_FILE)
    assert (report.written_bytes, len(synced)) == (0, 2)
    assert_served(live, 1)


def test_what_a_disk_did_not_take_is_not_believed(
    store: Store, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sync that fails, reads may give what only memory has, and the next sync succeeds."""
    store.pull(live, options=ONE_FILE)
    take(store, 1)
    file, real = live / "model.safetensors", os.fsync
    before = file.stat()

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), before):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CasnapError, match="what serves it, failed"):
            store.pull(live, options=ONE_FILE)
    assert not is_whole(live)
    with (live / "other").open("w"):  # takes the inode, if that can be had again
        report = store.pull(live, options=ONE_FILE)
    assert report.written_bytes == sum(t.nbytes for t in weights(1).values())
    (live / "other").unlink()
    assert_served(live, 1)


def test_a_file_that_another_process_writes_to(run: Run, live: Path) -> None:
    """A delta that was proven does not fit any more."""
    run.step()
    run.bucket.pull(live, options=ONE_FILE)
    run.step()
    real = in_place._WriterInPlace._settle

    def settle(writer: Any) -> None:
        flip(live / "model.safetensors", 3 << 20)
        real(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place._WriterInPlace, "_settle", settle)
        with pytest.raises(CasnapError, match=r"model\.safetensors was written to by another"):
            run.bucket.pull(live, options=ONE_FILE)
    assert not is_whole(live)
    run.bucket.pull(live, options=ONE_FILE)
    run.assert_served(live)


# --- whose folder it is -------------------------------------------------------------------------


def test_the_other_kind_of_folder_is_refused(store: Store, live: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    store.pull(live)
    store.pull(other, options=ONE_FILE)
    take(store, 1)
    before = content_of(tmp_path)
    with pytest.raises(FileFormatError, match=r"live is what a pull without --inplace .* made"):
        store.pull(live, options=ONE_FILE)
    with pytest.raises(FileFormatError, match=r"other is what a pull with --inplace .* made"):
        store.pull(other)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(FileFormatError, match="no pull made it"):
        store.pull(foreign, options=ONE_FILE)
    with pytest.raises(ValueError, match="patches= lead from the version before"):
        PullOptions(patches=True, in_place=True)
    after = content_of(tmp_path)
    assert {p for p in after if p.name != ".lock"} == {p for p in before if p.name != ".lock"}
    assert all(after[path] == raw for path, raw in before.items() if path.name != ".lock")


def test_a_folder_of_another_user(store: Store, live: Path) -> None:
    needs_root()
    store.pull(live, options=ONE_FILE)
    take(store, 1)
    os.chown(live, NOBODY, NOBODY)
    with pytest.raises(FileFormatError, match=rf"live belongs to another user \(uid {NOBODY}\)"):
        store.pull(live, options=ONE_FILE)
    os.chown(live, os.geteuid(), -1)
    # What is another user's in ours is made anew, and others lose the right to write.
    file = live / "model.safetensors"
    inode = file.stat().st_ino
    os.chown(file, NOBODY, NOBODY)
    live.chmod(0o777)
    store.pull(live, options=ONE_FILE)
    assert_served(live, 1)
    assert file.stat().st_ino != inode
    assert live.stat().st_mode & 0o022 == 0


def test_a_second_process_is_refused(store: Store, live: Path) -> None:
    events = store.follow(live, options=ONE_FILE)
    assert next(events).event == "switched"

    def pull() -> None:
        for options in (ONE_FILE, None):
            with pytest.raises(CasnapError, match=r"the process .* pulls|with --inplace"):
                Store(store.uri).pull(live, options=options)

    assert in_child(pull) == 0
    events.close()


# --- followers ----------------------------------------------------------------------------------


def test_following(store: Store, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback is called for each version that is whole, with what has changed since."""
    monkeypatch.setattr("casnap.runtime.backoff._FIRST", 0.01)
    called: list[tuple[int | None, int]] = []

    def on_version(folder: Path, changed: list[str]) -> None:
        assert folder == live
        called.append((step_of(folder), len(changed)))

    events = store.follow(live, options=ONE_FILE, interval=0, on_version=on_version, notes=False)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    take(store, 1)
    real = in_place.write_cached

    def write_cached(fd: int, view: memoryview, offset: int) -> None:
        if offset:  # else it is the note that the folder is being changed
            disk_full()
        real(fd, view, offset)

    with monkeypatch.context() as patch:
        patch.setattr(in_place, "write_cached", write_cached)
        for _ in range(2):
            event = next(events)
            assert (event.event, called) == ("failed", [(0, 9)])
            assert "whole after the next pull" in str(event.error)
            assert not is_whole(live)
            traces = read_traces(live / CHANGING)
            assert [trace.record.snapshot for trace in traces] == ["step_0", "step_1"]
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    assert called == [(0, 9), (1, 2)]
    assert not (live / CHANGING).exists()


def test_the_callback_waits_for_a_pull_that_failed_at_its_very_end(
    store: Store, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is the next version, but the report is of the one before."""
    monkeypatch.setattr("casnap.runtime.backoff._FIRST", 0.01)
    events = store.follow(live, options=ONE_FILE, interval=0, on_version=lambda *_: None)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    take(store, 1)
    real, record = os.fsync, live / RECORD

    def fsync(fd: int) -> None:
        is_last = record.exists() and '"step_1"' in record.read_text()
        if os.path.samestat(os.fstat(fd), live.stat()) and is_last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert next(events).event == "failed"
        assert step_of(live) == 1
    for name in ("switched", "called"):
        event = next(events)
        assert event.report is not None
        assert (event.event, event.report.snapshot) == (name, "step_1")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_note_that_is_no_file_is_not_read(
    store: Store, live: Path, tmp_path: Path, kind: str
) -> None:
    store.pull(live, options=ONE_FILE)
    take(store, 1)
    (live / RECORD).unlink()
    if kind == "pipe":
        os.mkfifo(live / CHANGING)
    else:
        (live / CHANGING).symlink_to(tmp_path / "elsewhere")
    store.pull(live, options=ONE_FILE)
    assert_served(live, 1)
    assert not (live / CHANGING).exists()
    (live / CHANGING).mkdir()
    take(store, 2)
    with pytest.raises(FileFormatError, match=r"casnap-changing\.json is a folder; move it away"):
        store.pull(live, options=ONE_FILE)
    assert_served(live, 1)


def test_what_was_withdrawn_is_not_written(
    store: Store, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PullOptions(in_place=True, tag="stable")
    store.publish("stable", "step_0")
    store.pull(live, options=options)
    inode_times = (live / "model.safetensors").stat().st_mtime_ns
    take(store, 1)
    store.publish("stable", "step_1")
    real = in_place._WriterInPlace._settle

    def settle(writer: Any) -> None:
        if store.tagged("stable").name != "step_0":
            store.publish("stable", "step_0")
        real(writer)

    monkeypatch.setattr(in_place._WriterInPlace, "_settle", settle)
    report = store.pull(live, options=options)
    assert (report.snapshot, report.switched) == ("step_0", False)
    assert (live / "model.safetensors").stat().st_mtime_ns == inode_times
    assert_served(live, 0)
