"""On a remote store, how many requests a take, an open and a read make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import Snapshot, StateDict, Store
from casnap.cli.arguments import check_folder
from casnap.cli.output import CommandError
from casnap.errors import DamagedError, NotAStoreError, SnapshotNotFoundError
from casnap.format.digest import Digest
from casnap.format.records import Root, pack_key
from casnap.storage import Contents
from casnap.storage.commit_log.roots import newest_root
from casnap.storage.reading.repository import Repository
from casnap.view import View, repository_of
from tests.support.remote import RemoteDouble
from tests.support.written import put_next_root


def state_of(tensors: int = 20, seed: int = 0) -> dict[str, StateDict]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "model": StateDict(
            **{f"w{i}": torch.randn(100_000, generator=drawn) for i in range(tensors)}
        )
    }


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Return the name of a store of its own, with one snapshot of this host."""
    name = str(tmp_path)
    Store(RemoteDouble(name)).take(state_of(), "first")
    return name


def fresh_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "another-host"
    folder.mkdir()
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(folder))


def chunk_requests(backend: RemoteDouble, store: Store, path: str) -> int:
    """Return how many requests read the packs of chunks of an entry."""
    contents = store["first"].contents
    inner, entry, _ = contents.entry(path)
    digests = [digest for digest, _ in contents.chunks(inner, entry)]
    places = store._view.repository.index.find(store._view.repository.view(), digests)
    keys = {pack_key(place.pack) for place in places if place is not None}
    return sum(kind == "get" and key in keys for kind, key in backend.log)


def test_a_store_is_made_by_few_requests(tmp_path: Path) -> None:
    """Beside these a real server is asked for rules of the bucket, and probed once by a host."""
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend).make()
    assert backend.count <= 9, backend.log
    backend.reset()
    store.take(state_of(1), "first")
    assert set(backend.requests) <= {"put", "get"}, backend.log


# --- takes ---


def test_an_unchanged_take_of_a_warm_host(name: str) -> None:
    """Also in a new process, which the cache of the host makes warm."""
    for number in range(6):
        backend = RemoteDouble(name)
        store = Store(backend).make()
        store.take(state_of(), f"step_{number}")
        assert backend.count <= 9, backend.log
        # The packs are looked at once for each process.
        assert backend.requests["list"] <= 1
        backend.reset()
        store.take(state_of(), f"again_{number}")
        assert backend.count <= 8, backend.log


@pytest.mark.parametrize(("markers", "puts"), [(True, 4), (False, 3)])
def test_an_unchanged_take_of_a_fresh_host(
    name: str, markers: bool, puts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens the store by five requests, lists the packs by one, and puts three objects.

    So there are eight, a list for each 1,000 packs, and the marker, which is optional.
    """
    fresh_host(tmp_path, monkeypatch)
    backend = RemoteDouble(name)
    snapshot = Store(backend, markers=markers).take(state_of(), "second")
    assert backend.requests["put"] <= puts
    assert backend.count <= 6 + puts, backend.log
    assert snapshot.stats.new_bytes < 10_000


def test_packs_are_looked_at_by_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and once a day: what this host has seen, it believes."""
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend).make()
    for number in range(12):
        store.take(state_of(2, seed=number), f"step_{number}")
    every = {
        "model": StateDict(
            **{f"w{n}_{k}": v for n in range(12) for k, v in state_of(2, n)["model"].items()}
        )
    }
    fresh_host(tmp_path, monkeypatch)
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend).make()
    store.take(every, "all")
    assert backend.requests.get("head", 0) == 0
    assert sum(key == "packs" for kind, key in backend.log if kind == "list") <= 1
    backend.reset()
    store.take(every, "again")
    assert "list" not in backend.requests


def test_a_pack_that_is_gone_is_stored_anew_after_a_read_has_missed_it(name: str) -> None:
    """A warm host believes that it is there; the read tells it otherwise."""
    backend = RemoteDouble(name)
    store = Store(backend).make()
    contents = store["first"].contents
    inner, entry, _ = contents.entry("model/w0")
    digests = [digest for digest, _ in contents.chunks(inner, entry)]
    place = store._view.repository.index.find(store._view.repository.view(), digests)[0]
    assert place is not None
    backend.delete(pack_key(place.pack))
    with pytest.raises(DamagedError):
        store["first"].read_object("model/w0")
    store.take(state_of(), "second")
    for path, tensor in state_of()["model"].items():
        assert torch.equal(store["second"].read_object(f"model/{path}"), tensor)


