"""Hashing on a GPU, against BLAKE3 on the host."""

from __future__ import annotations

import pytest
import torch

from casnap.format.digest import digest_of
from casnap.state import device_hash
from casnap.state.device_hash import CellRun, hasher_of

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_digests_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length, from any multiple of 4 bytes, in one batch and in many."""
    hasher = hasher_of(device())
    assert hasher is not None
    memory = torch.randint(0, 256, (64 * MIB + 65_536,), dtype=torch.uint8, device=device())
    near = [1024 * 2**i + by for i in range(14) for by in (-1023, -960, -1, 0, 1, 4, 64, 1023)]
    runs = [
        CellRun(memory, (64 * MIB,)),
        *(CellRun(memory[16 * i :], (n,)) for i, n in enumerate(near)),
        *(CellRun(memory[16 * i + 4 * (1 + i % 3) :], (n,)) for i, n in enumerate(near)),
        CellRun(memory, (MIB,) * 64),
    ]
    host = memory.cpu().numpy()
    expected = []
    for run in runs:
        start = run.memory.storage_offset()
        for size in run.sizes:
            expected.append(digest_of(host[start : start + size].data))
            start += size
    assert hasher.digests(runs) == expected
    monkeypatch.setattr(device_hash, "_BATCH_LEAVES", 1024)
    assert hasher.digests(runs) == expected


def test_it_hashes_what_the_stream_of_its_caller_writes() -> None:
    hasher = hasher_of(device())
    assert hasher is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(4000, 4000, device=device())
        for _ in range(50):
            x = x @ x / 4000
        [digest] = hasher.digests([CellRun(x, (x.nbytes,))])
    assert digest == digest_of(x.cpu().numpy().tobytes())


def test_each_gpu_hashes_its_own() -> None:
    for index in range(torch.cuda.device_count()):
        there = torch.device("cuda", index)
        hasher = hasher_of(there)
        assert hasher is not None
        x = torch.randn(100_000, device=there)
        assert hasher.digests([CellRun(x, (x.nbytes,))]) == [digest_of(x.cpu().numpy().tobytes())]
