"""The report of a restore: what it left out, and how many bytes it did not have to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

NewRanks: TypeAlias = Literal["keep", "error"]
"""What happens if a new rank, which the take did not have, lacks values in the snapshot.

The take has stored these values for single ranks only. The new rank keeps its own values
(``"keep"``), or the restore fails (``"error"``).
"""


@dataclass
class RestoreReport:
    """The parts of the state and of the snapshot that a restore left alone.

    Attributes:
        missing: Paths of the state that the snapshot lacks.
        unexpected: Paths of the snapshot that the state lacks.
        mismatched: Paths whose shapes, sizes or kinds differ, in words. If a moment of an optimizer
            is among them, all of the state of its parameter was left out.
        left_behind: Keys of ranks that the take had and this world lacks, as ``rank/key``. Not an
            error.
        new_ranks: A sentence for each key, such as the random state, of which the take stored a
            part for single ranks alone. Ranks that the take did not have keep their own values. The
            sentences are the same on all ranks.
        environment: How the environment differs from that of the take, in words such as ``torch
            2.13.0 → 2.14.1`` and ``8 → 6 ranks``; see :attr:`casnap.Snapshot.environment`. Not an
            error. Ranks may differ in this; only rank 0 looks for the git commit.
        kept_bytes: With ``reuse=True``, how many bytes this rank did not read, since its tensors
            held them. A tied tensor counts under each of its names.
        disk_bytes: How many bytes this process read from disks during the restore; the page cache
            had the others. None if the system does not report it.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    new_ranks: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    disk_bytes: int | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        """Whether something is missing, unexpected or mismatched."""
        return bool(self.missing or self.unexpected or self.mismatched)


def mismatch_message(report: RestoreReport, snapshot: str, advice: Iterable[str]) -> str:
    """Return the message of an error that lists everything that does not fit.

    Args:
        report: The parts that do not fit.
        snapshot: The name of the snapshot.
        advice: Advice, in sentences.
    """
    lines = [f"{snapshot} does not fit the state; nothing was restored"]
    for label, paths in (
        ("missing in the snapshot", report.missing),
        ("unexpected in the snapshot", report.unexpected),
        ("of another shape, size or kind", report.mismatched),
        ("not stored for new ranks", report.new_ranks),
    ):
        lines += [f"  {label} ({len(paths)}):"] + [f"    {p}" for p in paths] if paths else []
    return "\n".join((*lines, *advice))
