"""How the ranks of a process group are connected, and whom they lost where a connection broke.

A :class:`Link` is a gloo group of casnap's own. It serves one operation after the other, and is
made anew once it broke. The ranks meet through the store of the default process group, where each
also notes what it does: whoever loses the connection leaves word there and reads who is missing.
Nothing here waits for ever, even if nobody answers, the store included.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from casnap.digest import digest_of
from casnap.format import encode

T = TypeVar("T")
Said = tuple[str, str]
"""The type of an error, and what it says."""

_POLL = (0.001, 0.05)
PATIENCE = 10.0
"""Seconds that survivors wait for each other to say that they live, before they name the dead."""
# Seconds for others to leave word why they broke off, once that was felt.
_WORD = 1.0
# Seconds until the store counts as gone, beyond what it is asked to wait.
_STORE = 5.0


class Lost(msgspec.Struct, array_like=True):
    """Who broke off an operation, and why.

    Attributes:
        ranks: Those at fault, as far as that is known.
        why: What happened to them.
        told: The error, if it was one.
    """

    ranks: tuple[int, ...]
    why: str
    told: Said | None = None


class LostError(Exception):
    """Some ranks did not come.

    Attributes:
        lost: Who, and why.
    """

    def __init__(self, lost: Lost) -> None:
        super().__init__(lost.why)
        self.lost = lost


class _Process(NamedTuple):
    """A process, as others on its host can find it; of unknown hosts all is 0."""

    host: int = 0
    pid: int = 0
    start: int = 0

    @classmethod
    def own(cls) -> _Process:
        """Return this one."""
        with suppress(OSError):
            # Process ids mean something within one boot of one machine, and one container.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()
            space = Path("/proc/self/ns/pid").readlink()
            host = int.from_bytes(digest_of(f"{boot}{space}".encode())[:7], "big")
            return cls(host, os.getpid(), int(_stat(os.getpid())[19]))
        return cls()

    def is_gone(self, host: int) -> bool:
        """Whether it ended, which can be told on its own host alone."""
        if not host or self.host != host:
            return False
        try:
            stat = _stat(self.pid)
        except OSError:
            return True
        # One that nobody has waited for yet is still listed, as a zombie.
        return stat[0] in "ZX" or int(stat[19]) != self.start


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Link:
    """The connection between the ranks of a process group.

    Args:
        home: The default process group, which a link does not outlive.
        store: Its store.
        ranks: The global ranks of the group.
        rank: Which of them this is.
    """

    def __init__(self, home: object, store: Any, ranks: tuple[int, ...], rank: int) -> None:
        self.home = home
        self.size = len(ranks)
        self.rank = rank
        self.pg: Any = None
        self._store = store
        self._base = f"casnap/{digest_of(encode(ranks)).hex()[:16]}"
        self._name = ""
        # Which operation it is that this group serves.
        self._number = 0
        self._processes: list[_Process] = []
        self._turn = threading.Lock()
        self._holder: int | None = None

    def hold(self, holder: int) -> None:
        """Begin an operation, given its id; one that goes on in the background ends first."""
        self._turn.acquire()
        self._holder = holder

    def free(self, holder: int) -> None:
        """End an operation."""
        if self._holder == holder:
            self._holder = None
            self._turn.release()

    @property
    def connected(self) -> bool:
        """Whether there is a group, as far as this rank knows."""
        return self.pg is not None

    def begin(self) -> None:
        """Count an operation that uses the group of the one before."""
        self._number += 1

    def note(self, what: str, text: str) -> None:
        """Note something about this rank that others may want to know."""
        if self.connected:
            with suppress(RuntimeError):
                self._store.set(f"{self._name}/{what}/{self.rank}", text)

    def noted(self, what: str, rank: int) -> str:
        """Return what another rank noted, without waiting for it."""
        key = f"{self._name}/{what}/{rank}"
        with suppress(RuntimeError):
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""

    # --- meeting ---

    def connect(self, until: float, timeout: float, notes: dict[str, str]) -> None:
        """Make a group, once all ranks have come.

        Args:
            until: When to give up.
            timeout: How long that is, for messages.
            notes: What others may want to know.

        Raises:
            LostError: Some did not come.
            RuntimeError: The connection broke.
        """
        self.close()
        self._number = 0

        def meet(given_up: threading.Event) -> None:
            pauses = _pauses(until, given_up)
            self._name = self._invite(pauses, timeout) if self.rank == 0 else self._follow(pauses, timeout)

        self._bounded(meet, until - time.monotonic() + _STORE)

    # (the rest follows)
