"""``release_memory`` gives back what is free, and nothing else, also if it is interrupted."""

from __future__ import annotations

import sys
import threading
from itertools import count
from types import FrameType
from typing import Any

from casnap import release_memory
from casnap.runtime import buffers, threads
from casnap.runtime.buffers import Pool

# Not weak references, whose errors nobody sees.
FILES = (buffers.__file__, threading.__file__, threads.__file__)


def taken_again(pool: Pool, number: int) -> bool:
    """Whether another thread gets so many slots of a pool, and no more."""
    results: list[bool] = []

    def take() -> None:
        slots = [pool.acquire(wait=False) for _ in range(number)]
        results.append(None not in slots and pool.acquire(wait=False) is None)
        for slot in slots:
            if slot is not None:
                pool.release(slot)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(30)
    return results == [True]


def test_an_interrupt_anywhere() -> None:
    """Where a function that is called by its module begins or ends in this thread."""
    pool = Pool(1 << 20, 3)
    assert taken_again(pool, 3)
    for number in count(1):
        events = 0

        def interrupt(frame: FrameType, event: str, _arg: Any, number: int = number) -> Any:
            nonlocal events
            caller = frame.f_back
            is_called = caller is not None and caller.f_code.co_filename == buffers.__file__
            if not (is_called and frame.f_code.co_filename in FILES):
                return None
            events += event in ("call", "return")
            if events == number:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        try:
            sys.settrace(interrupt)
            release_memory()
            break
        except KeyboardInterrupt:
            assert taken_again(pool, 3), number
        finally:
            sys.settrace(None)
    assert number > 2
    assert not pool._free
    assert taken_again(pool, 3)
