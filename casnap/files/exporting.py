"""Export a snapshot, or a part of it, to a file of another format."""

from __future__ import annotations

import os
import time
from pathlib import Path

from casnap.backends.local_files import NO_SPACE
from casnap.errors import CasnapError, StorageFullError
from casnap.files.export_output import ExportOutput, check_place
from casnap.files.export_selection import part_of
from casnap.files.file_reports import ExportOptions, ExportReport
from casnap.files.tensor_writer import TensorWriter
from casnap.format.names import key_of
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.storage import Contents


def export(
    contents: Contents, out: Path, options: ExportOptions, progress: Progress | None
) -> ExportReport:
    """Write a snapshot, or the part at ``options.path``, to a file or to a folder of files.

    Args:
        contents: The snapshot.
        out: The path to write to.
        options: The options of the export.
        progress: Called with the phase, the bytes done, and the total.

    Raises:
        FileFormatError: The format cannot hold the part; or ``out`` exists, is a URI or lies inside
            of a store.
        EntryNotFoundError: There is no such path, or several ranks have entries of their own there.
        DamagedError: Stored bytes are missing or damaged.
        StorageFullError: The disk is full; nothing of the export is left.
        OSError: The files cannot be written for another reason.
    """
    start = time.monotonic()
    check_place(out)
    if options.format == "safetensors":
        from casnap.files.to_safetensors import plan_safetensors as plan
    elif options.format == "torch":
        from casnap.files.to_torch import plan_torch as plan
    else:
        from casnap.files.to_dcp import plan_dcp as plan
    part = part_of(contents, options.path, only_tensors=options.format == "safetensors")
    report, write = plan(contents, part, out.name, options)
    if options.path is None:
        report.left_out += [
            f"{rank}/{key_of(key)}"
            for rank in list(contents.ranks())[1:]
            for key in sorted(contents.manifest.ranks[str(rank)])
        ]
    if not options.dry_run:
        is_folder = options.format == "dcp" or options.max_shard_size is not None
        try:
            with ExportOutput(
                out, is_folder=is_folder, nbytes=sum(report.files.values())
            ) as output:
                counter = ProgressCounter(progress, "writing", report.nbytes)
                write(output, TensorWriter(contents, counter))
        except OSError as e:
            if isinstance(e, CasnapError):
                raise
            if e.errno in NO_SPACE:
                raise StorageFullError(
                    f"no space left to write {out}, and nothing of it is left. Free some space, "
                    "then export again"
                ) from e
            if e.filename is not None:
                raise
            # An error of a write has no file name.
            raise OSError(e.errno, os.strerror(e.errno or 0), str(out)) from e
        report.files = output.sizes
    report.seconds = time.monotonic() - start
    return report
