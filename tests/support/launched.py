"""Ranks as a launcher like torchrun starts them: processes that find one another by variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

from tests.support.faults import start, wait


def launched(size: int, work: Callable[[], object]) -> list[int]:
    """Do some work on the ranks of a world, each a fork of this process; return how they ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def on(rank: int) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
        os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)))
        os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
        work()

    pids = [start(partial(on, rank)) for rank in range(size)]
    return [wait(pid) for pid in pids]
