"""Sending chunks in their smallest form: as deltas of what the destination has, or in planes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.digest import Digest
from casnap.runtime.batches import batches
from casnap.runtime.fork import cached_property
from casnap.runtime.threads import cores, mapped, works_in_background
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.cell_pairs import cell_pairs, snapshot_before
from casnap.storage.snapshots.contents import Contents
from casnap.storage.snapshots.table import snapshots_in
from casnap.storage.writing.chunk_forms import ChunkForms, Form
from casnap.storage.writing.copying import ChunkBuffer
from casnap.storage.writing.session import Session
from casnap.transfer.copy_jobs import CopyJob

# No chunk counts as less.
_LEAST = 1 << 20
# More threads would wait for Python's lock; and for large chunks they would need much memory.
_MOST_THREADS, _MOST_BYTES = 8, 128 << 20

Report = Callable[[Digest, int], None]
"""Called with the digest and the raw length of what was sent."""


class DeltaSender:
    """Sends the chunks of one snapshot.

    The candidates for bases are the chunks of the same cells in the snapshot before it. Those that
    the destination has are used.

    Args:
        source: The store to read from.
        destination: The store to write to.
        job: The snapshot.
    """

    def __init__(self, source: Repository, destination: Repository, job: CopyJob) -> None:
        self._source = source
        self._job = job
        self._group_bytes = source.backend.costs.delta_bytes
        self._buffers: list[ChunkBuffer] = []
        self._forms = ChunkForms(destination.index)

    @cached_property
    def _bases(self) -> dict[Digest, Digest]:
        """The candidate of each chunk that has one."""
        contents = Contents(self._source, self._job.name, self._job.row)
        try:
            table = self._source.table(self._source.recent())
            before = snapshot_before(contents, snapshots_in(table))
            pairs = () if before is None else cell_pairs(contents, before)
            return {pair.digest: pair.base for pair in pairs if pair.base is not None}
        except DamagedError:
            # The one before may have been collected meanwhile. If this one is damaged, that shows.
            return {}

    def send(self, session: Session, sizes: Mapping[Digest, int], report: Report) -> None:
        """Write some chunks into the new packs of a session.

        Args:
            session: The session.
            sizes: The raw length of each chunk.
            report: Called after each, from any thread.

        Raises:
            DamagedError: Some are nowhere whole in the source.
            PlaceError: Some cannot be read, and may be whole.
        """
        bases = self._usable_bases(session, sizes)
        groups = batches(sizes, lambda digest: max(sizes[digest], _LEAST), self._group_bytes)
        send = partial(self._send_some, session, bases, report)
        # A copy in the background leaves most cores to the training that it runs beside.
        threads = max(1, cores() // 4) if works_in_background() else cores()
        few = max(1, _MOST_BYTES // max(_LEAST, *sizes.values()))
        for _ in mapped(send, groups, min(threads, few, _MOST_THREADS)):
            continue

    def _send_some(
        self,
        session: Session,
        bases: Mapping[Digest, Digest],
        report: Report,
        digests: list[Digest],
    ) -> None:
        buffer = self._buffers.pop() if self._buffers else ChunkBuffer(2 * self._group_bytes)
        raws = self._read(buffer, digests, {bases[d] for d in digests if d in bases})
        for digest in digests:
            raw, base = raws[digest], bases.get(digest)
            base_raw = None if base is None else raws.get(base)
            form = self._forms.choose(session.base, digest, raw, base, base_raw)
            self._forms.write(
                session.new_packs, digest, len(raw), form or Form(raw, Codec.RAW, None)
            )
            report(digest, len(raw))
        buffer.clear()
        self._buffers.append(buffer)

    def _usable_bases(self, session: Session, digests: Iterable[Digest]) -> dict[Digest, Digest]:
        """Return the candidates that the destination has, which it then keeps."""
        bases = {d: base for d in digests if (base := self._bases.get(d)) is not None}
        candidates = list(dict.fromkeys(bases.values()))
        places = session.rely_on(candidates) if candidates else []
        usable = {base for base, place in zip(candidates, places, strict=True) if place is not None}
        return {digest: base for digest, base in bases.items() if base in usable}

    def _read(
        self, buffer: ChunkBuffer, digests: list[Digest], bases: set[Digest]
    ) -> dict[Digest, memoryview]:
        """Return some chunks, and the candidates for their bases that are whole in the source."""
        try:
            return buffer.read(self._source, dict.fromkeys([*digests, *bases]))
        except (DamagedError, UnsupportedFormatError):
            buffer.clear()
        raws = buffer.read(self._source, digests)
        for base in bases - raws.keys():
            with suppress(DamagedError, UnsupportedFormatError):
                raws |= buffer.read(self._source, [base])
        return raws
