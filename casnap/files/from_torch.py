"""Import a file of ``torch.save``, as ``torch.load(weights_only=True)`` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from casnap.errors import CasnapError, FileFormatError
from casnap.files.shards import Shards, check_names
from casnap.files.sources import MODEL, MappedFile, SourceFiles
from casnap.format.names import component_of
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import flatten
from casnap.state.pickles import BrokenError, RefusedError
from casnap.state.torch_save import checked_members


def read_torch(path: Path, key: str | None) -> SourceFiles:
    """Return the state in a file of ``torch.save`` as leaves. Its tensors are views of the file.

    Args:
        path: The file.
        key: The key for the state; None to use the state's top keys if it is an app state, else
            ``model``.

    Raises:
        FileFormatError: The file is damaged, or needs pickle: it holds more than weights.
        UnsupportedTypeError: A value in it cannot be stored.
    """
    state = load_torch(path)
    states = {key or MODEL: state}
    if key is None and _has_keys(state):
        states = dict(state)
    with without_torch_modes(), python_gc_paused():
        leaves = {name: list(flatten(each, component_of(name))) for name, each in states.items()}
    return SourceFiles("torch", 1, leaves)


def read_torch_shards(shards: Shards, key: str) -> SourceFiles:
    """Return the tensors of several files of ``torch.save``, each of which has a dict of tensors.

    Raises:
        FileFormatError: As for :func:`read_torch`, or the files do not belong together.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file, names in shards.items():
        state = load_torch(file)
        if not isinstance(state, dict) or not all(
            type(name) is str and isinstance(value, torch.Tensor) for name, value in state.items()
        ):
            raise FileFormatError(f"{file} holds more than tensors, so it is no part of a model")
        check_names(file, {*state}, names, {*tensors})
        tensors |= state
    with without_torch_modes(), python_gc_paused():
        return SourceFiles("torch", len(shards), {key: list(flatten(tensors, component_of(key)))})


def _has_keys(state: Any) -> bool:
    """Whether a state is an app state, such as ``{"model": …, "step": 100}``, not one model's."""
    if not isinstance(state, dict) or not all(type(name) is str for name in state):
        return False
    if hasattr(state, "_metadata"):
        return False  # the state of one module, which may have extra state
    return not all(isinstance(value, torch.Tensor) for value in state.values())


def load_torch(path: Path) -> Any:
    """Load a file of ``torch.save``. Its tensors are views of the file.

    Raises:
        FileFormatError: As for :func:`read_torch`.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"PK\3\4":
            raise FileFormatError(
                f"{path} is a pickle, perhaps of torch.save before torch 1.6; save it anew: "
                "torch.save(torch.load(path, weights_only=True), new_path)"
            )
    mapped = MappedFile(path)
    try:
        checked_members(mapped.view)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251
    except (CasnapError, OSError):
        raise
    except BrokenError as e:
        raise FileFormatError(
            f"{path} is damaged, or was cut off while it was written or copied: {e!s:.300}. Copy "
            "it anew from where it came, or take another one"
        ) from e
    except Exception as e:  # torch.load raises errors of many types
        reason = (
            " ".join(str(e).split()) if isinstance(e, RefusedError) else str(e).partition("\n")[0]
        )
        raise FileFormatError(
            f"{path} is not read: {reason:.300}. casnap runs no code of a file, so it takes what "
            "torch.load(weights_only=True) reads; if you trust the file, load it with "
            "weights_only=False on a machine where it may run code, and save its tensors and plain "
            "values anew, such as vars() of an argparse.Namespace"
        ) from e
