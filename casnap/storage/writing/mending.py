"""Write for a repair: packs with copies of whole chunks, and roots that name these new packs.

The roots leave out the damaged packs. A repair overwrites no object, and deletes none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from casnap.format.codec import codec_among
from casnap.format.digest import Digest
from casnap.format.records import PackId, Place, Record, Root, Segment, SegmentRef, pack_key
from casnap.runtime.threads import Crew, run_shielded
from casnap.storage.commit_log.roots import next_root
from casnap.storage.lookup.index import IndexView
from casnap.storage.packs.pack_writer import moved_place, new_id
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.copying import one_at_a_time
from casnap.storage.writing.new_packs import NewPacks
from casnap.storage.writing.segments import add_segment, drop_packs
from casnap.storage.writing.starting_over import put_root_after

T = TypeVar("T")


class Mending:
    """Writes the packs and roots of one repair. :meth:`run` makes the object.

    Args:
        store: The store.
        crew: Starts the threads in the background.
    """

    def __init__(self, store: Repository, crew: Crew) -> None:
        self._store = store
        self._crew = crew
        self._saved: NewPacks | None = None

    @classmethod
    def run(cls, store: Repository, work: Callable[[Mending], T]) -> T:
        """Call a function that does a repair, and return its result.

        Meanwhile no other thread of this process copies chunks.

        Args:
            store: The store.
            work: Does the repair. It gets a new ``Mending`` to write with.
        """

        def mend(crew: Crew) -> T:
            mending = cls(store, crew)
            try:
                return work(mending)
            except BaseException as e:
                crew.fail(e)
                raise
            finally:
                mending.drop()

        with one_at_a_time():
            return run_shielded(mend)

    # --- whole chunks and nodes ---

    @property
    def has_saved(self) -> bool:
        """Whether there are new packs that no root names yet."""
        return self._saved is not None

    def begin(self, root: Root, places: Iterable[Place]) -> None:
        """Begin new packs, for the chunks and nodes in damaged packs that are whole.

        Args:
            root: The root that was surveyed.
            places: The places of these chunks and nodes. Their codecs determine the codec of the
                new packs: the one that makes chunks smallest.
        """
        codec = codec_among(place.codec for place in places)
        self._saved = NewPacks(self._store, root.seq, self._crew, codec)

    def save(self, digest: Digest, raw: memoryview, *, is_node: bool) -> None:
        """Write a verified chunk or node to a new pack, unless it was written before."""
        assert self._saved is not None
        self._saved.copy(digest, raw, is_node=is_node)

    def drop(self) -> None:
        """Close the new packs. If no root names them, a later collection deletes them."""
        if self._saved is not None:
            self._saved.close()
        self._saved = None

    # --- roots ---

    def adopt(
        self, packs: Mapping[PackId, list[Record]], unreadable: Collection[SegmentRef]
    ) -> None:
        """Copy packs that no segment lists any more, and put a root whose segments list the copies.

        Args:
            packs: The packs, each with the records of its whole chunks and nodes.
            unreadable: Segments that the new root does not name, since they cannot be read.
        """
        put_root_after(self._store, lambda root: self._entering(packs, unreadable, root))

    def _entering(
        self,
        packs: Mapping[PackId, list[Record]],
        unreadable: Collection[SegmentRef],
        root: Root,
    ) -> Root:
        """Copy packs to new ids; return the next root, which lists the copies.

        Args:
            packs: The packs, each with the records of its whole chunks and nodes.
            unreadable: Segments that the new root does not name, since they cannot be read.
            root: The root before.
        """
        new_packs: dict[PackId, PackId] = {}
        for pack in packs:
            # A collector may be deleting the pack under its old name.
            to = PackId(new_id(root.seq)[:-1] + pack[-1:])
            try:
                self._store.backend.copy(pack_key(pack), pack_key(to))
            except FileNotFoundError:
                continue
            new_packs[pack] = to
        records = [(d, moved_place(p, new_packs)) for pack in new_packs for d, p in packs[pack]]
        segment = Segment(tuple(new_packs.values()), records)
        view = self._readable(root, unreadable)
        return self._next_root(root, segments=add_segment(self._store, view, segment, root.seq))

    def replace(
        self,
        root: Root,
        damaged: frozenset[PackId],
        unreadable: Collection[SegmentRef],
        *,
        condemned: Mapping[bytes, int],
        lost: bytes,
    ) -> bool:
        """Put a root that lists the new packs instead of damaged ones.

        Args:
            root: The root that was surveyed.
            damaged: The packs that the new root does not list any more.
            unreadable: Segments that the new root does not name, since they cannot be read.
            condemned: The packs that the new root condemns.
            lost: The concatenated digests that the new root lists as lost.

        Returns:
            Whether the root was put. If not, the store has changed, and the caller must survey it
            again.
        """

        def prepare(newest: Root) -> Root | None:
            if newest != root and not self._holds_for(newest, root, damaged, unreadable):
                return None
            try:
                segments = self._mended(newest, damaged, unreadable)
            except FileNotFoundError:
                self.drop()
                return None
            return self._next_root(newest, segments=segments, condemned=condemned, lost=lost)

        if put_root_after(self._store, prepare, first_root=lambda: root) is None:
            return False
        self.drop()
        return True

    def _mended(
        self, root: Root, damaged: frozenset[PackId], unreadable: Collection[SegmentRef]
    ) -> tuple[SegmentRef, ...]:
        """Write and return the next root's segments: without damaged packs, with the new packs.

        Raises:
            FileNotFoundError: A collector has deleted a new pack.
        """
        segments = drop_packs(self._store, self._readable(root, unreadable), damaged)
        if self._saved is None:
            return segments
        without_damage = msgspec.structs.replace(root, segments=segments)
        self._saved.finish()
        if root.fence > self._saved.base_seq:
            self._saved.move(root.seq)
        segment = self._saved.segment()
        return add_segment(self._store, self._store.index.view(without_damage), segment, root.seq)

    def _holds_for(
        self,
        newer: Root,
        root: Root,
        damaged: frozenset[PackId],
        unreadable: Collection[SegmentRef],
    ) -> bool:
        """Whether what a survey has found for one root is also right for a newer root.

        It is not if the newer root has other condemned packs or other lost digests, or if it no
        longer names all unreadable segments and all damaged packs.

        Args:
            newer: The newer root.
            root: The root that was surveyed.
            damaged: The damaged packs.
            unreadable: The segments that cannot be read.
        """
        return (
            (newer.condemned, newer.lost) == (root.condemned, root.lost)
            and set(unreadable) <= set(newer.segments)
            and self._readable(newer, unreadable).packs.issuperset(damaged)
        )

    def go_back(
        self,
        newest: Root,
        whole: Root,
        packs: Sequence[PackId],
        records_of: Callable[[PackId], list[Record]],
    ) -> bool:
        """Put a root that has the snapshots of an older root, and lists the packs of both roots.

        Because all packs stay listed, no chunk is lost right away: a collection condemns the packs
        that no snapshot needs, and deletes them once their grace is over.

        Args:
            newest: The newest root, which was surveyed.
            whole: The older root.
            packs: The packs of the newest root.
            records_of: Returns the records of such a pack.

        Returns:
            Whether the root was put. If not, another process has put a root since the survey.
        """

        def prepare(root: Root) -> Root | None:
            if root != newest:
                return None
            return self._next_root(
                newest,
                table=whole.table,
                copies=whole.copies,
                lost=whole.lost,
                **self._packs_of_both(whole, newest, packs, records_of),
            )

        return put_root_after(self._store, prepare, first_root=lambda: newest) is not None

    def _packs_of_both(
        self,
        whole: Root,
        newest: Root,
        packs: Sequence[PackId],
        records_of: Callable[[PackId], list[Record]],
    ) -> dict[str, Any]:
        """Return ``segments`` and ``condemned`` for a new root that lists the packs of two roots.

        Args:
            whole: An older root, all of whose files exist.
            newest: The newest root.
            packs: The packs of the newest root.
            records_of: Returns the records of a pack of the newest root.
        """
        view = self._store.index.view(whole)
        later = [pack for pack in packs if pack not in view.packs]
        if not later:
            return {"segments": whole.segments, "condemned": whole.condemned}
        segment = Segment(tuple(later), [r for pack in later for r in records_of(pack)])
        condemned = {p: seq for p, seq in newest.condemned.items() if p in segment.packs}
        return {
            "segments": add_segment(self._store, view, segment, newest.seq),
            "condemned": {**whole.condemned, **condemned},
        }

    def _readable(self, root: Root, unreadable: Collection[SegmentRef]) -> IndexView:
        """Return the index according to a root, without the segments that cannot be read."""
        refs = tuple(ref for ref in root.segments if ref not in unreadable)
        return self._store.index.view(msgspec.structs.replace(root, segments=refs))

    def _next_root(self, root: Root, **changes: Any) -> Root:
        return next_root(self._store.backend.uri, root, os.urandom(16), **changes)
