"""Copy chunks in their smallest form: as deltas of chunks at the destination, or in planes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.digest import Digest
from casnap.format.records import Place
from casnap.runtime.batches import batches
from casnap.runtime.threads import cores, mapped, works_in_background
from casnap.storage import ChunkBuffer, Repository, Session

Report = Callable[[Digest, int], None]
# In the estimate of memory, a chunk counts as at least this many bytes.
_LEAST = 1 << 20
# More threads would wait for Python's lock, and would need too much memory for large chunks.
_MOST_THREADS, _MOST_BYTES = 8, 128 << 20


class DeltaCopier:
    """Copies chunks of one store into another one, as deltas where that is smaller.

    Args:
        source: The store to read from.
        session: The session of the store to write to.
        candidates: A chunk of the source → a chunk that it may resemble. If the destination has the
            candidate, the candidate becomes the base of a delta, and the session relies on it.
    """

    def __init__(
        self, source: Repository, session: Session, candidates: Mapping[Digest, Digest]
    ) -> None:
        self._source = source
        self._session = session
        self._candidates = candidates
        self._group_bytes = source.backend.costs.delta_bytes
        self._buffers: list[ChunkBuffer] = []

    def copy(self, places: Mapping[Digest, Place | None], report: Report) -> None:
        """Copy some chunks.

        Args:
            places: The chunks, each with its place in the source if that is known.
            report: Called with the digest and the raw length of each; any thread may call it.

        Raises:
            DamagedError: The source has no whole place of some chunk.
            PlaceError: Some chunk cannot be read now, though it may be whole.
        """
        sizes = {d: 0 if place is None else place.raw_size for d, place in places.items()}
        bases = self._usable_bases(sizes)
        groups = batches(sizes, lambda digest: max(sizes[digest], _LEAST), self._group_bytes)
        # A copy in the background leaves most cores to the training that it runs beside.
        threads = max(1, cores() // 4) if works_in_background() else cores()
        few = max(1, _MOST_BYTES // max(_LEAST, *sizes.values()))
        copy = partial(self._copy_some, bases, report)
        for _ in mapped(copy, groups, min(threads, few, _MOST_THREADS)):
            continue

    def _copy_some(
        self, bases: Mapping[Digest, Digest], report: Report, digests: list[Digest]
    ) -> None:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = ChunkBuffer(2 * self._group_bytes)
        raws = self._read(buffer, digests, {bases[d] for d in digests if d in bases})
        self._session.put_small(digests, raws, bases)
        for digest in digests:
            report(digest, len(raws[digest]))
        buffer.clear()
        self._buffers.append(buffer)

    def _usable_bases(self, digests: Iterable[Digest]) -> dict[Digest, Digest]:
        """Return, by chunk, the base that the destination has; the session relies on the bases."""
        bases = {d: base for d in digests if (base := self._candidates.get(d)) is not None}
        candidates = list(dict.fromkeys(bases.values()))
        places = self._session.rely_on(candidates) if candidates else []
        usable = {base for base, place in zip(candidates, places, strict=True) if place is not None}
        return {digest: base for digest, base in bases.items() if base in usable}

    def _read(
        self, buffer: ChunkBuffer, digests: list[Digest], bases: set[Digest]
    ) -> dict[Digest, memoryview]:
        """Read chunks and bases from the source; return their bytes by digest.

        Args:
            buffer: The memory to read into.
            digests: The chunks.
            bases: The bases. Those that the source lacks are left out.
        """
        try:
            return buffer.read(self._source, dict.fromkeys([*digests, *bases]))
        except (DamagedError, UnsupportedFormatError):
            buffer.clear()
        raws = buffer.read(self._source, digests)
        for base in bases - raws.keys():
            with suppress(DamagedError, UnsupportedFormatError):
                raws |= buffer.read(self._source, [base])
        return raws
