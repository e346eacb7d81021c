"""Restoring into tensors that overlap themselves, or each other under other dtypes."""

from __future__ import annotations

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import MismatchError
from tests.support.bitwise import assert_same, raw

N = 70_000  # several chunks, so several threads fill at once


@pytest.fixture
def store(request):
    return Store(f"memory://{request.node.nodeid}", create=NewStore(chunk_size=64 << 10))


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
    with pytest.raises(MismatchError, match="overlaps itself; nothing was written"):
        snapshot.read_object("s/t", obj_out=out, index=index)
    assert not out.any()
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


class Words(torch.nn.Module):
    """Three tensors of one shape, some of them tied, and one beside them."""

    def __init__(self, tied=(), dtype=torch.float32):
        super().__init__()
        for name in ("a", "b", "c", "beside"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(300, 100, dtype=dtype)))
        for name in tied:
            self.register_parameter(name, self.a)


def fill(snapshot, module, way, **options):
    if way == "restore":
        return snapshot.restore({"m": module}, **options)
    return snapshot.load_into(module, "m", **options)


WAYS = pytest.mark.parametrize("way", ["restore", "load_into"])


@WAYS
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("tied", ["b", "bc"])
def test_an_untied_checkpoint_does_not_fit_a_tied_model(store, way, reuse, tied):
    """One of its values would be lost, and which one is chance. Two of three are equal here."""
    untied = Words()
    untied.c = untied.a
    snapshot = store.take({"m": untied}, "step")
    live = Words(tied)
    before = {name: raw(tensor) for name, tensor in live.state_dict().items()}
    paths = ", ".join(f"m/{name}" for name in ("a", *tied))
    told = f"{paths}: share memory here, but are not the same in the snapshot"
    with pytest.raises(MismatchError, match=told):
        fill(snapshot, live, way, reuse=reuse)
    assert {name: raw(tensor) for name, tensor in live.state_dict().items()} == before
    report = fill(snapshot, live, way, reuse=reuse, strict=False)
    assert [line.startswith(told) for line in report.mismatched] == [True]
    assert not report.missing
    assert not report.unexpected
    assert raw(live.a) == before["a"]
    assert live.b is live.a
    assert raw(live.beside) == raw(untied.beside)
    assert raw(live.c) == (before["c"] if "c" in tied else raw(untied.a))


@WAYS
def test_a_tied_checkpoint_in_a_model_that_is_not(store, way):
    tied, live = Words("bc"), Words()
    assert not fill(store.take({"m": tied}, "step"), live, way)
    assert raw(live.a) == raw(live.b) == raw(live.c) == raw(tied.a)
    live.b.data.zero_()
    assert raw(live.a) == raw(tied.a)


@WAYS
def test_tied_tensors_whose_values_agree_once_they_are_cast(store, way):
    taken = Words(dtype=torch.bfloat16)
    taken.b = torch.nn.Parameter(taken.a.detach().float())
    snapshot = store.take({"m": taken}, "step")
    live = Words("b")
    assert not fill(snapshot, live, way)
    assert live.b is live.a
    assert raw(live.a) == raw(taken.b)
    with pytest.raises(MismatchError, match="m/a, m/b: share memory here"):
        fill(store.take({"m": Words(dtype=torch.bfloat16)}, "other"), live, way)


class Viewed(torch.nn.Module):
    """A buffer that is a part of a parameter, and one that is the parameter turned."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(300, 100))
        self.register_buffer("rows", self.weight.detach()[5:9])
        self.register_buffer("turned", self.weight.detach().t())
        self.register_buffer("even", torch.randn(600, 100)[::2])
        self.register_buffer("odd", self.even.as_strided((300, 100), (200, 1), 100))


@WAYS
def test_views_in_a_module(store, way):
    taken, live = Viewed(), Viewed()
    assert not fill(store.take({"m": taken}, "step"), live, way)
    assert_same(dict(live.state_dict()), dict(taken.state_dict()))
    live.weight.data.zero_()
    assert not live.rows.any()
    assert not live.turned.any()
    taken.rows = torch.zeros(4, 100)
    before = {name: raw(tensor) for name, tensor in live.state_dict().items()}
    with pytest.raises(MismatchError, match="m/rows, m/turned, m/weight: share memory here"):
        fill(store.take({"m": taken}, "apart"), live, way)
    assert {name: raw(tensor) for name, tensor in live.state_dict().items()} == before


@pytest.mark.parametrize("with_module", [True, False])
def test_what_is_left_alone_is_not_filled_through_an_alias(store, with_module):
    taken = {"m": Words(), "best": StateDict(Words().state_dict())}
    snapshot = store.take(taken, "step")
    module = Words("b")
    live = {"m": module} if with_module else {}
    live["best"] = StateDict(module.state_dict())
    before = raw(module.a)
    report = snapshot.restore(live, strict=False)
    assert len(report.mismatched) == with_module
    assert raw(module.a) == before
    assert_same(dict(live["best"]), dict(taken["best"]))
    # Where nothing contradicts that, an alias is filled in place.
    filled = taken["m"].beside if with_module else taken["best"]["beside"]
    assert raw(module.beside) == raw(filled)


def test_two_modules_that_share_a_tensor(store):
    actor, critic = Words(), Words()
    snapshot = store.take({"actor": actor, "critic": critic}, "apart")
    live = {"actor": Words(), "critic": Words()}
    live["critic"].b = live["actor"].a
    with pytest.raises(MismatchError, match="actor/a, critic/b: share memory here"):
        snapshot.restore(live)
    before = raw(live["actor"].a)
    report = snapshot.restore(live, strict=False)
    assert len(report.mismatched) == 1
    assert raw(live["actor"].a) == before
    assert raw(live["critic"].a) == raw(critic.a)
    critic.b = actor.a
    assert not store.take({"actor": actor, "critic": critic}, "shared").restore(live)
    assert raw(live["critic"].b) == raw(actor.a)


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
