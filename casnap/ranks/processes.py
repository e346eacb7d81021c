"""The processes of ranks.

A rank can find out whether another rank's process on its host has ended.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from casnap.format.digest import digest_of
from casnap.runtime.environment import boot_id


class Process(NamedTuple):
    """A process, named so that other processes on its host can find it.

    All fields are 0 if the system does not report them.

    Attributes:
        host: A number that stands for the host, its boot and the container.
        pid: The process id.
        start: When the process started, in clock ticks since the boot.
    """

    host: int = 0
    pid: int = 0
    start: int = 0

    @classmethod
    def current(cls) -> Process:
        """Return the ``Process`` of the current process."""
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
            host: The ``host`` of the process that asks. If it is another host, the answer is False.
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
