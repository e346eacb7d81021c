"""Takes of a state on a device, real or not, that was taken before."""

from __future__ import annotations

from pathlib import Path

import torch

from casnap import Snapshot, StateDict
from casnap.state.device_hash import hasher_of
from tools.bench.stays import crossing

_MIB = 1 << 20


def known_stays(path: Path, device: torch.device, how: str) -> None:
    """Take a state on a device four times, with some rows changed each time."""
    assert hasher_of(device) is not None
    live = {f"w{i}": torch.randn(2 * _MIB, device=device) + i for i in range(4)}
    live["turned"] = torch.randn(1000, 3000, device=device).t()
    live["half"] = torch.randn(3 * _MIB, device=device).bfloat16()
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
            assert sum(copied) < 4 * _MIB
        for name, tensor in expected.items():
            assert torch.equal(snapshot.read_object(f"s/{name}"), tensor), name
