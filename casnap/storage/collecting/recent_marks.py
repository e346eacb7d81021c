"""Mark only the packs that are new, or hold chunks and nodes that are no longer needed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from casnap.errors import DamagedError
from casnap.format.codec import KNOWN_CODECS
from casnap.format.digest import Digest, split_digests
from casnap.format.records import PackId, Root, SealedSegment, SegmentId
from casnap.runtime.progress import Progress
from casnap.storage.collecting.marks import PackUse, Placed
from casnap.storage.collecting.reference_counts import ReferenceCounts
from casnap.storage.lookup.index import IndexView, PackSet
from casnap.storage.lookup.pack_lengths import GONE
from casnap.storage.packs.footers import read_footer
from casnap.storage.reading.repository import Repository

_log = logging.getLogger("casnap")
# To read a footer takes as long as to read this many records of a segment.
_RECORDS_A_FOOTER = 512
_Contents = list[tuple[bytes, int, int]]
"""For each chunk and node of a pack: its digest, its stored bytes, and its codec."""


class RecentMarks:
    """Marks for the packs that are new, or hold chunks or nodes that are no longer needed.

    All other packs are left out. Each new pack is read, since the counts miss a chunk that was
    written and became garbage between two collections. Only :class:`WholeMarks` find orphans, and
    condemned packs that are needed again.

    Args:
        store: The store.
        view: The index according to the store's newest root.
        counts: How often each chunk and node is referred to, as of an earlier root. They are
            brought up to the newest root.
        progress: Called from time to time; an error that it raises ends the marking.

    Raises:
        DamagedError: A tree node is missing or damaged. The counts are cleared then.
    """

    finds_orphans = False
    # Less garbage than this is left to a collection of the whole store.
    least_garbage = 256 << 10

    def __init__(
        self, store: Repository, view: IndexView, counts: ReferenceCounts, progress: Progress
    ) -> None:
        self._progress = progress
        self._store = store
        self._counts = counts
        self.root = view.root
        self.snapshots = len(store.table(view.root))
        self.count = 0
        self.nbytes = counts.live_bytes
        self.missing = set[bytes](split_digests(view.root.lost))
        self.rescue: set[PackId] = set()
        counts.advance(store, view.root, progress)
        self._segments, self._dead = view.segments, frozenset(counts.dead)
        packs = {p for i, packs in view.segments.items() if i not in counts.segments for p in packs}
        packs = PackSet(counts.segments.values()).lacking(packs)
        self._contents = self._read_new({p for p in packs if p in view.live}, view)
        # Digest → the newest new pack that holds it. No pack that was looked at before is newer.
        self._newest_new = {d: p for p in sorted(self._contents) for d, *_ in self._contents[p]}
        listed = set(self._newest_new)
        for digest in self._dead - counts.needed_of(self._dead):
            # Digests beside it in a pack have mostly died with it, and need not be looked up.
            if digest not in listed:
                places = store.index.find_all(view, Digest(digest))
                packs = {PackId(p.pack) for p in places if p.pack in view.live}
                self._contents |= self._read_footers(packs - self._contents.keys())
                listed.update(d for pack in packs for d, *_ in self._contents.get(pack, ()))
        self.uses = {pack: self._use_of(pack, view) for pack in self._contents}

    def _read_new(self, new: Collection[PackId], view: IndexView) -> dict[PackId, _Contents]:
        """Read the contents of new packs from small new segments, else from the packs' footers.

        A pack is left out if its contents cannot be read.
        """
        contents: dict[PackId, _Contents] = {}
        in_large: set[PackId] = set()
        for ref in view.root.segments:
            listed = view.segments[SegmentId(ref.id)].intersection(new)
            if ref.count > _RECORDS_A_FOOTER * len(listed):
                in_large |= listed
            elif listed:
                for pack in listed:
                    contents.setdefault(pack, [])
                segment = SealedSegment(*self._store.index.sealed(ref))
                packs = segment.packs
                for digest, n, _, stored_size, _, codec in segment.records():
                    if packs[n] in listed:
                        contents[packs[n]].append((digest, stored_size, codec))
        # A pack that cannot be read is left out: it must not seem to be empty.
        known = {pack: held for pack, held in contents.items() if pack not in in_large}
        return known | dict(self._read_footers(in_large))

    def _read_footers(self, packs: Collection[PackId]) -> Iterator[tuple[PackId, _Contents]]:
        for pack, length in self._store.index.pack_lengths.of(packs, 0).items():
            try:
                if length != GONE:
                    records = read_footer(self._store.backend, pack, length)
                    yield pack, [(digest, p.stored_size, p.codec) for digest, p in records]
            except (FileNotFoundError, DamagedError) as e:
                # The pack stays, until a collection goes through the whole index.
                _log.debug("what pack %s holds is not known: %s", pack.hex(), e)

    def _use_of(self, pack: PackId, view: IndexView) -> PackUse:
        contents, use = self._contents[pack], PackUse()
        needed = self._counts.needed_of([digest for digest, *_ in contents])
        for digest, stored_size, codec in contents:
            use.stored += stored_size
            if digest in needed:
                use.needed += 1
                use.is_fixed |= codec not in KNOWN_CODECS
                use.live += stored_size * (pack >= self._newest_pack(digest, view))
        return use

    def _newest_pack(self, digest: bytes, view: IndexView) -> bytes:
        newest: bytes | None = self._newest_new.get(digest)
        if newest is None:
            places = self._store.index.find_all(view, Digest(digest))
            newest = max((p.pack for p in places if p.pack in view.live), default=b"")
        return newest

    def note_done(self) -> None:
        """Note in the reference counts which segments were read: the next collection skips them."""
        self._counts.segments = self._segments
        self._counts.dead -= self._dead

    def contents_of(self, packs: Collection[PackId]) -> Iterator[Placed]:
        """Yield the chunks and nodes in some packs, which must be keys of ``uses``."""
        for pack in packs:
            for digest, stored_size, _ in self._contents[pack]:
                yield digest, pack, stored_size

    def needed_of(self, digests: set[bytes]) -> dict[bytes, bool]:
        """Return, for each needed digest among ``digests``, whether it names a node."""
        return {d: self._counts.names_node(d) for d in self._counts.needed_of(digests)}

    def advance(self, root: Root) -> set[bytes]:
        """Mark what a newer root needs; return the digests to which this root added references.

        Raises:
            DamagedError: A tree node is missing or damaged. The counts are cleared then.
        """
        self.root = root
        return self._counts.advance(self._store, root, self._progress)
