"""Look at local paths; distinguish "nothing is there" from "the look has failed".

A path counts as absent only if the system says that nothing is there. If the look fails, for
example because this user may not look or the disk is broken, the functions raise an error: a
program that took the failure for "nothing" would begin its run from the start. The functions of
``os.path`` and ``pathlib`` swallow some of these errors; which ones depends on the release of
Python.
"""

from __future__ import annotations

import errno
import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

from casnap.backends.local_files.late_calls import begun
from casnap.backends.local_files.system_errors import ABSENT, casnap_error
from casnap.errors import InvalidNameError

_Path: TypeAlias = str | os.PathLike[str]


def status(path: _Path, *, follow: bool = True) -> os.stat_result | None:
    """Return the status of a path; None if nothing is there.

    Args:
        path: The path.
        follow: Whether to follow a link at the path.

    Raises:
        InvalidNameError: A name in the path is longer than the file system allows.
        PlaceError: The path cannot be looked at.
    """
    done = begun(os.fspath(path))
    try:
        return os.stat(path, follow_symlinks=follow)  # noqa: PTH116 - of any path
    except OSError as e:
        if e.errno in ABSENT:
            return None
        if e.errno == errno.ENAMETOOLONG:
            raise InvalidNameError(
                f"{str(path)!r:.500}: {e.strerror}; no file of this place can have such a name. "
                "Choose a shorter one"
            ) from e
        raise casnap_error(e, os.fspath(path)) from e
    except ValueError:
        # A NUL, or a character that the file system does not have: no file has such a name.
        return None
    finally:
        if done is not None:
            done()


def exists(path: _Path) -> bool:
    """Whether something is at a path. A link that leads nowhere counts as nothing."""
    return status(path) is not None


def is_taken(path: _Path) -> bool:
    """Whether something is at a path. A link that leads nowhere counts as something."""
    return status(path, follow=False) is not None


def is_file(path: _Path) -> bool:
    """Whether a regular file is at a path, or a link to a regular file."""
    info = status(path)
    return info is not None and stat.S_ISREG(info.st_mode)


def is_folder(path: _Path) -> bool:
    """Whether a folder is at a path, or a link to a folder."""
    info = status(path)
    return info is not None and stat.S_ISDIR(info.st_mode)


def is_link(path: _Path) -> bool:
    """Whether a link is at a path, wherever it leads."""
    info = status(path, follow=False)
    return info is not None and stat.S_ISLNK(info.st_mode)


def paths_in(folder: _Path) -> list[Path]:
    """Return the paths right below a folder, sorted; none if the folder does not exist.

    Raises:
        PlaceError: The folder cannot be listed.
    """
    try:
        return sorted(Path(folder).iterdir())
    except OSError as e:
        if e.errno in ABSENT:
            return []
        raise casnap_error(e, os.fspath(folder)) from e


def matching(folder: _Path, *patterns: str) -> list[Path]:
    """Return the paths right below a folder whose names match at least one pattern, sorted.

    Raises:
        PlaceError: The folder cannot be listed.
    """
    return [
        path
        for path in paths_in(folder)
        if any(fnmatchcase(path.name, pattern) for pattern in patterns)
    ]


def resolved(path: _Path) -> Path:
    """Return the real path of a path: links are resolved.

    The server of a network file system may not answer. The call is watched, so that a long wait is
    logged.

    Raises:
        OSError: A part of the path cannot be looked at.
        RuntimeError: The links form a loop.
        ValueError: The path has a NUL, or a character that no file name can have here.
    """
    done = begun(os.path.abspath(path))  # noqa: PTH100 - without asking a server
    try:
        return Path(path).resolve()
    finally:
        if done is not None:
            done()


def as_written(folder: Path) -> Path:
    """Return an absolute path. A link stays in the path, unless ``..`` follows it."""
    place = Path(folder.anchor) if folder.is_absolute() else Path.cwd()
    for part in folder.parts:
        place = place.resolve().parent if part == ".." else place / part
    return place
