"""The files of an LMDB environment. If they cannot be used, new files replace them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

import lmdb

from casnap.runtime.descriptors import opened
from casnap.runtime.environment import boot_id, is_running

_log = logging.getLogger("casnap")
WRITING = "writing-"
_MAP_SIZES = (64 << 30, 1 << 30)
_LOCK_BYTES = 8192


def open_environment(folder: Path) -> lmdb.Environment:
    """Open the LMDB environment of a cache; if it cannot be used, replace it by a new one.

    It cannot be used if it was made before this boot, if a process died while it wrote, or if its
    file is too short or not an LMDB file.

    Raises:
        lmdb.Error: No cache can be made in the folder.
    """
    boot = folder / "boot"
    with contextlib.suppress(OSError):
        if boot.read_bytes() != boot_id().encode() or _cut_off(folder):
            remove(folder)
        else:
            os.utime(boot)
    for attempt in range(2):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            env = _map_environment(folder)
            if not _cut_short(env, folder):
                put_text(boot, boot_id())
                return env
            env.close()
        except lmdb.Error as e:
            if attempt:
                raise
            _log.info("the cache %s is unusable (%s) and is made anew", folder, e)
        remove(folder)
    raise lmdb.Error(f"{folder} cannot be made anew")


def put_text(path: Path, text: str) -> None:
    """Write a small file. Other processes see all of it or nothing.

    A process that read only a part of the text would delete the cache.
    """
    partial = path.with_name(f"{path.name}-{os.urandom(6).hex()}")
    partial.write_text(text, "utf-8", "surrogateescape")
    partial.rename(path)


def _cut_off(folder: Path) -> bool:
    """Whether a process died while it wrote to the cache. Its mark file shows this."""
    return any(
        not is_running(int(mark.name.removeprefix(WRITING)))
        for mark in folder.glob(f"{WRITING}[0-9]*")
    )


def remove(folder: Path) -> None:
    """Delete the files of a cache. Files that cannot be deleted stay."""
    import shutil  # slow to import, and needed only for a cache that failed

    shutil.rmtree(folder, ignore_errors=True)


def _map_environment(folder: Path) -> lmdb.Environment:
    _reserve(folder / "lock.mdb")
    for size in _MAP_SIZES:
        try:
            env = lmdb.open(
                str(folder), map_size=size, max_dbs=5, sync=False, metasync=False, mode=0o600
            )
        except (lmdb.MemoryError, MemoryError):
            continue
        # Killed processes leave entries in the table of readers, which has few.
        env.reader_check()
        return env
    raise lmdb.Error("no address space for the map")


def _reserve(lock: Path) -> None:
    """Allocate the disk space of LMDB's table of readers.

    LMDB writes this table through mmap. On a full disk, such a write would kill the process.

    Raises:
        OSError: The disk is full.
    """
    with opened(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600) as fd:
        try:
            os.posix_fallocate(fd, 0, _LOCK_BYTES)
        except OSError as e:
            # Any other error means that the file system cannot allocate: go on without.
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise


def inode(folder: Path) -> int | None:
    """Return the inode of the data file; None if there is no file.

    A new cache has another inode.
    """
    try:
        return (folder / "data.mdb").stat().st_ino
    except OSError:
        return None


def _cut_short(env: lmdb.Environment, folder: Path) -> bool:
    """Whether the data file ends before its last page.

    Touching a missing page would kill the process.
    """
    # Ask in this order, since another process may be making the file longer.
    needed = nbytes(env)
    return (folder / "data.mdb").stat().st_size < needed


def nbytes(env: lmdb.Environment) -> int:
    """Return how many bytes of its file an environment uses."""
    pages: int = env.info()["last_pgno"] + 1
    return pages * int(env.stat()["psize"])
