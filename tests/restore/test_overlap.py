"""Restoring into tensors that overlap themselves, or each other under other dtypes."""

from __future__ import annotations

import pytest
import torch

from casnap import StateDict, Store
from casnap.errors import MismatchError
from tests.support.bitwise import assert_same, raw

N = 70_000  # several chunks, so several threads fill at once


@pytest.fixture
def store(request):
    return Store(f"memory://{request.node.nodeid}", chunk_size=64 << 10)


OVERLAPPING = {
    "unfold": lambda: torch.zeros(N).unfold(0, 3, 1),
    "as_strided": lambda: torch.zeros(N).as_strided((N // 2, 2), (1, 2)),
    "expand": lambda: torch.zeros(N, 1).expand(N, 3),
    "small": lambda: torch.zeros(5).unfold(0, 3, 1),
    "of a cast": lambda: torch.zeros(N, dtype=torch.float64).unfold(0, 3, 1),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_target_that_overlaps_itself_gets_what_was_stored(store, name):
    live = StateDict(t=OVERLAPPING[name]())
    taken = torch.randn(live["t"].shape)
    snapshot = store.take({"s": StateDict(t=taken)}, "step")
    snapshot.restore({"s": live})
    assert_same(live["t"].to(taken.dtype).contiguous(), taken)


def test_a_target_that_overlaps_itself_is_kept_where_it_agrees(store):
    base = torch.randn(N)
    snapshot = store.take({"s": StateDict(base=base, windows=base.unfold(0, 3, 1))}, "step")
    other = torch.zeros(N)
    live = StateDict(base=other, windows=other.unfold(0, 3, 1))
    snapshot.restore({"s": live})
    assert raw(other) == raw(base)
    assert live["windows"].data_ptr() == live["base"].data_ptr() == other.data_ptr()


@pytest.mark.parametrize("shape", [(3,), (N,)])
def test_one_tensor_under_two_names_that_were_the_same_bytes_of_two_dtypes(store, shape):
    """Equal bytes are equal values only under the same dtype."""
    numbers = torch.randint(1, 1000, shape, dtype=torch.int32)
    taken = {"a": numbers, "b": numbers.clone().view(torch.float32)}
    snapshot = store.take({"s": StateDict(taken)}, "step")
    both = torch.zeros(shape, dtype=torch.float64)
    live = StateDict(a=both, b=both)
    snapshot.restore({"s": live})
    for name, tensor in taken.items():
        assert torch.equal(live[name], tensor.double()), name


@pytest.mark.parametrize("shape", [(4,), (N,)])
def test_a_tensor_and_its_bits_as_another_dtype(store, shape):
    taken = torch.randn(shape)
    snapshot = store.take({"s": StateDict(t=taken, bits=taken.view(torch.int32))}, "step")
    other = torch.zeros(shape)
    live = StateDict(t=other, bits=other.view(torch.int32))
    snapshot.restore({"s": live})
    assert raw(other) == raw(taken)
    assert live["t"].data_ptr() == live["bits"].data_ptr() == other.data_ptr()
    apart = StateDict(t=torch.zeros(shape), bits=torch.zeros(shape, dtype=torch.int32))
    changed = store.take({"s": StateDict(t=taken, bits=torch.arange(shape[0]).int())}, "apart")
    live = StateDict(t=apart["t"], bits=apart["t"].view(torch.int32))
    changed.restore({"s": live})
    assert raw(live["t"]) == raw(taken)
    assert torch.equal(live["bits"], torch.arange(shape[0]).int())


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize("index", [None, slice(None)])
def test_read_object_into_what_overlaps_itself(store, name, index):
    out = OVERLAPPING[name]()
    agreed = OVERLAPPING[name]()
    first = agreed.as_strided(out.shape, out.stride())
    first.as_strided((first.untyped_storage().nbytes() // first.itemsize,), (1,)).normal_()
    snapshot = store.take(
        {"s": StateDict(t=torch.randn(out.shape, dtype=out.dtype), agreed=agreed)}, "step"
    )
    with pytest.raises(MismatchError, match="overlaps itself"):
        snapshot.read_object("s/t", obj_out=out, index=index)
    assert snapshot.read_object("s/agreed", obj_out=out, index=index) is out
    assert raw(out) == raw(agreed)


# --- as modules have it -----------------------------------------------------------------------


def test_an_alias_that_the_snapshot_has_not_is_parted(store):
    model = torch.nn.Linear(700, 700)
    best = {k: v + 1 for k, v in model.state_dict().items()}
    state = {"model": model, "best": StateDict(best)}
    snapshot = store.take(state, "step")

    fresh = torch.nn.Linear(700, 700)
    alias = StateDict(fresh.state_dict())
    snapshot.restore({"model": fresh, "best": alias})
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(alias["weight"], best["weight"])
    assert torch.equal(alias["bias"], best["bias"])


def test_an_untied_checkpoint_in_a_tied_model_ends_as_torch_has_it(store):
    untied = torch.nn.ModuleDict({"a": torch.nn.Linear(600, 600), "b": torch.nn.Linear(600, 600)})
    snapshot = store.take({"model": untied}, "step")

    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(600, 600), "b": torch.nn.Linear(600, 600)})
    tied["b"].weight = tied["a"].weight
    snapshot.restore({"model": tied})
    assert tied["a"].weight is tied["b"].weight
    assert torch.equal(tied["a"].weight, untied["b"].weight)


def test_views_that_agree_are_filled_in_place(store):
    base = torch.randn(500, 300)
    base[7, 7] = torch.nan
    taken = StateDict(base=base, rows=base[10:20], turned=base.t())
    snapshot = store.take({"s": taken}, "step")

    other = torch.zeros(500, 300)
    live = StateDict(base=other, rows=other[10:20], turned=other.t())
    snapshot.restore({"s": live})
    assert live["base"] is other
    assert torch.equal(other.nan_to_num(5), base.nan_to_num(5))
    live["rows"].fill_(3)
    assert (other[10:20] == 3).all()
