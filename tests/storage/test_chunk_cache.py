"""A cache of chunks beside the reader: what is fetched once, where it is kept, and how much."""

from __future__ import annotations

import logging
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import DamagedError, StoreError
from casnap.format.records import Place, pack_key
from tests.support.cached import (
    CHUNK,
    PLENTY,
    Reader,
    far_store,
    grow_old,
    kept,
    kept_bytes,
    kept_files,
    state,
)
from tests.support.cli_calls import failure
from tests.support.far import FarFolder
from tests.support.faults import in_child
from tests.support.mounts import NOBODY, as_nobody, needs_root
from tests.support.ranks import World


@pytest.fixture
def far(tmp_path: Path, cache_dir: Path) -> Path:
    """Return a far store of two steps that share no chunk."""
    return far_store(tmp_path / "far", 0, 1)


# --- bytes are fetched once ---


def test_the_second_process_fetches_nothing(far: Path) -> None:
    assert in_child(lambda: Reader(far).restore()) == 0
    second = Reader(far)
    assert second.restore().gets == 0
    assert second.restore(1).gets > 0


def test_a_part_of_a_tensor(far: Path) -> None:
    """A file holds what was read, and reads what it lacks from the store."""
    first = Reader(far)
    first.store["step_0"].read_object("model/w0.0", index=slice(0, CHUNK // 4))
    assert first.gets > 0
    assert kept_bytes() < 4 * CHUNK
    second = Reader(far)
    second.store["step_0"].read_object("model/w0.0", index=slice(0, CHUNK // 4))
    assert second.gets == 0
    assert second.restore().gets > 0
    assert Reader(far).restore().gets == 0


def test_deltas_and_what_they_stand_on(tmp_path: Path, cache_dir: Path) -> None:
    """They are proven by the chunk that comes of them: wrong ones are read from the store."""
    folder = tmp_path / "far"
    store = Store(folder, create=NewStore(chunk_size=CHUNK))
    states = [torch.randn(16 * CHUNK // 4)]
    for step in range(9):
        states.append(states[-1].clone())
        states[-1][step::50] += 0.01
        store.take({"model": StateDict(w=states[-1])}, f"run/{step}")
    store.gc(grace=0, recode_after=1)

    def read() -> int:
        reader = Reader(folder)
        assert torch.equal(reader.store["run/5"].read_object("model/w"), states[6])
        return reader.gets

    assert read() > 0
    assert read() == 0
    for file in kept_files():
        file.write_bytes(bytes(byte ^ 0xFF for byte in file.read_bytes()))
    assert read() > 0
    assert read() == 0


def test_small_tensors_share_files(tmp_path: Path, cache_dir: Path) -> None:
    store = Store(FarFolder(tmp_path / "far"))
    many = {f"t{i}": torch.full((50,), float(i)) for i in range(1500)}
    store.take({"model": StateDict(many)}, "many")
    for expected in (False, True):
        reader = Reader(tmp_path / "far")
        found = {"model": StateDict({name: torch.zeros(50) for name in many})}
        reader.store["many"].restore(found)
        assert (reader.gets == 0) is expected
        assert all(torch.equal(found["model"][name], many[name]) for name in many)
    assert len(kept_files()) <= 2


def test_there_is_none_unless_asked_for(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Reader(far, None).restore()
    Reader(far, 0).restore()
    monkeypatch.setenv("CASNAP_CACHE_BYTES", str(PLENTY))
    Reader(far, 0).restore()
    assert not kept().exists()
    Reader(far, None).restore()
    assert Reader(far, None).restore().gets == 0
    assert Reader(far, 0).restore().gets > 0


def test_takes_and_collections_do_not_fill_it(far: Path) -> None:
    store = Store(FarFolder(far), cache_bytes=PLENTY)
    part = {"model": StateDict(part=state()["model"]["w0.0"])}
    store.take(part, "part")
    store.delete("step_0")
    assert store.gc(grace=0).copied_bytes > 0
    assert kept_files() == []


def test_a_pickled_store_has_it_too(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned worker of a data loader opens the store as its parent did."""
    again = pickle.loads(pickle.dumps(Store(FarFolder(far), cache_bytes=PLENTY)))
    again["step_0"].read_object("model/w0.0")
    assert kept_files() != []
    monkeypatch.setenv("CASNAP_CACHE_BYTES", str(PLENTY))
    off = pickle.loads(pickle.dumps(Store(FarFolder(far), cache_bytes=0)))
    assert off._view.repository.chunk_cache is None


def test_a_fork_of_a_reader(far: Path) -> None:
    reader = Reader(far).restore()

    def again() -> None:
        assert reader.restore(1).gets > 0
        assert reader.restore(0).gets == 0

    assert in_child(again) == 0
    assert reader.restore(1).gets > 0  # those of the child are not counted here
    assert Reader(far).restore(1).gets == 0


def test_another_user_cannot_look_in(far: Path, cache_dir: Path) -> None:
    Reader(far).restore()
    for path in kept().rglob("*"):
        if path.is_dir() or path in kept_files():
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def restored_by_ranks(far: str) -> int:
    """Restore on this rank; return how many requests read packs."""
    reader = Reader(Path(far))
    dist.barrier()
    return reader.restore().gets


@pytest.mark.servers
def test_ranks_of_a_host_share_it(far: Path, world: Callable[[int], World]) -> None:
    """Each byte is read by one rank, and kept once."""
    alone = Reader(far, 0)
    alone.restore()
    most = alone.gets
    assert 0 < sum(world(2).run(restored_by_ranks, str(far))) <= most + 2
    total = kept_bytes()
    assert sum(world(2).run(restored_by_ranks, str(far))) == 0
    assert kept_bytes() == total


# --- how much of it ---


@pytest.mark.parametrize(
    ("least", "bound"),
    [(6 * CHUNK, 12 * CHUNK), (1, CHUNK), (0, 100)],
    ids=["part", "chunk", "none"],
)
def test_a_snapshot_larger_than_the_cache_keeps_a_part(far: Path, least: int, bound: int) -> None:
    """It does not push itself out; less than a page keeps nothing."""
    for _ in range(3):
        Reader(far, bound).restore()
        assert least <= kept_bytes() <= (bound if least else 0)


def test_the_least_recently_used_packs_go(tmp_path: Path, cache_dir: Path) -> None:
    far = far_store(tmp_path / "far", 0, 1, 2)
    Reader(far).restore(0).restore(1)
    bound = kept_bytes() + 4 * CHUNK
    grow_old(seconds=7200)
    Reader(far, bound).restore(0)
    Reader(far, bound).restore(2)
    assert kept_bytes() <= bound
    assert Reader(far, bound).restore(0).gets == 0
    assert Reader(far, bound).restore(2).gets == 0
    assert Reader(far, bound).restore(1).gets > 0


def test_what_was_just_used_stays(far: Path) -> None:
    Reader(far).restore(0)
    bound = kept_bytes() + CHUNK
    assert Reader(far, bound).restore(1).gets > 0
    assert Reader(far, bound).restore(0).gets == 0
    grow_old()
    Reader(far, bound).restore(1)
    assert Reader(far, bound).restore(1).gets == 0


def test_a_count_that_is_wrong(far: Path) -> None:
    """The count of bytes serves to count files seldom; each process counts them once."""
    Reader(far).restore(0)
    bound = kept_bytes() + CHUNK
    for wrong in (b"", b"\0" * 8, b"\xff" * 8, b"torn"):
        (kept() / "used").write_bytes(wrong)
        Reader(far, bound).restore(1)
        assert kept_bytes() <= bound


# --- damage ---


def test_damage_in_the_store_stays_known(far: Path) -> None:
    """A chunk that is whole here alone: it is read, but not relied on by the next take."""
    reader = Reader(far).restore()
    place = _place(reader.store, "step_0", "model/w0.0")
    path = far / "casnap-store" / pack_key(place.pack)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(place.offset)
        file.write(b"damaged")
    with pytest.raises(DamagedError):
        Reader(far, 0).restore()
    Reader(far).restore()
    assert not Reader(far).store.check(data=True).ok
    healing = Store(FarFolder(far))
    healing.take(state(), "again")
    Reader(far, 0).store["again"].restore(state())


def _place(store: Store, name: str, path: str) -> Place:
    contents = store[name].contents
    inner, entry, _ = contents.entry(path)
    digest = next(digest for digest, _ in contents.chunks(inner, entry))
    [place] = store._view.repository.index.find(store._view.repository.view(), [digest])
    assert place is not None
    return place


# --- bad input ---


def test_a_store_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on this machine"):
        Store(tmp_path / "run", cache_bytes=PLENTY).make()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="on this machine"):
        Store("memory://cached", cache_bytes=PLENTY).make()
    Store(tmp_path / "run", cache_bytes=0).take(state(), "step_0")
    with pytest.raises(ValueError, match="on this machine"):
        Snapshot(str(tmp_path / "run" / "step_0"), cache_bytes=PLENTY)


def test_a_local_store_where_the_environment_asks_for_it(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CASNAP_CACHE_BYTES", str(PLENTY))
    store = Store(tmp_path / "run")
    store.take(state(), "step_0").restore(state(1))
    assert not kept().exists()


def test_an_open_store(far: Path) -> None:
    with pytest.raises(ValueError, match="open already"):
        Snapshot("step_0", store=Store(FarFolder(far)), cache_bytes=PLENTY)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("10G", 10**10), ("50 GB", 5 * 10**10), ("1.5GiB", 3 << 29), ("4096", 4096), ("0", 0)],
)
def test_the_environment_may_say_it_in_units(
    far: Path, monkeypatch: pytest.MonkeyPatch, text: str, nbytes: int
) -> None:
    monkeypatch.setenv("CASNAP_CACHE_BYTES", text)
    cache = Store(FarFolder(far), create=False)._view.repository.chunk_cache
    assert (cache.nbytes if cache is not None else 0) == nbytes


def test_no_number_of_bytes(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_bytes: list[Any] = [-1, 0.5, "many"]
    for nbytes in no_bytes:
        with pytest.raises(ValueError, match="cache_bytes"):
            Store(FarFolder(far), cache_bytes=nbytes).make()
    for text in ("much", "50 EB", "-1", "1e9", "9" * 30):
        monkeypatch.setenv("CASNAP_CACHE_BYTES", text)
        with pytest.raises(StoreError, match="CASNAP_CACHE_BYTES"):
            Store(FarFolder(far)).make()


def test_a_folder_of_another_user(
    far: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    theirs = cache_dir / "theirs"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, NOBODY, NOBODY)
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(theirs))
    with pytest.raises(StoreError, match=f"another user.*{NOBODY}"):
        Reader(far)
    Reader(far, 0).restore()
    assert list(theirs.iterdir()) == []


def test_what_another_user_has_made_in_a_folder_for_all(far: Path, cache_dir: Path) -> None:
    """Where all may write, another user could lay links to files of this one."""
    needs_root()
    cache_dir.chmod(0o1777)
    kept().mkdir(mode=0o777)
    os.chown(kept(), NOBODY, NOBODY)
    with pytest.raises(StoreError, match=f"another user.*{NOBODY}"):
        Reader(far)
    kept().rmdir()
    kept().symlink_to(far)
    os.chown(kept(), NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(StoreError, match=f"link of another user.*{NOBODY}"):
        Reader(far)
    assert "link of another user" in failure("cache", "--clear")


def test_a_folder_on_a_network_file_system(
    far: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts must not share it: one would not see what the other has locked."""
    monkeypatch.setattr("casnap.runtime.environment.shared_type", lambda folder: "nfs4")
    with pytest.raises(StoreError, match="network file system"):
        Reader(far)
    Reader(far, 0).restore()
    assert not (cache_dir / "chunks").exists()


def test_a_folder_that_cannot_be_written(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is one warning, and the read succeeds."""

    def read() -> None:
        own = Path(os.environ["CASNAP_CACHE_DIR"])
        own.mkdir(mode=0o500)
        with caplog.at_level(logging.WARNING, "casnap"):
            Reader(far).restore().restore(1)
        assert caplog.text.count("no read cache") == 1, caplog.text
        assert list(own.iterdir()) == []

    as_nobody(tmp_path, monkeypatch, read)


def test_a_folder_that_becomes_read_only(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it holds is still read."""

    def read() -> None:
        Reader(far).restore()
        folders = [path for path in [kept(), *kept().rglob("*")] if path.is_dir()]
        for path in folders:
            path.chmod(0o500)
        reader = Reader(far)
        assert reader.restore().gets == 0
        with caplog.at_level(logging.WARNING, "casnap"):
            reader.restore(1).restore(1)
        assert caplog.text.count("cannot be written") == 1, caplog.text
        for path in folders:
            path.chmod(0o700)

    as_nobody(tmp_path, monkeypatch, read)


def test_a_kept_pack_is_no_pipe_and_no_link(far: Path, tmp_path: Path) -> None:
    """Nothing is written through a link that stands in the place of a pack."""
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    for put in (os.mkfifo, lambda path: path.symlink_to(other)):
        Reader(far).restore()
        for path in kept_files():
            path.unlink()
            put(path)
        assert Reader(far).restore().gets > 0
    assert other.read_bytes() == b"mine"
