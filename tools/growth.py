"""What grows with the number of ranks: ``python -m tools.growth [ranks of a host] [worlds]``.

Prints, for worlds of 8, 16, 32 and 64 processes on pretended hosts of eight ranks, what a take of
nothing new, a first take and a restore cost, beside ``dcp.save`` of the same tiny sharded state.
``python -m tools.growth model`` reckons what grows for worlds that no machine here can run, from
what an unchanged take of eight hosts sends.
"""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from casnap import StateDict, Store
from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.entries import Payload, TensorEntry
from casnap.format.records import encode
from casnap.ranks.group import Group
from casnap.ranks.topology import Traffic
from casnap.take.manifest import _Contribution, joined
from tests.support.pretended import pretended_host
from tests.support.ranks import Pool

TENSORS, COLUMNS = 20, 64
ROUNDS = 3


class Cost(NamedTuple):
    """What one operation costs one rank.

    Attributes:
        cpu: Seconds of the processor.
        traffic: What the rank sent, of all operations of casnap within it.
    """

    cpu: float
    traffic: Traffic


class Growth(NamedTuple):
    """The costs of one rank.

    Attributes:
        first: The first take.
        unchanged: Takes of nothing new.
        restored: A restore.
        dcp_first: The first ``dcp.save``.
        dcp: A later one.
        files: The open files after all that, without those of before; then with DCP's.
    """

    first: Cost
    unchanged: list[Cost]
    restored: Cost
    dcp_first: Cost
    dcp: list[Cost]
    files: int
    files_of_dcp: int


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def state_of() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    return {
        f"w{i}": DTensor.from_local(
            torch.full((4, COLUMNS), float(i + dist.get_rank())), mesh, [Shard(0)], run_check=False
        )
        for i in range(TENSORS)
    }


def costing(work: Callable[[], object]) -> Cost:
    sent, leave = [Traffic()], Group.leave

    def leaving(group: Group) -> None:
        if not group.ended:
            sent.append(group.traffic)
        leave(group)

    dist.barrier()
    began = time.process_time()
    Group.leave = leaving  # type: ignore[method-assign]
    try:
        work()
    finally:
        Group.leave = leave  # type: ignore[method-assign]
    cpu = time.process_time() - began
    dist.barrier()
    return Cost(cpu, Traffic(*map(sum, zip(*sent, strict=True))))


def measure(folder: str, per_host: int) -> Growth:
    """Measure one rank, on a pretended host."""
    with pretended_host(per_host):
        return _measured(folder)


def _measured(folder: str) -> Growth:
    import torch.distributed.checkpoint as dcp

    held = {"model": StateDict(**state_of())}
    tensors = dict(held["model"])
    dist.barrier()
    before = open_files()
    store = Store(f"{folder}/store")
    first = costing(lambda: store.take(held, "step_0"))
    unchanged = [
        costing(lambda i=i: store.take(held, f"step_{i + 1}"))  # type: ignore[misc]
        for i in range(ROUNDS)
    ]
    restored = costing(lambda: store["step_1"].restore(held))
    files = open_files() - before
    dcp_first = costing(lambda: dcp.save({"model": tensors}, checkpoint_id=f"{folder}/dcp0"))
    of_dcp = [
        costing(lambda i=i: dcp.save({"model": tensors}, checkpoint_id=f"{folder}/dcp{i + 1}"))  # type: ignore[misc]
        for i in range(ROUNDS)
    ]
    return Growth(first, unchanged, restored, dcp_first, of_dcp, files, open_files() - before)


