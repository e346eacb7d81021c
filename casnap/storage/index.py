"""Where every chunk and node lies: the index segments of a store, as one root sees them.

What the segments say is remembered as facts (see ``facts.py``), which hold for ever; whether one
*counts* is decided by the root at hand alone: its pack must be live in it.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

import lmdb

from casnap.backends.base import EXHAUSTED, Backend
from casnap.errors import DamagedError
from casnap.format.digest import Digest, digest_of
from casnap.format.records import (
    PackId,
    Place,
    Record,
    Root,
    Segment,
    SegmentId,
    SegmentRef,
    decode_segment,
    segment_count,
    segment_key,
)
from casnap.storage.cache import Facts, LmdbFacts, MemoryFacts, facts_for
from casnap.storage.pack_set import PackSet

_log = logging.getLogger("casnap")
T = TypeVar("T")
# A cache has some 220 bytes a record, tree nodes included.
_CACHE_BYTES, _BYTES_A_RECORD = 1 << 30, 1024


@dataclass(frozen=True)
class View:
    """The index as one root sees it.

    Attributes:
        root: That root.
        segments: The packs that each of its segments lists.
        packs: All of these packs, which are there to be read.
        live: Those that may be relied on: all but the condemned.
        facts: What is remembered of them; all segments of the root have been learned there.
    """

    root: Root
    segments: dict[SegmentId, frozenset[PackId]]
    packs: PackSet
    live: PackSet
    facts: Facts


# What this process found damaged, by cache, also where that is kept in memory, or was deleted.
_distrusted: defaultdict[str, set[Record]] = defaultdict(set)


class Index:
    """Finds the places of digests among the live packs of a root."""

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._store_id = store_id
        # Of the cache, by store and place.
        self._name = ""
        self._facts: Facts | None = None
        self._replacing = threading.Lock()
        self._looked_at_size = False

    @property
    def facts(self) -> Facts:
        """The cache, opened at the first use."""
        facts = self._facts
        if facts is None or (isinstance(facts, LmdbFacts) and not facts.usable()):
            if not self._name:
                self._look_where_it_is()
            facts = self._facts = facts_for(self._name)
        return facts

    def _look_where_it_is(self) -> None:
        """Let go of a cache that was learned elsewhere: what lies at our URI may be changed."""
        place = digest_of(self._backend.identity.encode()).hex()[:32]
        name = f"{self._store_id}-{place}"
        if name != self._name:
            self._name, self._facts, self._looked_at_size = name, None, False

    def view(self, root: Root) -> View:
        """Return the index as ``root`` sees it, reading the segments that are new.

        Raises:
            DamagedError: A segment is missing or damaged.
            BackendError: The store is not there any more.
        """
        self._look_where_it_is()
        facts, segments = self._asked(self.facts, root, lambda facts: self._learn_all(facts, root))
        self._shed(facts, root)
        packs = PackSet(segments.values())
        return View(root, segments, packs, packs.without(root.condemned.keys()), facts)

    def refreshed(self, view: View, root: Root, digests: Collection[Digest]) -> View:
        """Return a view that believes nothing but the store, if the cache says what is not so.

        Args:
            view: A view of this or an older root.
            root: The root that counts.
            digests: What was not found where the cache says that it is.
        """
        told = MemoryFacts()
        self._learn_all(told, root, only=frozenset(digests))
        view = self.view(root)
        if all(
            {p for p in told.places(d) if p.pack in view.packs} == set(self.find_all(view, d))
            for d in digests
        ):
            return view
        if isinstance(view.facts, LmdbFacts):
            view.facts.delete()
        self._replaced(view.facts, root)
        return self.view(root)

    def _shed(self, facts: Facts, root: Root) -> None:
        """Delete a cache most of which must be of what was collected since; once for a store.

        Nothing is ever removed from it one by one. Who has it open goes on with what it has, and
        the next one makes it anew.
        """
        if self._looked_at_size or not isinstance(facts, LmdbFacts):
            return
        self._looked_at_size = True
        if facts.nbytes() > _CACHE_BYTES + _BYTES_A_RECORD * sum(
            ref.count for ref in root.segments
        ):
            _log.info("the cache %s has outgrown its store, and is made anew", facts.folder)
            facts.delete()

    def _learn_all(
        self, facts: Facts, root: Root, only: frozenset[Digest] | None = None
    ) -> dict[SegmentId, frozenset[PackId]]:
        """Learn all segments of a root, and return their packs; of some digests alone, if named."""
        segments: dict[SegmentId, frozenset[PackId]] = {}
        for ref in root.segments:
            ident = SegmentId(ref.id)
            segments[ident] = facts.listed.get(ident) or self._learn(facts, ref, only)
        # For the next view, which differs in few of them.
        facts.listed = segments
        return segments

    def _learn(
        self, facts: Facts, ref: SegmentRef, only: frozenset[Digest] | None
    ) -> frozenset[PackId]:
        ident = SegmentId(ref.id)
        known = facts.packs_of(ident)
        if known is None:
            content = self.segment(ref)
            known, records = content.packs, content.records
            if only is not None:
                records = [record for record in records if record[0] in only]
            facts.learn(ident, known, records)
        return frozenset(known)

    def _asked(self, facts: Facts, root: Root, ask: Callable[[Facts], T]) -> tuple[Facts, T]:
        """Ask these facts, or, where the cache fails, ask what the store itself says."""
        try:
            return facts, ask(facts)
        except (lmdb.Error, OSError) as e:
            if not isinstance(facts, LmdbFacts):
                raise
            _log.warning("the cache %s failed (%s); the index is kept in memory", facts.folder, e)
            # Where we may open no more files, the cache is as good as ever.
            if isinstance(e, lmdb.Error) or e.errno not in EXHAUSTED | {None}:
                facts.delete()
        facts = self._replaced(facts, root)
        return facts, ask(facts)

    def _replaced(self, failed: Facts, root: Root) -> Facts:
        """Return facts in memory that hold all segments of a root."""
        with self._replacing:
            if self._facts is failed or self._facts is None:
                fresh: Facts = MemoryFacts()
            else:
                fresh = self._facts
            self._learn_all(fresh, root)
            # Only now: whoever finds it must find all that its root needs.
            self._facts = fresh
            return fresh

    def segment(self, ref: SegmentRef) -> Segment:
        """Read a segment from the store.

        Raises:
            DamagedError: It is missing or damaged.
        """
        return decode_segment(*self.sealed(ref))

    def sealed(self, ref: SegmentRef) -> tuple[bytes, str]:
        """Read the bytes of a segment from the store; return them, and its name for messages.

        Raises:
            DamagedError: It is missing, or another one than the root says.
        """
        key = segment_key(ref.id)
        what = f"{self._backend.uri}/{key}"
        try:
            data = self._backend.read(key)
        except FileNotFoundError:
            raise DamagedError(f"the index segment {what} is missing; see `casnap check`") from None
        count = segment_count(data)
        if count != ref.count:
            raise DamagedError(
                f"the index segment {what} has {count} records, not {ref.count}; see `casnap check`"
            )
        return data, what

    def find(
        self, view: View, digests: list[Digest], *, to_rely: bool = False
    ) -> list[Place | None]:
        """Return, for each digest, where it can be read, or None.

        Args:
            view: Which packs count.
            digests: What to find.
            to_rely: Whether only that counts which a take may rely on: live packs, since a
                condemned one is readable for some time, but on its way out; and no place that was
                found damaged.
        """
        packs = view.live if to_rely else view.packs
        if not packs:
            return [None] * len(digests)
        found = self._asked(view.facts, view.root, lambda facts: facts.place(digests, packs))[1]
        bad = self.distrusted(view, digests) if to_rely else set()
        if bad:
            for i, digest in enumerate(digests):
                if (digest, found[i]) in bad:
                    others = [(digest, p) for p in self.find_all(view, digest) if p.pack in packs]
                    found[i] = next((r[1] for r in others if r not in bad), None)
        return found

    def find_all(self, view: View, digest: Digest) -> list[Place]:
        """Return all places where a digest can be read."""
        places = self._asked(view.facts, view.root, lambda facts: facts.places(digest))[1]
        return [place for place in places if place.pack in view.packs]

    # --- what was found damaged ---

    def distrusted(self, view: View, digests: list[Digest]) -> set[Record]:
        """Return those places of some digests that were found damaged on this host."""
        ours = _distrusted[self._name]
        theirs = self._if_possible(view.facts, lambda facts: facts.distrusted(digests)) or set()
        return theirs | ours if ours else theirs

    def distrust(self, view: View, records: Iterable[Record]) -> None:
        """Note places where something was found damaged: a take stores it anew.

        So do other processes of this host. Places in packs that are gone are forgotten, and so
        there is never more to be noted than the index has records.
        """
        ours = _distrusted[self._name]
        ours.update(records)
        # A copy: other threads may find something damaged meanwhile.
        ours -= {record for record in ours.copy() if record[1].pack not in view.packs}
        self._if_possible(view.facts, lambda facts: facts.distrust(ours, view.packs))

    def trust(self, view: View, records: Iterable[Record]) -> None:
        """Note that these places are whole, since somebody has put back what was there."""
        whole = set(records)
        if whole:
            _distrusted[self._name] -= whole
            self._if_possible(view.facts, lambda facts: facts.trust(whole))

    # --- what is only remembered to save time ---

    def learn(
        self, view: View, segment: SegmentId, packs: Iterable[PackId], records: list[Record]
    ) -> None:
        """Remember a segment of our own, so that it need not be read.

        Args:
            view: A view whose segments it was merged from.
            segment: Its id.
            packs: The packs that it covers.
            records: Those that no segment of the view has.
        """
        self._if_possible(view.facts, lambda facts: facts.learn(segment, packs, records))

    def node(self, digest: Digest) -> bytes | None:
        """Return a cached tree node."""
        return self._if_possible(self.facts, lambda facts: facts.node(digest))

    def keep_nodes(self, nodes: list[tuple[Digest, bytes]]) -> None:
        """Remember tree nodes."""
        self._if_possible(self.facts, lambda facts: facts.keep_nodes(nodes))

    def note(self, key: bytes) -> bytes | None:
        """Return a note that was kept on this host, or None."""
        return self._if_possible(self.facts, lambda facts: facts.note(key))

    def keep_note(self, key: bytes, text: bytes) -> None:
        """Remember a note: of what will stay true, and does no harm if it is forgotten."""
        self._if_possible(self.facts, lambda facts: facts.keep_note(key, text))

    def _if_possible(self, facts: Facts, ask: Callable[[Facts], T]) -> T | None:
        try:
            return ask(facts)
        except (lmdb.Error, OSError) as e:
            # Whoever needs an answer asks next, and replaces the cache.
            _log.debug("the cache failed: %s", e)
            return None
