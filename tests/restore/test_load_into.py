"""Filling a module from a snapshot, without its load_state_dict."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import DamagedError, EntryNotFoundError, MismatchError
from tests.support.bitwise import assert_same
from tests.support.written import write


class Net(nn.Module):
    def __init__(self, tied: bool = False, **how) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8, **how)
        self.body = nn.Sequential(nn.Linear(8, 16, **how), nn.BatchNorm1d(16, **how))
        self.head = nn.Linear(8, 50, bias=False, **how)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def net(seed: int, **how) -> Net:
    torch.manual_seed(seed)
    made = Net(**how)
    for buffer in (made.body[1].running_mean, made.body[1].running_var):
        buffer.copy_(torch.randn(16))
    return made


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("load") / "store", create=NewStore(chunk_size=64 << 10))


@pytest.fixture(scope="module")
def source():
    return net(1)


@pytest.fixture(scope="module")
def snapshot(store, source):
    optim = torch.optim.SGD(source.parameters())
    return store.take({"model": source, "optim": optim}, "base")


def same(module, other):
    assert_same(dict(module.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("prefix", ["model", "0/model", "global/model", "model/"])
def test_in_place(snapshot, source, prefix):
    target = net(2)
    before = {name: p.data_ptr() for name, p in target.state_dict(keep_vars=True).items()}
    assert not snapshot.load_into(target, prefix)
    same(target, source)
    assert before == {name: p.data_ptr() for name, p in target.state_dict(keep_vars=True).items()}
    assert all(p.requires_grad and p.is_leaf for p in target.parameters())


def test_a_submodule_and_renaming(snapshot, source):
    body = net(2).body
    snapshot.load_into(body, "model/body")
    same(body, source.body)
    layer = nn.Linear(8, 16)
    snapshot.load_into(layer, "model/body.0.")
    same(layer, source.body[0])
    layers = nn.ModuleDict({"first": nn.Linear(8, 16), "out": nn.Linear(8, 50, bias=False)})
    renamed = {"body.0.weight": "first.weight", "body.0.bias": "first.bias"}
    with pytest.raises(MismatchError, match=re.escape("missing in the snapshot (1):\n    out.wei")):
        snapshot.load_into(layers, rename=renamed)
    names = {**renamed, "head.weight": "out.weight"}
    assert not snapshot.load_into(layers, rename=names.get)
    same(layers["out"], source.head)
    with pytest.raises(MismatchError, match=r"model/body\.0\.weight and model/body\.1\.weight"):
        snapshot.load_into(layers, rename=lambda name: name[-6:] if "body" in name else None)


def test_another_dtype_is_cast(snapshot, source):
    target = net(2).bfloat16()
    snapshot.load_into(target)
    assert_same(target.head.weight.detach(), source.head.weight.detach().bfloat16())
    assert target.body[1].num_batches_tracked.dtype == torch.int64


def test_all_differences_at_once_and_nothing_written(snapshot):
    target = net(2)
    target.more = nn.Linear(2, 2, bias=False)
    target.head = nn.Linear(8, 51, bias=False)
    target.body[1].running_mean = torch.zeros(16, dtype=torch.int32)
    del target.embed
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(MismatchError) as e:
        snapshot.load_into(target)
    text = str(e.value)
    assert "nothing was restored" in text
    assert "missing in the snapshot (1):\n    more.weight" in text
    assert "unexpected in the snapshot (1):\n    model/embed.weight" in text
    assert "model/head.weight: (51, 8) here, (50, 8) in the snapshot" in text
    assert "model/body.1.running_mean: torch.int32 here, tensor of float32" in text
    assert_same(dict(target.state_dict()), before)
    report = snapshot.load_into(target, strict=False)
    assert report.missing == ["more.weight"]
    assert len(report.mismatched) == 2
    assert report.unexpected == ["model/embed.weight"]
    assert_same(target.head.weight.detach(), before["head.weight"])
    assert_same(target.body[0].weight.detach(), snapshot["model/body.0.weight"][...])


def test_a_prefix_of_nothing(snapshot):
    with pytest.raises(EntryNotFoundError, match=r"nothing below 'modle'; nearest: model"):
        snapshot.load_into(net(2), "modle")
    with pytest.raises(EntryNotFoundError, match="it has the keys model, optim"):
        snapshot.load_into(net(2), "1/x")


# --- the meta device ------------------------------------------------------------------------------


def on_meta(**how) -> Net:
    with torch.device("meta"):
        return Net(**how)


def test_meta_tensors_need_a_device(snapshot, source):
    target = on_meta()
    with pytest.raises(MismatchError, match=r"call to_empty\(device=...\) first, or pass device="):
        snapshot.load_into(target)
    with pytest.raises(MismatchError, match="scratch: on the meta device here, and not persistent"):
        snapshot.load_into(target, device="cpu")
    assert all(tensor.is_meta for tensor in target.state_dict().values())
    target.scratch = torch.zeros(3)
    snapshot.load_into(target, device="cpu")
    same(target, source)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in target.parameters())
    with pytest.raises(MismatchError, match="on cpu here; device= is for tensors on the meta"):
        snapshot.load_into(net(2), device="meta")


def test_ties_survive(store):
    tied = net(1, tied=True)
    taken = store.take({"model": tied}, "tied")
    target = on_meta(tied=True)
    target.scratch = torch.zeros(3)
    target.embed.weight.requires_grad_(False)
    taken.load_into(target, device="cpu")
    assert target.head.weight is target.embed.weight
    assert not target.head.weight.requires_grad
    same(target, tied)
    one = store.take({"model": StateDict({"w": tied.embed.weight})}, "one name")
    both = nn.ModuleDict({"a": nn.Embedding(50, 8), "b": nn.Linear(8, 50, bias=False)})
    both["b"].weight = both["a"].weight
    one.load_into(both, rename={"w": "a.weight"})
    assert_same(both["b"].weight.detach(), tied.embed.weight.detach())


def test_ties_that_the_snapshot_unties(snapshot):
    target = net(2, tied=True)
    before = target.embed.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"model/embed\.weight, model/head\.weight: share mem"):
        snapshot.load_into(target)
    assert_same(target.embed.weight.detach(), before)
    snapshot.load_into(target, rename=lambda name: name if name != "head.weight" else None)
    assert_same(target.embed.weight.detach(), snapshot["model/embed.weight"][...])


def test_what_is_no_module(snapshot):
    with pytest.raises(TypeError, match=r"fills a torch.nn.Module; got a dict. restore\(\) fills"):
        snapshot.load_into({})


@pytest.mark.parametrize("way", ["load_into", "obj_out", "restore"])
def test_a_backward_of_older_values_fails(snapshot, way):
    target = net(2)
    weight = target.head.weight
    output = nn.functional.linear(torch.ones(3, 8, requires_grad=True), weight)
    if way == "load_into":
        snapshot.load_into(target)
    elif way == "obj_out":
        snapshot.read_object("model/head.weight", weight)
    else:
        snapshot.restore({"model": StateDict(**target.state_dict())}, strict=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# --- ranks ----------------------------------------------------------------------------------------


def test_tensors_of_ranks(store):
    ranks = [{"model": {"weight": torch.ones(4, 4), "bias": torch.full((4,), r)}} for r in (0, 1)]
    ranks[0]["model"]["bias"] = torch.zeros(4)
    ranks[1]["model"]["bias"] = torch.ones(4)
    taken = write(store, "ranks", ranks, own=["model/bias"])
    target = nn.Linear(4, 4)
    with pytest.raises(EntryNotFoundError, match=r"model/bias.*say which: '0/model', '1/model'"):
        taken.load_into(target)
    taken.load_into(target, "1/model")
    assert_same(target.bias.detach(), torch.ones(4))


def test_damage_leaves_a_meta_module_as_it_was(tmp_path):
    path = tmp_path / "store" / "base"
    Snapshot.take(path, {"model": nn.Linear(300, 300)})
    for pack in (tmp_path / "store/casnap-store/packs").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 300 * 300 * 4:
            pack.write_bytes(bytes(pack.stat().st_size))
    target = nn.Linear(300, 300, device="meta")
    with pytest.raises(DamagedError, match="model/weight"):
        Snapshot(path).load_into(target, device="cpu")
    assert target.weight.is_meta


class Scaled(nn.Linear):
    """A layer with extra state."""

    def __init__(self, scales: object) -> None:
        super().__init__(3, 3)
        self.scales = scales

    def get_extra_state(self) -> object:
        return self.scales

    def set_extra_state(self, state: object) -> None:
        self.scales = state


@pytest.mark.parametrize("scales", [torch.ones(3), {"scales": torch.ones(3), "count": 3}, None])
def test_extra_state_stays_as_it_is_and_is_named(store, scales, caplog):
    snapshot = store.take({"model": nn.Sequential(Scaled(scales))}, "extra", overwrite=True)
    for target in (nn.Sequential(Scaled(5)), nn.Sequential(checkpoint_wrapper(Scaled(5)))):
        caplog.clear()
        assert not snapshot.load_into(target)
        assert target[0].scales == 5
        told = "the extra state of the module stays as it is (0._extra_state). restore() loads it"
        assert told in caplog.text
    with pytest.raises(MismatchError, match=r"restore\(\) alone loads extra state") as caught:
        snapshot.load_into(nn.Sequential(nn.Linear(3, 3)))
    assert "model/0._extra_state" in str(caught.value)
