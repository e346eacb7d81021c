"""Without put-if-absent, a process writes only if the user vouches that it is the only writer."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from casnap import Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.base import as_exclusive
from casnap.errors import StoreError, UnavailableError
from casnap.runtime.typing import override
from casnap.storage.commit_log import put_if_absent_probe
from casnap.storage.commit_log.config import read_config
from casnap.storage.commit_log.put_if_absent_probe import honours_put_if_absent
from tests.support.faults import files
from tests.support.unavailable import unavailable

TINY = {"s": StateDict(x=1)}


class Gateway(LocalBackend):
    """A folder that stands for a server: it may overwrite what is there, or refuse to delete."""

    costly_requests = True
    has_page_cache = syncs_folders = False
    needs_probe = True
    overwrites = False
    refuses_deletes = False
    fails_at = -1

    def __init__(self, folder: Path, name: str = "") -> None:
        super().__init__(folder)
        self._name = name or os.urandom(8).hex()
        self.puts: list[str] = []

    @override
    @property
    def endpoint(self) -> str:
        return self._name

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        self.puts.append(key)
        if len(self.puts) == self.fails_at:
            raise UnavailableError("on purpose", reason="denied")
        if self.overwrites and (not self.exclusive or self.size_if_there(key) is None):
            new = self.folder / os.urandom(8).hex()
            new.write_bytes(content)
            (self.folder / "casnap-store" / key).parent.mkdir(parents=True, exist_ok=True)
            new.replace(self.folder / "casnap-store" / key)
            return True
        return super().put_if_absent(key, content)

    @override
    def delete(self, key: str) -> None:
        if self.refuses_deletes:
            raise UnavailableError("on purpose", reason="denied")
        super().delete(key)


@pytest.fixture
def gateway(tmp_path: Path, cache_dir: Path) -> Gateway:
    return Gateway(tmp_path / "store")


def test_one_of_several_puts_wins(gateway: Gateway) -> None:
    gateway.make()
    assert honours_put_if_absent(gateway)
    twice, raced = dict.fromkeys(gateway.puts)
    assert [gateway.puts.count(key) for key in (twice, raced)] == [2, 4]
    assert gateway.names("tmp") == []
    assert twice.startswith("tmp/")
    assert raced.startswith("tmp/")


def test_no_race_where_all_puts_win(gateway: Gateway) -> None:
    gateway.make()
    gateway.overwrites = True
    assert not honours_put_if_absent(gateway)
    assert len(gateway.puts) == 2
    assert gateway.names("tmp") == []


def test_a_host_probes_an_endpoint_once(
    gateway: Gateway, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probes(backend: Gateway) -> bool:
        backend.puts.clear()
        backend.make()
        assert honours_put_if_absent(backend)
        return bool(backend.puts)

    assert probes(gateway)
    assert not probes(gateway)
    assert not probes(Gateway(tmp_path / "another store", gateway.endpoint))
    assert probes(Gateway(tmp_path / "elsewhere"))
    # As in another process, a month later, then on another host.
    monkeypatch.setattr(put_if_absent_probe, "_proven_places", set())
    assert not probes(gateway)
    for note in (cache_dir / "probed").iterdir():
        os.utime(note, (0, time.time() - 31 * 86400))
    monkeypatch.setattr(put_if_absent_probe, "_proven_places", set())
    assert probes(gateway)
    monkeypatch.setattr(put_if_absent_probe, "_proven_places", set())
    assert not probes(gateway)
    monkeypatch.setattr(put_if_absent_probe, "_proven_places", set())
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "another cache"))
    assert probes(gateway)


def test_a_place_that_overwrites_is_no_place_for_a_store(gateway: Gateway) -> None:
    gateway.overwrites = True
    for _ in range(2):
        with pytest.raises(StoreError, match="--exclusive"):
            Store(gateway).make()
        assert files(gateway.folder) == set()


def test_exclusive_makes_such_a_store_and_writes_to_it(gateway: Gateway) -> None:
    gateway.overwrites = True
    store = Store(gateway, exclusive=True).make()
    assert store._view.repository.config.put_if_absent is False
    store.take(TINY, "a")
    store.tag("a", "best")
    before = files(gateway.folder)
    gateway.exclusive = False
    other = Store(gateway).make()
    writes = [
        lambda: other.take(TINY, "b"),
        lambda: other.async_take(TINY, "b").wait(),
        lambda: other.tag("a", "x"),
        lambda: other.delete("a"),
        lambda: other.prune(Retention(keep_last=1), prefix=""),
        lambda: other.gc(grace=0),
        lambda: other.repair(),
    ]
    for write in writes:
        with pytest.raises(StoreError, match="pass --exclusive, or Store"):
            write()
    assert files(gateway.folder) == before
    # Readers need no promise.
    assert other.latest() is not None
    assert other.check(data=True).ok
    assert other["a"].read_object("s/x") == 1
    other.gc(grace=0, dry_run=True)
    other.repair(dry_run=True)
    assert files(gateway.folder) == before
    other.gc(grace=0, exclusive=True)
    with pytest.raises(StoreError, match="--exclusive"):
        other.delete("a")


def test_collections_that_overlap_leave_no_promise_behind(gateway: Gateway) -> None:
    gateway.overwrites = True
    Store(gateway, exclusive=True).take(TINY, "a")
    gateway.exclusive = False
    store = Store(gateway)
    second_began, first_ended = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        second_began.set()
        assert first_ended.wait(60)

    second = threading.Thread(target=store.gc, kwargs={"exclusive": True, "progress": hold})

    def begin_second(*_: object) -> None:
        if second.ident is None:
            second.start()
        assert second_began.wait(60)

    store.gc(exclusive=True, progress=begin_second)
    first_ended.set()
    second.join()
    with pytest.raises(StoreError, match="--exclusive"):
        store.delete("a")


class Racing(Gateway):
    """A gateway where each process looks before any of them puts."""

    overwrites = True
    exclusive = True
    looked = threading.Barrier(1)

    @override
    def size_if_there(self, key: str) -> int | None:
        found = super().size_if_there(key)
        if found is None and not key.startswith("tmp/"):
            with suppress(threading.BrokenBarrierError):
                self.looked.wait(0.5)
        return found


def test_ranks_that_make_such_a_store_at_once_make_one(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Racing, "looked", threading.Barrier(3))
    gateway.overwrites = True
    assert not honours_put_if_absent(gateway)
    with ThreadPoolExecutor(3) as pool:
        places = [Racing(gateway.folder, gateway.endpoint) for _ in range(3)]
        stores = list(pool.map(lambda place: Store(place).make(), places))
    assert len({store._view.repository.config.store_id for store in stores}) == 1
    for k, store in enumerate(stores):
        store.take(TINY, f"step_{k}")
    assert [s.name for s in Store(gateway).snapshots()] == ["step_0", "step_1", "step_2"]
    assert Store(gateway).check(data=True).ok


class Late(Gateway):
    """A gateway that a process comes to late with its record, after it saw that there is none."""

    overwrites = True
    exclusive = True
    early: Store | None = None

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        if key != "casnap.json" or self.early is not None:
            return super().put_if_absent(key, content)
        early = Gateway(self.folder, self.endpoint)
        early.overwrites = early.exclusive = True
        self.early = Store(early).make()
        with as_exclusive(self, exclusive=False):  # it has looked
            return super().put_if_absent(key, content)


def test_a_maker_that_is_late_adopts_the_store_that_there_is(gateway: Gateway) -> None:
    late = Late(gateway.folder)
    store = Store(late).make()
    assert late.early is not None
    assert (
        store._view.repository.config == late.early._view.repository.config == read_config(gateway)
    )
    late.early.take(TINY, "a")
    store.take(TINY, "b")
    assert [s.name for s in Store(gateway).snapshots()] == ["a", "b"]
    assert Store(gateway).check(data=True).ok


def test_an_endpoint_that_overwrites_before_a_store_that_did_not(
    gateway: Gateway, tmp_path: Path
) -> None:
    """The record says what the maker's endpoint does; another host may use another one."""
    Store(gateway).take(TINY, "a")
    worse = Gateway(gateway.folder)
    worse.overwrites = True
    before = files(gateway.folder)
    store = Store(worse).make()
    assert store["a"].read_object("s/x") == 1
    with pytest.raises(StoreError, match="--exclusive"):
        store.take(TINY, "b")
    assert files(gateway.folder) == before
    Store(worse, exclusive=True).take(TINY, "b")
    assert [s.name for s in Store(gateway).snapshots()] == ["a", "b"]


