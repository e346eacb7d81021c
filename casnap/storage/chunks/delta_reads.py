"""Reading chunks that are stored as deltas: with all deltas of a chain, and what it begins with.

The chunks of a group are read together, one level of their chains after the other, since
neighbours in a snapshot have neighbouring deltas. All deltas of a chain are applied to one buffer,
and only the result is hashed. If it is not the chunk, each chunk of the chain is looked for alone,
at all of its places, and verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from casnap.errors import DamagedError
from casnap.format.codec import Codec, decompress
from casnap.format.delta import MOST_LINKS, apply_delta, base_of
from casnap.format.digest import Digest, digest_of
from casnap.format.records import Place
from casnap.runtime.batches import batches
from casnap.runtime.threads import mapped
from casnap.storage.chunks.chunk_reads import (
    FailedRead,
    Failure,
    Fill,
    FindBase,
    Located,
    Reason,
    Want,
)

# So many bytes of chunks are read together, by each thread.
_GROUP_BYTES = 8 << 20

ReadPlaces = Callable[[list[Located]], list[FailedRead]]
"""Reads what lies at some places."""
FindPlaces = Callable[[list[Digest]], "list[Place | None]"]
"""Returns a place, or None, for each digest."""
FindAll = Callable[[Digest], list[Place]]
"""Returns all places of a digest."""


@dataclass(eq=False)
class _Chain:
    """A wanted chunk, and what is known of its chain.

    Attributes:
        place: Where the chunk lies.
        wants: Who wants it.
        next: The next link: where it lies, and its digest.
        deltas: The deltas that were read.
        raw: What the chain begins with, then the chunk.
        fill: Reads what the chain begins with, if the caller has it.
        failure: Why it cannot be read.
    """

    place: Place
    wants: list[Want]
    next: tuple[Place, Digest]
    deltas: list[bytes] = field(default_factory=list)
    raw: bytearray | memoryview = field(default_factory=bytearray)
    fill: Fill | None = None
    failure: Failure | None = None

    def keep(self, stored_form: memoryview) -> None:
        """Take a link, as it is stored."""
        place = self.next[0]
        if place.codec == Codec.DELTA:
            self.deltas.append(bytes(stored_form))
            return
        try:
            raw = decompress(place.codec, stored_form, place.raw_size)
        except DamagedError as e:
            self.failure = Failure(Reason.CHANGED, str(e))
        else:
            # What was decompressed lies in memory of its own.
            self.raw = bytearray(raw) if place.codec == Codec.RAW else raw

    def apply(self, memory: memoryview) -> None:
        """Make the chunk, and prove it.

        Args:
            memory: Where to make it, if the caller has what the chain begins with.
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


