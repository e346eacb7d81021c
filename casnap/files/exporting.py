"""Exporting a snapshot, or a part of it, to a file of another format."""

from __future__ import annotations

import os
import time
from pathlib import Path

from casnap.backends.base import NO_SPACE
from casnap.errors import CasnapError, StorageFullError
from casnap.files.chosen import part_of
from casnap.files.report import ExportOptions, ExportReport
from casnap.files.target import check_place
from casnap.runtime.progress import Progress
from casnap.storage.contents import Contents


def export(
    contents: Contents, out: Path, options: ExportOptions, progress: Progress | None
) -> ExportReport:
    """Write what is at a path of a snapshot to a file, or to a folder of files.

    Raises:
        TargetExistsError: There is something at ``out``.
        FileFormatError: The format cannot hold it, or ``out`` is a URI or inside of the store.
        EntryNotFoundError: There is no such path.
        DamagedError: Stored bytes are missing or damaged.
        StorageFullError: The disk is full; nothing is left there.
        OSError: The files cannot be written for another reason.
    """
    started = time.monotonic()
    check_place(out, contents.objects.backend)
    part = part_of(contents, options.path)
    if options.format == "safetensors":
        from casnap.files.to_safetensors import export_safetensors as write
    elif options.format == "torch":
        from casnap.files.to_torch import export_torch as write
    else:
        from casnap.files.to_dcp import export_dcp as write
    try:
        report = write(contents, part, out, options, progress)
    except OSError as e:
        if isinstance(e, CasnapError):
            raise
        if e.errno in NO_SPACE:
            raise StorageFullError(
                f"no space left to write {out}, and nothing of it is left. Free some space, then "
                "export again"
            ) from e
        if e.filename is not None:
            raise
        # A write knows no name.
        raise OSError(e.errno, os.strerror(e.errno or 0), str(out)) from e
    report.seconds = time.monotonic() - started
    return report
