"""Live tensors that share memory, restored from snapshots that agree with that and that do not."""

from __future__ import annotations

from pathlib import Path

import torch

from casnap import Snapshot, StateDict


def test_an_alias_that_the_snapshot_has_not_is_parted(tmp_path: Path) -> None:
    model = torch.nn.Linear(700, 700)
    best = {k: v + 1 for k, v in model.state_dict().items()}
    state = {"model": model, "best": StateDict(best)}
    snapshot = Snapshot.take(tmp_path / "run" / "step", state)

    fresh = torch.nn.Linear(700, 700)
    alias = StateDict(fresh.state_dict())
    snapshot.restore({"model": fresh, "best": alias})
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(alias["weight"], best["weight"])
    assert torch.equal(alias["bias"], best["bias"])


def test_an_untied_checkpoint_in_a_tied_model_ends_as_torch_has_it(tmp_path: Path) -> None:
    untied = torch.nn.ModuleDict({"a": torch.nn.Linear(600, 600), "b": torch.nn.Linear(600, 600)})
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"model": untied})

    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(600, 600), "b": torch.nn.Linear(600, 600)})
    tied["b"].weight = tied["a"].weight
    snapshot.restore({"model": tied})
    assert tied["a"].weight is tied["b"].weight
    assert torch.equal(tied["a"].weight, untied["b"].weight)


def test_views_that_agree_are_filled_in_place(tmp_path: Path) -> None:
    base = torch.randn(500, 300)
    base[7, 7] = torch.nan
    taken = StateDict(base=base, rows=base[10:20], turned=base.t())
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": taken})

    other = torch.zeros(500, 300)
    live = StateDict(base=other, rows=other[10:20], turned=other.t())
    snapshot.restore({"s": live})
    assert live["base"] is other
    assert torch.equal(other.nan_to_num(5), base.nan_to_num(5))
    live["rows"].fill_(3)
    assert (other[10:20] == 3).all()


def test_views_of_numpy_that_share_memory_are_stored_whole(tmp_path: Path) -> None:
    import numpy as np

    a = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"s": StateDict(a=a, b=a.reshape(-1))})
    assert np.array_equal(snapshot.read_object("s/a"), a)
    assert np.array_equal(snapshot.read_object("s/b"), a.reshape(-1))
    small = np.arange(60, dtype=np.uint8).reshape(6, 10)
    taken = Snapshot.take(tmp_path / "run" / "small", {"s": StateDict(x=small)})
    assert np.array_equal(taken.read_object("s/x", index=(slice(2, 5), 3)), small[2:5, 3])
