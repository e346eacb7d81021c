"""Decoders, made by many threads at once."""

from __future__ import annotations

import subprocess
import sys

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
