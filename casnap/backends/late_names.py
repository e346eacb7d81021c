"""Names as clients of network file systems show them: one place looks again for what must be there.

A client of a network file system keeps names for a while, and that a name is absent. So what
another host has put may be absent here at first. It then has to be looked for anew, and waited for.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from casnap.backends.local.safe_paths import folder_at

_log = logging.getLogger("casnap")
# The pauses between looks grow from the first to the longest, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
# After so many seconds a line says what is waited for.
_TOLD_AFTER = 3.0
# How the clients of FUSE and NFS call a file that was deleted while it is open.
_LEFT_OPEN = (".fuse_hidden", ".nfs")


def is_left_open(name: str) -> bool:
    """Whether a file is what a client has kept of one that was deleted while it was open.

    It is nobody's. The client deletes it once no process has it open.
    """
    return name.startswith(_LEFT_OPEN)


def wait_for(what: str, look: Callable[[], bool], still: Callable[[], object], lag: float) -> bool:
    """Look again until something is there; return whether it is.

    Args:
        what: What is looked for, for messages.
        look: Whether it is there.
        still: Whether it must still be there. Asked before each pause.
        lag: For how many seconds this host may not see it.
    """
    begun, pause, is_told = time.monotonic(), 0.0, False
    while not look():
        waited = time.monotonic() - begun
        if waited >= lag or not still():
            return False
        if waited >= _TOLD_AFTER and not is_told:
            is_told = True
            _log.warning(
                "waiting for %s, which must be there: another host has put it, and this one may "
                "see it up to %.0f seconds later",
                what,
                lag,
            )
        time.sleep(pause)
        pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)
    return True


def is_listed_anew(path: str) -> bool:
    """Whether a name that a client takes for absent is listed; then have the client ask for it.

    The folder is opened anew for that: a client then asks the server whether it has changed.

    Args:
        path: The name, and its folder. That may seem to be absent too.
    """
    parent, _, name = path.rpartition("/")
    try:
        with folder_at(parent or "/", listed=True) as folder:
            if name not in os.listdir(folder):  # noqa: PTH208 - of an open folder
                return False
            # A client that is to give a file a new name asks the server for that name, whatever it
            # has kept. This never makes one: a folder has no second name.
            with suppress(OSError):
                os.link(".", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            return True
    except FileNotFoundError:
        return is_listed_anew(parent) and is_listed_anew(path)
