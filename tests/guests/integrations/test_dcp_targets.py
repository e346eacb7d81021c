"""``dcp.load`` into tensors whose elements are not the bytes at their address, or cannot be set."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from casnap import NewStore, Store
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from tests.support.faults import in_child

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")

# Held by its entry; read straight into a tensor.
SIZES = (5, 100_000)


def numbers(n: int) -> torch.Tensor:
    return torch.complex(torch.arange(float(n)), -torch.arange(float(n)))


TARGETS: dict[str, Callable[[int], torch.Tensor]] = {
    "conjugated": lambda n: torch.zeros(n, dtype=torch.complex64).conj(),
    "negated": lambda n: torch._neg_view(torch.zeros(n, dtype=torch.complex64)),
    "both": lambda n: torch._neg_view(torch.zeros(n, dtype=torch.complex64).conj()),
    "of a subclass": lambda n: TwoTensor(
        torch.zeros(n, dtype=torch.complex64), torch.zeros(n, dtype=torch.complex64)
    ),
    "strided": lambda n: torch.zeros(2, n, dtype=torch.complex64).t()[:, 1],
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("n", SIZES)
def test_elements_that_are_not_the_bytes_in_memory(tmp_path: Path, name: str, n: int) -> None:
    Store(tmp_path, create=NewStore(chunk_size=64 << 10)).make()
    dcp.save({"x": numbers(n)}, storage_writer=CasnapWriter(tmp_path / "step"), no_dist=True)

    def work() -> None:
        target = TARGETS[name](n)
        dcp.load({"x": target}, storage_reader=CasnapReader(tmp_path / "step"), no_dist=True)
        for found in (target.a, target.b) if isinstance(target, TwoTensor) else (target,):
            assert torch.equal(found, numbers(n))

    assert in_child(work) == 0


@pytest.mark.parametrize("how", ["freed", "read-only"])
@pytest.mark.parametrize("n", SIZES)
def test_memory_that_cannot_be_written(tmp_path: Path, how: str, n: int) -> None:
    Store(tmp_path, create=NewStore(chunk_size=64 << 10)).make()
    dcp.save({"x": numbers(n)}, storage_writer=CasnapWriter(tmp_path / "step"), no_dist=True)

    def work() -> None:
        target = torch.zeros(n, dtype=torch.complex64)
        if how == "freed":
            target.untyped_storage().resize_(0)
        else:
            (tmp_path / "mapped").write_bytes(bytes(8 * n))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of memory that it must not write
                file = np.memmap(tmp_path / "mapped", np.complex64, "r", shape=(n,))
                target = torch.from_numpy(file)
        with pytest.raises(CheckpointException, match="x cannot be written: "):
            dcp.load({"x": target}, storage_reader=CasnapReader(tmp_path / "step"), no_dist=True)

    assert in_child(work) == 0
