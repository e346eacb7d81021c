"""Free ports for servers and worlds of ranks."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress


def free_port(*also: int) -> int:
    """Return a free port that nobody else takes before it is used.

    It lies below the ports that the system gives to connections. Other test processes do not get
    it either: a claim, an abstract socket of its name, is held until this process ends. Tests may
    seed `random`, so the system's generator draws it.

    Args:
        also: Distances to further ports that must be free with it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as claim, ExitStack() as probes:
            claim.bind(f"\0casnap-tests-port-{port}")
            for each in (port, *(port + distance for distance in also)):
                probes.enter_context(socket.socket()).bind(("", each))
            claim.detach()  # it stays open as long as this process
            return port
