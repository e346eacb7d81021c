"""Surveying the files of a store: segments, packs and, on request, every byte."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from casnap.errors import BackendError, DamagedError, UnavailableError
from casnap.format.digest import Digest
from casnap.format.records import (
    FOOTER_RECORD_SIZE,
    PACK_TAIL_SIZE,
    PackId,
    Place,
    Record,
    Root,
    SegmentId,
    SegmentRef,
    max_segment_bytes,
    merged_segment,
    pack_key,
    segment_key,
)
from casnap.maintenance.damage import ALL, KINDS, READ_ERRORS, Damage, kind_and_message
from casnap.maintenance.places import Places, bad_records, can_lie_at, read_footer
from casnap.runtime.progress import Progress
from casnap.runtime.threads import mapped
from casnap.storage.objects import Objects
from casnap.storage.pack_lengths import listed_packs
from casnap.storage.place_reads import Reason, Why

_ROOT_ADVICE = (
    "It is the newest root, so nothing else can be looked at. Restore this file from a backup; "
    "never delete it, since the root before it would be taken for the newest one"
)


class _Footer(NamedTuple):
    """The length of a pack, -1 if that cannot be told; its footer, or why that cannot be read."""

    size: int
    records: Sequence[Record] = ()
    error: Exception | None = None


def _whole(records: Sequence[Record]) -> int:
    """Return how long a pack of these records is."""
    end = max((place.offset + place.stored for _, place in records), default=0)
    return end + len(records) * FOOTER_RECORD_SIZE + PACK_TAIL_SIZE


class FileSurvey:
    """A survey of the files that the newest root of a store names.

    Args:
        objects: The store.
        progress: Called with the current phase, how much of it is done, and the total.

    Raises:
        DamagedError: The newest root cannot be read.

    Attributes:
        root: The root.
        places: The places that its readable segments list.
        unreadable: Its segments that cannot be read.
        damages: What is wrong.
        hurt_packs: Packs with any damage.
        bad: Places that were read and are not whole; this stays true for newer roots.
        blame: The damages that cost a digest one of its places.
        read_bytes: How many bytes were read and verified.
    """

    root: Root

    def __init__(self, objects: Objects, progress: Progress | None = None) -> None:
        self.objects = objects
        self.bad: dict[Record, Why] = {}
        self.read_bytes = 0
        self._wanted: set[Digest] | None = None
        self.progress = progress or (lambda what, done, total: None)
        try:
            root = objects.newest()
        except DamagedError as e:
            raise DamagedError(f"{e}. {_ROOT_ADVICE}") from e
        self.look(root)

    def look(self, root: Root) -> None:
        """Start over with a root: read its segments."""
        self.root = root
        self.damages: list[Damage] = []
        self.hurt_packs: set[PackId] = set()
        self.unreadable: dict[SegmentRef, Damage] = {}
        self.blame: dict[Digest, list[Damage]] = {}
        self._gone: set[PackId] = set()
        self._cut: set[Record] = set()
        self.places = Places(self._components())

    def whole_places(self, digest: Digest) -> list[Place]:
        """Return the places of a digest that are not known to be bad."""
        places = self.places.of(digest)
        return [place for place in places if self.is_whole(digest, place)]

    def is_whole(self, digest: Digest, place: Place) -> bool:
        """Whether a place is not known to be bad."""
        record = (digest, place)
        return place.pack not in self._gone and record not in self._cut and record not in self.bad

    def note_bad(self, digest: Digest, place: Place, why: Why) -> None:
        """Record that the bytes at a place are not what was written."""
        self.bad[digest, place] = why
        pack = PackId(place.pack)
        damage = self.add_damage(
            KINDS[why.reason], pack_key(pack), f"at byte {place.offset:,}: {why}", digest
        )
        self.hurt_packs.add(pack)
        self.blame.setdefault(digest, []).append(damage)

    def add_damage(self, kind: str, key: str, message: str, digest: bytes = b"") -> Damage:
        """Record a damage, and return it."""
        damage = Damage(kind, key, message, digest.hex())
        self.damages.append(damage)
        return damage

    # --- segments ---

    def _components(self) -> Iterator[tuple[bytes, str]]:
        segments = self.root.segments
        for done, ref in enumerate(segments):
            self.progress("reading the index", done, len(segments))
            key = segment_key(SegmentId(ref.id))
            try:
                yield self._read_segment(ref, key), key
            except READ_ERRORS as e:
                kind, why = kind_and_message(e, "an index segment")
                damage = self.unreadable[ref] = self.add_damage(kind, key, why)
                # The index cannot be read until the segment is replaced. Its chunks may be whole.
                damage.hurts[ALL] = None

    def _read_segment(self, ref: SegmentRef, key: str) -> bytes:
        content = self.objects.backend.read(key, max_segment_bytes(ref.count))
        if merged_segment([(content, key)])[2] != ref.count:
            raise DamagedError(f"{key} is another index segment than the root says")
        return content

    # --- packs ---

    def narrow(self, digests: set[Digest]) -> None:
        """Look from now on only at these chunks and nodes, and at the packs that hold them."""
        self._wanted = digests

    @property
    def packs(self) -> Sequence[PackId]:
        """The packs to look at."""
        if self._wanted is None:
            return self.places.packs
        return sorted({PackId(place.pack) for d in self._wanted for place in self.places.of(d)})

    def look_at_packs(self) -> None:
        """Compare the size and the footer of each pack with the index."""
        packs, backend = self.packs, self.objects.backend
        listed = listed_packs(backend, many=False) if backend.is_remote else None
        at_once = 1 if listed is None else backend.in_flight
        looks = mapped(lambda pack: self._footer(pack, listed), packs, at_once)
        for done, (pack, footer) in enumerate(looks):
            self.progress("looking at packs", done, len(packs))
            try:
                self._pack(pack, footer)
            except FileNotFoundError:
                self._lose_pack(pack, "missing", "the pack is missing")
            except UnavailableError:
                raise
            except BackendError as e:
                self._lose_pack(pack, "unreadable", f"the pack cannot be read: {e}")

    def _footer(self, pack: PackId, listed: dict[bytes, int] | None) -> _Footer:
        backend, size = self.objects.backend, -1
        try:
            records = self.places.of_pack(pack)
            size = -1 if listed is None else listed.get(pack, -1)
            if size < _whole(records):
                # A list is not enough to call a pack hurt.
                size = backend.size(pack_key(pack))
            if size < _whole(records):
                return _Footer(size)
            return _Footer(size, read_footer(backend, pack, size, len(records)))
        except UnavailableError:
            raise
        except (FileNotFoundError, DamagedError, BackendError) as e:
            return _Footer(size, error=e)

    def _pack(self, pack: PackId, found: _Footer) -> None:
        records, size = self.places.of_pack(pack), found.size
        if size < 0 and found.error is not None:
            raise found.error
        whole = _whole(records)
        if size < whole:
            self._note_cut_off(pack, size, whole)
            return
        for digest, place in records:
            if (digest, place) not in self.bad and not can_lie_at(place):
                self.note_bad(digest, place, Why(Reason.IMPOSSIBLE))
        if found.error is not None:
            denied = isinstance(found.error.__cause__, PermissionError)
            if denied or not isinstance(found.error, DamagedError | BackendError):
                raise found.error
            self._hurt_pack(pack, "changed", f"{found.error}; its chunks may be whole")
            return
        footer, written = found.records, _whole(found.records)
        if not set(footer).issuperset(records):
            self._hurt_pack(pack, "changed", "the footer of the pack and the index disagree")
        elif size != written:
            why = f"the pack has {size:,} bytes, not the {written:,} it was written with"
            self._hurt_pack(pack, "changed", why)

    def _note_cut_off(self, pack: PackId, size: int, whole: int) -> None:
        why = f"the pack has {size:,} bytes, not the {whole:,} it was written with"
        damage = self._hurt_pack(pack, "cut off", why)
        for digest, place in self.places.of_pack(pack):
            if place.offset + place.stored > size:
                self._cut.add((digest, place))
                self.blame.setdefault(digest, []).append(damage)

    def _hurt_pack(self, pack: PackId, kind: str, message: str) -> Damage:
        self.hurt_packs.add(pack)
        return self.add_damage(kind, pack_key(pack), message)

    def _lose_pack(self, pack: PackId, kind: str, message: str) -> None:
        damage = self._hurt_pack(pack, kind, message)
        self._gone.add(pack)
        for digest, _ in self.places.of_pack(pack):
            self.blame.setdefault(digest, []).append(damage)

    # --- all bytes ---

    def read_share(self, share: float, chosen: random.Random) -> None:
        """Read and verify a share of all chunks and nodes."""
        total = int(self.stored_bytes * share)

        def told(nbytes: int) -> None:
            self.read_bytes += nbytes
            self.progress("reading", min(self.read_bytes, total), total)

        records = (r for r in self._to_read() if share >= 1 or chosen.random() < share)
        for (digest, place), why in bad_records(self.objects, records, told):
            self.note_bad(digest, place, why)

    @property
    def stored_bytes(self) -> int:
        """The stored bytes of what is looked at, at all its places."""
        if self._wanted is None:
            return self.places.stored_bytes
        return sum(place.stored for d in self._wanted for place in self.places.of(d))

    def _to_read(self) -> Iterator[Record]:
        for pack in self.packs:
            for digest, place in self.places.of_pack(pack):
                if self._wanted is not None and digest not in self._wanted:
                    continue
                if self.is_whole(digest, place):
                    yield digest, place
