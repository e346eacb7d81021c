"""Backends that note what is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from casnap import Snapshot, Store
from casnap.backends import Backend, LocalBackend
from casnap.backends.base import Target
from casnap.runtime.typing import override
from tests.support.faulty import FaultyBackend


class CountingBackend(FaultyBackend):
    """A backend that notes which runs are read.

    Attributes:
        reads: The key, the offset and the bytes of each.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.reads: list[tuple[str, int, int]] = []

    @property
    def nbytes(self) -> int:
        """How many bytes were read."""
        return sum(n for _, _, n in self.reads)

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        lengths = super().read_into(key, targets)
        self.reads += [(key, at, n) for (at, _), n in zip(targets, lengths, strict=True)]
        return lengths


def counted(snapshot: Snapshot) -> tuple[Snapshot, CountingBackend]:
    """Open a snapshot of a local store anew, and return it with what counts its reads."""
    backend = CountingBackend(LocalBackend(Path(snapshot.store.uri)))
    return Store(backend)[snapshot.name], backend
