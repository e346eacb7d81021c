"""Targets whose memory cannot be written: an error that names them, where torch would crash."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import MismatchError
from tests.support.faults import in_child

CHUNK = 64 << 10
# Held by its entry; many chunks, which are read straight into a tensor.
SIZES = (8, 100_000)


def mapped(folder: Path, n: int, mode: str) -> torch.Tensor:
    """Return a file as a tensor, as numpy maps it: ``r`` to be read only, ``c`` as one's own."""
    file = folder / "numbers"
    file.write_bytes(bytes(4 * n))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that it must not write
        return torch.from_numpy(np.memmap(file, np.float32, mode, shape=(n,)))


def freed(folder: Path, n: int) -> torch.Tensor:
    tensor = torch.zeros(n)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_off(folder: Path, n: int) -> torch.Tensor:
    tensor = mapped(folder, n, "r+")
    os.truncate(folder / "numbers", 0)
    return tensor


TARGETS: dict[str, Callable[[Path, int], torch.Tensor]] = {
    "mapped to be read": lambda folder, n: mapped(folder, n, "r"),
    "a view of that": lambda folder, n: mapped(folder, 2 * n, "r")[::2],
    "freed": freed,
    "mapped, and its file cut off": cut_off,
}


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    taken = {f"x{n}": torch.arange(float(n)) for n in SIZES}
    return store.take({"s": StateDict({**taken, "y": torch.ones(3)})}, "step")


def module(n: int, x: torch.Tensor) -> torch.nn.Module:
    """Return a module of two buffers."""
    made = torch.nn.Module()
    made.register_buffer(f"x{n}", x)
    made.register_buffer("y", torch.zeros(3))
    return made


@pytest.mark.parametrize("name", TARGETS)
def test_what_cannot_be_written_is_named(snapshot: Snapshot, tmp_path: Path, name: str) -> None:
    def check(n: int) -> None:
        x = TARGETS[name](tmp_path, n)
        for index in (None, slice(None)):
            with pytest.raises(MismatchError, match=f"s/x{n} .*cannot be written: "):
                snapshot.read_object(f"s/x{n}", x, index=index)
        made = module(n, x)
        for fill in (lambda **how: snapshot.load_into(made, "s", **how), restored_into(made)):
            with pytest.raises(MismatchError, match=f"s/x{n}: cannot be written: "):
                fill()
            assert not made.y.any()
            report = fill(strict=False)
            assert [line.partition(": ")[0] for line in report.mismatched] == [f"s/x{n}"]
            assert made.y.all()
            made.y.zero_()

        # And a dict gets new memory instead.
        state = StateDict({f"x{n}": TARGETS[name](tmp_path, n)})
        snapshot.restore({"s": state})
        assert torch.equal(state[f"x{n}"], torch.arange(float(n)))

    def restored_into(made: torch.nn.Module) -> Callable[..., object]:
        """Return what restores a module, of all that the snapshot has but one tensor."""
        other = next(size for size in SIZES if f"x{size}" not in dict(made.named_buffers()))
        made.register_buffer(f"x{other}", torch.zeros(other))
        return lambda **how: snapshot.restore({"s": made}, **how)

    assert [in_child(partial(check, n)) for n in SIZES] == [0, 0]


@pytest.mark.parametrize("mode", ["c", "r+"])
@pytest.mark.parametrize("n", SIZES)
def test_other_mapped_memory_is_filled_in_place(
    snapshot: Snapshot, tmp_path: Path, mode: str, n: int
) -> None:
    x = mapped(tmp_path, n, mode)
    state = StateDict({f"x{n}": x})
    snapshot.restore({"s": state})
    assert state[f"x{n}"] is x
    assert torch.equal(x, torch.arange(float(n)))
    x.zero_()
    assert snapshot.read_object(f"s/x{n}", x) is x
    assert torch.equal(x, torch.arange(float(n)))


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)]),
    "parameter without a shape": torch.nn.UninitializedParameter,
    "buffer without a shape": torch.nn.UninitializedBuffer,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ODD)
def test_what_has_no_shape_is_refused(snapshot: Snapshot, name: str) -> None:
    for index in (None, slice(None)):
        with pytest.raises(MismatchError, match="s/x8 cannot be read into"):
            snapshot.read_object("s/x8", ODD[name](), index=index)
    made = torch.nn.Module()
    made.register_buffer("x8", ODD[name]())
    assert snapshot.load_into(made, "s", strict=False).mismatched[0].startswith("s/x8: ")
