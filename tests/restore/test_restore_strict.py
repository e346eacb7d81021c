"""Restoring what does not fit: one complete error beforehand, or a report of what was left."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from casnap import NewStore, RNGState, StateDict, Store
from casnap.errors import MismatchError, StoreError
from casnap.integrations.trainers import Value
from tests.support.bitwise import assert_same, raw
from tests.support.versioned import versioned


@pytest.fixture
def store(request):
    return Store(f"memory://{request.node.nodeid}", create=NewStore(chunk_size=64 << 10))


class Net(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


OLD = {"same": (300, 100), "small": (3,), "gone": (5,), "wider": (300, 100), "turned": (4, 7)}
NEW = {"same": (300, 100), "small": (3,), "added": (5,), "wider": (300, 101), "turned": (7, 4)}


def live():
    return {
        "a": Net(**NEW),
        "b": Net(x=(3, 3), y=(2,)),
        "fine": Net(w=(200, 100)),
        "progress": StateDict(step=0, t=torch.zeros(50_000)),
        "absent": StateDict(k=torch.zeros(3)),
    }


@pytest.fixture
def snapshot(store):
    state = {
        "a": Net(**OLD),
        "b": Net(x=(3, 3), z=(2,)),
        "fine": Net(w=(200, 100)),
        "progress": StateDict(step=7, t=torch.ones(50_000)),
        "not asked for": StateDict(q=1),
    }
    snapshot = store.take(state, "step")
    snapshot.taken = state
    return snapshot


def bits(app_state):
    return {
        key: {n: raw(t) for n, t in s.state_dict().items() if isinstance(t, torch.Tensor)}
        for key, s in app_state.items()
    }


def test_one_error_lists_everything_and_nothing_was_written(snapshot):
    state = live()
    before = bits(state)
    with pytest.raises(MismatchError) as e:
        snapshot.restore(state)
    assert isinstance(e.value, RuntimeError)
    message = str(e.value)
    missing, rest = message.split("missing in the snapshot")[1].split("unexpected in the snapshot")
    unexpected, shapes = rest.split("of another shape, size or kind")
    assert all(p in missing for p in ("a/added", "b/y", "absent"))
    assert all(p in unexpected for p in ("a/gone", "b/z"))
    assert all(p in shapes for p in ("a/wider", "(300, 101)", "(300, 100)", "a/turned", "(7, 4)"))
    found, _, keys = message.partition("The snapshot has the keys ")
    assert "not asked for" not in found
    assert keys.startswith("a, b, fine, not asked for, progress. rename= maps them to others.\n")
    message = found + keys.partition("\n")[2]
    assert "strict=False" in message
    for fits in ("a/same", "fine", "progress"):
        assert fits not in message
    assert bits(state) == before
    assert state["progress"]["step"] == 0


def test_not_strict_restores_what_fits_and_reports_the_rest(snapshot):
    state = live()
    before = bits(state)
    report = snapshot.restore(state, strict=False)
    assert report
    assert sorted(report.missing) == ["a/added", "absent", "b/y"]
    assert sorted(report.unexpected) == ["a/gone", "b/z"]
    assert sorted(p.partition(":")[0] for p in report.mismatched) == ["a/turned", "a/wider"]
    after, taken = bits(state), bits(snapshot.taken)
    assert after["fine"] == taken["fine"]
    assert after["progress"] == taken["progress"]
    assert after["a"]["same"] == taken["a"]["same"]
    assert after["a"]["small"] == taken["a"]["small"]
    assert after["b"]["x"] == taken["b"]["x"]
    for name in ("added", "wider", "turned"):
        assert after["a"][name] == before["a"][name]
    assert after["b"]["y"] == before["b"]["y"]
    assert after["absent"] == before["absent"]
    assert state["progress"]["step"] == 7


def test_a_container_in_place_of_a_tensor(store):
    class Extra(Net):
        def get_extra_state(self):
            return {"version": 3, "table": torch.arange(20_000)}

        def set_extra_state(self, state):
            self.extra = state

    snapshot = store.take({"m": Extra(w=(3, 3))}, "step")
    other = Extra(w=(3, 3))
    snapshot.restore({"m": other})
    assert_same(other.extra, {"version": 3, "table": torch.arange(20_000)})
    with pytest.raises(MismatchError, match="_extra_state"):
        snapshot.restore({"m": Net(w=(3, 3))})
    assert snapshot.restore({"m": Net(w=(3, 3))}, strict=False).unexpected == ["m/_extra_state"]


def test_a_value_in_place_of_a_tensor(store):
    old = {"m": StateDict(a=torch.ones(3), w=7)}
    snapshot = store.take(old, "step")
    new = Net(a=(3,), w=(3,))
    before = bits({"m": new})
    told = "m/w: a tensor here, a value of kind int in the snapshot"
    with pytest.raises(MismatchError, match=told):
        snapshot.restore({"m": new})
    assert bits({"m": new}) == before
    assert snapshot.restore({"m": new}, strict=False).mismatched == [told]
    assert new.a.tolist() == [1, 1, 1]


def test_a_module_on_the_meta_device_holds_nothing_to_restore_into(store):
    """torch copies into it without effect; a restore must not report that as success."""
    snapshot = store.take({"m": nn.Linear(2, 3)}, "step")
    with torch.device("meta"):
        hollow = nn.Linear(2, 3)
    with pytest.raises(MismatchError, match="meta"):
        snapshot.restore({"m": hollow})
    report = snapshot.restore({"m": hollow}, strict=False)
    assert [m.partition(":")[0] for m in report.mismatched] == ["m/bias", "m/weight"]
    hollow.to_empty(device="cpu")
    snapshot.restore({"m": hollow})
    assert_same(dict(hollow.state_dict()), dict(snapshot.get_state_dict_for_key("m")))


def test_a_state_dict_keeps_a_field_that_the_snapshot_lacks(store):
    """So a newer program can go on; what is nested is replaced as a whole, as in TorchSnapshot."""
    old = StateDict(step=7, nested={"a": 1}, t=torch.ones(30_000))
    snapshot = store.take({"s": old}, "step")
    new = StateDict(step=0, nested={"a": 0, "b": 2}, t=torch.zeros(30_000), best=0.5)
    held = new.data
    assert not snapshot.restore({"s": new})
    assert_same(dict(new), {**old.data, "best": 0.5})
    assert new.data is held


# --- modules that change the state on its way -------------------------------------------------


def hooked(**shapes):
    def rename(module, state_dict, prefix, *_):
        state_dict[prefix + "w"] = state_dict.pop(prefix + "weight")

    module = Net(**shapes)
    module.register_load_state_dict_pre_hook(rename)
    return module


def shifted(**shapes):
    """A new first layer shifts the other layers by one."""

    def shift(module, state_dict, prefix, *_):
        for n in (2, 1):
            state_dict[f"{prefix}w{n}"] = state_dict.pop(f"{prefix}w{n - 1}")
        state_dict[f"{prefix}w0"] = torch.zeros(300, 100)

    module = Net(**shapes)
    module.register_load_state_dict_pre_hook(shift)
    return module


class Shifted(Net):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        moved = {f"w{n + 1}": state_dict[f"w{n}"] for n in range(2)}
        return super().load_state_dict({"w0": torch.zeros(300, 100), **moved}, strict, assign)


@pytest.mark.parametrize("make", [shifted, Shifted])
def test_a_module_that_shifts_its_layers(store, make):
    """Were the old layers restored in place first, one would be copied from what replaced it."""
    old = Net(w0=(300, 100), w1=(300, 100))
    snapshot = store.take({"m": old}, "step")
    new = make(w0=(300, 100), w1=(300, 100), w2=(300, 100))
    snapshot.restore({"m": new})
    assert not new.w0.any()
    assert raw(new.w1) == raw(old.w0)
    assert raw(new.w2) == raw(old.w1)


def test_a_mismatch_that_only_the_module_knows(store):
    """A module with a hook compares by itself; its own error is not hidden."""
    snapshot = store.take({"m": Net(weight=(300, 100), b=(3,))}, "step")
    with pytest.raises(RuntimeError, match="added"):
        snapshot.restore({"m": hooked(w=(300, 100), b=(3,), added=(2,))})
    report = snapshot.restore({"m": hooked(w=(300, 100), b=(3,), added=(2,))}, strict=False)
    assert report.missing == ["m/added"]


def test_a_load_state_dict_that_knows_no_strict(store):
    class Own(Net):
        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)

    old = Net(w=(3, 3))
    snapshot = store.take({"m": old}, "step")
    for strict in (True, False):
        new = Own(w=(3, 3))
        snapshot.restore({"m": new}, strict=strict)
        assert raw(new.w) == raw(old.w)


def test_keys_are_renamed(store):
    old = {"model": Net(w=(3,)), "ema/1": Net(w=(3,)), "s": StateDict(n=1)}
    snapshot = store.take(old, "step")
    for rename in (
        {"ema/1": "net", "model": "other"},
        lambda key: {"ema/1": "net", "model": None}.get(key, key),
    ):
        live = {"net": Net(w=(3,)), "s": StateDict()}
        assert not snapshot.restore(live, rename=rename)
        assert raw(live["net"].w) == raw(old["ema/1"].w)
        assert live["s"]["n"] == 1
    swapped = {"model": Net(w=(3,)), "ema/1": Net(w=(3,))}
    snapshot.restore(swapped, rename={"model": "ema/1", "ema/1": "model"})
    assert raw(swapped["model"].w) == raw(old["ema/1"].w)
    assert raw(swapped["ema/1"].w) == raw(old["model"].w)
    live = {"model": Net(w=(3,)), "net": Net(w=(3,))}
    before = bits(live)
    with pytest.raises(MismatchError, match=r"missing.*\n    model\n.*the keys ema/1, model, s"):
        snapshot.restore(live, rename={"model": "net"})
    with pytest.raises(MismatchError, match="gives ema/1 and model the same name 'model'"):
        snapshot.restore(live, rename={"ema/1": "model"})
    assert bits(live) == before
    assert snapshot.restore(live, rename={"model": "net"}, strict=False).missing == ["model"]
    assert raw(live["net"].w) == raw(old["model"].w)


class Failing(StateDict):
    def load_state_dict(self, state_dict):
        raise self["error"]


@pytest.mark.parametrize("error", [ZeroDivisionError("on purpose"), StoreError("on purpose")])
def test_an_error_of_load_state_dict_names_its_key_and_what_was_restored(store, error):
    x = torch.ones(30_000)
    state = {"m": Net(w=(3, 3)), "s/1": StateDict(x=x), "last": StateDict(x=x), "small": Net()}
    snapshot = store.take(state, "step")
    live = {
        "m": Net(w=(3, 3)),
        "s/1": Failing(x=torch.zeros(30_000), error=error),
        "last": StateDict(x=torch.zeros(30_000)),
    }
    kind = StoreError if isinstance(error, StoreError) else MismatchError
    with pytest.raises(kind) as e:
        snapshot.restore(live)
    assert str(e.value) == (
        f"{snapshot.contents.label}: load_state_dict() of 's/1' raised {type(error).__name__}: on "
        "purpose. Restored before: m; only tensors were filled in place of: last"
    )
    assert e.value.__cause__ is error
    assert raw(live["m"].w) == raw(state["m"].w)


def adam(*groups):
    sized = [{"params": [nn.Parameter(torch.zeros(3)) for _ in range(n)]} for n in groups]
    optimizer = torch.optim.Adam(sized)
    for group in sized:
        for parameter in group["params"]:
            parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def everything_else():
    return {
        "model": Net(w=(3, 3)),
        "scheduler": torch.optim.lr_scheduler.StepLR(adam(1), 3),
        "s": StateDict(x=torch.ones(300)),
    }


@pytest.mark.parametrize(
    ("taken", "live", "told"),
    [
        (adam(2, 1), adam(3), "o/param_groups: 1 parameter groups here, 2 in the snapshot"),
        (adam(2, 1), adam(2, 3), "o/param_groups/1: 3 parameters here, 1 in the snapshot"),
        (StateDict(x=1), adam(3), "o/param_groups: not in the snapshot; an optimizer needs it"),
        (Value(7), adam(3), "o: a value of kind int in the snapshot; Adam loads a dict"),
        (Value(7), StateDict(), "o: a value of kind int in the snapshot; StateDict loads a dict"),
        (Value([1]), StateDict(), "o: a value of kind list in the snapshot"),
        (Value(torch.ones(3)), Net(), "o: a tensor in the snapshot; Net loads a dict"),
        (Value("x"), RNGState(), "o: a value of kind str in the snapshot; RNGState loads a dict"),
        (StateDict(x=1), RNGState(), "o: no random state of torch in the snapshot"),
    ],
)
def test_what_a_loader_would_refuse_is_found_before_anything_is_written(store, taken, live, told):
    old = everything_else()
    snapshot = store.take({**old, "o": taken}, "step")
    new = {**everything_else(), "o": live}
    new["s"]["x"].zero_()
    before = bits({"model": new["model"], "s": new["s"]})
    with pytest.raises(MismatchError) as e:
        snapshot.restore(new)
    assert f"of another shape, size or kind (1):\n    {told}" in str(e.value)
    assert bits({"model": new["model"], "s": new["s"]}) == before
    report = snapshot.restore(new, strict=False)
    assert [told in line for line in report.mismatched] == [True]
    assert bits(new | {"o": StateDict()}) == bits(old | {"o": StateDict()})


def trained(optimizer_of, *, steps=1, **shapes):
    module = Net(**shapes)
    optimizer = optimizer_of(module.parameters())
    for _ in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"m": module, "o": optimizer}


MOMENTS = ("exp_avg", "exp_avg_sq")
OLD_HEAD = {"body": (300, 100), "head": (40, 100), "bias": (40,)}
NEW_HEAD = {"body": (300, 100), "head": (30, 100), "bias": (30,)}


def head_of(state):
    return {path: value for path, value in state["o"].state_dict()["state"].items() if path > 0}


@pytest.mark.parametrize("steps", [0, 1])
def test_moments_of_another_shape_are_named_with_the_rest(store, steps):
    old = trained(torch.optim.AdamW, **OLD_HEAD)
    snapshot = store.take(old, "step")
    new = trained(torch.optim.AdamW, steps=steps, **NEW_HEAD)
    before = bits(new), repr(new["o"].state_dict())
    with pytest.raises(MismatchError) as e:
        snapshot.restore(new)
    moments = [f"o/state/{i}/{name}" for i in (1, 2) for name in MOMENTS]
    told = [line.strip() for line in str(e.value).splitlines() if " here, " in line]
    assert [line.partition(":")[0] for line in told] == ["m/bias", "m/head", *moments]
    assert told[-1] == (
        "o/state/2/exp_avg_sq: its parameter m/bias has (30,) here, (40,) in the snapshot"
    )
    assert (bits(new), repr(new["o"].state_dict())) == before
    report = snapshot.restore(new, strict=False)
    assert report.mismatched == told
    assert not head_of(new)
    body = new["m"].body
    assert_same(new["o"].state[body], old["o"].state[old["m"].body])
    for parameter in new["m"].parameters():
        parameter.grad = torch.ones_like(parameter)
    new["o"].step()
    assert new["o"].state[new["m"].head]["step"] == 1
    assert new["o"].state[body]["step"] == 2


class LowRank(torch.optim.Optimizer):
    """Its moments are factors, projections, blocks: none has the shape of its parameter."""

    def __init__(self, params, rank=4):
        super().__init__(params, {"rank": rank})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.randn(group["rank"], parameter.shape[-1]),
                    "rows": torch.randn(parameter.shape[:1]),
                    "blocks": torch.randn(parameter.numel() // 64),
                }


class Whole(torch.optim.Optimizer):
    """Its moments have the shapes of their parameters, but nobody knows it."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"m": torch.randn_like(parameter), "k": torch.ones(3)}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_moments_that_never_had_the_shape_of_their_parameter(store, steps, alone):
    shapes = {"body": (300, 100), "head": (40, 100)}
    old = trained(LowRank, **shapes)
    snapshot = store.take(old, "step")
    new = trained(lambda params: LowRank(params, rank=7), steps=steps, **shapes)
    assert not snapshot.restore({"o": new["o"]} if alone else new)
    assert_same(new["o"].state_dict(), old["o"].state_dict())


