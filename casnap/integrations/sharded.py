"""Models and optimizers whose tensors FSDP has divided, as parts of an app state.

Their states have the names of the parameters without FSDP's additions, as
``torch.distributed.checkpoint`` gives them. So any number of ranks can load them, with FSDP or
without.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from casnap import Snapshot, Stateful
from casnap.errors import EntryNotFoundError, StateError


class ShardedModel(NamedTuple):
    """A model that may be sharded: each rank holds its own shards.

    Attributes:
        module: The model, in FSDP's wrapper if there is one.
    """

    module: torch.nn.Module

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and buffers; all ranks call it."""
        return get_model_state_dict(self.module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the parameters and buffers; all ranks call it."""
        set_model_state_dict(self.module, state_dict)


class ShardedOptimizer(NamedTuple):
    """An optimizer whose state is keyed by the names of the model's parameters.

    Attributes:
        module: The model.
        optimizer: The optimizer, perhaps as Accelerate has prepared it.
    """

    module: torch.nn.Module
    optimizer: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the state; all ranks call it. A fresh optimizer gets an initial state first."""
        return get_optimizer_state_dict(self.module, self._plain)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; all ranks call it."""
        set_optimizer_state_dict(self.module, self._plain, state_dict)

    @property
    def _plain(self) -> torch.optim.Optimizer:
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain


def adapter_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the trained tensors of a model in FSDP2, whole, on rank 0's CPU; all ranks call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return get_model_state_dict(module, options=options)


def optimizer_for(
    snapshot: Snapshot, key: str, module: torch.nn.Module, optimizer: Any, is_sharded: bool
) -> Stateful:
    """Return the object that loads the stored state of an optimizer.

    If the stored state is keyed by the names of parameters, that object is a
    :class:`ShardedOptimizer`; if it is keyed by their numbers, it is the optimizer itself.

    Raises:
        StateError: The stored state is keyed by the numbers of parameters, and the ranks have
            divided the parameters.
    """
    try:
        groups = snapshot.read_object(f"{key}/param_groups")
    except EntryNotFoundError:  # of another kind, which has its own state
        groups = []
    params = [param for group in groups for param in group["params"]]
    by_names = any(isinstance(param, str) for param in params)
    if is_sharded and params and not by_names:
        raise StateError(
            f"{snapshot.path} was saved without FSDP, and its optimizer goes by the numbers of "
            "parameters, which FSDP does not keep. Go on without FSDP; or load the weights alone, "
            "by snapshot.load_into(model) before FSDP wraps it, and begin with a fresh optimizer"
        )
    return ShardedOptimizer(module, optimizer) if by_names else optimizer