def row(of_ranks: list[Growth]) -> str:
    def cpu(costs: Callable[[Growth], Cost]) -> float:
        return sum(costs(g).cpu for g in of_ranks)

    def least(costs: Callable[[Growth], list[Cost]]) -> float:
        return min(sum(costs(g)[i].cpu for g in of_ranks) for i in range(ROUNDS))

    busiest = max((g.unchanged[-1].traffic for g in of_ranks), key=lambda t: t.messages)
    median = sorted(g.unchanged[-1].traffic.messages for g in of_ranks)[len(of_ranks) // 2]
    restored = max((g.restored.traffic for g in of_ranks), key=lambda t: t.messages)
    files = sorted(g.files for g in of_ranks)
    return (
        f"| {len(of_ranks)} | {cpu(lambda g: g.first):.2f} | {least(lambda g: g.unchanged):.2f} | "
        f"{cpu(lambda g: g.dcp_first):.2f} | {least(lambda g: g.dcp):.2f} | "
        f"{busiest.collectives} | {median} | {busiest.messages} | {busiest.nbytes} | "
        f"{restored.messages} | {files[len(files) // 2]} | {files[-1]} |"
    )


def questions(hosts: int, per_host: int) -> int:
    """Return how often the store of the process group is asked until all ranks are connected.

    What ranks ask that wait for late ones is not counted.
    """
    ranks = hosts * per_host
    # A rank sets its note and its address, gets the name and the start of the group, its token, and
    # the notes of its host; rank 0 looks whether each has come, gets its note, and sets tokens.
    # Each asks for the address of each of its peers.
    meeting = ranks * (1 + 1 + 1 + 3 + per_host) + 2 * ranks + -(-ranks // 64)
    return meeting + hosts * ((per_host - 1) * 2 + hosts - 1)


def memory_of_rank_0(ranks: int, tensors: int) -> tuple[float, float]:
    """Return MiB that rank 0 takes at most to gather a manifest, and seconds.

    Each rank has one tree of its own, and contributes its share of the entries of sharded tensors.
    """
    entry = TensorEntry(Payload(1 << 30, digests=bytes(32), depth=1), "float32", (1 << 14, 1 << 14))
    tracemalloc.start()
    began = time.process_time()
    told = []
    for rank in range(ranks):
        own = range(rank * tensors // ranks, (rank + 1) * tensors // ranks)
        entries = {"model": {f"/layers.{i}.weight": entry for i in own}} if len(own) else {}
        contribution = _Contribution(entries, {"rng": rank.to_bytes(32, "big")}, 9, 1)
        told.append(memoryview(encode(contribution)))
    contributions = [decoder(_Contribution).decode(part) for part in told]
    manifest = joined(contributions, ["model", "rng"], lambda node: digest_of(node), {})
    encode(manifest)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / (1 << 20), time.process_time() - began


def model() -> None:
    with Pool() as pool, tempfile.TemporaryDirectory() as folder:
        of_ranks = pool.world(64).run(measure, folder, 8)
    busiest = max((g.unchanged[-1].traffic for g in of_ranks), key=lambda t: t.messages)
    a_peer = busiest.messages / (7 + 7)
    print("| hosts | ranks | questions to the store | of a mesh | messages of the busiest rank |")
    print("|---|---|---|---|---|")
    for hosts in (8, 128, 512, 2048):
        print(
            f"| {hosts} | {hosts * 8} | {questions(hosts, 8):,} | {2 * (hosts * 8) ** 2:,} | "
            f"{a_peer * (7 + hosts - 1):,.0f} |"
        )
    mib, seconds = memory_of_rank_0(16_384, 2_000)
    print(f"rank 0 of 16,384 gathers 2,000 sharded tensors in {mib:.0f} MiB and {seconds:.1f} s")


def main() -> None:
    if sys.argv[1:] == ["model"]:
        model()
        return
    per_host = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    worlds = [int(n) for n in sys.argv[2:]] or [8, 16, 32, 64]
    print(
        "| ranks | first take | take | first dcp.save | dcp.save | collectives | messages "
        "| of the busiest | its bytes | of a restore | open files | most |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for size in worlds:
        with Pool() as pool, tempfile.TemporaryDirectory() as folder:
            print(row(pool.world(size).run(measure, folder, per_host)), flush=True)


if __name__ == "__main__":
    # The ranks know a function by its module's name, which here is another one.
    from tools import growth

    growth.main()
