"""File systems whose clients cache: what another host has put is there, and not seen at once."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import casnap.backends.late_names
from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.late_names import is_taken_at_server
from casnap.backends.local_files import safe_paths
from casnap.errors import DamagedError
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.marker_files import unknown_markers
from tests.support.faults import in_child
from tests.support.faulty import Fault, FaultyBackend, before, fail, stale
from tests.support.mounts import bindfs

LOOKS = ("read", "size")
SIZE = 100_000


def state(value: float) -> dict[str, StateDict]:
    return {"s": StateDict(x=torch.full((SIZE,), value))}


def value_of(store: Store, name: str) -> float:
    out = state(-1.0)
    store[name].restore(out)
    first = out["s"]["x"][0].item()
    assert torch.equal(out["s"]["x"], torch.full((SIZE,), first))
    return float(first)


def client(folder: Path, name_lag: float = 60.0) -> FaultyBackend:
    """Return a store's place as a host sees it that may see names late."""
    backend = FaultyBackend(LocalBackend(folder))
    backend.name_lag = name_lag
    return backend


def unseen(key: str, times: int | None = 3) -> Fault:
    """Return that a client takes an object for absent at first."""
    return Fault(fail(FileNotFoundError), LOOKS, key, times=times)


def on_another_host(folder: Path, work: Callable[[Store], object]) -> None:
    """Use a store in another process, which has a cache of its own."""

    def use() -> None:
        os.environ["CASNAP_CACHE_DIR"] = str(folder.with_name("another_host"))
        work(Store(folder))

    assert in_child(use) == 0


