"""A store on file systems that clusters have: backends, two hosts, kills, a full disk.

`make test-filesystems` runs it. ``shared_mounts.py`` mounts them, and says what it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import casnap
from casnap import NewStore, Store
from casnap.backends import LocalBackend
from casnap.errors import StorageFullError
from casnap.testing.backend_suite import Opener, SharedBackendSuite
from tests.support.faults import assert_holds, take
from tests.support.shared_mounts import DISKS, SHARED, hosts_of
from tests.support.volumes import volume
from tests.support.writing_hosts import KEPT, fill, read, started, write, write_for_ever

pytestmark = pytest.mark.filesystems

ALL = {**DISKS, **SHARED}
# The suite asks each for the same; what clients cache matters to two hosts alone.
ONE_HOST = [
    *DISKS,
    "bindfs 1,1,0",
    "bindfs, one user",
    "sshfs",
    "mergerfs",
    "gluster",
    "nfs",
    "juicefs",
]


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a folder on a disk: servers need one."""
    with TemporaryDirectory(prefix="casnap-filesystems-", dir="/var/tmp") as folder:
        yield Path(folder)


@contextmanager
def mounted(kind: str) -> Iterator[list[Path]]:
    with (
        TemporaryDirectory(prefix="casnap-filesystems-", dir="/var/tmp") as folder,
        ALL[kind](Path(folder)) as mounts,
    ):
        yield mounts


@pytest.fixture(scope="module", params=ALL)
def places(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """Return where a file system is mounted, by each host."""
    with mounted(request.param) as mounts:
        yield mounts


@pytest.fixture(scope="module", params=ONE_HOST)
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    with mounted(request.param) as mounts:
        yield mounts[0]


@pytest.fixture
def stores(places: list[Path]) -> list[tuple[str, Path]]:
    """Return the hosts, and an empty folder as each of them sees it."""
    name = os.urandom(4).hex()
    (places[0] / name).mkdir()
    return [(host, place / name) for host, place in hosts_of(places)]


class TestBackend(SharedBackendSuite):
    @pytest.fixture
    def opener(self, place: Path) -> Opener:
        folder = place / os.urandom(4).hex()
        folder.mkdir()
        return partial(LocalBackend, folder)


def test_two_hosts_write_and_collect_and_one_reads(
    stores: list[tuple[str, Path]], tmp_path: Path
) -> None:
    Store(stores[0][1], create=NewStore(chunk_size=64 << 10))
    hosts = [started(write, host, place, tmp_path) for host, place in stores]
    reader, line = started(read, "reader", stores[-1][1], tmp_path)
    said = [line.recv() for _, line in hosts]
    line.send("stop")
    said.append(line.recv())
    for process in (*(process for process, _ in hosts), reader):
        process.join(300)
    assert said == [""] * len(said), "\n".join(said)
    for _, place in stores:
        store = Store(place)
        assert store.check(data=True).ok
        for host, _ in stores:
            assert len(store.snapshots(host)) == KEPT


def test_a_host_goes_on_where_another_one_was_killed(
    stores: list[tuple[str, Path]], tmp_path: Path
) -> None:
    (first, place), (second, other_place) = stores[:2]
    Store(place, create=NewStore(chunk_size=64 << 10))
    for takes in (1, 2, 3):
        process, line = started(write_for_ever, first, place, tmp_path)
        assert [line.recv() for _ in range(takes)] == [""] * takes
        process.kill()
        process.join(300)
        process, line = started(write, second, other_place, tmp_path)
        assert line.recv() == ""
        process.join(300)
    store = Store(other_place)
    store.gc(grace=0)
    assert store.check(data=True).ok
    assert len(store.snapshots(second)) == KEPT


def test_the_doctor_finds_that_it_can_hold_a_store(stores: list[tuple[str, Path]]) -> None:
    report = casnap.doctor(stores[0][1], wait=0)
    assert report.ok, report.summary
    assert list(stores[0][1].iterdir()) == []


def take_many(store: Path) -> None:
    for step in range(1, 100):
        take(store, step)


@pytest.mark.parametrize("kind", ["xfs", "btrfs", "overlay", "tmpfs"])
def test_a_full_disk_loses_nothing(kind: str, work: Path) -> None:
    with DISKS[kind](work) as (place,):
        store = place / "store"
        take(store, 0)
        ballast = fill(place, 1 << 20)
        with pytest.raises(StorageFullError, match="no space left"):
            take_many(store)
        for snapshot in Store(store).snapshots():
            assert_holds(snapshot, snapshot.metadata.user["step"])
        ballast.unlink()
        take(store, 100)
        assert Store(store).check(data=True).ok


def test_no_store_is_made_without_hard_links(tmp_path: Path) -> None:
    with volume(tmp_path / "drive", links=False) as drive:
        assert not casnap.doctor(drive.path, wait=0).ok
        with pytest.raises(casnap.errors.BackendError, match="has no hard links"):
            take(drive.path / "store", 0)