# --- opening and reading ---


def test_a_read_of_a_fresh_host(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_host(tmp_path, monkeypatch)
    backend = RemoteDouble(name)
    store = Store(backend).make()
    tensor = store["first"].read_object("model/w3")
    assert torch.equal(tensor, state_of()["model"]["w3"])
    # Two lists, two looks for the newest root, and the nodes.
    assert backend.count - chunk_requests(backend, store, "model/w3") <= 5, backend.log
    assert backend.read_bytes < tensor.nbytes + (1 << 20)


def test_a_read_of_a_warm_host(name: str) -> None:
    Store(RemoteDouble(name))["first"].read_object("model/w3")
    backend = RemoteDouble(name)
    store = Store(backend).make()
    store["first"].read_object("model/w3")
    assert backend.count - chunk_requests(backend, store, "model/w3") <= 2, backend.log


def put_roots(name: str, count: int) -> Root:
    """Put so many more roots, as other hosts would; return the newest one."""
    double = RemoteDouble(name)
    root = newest_root(double)
    for _ in range(count):
        after = put_next_root(double, root)
        assert after is not None
        root = after
    return root


def test_requests_do_not_grow_with_the_snapshots(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_roots(name, 1500)
    fresh_host(tmp_path, monkeypatch)
    backend = RemoteDouble(name)
    store = Store(backend).make()
    store["first"].read_object("model/w3")
    beside = backend.count - chunk_requests(backend, store, "model/w3")
    assert beside <= 8, backend.log
    assert backend.requests["list"] <= 2


# --- the newest root ---


def test_many_newer_roots_are_not_read_one_by_one(name: str) -> None:
    """A host that has not looked for long lists the roots instead."""
    store = Store(RemoteDouble(name)).make()
    root = put_roots(name, 1200)
    backend = store._view.repository.backend
    assert isinstance(backend, RemoteDouble)
    backend.reset()
    assert store._view.repository.newest() == root
    assert backend.count <= 10, backend.log


def test_a_take_of_a_host_that_has_not_looked_for_long(name: str) -> None:
    """It begins with the newest root, not with the one that its host saw last."""
    double = RemoteDouble(name)
    root = newest_root(double)
    for _ in range(50):
        after = put_next_root(double, root, fence=root.seq)
        assert after is not None
        root = after
    backend = RemoteDouble(name)
    Store(backend).take(state_of(), "second")
    assert backend.requests["put"] <= 4
    assert "copy" not in backend.requests
    assert backend.count <= 14


def test_another_store_at_the_place_is_noticed(name: str) -> None:
    """The root that this host saw last has another commit id there, or is not there."""
    double = RemoteDouble(name)
    old = Store(double).id
    for key in double.sizes(""):
        double.delete(key)
    store = Store(RemoteDouble(name)).make()
    assert store.id != old
    assert store.snapshots() == []


def test_a_store_that_was_rolled_back_is_noticed_when_it_is_opened(name: str) -> None:
    double = RemoteDouble(name)
    before = {key: double.read(key) for key in double.sizes("")}
    Store(RemoteDouble(name)).take(state_of(1), "lost")
    for key in double.sizes(""):
        if key not in before:
            double.delete(key)
    store = Store(RemoteDouble(name)).make()
    assert [snapshot.name for snapshot in store.snapshots()] == ["first"]
    with pytest.raises(SnapshotNotFoundError):
        store["lost"]


def test_what_another_process_committed_is_seen_at_once(name: str) -> None:
    """Only a root that nothing depends on may be a moment old."""
    one, other = Store(RemoteDouble(name)), Store(RemoteDouble(name))
    one.snapshots()
    other.take(state_of(1, seed=5), "new")
    assert {snapshot.name for snapshot in one.snapshots()} == {"first", "new"}
    other.delete("new")
    # The name is free, though the root that `one` saw a moment ago has it.
    one.take(state_of(1, seed=6), "new")
    other.take(state_of(1, seed=7), "newer")
    one.take(state_of(1, seed=8), "newest")
    assert len(other.snapshots()) == 4


def test_an_open_that_finds_nothing(tmp_path: Path) -> None:
    backend = RemoteDouble(str(tmp_path))
    with pytest.raises(NotAStoreError):
        Store(backend, create=False).make()
    assert not backend.sizes("")
    Store(backend).make()
    assert Repository(backend).newest().seq == 0


def test_a_snapshot_is_opened_and_read_in_few_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not depend on each other is asked for at once: five times cold, two times warm."""
    name = str(tmp_path)
    Store(RemoteDouble(name)).take({"m": StateDict(a=torch.arange(1000.0))}, "first")

    def opened() -> RemoteDouble:
        backend = RemoteDouble(name)
        # Long enough for a busy machine to begin all that belong to one trip.
        backend.latency = 0.25
        monkeypatch.setattr("casnap.storage.opening.location.backend_at", lambda *_: backend)
        tensor = Snapshot("double://store/first").read_object("m/a")
        assert torch.equal(tensor, torch.arange(1000.0))
        return backend

    fresh_host(tmp_path, monkeypatch)
    assert opened().trips <= 5
    warm = opened()
    assert warm.count <= 3
    assert warm.trips <= 2


def test_a_look_ahead_counts_for_one_use_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process commits after it is seen, whatever the first use was."""
    monkeypatch.setattr("casnap.storage.opening.location.backend_at", lambda *_: RemoteDouble(name))
    other = Store(RemoteDouble(name)).make()
    taken = Snapshot.take("double://store/a", state_of(1))
    other.take(state_of(1), "b")
    assert {s.name for s in taken.store.snapshots()} == {"first", "a", "b"}
    opened = Snapshot("double://store/a")
    other.take(state_of(1), "c")
    assert {s.name for s in opened.store.snapshots()} == {"first", "a", "b", "c"}


def test_many_snapshots_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request for each take, not one after the other. A check looks at roots and footers."""
    store = Store(RemoteDouble(str(tmp_path)))
    for step in range(80):
        tensors = {f"w{i}": torch.full((40,), step + i / 100) for i in range(20)}
        store.take({"model": StateDict(tensors)}, f"run/{step}")
    bounds = (
        (Store.snapshots, 15, 7),
        (Store.usage, 90, 12),
        (Store.check, 380, 27),
    )
    for work, count, trips in bounds:
        (tmp_path / work.__name__).mkdir()
        fresh_host(tmp_path / work.__name__, monkeypatch)
        backend = RemoteDouble(str(tmp_path))
        store = Store(backend, create=False)
        # Long enough for a busy machine to begin all that belong to one trip.
        backend.latency = 0.12
        backend.reset()
        backend.trips = 0
        work(store)
        assert backend.count < count, backend.log
        assert backend.trips < trips, work


def test_a_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of ``who`` and ``check`` is looked for by one reading of the table."""
    store = Store(tmp_path)
    for name in ("run/b/1", "run/b/b/2", "run/b/b/b"):
        store.take(state_of(1), name)
    listed: list[str | None] = []
    rows = View.rows
    monkeypatch.setattr(View, "rows", lambda v, prefix: listed.append(prefix) or rows(v, prefix))
    check_folder(store, "run/b/")
    check_folder(Store(tmp_path / "run/b"), "b")
    assert listed == ["run/b/", "b"]
    with pytest.raises(CommandError, match="run/b/1 is a snapshot, not a folder"):
        check_folder(Store(tmp_path / "run"), "b/1")


def test_a_node_that_is_gone_holds_up_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be read is read ahead, with the trees below it."""
    store = Store(tmp_path / "store")
    for step in range(4):
        store.take(state_of(1, seed=step), f"run/{step}")
    fresh_host(tmp_path, monkeypatch)
    store = Store(tmp_path / "store")
    found = [snapshot.contents for snapshot in store.snapshots()]
    Store(tmp_path / "store").delete("run/1")
    Store(tmp_path / "store").gc(grace=0)
    (tmp_path / "third").mkdir()
    fresh_host(tmp_path / "third", monkeypatch)
    repository = repository_of(Store(tmp_path / "store"))
    Contents.read_ahead([Contents(repository, each.name, each.row) for each in found])
    cached = [repository.cached_node(Digest(each.row.manifest.digest)) for each in found]
    assert [node is not None for node in cached] == [True, False, True, True]
    tops = [each.manifest.shared["model"] for each in found if each.name != "run/1"]
    assert None not in [repository.cached_node(Digest(top)) for top in tops]
