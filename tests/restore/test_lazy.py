"""Handles, many objects in one pass, and globs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from casnap import NewStore, RNGState, StateDict, Store
from casnap.errors import EntryNotFoundError, MismatchError
from tests.support.bitwise import assert_same
from tests.support.reads import counted
from tests.support.written import write

CHUNK = 64 << 10


def blocks() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        *(nn.ModuleDict({"attn": nn.Linear(64, 64), "mlp": nn.Linear(64, 96)}) for _ in range(3))
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(
        tmp_path_factory.mktemp("lazy") / "store", create=NewStore(chunk_size=CHUNK)
    ).make()


@pytest.fixture(scope="module")
def model():
    return blocks()


@pytest.fixture(scope="module")
def snapshot(store, model):
    state = {
        "big": torch.arange(60_000).reshape(300, 200),
        "array": np.arange(12.0).reshape(3, 4),
        "odd[1]*": 7,
        "odd11": 8,
        "list": [torch.ones(3), "text"],
    }
    app_state = {"model": model, "extra": StateDict(state), "rng": RNGState()}
    return store.take(app_state, "run/step_1")


@pytest.fixture(scope="module")
def two_ranks(store):
    """A snapshot of two ranks: tensors that both hold, values that differ."""
    state = {"w": torch.arange(40_000.0).reshape(40, 1000), "b": torch.ones(200)}
    ranks = [{"m": {**state, "seed": torch.full((5,), float(r))}} for r in range(2)]
    ranks[1]["m"]["late"] = torch.ones(3)
    return write(
        store,
        "world",
        ranks,
        own=["m/seed", "m/late", "m"],
    )


# --- handles --------------------------------------------------------------------------------------


def test_a_handle_says_what_it_is_without_reading(snapshot, model):
    for path in ("model/0.attn.weight", "0/model/0.attn.weight", "global/model/0.attn.weight"):
        handle = snapshot[path]
        weight = model[0]["attn"].weight
        assert handle.path == path
        assert handle.kind == "tensor"
        assert handle.shape == weight.shape
        assert handle.dtype == weight.dtype
        assert handle.nbytes == weight.nbytes
        assert handle.is_global
        assert handle.is_sharded is False
        assert_same(handle[...], weight.detach())
        assert_same(handle[3:40:5, -1], weight.detach()[3:40:5, -1].clone())
        assert_same(handle.read(), weight.detach())
        assert path in repr(handle)
    array = snapshot["extra/array"]
    assert array.dtype == np.dtype("f8")
    assert_same(np.asarray(array[1]), np.arange(12.0).reshape(3, 4)[1])
    assert len(list(snapshot["extra/array"])) == 3


def test_a_handle_on_what_is_no_tensor(snapshot):
    handle = snapshot["extra/list/1"]
    assert handle.shape is handle.dtype is None
    assert handle.read() == "text"
    with pytest.raises(MismatchError, match="use read"):
        handle[0]
    container = snapshot["extra/list"]
    assert container.kind == "list"
    assert container.nbytes == 3 * 4 + len("text")
    assert_same(container.read(), [torch.ones(3), "text"])
    with pytest.raises(TypeError, match="not None; use read"):
        snapshot["extra/list/0"][None]
    own = snapshot["0/rng"]
    assert (own.rank, own.is_global, own.is_sharded) == (0, False, False)


def test_what_there_is(snapshot):
    assert "model/0.attn.bias" in snapshot
    assert "0/extra/list" in snapshot
    assert "model/nothing" not in snapshot
    assert 7 not in snapshot
    with pytest.raises(TypeError, match="not iterable"):
        iter(snapshot)
    with pytest.raises(EntryNotFoundError, match=re.escape("nearest: model/0.attn.bias")):
        snapshot["model/0.attn.bia"]
    result = snapshot.handles()
    assert {p for p, h in result.items() if not h.is_global} == {p for p in result if p[0] == "0"}
    assert result.keys() >= {"model/2.mlp.bias", "extra/list/1", "extra/odd[1]*"}
    assert list(snapshot.handles("model/*.attn.bias")) == [f"model/{i}.attn.bias" for i in range(3)]
    assert snapshot.handles("nothing/*") == {}


# --- many at once ---------------------------------------------------------------------------------


def test_many_objects_and_globs(snapshot, model):
    tensor = snapshot.read_objects(["0/model/*.attn.*", "model/1.mlp.weight", "extra/list"])
    weights = {f"0/model/{k}": v for k, v in model.state_dict().items() if "attn" in k}
    assert tensor.keys() == {*weights, "model/1.mlp.weight", "extra/list"}
    for path, weight in weights.items():
        assert_same(tensor[path].detach(), weight)
    assert_same(tensor["model/1.mlp.weight"].detach(), model[1]["mlp"].weight.detach())
    assert_same(tensor["extra/list"], [torch.ones(3), "text"])
    assert snapshot.read_objects("model/?.mlp.bias").keys() == {
        f"model/{i}.mlp.bias" for i in range(3)
    }
    assert snapshot.read_objects("global/model/*").keys() == {
        f"global/model/{k}" for k in model.state_dict()
    }
    assert snapshot.read_objects([]) == {}
    both = snapshot.read_objects(["extra/list", "extra/list/0"])
    assert_same(both["extra/list/0"], torch.ones(3))


def test_names_that_look_like_globs(snapshot):
    assert snapshot.read_objects("extra/odd[1]*") == {"extra/odd[1]*": 7}
    assert snapshot.read_objects("extra/odd[1]?") == {"extra/odd11": 8}
    assert snapshot["extra/odd[1]*"].read() == 7


def test_one_that_is_missing_fails_all(snapshot):
    for wrong in ("model/3.attn.*", "model/none", "7/model/0.attn.bias"):
        with pytest.raises(EntryNotFoundError, match=re.escape(wrong)):
            snapshot.read_objects(["model/0.attn.bias", wrong])


@pytest.mark.parametrize("wrong", [3, None, ["model/0.attn.bias", 3]])
def test_paths_that_are_none(snapshot, wrong):
    with pytest.raises(TypeError, match="takes a path or glob, or a list of them; got"):
        snapshot.read_objects(wrong)


def test_neighbours_are_read_together(snapshot):
    opened, backend = counted(snapshot)
    opened.read_object("model/0.attn.bias")
    backend.reads.clear()
    tensor = opened.read_objects("model/*")
    assert len(tensor) == 12
    assert 0 < len(backend.reads) <= 3


# --- ranks ----------------------------------------------------------------------------------------


def test_entries_of_ranks(two_ranks):
    shared = two_ranks["m/w"]
    assert (shared.is_global, shared.is_sharded) == (True, None)
    assert_same(shared[3, 490:510], torch.arange(40_000.0).reshape(40, 1000)[3, 490:510].clone())
    seed = two_ranks["1/m/seed"]
    assert (seed.rank, seed.is_global, seed.is_sharded) == (1, False, False)
    assert_same(seed[...], torch.ones(5))
    assert two_ranks["1/m/b"].rank is None


def test_a_path_that_several_ranks_have_names_them(two_ranks):
    with pytest.raises(EntryNotFoundError, match=r"say which: '0/m/seed', '1/m/seed'"):
        two_ranks["m/seed"]
    with pytest.raises(EntryNotFoundError, match=r"'0/m/seed', '1/m/seed'"):
        two_ranks.read_objects(["m/b", "m/seed"])
    for read in (two_ranks.read_object, lambda path: two_ranks.read_object(path, index=0)):
        with pytest.raises(EntryNotFoundError, match=r"'m/seed' for ranks 0 and 1, each its own"):
            read("m/seed")
    assert "m/seed" not in two_ranks
    assert "0/m/seed" in two_ranks
    assert "m/b" in two_ranks
    assert_same(two_ranks.read_object("0/m/seed"), torch.zeros(5))
    with pytest.raises(EntryNotFoundError, match="read it as '1/m/late'"):
        two_ranks["m/late"]
    tensor = two_ranks.read_objects("m/*")
    assert tensor.keys() == {"m/w", "m/b", "0/m/seed", "1/m/seed", "1/m/late"}
    assert_same(tensor["1/m/seed"], torch.ones(5))
    assert two_ranks.read_objects("1/m/*").keys() == {
        f"1/m/{n}" for n in ("w", "b", "seed", "late")
    }
    assert two_ranks.read_objects("global/*").keys() == {"global/m/w", "global/m/b"}


@pytest.mark.parametrize("own", [["m", "m/seed"], ["m/seed"]])
def test_what_is_below_a_path_is_never_that_of_rank_0_alone(store, own):
    """Also of a dict that all ranks have alike."""
    ranks = [{"m": {"w": torch.ones(4), "seed": torch.full((5,), float(r))}} for r in range(2)]
    snapshot = write(store, f"below {len(own)}", ranks, own=own)
    told = r"'m' for ranks 0 and 1, each its own; say which: '0/m', '1/m'"
    for read in (
        snapshot.read_object,
        snapshot.get_state_dict_for_key,
        snapshot.__getitem__,
        lambda path: snapshot.read_objects([path]),
    ):
        with pytest.raises(EntryNotFoundError, match=told):
            read("m")
    assert "m" not in snapshot
    assert_same(snapshot.read_object("1/m"), ranks[1]["m"])
    assert_same(snapshot.read_object("m/w"), torch.ones(4))
    assert_same(snapshot.read_object("global/m/w"), torch.ones(4))


def test_a_key_named_global_is_that_key(store):
    taken = store.take({"global": StateDict(x=1), "m": StateDict(x=2)}, "keys")
    assert taken["global/x"].read() == 1
    assert taken["0/global/x"].read() == 1
    assert taken.read_objects("global/*") == {"global/x": 1}
    with pytest.raises(EntryNotFoundError):
        taken["global/m/x"]