class DeltaReader:
    """Reads deltas of one store.

    Args:
        read: Reads what lies at some places, as it is stored.
        find: Finds the bases of deltas; what is no delta is preferred.
        find_all: Finds all places of a base.
        find_own: Finds a base that the caller has. There the reading of a chain ends.
    """

    def __init__(
        self, read: ReadPlaces, find: FindPlaces, find_all: FindAll, find_own: FindBase
    ) -> None:
        self._read_places = read
        self._find = find
        self._find_all = find_all
        self._find_own = find_own

    def read(self, wanted_places: list[Located], at_once: int) -> list[FailedRead]:
        """Read chunks at places of deltas, and hand them to their sinks; return those that failed.

        Args:
            wanted_places: The places.
            at_once: How many threads read and apply deltas.
        """
        failures: list[FailedRead] = []
        neighbours = sorted(wanted_places, key=lambda each: (each[0].pack, each[0].offset))
        groups = batches(neighbours, lambda each: each[0].raw_size, _GROUP_BYTES)
        for _, failed in mapped(self._read_group, groups, at_once):
            failures += failed
        return failures

    def _read_group(self, wanted_places: list[Located]) -> list[FailedRead]:
        chains = [_Chain(p, wants, (p, wants[0].digest)) for p, wants in wanted_places]
        self._read_chains(chains)
        failures = []
        # One chunk after the other: it stays in the cache of the core until its sink has it.
        own = [c.place.raw_size for c in chains if c.fill is not None and c.failure is None]
        memory = memoryview(bytearray(max(own, default=0)))
        for chain in chains:
            if chain.failure is None:
                chain.apply(memory)
            raw: bytes | bytearray | memoryview | None = chain.raw
            if chain.failure is not None:
                raw = self._resolve_at(chain.wants[0].digest, chain.place, {})
            if raw is None:
                assert chain.failure is not None
                failures.append(FailedRead(chain.place, chain.wants, chain.failure))
                continue
            for want in chain.wants:
                if want.as_delta is None or chain.failure is not None:
                    want.sink(memoryview(raw))
                else:
                    want.as_delta(memoryview(chain.deltas[0]), memoryview(raw))
        return failures

    def _read_chains(self, chains: list[_Chain]) -> None:
        """Read all deltas of some chains, and what these begin with."""
        for _ in range(MOST_LINKS + 1):
            chains = self._read_links(chains)
            if not chains:
                return
            chains = self._find_bases(chains)
        for chain in chains:
            chain.failure = Failure(Reason.CHANGED, "its chain of deltas is too long")

    def _read_links(self, chains: list[_Chain]) -> list[_Chain]:
        """Read the next links of some chains; return the chains that go on."""
        wants: dict[tuple[Place, Digest], list[Want]] = {}
        for chain in chains:
            want = Want(chain.next[1], chain.place.raw_size, chain.keep, "", is_stored=True)
            wants.setdefault(chain.next, []).append(want)
        for unread in self._read_places([(place, w) for (place, _), w in wants.items()]):
            for chain in chains:
                if chain.next == (unread.place, unread.wants[0].digest):
                    chain.failure = unread.failure
        return [c for c in chains if c.failure is None and c.next[0].codec == Codec.DELTA]

    def _find_bases(self, chains: list[_Chain]) -> list[_Chain]:
        """Find the bases of the last deltas of some chains, as their next links.

        Returns:
            The chains whose base lies somewhere, and is still to be read.
        """
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
        places = dict(zip(digests, self._find(digests), strict=True))
        for chain, base in bases.items():
            place = places[base]
            if place is None:
                chain.failure = Failure(Reason.NOWHERE, f"of its base {base.hex()}")
            else:
                chain.next = (place, base)
        return [chain for chain in bases if chain.failure is None]

    # --- where a chain failed ---

    def _resolve_at(
        self, digest: Digest, place: Place, known: dict[Digest, bytes | None]
    ) -> bytes | None:
        """Return a chunk, read at one place, every link of its chain verified; None if it is not.

        Its chain may come back to the chunk itself, if two recoders crossed: then it goes on from
        another place of that.
        """
        link = _Chain(place, [], (place, digest))
        self._read_links([link])
        if link.failure is not None:
            return None
        raw = self._applied(link.deltas[0], known) if link.deltas else bytes(link.raw)
        is_whole = raw is not None and len(raw) == place.raw_size and digest_of(raw) == digest
        return raw if is_whole else None

    def _resolve(self, digest: Digest, known: dict[Digest, bytes | None]) -> bytes | None:
        """Return a chunk, read at any of its places.

        Args:
            digest: Its digest.
            known: What was looked for before, None what was nowhere. It also ends a circle.
        """
        if digest in known or len(known) > 2 * MOST_LINKS:
            return known.get(digest)
        known[digest] = None
        for place in sorted(self._find_all(digest), key=lambda p: p.codec == Codec.DELTA):
            known[digest] = self._resolve_at(digest, place, known)
            if known[digest] is not None:
                break
        return known[digest]

    def _applied(self, stored_form: bytes, known: dict[Digest, bytes | None]) -> bytes | None:
        try:
            base = self._resolve(base_of(stored_form), known)
            if base is None:
                return None
            raw = bytearray(base)
            apply_delta(memoryview(stored_form), raw)
        except DamagedError:
            return None
        return bytes(raw)
