"""Takes that ask the store what it has of a GPU's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from casnap import Snapshot, StateDict
from casnap.state.device_hash import hasher_of
from tools.bench.stays import crossing

MIB = 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_what_is_known_stays_there(tmp_path: Path, how: str) -> None:
    known_stays(tmp_path, torch.device("cuda", torch.cuda.current_device()), how)


def known_stays(path: Path, device: torch.device, how: str) -> None:
    """Take a state on a device four times, with some rows changed each time."""
    assert hasher_of(device) is not None
    live = {f"w{i}": torch.randn(2 * MIB, device=device) + i for i in range(4)}
    live["turned"] = torch.randn(1000, 3000, device=device).t()
    live["half"] = torch.randn(3 * MIB, device=device).bfloat16()
    for number in range(4):
        live["w1"][number * 1000 : number * 1000 + 10] += 1
        live["turned"][number] += 1
        expected = {name: tensor.cpu() for name, tensor in live.items()}
        with crossing() as copied:
            if how == "take":
                snapshot = Snapshot.take(path / "run" / f"{number}", {"s": StateDict(**live)})
            else:
                pending = Snapshot.async_take(path / "run" / f"{number}", {"s": StateDict(**live)})
                for tensor in live.values():
                    tensor.mul_(-1)
                snapshot = pending.wait()
                for tensor in live.values():
                    tensor.mul_(-1)
        if number:
            assert sum(copied) < 4 * MIB
        for name, tensor in expected.items():
            assert torch.equal(snapshot.read_object(f"s/{name}"), tensor), name
