"""Find what an app state leaves out, though a resume of the training needs it.

The first takes of a process look for such omissions, if a value of the app state is an
``Optimizer`` of torch. They report only what is certainly missing, each thing once, by the logger
``casnap.hints``.

Some things may be missing from the app state of a correct training, so they are not reported: a
learning rate scheduler, which a resumed run may make again with ``last_epoch=``; parameters that
require grad and that no optimizer has; the random states of Python and numpy; a ``GradScaler`` or a
loader, which nothing in an app state refers to.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer

from casnap.format.entries import TensorEntry
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.sharded import Shards
from casnap.state.stateful import RNGState, Stateful, same_random_state
from casnap.state.tensors import Leaf

LEFT_OUT = "left out of the app state: "
"""The beginning of each hint, by which ``casnap prove`` finds hints."""

_log = logging.getLogger("casnap.hints")
_LOOKS = 3
"""How many takes of a process look for omissions. To compare random states, two are needed."""
_SEEDS = 8
"""Up to this many numbers drawn from torch's generator are taken for seeds of data loaders.

Each loader draws a seed when it starts, even if it does not use the seed. So such draws do not mean
that the training depends on the generator.
"""


class _Before(NamedTuple):
    """The random states at the previous take, and what shows whether the training is the same.

    Attributes:
        optimizer: An optimizer of the training.
        seed: The seed of torch's generator, ``torch.initial_seed()``.
        states: The random states of torch, by their names in ``RNGState``.
    """

    optimizer: ref[Optimizer]
    seed: int
    states: dict[str, Any]


class Hints:
    """Looks at the first app states of a process that have an optimizer; logs what they lack."""

    def __init__(self) -> None:
        self._looks = _LOOKS
        self._told = set[str]()
        self._before: _Before | None = None

    def look(self, values: Mapping[str, Stateful], leaves: list[Leaf]) -> None:
        """Look at an app state, and log what it certainly lacks.

        Args:
            values: The app state.
            leaves: The leaves of all values.
        """
        if not self._looks:
            return
        optimizers = {key: value for key, value in values.items() if isinstance(value, Optimizer)}
        if not optimizers:
            return
        self._looks -= 1
        with without_torch_modes():
            for kind, hint in (
                *_of_parameters(optimizers, values, leaves),
                *self._of_generators(next(iter(optimizers.values())), leaves),
            ):
                if kind not in self._told:
                    self._told.add(kind)
                    _log.warning("%s%s", LEFT_OUT, hint)

    def _of_generators(self, optimizer: Optimizer, leaves: list[Leaf]) -> Iterator[tuple[str, str]]:
        known = re.compile(r"rng|random|generator|seed", re.IGNORECASE)
        if any(known.search(leaf.path) for leaf in leaves):
            return
        states = {k: v for k, v in RNGState().state_dict().items() if k not in ("python", "numpy")}
        before, now = self._before, _Before(ref(optimizer), torch.initial_seed(), states)
        self._before = now
        # Another training, or one that seeds itself at each step, may draw the same numbers again.
        if before is None or before.optimizer() is not optimizer or before.seed != now.seed:
            return
        drawn = [
            name
            for name, state in before.states.items()
            if not same_random_state(state, states.get(name))
        ]
        if drawn == ["torch"] and _are_seeds(before.states["torch"], states["torch"]):
            return
        if drawn:
            yield (
                "generators",
                f"the random states of {' and '.join(drawn)}, from which the training draws "
                "numbers; a resumed run draws others. Add casnap.RNGState()",
            )


def _are_seeds(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether the generator gets from one state to the other by drawing a few seeds of loaders."""
    generator = torch.Generator()
    generator.set_state(before)
    for _ in range(_SEEDS):
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        if torch.equal(generator.get_state(), now):
            return True
    return False


def _of_parameters(
    optimizers: Mapping[str, Optimizer], values: Mapping[str, Stateful], leaves: list[Leaf]
) -> Iterator[tuple[str, str]]:
    modules = [value for value in values.values() if isinstance(value, torch.nn.Module)]
    if not modules:
        return  # the weights may be in another snapshot
    held = {id(parameter) for module in modules for parameter in module.parameters()}
    for key, optimizer in optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        others = [p for p in parameters if id(p) not in held and p.numel()]
        if not others:
            continue
        # It may be held by something else than a module, as it is or as a copy.
        own = [leaf for leaf in leaves if leaf.path.partition("/")[0] not in optimizers]
        memory = {_memory(tensor) for leaf in own for tensor in _tensors(leaf.content)}
        entries = [leaf.entry for leaf in own]
        forms = {(e.shape, e.dtype) for e in entries if isinstance(e, TensorEntry)}
        lost = [
            p
            for p in others
            if _memory(p) not in memory
            and (tuple(p.shape), str(p.dtype).removeprefix("torch.")) not in forms
        ]
        if lost:
            yield (
                "parameters",
                f"{len(lost):,} of {len(parameters):,} parameters that {key!r} trains, the first "
                f"with the shape {list(lost[0].shape)}; a resumed run begins with other ones",
            )


def _tensors(content: torch.Tensor | bytes | Shards) -> tuple[torch.Tensor, ...]:
    if isinstance(content, Shards):
        return content.tensors
    return () if isinstance(content, bytes) else (content,)


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


hints = Hints()
"""The hints of this process."""
