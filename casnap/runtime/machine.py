"""Figures of the system: memory, and what this process has read from disks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# The limit of a container, what it uses, and its caches that the system can drop: the files of
# control groups, version 2 and version 1.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def memory_bytes() -> int:
    """Return how many bytes of memory this host, or its container, has."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, *_ in _GROUPS:
        with suppress(OSError, ValueError):
            found = min(found, int(_group_text(limit)))
    return found


def available_bytes() -> int:
    """Return how many bytes programs can still get: free ones, and caches that can be dropped.

    Returns:
        The bytes that this host has, or its container if that has fewer; 0 if they are unknown.
    """
    try:
        available = _number(_MEMINFO.read_text(), "MemAvailable:") << 10
    except (OSError, ValueError):
        return 0
    for limit, used, details, droppable in _GROUPS:
        with suppress(OSError, ValueError):
            dropped = _number(_group_text(details), droppable)
            free = int(_group_text(limit)) - int(_group_text(used))
            available = min(available, free + dropped)
    return available


class DiskReads:
    """Counts the bytes that this process has read from disks, from now on.

    What the page cache already has does not count.
    """

    def __init__(self) -> None:
        self._before = _disk_bytes()

    def nbytes(self) -> int | None:
        """Return how many bytes were read; None if the system does not tell."""
        return None if self._before is None else (_disk_bytes() or 0) - self._before


def _disk_bytes() -> int | None:
    with suppress(OSError, ValueError):
        return _number(Path("/proc/self/io").read_text(), "read_bytes:")
    return None


def _group_text(name: str) -> str:
    return Path("/sys/fs/cgroup", name).read_text()


def _number(text: str, name: str) -> int:
    """Return the number that follows a name at the beginning of a line.

    Raises:
        ValueError: No line has the name.
    """
    for line in text.splitlines():
        first, _, rest = line.partition(" ")
        if first == name:
            return int(rest.split()[0])
    raise ValueError(f"no line begins with {name!r}")
