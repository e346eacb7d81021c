"""Whatever happens, the folder is the old or the new version, whole, and the next pull heals it."""

from __future__ import annotations

import errno
import gc
import operator
import os
import resource
import shutil
import signal
import statistics
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import casnap.runtime.backoff
from casnap import Store
from casnap.errors import (
    BackendError,
    CasnapError,
    FileFormatError,
    SnapshotNotFoundError,
    StorageFullError,
)
from casnap.serving import FollowEvent, PullOptions, verify
from casnap.serving.version import PARTS, RECORD, Version
from tests.support.faults import (
    backend_faults,
    disk_full,
    elsewhere,
    in_child,
    memory_folder,
    system_faults,
)
from tests.support.faulty import FaultyProxy
from tests.support.mounts import NOBODY, as_nobody, needs_root, tmpfs
from tests.support.object_stores import store_in
from tests.support.served import (
    CHUNK,
    assert_served,
    inodes,
    store_at,
    take,
    tensors_in,
    versions_of,
    weights,
)
from tests.support.servers import Bucket
from tests.support.sweep import sweep
from tests.support.volumes import volume

KILLED = -signal.SIGKILL
# What changes the folder, of all calls of the system.
CALLS = ["open", "pwrite", "posix_fallocate", "fsync", "link", "mkdir", "symlink", "rename"]
CALLS += ["unlink", "rmdir", "ftruncate"]
OPTIONS = PullOptions(max_shard_size=250_000, keep=1)


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Return a folder with a store of two steps, and a folder at the first of them."""
    with memory_folder() as folder:
        store = store_at(folder / "store")
        take(store, 0)
        store.pull(folder / "live", options=OPTIONS)
        take(store, 1)
        yield folder


def copy_of(base: Path, folder: Path) -> Path:
    """Copy that; the times of the files change, so these are verified anew."""
    shutil.copytree(base, folder, symlinks=True)
    # The version is to count as the one that was written.
    shutil.rmtree(folder / "live.versions")
    (folder / "live").unlink()
    Store(folder / "store").pull(folder / "live", "step_0", options=OPTIONS)
    return folder


def step_of(live: Path) -> int:
    step = 1 if live.resolve().name.startswith("step_1@") else 0
    assert_served(live, step)
    return step


@pytest.mark.sweep
@pytest.mark.parametrize("after", [False, True])
def test_killed_around_the_callback(base: Path, after: bool) -> None:
    """Each version that stays is told of at least once, and never before it is whole."""
    with memory_folder() as place:
        folder = copy_of(base, place / "f")
        live, told = folder / "live", folder / "told"

        def on_version(version: Path, changed: list[str]) -> None:
            assert_served(version, 1 if version.name.startswith("step_1@") else 0)
            with told.open("a") as f:
                f.write(f"{version.name}\n")

        def follow(number: int) -> None:
            with system_faults(number, names=[*CALLS, "replace"], after=after):
                for event in Store(folder / "store").follow(
                    live, options=OPTIONS, on_version=on_version
                ):
                    assert event.event != "failed"
                    if event.event == "called":
                        return

        for number in sweep(3):
            told.write_text("")
            status = in_child(partial(follow, number))
            if status == 0:
                break
            assert status == KILLED
            noted = folder / "live.versions/.called.json"
            if step_of(live) == 0 or '"step_1"' not in (
                noted.read_text() if noted.exists() else ""
            ):
                assert in_child(partial(follow, 1 << 30)) == 0
            assert_served(live, 1)
            assert told.read_text().splitlines()[-1] == live.resolve().name
            Store(folder / "store").pull(live, "step_0", options=OPTIONS)
            noted.unlink()


def test_a_snapshot_that_is_collected_while_it_is_pulled(base: Path) -> None:
    outcomes = set()
    for number in sweep():
        with memory_folder() as place:
            folder = copy_of(base, place / "f")
            live = folder / "live"

            def collect(folder: Path = folder) -> None:
                other = Store(folder / "store")
                other.delete("step_1")
                for _ in range(2):
                    other.gc(grace=0)

            reads = ["read", "read_into"]
            struck = backend_faults(number, elsewhere(collect), reads)
            with struck as calls, suppress(SnapshotNotFoundError):
                Store(folder / "store").pull(live, "step_1", options=OPTIONS)
            outcomes.add(step_of(live))
            Store(folder / "store").pull(live, options=OPTIONS)
            if calls.struck:
                assert_served(live, 0)
            else:
                break
    assert outcomes == {0, 1}


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def damages(folder: Path) -> Iterator[Callable[[], object]]:
    for file in sorted(folder.iterdir()):
        yield partial(os.truncate, file, file.stat().st_size // 2)
        yield file.unlink
        yield partial(file.write_bytes, b"{}")
        yield partial(flip, file, file.stat().st_size // 2)


def test_a_folder_that_was_tampered_with(base: Path) -> None:
    with memory_folder() as place:
        folder = copy_of(base, place / "f")
        live, store = folder / "live", Store(folder / "store")
        count = len(list(damages(live.resolve())))
        assert count == 4 * len(inodes(live))
        for number in range(count):
            list(damages(live.resolve()))[number]()
            # The newest snapshot, as it was.
            store.pull(live, "step_0", options=OPTIONS)
            assert_served(live, 0)
        # And the next snapshot, from a version that is damaged.
        for number in range(count):
            store.pull(live, "step_0", options=OPTIONS)
            list(damages(live.resolve()))[number]()
            store.pull(live, options=OPTIONS)
            assert_served(live, 1)
        shutil.rmtree(live.resolve())
        store.pull(live, options=OPTIONS)
        assert_served(live, 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_rot_is_found_by_one_of_the_next_pulls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_place: bool
) -> None:
    """It was linked into each next version, or stayed in place: length and times were as before."""
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    options = PullOptions(max_shard_size=100_000, keep=1, in_place=in_place)
    for step in range(2):
        take(store, step, frozen=torch.arange(20 * CHUNK // 4, dtype=torch.float32))
    store.pull(live, options=options)
    file = max(live.glob("*.safetensors"), key=lambda path: path.stat().st_size).name
    pulls = list[int]()
    # A place in the header, then one in each third chunk.
    for at in (20, *range(CHUNK // 2, 20 * CHUNK, 3 * CHUNK)):
        rot(live.resolve() / file, at)
        caplog.clear()
        for number in range(1, PARTS + 1):
            name = store.pull(live, f"step_{number % 2}", options=options).snapshot
            if caplog.records:
                break
        pulls.append(number)
        assert f"the bytes of {file} have changed" in caplog.text
        assert verify(live) == [], name
    assert len(set(pulls)) > 3, "not all parts are read at once"


def test_who_has_read_rot_is_told_what_was_mended(tmp_path: Path) -> None:
    """The tensor has the digest that it had before, so it was not named, and the rot was kept."""
    store, live, held = store_at(tmp_path / "store"), tmp_path / "live", dict[str, torch.Tensor]()
    options = PullOptions(max_shard_size=100_000)

    def on_version(folder: Path, changed: list[str]) -> None:
        found = tensors_in(folder)
        held.update({name: found[name] for name in changed})

    def called() -> FollowEvent:
        events = store.follow(live, interval=0, options=options, on_version=on_version)
        return next(event for event in events if event.event == "called")

    take(store, 0)
    store.pull(live, options=options)
    version = Version.at(live)
    assert version is not None
    about = version.record.tensors["norm"]
    rot(live.resolve() / about.file, about.start)
    called()
    assert not held["norm"].equal(weights(0)["norm"])
    take(store, 1)
    report = called().report
    assert report is not None
    assert {"norm", "bias"} <= set(report.changed) < weights(1).keys()
    assert all(held[name].equal(tensor) for name, tensor in weights(1).items())


def rot(file: Path, at: int) -> None:
    """Change a bit as a disk does, of which the file system knows nothing."""
    info = file.stat()
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_rot_of_a_version_that_becomes_current_again(tmp_path: Path) -> None:
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    for step in range(2):
        take(store, step)
        store.pull(live)
    before = Path(store.pull(live, "step_0").folder)
    rot(before / "model.safetensors", 300_000)
    for _ in range(PARTS):
        for step in (1, 0):
            store.pull(live, f"step_{step}")
    assert_served(live, 0)
    assert live.resolve() != before


def test_a_file_system_whose_inodes_change(tmp_path: Path) -> None:
    """Each look took the version for another one, and made it anew."""
    store = store_at(tmp_path / "store")
    take(store, 0)
    with volume(tmp_path / "volume", inodes=False) as disk:
        for live, options in (
            (disk.path / "live", PullOptions(max_shard_size=250_000)),
            (disk.path / "placed", PullOptions(max_shard_size=250_000, in_place=True)),
        ):
            assert len(set(inodes(disk.path).values()) & set(inodes(disk.path).values())) == 0
            store.pull(live, "step_0", options=options)
            assert not store.pull(live, "step_0", options=options).switched
            take(store, 1, f"{live.name}_1")
            report = store.pull(live, options=options)
            assert report.linked_bytes > 400_000
            assert_served(live, 1)
            events = store.follow(live, options=options, interval=0, on_version=lambda *_: None)
            assert [next(events).event for _ in range(2)] == ["switched", "called"]
            take(store, 1, f"{live.name}_2")
            assert [next(events).event for _ in range(2)] == ["switched", "called"]
            events.close()


def test_a_record_that_was_changed(base: Path) -> None:
    """Each byte counts: of the metadata, say, which are served too."""
    with memory_folder() as place:
        folder = copy_of(base, place / "f")
        live, store = folder / "live", Store(folder / "store")
        for at in range(0, (live / "casnap-version.json").stat().st_size, 37):
            record = live.resolve() / "casnap-version.json"
            text = record.read_bytes()
            if not text[at : at + 1].isspace():
                flip(record, at)
                with pytest.raises(FileFormatError, match="nothing to compare"):
                    verify(live)
                record.write_bytes(text)
        flip(record, text.index(b'"step": 0') + 8)
        assert store.pull(live, "step_0", options=OPTIONS).switched
        assert_served(live, 0)


def test_casts_from_a_version_that_is_damaged(base: Path) -> None:
    options = PullOptions(max_shard_size=250_000, dtype="float16")
    with memory_folder() as place:
        live, store = place / "live", Store(base / "store")
        for pattern in ("casnap-chunks", "*.safetensors"):
            store.pull(live, "step_0", options=options)
            flip(sorted(live.resolve().glob(pattern))[-1], 10)
            store.pull(live, "step_1", options=options)
            assert verify(live) == []


def test_a_bucket_that_goes_away(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(casnap.runtime.backoff, "_FIRST", 0.02)
    monkeypatch.setattr(casnap.runtime.backoff, "_LONGEST", 0.05)
    live = tmp_path / "live"
    store = store_in(bucket)
    take(store, 0)
    with FaultyProxy(bucket.server.endpoint) as proxy:
        events = store_in(bucket, proxy.url).follow(live, interval=0.01)
        assert next(events).report.snapshot == "step_0"
        take(store, 1)
        with proxy.down():
            assert next(events).event == "failed"
            assert_served(live, 0)
        event: FollowEvent = next(events)
        while event.event == "failed":
            event = next(events)
    assert event.report is not None
    assert event.report.snapshot == "step_1"
    assert_served(live, 1)


def test_many_versions_leave_nothing(base: Path) -> None:
    with memory_folder() as place:
        folder = copy_of(base, place / "f")
        live, store = folder / "live", Store(folder / "store")
        # Notes are put by another thread, and so would open files just now.
        options = {"options": OPTIONS, "interval": 0, "notes": False}
        events = store.follow(live, on_version=lambda *_: None, **options)
        sizes, files = [], []
        tracemalloc.start()
        try:
            for step in range(2, 16):
                take(store, step)
                if step > 3:
                    store.delete(f"step_{step - 2}")
                while next(events).event != "called":
                    pass
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
                files.append(len(list(Path("/proc/self/fd").iterdir())))
        finally:
            tracemalloc.stop()
        assert_served(live, 15)
        assert len(versions_of(live)) == 1
        assert len(set(files[5:])) == 1
        # What leaks, each version leaks; another thread may import modules at some time.
        assert statistics.median(map(operator.sub, sizes[5:], sizes[4:])) < 64 << 10


# --- what cannot be looked at -------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_version_that_cannot_be_looked_at_is_not_none(tmp_path: Path, code: int) -> None:
    """It was taken for none: all was made anew, and told of to who follows."""
    store, told = store_at(tmp_path / "store"), list[list[str]]()

    def follow() -> FollowEvent:
        events = store.follow(
            disk.path / "live", interval=0, on_version=lambda _, changed: told.append(changed)
        )
        return next(event for event in events if event.event != "switched")

    with volume(tmp_path / "volume") as disk:
        take(store, 0)
        assert follow().event == "called"
        take(store, 1)
        disk.fail(".called.json", code)
        event = follow()
        assert event.event == "call_failed"
        assert os.strerror(code) in str(event.error)
        disk.heal()
        disk.fail(RECORD, code)
        for look in (
            follow,
            lambda: store.pull(disk.path / "live"),
            lambda: verify(disk.path / "live"),
        ):
            with pytest.raises(BackendError, match=os.strerror(code)):
                look()
        disk.heal()
        assert follow().event == "called"
        assert [len(changed) for changed in told] == [9, 2]
        assert len(versions_of(disk.path / "live")) == 2


# --- what the system says -----------------------------------------------------------------------


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Mount a folder once more, for reading alone."""
    needs_root()
    place = folder.with_name("mounted")
    place.mkdir()
    mount = ["mount", "--bind", "-o", "ro", folder, place]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def pulls_at(store: Store, live: Path) -> Iterator[Callable[[], object]]:
    """Return what pulls into a folder: one pull, and a follower."""
    yield lambda: store.pull(live)
    yield lambda: next(store.follow(live))


