"""Check the metadata that a user gives a take, and convert them to the types of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from casnap.errors import StateError
from casnap.format.records import MAX_METADATA_BYTES
from casnap.runtime.units import whole_number

_METADATA_DEPTH = 64


def checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a user's metadata, made of plain JSON types.

    NaN and the infinities are allowed. NumPy's scalars, and tensors without a dimension, become
    plain numbers.

    Raises:
        StateError: The metadata hold something that JSON cannot, or take more than 64 KiB.
    """
    if not isinstance(metadata, Mapping):
        raise StateError(f"metadata is a dict with keys of str; got {type(metadata).__qualname__}")
    content = {
        _checked_key(k, "metadata"): _plain_json(v, f"metadata[{k!r}]") for k, v in metadata.items()
    }
    try:
        size = len(msgspec.json.encode(content))
    except UnicodeEncodeError as e:
        raise StateError(f"metadata holds a string that is not Unicode: {e}") from e
    if size > MAX_METADATA_BYTES:
        raise StateError(
            f"metadata takes {size} bytes, more than {MAX_METADATA_BYTES}; put it into the app "
            "state, in a StateDict"
        )
    return content


def _checked_key(key: object, position: str) -> str:
    if not isinstance(key, str):
        raise StateError(f"{position} has the key {key!r:.80}; JSON has keys of str alone")
    return str(key)


def _plain_json(value: Any, position: str, depth: int = 1) -> Any:
    if depth > _METADATA_DEPTH:
        raise StateError(f"metadata is nested deeper than {_METADATA_DEPTH} levels")
    value = _without_numpy_and_torch(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if (number := whole_number(value)) is not None and -(1 << 63) <= number < 1 << 64:
        return number
    if isinstance(value, list | tuple):
        return [_plain_json(v, f"{position}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _checked_key(k, position): _plain_json(v, f"{position}[{k!r}]", depth + 1)
            for k, v in value.items()
        }
    raise StateError(
        f"{position} holds what JSON cannot: {value!r:.80} ({type(value).__qualname__}); convert "
        "it, or put it into the app state, in a StateDict"
    )


def _without_numpy_and_torch(value: Any) -> Any:
    """Convert a NumPy scalar, or an array or tensor without dimensions, to a plain Python value.

    Any other value is returned unchanged. So is a tensor of a subclass, such as a DTensor: to read
    its value may need all ranks.
    """
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.floating):
        return float(value)  # item() of a long double returns a long double
    if isinstance(value, np.generic) and value.dtype.kind not in "mM":
        return value.item()
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return value.item() if is_plain and not value.ndim and not value.is_meta else value
