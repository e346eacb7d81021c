"""Which ranges of an object are asked for, and how their bytes get into the callers' buffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from casnap.backends.base import Target
from casnap.backends.client import Sink
from casnap.runtime.typing import override

# Two runs this near are read by one request. A request costs this process about 2 ms of work, and a
# connection about 20 ms of silence: a megabyte costs no more.
_GAP = 1 << 20
# Longer ranges are split, and read at once: one connection gives 50 to 100 MB/s. Shorter parts cost
# more work than they save time.
_PART = 8 << 20


class Scatter(Sink):
    """A range of an object, of which each byte goes to where it is wanted.

    Args:
        start: Where the range begins.
        stop: Where it ends.
        targets: The runs that overlap it, by their beginnings.
    """

    def __init__(self, start: int, stop: int, targets: Sequence[Target]) -> None:
        self.start = start
        self.stop = stop
        self._targets = targets
        self._first = 0

    @override
    def restart(self) -> None:
        super().restart()
        self._first = 0

    @override
    def take(self, data: bytes) -> None:
        piece = memoryview(data)
        begin = self.start + self.nbytes
        end = begin + len(piece)
        self.nbytes += len(piece)
        targets = self._targets
        while self._first < len(targets) and _end(targets[self._first]) <= begin:
            self._first += 1
        for i in range(self._first, len(targets)):
            offset, view = targets[i]
            if offset >= end:
                break
            low, high = max(offset, begin), min(offset + len(view), end)
            if low < high:
                view[low - offset : high - offset] = piece[low - begin : high - begin]


class Whole(Sink):
    """A whole object of unknown length."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    @override
    def restart(self) -> None:
        super().restart()
        self._pieces.clear()

    @override
    def take(self, data: bytes) -> None:
        super().take(data)
        self._pieces.append(data)

    def content(self) -> bytes:
        """Return the object's bytes."""
        return b"".join(self._pieces)


def runs(targets: Sequence[Target]) -> list[Scatter]:
    """Return the ranges to ask for so that all targets are filled."""
    wanted = sorted((t for t in targets if len(t[1])), key=_begin)
    ranges: list[tuple[int, int, list[Target]]] = []
    for target in wanted:
        if ranges and target[0] <= ranges[-1][1] + _GAP:
            start, stop, together = ranges[-1]
            together.append(target)
            ranges[-1] = start, max(stop, _end(target)), together
        else:
            ranges.append((target[0], _end(target), [target]))
    return [part for found in ranges for part in _parts(*found)]


def _parts(start: int, stop: int, targets: list[Target]) -> list[Scatter]:
    count = -(-(stop - start) // _PART)
    edges = [start + (stop - start) * i // count for i in range(count + 1)]
    parts = []
    for begin, end in pairwise(edges):
        mine = [t for t in targets if t[0] < end and _end(t) > begin]
        if mine:
            parts.append(Scatter(begin, end, mine))
    return parts


def _begin(target: Target) -> int:
    return target[0]


def _end(target: Target) -> int:
    return target[0] + len(target[1])
