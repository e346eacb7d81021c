"""The report of a restore: what it left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_MOST_CHARS = 1000


@dataclass
class RestoreReport:
    """What a restore left alone.

    Attributes:
        missing: Paths of the state that the snapshot lacks, or keeps for ranks that the take had,
            while others are new. Of the latter each rank's report names all, in words.
        unexpected: Paths of the snapshot that the state lacks.
        mismatched: Paths whose shapes, sizes or kinds differ, in words.
        left_behind: Keys of ranks that this world does not have, with the ranks. Not an error.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything of the state was left alone."""
        return bool(self.missing or self.unexpected or self.mismatched)


def mismatch_message(
    report: RestoreReport, snapshot: str, keys: Iterable[str] = (), advice: str = ""
) -> str:
    """Return the message of an error that lists everything that does not fit.

    Args:
        report: What does not fit.
        snapshot: The snapshot.
        keys: Its keys, if one that it lacks was asked for.
        advice: Why it lacks one, and what to do.
    """
    lines = [f"{snapshot} does not fit the state; nothing was restored"]
    for label, paths in (
        ("missing in the snapshot", report.missing),
        ("unexpected in the snapshot", report.unexpected),
        ("of another shape, size or kind", report.mismatched),
    ):
        lines += [f"  {label} ({len(paths)}):"] + [f"    {p}" for p in paths] if paths else []
    if listed := ", ".join(keys):
        lines.append(
            f"The snapshot has the keys {listed[:_MOST_CHARS]}. rename= maps them to others."
        )
    if advice:
        lines.append(f"{advice[:1].upper()}{advice[1:]}.")
    lines.append("Pass strict=False to restore what fits.")
    return "\n".join(lines)
