"""Hosts without /dev/shm, or with little of it; and what ranks that are killed leave there."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.base import Target
from casnap.errors import RankError
from tests.support.launched import launched
from tests.support.links import forget_links, links
from tests.support.mounts import needs_root
from tests.support.ranks import RankDied, Worlds

CHUNK = 64 << 10
SHM = Path("/dev/shm")


def numbers() -> torch.Tensor:
    return torch.arange(300_000.0).reshape(-1, 6)


def shards() -> DTensor:
    """Return this rank's columns: all cells are cut."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = numbers().chunk(size, 1)[rank].contiguous()
    mesh, whole = init_device_mesh("cpu", (size,)), numbers()
    return DTensor.from_local(
        own, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


# --- little of it, or none ----------------------------------------------------------------------

NEWNS, READ_ONLY, PRIVATE = 0x20000, 1, 1 << 18 | 1 << 14
LITTLE = {"a page": (b"size=4k", 0), "none": (b"", READ_ONLY)}


def have_little(options: bytes, flags: int) -> None:
    """Let this process see another /dev/shm, which no other process sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    for refused in (
        libc.unshare(NEWNS),
        libc.mount(None, b"/", None, PRIVATE, None),
        libc.mount(b"tmpfs", str(SHM).encode(), b"tmpfs", flags, options),
    ):
        assert not refused, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize("how", LITTLE)
def test_ranks_share_memory_all_the_same(
    disk_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(disk_path / "cache"))
    Store(disk_path / "store", create=NewStore(chunk_size=CHUNK)).make()

    def work() -> None:
        have_little(*LITTLE[how])
        assert os.access(SHM, os.W_OK) == (how != "none")
        dist.init_process_group("gloo")
        state = {"m": StateDict(cut=shards(), same=numbers())}
        snapshot = Store(disk_path / "store", create=False).take(state, "step")
        found = {"m": StateDict(cut=shards(), same=torch.zeros_like(numbers()))}
        found["m"]["cut"].to_local().zero_()
        snapshot.restore(found, read_once=True)
        assert torch.equal(found["m"]["cut"].to_local(), state["m"]["cut"].to_local())
        assert torch.equal(found["m"]["same"], numbers())
        assert all(link.shared is not None and link.shared.by_all for link in links())
        assert not (os.listdir(SHM) if how != "none" else [])  # noqa: PTH208
        dist.destroy_process_group()

    assert launched(2, work) == [0, 0]
    assert Store(disk_path / "store").check(data=True).ok


# --- ranks that are killed ----------------------------------------------------------------------


def many() -> StateDict:
    return StateDict({f"x{i}": torch.arange(1 << 18) + i for i in range(3)})


def zeros() -> StateDict:
    return StateDict({name: torch.zeros_like(x) for name, x in many().items()})


def killed_while_others_read(path: str, folder: str, killed: tuple[int, ...]) -> str:
    """Restore what all ranks want; some are killed when all have read some chunks into memory."""
    forget_links()
    rank, yard = dist.get_rank(), Path(folder)
    # Several threads read; a count gives each number to one of them.
    read, chunks = LocalBackend._read_each, count(1)

    def meeting(backend: LocalBackend, key: str, targets: Sequence[Target]) -> Iterator[int]:
        for n in read(backend, key, targets):
            yield n
            if n != CHUNK or next(chunks) != 3:
                continue
            maps = Path("/proc/self/maps").read_text()
            (yard / f"{rank}").write_text(str(maps.count("/memfd:casnap-")))
            while len(list(yard.iterdir())) < dist.get_world_size():
                time.sleep(0.01)
            if rank in killed:
                os.kill(os.getpid(), signal.SIGKILL)

    state = zeros()
    with mock.patch.object(LocalBackend, "_read_each", meeting):
        Store(path)["step"].restore({"m": state}, read_once=True, timeout=60)
    return "returned"


@pytest.mark.parametrize("killed", [(2,), (0, 1, 2)], ids=str)
def test_killed_ranks_leave_nothing(world: Worlds, tmp_path: Path, killed: tuple[int, ...]) -> None:
    path, yard = tmp_path / "store", tmp_path / "yard"
    yard.mkdir()
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    store.take({"m": many()}, "step")
    before = _names()
    outcomes = world(3).run(
        killed_while_others_read, str(path), str(yard), killed, expect_errors=True, timeout=100
    )
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, RankDied if rank in killed else RankError), outcome
    # Each had its own memory mapped, and that of two others.
    assert min(int(file.read_text()) for file in yard.iterdir()) >= 3
    assert _names() <= before
    assert world(3).run(restored_anew, str(path)) == [True] * 3


def restored_anew(path: str) -> bool:
    state = zeros()
    Store(path)["step"].restore({"m": state}, read_once=True)
    return all(torch.equal(state[name], x) for name, x in many().items())


def _names() -> set[str]:
    """Return the names of casnap in /dev/shm; other runs of the tests may begin and end."""
    found = os.listdir(SHM) if SHM.is_dir() else []  # noqa: PTH208
    return {n for n in found if "casnap" in n and not n.startswith(("casnap-tests", "casnap-serv"))}
