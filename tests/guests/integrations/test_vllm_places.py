"""Where a loader puts the elements of a checkpoint is learnt from the loader itself."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch

from casnap.integrations.vllm.places import (
    OtherBaseError,
    UnknownPlacesError,
    bits_of,
    learn,
    storage_of,
    targets_of,
)

Weights = dict[str, torch.Tensor]
_ROWS, _COLUMNS, _WORDS = 12, 8, 10


class Joined(torch.nn.Module):
    """A model as engines have them: tensors are joined, cut among ranks, cast and padded.

    Args:
        rank: Which part of two it has.
        dtype: Of its weights.
    """

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank = rank
        half = _ROWS // 2

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.qkv = parameter(3 * half, _COLUMNS)
        self.out = parameter(_ROWS, _COLUMNS // 2)
        self.turned = parameter(_COLUMNS, _ROWS)
        self.words = parameter(_WORDS + 6, _COLUMNS)
        self.head = self.words  # tied
        self.scale = parameter(1)
        self.experts = parameter(3, half, _COLUMNS)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        half, columns = _ROWS // 2, _COLUMNS // 2
        for name, weight in weights:
            mine = slice(self.rank * half, (self.rank + 1) * half)
            if name in ("q", "k", "v"):
                at = "qkv".index(name) * half
                self.qkv.data.narrow(0, at, half).copy_(weight.narrow(0, self.rank * half, half))
            elif name == "out":
                self.out.data.copy_(weight[:, self.rank * columns : (self.rank + 1) * columns])
            elif name == "turned":
                self.turned.data.copy_(weight.t())
            elif name in ("words", "head"):
                self.words.data[:_WORDS].copy_(weight)
                self.words.data[_WORDS:].fill_(0)
            elif name == "scale":
                self.scale.data.copy_(weight.view(1))
            elif name.startswith("expert"):
                self.experts.data[int(name[-1])].copy_(weight[mine])

    def learn(self, weights: Weights):  # type: ignore[no-untyped-def]
        return learn(self.load_weights, weights, self, [self.words])


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        **dict.fromkeys("qkv", (_ROWS, _COLUMNS)), "out": (_ROWS, _COLUMNS),
        "turned": (_ROWS, _COLUMNS), "words": (_WORDS, _COLUMNS), "scale": (),
        **{f"expert{i}": (_ROWS, _COLUMNS) for i in range(3)}, "unused": (5,), "none": (0, 3),
    }  # fmt: skip
    weights = {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in shapes.items()}
    return weights | {"head": weights["words"].clone()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elements_are_written_to_their_places_alone(rank: int, dtype: torch.dtype) -> None:
    model, weights = Joined(rank, dtype), checkpoint(0)
    model.load_weights(weights.items())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = model.learn(weights)
    for name, tensor in before.items():
        assert torch.equal(bits_of(model.state_dict()[name]), bits_of(tensor))
    assert places.fits(targets_of(model))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 30):
        new = checkpoint(step)
        new["head"] = new["words"]
        for name, weight in weights.items():
            chosen = torch.rand(weight.numel(), generator=generator) < 0.05 * step
            new[name] = torch.where(chosen.view(weight.shape), new[name], weight)
        new["head"] = new["words"]
        for name, weight in new.items():
            indices = (bits_of(weight) != bits_of(weights[name])).view(-1).nonzero()[:, 0].int()
            for region in places.of(name):
                which, where = region.located(indices)
                memory = storage_of(region.target)
                old = weights[name].view(-1)[indices[which]].to(dtype)
                assert torch.equal(memory[where], old)
                memory.index_copy_(0, where, weight.view(-1)[indices[which]].to(dtype))
            # Tied ones are written twice.
            if name == "words":
                weights["head"] = weight
        expected = Joined(rank, dtype)
        expected.load_weights(new.items())
        for name, tensor in expected.state_dict().items():
            assert torch.equal(bits_of(model.state_dict()[name]), bits_of(tensor)), (step, name)
        weights = new
    assert not places.of("unused")


def test_a_model_with_other_weights_is_found_out() -> None:
    model = Joined(0)
    model.load_weights(checkpoint(0).items())
    other = checkpoint(0)
    other["k"][2, 3] += 1
    with pytest.raises(OtherBaseError, match="the model holds other values of k"):
        model.learn(other)
    # On the other rank that element is not.
    second = Joined(1)
    second.load_weights(checkpoint(0).items())
    second.learn(other)
    zero = {name: torch.zeros_like(weight) for name, weight in checkpoint(0).items()}
    fresh = Joined(0)
    fresh.load_weights(zero.items())
    with pytest.raises(OtherBaseError, match="other values"):
        fresh.learn({name: -weight for name, weight in zero.items()})  # -0.0
    assert torch.Tensor.copy_ is torch._C.TensorBase.copy_


class Other(Joined):
    """A loader that does more than to copy."""

    how = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name != "out" or not self.how:
                super().load_weights([(name, weight)])
                continue
            mine = weight[:, : _COLUMNS // 2]
            if self.how == "computes":
                self.out.data.copy_(mine + 1)
            elif self.how == "replaces":
                self.out.data = mine.float().clone()
            elif self.how == "in part":
                self.out.data[1:].copy_(mine[1:])
            elif self.how == "spreads":
                self.out.data.copy_(mine[:1].expand(_ROWS, -1))
            elif self.how == "elsewhere":
                torch.zeros(_ROWS, _COLUMNS // 2).copy_(mine)
            elif self.how == "fails":
                raise KeyError(name)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("computes", "copies what it has computed"),
        ("replaces", "does not copy to out"),
        ("in part", "a part of out alone"),
        ("spreads", "a place of another shape"),
        ("elsewhere", "elsewhere than to the model"),
        ("fails", "cannot be followed: KeyError"),
    ],
)
def test_a_loader_that_does_more_than_to_copy_is_not_followed(how: str, expected: str) -> None:
    model, weights = Other(0), checkpoint(0)
    weights["out"][:] = weights["out"][:1].clone()
    model.load_weights(weights.items())
    model.how = how
    with pytest.raises(UnknownPlacesError, match=expected):
        model.learn(weights)
    assert torch.Tensor.copy_ is torch._C.TensorBase.copy_


def test_a_model_that_has_given_up_its_weights_is_not_patched() -> None:
    model, weights = Joined(0), checkpoint(0)
    model.load_weights(weights.items())
    places = model.learn(weights)
    model.out.data = model.out.data.clone()
    assert not places.fits(targets_of(model))
    model.extra = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(UnknownPlacesError, match="has given up its extra"):
        model.learn(weights)


def test_other_threads_copy_meanwhile() -> None:
    model, weights = Joined(0), checkpoint(0)
    model.load_weights(weights.items())
    target = torch.zeros(3)

    def load(given: Iterable[tuple[str, torch.Tensor]]) -> None:
        other = threading.Thread(target=lambda: target.copy_(torch.ones(3)))
        other.start()
        other.join()
        model.load_weights(given)

    learn(load, weights, model, [model.words])
    assert target.sum() == 3
