"""A disk that gets full while something is stored: its garbage is freed, and that goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from casnap import Retention, Snapshot, StateDict, Store
from casnap.errors import StorageFullError
from casnap.runtime.buffers import Pool
from casnap.storage.commit_log.roots import release_reserve
from casnap.take import staging
from tests.support.cli_calls import invoke
from tests.support.garbage import forget_collectors, wait_for_collectors
from tests.support.mounts import ext4, tmpfs
from tests.support.ranks import World

STATE = 8 << 20


@pytest.fixture(autouse=True)
def turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_GC", "auto")


def dense(step: int, nbytes: int = STATE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-(2**62), 2**62, (nbytes // 8,), generator=generator)


def state(step: int) -> dict[str, StateDict]:
    return {"s": StateDict(w=dense(step))}


@contextmanager
def disk_with_garbage(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of six states, with a store of one snapshot, and garbage of two."""
    with tmpfs(tmp_path / "disk", str(6 * STATE + (2 << 20))) as disk:
        store = Store(disk / "store")
        for step in range(3):
            store.take(state(step), f"step_{step}")
        store.prune(Retention(keep_last=1))
        wait_for_collectors()
        yield disk


class Filling:
    """Fills a disk once something is stored there, but for half a state."""

    def __init__(self, disk: Path, leave: int = STATE // 2) -> None:
        self._file, self._leave = disk / "fill", leave

    def __call__(self, *_: object) -> None:
        with suppress(FileExistsError):
            fd = os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            with suppress(OSError):
                while True:
                    os.write(fd, bytes(1 << 16))
            os.ftruncate(fd, max(0, os.fstat(fd).st_size - self._leave))
            os.close(fd)


def assert_whole(store: Store, name: str, step: int) -> None:
    snapshot = Store(store.uri)[name]
    assert torch.equal(snapshot.read_object("s/w"), dense(step))
    assert store.check(data=True).ok


def async_take(store: Store, *args: Any, **options: Any) -> Snapshot:
    return store.async_take(*args, **options).wait()


def test_takes_that_wait_for_one_another(tmp_path: Path) -> None:
    with disk_with_garbage(tmp_path) as disk:
        store = Store(disk / "store")
        filling = Filling(disk, leave=3 * STATE // 2)
        first_snapshot = store.async_take(state(8), "first", max_pending=2, progress=filling)
        second_snapshot = store.async_take(state(9), "second", max_pending=2)
        first_snapshot.wait()
        second_snapshot.wait()
        assert_whole(store, "first", 8)
        assert_whole(store, "second", 9)


def test_copies_that_are_not_there_any_more(tmp_path: Path) -> None:
    """What was read is given up for what was not, so the take cannot start again."""
    with disk_with_garbage(tmp_path) as disk:
        store = Store(disk / "store")
        large = {"s": StateDict(w=dense(9, 5 * STATE // 2))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "_block_pool", Pool(STATE // 4, None))
            patch.setattr(staging, "_BLOCK_BYTES", STATE // 4)
            patch.setattr(staging, "PIECE_BYTES", STATE // 8)
            pending = store.async_take(large, "new", max_staging_bytes=1, progress=Filling(disk))
            with pytest.raises(StorageFullError):
                pending.wait()
        store.take(state(9), "new")
        assert_whole(store, "new", 9)


def take_on_ranks(path: str, how: str) -> None:
    half, rank = STATE // 16, dist.get_rank()
    mine = {"s": StateDict(w=dense(9)[rank * half :][:half].clone())}
    progress = Filling(Path(path).parent) if rank == 1 else None
    store = Store(path)
    options: dict[str, Any] = {"per_rank": ["**"], "progress": progress}
    if how == "take":
        store.take(mine, "new", **options)
    else:
        store.async_take(mine, "new", max_pending=int(how), **options).wait()


def test_ranks(tmp_path: Path, world: Callable[[int], World]) -> None:
    for how in ("take", "1", "2"):
        with disk_with_garbage(tmp_path) as disk:
            world(2).run(take_on_ranks, str(disk / "store"), how)
            store = Store(disk / "store")
            for rank in range(2):
                part = dense(9)[rank * (STATE // 16) :][: STATE // 16]
                assert torch.equal(store["new"].read_object(f"{rank}/s/w"), part)
            assert store.check(data=True).ok


def fill_on_rank_1(path: str) -> str:
    rank = dist.get_rank()
    mine = {"s": StateDict(w=dense(9) if rank else None)}
    progress = Filling(Path(path).parent) if rank else None
    with pytest.raises(StorageFullError) as caught:
        Store(path).take(mine, "new", per_rank=["**"], progress=progress)
    return str(caught.value)


def test_the_error_counts_what_all_ranks_have(
    tmp_path: Path, world: Callable[[int], World]
) -> None:
    with disk_with_garbage(tmp_path) as disk:
        store = Store(disk / "store")
        store.gc(grace=0)
        for error in world(2).run(fill_on_rank_1, str(disk / "store")):
            assert "up to 8.4 MB are needed" in error


def copy_by_the_command(store: Store, tmp_path: Path, _: Filling) -> None:
    invoke("cp", tmp_path / "source/new", Path(store.uri, "new"))


def mirror(store: Store, tmp_path: Path, _: Filling) -> None:
    source = Store(tmp_path / "source", mirror=store.uri)
    source.wait_mirrored(60)


def import_file(store: Store, tmp_path: Path, filling: Filling) -> None:
    save_file({"w": dense(9)}, tmp_path / "file.safetensors")
    store.import_file(tmp_path / "file.safetensors", "new", key="s", progress=filling)


WAYS: dict[str, Callable[[Store, Path, Filling], object]] = {
    "take": lambda store, _, filling: store.take(state(9), "new", progress=filling),
    "async_take": lambda store, _, filling: async_take(store, state(9), "new", progress=filling),
    "copy": lambda store, tmp_path, _: Store(tmp_path / "source").copy("new", to=store),
    "cp": copy_by_the_command,
    "mirror": mirror,
    "import": import_file,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_stored_goes_on(tmp_path: Path, way: str) -> None:
    Store(tmp_path / "source").take(state(9), "new")
    with disk_with_garbage(tmp_path) as disk:
        filling = Filling(disk)
        if way in ("copy", "cp", "mirror"):
            filling()
        WAYS[way](Store(disk / "store"), tmp_path, filling)
        assert_whole(Store(disk / "store"), "new", 9)


# --- not a byte is free --------------------------------------------------------------------------


def fill(file: Path) -> None:
    """Fill a disk to the last byte."""
    with file.open("wb", buffering=0) as opened:
        for nbytes in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    opened.write(bytes(nbytes))


@contextmanager
def full_disk(tmp_path: Path, file_system: str, *, condemned: bool) -> Iterator[Path]:
    """Give a disk without a free byte, with a store of four snapshots."""
    mount = tmpfs if file_system == "tmpfs" else ext4
    with mount(tmp_path / "disk", str(8 * STATE)) as disk, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CASNAP_GC", "off")
        store = Store(disk / "store")
        for step in range(4 + condemned):
            store.take(state(step), f"step_{step}")
        if condemned:
            store.delete("step_4")
            store.gc()
        patch.setenv("CASNAP_GC", "auto")
        fill(disk / "fill")
        assert store._view.repository.backend.free_bytes() == 0
        forget_collectors()
        yield disk


@pytest.mark.parametrize(
    ("command", "file_system"),
    [("rm", "tmpfs"), ("rm", "ext4"), ("prune", "tmpfs"), ("gc", "ext4")],
)
def test_what_lets_snapshots_go_on_a_disk_without_a_byte(
    tmp_path: Path, command: str, file_system: str
) -> None:
    with full_disk(tmp_path, file_system, condemned=command == "gc") as disk:
        path = disk / "store"
        arguments = {
            "rm": (path / "step_0", "--yes"),
            "prune": (path, "--keep-last", 3, "--yes"),
            "gc": (path, "--grace", 0),
        }[command]
        assert "8.4 MB freed" in invoke(command, *arguments).stdout
        store = Store(path)
        assert (store._view.repository.backend.free_bytes() or 0) >= STATE
        for step in range(1, 4):
            assert_whole(store, f"step_{step}", step)


def test_a_disk_without_a_byte_and_without_a_reserve(tmp_path: Path) -> None:
    """Another program was faster, or the file system keeps none."""
    with full_disk(tmp_path, "tmpfs", condemned=False) as disk:
        store = Store(disk / "store")
        release_reserve(store._view.repository.backend)
        fill(disk / "more")
        for act in (lambda: store.delete("step_0"), lambda: store.prune(Retention(keep_last=1))):
            with pytest.raises(StorageFullError, match=r"1\.1 MB are enough: delete, or move"):
                act()
        assert len(store.snapshots()) == 4
        (disk / "more").unlink()
        store.delete("step_0")
        assert store.check().ok


def test_what_the_error_says(tmp_path: Path) -> None:
    with disk_with_garbage(tmp_path) as disk:
        store = Store(disk / "store")
        store.gc(grace=0)
        Filling(disk)()
        expected = (
            r"earlier snapshots are whole.*up to 8\.4 MB are needed, 4\.\d MB are free; .*store "
            r"has no garbage left to free: its 1 snapshots take up 8\.4 MB.*`casnap rm`"
        )
        with pytest.raises(StorageFullError, match=expected):
            store.take(state(9), "new")
        store.configure(gc="off")
        with pytest.raises(StorageFullError, match=r"`casnap gc .*store --grace 0` frees"):
            store.take(state(9), "new")
