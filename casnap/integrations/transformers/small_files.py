"""Put the small files of a checkpoint, such as its config, into its folder and its snapshot.

The Trainer looks for them in the folder. A resume puts back what the folder lacks.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from casnap import Snapshot
from casnap.errors import CasnapError, StorageFullError
from casnap.extending import (
    Markers,
    is_file,
    is_file_name,
    is_folder,
    is_taken,
    paths_in,
    put_whole,
)
from casnap.integrations.transformers.weights import STAGED, is_weights

_log = logging.getLogger("casnap")
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""A file that the Trainer puts into the folder while it saves after a SIGTERM."""

_LITTLE_ROOM = 64 << 10
"""A disk with fewer free bytes counts as full once a write has failed."""


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Make a temporary folder in a checkpoint's folder for a ``with`` block; delete it at the end.

    Files are written there before they are moved to the checkpoint's folder. First, temporary
    folders that killed saves have left in any checkpoint of the run are deleted.

    Args:
        folder: The folder of the checkpoint.
    """
    for left in (path / STAGED for path in paths_in(folder.parent) if is_folder(path / STAGED)):
        info = left.parent.stat()
        _delete(left)
        # By this time, trainers sort checkpoints.
        os.utime(left.parent, ns=(info.st_atime_ns, info.st_mtime_ns))
    staged = folder / STAGED
    with naming_full_disk(folder):
        staged.mkdir(parents=True, exist_ok=True)
    try:
        yield staged
    finally:
        _delete(staged)


def _delete(staged: Path) -> None:
    try:
        shutil.rmtree(staged)
    except OSError as e:
        _log.warning("%s is left, and may be deleted: %s", staged, e)


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Within this ``with`` block, an error of a full disk says what to do.

    Args:
        folder: The folder of the checkpoint.

    Raises:
        StorageFullError: A file could not be written, since the disk is full.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, CasnapError) or not _is_of_full_disk(e, folder):
            raise
        raise StorageFullError(
            f"no space left to write the small files of {folder}, such as its config; this "
            "checkpoint is not saved, and earlier ones are whole. Free some space, then resume "
            "from the last one"
        ) from e


def _is_of_full_disk(error: Exception, folder: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors raises an error of its own, and torch one that does not say the reason.
    is_full = is_folder(folder) and shutil.disk_usage(folder).free < _LITTLE_ROOM
    return is_full or os.strerror(errno.ENOSPC) in str(error)


def put_small_files(staged: Path, folder: Path) -> dict[str, bytes]:
    """Move all staged files but weights into a checkpoint's folder; return its small files.

    Files of the same names are overwritten.

    Args:
        staged: The temporary folder of :func:`staging`, into which the Trainer has written them.
        folder: The folder of the checkpoint.
    """
    for path in sorted(staged.rglob("*")):
        if is_file(path) and not is_weights(path.name):
            target = folder / path.relative_to(staged)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    files = (path for path in paths_in(folder) if is_file(path))
    return {p.name: p.read_bytes() for p in files if p.name not in (Markers.FILE, _UNFINISHED)}


def put_back(snapshot: Snapshot, folder: Path) -> None:
    """Put the small files of a snapshot where the Trainer looks for them, if they are missing.

    They are missing if the snapshot was copied from another store. A file that differs stays, since
    a user may have edited it. But if a save that should have replaced the snapshot was cut off, the
    snapshot's files replace those of that save.
    """
    files: Mapping[str, bytes] = snapshot.read_object("0/files")
    commit = Markers(snapshot.contents.store).commit_in(snapshot.contents.name)
    stays = commit == snapshot.row.commit
    differing: list[str] = []
    # Who can write to the store chooses the names.
    bad = sorted(name for name in files if not is_file_name(name) or name == Markers.FILE)
    for name in files.keys() - bad:
        path, data = folder / name, files[name]
        if is_weights(name) or (is_file(path) and path.read_bytes() == data):
            continue
        if is_there := is_taken(path):
            differing.append(path.name)
        if not (is_there and stays):
            # Made only if a file is missing: this user may have no right to write there.
            folder.mkdir(parents=True, exist_ok=True)
            with naming_full_disk(folder):
                put_whole(path, data)
    if bad:
        text = "%s: files of the snapshot are left out, for their names (%.500s)"
        _log.warning(text, folder, ", ".join(map(repr, bad)))
    if differing and stays:
        _log.warning(
            "%s: files that are not as they were saved are used as they are (%s); to have those of "
            "the snapshot, remove them before the run resumes",
            folder,
            ", ".join(sorted(differing)),
        )
    elif differing:
        text = "%s: files of a save that was cut off are replaced by those of the snapshot (%s)"
        _log.warning(text, folder, ", ".join(sorted(differing)))
