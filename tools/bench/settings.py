"""What a run of the benchmark is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """One run: sizes, repetitions, the working folder, and the fastest raw disk access found.

    Attributes:
        folder: Working folder on the disk that is measured; everything below it is deleted.
        gib: Size of the two workloads, in GiB.
        repeat: Interleaved repetitions of every contender.
        quick: Smaller sizes everywhere, and no slow extra.
        with_peers: Whether other libraries are measured on the object store, too.
        write_form: The faster form of raw writing, ``files`` (of 48 MiB) or ``big`` (one file).
        write_threads: The faster number of threads for raw writing.
        read_threads: The faster number of threads for raw reading.
    """

    folder: str
    gib: float = 2.0
    repeat: int = 5
    quick: bool = False
    with_peers: bool = True
    write_form: str = "files"
    write_threads: int = 1
    read_threads: int = 1

    @property
    def nbytes(self) -> int:
        """Size of a workload in bytes."""
        return int(self.gib * GIB)

    def path(self, *parts: str) -> Path:
        """Return a path below the working folder; its parent exists."""
        path = Path(self.folder, *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values, for a fresh process."""
        return asdict(self)
