"""Memory that ranks of one host share, and sockets between ranks that cannot."""

from __future__ import annotations

import os
import random
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from casnap import NewStore, StateDict, Store, release_memory
from casnap.ranks import processes
from casnap.ranks.shared_memory import Address, OwnMemory, Ring, mapped
from casnap.take.ranks import exchange
from tests.support.links import forget_links, links
from tests.support.ranks import Worlds

CHUNK = 64 << 10


# --- one piece of memory ----------------------------------------------------------------------


def test_a_killed_process_leaves_nothing_but_what_others_read() -> None:
    """What was mapped can be read on; what was not cannot be found; and no name was ever there."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()  # noqa: PTH112, PTH208
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = OwnMemory(1 << 20)
        own.view[-4:] = b"here"
        os.write(writer, f"{own.address.descriptor} {own.address.name}".encode())
        signal.pause()
    try:
        descriptor, name = os.read(reader, 1000).decode().split()
        address = Address(pid, int(descriptor), name, 1 << 20)
        memory = mapped(address)
        assert memory is not None
        assert mapped(Address(pid, int(descriptor), "casnap-another", 1 << 20)) is None
        assert mapped(Address(pid, int(descriptor), name, 1 << 21)) is None
        assert mapped(Address()) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    assert memory[-4:] == b"here"
    assert memory[0] == 0
    assert mapped(address) is None
    after = set(os.listdir("/dev/shm")) if before else set()  # noqa: PTH208
    # Another run of the tests may begin just then.
    assert not any("casnap" in n and not n.startswith("casnap-tests-") for n in after - before)


def test_memory_cannot_be_cut_short() -> None:
    own = OwnMemory(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(own.address.descriptor, 0)
    own.view[:4] = b"here"
    assert own.forget() == 1 << 16
    assert own.view[:4] == bytes(4)


def test_runs_of_a_ring_never_overlap() -> None:
    draw = random.Random(1)
    ring, used, refused = Ring(1000), list[tuple[int, int]](), 0
    for _ in range(5000):
        nbytes = draw.randint(1, 400)
        start = ring.take(nbytes)
        if start is None:
            refused += 1
            assert used
        else:
            assert start >= 0
            assert start + nbytes <= 1000
            assert all(start + nbytes <= a or b <= start for a, b in used)
            used.append((start, start + nbytes))
        while used and (start is None or draw.random() < 0.4):
            ring.free(used.pop(0 if draw.random() < 0.8 else -1)[0])
            start = 0
    assert refused
    while used:
        ring.free(used.pop()[0])
    assert ring.take(1000) == 0
    assert Ring(10).take(11) is None


# --- ranks ------------------------------------------------------------------------------------


def number(i: int) -> torch.Tensor:
    return torch.randn(30_011, 7, generator=torch.Generator().manual_seed(i))


def shards(fill: bool) -> dict[str, StateDict]:
    """Return this rank's rows of some tensors; no shard edge is a cell edge."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = StateDict()
    for i in range(3):
        own = number(i).chunk(dist.get_world_size())[dist.get_rank()].contiguous()
        own = own if fill else torch.zeros_like(own)
        state[f"w{i}"] = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=(30_011, 7), stride=(7, 1)
        )
    return {"m": state}


def take_and_restore(path: str, case: str) -> list[bool]:
    """Take, take again and restore; return which ranks could read the memory of this one."""
    rank = dist.get_rank()
    forget_links()
    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        if case == "two hosts" and rank >= 2:
            patch(processes, "boot_id", lambda: "another")
        if case == "refused" and rank == 1:
            patch(os, "memfd_create", mock.Mock(side_effect=PermissionError))
        if case == "little":
            patch(exchange, "SHARED_BYTES", 100_000)
        store = Store(path, create=False)
        store.take(shards(fill=True), f"{case} 1")
        release_memory()
        again = store.take(shards(fill=True), f"{case} 2")
        found = shards(fill=False)
        again.restore(found, read_once=True)
    for name, value in shards(fill=True)["m"].items():
        assert torch.equal(found["m"][name].to_local(), value.to_local())
    (link,) = (link for link in links() if link.size == 4)
    assert link.shared is not None
    forget_links()
    return link.shared.readers


def test_ranks_share_memory_where_they_can(world: Worlds, tmp_path: Path) -> None:
    """Whatever ranks can share, the chunks are those of a take by one process."""
    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK))
    alone = store.take({"m": StateDict({f"w{i}": number(i) for i in range(3)})}, "alone")
    digests = {path: entry.payload for path, entry in alone.get_manifest().items() if "w" in path}
    ranks = range(4)
    for case, readable in {
        "one host": [[r != other for r in ranks] for other in ranks],
        "two hosts": [[r != other and r // 2 == other // 2 for r in ranks] for other in ranks],
        "refused": [[r != other != 1 for r in ranks] for other in ranks],
        "little": [[r != other for r in ranks] for other in ranks],
    }.items():
        assert world(4).run(take_and_restore, str(tmp_path), case) == readable, case
        for number_of_take in (1, 2):
            found = Store(tmp_path)[f"{case} {number_of_take}"].get_manifest()
            assert {p: e.payload for p, e in found.items() if p in digests} == digests
    written = sum(
        path.stat().st_size
        for path in (tmp_path / "casnap-store/packs").rglob("*")
        if path.is_file()
    )
    assert written < 1.2 * sum(number(i).nbytes for i in range(3))
