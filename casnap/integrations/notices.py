"""Notices: files beside a snapshot that have the names of another library's files.

A program that loads a notice gets an error that names casnap (``format/notices.py``). Notices are
removed with the marker of their snapshot (``backends/local/backend.py``).
"""

from __future__ import annotations

import logging
from pathlib import Path

from casnap import Snapshot
from casnap.errors import PLACE_ERRORS
from casnap.extending import ForeignCheckpoints, is_taken, put_whole

_log = logging.getLogger("casnap")


def put_notices(snapshot: Snapshot, subject: str, *names: str) -> bool:
    """Put the notices that are missing beside the marker of a snapshot; replace no other file.

    An error is only logged as a warning, since the snapshot is committed.

    Args:
        snapshot: The snapshot.
        subject: The message: what the snapshot has, and how to read it.
        names: The names of the files.

    Returns:
        Whether all of these files are beside the snapshot now.
    """
    repository = snapshot.contents.store
    if repository.backend.folder is None or not repository.marks:
        return not names
    paths, content = [Path(snapshot.path, n) for n in names], ForeignCheckpoints.notice(subject)
    are_there = True
    for path in paths:
        try:
            if not is_taken(path) or (is_notice(path) and path.read_bytes() != content):
                path.parent.mkdir(parents=True, exist_ok=True)
                put_whole(path, content)
            are_there = is_notice(path) and are_there
        except (OSError, *PLACE_ERRORS) as e:
            are_there = False
            _log.warning("%s is committed, but %s cannot be written: %s", snapshot.path, path, e)
    return are_there


def is_notice(path: Path) -> bool:
    """Whether a file is a notice, and not the file that its name suggests.

    Raises:
        PlaceError: The file cannot be read.
    """
    return ForeignCheckpoints.is_notice(path)
