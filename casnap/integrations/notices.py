"""Files beside a snapshot, for programs that look for those of another library.

A notice stands where a library's own file would be. Who unpickles it gets an error that begins with
casnap: it has torch look up a layout by the text of the notice. torch's safe unpickler may call
that function too, so the error is not one of the unpickler, which torch would put advice before. So
a notice never passes for what it stands for. Notices are removed with the marker of their snapshot
(backends/local/backend.py).
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from casnap import Snapshot
from casnap.errors import PLACE_ERRORS
from casnap.extending import ForeignCheckpoints, is_taken, sync_folder

_log = logging.getLogger("casnap")
_CALL = ForeignCheckpoints.NOTICE_HEAD + b"ctorch.serialization\n_get_layout\nX%b%b\x85R."
"""A pickle of protocol 2 that calls a function with one text; that raises ``KeyError(text)``."""


def notice(subject: str) -> bytes:
    """Return the content of a file whose unpickling fails, with an error that names casnap.

    Args:
        subject: The message: what the snapshot has, and how to read it.
    """
    text = f"casnap: {subject}".encode()
    return _CALL % (len(text).to_bytes(4, "little"), text)


def put_notices(snapshot: Snapshot, subject: str, *names: str) -> None:
    """Put notices beside the marker of a snapshot; do not replace other files.

    An error is only logged as a warning, since the snapshot is committed.

    Args:
        snapshot: The snapshot.
        subject: The message, as for :func:`notice`.
        names: The names of the files.
    """
    repository = snapshot.contents.store
    if repository.backend.folder is None or not repository.marks:
        return
    for path in (Path(snapshot.path, name) for name in names):
        try:
            if not is_taken(path) or is_notice(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                put_whole(path, notice(subject))
        except (OSError, *PLACE_ERRORS) as e:
            _log.warning("%s is committed, but %s cannot be written: %s", snapshot.path, path, e)


def is_notice(path: Path) -> bool:
    """Whether a file is a notice, and not the file that its name suggests.

    Raises:
        PlaceError: The file cannot be read.
    """
    return ForeignCheckpoints.is_notice(path)


def put_whole(path: Path, content: bytes | Path) -> None:
    """Put a file that appears whole under its name, or not at all.

    Args:
        path: The path of the file, which replaces a file there.
        content: The bytes, or a file to copy.
    """
    # The temporary name has a suffix that no library reads.
    partial = path.with_name(f".{path.name}.{os.urandom(6).hex()}.partial")
    try:
        with partial.open("xb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(os.path.realpath(path.parent))
