"""Survey the index and the packs: find out which places of chunks and nodes are whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from casnap.errors import BackendError, DamagedError
from casnap.format.digest import Digest
from casnap.format.records import (
    PackId,
    Place,
    Record,
    Root,
    SegmentId,
    SegmentRef,
    footer_size,
    max_segment_bytes,
    merged_segment,
    pack_key,
    segment_counts,
    segment_key,
)
from casnap.maintenance.damage import (
    ALL,
    KINDS,
    READ_ERRORS,
    Damage,
    Findings,
    kind_and_message,
)
from casnap.maintenance.full_index import FullIndex
from casnap.maintenance.pack_checks import bad_records, can_lie_at, is_known
from casnap.runtime.progress import Progress
from casnap.runtime.threads import mapped
from casnap.storage import Repository
from casnap.storage.inspecting import (
    Failure,
    GivenPlaces,
    Reason,
    ShortestChains,
    listed_packs,
    read_footer,
)


class _PackState(NamedTuple):
    """The length and the records of a pack, as its file has them.

    Attributes:
        size: The length of the pack in bytes; -1 if it is not known.
        footer: The records in its footer.
        error: Why length or footer cannot be read; None if they were.
    """

    size: int
    footer: Sequence[Record] = ()
    error: Exception | None = None


def _length_of(records: Sequence[Record]) -> int:
    """Return how many bytes a pack with these records, and its footer, has."""
    end = max((place.offset + place.stored_size for _, place in records), default=0)
    return end + footer_size(records)


def _wrong_length(size: int, records: Sequence[Record]) -> str:
    return f"the pack has {size:,} bytes, not the {_length_of(records):,} it was written with"


class PackSurvey:
    """The places of chunks and nodes that the index of a root lists, and which of them are whole.

    The constructor reads the segments. :meth:`look` compares each pack with the index; :meth:`read`
    reads and verifies chunks.

    Args:
        store: The store.
        root: The root.
        findings: Gets each damage.
        progress: Called with the current phase, how much of it is done, and the total.
        earlier: The survey of an earlier root. Places that it found bad stay bad.

    Attributes:
        index: The index, made of the segments that can be read.
        unreadable: The segments that cannot be read.
        hurt: Packs with any damage.
        read_bytes: How many bytes were read and verified.
        wanted: Look only at the packs that hold these digests; None for all.
    """

    def __init__(
        self,
        store: Repository,
        root: Root,
        findings: Findings,
        progress: Progress,
        earlier: PackSurvey | None = None,
    ) -> None:
        self._store = store
        self._root = root
        self._findings = findings
        self._progress = progress
        self.hurt: set[PackId] = set()
        self.unreadable: dict[SegmentRef, Damage] = {}
        self._unsupported_packs: dict[PackId, Damage] = {}
        # Places that were read and are not whole.
        self._bad: dict[Record, Failure] = {} if earlier is None else earlier._bad
        # Deltas of another base than the index says.
        self._other_bases: dict[Record, Digest] = {} if earlier is None else earlier._other_bases
        self.read_bytes: int = 0 if earlier is None else earlier.read_bytes
        self.wanted: set[Digest] | None = None if earlier is None else earlier.wanted
        # The damages that cost a digest one of its places.
        self._blame: dict[Digest, list[Damage]] = {}
        self._gone: set[PackId] = set()
        self._cut: set[Record] = set()
        self._chains = ShortestChains(self._places_there)
        lookup = GivenPlaces(store.lookup, self.whole_places)
        self._reader = Repository(store.backend, store.config, lookup)
        self.index = FullIndex(self._segments())

    def whole_places(self, digest: Digest) -> list[Place]:
        """Return the places of a chunk or node, by its digest, that are not known to be damaged."""
        places = self.index.of(digest)
        return [place for place in places if self._is_whole(digest, place)]

    def _is_whole(self, digest: Digest, place: Place) -> bool:
        return self._is_there(digest, place) and self._chains.ends(place)

    def _is_there(self, digest: Digest, place: Place) -> bool:
        record = (digest, place)
        return not (place.pack in self._gone or record in self._cut or record in self._bad)

    def _places_there(self, digest: Digest) -> list[Place]:
        return [place for place in self.index.of(digest) if self._is_there(digest, place)]

    def note_bad(self, digest: Digest, place: Place, failure: Failure) -> None:
        """Note that the bytes at a place are not the chunk or node with this digest.

        Args:
            digest: The digest.
            place: The place.
            failure: What was found there.
        """
        self._bad[digest, place] = failure
        self._chains.forget()
        message = f"at byte {place.offset:,}: {failure}"
        damage = self._hurt_pack(place.pack, KINDS[failure.reason], message, digest)
        self._blame.setdefault(digest, []).append(damage)

    def recall(self) -> None:
        """Report again the places that earlier surveys found bad, if the index still lists them."""
        for (digest, place), failure in list(self._bad.items()):
            if place in self.index.of(digest):
                self.note_bad(digest, place, failure)
        self._note_other_bases()

    def blame(self, digest: Digest) -> list[Damage]:
        """Return the damages that keep a chunk or node from being read at its places."""
        return self._blame.get(digest, [])

    def has_long_chain(self, digest: Digest) -> bool:
        """Whether a chunk has a place, but needs more deltas in a chain than casnap reads."""
        return any(map(self._chains.is_too_long, self._places_there(digest)))

    # --- the index ---

    def _segments(self) -> Iterator[tuple[bytes, str]]:
        segments = self._root.segments
        for number, ref in enumerate(segments):
            self._progress("reading the index", number, len(segments))
            key = segment_key(SegmentId(ref.id))
            try:
                yield self._read_segment(ref, key), key
            except READ_ERRORS as e:
                kind, message = kind_and_message(e, "an index segment")
                damage = self.unreadable[ref] = self._findings.add(kind, key, message)
                # The index cannot be read until the segment is replaced. Its chunks may be whole.
                damage.hurts[ALL] = None

    def _read_segment(self, ref: SegmentRef, key: str) -> bytes:
        content = self._store.backend.read(key, max_segment_bytes(ref))
        if segment_counts(content) != (ref.count, ref.deltas):
            raise DamagedError(f"{key} is another index segment than the root says")
        if merged_segment([(content, key)])[0] != content:
            raise DamagedError(f"{key} is malformed: its packs or records are not in order")
        return content

    # --- each pack ---

    @property
    def chosen(self) -> Sequence[PackId]:
        """The packs that the survey checks: all, or those with a place of a wanted digest."""
        if self.wanted is None:
            return self.index.packs
        return sorted({place.pack for d in self.wanted for place in self.index.of(d)})

    def look(self) -> None:
        """Compare the size and the footer of each pack with the index."""
        packs, backend = self.chosen, self._store.backend
        listed = None if backend.costs.free_looks else listed_packs(backend, are_many=False)
        states = mapped(lambda pack: self._state_of(pack, listed), packs, backend.in_flight)
        for number, (pack, state) in enumerate(states):
            self._progress("looking at packs", number, len(packs))
            try:
                self._compare(pack, state)
            except FileNotFoundError:
                self._lose_pack(pack, "missing", "the pack is missing")
            except BackendError as e:
                self._lose_pack(pack, "unreadable", f"the pack cannot be read: {e}")

    def _state_of(self, pack: PackId, listed: dict[bytes, int] | None) -> _PackState:
        backend, size = self._store.backend, -1
        try:
            records = self.index.of_pack(pack)
            size = -1 if listed is None else listed.get(pack, -1)
            if size < _length_of(records):
                # A listing may be stale. Before the pack counts as hurt, its length is asked for.
                size = backend.size(pack_key(pack))
            if size < _length_of(records):
                return _PackState(size)
            return _PackState(size, read_footer(backend, pack, size, footer_size(records)))
        except READ_ERRORS as e:
            return _PackState(size, error=e)

    def _compare(self, pack: PackId, state: _PackState) -> None:
        records, size, error = self.index.of_pack(pack), state.size, state.error
        if size < 0 and error is not None:
            raise error
        if size < _length_of(records):
            self._note_cut_off(pack, size, records)
            return
        for digest, place in records:
            if (digest, place) not in self._bad and not can_lie_at(place):
                self.note_bad(digest, place, Failure(Reason.IMPOSSIBLE))
            elif not is_known(place):
                self.unsupported_in(pack)
        if error is not None:
            is_denied = isinstance(error.__cause__, PermissionError)
            if is_denied or isinstance(error, FileNotFoundError):
                raise error
            self._hurt_pack(pack, "changed", f"{error}; its chunks may be whole")
        elif not set(state.footer).issuperset(records):
            self._hurt_pack(pack, "changed", "the footer of the pack and the index disagree")
        elif size != _length_of(state.footer):
            self._hurt_pack(pack, "changed", _wrong_length(size, state.footer))

    def _note_cut_off(self, pack: PackId, size: int, records: Sequence[Record]) -> None:
        damage = self._hurt_pack(pack, "cut off", _wrong_length(size, records))
        for digest, place in records:
            if place.offset + place.stored_size > size:
                self._cut.add((digest, place))
                self._chains.forget()
                self._blame.setdefault(digest, []).append(damage)

    def _hurt_pack(self, pack: PackId, kind: str, message: str, digest: bytes = b"") -> Damage:
        self.hurt.add(pack)
        return self._findings.add(kind, pack_key(pack), message, digest)

    def _lose_pack(self, pack: PackId, kind: str, message: str) -> None:
        damage = self._hurt_pack(pack, kind, message)
        self._gone.add(pack)
        self._chains.forget()
        for digest, _ in self.index.of_pack(pack):
            self._blame.setdefault(digest, []).append(damage)

    def unsupported_in(self, pack: PackId) -> Damage:
        """Report, once for each pack, that this version cannot read some of its chunks."""
        if pack not in self._unsupported_packs:
            unknown = [p.codec for _, p in self.index.of_pack(pack) if not is_known(p)]
            codecs = ", ".join(map(str, sorted(set(unknown))))
            message = (
                f"{len(unknown):,} of its chunks have a form that this casnap does not know (codec "
                f"{codecs}), so they were not checked; update casnap"
            )
            self._unsupported_packs[pack] = self._findings.add_unsupported(message, pack_key(pack))
        return self._unsupported_packs[pack]

    # --- all bytes ---

    def read(self, share: float, choice: random.Random) -> None:
        """Read and verify a share of all chunks and nodes.

        Args:
            share: The share, up to 1.
            choice: Chooses the chunks and nodes.
        """
        total = int(self.stored_bytes * share)

        def report(nbytes: int) -> None:
            self.read_bytes += nbytes
            self._progress("reading", min(self.read_bytes, total), total)

        records = (r for r in self._to_read() if share >= 1 or choice.random() < share)
        bases = self._other_bases.__setitem__
        for (digest, place), failure in bad_records(self._reader, records, report, bases):
            self.note_bad(digest, place, failure)
        self._note_other_bases()

    def _note_other_bases(self) -> None:
        """Report deltas whose real base is another chunk than the index says.

        A collector goes by the index, so it may delete the real base.
        """
        for (digest, place), base in self._other_bases.items():
            if place in self.index.of(digest):
                message = (
                    f"at byte {place.offset:,}: a delta on {base.hex()}, but pack and index name "
                    "another base, so a garbage collector may delete the base that it needs"
                )
                self._hurt_pack(place.pack, "malformed", message, digest)

    @property
    def stored_bytes(self) -> int:
        """The stored bytes of all chunks and nodes in the packs that the survey looks at."""
        if self.wanted is None:
            return self.index.stored_bytes
        return sum(place.stored_size for d in self.wanted for place in self.index.of(d))

    def _to_read(self) -> Iterator[Record]:
        for pack in self.chosen:
            for digest, place in self.index.of_pack(pack):
                if self.wanted is not None and digest not in self.wanted:
                    continue
                if self._is_whole(digest, place):
                    yield digest, place
