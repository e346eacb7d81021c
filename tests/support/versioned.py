"""A module that changes what its first version stored, as ``_version`` lets a module do.

::

    model = versioned()
    store.take({"m": model}, "step_1").restore({"m": (fresh := versioned())})
    assert_same(fresh.state_dict(), model.state_dict())
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict


class Head(nn.Module):
    """Stores its weight as it is. Its first version stored it transposed."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def versioned(*, spectral: bool = False) -> nn.Module:
    """Return a model of a layer and a :class:`Head`.

    Args:
        spectral: Whether the layer has a spectral norm, whose metadata is nested.
    """
    layer = nn.Linear(4, 4)
    return nn.Sequential(
        nn.utils.spectral_norm(layer) if spectral else layer, nn.Sequential(Head())
    )


def of_first_version(model: nn.Module) -> Any:
    """Return the state of a model of :func:`versioned`, as its first version gave it."""
    state: Any = get_model_state_dict(model)
    for local in state._metadata.values():
        local["version"] = 1
    state["1.0.weight"] = state["1.0.weight"].t().clone()
    return state
