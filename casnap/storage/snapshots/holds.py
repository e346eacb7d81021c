"""Holds: why a snapshot must stay, whatever a rule says.

Pruning, thinning, and forgetting what has no folder any more ask for the holds of a row. Deleting a
snapshot by its name asks for none, and overwriting it only for its tags.
"""

from __future__ import annotations

from casnap.format.records import Row

UNMIRRORED = "unmirrored"
"""The note of a snapshot that must stay until another store has a copy of it."""

# Notes that hold a snapshot, and what people read of each. Every process must know them, also one
# that never writes them.
_NOTES = {UNMIRRORED: "not mirrored yet"}


def holds_of(row: Row) -> list[str]:
    """Return why a snapshot must stay, such as "tagged"; empty if nothing holds it."""
    return [*(["tagged"] if row.tags else []), *awaited_of(row)]


def awaited_of(row: Row) -> list[str]:
    """Return the holds that end by themselves: what a snapshot waits for."""
    return [reason for note, reason in _NOTES.items() if row.has_note(note)]
