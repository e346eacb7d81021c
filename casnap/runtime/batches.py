"""Cut a sequence of items into batches of about a given number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in batches, in order. A batch ends once it has ``most`` bytes or more.

    Args:
        items: The items.
        size: Returns the number of bytes of an item.
        most: The number of bytes at which a batch ends. Its last item may exceed this number.
    """
    batch: list[T] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += size(item)
        if nbytes >= most:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
