"""What many ranks ask of one bucket: ``python -m tools.bucket [ranks of a host] [worlds]``.

Prints, for worlds of 1, 2, 8, 16 and 64 processes on pretended hosts of eight ranks, how many
requests each operation makes, and how many it would make by 1,024 and 16,384 ranks.
``python -m tools.bucket storm`` plays what happens when a server refuses most of them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from casnap import StateDict, Store
from casnap.backends.base import Target
from casnap.backends.remote.scatter import runs
from casnap.runtime.typing import override
from casnap.storage.commit_log import put_if_absent_probe
from tests.support.far import FarFolder
from tests.support.pretended import pretended_host
from tests.support.ranks import Pool

TENSORS = 3
PUTS, GETS = 3500, 5500
"""What S3 does in a second for each prefix."""


class Bucket(FarFolder):
    in_flight = 16

    @property
    @override
    def endpoint(self) -> str:
        return "a server"

    @override
    def filled(self, key: str, targets: Sequence[Target], use: Callable[[int], None]) -> None:
        for _ in runs(targets):
            self._note("get", key)
        super().filled(key, targets, use)


def state_of(step: int) -> dict[str, Any]:
    """Return 3 MiB of each rank, of which the first one changes with each step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        f"w{i}": DTensor.from_local(
            torch.full((256, 1024), 1000.0 * i + dist.get_rank() + (step / 8 if i == 0 else 0)),
            mesh,
            [Shard(0)],
            run_check=False,
        )
        for i in range(TENSORS)
    }
    return {"model": StateDict(**tensors)}


def measure(folder: str, per_host: int) -> dict[str, Counter[str]]:
    """Return what this rank asks in each operation, by kind."""
    asked: dict[str, Counter[str]] = {}
    states = [state_of(0), state_of(1)]
    with pretended_host(per_host) as host:

        def fresh(job: int) -> Store:
            """Return the store as a new process on a new host opens it."""
            os.environ["CASNAP_CACHE_DIR"] = f"{folder}/caches/{job}/{host}"
            put_if_absent_probe._proven_places.clear()
            return Store(backend)

        def count(what: str, work: Callable[[], Any]) -> Any:
            dist.barrier()
            backend.log = []
            result = work()
            dist.barrier()
            asked[what] = Counter(kind for kind, _ in backend.log)
            return result

        backend = Bucket(f"{folder}/store")
        if dist.get_rank() == 0:
            fresh(0).make()
        dist.barrier()
        store = count("opening, new hosts", lambda: fresh(1))
        count("first take", lambda: store.take(states[0], "s/0"))
        count("take, nothing new", lambda: store.take(states[0], "s/1"))
        count("take, a third is new", lambda: store.take(states[1], "s/2"))
        store = count("opening again, new hosts", lambda: fresh(2))
        count("take, nothing new, new hosts", lambda: store.take(states[1], "s/3"))
        snapshot = count("opening, and latest(), new hosts", lambda: fresh(3).latest())
        count("restore, new hosts", lambda: snapshot.restore(states[0]))
        count("restore again", lambda: snapshot.restore(states[1]))
    return asked


def _told(asked: Counter[str]) -> str:
    return f"{asked['put']} | {asked['get'] + asked['head']} | {asked['list']}"


def table(size: int, of_ranks: list[dict[str, Counter[str]]]) -> None:
    for what in of_ranks[0]:
        first, *others = (asked[what] for asked in of_ranks)
        most = max(others, key=Counter.total, default=Counter[str]())
        together = sum(others, Counter[str]())
        print(f"| {size} | {what} | {_told(first)} | {_told(most)} | {_told(first + together)} |")


def main() -> None:
    per_host = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    worlds = [int(n) for n in sys.argv[2:]] or [1, 2, 8, 16, 64]
    kinds = "puts | gets | lists"
    print(f"| ranks | | rank 0: {kinds} | another: {kinds} | all: {kinds} |")
    print("|---" * 11 + "|")
    for size in worlds:
        with Pool() as pool, tempfile.TemporaryDirectory() as folder:
            table(size, pool.world(size).run(measure, folder, per_host))


if __name__ == "__main__":
    # The ranks know a function by its module's name, which here is another one.
    from tools import bucket

    bucket.main()
