"""Generators of random numbers as values of an app state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from casnap import StateDict, Store
from casnap.errors import MismatchError, UnsupportedTypeError


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return Store(f"memory://{request.node.nodeid}")


def of_torch(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_numpy(kind: Any) -> Any:
    return lambda seed: np.random.Generator(kind(seed))


def drawn(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.randn(5, generator=generator).tolist()
    return generator.standard_normal(5).tolist()


KINDS = [of_torch, *map(of_numpy, (np.random.PCG64, np.random.MT19937, np.random.Philox))]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_generator_goes_on_where_it_was(store: Store, make: Any, in_background: bool) -> None:
    generator = make(1)
    drawn(generator)
    state = {"generator": generator, "progress": StateDict(step=3)}
    if in_background:
        pending = store.async_take(state, "a")
        next_numbers = drawn(generator)
        pending.wait()
    else:
        store.take(state, "a")
        next_numbers = drawn(generator)
    again = make(2)
    store["a"].restore({"generator": again, "progress": StateDict()})
    assert drawn(again) == next_numbers


def test_generators_of_two_kinds_are_not_mixed(store: Store) -> None:
    store.take({"generator": of_torch(1)}, "a")
    generator = np.random.default_rng(1)
    before = generator.bit_generator.state
    with pytest.raises(MismatchError, match=r"'generator' raised .*of another kind"):
        store["a"].restore({"generator": generator})
    assert generator.bit_generator.state == before


@pytest.mark.parametrize("make", KINDS[:2])
def test_a_generator_within_a_state_is_refused_with_advice(store: Store, make: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match="a key of its own in the app state"):
        store.take({"s": StateDict(generator=make(1))}, "a")
