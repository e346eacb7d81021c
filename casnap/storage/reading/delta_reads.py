"""Read chunks that are stored as deltas: all deltas of a chain, then the whole chunk at its end.

The chains of many chunks are read together: first their first deltas, then their second ones, and
so on, since chunks near each other in a snapshot have deltas near each other in a pack. Then the
whole chunks are read, a few at a time. The deltas of a chain are applied to one buffer, and only
the result is hashed. If the result is wrong, each chunk of the chain is looked for at all its
places, and verified by itself.

``lookup/chains.py`` is not used here, since it needs places that name the base of a delta. A place
that was found in a range of a segment does not name the base. So here each delta is read first: its
stored bytes name its base.
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
        place: The place of the wanted chunk.
        wants: The ``Want`` objects for the chunk.
        next: The place and digest of the next chunk of the chain to read.
        deltas: The deltas that were read, in the order of the chain.
        raw: The whole chunk at the end of the chain; after :meth:`apply`, the wanted chunk.
        fill: If the caller has a chunk of the chain, a function that copies this chunk into memory.
            The chain then ends with this chunk.
        failure: Why the wanted chunk cannot be read; None if nothing has failed.
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
        """Whether the next chunk of the chain is stored as a delta, and so must be read."""
        is_whole = self.failure is None and self.fill is None
        return is_whole and self.next[0].codec == Codec.DELTA

    def keep(self, stored_form: memoryview) -> None:
        """Keep the next chunk of the chain, given its stored bytes: a delta, or the whole chunk."""
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
        """Apply the deltas to the whole chunk at the end of the chain, and verify the wanted chunk.

        If that fails, ``failure`` is set.

        Args:
            memory: Memory for the wanted chunk. It is used only if ``fill`` gives the chunk at the
                end of the chain.
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
    """Return about how many bytes all deltas of a chunk's chain have together."""
    place, _ = wanted_place
    return int(min(MOST_STORED * place.raw_size, _LINKS * place.stored_size))


class DeltaReader:
    """Reads chunks that are stored as deltas in one store.

    Args:
        read: Reads the stored bytes at places.
        bases: Finds the bases of deltas.
        find_own: Finds a chunk that the caller has. A chain ends at such a chunk.
    """

    def __init__(self, read: ReadPlaces, bases: Bases, find_own: FindBase) -> None:
        self._read_places = read
        self._bases = bases
        self._find_own = find_own

    def read(self, wanted_places: list[Located], at_once: int) -> list[FailedRead]:
        """Read chunks at places of deltas, and pass them to their sinks; return the failed reads.

        Args:
            wanted_places: The places, each with the ``Want`` objects for its chunk.
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
        """Read all deltas of some chains, then make the wanted chunks; return the failed reads."""
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
        """Make the wanted chunks of chains, and pass them to their sinks; return failed reads.

        All deltas of the chains must have been read.
        """
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
        """Read the next chunk of each chain, in its stored form."""
        wants: dict[tuple[Place, Digest], list[Want]] = {}
        for chain in chains:
            want = Want(chain.next[1], chain.place.raw_size, chain.keep, "", is_stored=True)
            wants.setdefault(chain.next, []).append(want)
        for unread in self._read_places([(place, w) for (place, _), w in wants.items()]):
            for chain in chains:
                if chain.next == (unread.place, unread.wants[0].digest):
                    chain.failure = unread.failure

    def _find_bases(self, chains: list[_Chain]) -> None:
        """Find the next chunk of each chain: the base that its last delta names."""
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
        """Read a chunk at one place, and verify each chunk of its chain.

        Two collectors that recode at once may make a chain that comes back to its first chunk. The
        result is then None, and the caller tries the other places of the chunk.

        Args:
            digest: The digest of the chunk.
            place: The place.
            known: The chunks that were looked for before, as for :meth:`_resolve`.
            deltas: How many deltas will be applied to the chunk, one after the other.

        Returns:
            The chunk; None if it is not whole at this place.
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
        """Read a chunk at its places in turn, until one is whole; return the verified bytes.

        The result is None if the chunk is missing, or damaged wherever it lies.

        Args:
            digest: The digest of the chunk.
            known: The chunks that were looked for before, by digest; None for a chunk that was not
                found, or is being looked for. So a circle of deltas comes to an end.
            deltas: How many deltas will be applied to the chunk, one after the other.
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
