"""The states that are saved: names to tensors, of a given size, with no two chunks alike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import torch
from torch import Tensor

State = dict[str, Tensor]

FP32 = "200 fp32 tensors"
TRANSFORMER = "transformer"
WORKLOADS = (FP32, TRANSFORMER)

_BASE_ELEMENTS = 1 << 20
_VOCABULARY = 32_000
_LAYERS = 41
_LAYER = {
    "ln_1.weight": (1,),
    "ln_1.bias": (1,),
    "attn.qkv.weight": (3, 1),
    "attn.qkv.bias": (3,),
    "attn.proj.weight": (1, 1),
    "attn.proj.bias": (1,),
    "ln_2.weight": (1,),
    "ln_2.bias": (1,),
    "mlp.up.weight": (4, 1),
    "mlp.up.bias": (4,),
    "mlp.down.weight": (1, 4),
    "mlp.down.bias": (1,),
}
_BYTES_PER_PARAMETER = 2 + 4 + 4


def build(workload: str, nbytes: int) -> State:
    """Return a workload of about ``nbytes`` bytes, its memory touched and filled."""
    if workload == FP32:
        return fp32(nbytes, 200)
    return transformer(nbytes)


def fp32(nbytes: int, tensors: int) -> State:
    """Return equal 1-d fp32 tensors of ``nbytes`` bytes together."""
    return fill({f"tensor.{i}": torch.empty(nbytes // tensors // 4) for i in range(tensors)})


def transformer(nbytes: int) -> State:
    """Return the bf16 weights of a 496-tensor transformer and its two fp32 Adam moments."""
    state: State = {}
    for name, shape in _parameters(_width(nbytes)).items():
        state[f"model.{name}"] = torch.empty(shape, dtype=torch.bfloat16)
        state[f"optim.exp_avg.{name}"] = torch.empty(shape)
        state[f"optim.exp_avg_sq.{name}"] = torch.empty(shape)
    return fill(state)


def _parameters(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (_VOCABULARY, width),
        "position.weight": (1024, width),
    }
    for layer in range(_LAYERS):
        for name, factors in _LAYER.items():
            shapes[f"layers.{layer}.{name}"] = tuple(factor * width for factor in factors)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def _width(nbytes: int) -> int:
    """Solve 12 L d² + V d = parameters for d, rounded to 32."""
    a, b = 12 * _LAYERS, _VOCABULARY
    parameters = nbytes / _BYTES_PER_PARAMETER
    exact = (math.sqrt(b * b + 4 * a * parameters) - b) / (2 * a)
    return max(32, round(exact / 32) * 32)


def fill(state: State) -> State:
    """Fill tensors with random-looking values, each block with a factor of its own."""
    base = torch.rand(_BASE_ELEMENTS, generator=torch.Generator().manual_seed(0)) - 0.5
    block = 0
    for tensor in state.values():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), _BASE_ELEMENTS):
            piece = flat[start : start + _BASE_ELEMENTS]
            piece.copy_(base[: piece.numel()] * (1 + block / 64))
            block += 1
    return state


def step(tensors: Iterable[Tensor]) -> None:
    """Change every element of the tensors in place, as an optimizer does, never back again.

    A factor of 1.01 is more than half a step of bf16, and the sign changes too.
    """
    for tensor in tensors:
        tensor.mul_(-1.01)


def some(state: State, share: float, seed: int) -> list[Tensor]:
    """Return a random share of the tensors, at least one."""
    count = max(1, round(len(state) * share))
    return [state[name] for name in random.Random(seed).sample(sorted(state), count)]


def like(state: State) -> State:
    """Return tensors of the same shapes and dtypes, their memory touched, all zero."""
    return {name: torch.zeros_like(tensor).zero_() for name, tensor in state.items()}


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def same(state: State, other: State) -> bool:
    """Return whether two states are equal bit for bit."""
    return state.keys() == other.keys() and all(
        torch.equal(_bits(tensor), _bits(other[name])) for name, tensor in state.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
