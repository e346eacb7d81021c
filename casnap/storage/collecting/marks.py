"""Marks: which chunks and nodes are needed, in all packs or only in the changed ones."""

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
        stored: The stored bytes of all chunks and nodes in the pack.
        needed: How many chunks and nodes in the pack are needed by a snapshot.
        live: The stored bytes of the needed chunks and nodes that no newer pack holds.
        is_fixed: Whether a needed chunk in the pack has a codec that this version does not know.
            Such a chunk cannot be copied out, so the pack stays.
    """

    stored: int = 0
    needed: int = 0
    live: int = 0
    is_fixed: bool = False


class Marks(Protocol):
    """The chunks and nodes that the snapshots of a root need.

    Attributes:
        root: The root.
        snapshots: How many snapshots the root has.
        count: How many different chunks and nodes are needed; 0 if they were not counted.
        uses: Each pack that the collection has looked at → how much of the pack is needed.
        rescue: Condemned packs that hold a needed chunk or node which no live pack holds.
        missing: The digests of needed chunks and nodes that no pack holds.
        finds_orphans: Whether the collection also looks for files that no root names.
        least_garbage: How many bytes of garbage the sparse packs must have together, to be worth
            copying out of them.
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
        """The stored bytes of all needed chunks and nodes in live packs.

        A chunk or node in several packs counts once, in the newest.
        """

    def contents_of(self, packs: Collection[PackId]) -> Iterator[Placed]:
        """Yield the chunks and nodes in some packs, which must be keys of ``uses``."""

    def needed_of(self, digests: set[bytes]) -> dict[bytes, bool]:
        """Return, for each needed digest among ``digests``, whether it names a node."""

    def advance(self, root: Root) -> set[bytes]:
        """Also mark what a newer root needs; return the digests that only this newer root needs.

        Chunks and nodes that the newer root no longer needs stay marked. This is safe: the next
        collection finds them.

        Raises:
            DamagedError: A tree node is missing or damaged. This object cannot be used any more.
        """

    def note_done(self) -> None:
        """Note in the reference counts which packs were read: the next collection skips them."""
