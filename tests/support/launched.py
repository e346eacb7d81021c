"""Ranks as a launcher like torchrun starts them: processes that find one another by variables."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Any

from tests.support.faults import kill, start, wait
from tests.support.ports import free_port

_met: Barrier | None = None
_pids: Any = ()


def launched(size: int, work: Callable[[], object]) -> list[int]:
    """Do some work on the ranks of a world, each a fork of this process; return how they ended."""
    import torch._dynamo  # noqa: F401 - a mesh imports it, and each rank would do so for itself

    port = free_port()
    fork = multiprocessing.get_context("fork")
    met, pids = fork.Barrier(size), fork.Array("i", size)

    def on(rank: int) -> None:
        global _met, _pids
        _met, _pids = met, pids
        pids[rank] = os.getpid()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
        os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)))
        os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
        try:
            work()
        except BaseException:
            met.abort()
            raise
        # One that leaves earlier cuts its connections, by which others may still be served.
        with suppress(BrokenBarrierError):
            met.wait(90)

    return [wait(pid) for pid in [start(partial(on, rank)) for rank in range(size)]]


def kill_all() -> None:
    """Kill this process, once each rank of its world has called this.

    Else one that is still in what they do together would fail, and not be killed.
    """
    if _met is not None:
        _met.wait(90)
    kill()


def kill_world() -> None:
    """Kill all ranks of this world at once, wherever the others are."""
    for pid in set(_pids) - {0, os.getpid()}:
        os.kill(pid, signal.SIGKILL)
    kill()
