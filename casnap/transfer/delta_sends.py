"""Sending chunks in their smallest form: as deltas of what the destination has, or in planes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from casnap.errors import DamagedError
from casnap.format.codec import Codec
from casnap.format.digest import Digest
from casnap.runtime.threads import cores, mapped, works_in_background
from casnap.storage.catalog.cell_pairs import cell_pairs, snapshot_before
from casnap.storage.catalog.contents import Contents
from casnap.storage.catalog.table import snapshots_in
from casnap.storage.chunks.chunk_forms import ChunkForms, Form
from casnap.storage.chunks.copying import ChunkBuffer
from casnap.storage.chunks.open_store import OpenStore
from casnap.storage.commits.transaction import Transaction
from casnap.transfer.copy_jobs import CopyJob

# So many chunks are held while they are encoded, and their bases too.
_AT_ONCE = 16

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

    def __init__(self, source: OpenStore, destination: OpenStore, job: CopyJob) -> None:
        self._source = source
        self._job = job
        self._buffer = ChunkBuffer(2 * _AT_ONCE << 20)
        self._forms = ChunkForms(
            lambda d: destination.index.newest_chain(destination.recent_view(), d)
        )

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

    def send(self, transaction: Transaction, digests: list[Digest], report: Report) -> None:
        """Write some chunks into the new packs of a transaction.

        Raises:
            DamagedError: Some are nowhere whole in the source.
            BackendError: Some cannot be read, and may be whole.
        """
        for at in range(0, len(digests), _AT_ONCE):
            self._send_some(transaction, digests[at : at + _AT_ONCE], report)

    def _send_some(self, transaction: Transaction, digests: list[Digest], report: Report) -> None:
        bases = self._usable_bases(transaction, digests)
        self._buffer.clear()
        raws = self._buffer.read(self._source, digests)
        raws_of_bases = self._read_if_whole(set(bases.values()) - raws.keys()) | raws

        def choose(digest: Digest) -> Form:
            raw, base = raws[digest], bases.get(digest)
            base_raw = None if base is None else raws_of_bases.get(base)
            form = self._forms.choose(digest, raw, base, base_raw)
            return form or Form(raw, Codec.RAW, None)

        # A mirror leaves the cores to the training that it runs beside.
        at_once = 1 if works_in_background() else cores()
        for digest, form in mapped(choose, digests, at_once):
            self._forms.write(transaction.new_packs, digest, len(raws[digest]), form)
            report(digest, len(raws[digest]))

    def _usable_bases(
        self, transaction: Transaction, digests: Iterable[Digest]
    ) -> dict[Digest, Digest]:
        """Return the candidates that the destination has, which it then keeps."""
        bases = {d: base for d in digests if (base := self._bases.get(d)) is not None}
        candidates = list(dict.fromkeys(bases.values()))
        places = transaction.reused.reuse(candidates) if candidates else []
        usable = {base for base, place in zip(candidates, places, strict=True) if place is not None}
        return {digest: base for digest, base in bases.items() if base in usable}

    def _read_if_whole(self, digests: Iterable[Digest]) -> dict[Digest, memoryview]:
        """Read candidates; those that are not whole in the source are not needed."""
        try:
            return self._buffer.read(self._source, digests)
        except DamagedError:
            return {}
