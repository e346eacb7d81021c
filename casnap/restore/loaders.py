"""Find out whose ``load_state_dict`` a value has: torch's, casnap's or any other."""

from __future__ import annotations

from typing import Any

import torch

from casnap.state.stateful import RNGState, StateDict

_KNOWN: tuple[Any, ...] = (torch.nn.Module, torch.optim.Optimizer, StateDict, RNGState)


def known_loader(stateful: object) -> type | None:
    """Return the class of torch or casnap whose loader a value has; None for any other loader.

    The answer is also None if a subclass overrides ``load_state_dict``, if the object has one of
    its own, or if an optimizer has a hook that may change the state before it is loaded.
    """
    loader = getattr(getattr(stateful, "load_state_dict", None), "__func__", None)
    if getattr(stateful, "_optimizer_load_state_dict_pre_hooks", None):
        return None
    return next((kind for kind in _KNOWN if loader is kind.load_state_dict), None)
