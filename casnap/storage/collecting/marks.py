"""The contract of marks: they say which contents are needed, of all packs or of changed ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from casnap.format.records import PackId, Root

Placed = tuple[bytes, PackId, int]
"""A digest, a pack that holds it, and its stored bytes there."""


@dataclass(slots=True)
class PackUse:
    """How much of a pack is needed.

    Attributes:
        stored: Bytes of all its chunks and nodes.
        needed: How many of its chunks and nodes some snapshot needs.
        live: The bytes of needed chunks and nodes that no newer pack holds.
        is_fixed: Whether a needed chunk has a codec that this version does not know. It cannot copy
            such a chunk, so the pack stays.
    """

    stored: int = 0
    needed: int = 0
    live: int = 0
    is_fixed: bool = False


class Marks(Protocol):
    """The chunks and nodes that the snapshots of a root need.

    Attributes:
        root: The root.
        snapshots: How many snapshots it has.
        count: How many different chunks and nodes are needed; 0 if these were not counted.
        uses: How much is needed of each pack that was looked at.
        rescue: Condemned packs that hold a needed digest which no live pack holds.
        missing: Needed digests that no pack holds.
        finds_orphans: Whether the collection is also to look for files that no root names.
        least_garbage: How many bytes must become free to make it worth copying out of packs.
    """

    root: Root
    snapshots: int
    count: int
    uses: dict[PackId, PackUse]
    rescue: set[PackId]
    missing: set[bytes]
    finds_orphans: bool
    least_garbage: int

    @property
    def nbytes(self) -> int:
        """Stored bytes of everything needed in live packs; a digest counts in its newest pack."""

    def contents_of(self, packs: Collection[PackId]) -> Iterator[Placed]:
        """Yield the contents of some packs that were looked at."""

    def needed_of(self, digests: set[bytes]) -> dict[bytes, bool]:
        """Return which of some digests are needed, and whether each is a node."""

    def advance(self, root: Root) -> set[bytes]:
        """Move on to a newer root; return the digests that it needs and the root before did not.

        Digests that are no longer needed stay marked. That is safe: the next collection finds them.

        Raises:
            DamagedError: A tree node is missing or damaged. These marks cannot be used any more.
        """

    def note_done(self) -> None:
        """Note in the counts that these packs are done, so that the next collection skips them."""
