"""The owner of a file: the one rule for which user it counts as, and who else may change it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import NamedTuple

from casnap.backends.local.safe_paths import create_file, unlink_at

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Owners(NamedTuple):
    """Who counts as this user at a place.

    Attributes:
        uids: The users whose files are as good as this user's: this one, and root.
        keeps_modes: Whether the modes of files say who may write to them.
    """

    uids: frozenset[int]
    keeps_modes: bool = True

    @classmethod
    def by(cls, new_file: os.stat_result | None = None) -> Owners:
        """Return who counts as this user at a place.

        Args:
            new_file: The status of a new file of this user there, from :func:`new_file_in`; None if
                it is not known. Some file systems give all files to one user, or keep no modes.
        """
        uids = {os.geteuid(), 0}
        if new_file is None:
            return cls(frozenset(uids))
        keeps_modes = not new_file.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return cls(frozenset({*uids, new_file.st_uid}), keeps_modes)

    def own(self, info: os.stat_result) -> bool:
        """Whether a file or folder is this user's."""
        return info.st_uid in self.uids

    def others_may_write(self, info: os.stat_result) -> bool:
        """Whether another user may write to a file or folder."""
        return self.keeps_modes and bool(info.st_mode & _OTHERS_WRITE)

    def why_not(self, info: os.stat_result) -> str | None:
        """Return why another user may have changed a file or folder; None if no other can."""
        if not self.own(info):
            return f"belongs to another user (uid {info.st_uid})"
        return "may be written to by other users" if self.others_may_write(info) else None

    def close_to_others(self, folder: int) -> None:
        """Take from other users the right to write to an open folder, and to the files right in it.

        Files of other users, and files that cannot be changed, stay as they are: a caller that
        relies on a file looks at it.
        """
        if not (self.keeps_modes and self.own(os.fstat(folder))):
            return
        for name in (".", *os.listdir(folder)):
            with suppress(OSError):
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                is_plain = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
                if is_plain and self.own(info) and self.others_may_write(info):
                    os.chmod(name, stat.S_IMODE(info.st_mode) & ~_OTHERS_WRITE, dir_fd=folder)


def new_file_in(folder: int, name: str) -> os.stat_result | None:
    """Make an empty file that only its owner may use, and remove it; return its status.

    Args:
        folder: An open folder.
        name: A name that is free there.

    Returns:
        The status; None if no file can be made.
    """
    with suppress(OSError):
        try:
            with create_file(name, folder, 0o600) as file:
                return os.fstat(file)
        finally:
            unlink_at(name, folder)
    return None
