"""The report of a comparison: what differs between two snapshots, or from a live state."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Literal

from casnap.format.entries import ContainerEntry, Entry, TensorEntry, ValueEntry, type_text
from casnap.format.plain_values import PLAIN_CODECS
from casnap.runtime.sizes import size
from casnap.state.roles import ROLES, Role, role_of

Kind = Literal["added", "removed", "changed"]
SIGNS: dict[Kind, str] = {"changed": "~", "added": "+", "removed": "-"}
"""The sign of each kind of change in reports."""
# How many changes of a role a report in words names, and how long a value in it may be.
_MOST_NAMED, _MOST_LETTERS = 8, 40
_DECODERS = {codec.kind: codec.decode for codec in PLAIN_CODECS}
# Tensors of one element, such as the counts of steps in optimizers.
_LETTERS = {"float32": "f", "float64": "d", "int64": "q", "int32": "i", "bool": "?"}
_FORMATS = {dtype: struct.Struct(f"<{letter}") for dtype, letter in _LETTERS.items()}


@dataclass(frozen=True)
class Elements:
    """How the elements of one tensor differ; a number counts as a tensor of one element.

    Attributes:
        differing: How many elements differ, in any bit.
        total: How many elements there are; of a live sharded tensor, how many this rank holds.
        largest: The largest absolute difference. It is 0.0 if only signs of zeros or NaNs differ,
            or if the elements are not numbers.
        largest_relative: The largest difference, relative to the larger one of the two numbers.
        nan: How many of the differing elements are NaN on either side.
    """

    differing: int
    total: int
    largest: float = 0.0
    largest_relative: float = 0.0
    nan: int = 0

    def __str__(self) -> str:
        """Return the numbers of the attributes in words."""
        words = f"{self.differing:,} of {self.total:,} differ, by up to {self.largest:.3g}"
        if self.largest:
            words += f", relative {self.largest_relative:.2g}"
        return f"{words}; {self.nan:,} NaN" if self.nan else words


@dataclass(frozen=True)
class Change:
    """One entry that two snapshots, or a snapshot and a live state, do not share.

    Attributes:
        path: ``<key>/<path>`` of a global entry, ``<rank>/<key>/<path>`` of one that a rank keeps
            for itself. In a comparison with a live state it begins with no rank.
        kind: Whether the entry was added, removed or changed.
        old: The entry of the first snapshot; None if it was added.
        new: The entry of the second one, or of the live state; None if it was removed.
        changed_bytes: Bytes in those chunks of the new entry that differ from the old chunk at the
            same position; of a live tensor, bytes of the elements that differ. All bytes if the
            entry was added, none if it was removed.
        total_bytes: All bytes of the new entry, or of the old one if it was removed.
        elements: How the elements differ, if that was asked for, and both entries are tensors of
            one shape and dtype, or numbers.
    """

    path: str
    kind: Kind
    old: Entry | None
    new: Entry | None
    changed_bytes: int
    total_bytes: int
    elements: Elements | None = None

    @property
    def role(self) -> Role:
        """The purpose of the entry in a training, such as ``weights``; guessed from its path."""
        entry = self.old if self.new is None else self.new
        assert entry is not None
        return role_of(self.path, entry)

    @property
    def types(self) -> str:
        """The type of the entry in words; both types if the old entry has another type."""
        texts = (None if e is None else type_text(e) for e in (self.old, self.new))
        return " → ".join(dict.fromkeys(text for text in texts if text is not None))

    @property
    def difference(self) -> str:
        """How the two entries differ, in words: values, elements or keys; empty if unknown."""
        values = _short_value(self.old), _short_value(self.new)
        if None not in values:
            return " → ".join(map(str, values))
        if self.elements is not None:
            return str(self.elements)
        if self.kind == "changed" and isinstance(self.new, ContainerEntry):
            return "other keys, or in another order"
        return ""


def _short_value(entry: Entry | None) -> str | None:
    """Return the value in an entry as Python prints it, if it is short; else None."""
    if isinstance(entry, ValueEntry):
        decode = _DECODERS.get(entry.kind)
    elif isinstance(entry, TensorEntry) and not entry.shape and entry.dtype in _FORMATS:
        decode = _FORMATS[entry.dtype].unpack
    else:
        return None
    if decode is None or len(entry.payload.inline) != entry.payload.nbytes:
        return None
    try:
        value = decode(entry.payload.inline)
        text = repr(value if isinstance(entry, ValueEntry) else value[0])  # type: ignore[index]
    except (ValueError, ArithmeticError, struct.error):
        return None
    return text if len(text) <= _MOST_LETTERS else None


@dataclass(frozen=True)
class Diff:
    """The entries that differ between two snapshots, or between a snapshot and a live state.

    Attributes:
        changes: Every entry that differs, in the order of the paths.
        left_out: In words, what could not be compared with a live state: keys that the app state
            lacks, and keys of which the snapshot keeps entries for other ranks alone.
    """

    changes: list[Change]
    left_out: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    @property
    def changed_bytes(self) -> int:
        """How many bytes of the second side differ from the first side at the same position."""
        return sum(change.changed_bytes for change in self.changes)

    def of(self, kind: Kind) -> list[Change]:
        """Return the changes of one kind."""
        return [change for change in self.changes if change.kind == kind]

    def by_role(self) -> dict[Role, list[Change]]:
        """Group the changes by what their entries are for in a training.

        A container is left out if elements were added to it or removed from it, since these are
        listed themselves. A role that can cause changes in other roles, such as generators, comes
        before these.
        """
        parents = {c.path.rpartition("/")[0] for c in self.changes if c.kind != "changed"}
        found: dict[Role, list[Change]] = {role: [] for role in ROLES}
        for change in self.changes:
            if not (isinstance(change.new, ContainerEntry) and change.path in parents):
                found[change.role].append(change)
        return {role: changes for role, changes in found.items() if changes}

    def summary(self) -> str:
        """Return one line that says how many entries and bytes differ."""
        kinds: tuple[Kind, ...] = ("changed", "added", "removed")
        counts = ", ".join(f"{len(self.of(kind)):,} {kind}" for kind in kinds)
        return f"{counts}; {size(self.changed_bytes)} differ"

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.changes)

    def __repr__(self) -> str:
        """Return the counts. The changes themselves would fill many screens of a notebook."""
        return f"<Diff: {self.summary() if self.changes else 'no difference'}>"

    def __str__(self) -> str:
        """Return the report in several lines, grouped by role."""
        lines = [self.summary() if self.changes else "no difference"]
        for role, changes in self.by_role().items():
            lines.append(f"{role}:")
            for change in changes[:_MOST_NAMED]:
                parts = (SIGNS[change.kind], change.path, change.types, change.difference)
                lines.append("  " + "  ".join(filter(None, parts)))
            if more := len(changes) - _MOST_NAMED:
                lines += [f"  … {more:,} more"] if more > 0 else []
        return "\n".join([*lines, *(f"not compared: {what}" for what in self.left_out)])
