"""What happens when a bucket refuses most requests of many ranks: ``python -m tools.storm``.

Plays ranks that all begin to put at once, at a server that takes so many puts a second of all, and
answers SlowDown to others. Nothing waits: it is reckoned, with the pauses of
:mod:`casnap.backends.remote.retries`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from casnap.backends.remote.client import TransientError
from casnap.backends.remote.retries import Operation, Retries

_ANSWER = 0.05
"""Seconds until an answer."""
_BURST = 0.1
"""Of so many seconds are the puts that a server takes at once."""


class Storm(NamedTuple):
    """How it went.

    Attributes:
        puts: How many objects were put.
        attempts: How many requests that took.
        seconds: When the last one was through.
        longest: How long the slowest object took.
        most: How many requests came in the worst second.
        given_up: How many took longer than an operation may.
    """

    puts: int
    attempts: int
    seconds: float
    longest: float
    most: int
    given_up: int


def storm(ranks: int, objects: int, at_once: int = 16, rate: float = 3500) -> Storm:
    """Have each rank put some objects, so many at once."""
    retries, busy = Retries(), TransientError("SlowDown", busy=True)
    left = [objects] * ranks
    tokens, at = rate * _BURST, 0.0
    attempts = given_up = 0
    longest = 0.0
    by_second: dict[int, int] = {}
    queue: list[tuple[float, int, int, float, Operation]] = []

    def begin(rank: int, now: float) -> tuple[float, int, int, float, Operation]:
        left[rank] -= 1
        return now, id(operation := Operation("put", retries)), rank, now, operation

    for rank in range(ranks):
        queue += [begin(rank, rank / ranks * _ANSWER) for _ in range(min(at_once, objects))]
    heapify(queue)
    while queue:
        now, tie, rank, began, operation = heappop(queue)
        tokens, at = min(rate * _BURST, tokens + (now - at) * rate), now
        attempts += 1
        by_second[int(now)] = by_second.get(int(now), 0) + 1
        if tokens >= 1:
            tokens -= 1
            longest = max(longest, now + _ANSWER - began)
            given_up += now + _ANSWER - began > retries.deadline
            if left[rank]:
                heappush(queue, begin(rank, now + _ANSWER))
        else:
            again = now + _ANSWER + operation.next_delay(busy)
            heappush(queue, (again, tie, rank, began, operation))
    most = max(by_second.values())
    return Storm(ranks * objects, attempts, at + _ANSWER, longest, most, given_up)


def main() -> None:
    print("| ranks | objects each | puts | requests for one | s | slowest put, s | given up |")
    print("|---" * 7 + "|")
    for ranks, objects in ((1024, 1), (1024, 16), (16_384, 1), (16_384, 16)):
        s = storm(ranks, objects)
        print(
            f"| {ranks:,} | {objects} | {s.puts:,} | {s.attempts / s.puts:.1f} | {s.seconds:.0f} | "
            f"{s.longest:.0f} | {s.given_up:,} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
