"""How long mirrors take over a slow line: ``python -m tools.line``.

A relay lets so many bytes a second through to an S3 server of this machine. A run takes a snapshot
a step, and waits until its mirror has it; once as deltas, and once as whole chunks. The times are
those of the steps after the first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from casnap import MirrorOptions, NewStore, Store
from tests.support.servers import shared
from tools.economy import moving

_PIECE = 256 << 10
_ELEMENTS = 64 << 20
_SHARES = {"1 % of bf16 weights move": 0.01, "10 %": 0.1, "all move by one": 1.0}


class Line:
    """A line that all connections share."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, nbytes: int) -> None:
        """Wait until so many bytes are through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def relay(
    listener: socket.socket, server: tuple[str, int], rate: float, *, both_ways: bool = False
) -> None:
    """Pass connections on to a server, what they send at a rate in bytes a second; forever.

    Args:
        listener: For the connections.
        server: Its address.
        rate: The rate.
        both_ways: Whether what they receive shares it.
    """
    line = Line(rate)

    def pump(source: socket.socket, target: socket.socket, *, is_slow: bool) -> None:
        try:
            while piece := source.recv(_PIECE):
                if is_slow:
                    line.carry(len(piece))
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()

    while True:
        client, _ = listener.accept()
        there = socket.create_connection(server)
        for ends, is_slow in (((client, there), True), ((there, client), both_ways)):
            threading.Thread(
                target=pump, args=ends, kwargs={"is_slow": is_slow}, daemon=True
            ).start()


def measure(share: float, steps: int, folder: Path, uri: str, options: Any) -> list[float]:
    """Return how many seconds the mirror took for each step but the first."""
    store = Store(folder, mirror=MirrorOptions(uri, storage_options=options)).make()
    store.configure(gc="off")
    seconds = []
    for step, state in enumerate(moving(share, _ELEMENTS)(steps)):
        store.take(state, f"run/{step:03}")
        began = time.monotonic()
        store.wait_mirrored()
        seconds.append(time.monotonic() - began)
    return seconds[1:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="MB a second")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where to put the stores")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    print("| run | whole, s | as deltas, s | times as fast |\n|---|---|---|---|")
    with shared("seaweedfs", folder) as server, server.bucket() as bucket:
        listener = socket.create_server(("127.0.0.1", 0))
        address = urlsplit(server.endpoint)
        line = multiprocessing.get_context("fork").Process(
            target=relay,
            args=(listener, (address.hostname, address.port), options.rate * 1e6),
            daemon=True,
        )
        line.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        there = {**bucket.storage_options, "endpoint_url": url}
        for number, (name, share) in enumerate(_SHARES.items()):
            medians = []
            for codec in ("raw", "auto"):
                uri = f"{bucket.uri}/{number}-{codec}"
                Store(uri, storage_options=there, create=NewStore(codec=codec)).make()
                place = folder / f"{number}-{codec}"
                medians.append(statistics.median(measure(share, options.steps, place, uri, there)))
            whole, deltas = medians
            print(f"| {name} | {whole:.2f} | {deltas:.2f} | {whole / deltas:.1f} |", flush=True)
        line.kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
