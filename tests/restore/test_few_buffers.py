"""Reads beside work that holds almost all buffers of the process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.runtime.buffers import SLOTS, shared_pool
from casnap.storage.opening.creation import create_store
from tests.support.remote import RemoteDouble

STATE = {"s": StateDict(x=torch.arange(6 << 20, dtype=torch.float32))}


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("left", [1, 2])
def test_a_read_ends_though_few_buffers_are_left(
    tmp_path: Path, is_remote: bool, left: int
) -> None:
    """More threads read than there are buffers: none keeps one that it no longer uses."""
    store = Store(tmp_path)
    if is_remote:
        backend = RemoteDouble(tmp_path.name)
        create_store(backend, is_explicit=True)
        store = Store(backend)
    snapshot = store.take(STATE, "a")
    pool = shared_pool(0)
    held = [pool.take() for _ in range(SLOTS - left)]
    matches: list[torch.Tensor] = []
    reader = threading.Thread(
        target=lambda: matches.append(snapshot.read_object("s/x")), daemon=True
    )
    try:
        reader.start()
        reader.join(60)
    finally:
        for slot in held:
            pool.release(slot)
    assert matches, "it still waits"
    assert torch.equal(matches[0], STATE["s"]["x"])
