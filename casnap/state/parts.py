"""Plain tensors that are marked, by four attributes, as parts of a larger tensor.

``torch.distributed.checkpoint`` (DCP) calls such a tensor a ``CheckpointableTensor``, since torch
2.14. Most functions of torch drop the attributes, ``detach()`` and a module's ``state_dict()``
among them. Without the attributes, such a tensor looks like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from casnap.errors import UnsupportedTypeError
from casnap.format.region import Region

_SAID = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def holds_parts(value: object) -> bool:
    """Whether a tensor has all four attributes that mark it as parts of a larger one."""
    # Nearly no tensor has the first attribute, so the others are seldom asked for.
    return hasattr(value, _SAID[0]) and all(hasattr(value, name) for name in _SAID)


def said_of_parts(value: Any) -> tuple[tuple[int, ...], set[Region]]:
    """Read the attributes of a tensor that is marked as parts of a larger one.

    Returns:
        The shape of the larger tensor, and the boxes of the larger tensor that this one holds.
    """
    boxes = zip(value.global_offsets, value.local_sizes, strict=True)
    shape = tuple(value.global_shape)
    return shape, {Region(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes}


def path_of_tensor(state: object, is_it: Callable[[torch.Tensor], bool]) -> str | None:
    """Return the path of the first tensor found for which ``is_it`` is true; None if none is.

    Args:
        state: Nested dicts and lists.
        is_it: Called with each tensor.
    """
    children = [("", state)]
    while children:
        path, value = children.pop()
        if isinstance(value, torch.Tensor):
            if is_it(value):
                return path
        elif isinstance(value, Mapping):
            children += [(f"{path}/{key}" if path else f"{key}", v) for key, v in value.items()]
        elif isinstance(value, list | tuple):
            children += [(f"{path}/{i}", v) for i, v in enumerate(value)]
    return None


def check_whole(path: str, value: object) -> None:
    """Check that a tensor is not marked as parts of a larger one.

    Raises:
        UnsupportedTypeError: The tensor is marked so.
    """
    if holds_parts(value):
        raise UnsupportedTypeError(f"{path}: {why_not_whole(value)}")


def why_not_whole(value: Any) -> str:
    """Return the message that refuses a tensor marked as parts of a larger one, with advice."""
    return (
        f"this tensor of shape {tuple(value.shape)} holds parts of one of shape "
        f"{tuple(value.global_shape)} (CheckpointableTensor of torch.distributed.checkpoint); "
        "casnap stores and fills it only by dcp.save with CasnapWriter and dcp.load with "
        "CasnapReader, as a value of a dict"
    )


def check_state(key: str, stateful: object, state: object) -> None:
    """Check that no tensor of a module or optimizer is marked as parts of a larger one.

    Args:
        key: The key of the state in the app state.
        stateful: The module or optimizer. Any other value passes.
        state: Its ``state_dict()``, whose tensors no longer have the attributes.

    Raises:
        UnsupportedTypeError: A tensor is marked.
    """
    if isinstance(stateful, torch.nn.Module) and isinstance(state, Mapping):
        for module_path, part in stateful.named_modules(remove_duplicate=False):
            for name, tensor in chain(part._parameters.items(), part._buffers.items()):
                if not holds_parts(tensor):
                    continue
                path = f"{module_path}.{name}" if module_path else name
                # A hook may have put the parts together into another tensor.
                if _is_same_memory(state.get(path), tensor):
                    check_whole(f"{key}/{path}", tensor)
    elif isinstance(stateful, torch.optim.Optimizer):
        # A hook may have put the parts together, or have marked the moments as parts. Trainers
        # wrap optimizers in a class of their own, which may lack the attribute.
        has_hook = bool(getattr(stateful, "_optimizer_state_dict_post_hooks", None))
        for parameter in chain.from_iterable(g["params"] for g in stateful.param_groups):
            if not has_hook:
                check_whole(f"{key}, of a parameter", parameter)


def _is_same_memory(value: object, tensor: object) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(tensor, torch.Tensor):
        return False
    return value.layout is torch.strided and value.data_ptr() == tensor.data_ptr()
