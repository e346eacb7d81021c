"""What each rank sees when one of them raises, dies, or hangs: shared by the tests of that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from casnap.comm import Comm, join


class OnPurposeError(Exception):
    """No error of casnap's."""


class Seen(NamedTuple):
    """How something ended on a rank.

    Attributes:
        error: The type of what was raised; empty if nothing was.
        text: What it says.
        ranks: Whom it blames.
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


# --- one rank stands still until all others are done ------------------------------------------


class Yard:
    """A folder where ranks leave word for each other, whatever becomes of their connections."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)

    def leave(self, word: str, text: str = "") -> None:
        part = self.folder / f"{word}.{os.getpid()}"
        part.write_text(text)
        part.rename(self.folder / word)

    def wait(self, word: str, seconds: float = 60.0) -> str:
        """Wait for a word that another process leaves; there is no event between processes."""
        until = time.monotonic() + seconds
        while not (self.folder / word).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"nobody left {word!r}: {sorted(os.listdir(self.folder))}")
            time.sleep(0.005)
        return (self.folder / word).read_text()

    def stand_still(self) -> None:
        """Stop this process until :meth:`wake` is called."""
        self.leave("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def wake(self) -> None:
        """Let the one go on that stands still."""
        os.kill(int(self.wait("stopped")), signal.SIGCONT)
        (self.folder / "stopped").unlink()

    def done(self, victim: int) -> None:
        """Note that this rank has seen enough; the last survivor lets the victim go on."""
        rank, size = dist.get_rank(), dist.get_world_size()
        self.leave(f"done-{rank}")
        survivors = [r for r in range(size) if r != victim]
        if rank == survivors[0]:
            for other in survivors:
                self.wait(f"done-{other}")
            self.wake()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def talk(
    timeout: float, calls: int = 1, strike: Callable[[int, Comm], None] | None = None, **group: Any
) -> list[bytes]:
    """Hold some collectives; ``strike`` is called before each, with its number."""
    with join(group.get("pg"), timeout, group.get("doing", "the talk of ranks")) as comm:
        heard: list[bytes] = []
        for i in range(calls):
            comm.at(f"call {i}")
            if strike is not None:
                strike(i, comm)
            heard = [bytes(part) for part in comm.all_gather(b"%d" % comm.rank)]
        if strike is not None:
            strike(calls, comm)
        return heard
