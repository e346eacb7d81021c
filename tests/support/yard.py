"""Ranks that talk in a test, that stand still, and how a call ends on each of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from casnap.ranks.comm import Comm
from casnap.ranks.joining import join

SOON = 30.0
"""Seconds that a busy machine may add to a wait. A rank that hangs waits for longer."""


class OnPurposeError(Exception):
    """No error of casnap's."""


class Seen(NamedTuple):
    """How something ended on a rank.

    Attributes:
        error: The type of what was raised; empty if nothing was.
        text: What it says.
        ranks: The ranks that it blames.
        seconds: How long that took.
        value: What was returned.
    """

    error: str
    text: str
    ranks: tuple[int, ...]
    seconds: float
    value: Any

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else "returned"


def watch(work: Callable[[], Any]) -> Seen:
    """Do something, and return how it ended."""
    began = time.monotonic()
    error: BaseException | None = None
    value = None
    try:
        value = work()
    except BaseException as e:  # noqa: BLE001 - it is what is looked at
        error = e
    seconds = time.monotonic() - began
    if error is None:
        return Seen("", "", (), seconds, value)
    return Seen(type(error).__name__, str(error), getattr(error, "ranks", ()), seconds, None)


def nothing_hangs() -> None:
    """Check that no thread still waits for the store of the process group."""
    for thread in threading.enumerate():
        if thread.name == "casnap-link":
            thread.join(60)
            assert not thread.is_alive()


# --- one rank stands still until all others are done ------------------------------------------


class Yard:
    """A folder where ranks leave messages for each other, also after their connections broke."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)

    def leave(self, word: str, text: str = "") -> None:
        part = self.folder / f"{word}.{os.getpid()}.{threading.get_ident()}"
        part.write_text(text)
        part.rename(self.folder / word)

    def wait(self, *words: str) -> str:
        """Wait for one of some words that other processes leave."""
        until = time.monotonic() + 300
        while not (left := [word for word in words if (self.folder / word).exists()]):
            if time.monotonic() > until:
                raise TimeoutError(f"no process left any of {words}")
            time.sleep(0.005)  # there is no event between processes that may be killed
        return left[0]

    def text(self, word: str) -> str:
        return (self.folder / word).read_text() if (self.folder / word).exists() else ""

    def stand_still(self) -> None:
        """Stop this process until all others are done."""
        self.leave("stopped", str(os.getpid()))
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def stand_in_thread(self) -> None:
        """Stop this thread until all others are done."""
        self.leave("stopped", "")
        self.wait("go")

    def done(self, victim: int) -> None:
        """Note that this rank has seen enough; the first survivor lets the victim go on."""
        rank, size = dist.get_rank(), dist.get_world_size()
        survivors = [r for r in range(size) if r != victim]
        self.leave(f"done-{rank}")
        if rank != survivors[0]:
            return
        for other in survivors:
            self.wait(f"done-{other}")
        if self.wait("stopped", "spared") == "stopped":
            self.leave("go")
            if pid := self.text("stopped"):
                os.kill(int(pid), signal.SIGCONT)
            (self.folder / "stopped").unlink()


def talk(
    timeout: float, calls: int = 1, strike: Callable[[int, Comm], None] | None = None, **group: Any
) -> list[bytes]:
    """Hold some collectives; ``strike`` is called before each, with its number."""
    with join(group.get("pg"), timeout, group.get("doing", "the talk of ranks")) as comm:
        heard: list[bytes] = []
        for i in range(calls):
            comm.enter_phase(f"call {i}")
            if strike is not None:
                strike(i, comm)
            heard = [bytes(part) for part in comm.all_gather(b"%d" % comm.rank)]
        if strike is not None:
            strike(calls, comm)
        return heard


def heard_of(size: int) -> list[bytes]:
    """Return what is heard in a talk of so many ranks."""
    return [b"%d" % rank for rank in range(size)]
