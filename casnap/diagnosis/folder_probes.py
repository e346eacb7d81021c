"""Probes of a folder: one for each ability of its file system that casnap uses."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from casnap.backends.local_files import NO_LINKS, lock
from casnap.diagnosis.report import DoctorRow, clock_row, time_text
from casnap.diagnosis.site import Site
from casnap.runtime.buffers import PAGE, Slot, reserve_space
from casnap.runtime.descriptors import opened
from casnap.runtime.file_systems import mount_of
from casnap.storage import PutIfAbsent

_SYNCS = 8
_SLOW_SYNC = 0.1
# How many seconds to wait until a cached fact is renewed, and the seconds between two looks.
_WATCH, _LOOK = 6.0, 0.01
# How many seconds a probe may repeat its step.
_SOME = 3.0

_Options = Sequence[str]


def _lacks(*options: str) -> Callable[[_Options], bool]:
    return lambda given: not set(options) & set(given)


def _has(*options: str) -> Callable[[_Options], bool]:
    return lambda given: bool(set(options) & set(given))


# The type of a file system, whether the options of a mount cost something there, and the advice.
_ADVICE: list[tuple[str, Callable[[_Options], bool], str]] = [
    (
        "lustre",
        _lacks("flock"),
        "mount it with `flock`: without, no host sees the locks of another one, and a collector "
        "waits up to a day for a take that was killed",
    ),
    (
        "nfs4?",
        _has("nolock", "local_lock=all", "local_lock=flock"),
        "mount it without `nolock` and `local_lock`: with them, no host sees the locks of another "
        "one, and a collector waits up to a day for a take that was killed",
    ),
    (
        "nfs4?",
        _lacks("lookupcache=positive", "lookupcache=pos", "lookupcache=none", "noac"),
        "mount it with `lookupcache=positive`: by default a client also caches which names are "
        "absent, and sees later what other hosts commit",
    ),
    (
        "overlay",
        lambda _: True,
        "it is deleted with its container: have the store on a disk of the host",
    ),
    ("tmpfs|ramfs", lambda _: True, "it is memory: a store there is gone after a restart"),
]


def file_system(site: Site) -> DoctorRow:
    """Find the type of the file system, and the options of its mount."""
    mount = mount_of(site.folder)
    if mount is None:
        return DoctorRow("file system", "unknown", "unknown", "/proc/self/mountinfo has none")
    advice = [
        text
        for kind, applies, text in _ADVICE
        if re.fullmatch(kind, mount.kind) and applies(mount.options)
    ]
    return DoctorRow(
        "file system",
        f"{mount.kind}, of {mount.source or 'nothing'}, at {mount.folder.rstrip('/') or '/'}: "
        f"{', '.join(mount.options)}",
        "fair" if advice else "good",
        "; ".join(advice),
    )


def hard_links(site: Site) -> DoctorRow:
    """Try whether a file can get a second name."""
    site.make("one")
    try:
        os.link(site.path("one"), site.path("two"))
    except OSError as e:
        if e.errno not in NO_LINKS:
            raise
        return DoctorRow(
            "hard links",
            f"none: {e.strerror}",
            "bad",
            "a store needs them to give its files their names (exFAT, FAT and mounts of Google "
            "Drive have none): have the store elsewhere, and copy it here as a whole",
        )
    return DoctorRow("hard links", "work")


def put_if_absent(site: Site) -> DoctorRow:
    """Race several threads for one name: exactly one may get it."""
    for _ in site.tries(8, _SOME):
        if not PutIfAbsent(site.backend).has_one_winner(8, threads=4):
            return DoctorRow(
                "put-if-absent",
                "of several threads that make one name, not exactly one succeeded",
                "bad",
                "of two writers at once one can overwrite the other's commit: have the store "
                "elsewhere",
            )
    return DoctorRow("put-if-absent", "a name is made once, also if eight writers try at once")


def direct_writes(site: Site) -> DoctorRow:
    """Try whether a file can be written around the page cache."""
    name = "O_DIRECT"
    try:
        flags = os.O_CREAT | os.O_WRONLY | os.O_DIRECT
        with opened(site.path("direct"), flags, 0o600) as fd:
            os.pwritev(fd, [Slot(PAGE).view], 0)
    except OSError as e:
        return DoctorRow(
            name, f"refused: {e.strerror}", "fair", "takes write through the page cache: slower"
        )
    return DoctorRow(name, "works")


def space_in_reserve(site: Site) -> DoctorRow:
    """Try whether space for a file can be reserved before writing."""
    with site.opened("reserve") as fd:
        if reserve_space(fd, 1 << 20):
            return DoctorRow("fallocate", "works")
    return DoctorRow(
        "fallocate", "refused", "fair", "on a full disk, deletes may need other files to go first"
    )


def locks(site: Site) -> DoctorRow:
    """Lock a file twice: the second lock must be refused."""
    site.make("locked")
    with site.opened("locked") as fd, site.opened("locked") as other:
        found = lock(fd)
        if found and lock(other) is False:
            return DoctorRow("locks", "work on this host")
    return DoctorRow(
        "locks",
        "none" if found is None else "a second lock was not refused",
        "fair",
        "a collector waits up to a day for a take that was killed; nothing is lost",
    )


def attributes(site: Site) -> DoctorRow:
    """Try whether a folder can have an extended attribute."""
    name = "xattrs"
    try:
        os.setxattr(site.folder, "user.casnap.doctor", b"1")
        os.getxattr(site.folder, "user.casnap.doctor")
    except OSError as e:
        return DoctorRow(
            name,
            f"refused: {e.strerror}",
            "fair",
            "empty folders of deleted snapshots may stay",
        )
    return DoctorRow(name, "work")


def inodes(site: Site) -> DoctorRow:
    """Try whether a file keeps its inode number: under a second name, and over time."""
    path, second = site.make("inode"), site.path("inode-2")
    with site.opened("inode") as fd:
        seen = [os.fstat(fd).st_ino]
    with suppress(OSError):
        os.link(path, second)
        seen.append(second.stat().st_ino)
    for number in site.tries(64, _SOME):
        site.make(f"other-{number}").stat()
    seen.append(path.stat().st_ino)
    if len(set(seen)) == 1:
        return DoctorRow("inodes", "a file keeps its number")
    return DoctorRow(
        "inodes",
        "a file has several numbers, by name or by time",
        "fair",
        "casnap does not rely on it, and looks more often",
    )


def own_changes(site: Site) -> DoctorRow:
    """Change a file by one of its names, and try whether another name shows the change."""
    name = "own changes"
    path, second = site.make("changed"), site.path("changed-2")
    try:
        os.link(path, second)
    except OSError:
        return DoctorRow(name, "not tried without hard links", "unknown", "see hard links")
    second.stat()
    with site.opened("changed") as fd:
        os.write(fd, b"grown")
    started = time.monotonic()
    end = min(started + _WATCH, site.end)
    while (is_late := second.stat().st_size != 5) and time.monotonic() < end:
        time.sleep(_LOOK)
    late = time.monotonic() - started
    if late < _LOOK:
        return DoctorRow(name, "are seen at once, by each name of a file")
    return DoctorRow(
        name,
        f"are seen after {'more than ' * is_late}{time_text(late)} by another name of the file",
        "fair",
        "the client caches attributes by name (as FUSE file systems do): an option such as "
        "`attr_timeout=0` of its mount ends that",
    )


def clocks(site: Site) -> DoctorRow:
    """Compare the file system's clock with this host's, by the time stamp of a new file."""
    begun = time.time()
    with site.opened("clock") as fd:
        os.write(fd, b"1")
        os.fsync(fd)
        at = os.fstat(fd).st_mtime
    return clock_row("the file system", at, begun)


def sync_time(site: Site) -> DoctorRow:
    """Measure how long it takes to sync a small file and its folder."""
    seconds = []
    with opened(site.folder, os.O_RDONLY | os.O_DIRECTORY) as folder:
        for number in site.tries(_SYNCS, _SOME):
            started = time.monotonic()
            with site.opened(f"synced-{number}") as fd:
                os.write(fd, bytes(PAGE))
                os.fsync(fd)
            os.fsync(folder)
            seconds.append(time.monotonic() - started)
    median = statistics.median(seconds)
    found = f"{time_text(median)} for a small file and its folder"
    if median < _SLOW_SYNC:
        return DoctorRow("sync", found)
    return DoctorRow(
        "sync", found, "fair", "a take waits for several syncs, one after the other: use async_take"
    )


PROBES: list[tuple[str, Callable[[Site], DoctorRow]]] = [
    ("file system", file_system),
    ("hard links", hard_links),
    ("put-if-absent", put_if_absent),
    ("O_DIRECT", direct_writes),
    ("fallocate", space_in_reserve),
    ("locks", locks),
    ("xattrs", attributes),
    ("inodes", inodes),
    ("own changes", own_changes),
    ("clocks", clocks),
    ("sync", sync_time),
]
