"""The worlds that the tests of many ranks run in."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from casnap.errors import DamagedError
from tests.support.ranks import RankDied, RankError, RankHung, RanksFailed, Worlds
from tests.support.warm import run_python


def summed(number: float) -> float:
    tensor = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def fails(how: str) -> int:
    class Local(Exception):  # noqa: N818
        pass

    rank = dist.get_rank()
    if rank == 1 and how == "raise":
        raise DamagedError("a chunk is missing", ("model/weight",))
    if rank == 1 and how == "raise what cannot be sent":
        raise Local("of no module")
    if rank == 1 and how == "die":
        os.write(2, b"last words")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "hang":
        threading.Event().wait()
    return rank


def test_errors_arrive_with_their_types_and_places(world: Worlds) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1: DamagedError: a chunk[^$]*in fails") as caught:
        world(3).run(fails, "raise")
    (error,) = caught.value.errors.values()
    assert isinstance(error, DamagedError)
    first, second, third = world(3).run(fails, "raise what cannot be sent", expect_errors=True)
    assert (first, third) == (0, 2)
    assert isinstance(second, RankError)
    assert "Local: of no module" in str(second)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [("die", RankDied, "-9\nlast words"), ("hang", RankHung, "in fails")],
)
def test_a_rank_that_dies_or_hangs_is_replaced(
    world: Worlds, how: str, error: type[Exception], text: str
) -> None:
    first, second = world(2).run(fails, how, expect_errors=True, timeout=5)
    assert first == 0
    assert isinstance(second, error)
    assert all(part in str(second) for part in text.split("\n"))
    assert world(2).run(summed, 0.0) == [1.0, 1.0]


_SESSION = """
import os, sys
from tests.support.ranks import Pool
from tests.ranks.test_ranks import end_session

with Pool() as pool:
    pool.world(2).run(end_session, os.getpid(), sys.argv[1])
"""


def end_session(session: int, fifo: str) -> None:
    with open(fifo, "wb"):  # noqa: PTH123 - held until this process ends
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(session, signal.SIGKILL)
        threading.Event().wait()


def test_no_rank_outlives_a_session_that_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as thread:
        session = thread.submit(run_python, _SESSION, fifo)
        with fifo.open("rb") as held_by_ranks:
            assert held_by_ranks.read() == b""  # at its end when no rank is left
        assert session.result().returncode == -signal.SIGKILL
