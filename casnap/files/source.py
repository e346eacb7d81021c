"""The source of an import: its content as leaves of a take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from casnap.errors import FileFormatError
from casnap.format.entries import ContainerEntry, TensorEntry, payload_of
from casnap.state.tensors import Leaf

MODEL = "model"
"""The key that a state without keys of its own gets."""


@dataclass
class SourceFiles:
    """What was found in files.

    Attributes:
        format: The format.
        files: How many files hold it.
        leaves: The leaves, by key.
        metadata: What the files say beside.
    """

    format: str
    files: int
    leaves: dict[str, list[Leaf]]
    metadata: dict[str, Any] = field(default_factory=dict)

    def count(self) -> tuple[int, int, int]:
        """Return the number of tensors, of other values, and the bytes of all leaves."""
        entries = [leaf.entry for leaves in self.leaves.values() for leaf in leaves]
        tensors = sum(isinstance(entry, TensorEntry) for entry in entries)
        containers = sum(isinstance(entry, ContainerEntry) for entry in entries)
        nbytes = sum(payload_of(entry).nbytes for entry in entries)
        return tensors, len(entries) - tensors - containers, nbytes


def below(folder: Path, name: str, what: str, *, links: bool = False) -> Path:
    """Return a file that another file of the folder names.

    Args:
        folder: The folder.
        name: The name of the file.
        what: What names it, for messages.
        links: Whether it may be a symbolic link that leads out of the folder.

    Raises:
        FileFormatError: The name leads out of the folder, or there is no such file.
    """
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise FileFormatError(f"{what} names {name!r:.200}, which is not below its folder")
    file = folder / name
    try:
        is_there = file.is_file()
    except OSError:  # such as a name that is too long
        is_there = False
    if not is_there:
        raise FileFormatError(f"{what} names {name!r:.200}, which is missing")
    if not links and folder.resolve() not in (real := file.resolve()).parents:
        raise FileFormatError(
            f"{file} leads out of the folder, to {real}; if that belongs to the checkpoint, copy "
            "the folder by cp -rL, and import the copy"
        )
    return file
