"""How much of casnap runs for one tensor: modules, functions and calls of a take and of two reads.

    python -m tools.way

One process, a store on a local disk that is open and warm, and one float32 tensor of 4 MiB: the
second take of changed bytes, a restore, and ``read_object``. What runs while a module is imported
does not count.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import torch

import casnap

_HOUSE = str(Path(casnap.__file__).parent) + os.sep
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"}


def way(work: Callable[[], object]) -> tuple[Counter[str], int]:
    """Return how many functions of each module of casnap some work runs, and how many calls.

    Lambdas and generator expressions count for the function around them.
    """
    codes: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        counts = event == "call" and code.co_filename.startswith(_HOUSE)
        if counts and code.co_name not in _COMPREHENSIONS | {"<module>"}:
            codes[code] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    modules = Counter(code.co_filename.removeprefix(_HOUSE) for code in codes)
    return modules, codes.total()


def main() -> None:
    """Print the counts of a take, a restore and a read, and those of the rooms of the storage."""
    with TemporaryDirectory() as folder:
        os.environ["CASNAP_CACHE_DIR"] = str(Path(folder) / "cache")
        (Path(folder) / "cache").mkdir()
        store = casnap.Store(Path(folder) / "store")
        state = {"m": casnap.StateDict(w=torch.randn(1 << 20))}
        for step in range(2):
            state["m"]["w"] += 1.0
            store.take(state, f"warm/{step}")
            store[f"warm/{step}"].restore(state)
            store[f"warm/{step}"].read_object("m/w")
        state["m"]["w"] += 1.0
        works: dict[str, Callable[[], object]] = {
            "take": lambda: store.take(state, "one"),
            "restore": lambda: store["one"].restore(state),
            "read_object": lambda: store["one"].read_object("m/w"),
        }
        print(f"{'':12} {'modules':>8} {'functions':>10} {'calls':>8}   functions of the storage")
        for name, work in works.items():
            modules, calls = way(work)
            rooms: Counter[str] = Counter()
            for path, functions in modules.items():
                room = Path(path).parts
                if room[0] == "storage":
                    rooms[room[1]] += functions
            text = ", ".join(f"{room} {n}" for room, n in sorted(rooms.items()))
            print(f"{name:12} {len(modules):>8} {modules.total():>10} {calls:>8}   {text}")


if __name__ == "__main__":
    main()