def test_a_folder_that_is_mounted_read_only(tmp_path: Path) -> None:
    store, place = store_at(tmp_path / "store"), tmp_path / "place"
    place.mkdir()
    take(store, 0)
    store.pull(place / "live")
    take(store, 1)
    with read_only(place) as mounted:
        for live in (mounted / "live", mounted / "new"):
            for pull in pulls_at(store, live):
                with pytest.raises(BackendError, match=r"mounted/.*mounted read-only"):
                    pull()
        assert_served(mounted / "live", 0)
    take(store, 2)
    store.pull(place / "live")
    assert_served(place / "live", 2)


def test_a_folder_that_this_user_may_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, place = store_at(tmp_path / "store"), tmp_path / "place"
    place.mkdir()
    take(store, 0)

    def work() -> None:
        for pull in pulls_at(Store(store.uri), place / "live"):
            with pytest.raises(BackendError, match=r"live.versions: Permission denied; may this"):
                pull()

    as_nobody(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("closed", ["place", "place/live.versions", "place/live.versions/x"])
def test_a_lock_that_this_user_may_not_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """Reading is enough to lock it; a folder that is closed is said by its name."""
    store, place = store_at(tmp_path / "store"), tmp_path / "place"
    take(store, 0)
    place.mkdir()
    store.pull(place / "live")
    needs_root()
    for path in (place, place / "live", *place.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    (place / "live.versions/.lock").chmod(0o444)
    if closed != "place/live.versions/x":
        (tmp_path / closed).chmod(0o000)

    def work() -> None:
        for pull in pulls_at(Store(store.uri), place / "live"):
            if closed == "place/live.versions/x":
                pull()
            else:
                with pytest.raises(BackendError, match=r"place.*: Permission denied"):
                    pull()

    as_nobody(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("most", [0, 4096, 1 << 18])
def test_a_bound_on_the_size_of_files(base: Path, most: int) -> None:
    with memory_folder() as place:
        folder = copy_of(base, place / "f")
        before = versions_of(folder / "live")

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            store = Store(folder / "store")
            for live in (folder / "live", place / "new"):
                for pull in pulls_at(store, live):
                    with pytest.raises(BackendError, match="ulimit -f") as caught:
                        pull()
                    assert not isinstance(caught.value, StorageFullError)

        assert in_child(work) == 0
        assert versions_of(folder / "live") == before
        assert step_of(folder / "live") == 0


def test_a_disk_that_is_full_at_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not made cannot be looked at either."""
    store = store_at(tmp_path / "store")
    take(store, 0)
    real = os.open

    def full_for_the_lock(path: Any, *args: Any, **options: Any) -> int:
        if path == ".lock":
            disk_full()
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full_for_the_lock)
        for pull in pulls_at(store, tmp_path / "live"):
            with pytest.raises(StorageFullError, match=r"no space left.*live stays as it is"):
                pull()
    store.pull(tmp_path / "live")
    assert_served(tmp_path / "live", 0)


def test_a_disk_without_a_free_page(tmp_path: Path) -> None:
    """What a pull that was killed has left fills it: the next one removes that first."""
    store = store_at(tmp_path / "store")
    take(store, 0)
    with tmpfs(tmp_path / "small", "2m") as small:

        def fill(name: str) -> None:
            (small / name).parent.mkdir(exist_ok=True)
            with suppress(OSError), (small / name).open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        fill("full")
        for pull in pulls_at(store, small / "live"):
            with pytest.raises(StorageFullError, match=r"no space left.*live stays as it is"):
                pull()
        (small / "full").unlink()
        store.pull(small / "live")
        take(store, 1)
        fill("live.versions/.step_1.partial/model.safetensors")
        store.pull(small / "live")
        assert_served(small / "live", 1)
        # With nothing to write, nothing fails.
        fill("full")
        assert not store.pull(small / "live").switched


def test_a_place_that_is_none(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for place in ("file", "loop"):
        for pull in pulls_at(store, tmp_path / place / "live"):
            with pytest.raises(BackendError, match=f"{place}"):
                pull()
    for pull in pulls_at(store, tmp_path / "none/live"):
        with pytest.raises(FileNotFoundError):
            pull()
    for pull in pulls_at(store, tmp_path / ("x" * 250)):
        with pytest.raises(CasnapError, match="File name too long"):
            pull()
