"""The processes of ranks, as others on their host can find them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from casnap.format.digest import digest_of
from casnap.runtime.environment import boot_id


class Process(NamedTuple):
    """A process, as others on its host can find it; all 0 where that is not known."""

    host: int = 0
    pid: int = 0
    start: int = 0

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        if not (boot := boot_id()):
            return cls()
        with suppress(OSError):
            # A process id is valid within one boot of one machine, and one container.
            host = digest_of(f"{boot}{Path('/proc/self/ns/pid').readlink()}".encode())
            return cls(int.from_bytes(host[:7], "big"), os.getpid(), int(_stat(os.getpid())[19]))
        return cls()

    def has_ended(self, host: int) -> bool:
        """Whether the process has ended; False on another host, which cannot know."""
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
