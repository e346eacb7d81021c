"""Decoding never crashes the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RACE = """
from __future__ import annotations
import sys, threading
import msgspec
from casnap.format.decoding import decoder, json_decoder

sys.setswitchinterval(1e-6)
for _ in range(200):
    class Part(msgspec.Struct, array_like=True):
        a: int
        b: list[bytes]
        c: dict[str, list[int]]

    class Whole(msgspec.Struct, array_like=True):
        x: list[Part]
        y: dict[str, Part]
        z: Part | None

    raw = msgspec.msgpack.encode([[[1, [b"x"], {"k": [1]}]], {}, None])
    start, found = threading.Barrier(6), []
    def work():
        start.wait()
        found.append(decoder(Whole).decode(raw))
        found.append(json_decoder(Whole).decode("[[], {}, null]"))
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(isinstance(each, Whole) for each in found)
"""


def test_many_threads_may_decode_a_type_for_the_first_time() -> None:
    """The library crashes the interpreter if two threads look at one type at once."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


KEPT = """
import gc, os, sys, types
import casnap.format.records as records
import torch
from casnap import NewStore, StateDict, Store

store = Store(sys.argv[1], create=NewStore(chunk_size=1 << 16)).make()
store.take({"s": StateDict(x=torch.arange(9.0))}, "a")
here = os.path.dirname(records.__file__)
inner, target = set(), None

def trace(frame, event, arg):
    code = frame.f_code
    if not code.co_filename.startswith(here):
        return None
    if event == "call" and code.co_name.startswith("<"):  # of a comprehension
        inner.add(code)
        return trace if code is target else None
    if code is target:
        raise KeyboardInterrupt
    return trace

def check():
    error = None
    sys.settrace(trace)
    try:
        Store(sys.argv[1]).check()
    except KeyboardInterrupt as e:
        error = e  # a cycle: this frame has it, and its traceback has this frame
    finally:
        sys.settrace(None)
    return error is not None

assert not check() and inner
for target in list(inner):
    assert check(), target
    gc.collect()
"""


def test_an_interrupt_between_two_records(tmp_path: Path) -> None:
    """What it leaves unended must not crash a later collection of garbage."""
    command = [sys.executable, "-c", KEPT, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
