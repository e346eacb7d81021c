"""Reading chunks that are stored as deltas: all deltas of a chain, then the chunk below them.

The deltas of a group of chunks are read together, one level of their chains after the other, since
neighbours in a snapshot have neighbouring deltas. Then the chunks below them are read, a few at a
time. All deltas of a chain are applied to one buffer, and only the result is hashed. If it is not
the wanted chunk, each chunk of the chain is looked for alone, at all its places, and verified.

This does not use ``lookup/chains.py``, which goes by places that name the base of a delta. A place
from a range of a segment does not name it. So here each delta is read before its base is looked
for: the stored bytes of a delta name its base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from casnap.errors import DamagedError
from casnap.format.codec import Codec, decompress
from casnap.format.delta import MOST_LINKS, MOST_STORED, apply_delta, base_of
from casnap.format.digest import Digest, digest_of
from casnap.format.records import Place
from casnap.runtime.batches import batches
from casnap.runtime.threads import cores, mapped
from casnap.storage.lookup.chains import exceeds
from casnap.storage.lookup.lookup_order import Bases
from casnap.storage.packs.chunk_reads import (
    FailedRead,
    Failure,
    Fill,
    FindBase,
    Located,
    Reason,
    Want,
)

# About how many bytes of deltas a thread reads together, and then how many of the chunks below.
_DELTA_BYTES, _RAW_BYTES = 16 << 20, 8 << 20
# A group of fewer bytes for a thread takes more requests, and saves no time.
_LEAST_BYTES = 4 << 20
# An estimate of how many deltas a chain has, each as long as its last one.
_LINKS = 16

ReadPlaces = Callable[[list[Located]], list[FailedRead]]
"""Reads chunks at places; returns the reads that failed."""


@dataclass(eq=False)
class _Chain:
    """A wanted chunk, and its chain as far as it was read.

    Attributes:
        place: The place of the chunk.
        wants: The wants for the chunk.
        next: The next link to read: its place and its digest.
        deltas: The deltas that were read.
        raw: The chunk below the deltas; once they are applied, the wanted chunk.
        fill: Reads the chunk below the deltas, if the caller has that chunk.
        failure: Why the chunk cannot be read.
    """

    place: Place
    wants: list[Want]
    next: tuple[Place, Digest]
    deltas: list[bytes] = field(default_factory=list)
    raw: bytearray | memoryview = field(default_factory=bytearray)
    fill: Fill | None = None
    failure: Failure | None = None

    @property
    def has_unread_delta(self) -> bool:
        """Whether the next link is a delta to read."""
        is_whole = self.failure is None and self.fill is None
        return is_whole and self.next[0].codec == Codec.DELTA

    def keep(self, stored_form: memoryview) -> None:
        """Keep the next link, given its stored bytes."""
        place = self.next[0]
        if place.codec == Codec.DELTA:
            self.deltas.append(bytes(stored_form))
            return
        try:
            raw = decompress(place.codec, stored_form, place.raw_size)
        except DamagedError as e:
            self.failure = Failure(Reason.CHANGED, str(e))
        else:
            # Raw bytes lie in the buffer of the read, so copy them. Decompressed ones do not.
            self.raw = bytearray(raw) if place.codec == Codec.RAW else raw

    def apply(self, memory: memoryview) -> None:
        """Make the wanted chunk, and verify it.

        Args:
            memory: The memory to make it in, if the caller has the chunk below the deltas.
        """
        if self.fill is not None:
            self.raw = memory[: self.place.raw_size]
            if not self.fill(self.raw):
                self.failure = Failure(Reason.CHANGED)
                return
        try:
            for stored_form in reversed(self.deltas):
                apply_delta(memoryview(stored_form), self.raw)
        except DamagedError as e:
            self.failure = Failure(Reason.CHANGED, str(e))
            return
        if len(self.raw) != self.place.raw_size or digest_of(self.raw) != self.wants[0].digest:
            self.failure = Failure(Reason.CHANGED)


def _estimate(wanted_place: Located) -> int:
    """Return about how many bytes the deltas of a chain have."""
    place, _ = wanted_place
    return int(min(MOST_STORED * place.raw_size, _LINKS * place.stored_size))


class DeltaReader:
    """Reads deltas of one store.

    Args:
        read: Reads the stored bytes at places.
        bases: Finds the bases of deltas.
        find_own: Finds a base that the caller has. The reading of a chain ends at such a base.
    """

    def __init__(self, read: ReadPlaces, bases: Bases, find_own: FindBase) -> None:
        self._read_places = read
        self._bases = bases
        self._find_own = find_own

    def read(self, wanted_places: list[Located], at_once: int) -> list[FailedRead]:
        """Read chunks at places of deltas, and hand them to their sinks; return failed reads.

        Args:
            wanted_places: The places.
            at_once: How many threads read and apply deltas.
        """
        failures: list[FailedRead] = []
        neighbours = sorted(wanted_places, key=lambda each: (each[0].pack, each[0].offset))
        share = sum(map(_estimate, neighbours)) // cores()
        groups = batches(neighbours, _estimate, min(_DELTA_BYTES, max(_LEAST_BYTES, share)))
        for _, failed in mapped(self._read_group, groups, at_once):
            failures += failed
        return failures

    def _read_group(self, wanted_places: list[Located]) -> list[FailedRead]:
        chains = [_Chain(p, wants, (p, wants[0].digest)) for p, wants in wanted_places]
        return self._read_chains(chains)

    def _read_chains(self, chains: list[_Chain]) -> list[FailedRead]:
        """Read all deltas of chains, then make the chunks; return the reads that failed."""
        while unread := [chain for chain in chains if chain.has_unread_delta]:
            held_bytes = sum(len(delta) for chain in chains for delta in chain.deltas)
            if held_bytes > _DELTA_BYTES and len(chains) > 1:
                # The deltas are longer than estimated: go on with half of the chains at a time.
                half = len(chains) // 2
                return self._read_chains(chains[:half]) + self._read_chains(chains[half:])
            self._read_links(unread)
            self._find_bases([chain for chain in unread if chain.failure is None])
        failures = []
        for some in batches(chains, lambda chain: chain.place.raw_size, _RAW_BYTES):
            failures += self._hand_over(some)
        return failures

    def _hand_over(self, chains: list[_Chain]) -> list[FailedRead]:
        """Make the chunks of chains for their sinks; return the reads that failed."""
        self._read_links([c for c in chains if c.failure is None and c.fill is None])
        failures = []
        # One chunk after the other, so that a chunk is in the core's cache until its sink has it.
        own = [c.place.raw_size for c in chains if c.failure is None and c.fill is not None]
        memory = memoryview(bytearray(max(own, default=0)))
        for chain in chains:
            if chain.failure is None:
                chain.apply(memory)
            raw: bytes | bytearray | memoryview | None = chain.raw
            if chain.failure is not None:
                raw = self._resolve_at(chain.wants[0].digest, chain.place, {}, 0)
            if raw is None:
                assert chain.failure is not None
                failures.append(FailedRead(chain.place, chain.wants, chain.failure))
                continue
            for want in chain.wants:
                if want.as_delta is None or chain.failure is not None:
                    want.sink(memoryview(raw))
                else:
                    want.as_delta(memoryview(chain.deltas[0]), memoryview(raw))
            chain.raw = bytearray()
            chain.deltas.clear()
        return failures

    def _read_links(self, chains: list[_Chain]) -> None:
        """Read the next link of each chain."""
        wants: dict[tuple[Place, Digest], list[Want]] = {}
        for chain in chains:
            want = Want(chain.next[1], chain.place.raw_size, chain.keep, "", is_stored=True)
            wants.setdefault(chain.next, []).append(want)
        for unread in self._read_places([(place, w) for (place, _), w in wants.items()]):
            for chain in chains:
                if chain.next == (unread.place, unread.wants[0].digest):
                    chain.failure = unread.failure

    def _find_bases(self, chains: list[_Chain]) -> None:
        """Find the next link of each chain: the base of its last delta."""
        bases: dict[_Chain, Digest] = {}
        for chain in chains:
            try:
                base = base_of(chain.deltas[-1])
            except DamagedError as e:
                chain.failure = Failure(Reason.CHANGED, str(e))
                continue
            chain.fill = self._find_own(base)
            if chain.fill is None:
                bases[chain] = base
        digests = list(dict.fromkeys(bases.values()))
        places = dict(zip(digests, self._bases.find(digests), strict=True))
        for chain, base in bases.items():
            place = places[base]
            if place is None:
                chain.failure = Failure(Reason.NOWHERE, f"of its base {base.hex()}")
            elif exceeds(len(chain.deltas), place):
                chain.failure = Failure(Reason.CHANGED, "its chain of deltas is too long")
            else:
                chain.next = (place, base)

    # --- if a chain failed: each of its chunks alone ---

    def _resolve_at(
        self, digest: Digest, place: Place, known: dict[Digest, bytes | None], deltas: int
    ) -> bytes | None:
        """Return a chunk from one of its places, with every chunk of its chain verified; or None.

        If two collectors recoded at once, the chain may come back to the chunk itself. Then this
        returns None, and the chunk is looked for at its other places.

        Args:
            digest: The digest of the chunk.
            place: The place.
            known: As in :meth:`_resolve`.
            deltas: How many deltas are to be applied to the chunk, one after the other.
        """
        if exceeds(deltas, place):
            return None
        link = _Chain(place, [], (place, digest))
        self._read_links([link])
        if link.failure is not None:
            return None
        raw = self._applied(link.deltas[0], known, deltas + 1) if link.deltas else bytes(link.raw)
        is_whole = raw is not None and len(raw) == place.raw_size and digest_of(raw) == digest
        return raw if is_whole else None

    def _resolve(
        self, digest: Digest, known: dict[Digest, bytes | None], deltas: int
    ) -> bytes | None:
        """Return a verified chunk from any of its places; None if no place has it.

        Args:
            digest: The digest of the chunk.
            known: The chunks that were looked for before; None for a chunk that no place has. This
                also ends a circle of deltas.
            deltas: How many deltas are to be applied to the chunk, one after the other.
        """
        if digest in known or len(known) > 2 * MOST_LINKS:
            return known.get(digest)
        known[digest] = None
        for place in sorted(self._bases.find_all(digest), key=lambda p: p.codec == Codec.DELTA):
            known[digest] = self._resolve_at(digest, place, known, deltas)
            if known[digest] is not None:
                break
        return known[digest]

    def _applied(
        self, stored_form: bytes, known: dict[Digest, bytes | None], deltas: int
    ) -> bytes | None:
        try:
            base = self._resolve(base_of(stored_form), known, deltas)
            if base is None:
                return None
            raw = bytearray(base)
            apply_delta(memoryview(stored_form), raw)
        except DamagedError:
            return None
        return bytes(raw)
