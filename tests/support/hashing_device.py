"""Hashing as ``casnap.state.device_kernels`` does, but by the host: for tests without Triton.

``hash_batch`` reads the memory that a table names, so that must be the host's, as that of
``late_device.py`` is, where it waits in the queue of the current stream. Tests wrap it to have a
device that lies.
"""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch
from blake3 import blake3

import casnap.state
from casnap.state import device_hash
from casnap.state.device_hash import Batch
from casnap.take import device_asking
from tests.support import late_device


def hash_batch(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
    """Write the digests of the cells of a batch, and their tags, once the stream comes to it."""
    if table.is_cpu:
        _hash(table, batch, call, digests)
        return
    here, there = late_device._on_host(table), late_device._on_host(digests)
    stream = late_device.module.current_stream(table.device)
    stream.enqueue(lambda: _hash(here, batch, call, there))


def _hash(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
    for i in range(batch.first, batch.first + batch.cells):
        address, nbytes, _ = (int(n) for n in table[:, i])
        digest = bytearray(blake3(ctypes.string_at(address, nbytes)).digest())
        digests[:-1, i] = torch.frombuffer(digest, dtype=torch.int32)
        digests[-1, i] = call + i


def runs_on(device: torch.device) -> bool:
    """Whether it hashes on such a device."""
    return device.type == "late"


def install(patch: pytest.MonkeyPatch, *devices: str) -> None:
    """Have kernels for the devices of this process, of which nothing was known, and be ready.

    Args:
        patch: What undoes that.
        devices: Which devices have their hashers by now.
    """
    patch.setattr(device_hash, "_distrusted", [])
    patch.setattr(device_hash, "_hashers", {})
    patch.setattr(device_hash, "_in_the_making", set())
    patch.setattr(device_asking, "_streaks", {})
    patch.setattr(casnap.state, "device_kernels", sys.modules[__name__], raising=False)
    for device in devices:
        assert device_hash.hasher_of(torch.device(device)) is not None
    late_device.counts.clear()