class WithOwnMoments(torch.optim.AdamW):
    """It has torch's step, and moments of its own that other optimizers of torch have as well."""

    def __init__(self, params):
        super().__init__(params)
        self.register_step_post_hook(lambda *_: self.note())

    def note(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state |= {"sum": torch.tensor(3.0), "variance": torch.rand(parameter.shape[:1])}


@pytest.mark.parametrize("steps", [0, 1])
def test_moments_of_a_subclass_may_have_names_of_other_optimizers(store, steps):
    shapes = {"body": (300, 100), "head": (40, 100)}
    old = trained(WithOwnMoments, **shapes)
    snapshot = store.take(old, "step")
    new = trained(WithOwnMoments, steps=steps, **shapes)
    assert not snapshot.restore(new)
    assert_same(new["o"].state_dict(), old["o"].state_dict())


@pytest.mark.parametrize("make", [LowRank, Whole])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_module_tells_which_moments_are_of_another_shape(store, make, steps):
    snapshot = store.take(trained(make, **OLD_HEAD), "step")
    new = trained(make, steps=steps, **NEW_HEAD)
    report = snapshot.restore(new, strict=False)
    told = {line.partition(":")[0].rpartition("/")[0] for line in report.mismatched}
    assert told == {"m", "o/state/1", "o/state/2"}
    assert not head_of(new)


def test_moments_of_an_optimizer_alone(store):
    """What it holds tells the shapes, of an optimizer that is not known as well."""
    snapshot = store.take(trained(Whole, **OLD_HEAD), "step")
    new = trained(Whole, **NEW_HEAD)
    before = repr(new["o"].state_dict())
    with pytest.raises(MismatchError, match=r"o/state/1/m: \(30, 100\) here, \(40, 100\) in the"):
        snapshot.restore({"o": new["o"]})
    assert repr(new["o"].state_dict()) == before


def test_groups_in_another_order(store):
    """torch goes by the order, so a moment comes to another parameter."""
    snapshot = store.take(trained(torch.optim.Adam, **OLD_HEAD), "step")
    new = trained(torch.optim.Adam, steps=0, **{n: OLD_HEAD[n] for n in ("head", "body", "bias")})
    report = snapshot.restore(new, strict=False)
    told = [line.partition(":")[0] for line in report.mismatched]
    assert told == [f"o/state/{i}/{name}" for i in (0, 1) for name in MOMENTS]
    assert list(new["o"].state) == [new["m"].bias]


LONG = {f"p{i}": (3,) for i in range(1200)}
"""Parameters of a group whose list is one value in the snapshot."""


@pytest.mark.parametrize("steps", [0, 1])
def test_a_group_of_many_parameters(store, steps):
    old = trained(torch.optim.AdamW, **LONG)
    snapshot = store.take(old, "step")
    new = trained(torch.optim.AdamW, steps=steps, **LONG)
    assert not snapshot.restore(new)
    assert_same(new["o"].state_dict(), old["o"].state_dict())
    with pytest.raises(MismatchError, match="o/param_groups/0: 1201 parameters here, 1200 in the"):
        snapshot.restore({"o": trained(torch.optim.AdamW, more=(3,), **LONG)["o"]})


def test_moments_of_another_shape_in_a_group_of_many_parameters(store):
    old = trained(torch.optim.AdamW, **LONG)
    new = trained(torch.optim.AdamW, steps=0, **{**LONG, "p1100": (4,)})
    report = store.take(old, "step").restore({"o": new["o"]}, strict=False)
    told = [line.partition(":")[0] for line in report.mismatched]
    assert told == [f"o/state/1100/{name}" for name in MOMENTS]
    assert len(new["o"].state) == 1199


def test_moments_by_the_names_of_parameters(store):
    """As get_optimizer_state_dict() has them; torch takes them too, by their order."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    old = trained(torch.optim.Adam, **OLD_HEAD)
    named = get_optimizer_state_dict(old["m"], old["o"])
    snapshot = store.take({"o": StateDict(named)}, "step")
    same = trained(torch.optim.Adam, steps=0, **OLD_HEAD)
    assert not snapshot.restore({"o": same["o"]})
    assert_same(same["o"].state_dict()["state"], old["o"].state_dict()["state"])
    new = trained(torch.optim.Adam, steps=0, **NEW_HEAD)
    with pytest.raises(MismatchError, match=r"o/state/head/exp_avg: \(30, 100\) here"):
        snapshot.restore({"o": new["o"]})


def test_a_sparse_moment_of_another_shape(store):
    def rows(count):
        module = nn.Embedding(count, 4, sparse=True)
        return {"m": module, "o": torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)}

    def step(state):
        state["m"](torch.tensor([1, 2])).sum().backward()
        state["o"].step()

    old, new = rows(10), rows(12)
    step(old)
    snapshot = store.take(old, "step")
    report = snapshot.restore(new, strict=False)
    told = [line.partition(":")[0] for line in report.mismatched]
    assert told == ["m/weight", "o/state/0/momentum_buffer"]
    step(new)


class Named:
    """An optimizer whose state has the names of parameters, as for DCP."""

    def __init__(self, state, flat):
        from torch.distributed.checkpoint import state_dict as forms

        self.both = state["m"], state["o"]
        self.options = forms.StateDictOptions(flatten_optimizer_state_dict=flat)
        self.forms = forms

    def state_dict(self):
        return self.forms.get_optimizer_state_dict(*self.both, options=self.options)

    def load_state_dict(self, state):
        self.forms.set_optimizer_state_dict(*self.both, state, options=self.options)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_moments_of_another_shape_by_name(store, steps, flat):
    old = trained(torch.optim.AdamW, **OLD_HEAD)
    snapshot = store.take({"m": old["m"], "o": Named(old, flat)}, "step")
    same = trained(torch.optim.AdamW, steps=steps, **OLD_HEAD)
    assert not snapshot.restore({"m": same["m"], "o": Named(same, flat)})
    assert_same(same["o"].state_dict()["state"], old["o"].state_dict()["state"])
    new = trained(torch.optim.AdamW, steps=steps, **NEW_HEAD)
    live = {"m": new["m"], "o": Named(new, flat)}
    before = bits(new), repr(live["o"].state_dict())
    with pytest.raises(MismatchError) as e:
        snapshot.restore(live)
    told = [line.strip() for line in str(e.value).splitlines() if " here, " in line]
    start = "o/state." if flat else "o/state/"
    names = [f"{n}{'.' if flat else '/'}{m}" for n in ("head", "bias") for m in MOMENTS]
    assert {line.partition(":")[0] for line in told[2:]} == {start + name for name in names}
    assert (bits(new), repr(live["o"].state_dict())) == before
    assert snapshot.restore(live, strict=False).mismatched == told
    for name in ("head", "bias"):
        moments = new["o"].state[getattr(new["m"], name)]
        assert {moments[m].shape for m in MOMENTS} == {getattr(new["m"], name).shape}
        assert moments["step"] == max(steps, 1)
    assert_same(new["o"].state[new["m"].body], old["o"].state[old["m"].body])
    for parameter in new["m"].parameters():
        parameter.grad = torch.ones_like(parameter)
    new["o"].step()


def test_an_optimizer_whose_hook_changes_the_state(store):
    """Such a hook may make it fit, so nothing is checked before."""
    snapshot = store.take({"o": adam(2, 1)}, "step")

    def join(optimizer, state):
        first, second = state["param_groups"]
        return {**state, "param_groups": [{**first, "params": first["params"] + second["params"]}]}

    joined = adam(3)
    joined.register_load_state_dict_pre_hook(join)
    assert not snapshot.restore({"o": joined})


@pytest.mark.parametrize("keys", ["mo", "om"])
def test_a_module_with_lazy_parameters_and_its_optimizer(store, keys):
    def state():
        lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
        state = {"m": lazy, "o": torch.optim.AdamW(lazy.parameters())}
        return {key: state[key] for key in keys}

    def step(state):
        state["m"](torch.ones(2, 5)).square().sum().backward()
        state["o"].step()
        state["o"].zero_grad()

    built, fresh = state(), state()
    built["m"](torch.ones(2, 5))
    step(built)
    store.take(built, "step").restore(fresh)
    for _ in range(2):
        for key in keys:
            assert_same(fresh[key].state_dict(), built[key].state_dict())
        step(built)
        step(fresh)


# --- a hook on one child ----------------------------------------------------------------------


def with_one_hook(width=100, outputs=300):
    from torch.nn.utils.parametrizations import weight_norm

    return nn.Sequential(Net(w=(300, width)), weight_norm(nn.Linear(100, outputs)), Net(b=(2,)))


def with_patched_loader(**kwargs):
    module = with_one_hook(**kwargs)
    child = module[1]
    child._load_state_dict_pre_hooks.clear()
    original = child._load_from_state_dict

    def patched(*args):
        original(*args)

    child._load_from_state_dict = patched
    return module


@pytest.mark.parametrize("make", [with_one_hook, with_patched_loader])
def test_a_hook_on_one_child_leaves_the_others_checked(store, make):
    snapshot = store.take({"m": make(), "other": StateDict(t=torch.ones(50_000))}, "step")
    live = {"m": make(width=101), "other": StateDict(t=torch.zeros(50_000))}
    live["m"].append(Net(added=(2,)))
    before = bits(live)
    with pytest.raises(MismatchError) as e:
        snapshot.restore(live)
    assert "m/0.w: (300, 101) here, (300, 100) in the snapshot" in str(e.value)
    assert "m/3.added" in str(e.value)
    assert "m/1." not in str(e.value)
    assert bits(live) == before
    report = snapshot.restore(live, strict=False)
    assert report.missing == ["m/3.added"]
    assert [p.partition(":")[0] for p in report.mismatched] == ["m/0.w"]
    after = bits(live)
    assert after["m"]["0.w"] == before["m"]["0.w"]
    taken = snapshot.get_state_dict_for_key("m")
    assert all(after["m"][n] == raw(t) for n, t in taken.items() if n != "0.w")


def test_not_strict_passes_over_shapes_that_only_the_hooked_child_can_tell(store):
    old, new = with_one_hook(), with_one_hook(outputs=301)
    snapshot = store.take({"m": old}, "step")
    before = bits({"m": new})["m"]
    report = snapshot.restore({"m": new}, strict=False)
    weight = "1.parametrizations.weight.original"
    assert [p.partition(":")[0] for p in report.mismatched] == [
        f"m/{n}" for n in ("1.bias", f"{weight}0", f"{weight}1")
    ]
    after = bits({"m": new})["m"]
    taken = {n: raw(t) for n, t in old.state_dict().items()}
    assert after == {n: (before if n.startswith("1.") else taken)[n] for n in taken}
    with pytest.raises(RuntimeError, match="size mismatch"):
        snapshot.restore({"m": new})


def test_a_post_hook_that_forgives_what_is_missing(store):
    """As adapters do that are not in the snapshot of the base model."""

    def forgive(module, incompatible):
        incompatible.missing_keys.clear()

    old, new = nn.Sequential(Net(w=(3, 3))), nn.Sequential(Net(w=(3, 3)))
    new.append(Net(added=(2,)))
    new.register_load_state_dict_post_hook(forgive)
    snapshot = store.take({"m": old}, "step")
    snapshot.restore({"m": new})
    assert raw(new[0].w) == raw(old[0].w)
    new[0] = Net(w=(3, 4))
    before = bits({"m": new})
    with pytest.raises(MismatchError, match=r"m/0\.w"):
        snapshot.restore({"m": new})
    assert bits({"m": new}) == before


class Scales(nn.Module):
    """A module whose extra state has any size, and may be of any dtype."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales

    def get_extra_state(self):
        return self.scales

    def set_extra_state(self, state):
        self.scales = state


@pytest.mark.parametrize("strict", [True, False])
def test_the_extra_state_of_a_module_has_any_size(store, strict):
    kinds = [
        torch.arange(300.0),
        torch.empty(0, dtype=torch.uint8),
        torch.tensor(3, dtype=torch.int8),
        torch.ones(2, 3, dtype=torch.complex64),
        {"scales": torch.arange(9), "count": 9},
        io.BytesIO(b"x" * 300),
        None,
    ]

    def model(values):
        return nn.Sequential(*map(Scales, values))

    for kind in kinds:
        # Tensors of one content, but other shapes.
        taken = model([kind, torch.zeros(6), torch.zeros(2, 3)])
        snapshot = store.take({"m": taken}, "s", overwrite=True)
        for other in kinds:
            fresh = model([other, torch.empty(0), torch.empty(0)])
            assert not snapshot.restore({"m": fresh}, strict=strict)
            for part, wanted in zip(fresh, taken, strict=True):
                if isinstance(kind, io.BytesIO) and part is fresh[0]:
                    assert part.scales.getvalue() == kind.getvalue()
                else:
                    assert_same(part.scales, wanted.scales)
    # Modules share no memory that had none before.
    taken = model([torch.zeros(3), torch.zeros(3)])
    fresh = model([torch.empty(0), torch.empty(0)])
    store.take({"m": taken}, "same").restore({"m": fresh}, strict=strict)
    fresh[0].scales += 1
    assert_same(fresh[1].scales, torch.zeros(3))


def test_a_module_whose_load_state_dict_was_patched(store):
    old, new = Net(weight=(300, 100)), Net(w=(300, 100))
    original = new.load_state_dict
    new.load_state_dict = lambda state: original({"w": state["weight"]})
    snapshot = store.take({"m": old}, "step")
    snapshot.restore({"m": new})
    assert raw(new.w) == raw(old.weight)


class Packed(nn.Module):
    """A module whose state has more than it loads, as those with weights of 4 bits."""

    def __init__(self, scale=1.0, form=b"nf4"):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(256, (20,)).to(torch.uint8), requires_grad=False)
        self.scale, self.form = torch.full((4,), scale), form

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale
        destination[f"{prefix}weight.form"] = torch.tensor(list(self.form), dtype=torch.uint8)


def packed(**options):
    return nn.Sequential(Packed(**options), nn.Linear(3, 3))


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_module_gives_but_does_not_load_is_filled(store, strict):
    saved, found = packed(scale=2.0), packed()
    snapshot = store.take({"m": saved}, "s")
    report = snapshot.restore({"m": found}, strict=strict)
    assert not report
    assert_same(found.state_dict(), saved.state_dict())
    # The others still get their versions.
    saved, found = nn.Sequential(*packed(), versioned()), nn.Sequential(*packed(), versioned())
    store.take({"m": saved}, "versions").restore({"m": found}, strict=strict)
    assert_same(found.state_dict(), saved.state_dict())


def test_what_a_module_does_not_load_and_has_otherwise_is_an_error(store):
    snapshot = store.take({"m": packed()}, "s")
    with pytest.raises(MismatchError, match=r"gives 0\.weight\.form, but .* does not load that"):
        snapshot.restore({"m": packed(form=b"fp4")})
    # What else is wrong is told by torch.
    snapshot = store.take({"m": packed(), "n": nn.Linear(2, 2)}, "t")
    with pytest.raises(MismatchError, match=r"m/2\.weight"):
        snapshot.restore({"m": nn.Sequential(*packed(), nn.Linear(1, 1))})
