"""The kernels that hash on a device, in Triton's interpreter, against BLAKE3; and compiled.

The interpreter takes as long for a hundred thousand lanes as for one, half a second for each 64
bytes of a leaf: so each test hashes as much as it can at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from casnap.format.digest import Digest, digest_of
from casnap.restore.landings import Landings
from casnap.state.device_hash import CellRun, DeviceHasher
from casnap.storage import Want

pytestmark = pytest.mark.triton
MIB = 1 << 20
HERE = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Any:
    """Return the kernels; from here on this process can only interpret them."""
    os.environ["TRITON_INTERPRET"] = "1"
    from casnap.state import device_kernels

    return device_kernels


def hasher(kernels: Any, lanes: int = 1 << 17) -> DeviceHasher:
    return DeviceHasher(HERE, partial(kernels.hash_batch, lanes=lanes))


def expected(runs: list[CellRun]) -> list[Digest]:
    digests = []
    for memory, sizes in runs:
        data, start = memoryview(memory.view(torch.uint8).numpy()), 0
        for size in sizes:
            digests.append(digest_of(data[start : start + size]))
            start += size
    return digests


def lengths() -> list[int]:
    """Return lengths around all that BLAKE3 does otherwise: words, blocks, leaves and levels."""
    edges = [4, 64, 128, 960, 1024, 1088]
    edges += [1024 * leaves for leaves in (*range(2, 18), 31, 32, 33, 63, 64, 65, 100, 127, 128)]
    near = {edge + by for edge in edges for by in (-4, -3, -2, -1, 0, 1, 2, 3, 4)}
    edges = [1024 * leaves for leaves in (129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)]
    near |= {edge + by for edge in edges for by in (-1, 0, 1)}
    return sorted(n for n in near if n > 0)


def test_the_proof_of_a_device_passes(kernels: Any) -> None:
    hasher(kernels).prove()


def test_all_lengths_and_beginnings(kernels: Any) -> None:
    """From each multiple of 4 bytes, up to 64 MiB, of any dtype, several cells in a row."""
    memory = torch.randint(0, 256, (64 * MIB + 4096,), dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    # Numbers of other dtypes are only bytes.
    odd = [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.bool]
    runs = [
        CellRun(memory, (64 * MIB,)),
        CellRun(memory[16:], (2 * MIB - 1,)),
        CellRun(memory[4:], (8 * MIB + 1,)),
        CellRun(memory, (65_536, 65_552, 70_000, 65_536, 1)),
        *(CellRun(memory[:96_000].view(dtype), (65_536, 30_464)) for dtype in odd),
        *(CellRun(memory[16 * i :], (n,)) for i, n in enumerate(lengths())),
        *(CellRun(memory[16 * i + 4 * (1 + i % 3) :], (n,)) for i, n in enumerate(lengths())),
    ]
    assert hasher(kernels).digests(runs) == expected(runs)


def test_several_programs_and_batches(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casnap.state.device_hash._BATCH_LEAVES", 64)
    memory = torch.randint(0, 256, (MIB,), dtype=torch.uint8)
    runs = [CellRun(memory, (1024 * 40,) * 2), CellRun(memory[16:], (1024 * 3, 1024 * 20))]
    assert hasher(kernels, lanes=32).digests(runs) == expected(runs)


def test_of_what_a_restore_copied_there_the_damaged_is_read_again(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels hash the chunks where they lie; the host then reads one of them in vain."""
    made = hasher(kernels)
    monkeypatch.setattr("casnap.state.device_hash._hashers", {HERE: made})
    monkeypatch.setattr("casnap.state.device_hash.hasher_of", lambda _: made)
    parts = torch.randint(0, 256, (4 * 70_000,), dtype=torch.uint8).split(70_000)
    digests = [digest_of(memoryview(part.numpy())) for part in parts]
    wants = [
        Want(digest, part.nbytes, lambda _: None, "s/x", on_device=part)
        for digest, part in zip(digests, parts, strict=True)
    ]
    parts[2][-1] ^= 1
    asked = list[set[Digest]]()

    def read_again(doubtful: set[Digest]) -> set[Digest]:
        asked.append(doubtful)
        return doubtful

    Landings(()).settle(wants, read_again)
    assert asked == [{digests[2]}]


def test_nodes_of_two_cells_or_calls_are_not_joined(kernels: Any) -> None:
    """A digest that is made of what another call left, or another cell, has no tag."""
    # A cell of four leaves, of which one has another tag.
    table = torch.tensor([[0], [4096], [0]])
    below = torch.zeros(9, 5, dtype=torch.int32)
    below[8, :4] = torch.tensor([7, 7, 7, 6])
    above = torch.zeros(9, 3, dtype=torch.int32)
    words = [t.view(torch.uint32) for t in (below, above)]
    kernels.join_nodes[(1,)](table, 1, 0, 1, 1, words[0], 5, words[1], 3, 1, 16)
    assert above[8, :2].tolist() == [7, kernels.NO_TAG.value]


def test_compiled_for_an_h100_they_spill_nothing() -> None:
    """It loads 16 bytes at a time, and as many threads are on a multiprocessor as should be."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_kernels"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout)
    for name, fact in facts.items():
        assert fact["reg"] <= 64, (name, fact)
        assert (fact["stack"], fact["local"], fact["shared"]) == (0, 0, 0), (name, fact)
    assert ["ld.global.v2.b64", 4] in facts["whole leaves"]["loads"]
