"""Run a command beside processes that keep the processor busy.

    python -m tools.busy 4 --times 3 -- make test

It stops at the first run that fails, and ends with that run's exit status.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def spin() -> None:
    while True:
        pass


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep some processes busy for as long as the block runs."""
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def run(command: list[str]) -> int:
    """Run a command, print the time that it took, and return its exit status."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    status = subprocess.run(command, check=False).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"exit status {status} after {time.monotonic() - began:.0f} s, "
        f"{processor:.0f} s of processor time",
        flush=True,
    )
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.busy", description="Run a command beside busy processes."
    )
    parser.add_argument("processes", type=int, help="how many busy processes")
    parser.add_argument("--times", type=int, default=1, help="how often to run the command")
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args()
    with load(options.processes):
        for _ in range(options.times):
            if status := run(options.command):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
