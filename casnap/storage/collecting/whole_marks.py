"""Mark the whole store: which digests the snapshots of a root need, and how much of each pack."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from casnap.format.codec import KNOWN_CODECS, Codec
from casnap.format.records import PackId, Root, SealedSegment
from casnap.runtime.progress import Progress
from casnap.storage.collecting.marks import PackUse, Placed
from casnap.storage.collecting.reference_counts import ReferenceCounts
from casnap.storage.lookup.chains import closure
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.references import (
    MANIFEST,
    digest_in,
    is_node,
    references_of_row,
    tops_of,
    walk,
)

_DELTA = int(Codec.DELTA)
_PART = 2 << 20
"""How many records are marked at a time; this takes about 700 MB."""


class WholeMarks:
    """The chunks and nodes that the snapshots of a root need, for all packs that the root names.

    These are :class:`~casnap.storage.collecting.marks.Marks`.

    Args:
        store: The store.
        root: The store's newest root.
        progress: Called with the current phase, how much of it is done, and the total.
        deleted: Names of snapshots to treat as deleted.
        counts: Empty counts to fill with all references, for later collections; None for none.

    Raises:
        DamagedError: A tree node or a segment is missing or damaged.
    """

    finds_orphans = True
    least_garbage = 0

    def __init__(
        self,
        store: Repository,
        root: Root,
        progress: Progress,
        deleted: Collection[str] = (),
        counts: ReferenceCounts | None = None,
    ) -> None:
        self._store = store
        self._progress = progress
        self._seen: set[bytes] = set()
        self._needed: dict[bytes, int] = {}
        self.root = root
        self.snapshots = 0
        self.uses: dict[PackId, PackUse] = {}
        self.count = 0
        self.rescue: set[PackId] = set()
        self.missing: set[bytes] = set()
        self._deleted = deleted
        # To bound memory, the digests of a large index are marked in parts, one after the other.
        self._parts = 1 + sum(ref.count for ref in root.segments) // _PART
        # The bases of all deltas that the root names. A base that is nowhere may come back in a
        # newer root.
        self._bases = closure(self._segments(with_deltas=True), self._segments())
        self._needed_bases: set[bytes] = set()
        if self._parts > 1 and any(ref.deltas for ref in root.segments):
            # A delta and its base may belong to different parts.
            self._seen = self._of_forgotten()
            for _, below in self._walk_below():
                self._needed_bases |= self._needed_below(below)
        for part in range(self._parts):
            self._mark(part, counts if part == 0 else None)
        self._counts = counts
        self._counted = store.index.view(root).segments
        if counts is not None:
            counts.complete(store, root, self.nbytes)

    @property
    def nbytes(self) -> int:
        """The stored bytes of all needed chunks and nodes in live packs.

        A chunk or node in several packs counts once, in the newest.
        """
        condemned = self.root.condemned
        return sum(use.live for pack, use in self.uses.items() if pack not in condemned)

    def _needed_below(self, references: Iterable[bytes]) -> set[bytes]:
        """Return the bases of the needed chunks that are stored as deltas in some pack.

        If another pack has such a chunk whole, the base is needed all the same: a take may rely on
        the delta.

        A base that cannot be read, because its own chain lacks a base, does not count as needed: it
        is of no use for the delta. That is no damage: the missing base was deleted while no
        snapshot needed the chunk, and a take that needed the chunk later stored it again.

        Args:
            references: The references to the needed chunks.
        """
        return self._bases.below(references) - self._bases.nowhere

    def _mark(self, part: int, counts: ReferenceCounts | None) -> None:
        passed_over = self._of_forgotten()
        self._seen = set(passed_over)
        use_counts: dict[bytes, int] = {}
        for node, children in self._walk_below():
            use_counts.update(dict.fromkeys(self._of_part(children, part), 0))
            if counts is not None:
                counts.note(node, children)
        self._seen -= passed_over
        use_counts.update(dict.fromkeys(self._of_part(map(digest_in, self._seen), part), 0))
        if self._parts == 1:
            self._needed_bases = self._needed_below(use_counts)
        use_counts.update(dict.fromkeys(self._of_part(self._needed_bases, part), 0))
        self._needed = use_counts
        self.count += len(use_counts)
        self._sweep(use_counts, part)

    def _of_forgotten(self) -> set[bytes]:
        """Return the references of the snapshots that count as deleted.

        References that another snapshot has too are left out.
        """
        rows: dict[bool, set[bytes]] = {True: set(), False: set()}
        if self._deleted:
            rows[False].update(tops_of(self.root))
            for name, row in self._store.table(self.root).items():
                rows[name in self._deleted].update(references_of_row(row))
        return rows[True] - rows[False]

    def _of_part(self, references: Iterable[bytes], part: int) -> Iterator[bytes]:
        chunks = (r for r in references if not is_node(r))
        return chunks if self._parts == 1 else (d for d in chunks if d[0] % self._parts == part)

    def _walk_below(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield each node that was not visited yet, with the references in it."""
        self.snapshots = len(self._store.table(self.root)) - len(self._deleted)
        manifests = 0
        for node, children in walk(self._store, tops_of(self.root), self._seen):
            manifests += node[:1] == MANIFEST
            self._progress("marking", manifests, self.snapshots)
            yield node, children

    def _sweep(self, use_counts: dict[bytes, int], part: int) -> None:
        """Go through all records of the index, and add up how much of each pack is needed.

        The digests are divided into parts, to bound memory. One call looks at one part.

        Args:
            use_counts: The needed digests of the part, each with the value 0. The call sets the
                value of a digest that a live pack holds to a number that stands for the pack.
            part: The number of the part.
        """
        condemned = self.root.condemned
        in_several: set[bytes] = set()
        known_packs: dict[PackId, int] = {}
        for segment in self._segments():
            packs = segment.packs
            uses = [self.uses.setdefault(pack, PackUse()) for pack in packs]
            numbers = [
                0 if pack in condemned else known_packs.setdefault(pack, len(known_packs) + 1)
                for pack in packs
            ]
            for digest, n, offset, stored_bytes, _, codec in segment.records():
                use = uses[n]
                if part == 0:
                    use.stored += stored_bytes
                count = use_counts.get(digest)
                if count is not None:
                    use.needed += 1
                    if codec == _DELTA and (packs[n], offset) in self._bases.endless:
                        continue
                    use.live += stored_bytes
                    use.is_fixed |= codec not in KNOWN_CODECS
                    number = numbers[n]
                    if count == 0:
                        use_counts[digest] = number
                    elif number not in (0, count):
                        in_several.add(digest)
        self._count_newest_only(in_several)
        self._look_in_condemned({d for d, number in use_counts.items() if number == 0})

    def _count_newest_only(self, several: Collection[bytes]) -> None:
        """Count chunks that are in several live packs as needed bytes of the newest pack only.

        This lowers ``PackUse.live`` of the older packs.

        Args:
            several: The digests of these chunks and nodes.
        """
        places = [p for p in self.places_of(several) if p[1] not in self.root.condemned]
        newest: dict[bytes, PackId] = {}
        for digest, pack, _ in places:
            newest[digest] = max(pack, newest.get(digest, pack))
        for digest, pack, stored_bytes in places:
            if pack != newest[digest]:
                self.uses[pack].live -= stored_bytes

    def _look_in_condemned(self, nowhere: set[bytes]) -> None:
        """Add the condemned packs that hold some digests to ``rescue``.

        Args:
            nowhere: Digests that no live pack holds. If no condemned pack holds a digest either,
                the digest is added to ``missing``.
        """
        for digest, pack, _ in self.places_of(frozenset(nowhere)):
            self.rescue.add(pack)
            nowhere.discard(digest)
        self.missing |= nowhere

    def _segments(self, *, with_deltas: bool = False) -> Iterator[SealedSegment]:
        """Yield the segments of the root; with ``with_deltas``, only those that have deltas."""
        segments = [ref for ref in self.root.segments if ref.deltas or not with_deltas]
        for number, ref in enumerate(segments):
            self._progress("reading the index", number, len(segments))
            yield SealedSegment(*self._store.index.sealed(ref))

    def places_of(self, digests: Collection[bytes]) -> Iterator[Placed]:
        """Yield all places of some digests in the packs of the root.

        A delta is left out if a base of its chain has no place.
        """
        if not digests:
            return
        for segment in self._segments():
            packs = segment.packs
            for digest, n, offset, stored_bytes, _, codec in segment.records():
                if digest not in digests:
                    continue
                if codec != _DELTA or (packs[n], offset) not in self._bases.endless:
                    yield digest, packs[n], stored_bytes

    def note_done(self) -> None:
        """Note in the reference counts which segments were read: the next collection skips them."""
        if self._counts is not None:
            self._counts.segments = self._counted

    def contents_of(self, packs: Collection[PackId]) -> Iterator[Placed]:
        """Yield the chunks and nodes in some packs."""
        for segment in self._segments():
            listed = segment.packs
            if any(pack in packs for pack in listed):
                for digest, n, _, stored_bytes, *_ in segment.records():
                    if listed[n] in packs:
                        yield digest, listed[n], stored_bytes

    def needed_of(self, digests: set[bytes]) -> dict[bytes, bool]:
        """Return, for each needed digest among ``digests``, whether it names a node."""
        nodes = {digest_in(node) for node in self._seen}
        if self._parts == 1:
            return {d: d in nodes for d in digests if d in self._needed}
        self._seen = set()
        chunks = {d for _, children in self._walk_below() for d in children if d in digests}
        return {d: d in nodes for d in chunks | ((nodes | self._needed_bases) & digests)}

    def advance(self, root: Root) -> set[bytes]:
        """Also mark what a newer root needs; return the digests that only this newer root needs.

        Chunks and nodes that the newer root no longer needs stay marked. This is safe: the next
        collection finds them. The bases of all new deltas count as needed, even if no snapshot
        needs the deltas.

        Raises:
            DamagedError: A tree node is missing or damaged. This object cannot be used any more.
        """
        self.root = root
        digests = self._new_bases()
        for node, children in self._walk_below():
            digests.add(digest_in(node))
            digests.update(d for d in children if not is_node(d))
        return digests | self._bases.below(digests)

    def _new_bases(self) -> set[bytes]:
        """Return the bases of the deltas in packs that were not marked yet."""
        return {
            base
            for segment in self._segments(with_deltas=True)
            for (_, n, *_), base in segment.records_of_deltas()
            if segment.packs[n] not in self.uses
        }
