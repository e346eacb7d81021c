"""Importing files as a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from casnap.files.report import ImportReport
from casnap.files.source import Source, read_source
from casnap.take.capturable import Capturable, GivenLeaves

Take = Callable[[Capturable, "dict[str, Any]"], int]
"""Takes a snapshot of some leaves with some metadata; returns the new bytes."""


def import_files(
    path: Path,
    name: str,
    take: Take | None,
    *,
    key: str | None,
    rank: int | None,
    metadata: dict[str, Any],
) -> ImportReport:
    """Take a snapshot of what files hold.

    Args:
        path: A file or a folder.
        name: The snapshot's name, for the report.
        take: Takes it; None to only look.
        key: The key to import it under, or None for keys of its own.
        rank: Whose view of a TorchSnapshot folder to import.
        metadata: Goes into the snapshot's metadata, before what the files say.

    Raises:
        FileFormatError: The files are malformed, or in no known format.
        CasnapError: The take failed; nothing was committed.
    """
    started = time.monotonic()
    source: Source = read_source(path, key, rank)
    tensors, values, nbytes = source.count()
    kept = {**source.metadata, **metadata}
    report = ImportReport(
        take is None,
        name,
        source.format,
        source.files,
        list(source.leaves),
        tensors,
        values,
        nbytes,
        metadata=kept,
    )
    if take is not None:
        report.new_bytes = take(GivenLeaves(source.leaves), kept)
    report.seconds = time.monotonic() - started
    return report
