"""Who owns a file: which files count as this user's, and which ones another user may change."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import NamedTuple

from casnap.backends.local_files.safe_paths import create_file, unlink_at

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Owners(NamedTuple):
    """Rules at a place: which files count as this user's, and which files others may write to.

    Attributes:
        uids: The user ids: this user's and root's, and the one that this user's new files get at
            the place.
        keeps_modes: Whether the mode of a file says who may write to the file. Some file systems
            keep no modes.
    """

    uids: frozenset[int]
    keeps_modes: bool = True

    @classmethod
    def by(cls, new_file: os.stat_result | None = None) -> Owners:
        """Return the rules at a place, as a new file of this user shows them.

        Args:
            new_file: The status of a new file of this user at the place, from :func:`new_file_in`;
                None if it is not known. Some file systems give all files to one user, or keep no
                modes.
        """
        uids = {os.geteuid(), 0}
        if new_file is None:
            return cls(frozenset(uids))
        keeps_modes = not new_file.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return cls(frozenset({*uids, new_file.st_uid}), keeps_modes)

    def own(self, info: os.stat_result) -> bool:
        """Whether a file or folder counts as this user's, given its status."""
        return info.st_uid in self.uids

    def others_may_write(self, info: os.stat_result) -> bool:
        """Whether another user may write to a file or folder, given its status."""
        return self.keeps_modes and bool(info.st_mode & _OTHERS_WRITE)

    def why_not(self, info: os.stat_result) -> str | None:
        """Return why another user may have changed a file or folder; None if no other user can.

        The reason is the end of a sentence, such as "belongs to another user (uid 7)".

        Args:
            info: The status of the file or folder.
        """
        if not self.own(info):
            return f"belongs to another user (uid {info.st_uid})"
        return "may be written to by other users" if self.others_may_write(info) else None

    def close_to_others(self, folder: int) -> None:
        """Take the right to write to a folder, and to the files right in it, from all other users.

        Files of other users, and files whose mode cannot be changed, stay as they are. So a caller
        must still check each file that it relies on.

        Args:
            folder: The open folder.
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
    """Create an empty file with mode 0600, delete it, and return the status that it had.

    Args:
        folder: An open folder.
        name: A name that is free in this folder.

    Returns:
        The status; None if no file can be created.
    """
    with suppress(OSError):
        try:
            with create_file(name, folder, 0o600) as file:
                return os.fstat(file)
        finally:
            unlink_at(name, folder)
    return None
