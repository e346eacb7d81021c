"""Taking and restoring app states: in place, strictly, or as far as it fits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from casnap import RNGState, Snapshot, StateDict
from casnap.errors import SnapshotExistsError, UnsupportedTypeError
from tests.support.bitwise import assert_same, raw


@pytest.fixture
def tmp_path(disk_path):
    return disk_path


def net(width=300):
    return nn.Sequential(
        nn.Linear(20, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5)
    )


def bits(app_state):
    """Return every tensor's bytes, to see that nothing was written."""
    return {
        (key, name): raw(value)
        for key, stateful in app_state.items()
        for name, value in stateful.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


# --- there and back ---------------------------------------------------------------------------


def test_the_readme_of_torchsnapshots_users(tmp_path):
    """Only the import changes."""
    model = net()
    optim = torch.optim.Adagrad(model.parameters(), lr=0.1)
    progress = StateDict(current_epoch=3)
    app_state = {"model": model, "optim": optim, "progress": progress}
    snapshot = Snapshot.take(path=str(tmp_path / "run" / "step_1"), app_state=app_state)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    other = net()
    progress["current_epoch"] = 9
    Snapshot(path=str(tmp_path / "run" / "step_1")).restore(
        {"model": other, "optim": torch.optim.Adagrad(other.parameters()), "progress": progress}
    )
    assert_same(dict(other.state_dict()), before)
    assert progress["current_epoch"] == 3
    assert_same(snapshot.read_object("0/model/0.weight"), before["0.weight"])
    assert snapshot.read_object("0/progress/current_epoch") == 3
    assert snapshot.metadata.world_size == 1
    assert "0/model/0.weight" in snapshot.metadata.manifest
    assert (snapshot.pg, snapshot.path) == (None, str(tmp_path / "run" / "step_1"))
    with pytest.raises(KeyError, match="absent"):
        snapshot.get_state_dict_for_key("absent")


def test_metadata_and_stats(store):
    state = {"s": StateDict(x=torch.zeros(100_000))}
    snapshot = store.take(state, "a", metadata={"loss": 2.5, "notes": ["ü"]})
    for found in (snapshot, store["a"]):
        assert found.metadata.user == {"loss": 2.5, "notes": ["ü"]}
        assert found.stats.logical_bytes >= 400_000
        assert found.stats.entries >= 2
        assert len(found.commit_id) == 32
    with pytest.raises(Exception, match="JSON"):
        store.take(state, "b", metadata={"x": object()})
    with pytest.raises(Exception, match="app state"):
        store.take(state, "b", metadata={"x": "y" * (65 << 10)})
    assert [s.name for s in store.snapshots()] == ["a"]


def test_progress_is_told(store):
    state = {"s": StateDict(x=torch.randn(500_000), y=torch.randn(3, 3))}
    for work, what in (
        (lambda tell: store.take(state, "a", progress=tell), "storing"),
        (lambda tell: store["a"].restore(state, progress=tell), "reading"),
        (lambda tell: store.async_take(state, "b", progress=tell).wait(), "storing"),
    ):
        told = []
        work(lambda *call, told=told: told.append(call))
        _, done, total = max(told)
        assert {(w, t) for w, _, t in told} == {(what, total)}
        assert 2_000_000 <= done <= total < 2_100_000


def test_an_empty_app_state(store):
    snapshot = store.take({}, "nothing")
    assert snapshot.get_manifest() == {}
    assert not snapshot.restore({})
    store.take({"s": StateDict()}, "empty").restore({"s": StateDict(x=1)})


def test_other_statefuls(store):
    class Anything:
        def __init__(self):
            self.state = None

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    for state in ([torch.arange(3), {"a": 1}], torch.randn(50), 7, None, {1: {2: 3}}):
        anything, other = Anything(), Anything()
        anything.state = state
        store.take({"x": anything}, "step", overwrite=True).restore({"x": other})
        assert_same(other.state, state)


@pytest.mark.parametrize("value", [{"a": 1}, torch.ones(2), 3, None, object()])
def test_what_is_not_stateful(store, value):
    whole = {"model": nn.Linear(2, 2), "x": value}
    for take in (store.take, store.async_take):
        with pytest.raises(TypeError, match=r"'x'.*StateDict") as e:
            take(whole, "step")
        assert isinstance(e.value, UnsupportedTypeError)
    assert store.snapshots() == []
    snapshot = store.take({"model": nn.Linear(2, 2), "x": StateDict(a=1)}, "step")
    before = bits({"model": whole["model"]})
    with pytest.raises(TypeError, match=r"'x'.*StateDict"):
        snapshot.restore(whole)
    assert bits({"model": whole["model"]}) == before


def test_a_stateful_that_fails(store):
    class Failing(StateDict):
        def state_dict(self):
            raise ZeroDivisionError("on purpose")

    for take in (store.take, store.async_take):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            take({"s": Failing()}, "step")
    assert store.snapshots() == []
    with pytest.raises(SnapshotExistsError):
        store.take({}, "step") and store.take({}, "step")


# --- in place ---------------------------------------------------------------------------------


def test_a_module_keeps_its_memory(store):
    model, other = net(), net()
    snapshot = store.take({"m": model}, "step")
    where = {n: t.data_ptr() for n, t in other.state_dict().items()}
    assert not snapshot.restore({"m": other})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert {n: t.data_ptr() for n, t in other.state_dict().items()} == where


def test_a_state_dict_keeps_its_tensors(store):
    def state():
        return StateDict(
            plain=torch.randn(200, 100),
            small=torch.randn(3),
            parameter=nn.Parameter(torch.randn(200, 100)),
            requires_grad=torch.randn(30, requires_grad=True),
            deep={"list": [torch.randn(40), {"t": torch.randn(50)}]},
        )

    taken, live = state(), state()
    snapshot = store.take({"s": taken}, "step")
    plain, parameter, leaf = live["plain"], live["parameter"], live["requires_grad"]
    deep = live["deep"]["list"][1]["t"]
    snapshot.restore({"s": live})
    assert_same(dict(live), dict(taken))
    assert deep.data_ptr() == live["deep"]["list"][1]["t"].data_ptr()
    # The very objects: an optimizer may refer to them.
    assert live["plain"] is plain
    assert live["parameter"] is parameter
    assert live["requires_grad"] is leaf
    assert leaf.is_leaf


def test_an_optimizer_keeps_its_memory(store):
    def trained():
        model = net()
        optim = torch.optim.Adam(model.parameters())
        model(torch.randn(8, 20)).sum().backward()
        optim.step()
        return model, optim

    model, optim = trained()
    snapshot = store.take({"m": model, "o": optim}, "step")
    model, other = trained()
    where = [s["exp_avg"].data_ptr() for s in other.state_dict()["state"].values()]
    snapshot.restore({"m": model, "o": other})
    assert_same(other.state_dict(), optim.state_dict())
    assert [s["exp_avg"].data_ptr() for s in other.state_dict()["state"].values()] == where


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 512)
        self.head = nn.Linear(512, 64, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_stay_tied(store):
    model, other = Tied(), Tied()
    snapshot = store.take({"m": model}, "step")
    size = model.head.weight.nbytes
    assert size <= snapshot.stats.new_bytes < size * 1.1
    assert snapshot.stats.logical_bytes >= 2 * size
    manifest = snapshot.get_manifest()
    assert manifest["0/m/head.weight"].payload == manifest["0/m/embedding.weight"].payload
    where = other.head.weight.data_ptr()
    snapshot.restore({"m": other})
    assert other.head.weight is other.embedding.weight
    assert other.head.weight.data_ptr() == where
    assert raw(other.head.weight) == raw(model.head.weight)


def test_overlapping_views_are_stored_once_and_restored_in_place(store):
    def state():
        base = torch.randn(8, 16384)  # a row is a chunk
        return StateDict(
            base=base,
            again=base,
            flat=base.view(-1),
            rows=base[2:5],
            row=base[3],
            cube=base.view(2, 4, 16384),
            same=base.detach(),
        )

    taken, live = state(), state()
    snapshot = store.take({"s": taken}, "step")
    assert taken["base"].nbytes <= snapshot.stats.new_bytes < taken["base"].nbytes * 1.1
    where = {n: t.data_ptr() for n, t in live.items()}
    snapshot.restore({"s": live})
    assert {n: t.data_ptr() for n, t in live.items()} == where
    assert_same(dict(live), dict(taken))
    live["flat"].zero_()
    assert not live["row"].any()
    assert not live["cube"].any()


def test_chunks_that_lie_unaligned_in_their_pack(store):
    """Small ones are packed closely; torch crashed where elements were copied from there."""
    odd = {f"odd {i}": torch.full((65 + 2 * i,), i, dtype=torch.uint8) for i in range(9)}
    numbers = {f"z {i}": torch.randn(5, 700 + i, dtype=torch.complex128) for i in range(9)}
    mixed = {k: v for pair in zip(odd.items(), numbers.items(), strict=True) for k, v in pair}
    snapshot = store.take({"s": StateDict(mixed)}, "step")
    for dtype in (torch.complex128, torch.complex64):
        live = StateDict(
            {n: torch.zeros(t.shape[::-1], dtype=dtype).t() for n, t in numbers.items()}
        )
        where = {n: t.data_ptr() for n, t in live.items()}
        snapshot.restore({"s": live})
        for name, tensor in numbers.items():
            assert live[name].data_ptr() == where[name]
            assert raw(live[name]) == raw(tensor.to(dtype))
            for index in (0, (..., 3)):
                assert raw(snapshot.read_object(f"s/{name}", index=index)) == raw(tensor[index])


def test_what_cannot_be_filled_in_place_is_replaced(store):
    """Expanded, conj and other odd tensors: a restore must not write one element for many."""
    taken = {
        "expanded": torch.randn(40, 500),
        "conj": torch.randn(40, 500, dtype=torch.complex64),
        "shape": torch.randn(40, 500),
        "meta": torch.randn(40, 500),
        "kind": torch.randn(40, 500),
    }
    snapshot = store.take({"s": StateDict(taken)}, "step")
    expanded = torch.zeros(1, 500)
    live = StateDict(
        expanded=expanded.expand(40, 500),
        conj=torch.zeros(40, 500, dtype=torch.complex64).conj(),
        shape=torch.zeros(3),
        meta=torch.empty(40, 500, device="meta"),
        kind="text",
    )
    snapshot.restore({"s": live})
    assert_same(dict(live), taken)
    assert not expanded.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_cast(store, dtype):
    model = net()
    snapshot = store.take({"m": model, "s": StateDict(x=torch.arange(5))}, "step")
    other = net().to(dtype)
    live = StateDict(x=torch.zeros(5))
    where = {n: t.data_ptr() for n, t in other.state_dict().items()}
    snapshot.restore({"m": other, "s": live})
    expected = {k: v.to(other.state_dict()[k].dtype) for k, v in model.state_dict().items()}
    assert_same(dict(other.state_dict()), expected)
    assert {n: t.data_ptr() for n, t in other.state_dict().items()} == where
    assert_same(live["x"], torch.arange(5.0))


def test_the_live_state_need_not_be_storable(store):
    """A restore does not check whether the state could be taken."""
    from collections import defaultdict

    snapshot = store.take({"s": StateDict(x=torch.ones(3))}, "step")
    live = StateDict(x=torch.zeros(3), d=defaultdict(lambda: 0), k={object(): 1}, o=object())
    x, others = live["x"], {n: live[n] for n in "dko"}
    snapshot.restore({"s": live})
    assert raw(x) == raw(torch.ones(3))
    assert live.data == {"x": x, **others}
    assert live["x"] is x


def test_the_order_of_the_app_state_is_that_of_loading(store):
    calls = []

    class Noting(StateDict):
        def load_state_dict(self, state_dict):
            calls.append(state_dict["name"])

    state = {"z": Noting(name="z"), "rng": RNGState(), "a": Noting(name="a"), "m": Noting(name="m")}
    snapshot = store.take(state, "step")
    snapshot.restore(state)
    assert calls == ["z", "a", "m"]


# --- random states ----------------------------------------------------------------------------


class Drawing(StateDict):
    """Draws from every generator whenever it is asked or told something."""

    def state_dict(self):
        draw()
        return super().state_dict()

    def load_state_dict(self, state_dict):
        draw()
        super().load_state_dict(state_dict)


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()


@pytest.mark.parametrize("order", ["rng first", "rng last"])
def test_random_states_are_captured_first_and_restored_last(store, order):
    state = {"a": Drawing(x=1), "z": Drawing(y=2)}
    state = {"rng": RNGState(), **state} if order == "rng first" else {**state, "rng": RNGState()}
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    draw()
    snapshot = store.take(state, "step")
    after_take = draw()
    torch.manual_seed(4), random.seed(5), np.random.seed(6)
    snapshot.restore(state)
    assert draw() == after_take
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    draw()
    assert draw() == after_take, "the take itself must leave no trace"


def test_a_failed_take_leaves_no_trace_in_the_random_state(store):
    torch.manual_seed(1), random.seed(0), np.random.seed(0)
    expected = draw()
    torch.manual_seed(1), random.seed(0), np.random.seed(0)
    with pytest.raises(TypeError):
        store.take({"a": Drawing(x=object()), "rng": RNGState()}, "step")
    assert draw() == expected


def test_two_random_states(store):
    two = {"a": RNGState(), "b": RNGState()}
    for take in (store.take, store.async_take):
        with pytest.raises(RuntimeError, match="one RNGState"):
            take(two, "step")
    snapshot = store.take({"a": RNGState()}, "step")
    with pytest.raises(RuntimeError, match="one RNGState"):
        snapshot.restore(two)
