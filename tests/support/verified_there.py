"""Restores to a device, real or not: what the host hashes, and transfers that go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch

from casnap import Store
from casnap.format.digest import Digest, digest_of
from casnap.restore import loading
from casnap.runtime.torch_modes import fill
from casnap.storage.packs import chunk_reads
from tests.support.damaged import all_places_of, damage_everywhere


@contextmanager
def hashed_on_host() -> Iterator[list[int]]:
    """Give a list that gets the bytes of each chunk that the host hashes to verify it."""
    hashed = list[int]()

    def counting(data: memoryview) -> Digest:
        hashed.append(len(data))
        return digest_of(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_reads, "digest_of", counting)
        yield hashed


@contextmanager
def transfer_that_damages(nbytes: int, which: int = 3) -> Iterator[None]:
    """Have one of the copies of so many bytes to a device change a bit."""
    numbers = count(1)

    def damaging(target: torch.Tensor, source: torch.Tensor) -> None:
        fill(target, source)
        if not target.is_cpu and target.nbytes == nbytes and next(numbers) == which:
            target.view(torch.uint8)[7, 300] += 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "fill", damaging)
        yield


def damage_cell(store: Store, cell: torch.Tensor) -> Digest:
    """Damage a cell in the store; return its digest."""
    digest = digest_of(cell.numpy().tobytes())
    assert digest in {each for each, _ in all_places_of(Path(store.uri))}
    damage_everywhere(Path(store.uri), digest)
    return digest
