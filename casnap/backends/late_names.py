"""Names that this host sees late: look again for a file that another host has put.

The client of a network file system caches names for a while, and also the absence of a name. So a
file that another host has put may seem absent on this host at first. This module asks the server
again, and waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from casnap.backends.local_files.safe_paths import folder_at

_log = logging.getLogger("casnap")
# The pauses between looks grow from the first to the longest, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0
# The seconds after which a line in the log says what is waited for.
_TOLD_AFTER = 3.0
# The clients of FUSE and NFS rename a file that is deleted while it is open: its name begins so.
_LEFT_OPEN = (".fuse_hidden", ".nfs")


def is_left_open(name: str) -> bool:
    """Whether a client of a network file system has given this name to a deleted file.

    The client keeps the file while a process has it open. No other process needs the file.
    """
    return name.startswith(_LEFT_OPEN)


def wait_for(what: str, look: Callable[[], bool], still: Callable[[], object], lag: float) -> bool:
    """Call ``look`` again and again until it returns True; return whether it has returned True.

    The function gives up after ``lag`` seconds, and as soon as ``still`` returns False.

    Args:
        what: The file that is looked for, for messages.
        look: Returns whether the file is there.
        still: Returns whether the file must still be there; called before each pause.
        lag: How many seconds this host may need to see the file.
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


def is_taken_at_server(path: str, *, is_again: bool = False) -> bool:
    """Whether the server of a file system has a name, whatever the client has cached about it.

    The function tries to give a folder the name as a hard link. To do so, a client first asks the
    server whether the name is taken. The link is never made, since a folder cannot have a second
    name. Some clients, such as NFS, refuse the link without asking; then the answer is False.

    Args:
        path: The path of the name. Its folder may seem absent too.
        is_again: Whether this is a second try, after the server has said that the folder exists.
    """
    parent, _, name = path.rpartition("/")
    try:
        with folder_at(parent or "/") as folder:
            os.link(".", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return True
    except FileNotFoundError:
        # The system also gives this error where no link can be made at all, such as in /proc.
        if is_again or not parent or not is_taken_at_server(parent):
            return False
        return is_taken_at_server(path, is_again=True)
    except OSError:
        return False
    return False


def is_there_anew(path: str) -> bool:
    """Whether a name exists, according to the server or a new listing of its folder.

    The client may have cached the name as absent. When the folder is opened again, a client asks
    the server whether the folder has changed.

    Args:
        path: The path of the name. Its folder may seem absent too.
    """
    if is_taken_at_server(path):
        return True
    parent, _, name = path.rpartition("/")
    try:
        with folder_at(parent or "/", listed=True) as folder:
            return name in os.listdir(folder)  # noqa: PTH208 - of an open folder
    except FileNotFoundError:
        return False