def collected(store: Store) -> None:
    """Replace packs and segments of a store."""
    store.delete("step_1")
    store.take(state(2.5), "step_3")
    store.gc(grace=0, repack=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with two snapshots: its newest root is number 2."""

    def take(store: Store) -> None:
        for step in (1, 2):
            store.take(state(step), f"step_{step}")

    on_another_host(tmp_path / "store", take)
    return tmp_path / "store"


# --- a client that answers late ------------------------------------------------------------------


def test_a_root_that_is_listed_and_not_there_yet(folder: Path) -> None:
    backend = client(folder)
    with backend.during(unseen("roots/0/2")) as (late,):
        assert value_of(Store(backend), "step_2") == 2
    assert late.struck == 3


def test_a_number_that_is_taken_by_a_root_not_seen_yet(folder: Path) -> None:
    """Only the put is decided at the server: listings and looks of the writer are older."""
    backend = client(folder)
    store = Store(backend)

    def take_theirs() -> None:
        on_another_host(folder, lambda other: other.take(state(3), "theirs"))

    first = Fault(before(take_theirs), "put_if_absent", "roots/0/3")
    listing = Fault(stale(), "names", "roots/0", times=None)
    with backend.during(first, listing, unseen("roots/0/3")) as (_, _, late):
        store.take(state(4), "ours")
    assert late.struck == 3
    for host in (store, Store(folder)):
        assert {name: value_of(host, name) for name in ("theirs", "ours")} == {
            "theirs": 3,
            "ours": 4,
        }


def test_an_absent_root_is_not_asked_for_by_name(folder: Path) -> None:
    """A client would keep that it is absent, and hide the root that another host then puts."""
    backend = client(folder)
    store = Store(backend)
    store.latest()
    store.take(state(3), "step_3")
    store.latest()
    asked = {key for name, key in backend.log if name in LOOKS}
    assert "roots/0/3" in asked
    assert "roots/0/4" not in asked


def test_a_client_that_keeps_listings(folder: Path) -> None:
    """As sshfs does for 20 seconds. With a lag of a day, a wait would not end."""
    backend = client(folder, 86400.0)
    store = Store(backend)
    with backend.during(Fault(stale(), "names", times=None)):
        assert value_of(store, "step_2") == 2
        on_another_host(folder, collected)
        assert value_of(store, "step_3") == 2.5
        store.take(state(4), "step_4")
    assert value_of(Store(folder), "step_4") == 4


def test_a_client_that_has_listed_a_store_before_its_first_root(folder: Path) -> None:
    backend = client(folder)
    with backend.during(Fault(lambda _: [], "names", "roots*", times=None)):
        assert value_of(Store(backend), "step_2") == 2


def test_a_name_that_another_host_takes_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of sshfs refuses the link without a reason, and sshfs makes that EPERM."""
    backend = LocalBackend(tmp_path)
    backend._place._name_lag = 60.0
    backend.put_if_absent("roots/0/0", b"theirs")
    link, refused = os.link, []

    def refuse_once(*names: Any, **folders: Any) -> None:
        try:
            link(*names, **folders)
        except FileExistsError:
            if refused:
                raise
            refused.append(names)
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None

    monkeypatch.setattr(os, "link", refuse_once)
    assert not backend.put_if_absent("roots/0/0", b"ours")
    assert refused
    assert backend.read("roots/0/0") == b"theirs"


def test_the_server_is_asked_for_a_name(tmp_path: Path) -> None:
    for place in ("folder", "folder/file", "folder/inner/file"):
        assert not is_taken_at_server(str(tmp_path / place))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    assert is_taken_at_server(str(tmp_path / "folder"))
    assert is_taken_at_server(str(tmp_path / "folder/file"))
    assert not is_taken_at_server(str(tmp_path / "folder/other"))
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["file"]


@pytest.mark.parametrize("file", ["packs/*", "index/*"])
def test_a_file_that_the_newest_root_names_and_that_is_not_there_yet(
    folder: Path, file: str
) -> None:
    backend = client(folder)
    store = Store(backend)
    on_another_host(folder, lambda other: other.take(state(3), "step_3"))
    late = Fault(fail(FileNotFoundError), (*LOOKS, "read_into"), file, times=7)
    with backend.during(late):
        assert value_of(store, "step_3") == 3
    assert late.struck == 7


@pytest.mark.parametrize("file", ["packs/*", "index/*"])
def test_a_file_that_a_collector_has_deleted_is_not_waited_for(folder: Path, file: str) -> None:
    """The newest root does not name it. With a lag of a day, a wait would not end."""
    backend = client(folder, 86400.0)
    store = Store(backend)
    calls = ("read", "read_into")
    first = Fault(before(lambda: on_another_host(folder, collected)), calls, file)
    with backend.during(first):
        assert value_of(store, "step_2") == 2
    assert first.struck == 1


def test_a_segment_that_is_gone_and_still_shown(folder: Path) -> None:
    """A client shows the name of what a collector has deleted; the newer root has another one."""
    backend = client(folder)
    store = Store(backend)
    first = Fault(before(lambda: on_another_host(folder, collected)), "read", "index/*")
    shown = Fault(lambda _: 1000, "size", "index/*", times=None)
    with backend.during(first, shown):
        assert value_of(store, "step_2") == 2
    assert first.struck == 1
    # Twice before the table is read, and once more where the segment could not be.
    assert shown.struck == 3


def test_markers_are_looked_for_while_another_host_collects(folder: Path) -> None:
    """The table of the root that was read is gone before it is read."""
    backend = client(folder)
    store = Repository(backend)
    first = Fault(before(lambda: on_another_host(folder, collected)), "read_into", "packs/*")
    with backend.during(first):
        assert unknown_markers(store) == {}
    assert first.struck == 1


def test_a_take_relies_on_a_pack_that_is_not_there_yet(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = client(folder)
    with backend.during(Fault(fail(FileNotFoundError), LOOKS, "packs/*", times=3)) as (late,):
        Store(backend).take(state(2), "again")
    assert late.struck == 3
    assert not caplog.records
    assert Store(folder)["again"].stats.new_bytes < SIZE


def test_a_handle_that_the_server_has_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One fresh look gets it anew."""
    at_once, stale_once = safe_paths._open, ["roots/0/2", "packs/", "casnap.json"]

    def opened(path: str, *arguments: Any) -> int:
        for name in stale_once:
            if name in path:
                stale_once.remove(name)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return at_once(path, *arguments)

    monkeypatch.setattr(safe_paths, "_open", opened)
    assert value_of(Store(folder), "step_2") == 2
    assert not stale_once


def test_a_folder_that_another_host_makes_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GlusterFS calls it stale then."""
    make, stale_once = os.mkdir, ["roots", "0"]

    def made(name: str, *arguments: Any, **options: Any) -> None:
        make(name, *arguments, **options)
        if name in stale_once:
            stale_once.remove(name)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)

    monkeypatch.setattr(os, "mkdir", made)
    store = Store(tmp_path / "new")
    store.take(state(1), "step_1")
    assert value_of(store, "step_1") == 1
    assert not stale_once


@pytest.mark.parametrize("lag", [0.0, 0.05])
def test_a_root_that_is_lost(folder: Path, lag: float) -> None:
    """It is damage once a client would see it; on a disk, at the first look."""
    backend = client(folder, lag)
    with (
        backend.during(unseen("roots/0/2", None)) as (late,),
        pytest.raises(DamagedError, match="roots/0/2 is listed, but not there"),
    ):
        Store(backend).latest()
    assert (late.struck == 1) == (lag == 0)


def test_a_line_says_what_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(casnap.backends.late_names, "_TOLD_AFTER", 0.0)
    backend = client(folder)
    with backend.during(unseen("roots/0/2", 8)), caplog.at_level(logging.WARNING, "casnap"):
        Store(backend).latest()
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"waiting for {folder}/casnap-store/roots/0/2, which must be there")


