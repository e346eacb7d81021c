"""The processes of ranks. Another process on the same host can see whether one has ended."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from casnap.format.digest import digest_of
from casnap.runtime.environment import boot_id


class Process(NamedTuple):
    """A process, as other processes on its host can find it. All fields are 0 if it is not known.

    Attributes:
        host: A number of the host, its boot and its container.
        pid: The process id.
        start: When the process started, in clock ticks since the boot.
    """

    host: int = 0
    pid: int = 0
    start: int = 0

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        if not (boot := boot_id()):
            return cls()
        with suppress(OSError):
            # A process id means one process only within one boot of a machine and one container.
            host = digest_of(f"{boot}{Path('/proc/self/ns/pid').readlink()}".encode())
            return cls(int.from_bytes(host[:7], "big"), os.getpid(), int(_stat(os.getpid())[19]))
        return cls()

    def has_ended(self, host: int) -> bool:
        """Whether the process has ended.

        Args:
            host: The number of this process's host. From another host the answer is False, since
                it cannot be known there.
        """
        if not host or self.host != host:
            return False
        try:
            stat = _stat(self.pid)
        except OSError:
            return True
        # A process that has ended is listed as a zombie until its parent has waited for it.
        return stat[0] in "ZX" or int(stat[19]) != self.start


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
