"""Elements of every dtype, and views that stand for other elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import Snapshot, StateDict
from casnap.state.tensors import TENSOR_DTYPES
from tests.support.late_device import Stream, module

DTYPES = [dtype for name, dtype in TENSOR_DTYPES.items() if not name.startswith("q")]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    random = torch.randint(2, (300, 100 * dtype.itemsize), dtype=torch.uint8)
    state = {
        "rows": random.to("late").view(dtype),
        "scalar": random.to("late").view(-1)[: dtype.itemsize].view(dtype)[0],
        "empty": random.to("late").view(dtype)[:0],
    }
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(**state)})
    for name, tensor in state.items():
        value = snapshot.read_object(f"s/{name}")
        assert (value.dtype, value.shape) == (dtype, tensor.shape)
        assert torch.equal(as_bytes(value), as_bytes(tensor).cpu())


def test_conjugated_and_negated_views(tmp_path: Path) -> None:
    x = torch.randn(300, 400, dtype=torch.complex64)
    with module.stream(Stream("late")):
        y = x.to("late")
        state = {"conj": y.conj(), "imag": y.conj().imag}
        snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(**state)})
    assert torch.equal(snapshot.read_object("s/conj"), x.conj().resolve_conj())
    assert torch.equal(snapshot.read_object("s/imag"), -x.imag)
    with module.stream(Stream("late")):
        out = torch.zeros_like(x, device="late")
        snapshot.read_object("s/conj", out.conj())
    with module.stream(Stream("late")):
        assert torch.equal(out.cpu(), x)
