"""Count the chunks and bytes of a copy, for its report and its progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from casnap.format.digest import Digest
from casnap.format.records import Place
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.transfer.copy_jobs import CopyReport


class Tally:
    """Counts what a copy has sent, and what the destination had already.

    Args:
        progress: Called with "copying", the bytes that were sent or found present, and the total.

    Attributes:
        report: The report so far.
        bytes: Counts the bytes that were sent or found present.
        would_send: In a dry run, the digests that would be sent for the snapshots so far.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.bytes = ProgressCounter(progress, "copying")
        self.report = CopyReport()
        self.would_send: set[Digest] = set()

    @contextmanager
    def dealing_with(self, nbytes: int) -> Iterator[None]:
        """Count all ``nbytes`` of a snapshot as done once the ``with`` block has copied it.

        The block itself counts only the chunks that it looks at. It may skip whole subtrees.
        """
        before = self.bytes.done
        yield
        self.bytes.add(before + nbytes - self.bytes.done)

    def count_present(self, place: Place) -> None:
        """Count a chunk or node that the destination has already."""
        self.report.present_chunks += 1
        self.report.present_bytes += place.stored_size

    def count_sent(self, chunks: int, nbytes: int) -> None:
        """Count chunks and nodes that were sent."""
        self.report.sent_chunks += chunks
        self.report.sent_bytes += nbytes
