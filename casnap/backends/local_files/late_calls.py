"""Watch for system calls that wait for a server, and log what they wait for.

If the server of a network file system does not answer, a call may wait for hours, and no program
can end it. So one thread watches the calls of the other threads, and logs a warning about a long
one. This thread runs only while there are calls to network file systems.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from casnap.runtime.file_systems import is_shared_type, mounts
from casnap.runtime.fork import in_child, new_lock

_log = logging.getLogger("casnap")
# The seconds after which a line comes; the seconds between two looks of the thread; and the number
# of looks without any call after which the thread ends.
_TOLD_AFTER, _LOOK, _IDLE_LOOKS = 5.0, 0.5, 6
# The paths of file systems of servers: of the mounts at the first call, and of folders that were
# found on such file systems since then.
_places: tuple[str, ...] | None = None
# Mounts below these paths are the kernel's own, and no server has to answer.
_OF_KERNEL = ("/proc/", "/sys/", "/dev/")
# By thread: since when it is in a call, and the path that it waits for.
_calls: dict[int, tuple[float, str]] = {}
_lock = new_lock()
_watcher: threading.Thread | None = None


def watch_calls_to(folder: str) -> None:
    """Watch the calls to a folder too, and not only those to the mounts that are already watched.

    Args:
        folder: The real path of a folder on a network file system.
    """
    global _places
    if not folder.startswith(places := _known()):
        _places = (*places, folder)


def _known() -> tuple[str, ...]:
    """Return the paths of the network file systems that this process knows.

    The list of mounts is read only once, since reading it takes several system calls.
    """
    global _places
    if _places is None:
        _places = tuple(
            mount.folder.rstrip("/")
            for mount in mounts()
            if is_shared_type(mount.kind) and not mount.folder.startswith(_OF_KERNEL)
        )
    return _places


def begun(path: str) -> Callable[[], object] | None:
    """Note that this thread begins a call to the system about a path.

    Returns:
        A function that notes the end of the call; None if the path is not on a network file system.
    """
    if not path.startswith(_known()):
        return None
    thread = threading.get_ident()
    outer = _calls.get(thread)
    _calls[thread] = time.monotonic(), path
    _start()
    return partial(_calls.pop, thread, None) if outer is None else partial(_go_on, thread, outer)


def _go_on(thread: int, outer: tuple[float, str]) -> None:
    _calls[thread] = outer


def _start() -> None:
    global _watcher
    if _watcher is None:
        with _lock:
            if _watcher is None:
                _watcher = threading.Thread(target=_watch, name="casnap-late-calls", daemon=True)
                _watcher.start()


def _watch() -> None:
    global _watcher
    told: set[tuple[float, str]] = set()
    idle = 0
    while idle < _IDLE_LOOKS:
        time.sleep(_LOOK)
        now = time.monotonic()
        calls = set(_calls.copy().values())
        idle = 0 if calls else idle + 1
        told &= calls
        for call in calls - told:
            if now - call[0] >= _TOLD_AFTER:
                told.add(call)
                _log.warning(
                    "waiting for %s: the server of its file system has not answered for %.0f s. "
                    "This goes on once it does, or once the file system is unmounted (`umount -f`)",
                    call[1],
                    now - call[0],
                )
    with _lock:
        _watcher = None


@in_child
def _begin_in_child() -> None:
    """Forget, in a forked child, the parent's calls and the thread that watched them."""
    global _watcher
    _calls.clear()
    _watcher = None
