"""Weights in the folder of a checkpoint of the Trainer: their names, their form, whose they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from casnap import Snapshot
from casnap.extending import (
    ForeignCheckpoints,
    WeightFiles,
    is_file,
    is_folder,
    matching,
    paths_in,
)
from casnap.integrations.notices import is_notice
from casnap.integrations.trainers import WEIGHTS

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # of Transformers 4
    revert_weight_conversion = None

ADAPTER = (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)
_LOADED = (*WEIGHTS, *ADAPTER, "pytorch_model_fsdp*")
"""Globs for the files, and the folder of FSDP, from which the Trainer itself loads weights."""

STAGED = "casnap-files"
"""The name of the temporary folder, in a checkpoint's folder, for files that are not yet whole."""


def weights_in(folder: Path) -> list[Path]:
    """Return the files and folders from which a Trainer without casnap would load weights.

    They are found by their names, so casnap or a user may have written them. Notices of casnap are
    left out.
    """
    weights = matching(folder, *_LOADED)
    for inner in filter(is_folder, paths_in(folder)):
        if inner.name not in (STAGED, WeightFiles.STAGED):
            weights += matching(inner, *ADAPTER)
    return [path for path in weights if not is_notice(path)]


def is_its_own(folder: Path) -> bool:
    """Whether the Trainer itself, or an engine of DeepSpeed, has written weights into a folder."""
    if ForeignCheckpoints(folder).library() == "DeepSpeed":
        return True
    return any(path.name not in WeightFiles(path.parent).names() for path in weights_in(folder))


def remove_weights(folder: Path) -> None:
    """Delete all files of weights from a checkpoint's folder, whoever has written them.

    A save calls this before it puts its own files there.
    """
    for place in {folder, *(path.parent for path in weights_in(folder))}:
        WeightFiles(place).remove()
    for path in filter(is_file, weights_in(folder)):
        path.unlink()


def may_be_others(snapshot: Snapshot, folder: Path) -> Iterator[Path]:
    """Yield the weights in a checkpoint's folder that its snapshot may not have.

    These are all of :func:`weights_in`, except files that the snapshot holds with the same name and
    bytes. The snapshot holds such files if a subclass of the Trainer has saved them.
    """
    has_files = "files" in snapshot.contents.keys()  # noqa: SIM118 - no dict
    files: Mapping[str, bytes] = snapshot.read_object("0/files") if has_files else {}
    for path in weights_in(folder):
        if not (path.name in files and is_file(path) and path.read_bytes() == files[path.name]):
            yield path


def put_staged(snapshot: Snapshot, folder: Path, staged: Path) -> None:
    """Move weights that PEFT or a subclass has written into a snapshot's folder, unchanged.

    Args:
        snapshot: The snapshot.
        folder: Its folder.
        staged: The folder into which PEFT or a subclass has written them. Weights in a folder in it
            go into a folder of the same name.
    """
    places: dict[Path, list[Path]] = {}
    for path in sorted(staged.rglob("*")):
        if fnmatch(path.name, "*.safetensors*") or path.name in ADAPTER:
            places.setdefault(path.parent, []).append(path)
    for place, paths in places.items():
        inner = folder / place.relative_to(staged)
        WeightFiles(inner).put(snapshot.contents, write=partial(_copy_into, paths))


def _copy_into(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in paths:
        shutil.copyfile(path, folder / path.name)


def give_up_weights(folder: Path) -> None:
    """Delete the weights that casnap has put into a checkpoint's folder, and into folders in it.

    Raises:
        OSError: Some files cannot be deleted.
        PlaceError: A folder cannot be looked at.
    """
    for place in (folder, *filter(is_folder, paths_in(folder))):
        WeightFiles(place).remove()


def is_weights(name: str) -> bool:
    """Whether a file has a name that weights have."""
    return any(fnmatch(name, pattern) for pattern in (*WEIGHTS, *ADAPTER))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Within this ``with`` block, Transformers shows no progress bar, such as that of its shards.

    The public function of Transformers would also change the bars of huggingface_hub.
    """
    was_active = transformers_logging._tqdm_active
    transformers_logging._tqdm_active = False
    try:
        yield
    finally:
        transformers_logging._tqdm_active = was_active


def tied_in(model: Any) -> set[str]:
    """Return the names of tensors that Transformers saves only under another name."""
    names = getattr(model, "all_tied_weights_keys", None)  # of Transformers 5
    return set(names or getattr(model, "_tied_weights_keys", None) or ())


def is_rewritten(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether Transformers saves other tensors than the model has, or gives them other names."""
    if not isinstance(model, PreTrainedModel):
        return False
    if getattr(model, "hf_quantizer", None) is not None or model._keys_to_ignore_on_save:
        return True
    if revert_weight_conversion is None:
        return bool(getattr(model, "_checkpoint_conversion_mapping", None))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    saved = revert_weight_conversion(model, dict(state))
    return saved.keys() != state.keys() or any(saved[name] is not state[name] for name in state)
