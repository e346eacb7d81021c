"""Read ranges of an object into the buffers of several callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from casnap.backends.base import Target
from casnap.backends.remote.client import Sink
from casnap.format.records import check_length
from casnap.runtime.typing import override

# Two runs that lie at most this far apart are read by one request. A request costs this process
# about 2 ms of work, and a connection about 20 ms of silence: a megabyte costs no more.
_GAP = 1 << 20
# Longer ranges are split, and the parts are read at once: one connection gives 50 to 100 MB/s.
# Shorter parts cost more work than they save time.
_PART = 16 << 20
# Bytes for a shorter target are received together with the bytes around them, and copied.
_LONG = 64 << 10


class Scatter(Sink):
    """A range of an object to read. Each byte is copied to all targets that contain it.

    Args:
        start: The offset of the range's first byte.
        stop: One past the range's last byte.
        targets: The targets that overlap the range, sorted by their offsets.
        passed: Called with the index of a target in ``targets``, once the target has all its bytes
            of this range.

    Attributes:
        start: The offset of the first byte of the range; after a failed attempt, of the part that
            is still missing.
        stop: One past the range's last byte.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        targets: Sequence[Target],
        passed: Callable[[int], None] = lambda place: None,
    ) -> None:
        self.start = start
        self.stop = stop
        self._targets = targets
        self._passed = passed
        self._first = 0

    @override
    def restart(self) -> None:
        """Prepare for another attempt: keep the received bytes, and read on after them.

        The caller may have used the received bytes already.
        """
        self.start += self.nbytes
        super().restart()

    @override
    def take(self, data: bytes | memoryview) -> None:
        piece = memoryview(data)
        targets, begin = self._targets, self._pass()
        end = begin + len(piece)
        self.nbytes += len(piece)
        for i in range(self._first, len(targets)):
            offset, view = targets[i]
            if offset >= end:
                break
            low, high = max(offset, begin), min(offset + len(view), end)
            if low < high:
                view[low - offset : high - offset] = piece[low - begin : high - begin]
        self._pass()

    @override
    def received(self, nbytes: int) -> None:
        super().received(nbytes)
        self._pass()

    @override
    def room(self) -> memoryview | None:
        begin = self._pass()
        targets = self._targets[self._first : self._first + 2]
        if not targets or targets[0][0] > begin or len(targets[0][1]) < _LONG:
            return None
        # Only up to the next target's beginning, since that may want the same bytes.
        stop = min(self.stop, *(offset for offset, _ in targets[1:]), _end(targets[0]))
        return targets[0][1][begin - targets[0][0] : stop - targets[0][0]] or None

    def _pass(self) -> int:
        """Call ``passed`` for each target that is now complete; return the next byte's offset."""
        begin = self.start + self.nbytes
        while (
            self._first < len(self._targets)
            and min(_end(self._targets[self._first]), self.stop) <= begin
        ):
            self._first += 1
            self._passed(self._first - 1)
        return begin


class Whole(Sink):
    """Takes a whole object of unknown length.

    Args:
        name: The name of the object, for messages.
        most: The most bytes that the object may have.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._pieces: list[bytes] = []

    @override
    def expect(self, nbytes: int) -> None:
        check_length(self._name, nbytes, self._most)

    @override
    def restart(self) -> None:
        super().restart()
        self._pieces.clear()

    @override
    def take(self, data: bytes | memoryview) -> None:
        super().take(data)
        # A file system may have told no length before, or a wrong one.
        self.expect(self.nbytes)
        self._pieces.append(bytes(data))

    def content(self) -> bytes:
        """Return the bytes of the object."""
        return b"".join(self._pieces)


def runs(
    targets: Sequence[Target], full: Callable[[int], None] = lambda number: None
) -> list[Scatter]:
    """Return the ranges to read so that all targets are filled.

    Args:
        targets: For each run that is wanted, the offset of its first byte, and the buffer.
        full: Called with the index of each target once it has all its bytes.
    """
    parts: list[tuple[int, int, list[int]]] = []
    for start, stop, numbers in _ranges(targets):
        parts += _split(start, stop, numbers, targets)
    missing_parts = Counter(number for _, _, numbers in parts for number in numbers)

    def passed(numbers: list[int], place: int) -> None:
        missing_parts[numbers[place]] -= 1
        if not missing_parts[numbers[place]]:
            full(numbers[place])

    return [
        Scatter(start, stop, [targets[n] for n in numbers], partial(passed, numbers))
        for start, stop, numbers in parts
    ]


def _ranges(targets: Sequence[Target]) -> list[tuple[int, int, list[int]]]:
    """Return the ranges that cover all targets. Targets that lie near each other share a range.

    Returns:
        For each range, the offset of its first byte, one past its last, and the indices of its
        targets, sorted by their offsets.
    """
    numbers = [number for number, target in enumerate(targets) if len(target[1])]
    numbers.sort(key=lambda number: targets[number][0])
    ranges: list[tuple[int, int, list[int]]] = []
    for number in numbers:
        begin, end = targets[number][0], _end(targets[number])
        if ranges and begin <= ranges[-1][1] + _GAP:
            start, stop, together = ranges[-1]
            together.append(number)
            ranges[-1] = start, max(stop, end), together
        else:
            ranges.append((begin, end, [number]))
    return ranges


def _split(
    start: int, stop: int, numbers: list[int], targets: Sequence[Target]
) -> Iterator[tuple[int, int, list[int]]]:
    # Servers keep objects in pieces of such lengths. A part that is aligned touches fewer pieces.
    least = _PART // 4
    inner = range((start + least - 1) // _PART * _PART + _PART, stop - least + 1, _PART)
    for begin, end in pairwise((start, *inner, stop)):
        mine = [n for n in numbers if targets[n][0] < end and _end(targets[n]) > begin]
        if mine:
            yield begin, end, mine


def _end(target: Target) -> int:
    return target[0] + len(target[1])