# --- two mounts of one folder, each with caches of its own ---------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[str], list[Path]]]:
    """Return what mounts a new folder twice, with some caches, and returns the two places."""
    with ExitStack() as mounts:

        def mount(caches: str) -> list[Path]:
            (tmp_path / "below").mkdir()
            names = ("attr_timeout", "entry_timeout", "negative_timeout")
            options = ",".join(map("=".join, zip(names, caches.split(","), strict=True)))
            return [
                mounts.enter_context(bindfs(tmp_path / "below", tmp_path / host, options))
                for host in ("a", "b")
            ]

        yield mount


@pytest.mark.parametrize("caches", ["0,0,0", "30,30,0", "30,30,30"])
def test_two_hosts_take_in_turn(hosts: Callable[[str], list[Path]], caches: str) -> None:
    """What a host has looked for in vain is put by the other one a moment later."""
    stores = [Store(place / "store") for place in hosts(caches)]
    for step in range(3):
        for host, store in enumerate(stores):
            store.take(state(2 * step + host), f"{host}/{step}")
            assert [value_of(s, f"{host}/{step}") for s in stores] == [2 * step + host] * 2
        stores[step % 2].delete(f"0/{step}")
        stores[step % 2].gc(grace=0)
    assert all(store.check(data=True).ok for store in stores)


def test_what_a_client_keeps_of_deleted_files_is_nobodys(
    hosts: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    """FUSE and NFS rename a file that is deleted while it is open."""
    place, _ = hosts("1,1,1")
    left = place / "store/casnap-store/tmp/.fuse_hidden0000000700000002"
    left.parent.mkdir(parents=True)
    left.touch()
    store = Store(place / "store")
    store.take(state(1), "step_1")
    assert value_of(store, "step_1") == 1
    left.unlink()
    assert store.check().ok
    assert not [*(tmp_path / "below").rglob(".fuse_hidden*")], "of our own"


@pytest.mark.parametrize("name", [".fuse_hidden0000000700000002", ".nfs000000000000004200000001"])
def test_what_a_client_never_deletes_goes_with_a_collection(tmp_path: Path, name: str) -> None:
    """Some clients of FUSE forget it. One that a program may have open, of today, stays."""
    store = Store(tmp_path / "store")
    store.take(state(1), "step_1")
    left = tmp_path / "store/casnap-store/tmp" / name
    left.write_bytes(bytes(100))
    store.gc()
    assert left.exists()
    os.utime(left, (0, 0))
    assert store.gc().freed_bytes == 100
    assert not left.exists()


def test_first_takes_on_one_mount(hosts: Callable[[str], list[Path]]) -> None:
    """Inodes and times that a client shows late are no other store's."""
    place, _ = hosts("1,1,0")
    for n in range(8):
        Store(place / f"store_{n}").take({"s": StateDict(x=n)}, "step_1")
        assert Store(place / f"store_{n}")["step_1"].read_object("s/x") == n