@pytest.mark.parametrize("k", range(1, 7))
def test_a_probe_that_fails_leaves_nothing(gateway: Gateway, k: int) -> None:
    gateway.fails_at = k
    with unavailable("denied"):
        Store(gateway).make()
    assert files(gateway.folder) == set()
    gateway.puts.clear()
    gateway.fails_at = -1
    Store(gateway).make()
    assert len(set(gateway.puts)) == 4


def test_who_may_not_delete_may_still_write(gateway: Gateway) -> None:
    gateway.refuses_deletes = True
    Store(gateway).take(TINY, "a")
    assert len(gateway.names("tmp")) == 2


def test_local_disks_are_probed_once(tmp_path: Path, cache_dir: Path) -> None:
    put_if_absent_probe._proven_places.clear()
    Store(tmp_path / "one").make()
    assert len(list((cache_dir / "probed").iterdir())) == 1
    (cache_dir / "probed").rename(cache_dir / "kept")
    Store(tmp_path / "two").take(TINY, "a")
    assert not (cache_dir / "probed").exists()


def test_no_markers(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", markers=False).make()
    store.take(TINY, "a")
    assert not (tmp_path / "store/a").exists()
    Store(tmp_path / "store").take(TINY, "b")
    assert (tmp_path / "store/b/casnap-snapshot.json").exists()
    assert Snapshot("a", store=store).name == "a"
    store.delete("a")
