"""The contenders: how each of them saves and loads a flat state. All but casnap are synced here."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tools.bench.measure import fsync_tree
from tools.bench.states import State

CASNAP = "**casnap**"
TORCH = "torch.save"
SAFETENSORS = "safetensors"
DCP = "dcp.save"
DCP_2 = "dcp.save, 2 threads"
TORCHSNAPSHOT = "torchsnapshot 0.1.0"
_LOADED_BY = {TORCH: "torch.load(mmap=True)", DCP: "dcp.load"}

Save = Callable[[State, Path], None]
Load = Callable[[State, Path], None]

warnings.simplefilter("ignore")
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
logging.getLogger("torchsnapshot").setLevel(logging.ERROR)


def installed(name: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def casnap_take(state: State, path: Path) -> None:
    """Take a snapshot; the parent folder is, or becomes, the store."""
    from casnap import Snapshot, StateDict

    Snapshot.take(str(path), {"model": StateDict(**state)})


def casnap_compare(state: State, path: Path) -> None:
    """Compare with a snapshot, which is opened anew and has the same."""
    from casnap import Snapshot, StateDict

    assert Snapshot(str(path)).compare({"model": StateDict(**state)}).equal


def casnap_witness(state: State, path: Path) -> None:
    """Compare with the witness of a path; the first call stores it."""
    from casnap import StateDict, Store

    assert Store(path.parent).witness({"model": StateDict(**state)}, path.name).equal


def casnap_restore(state: State, path: Path) -> None:
    """Restore in place, from a snapshot that is opened anew."""
    from casnap import Snapshot, StateDict

    Snapshot(str(path)).restore({"model": StateDict(**state)})


def torch_save(state: State, path: Path) -> None:
    """Save by ``torch.save``."""
    torch.save(state, path)
    fsync_tree(path)


def torch_load(state: State, path: Path) -> None:
    """Map the file and copy it into the tensors."""
    _copy(torch.load(path, mmap=True, weights_only=True), state)


def safetensors_save(state: State, path: Path) -> None:
    """Save by ``safetensors``."""
    from safetensors.torch import save_file

    save_file(state, path)
    fsync_tree(path)


def safetensors_load(state: State, path: Path) -> None:
    """Load a file tensor by tensor and copy it into the tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as source:
        for name, tensor in state.items():
            tensor.copy_(source.get_tensor(name))


def dcp_save(state: State, path: Path) -> None:
    """Save by ``torch.distributed.checkpoint``."""
    dcp.save({"model": state}, checkpoint_id=path)
    fsync_tree(path)


def dcp_save_2(state: State, path: Path) -> None:
    """Save by ``torch.distributed.checkpoint`` with two writing threads."""
    dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
    fsync_tree(path)


def dcp_load(state: State, path: Path) -> None:
    """Load in place by ``torch.distributed.checkpoint``."""
    dcp.load({"model": state}, checkpoint_id=path)


def torchsnapshot_take(state: State, path: Path) -> None:
    """Take by TorchSnapshot."""
    import torchsnapshot

    torchsnapshot.Snapshot.take(str(path), {"model": torchsnapshot.StateDict(**state)})
    fsync_tree(path)


def torchsnapshot_restore(state: State, path: Path) -> None:
    """Restore in place by TorchSnapshot."""
    import torchsnapshot

    torchsnapshot.Snapshot(str(path)).restore({"model": torchsnapshot.StateDict(**state)})


def _copy(source: State, target: State) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


def savers() -> dict[str, Save]:
    """Return how each installed peer saves."""
    found: dict[str, Save] = {TORCH: torch_save, DCP: dcp_save, DCP_2: dcp_save_2}
    if installed("safetensors"):
        found[SAFETENSORS] = safetensors_save
    if installed("torchsnapshot"):
        found[TORCHSNAPSHOT] = torchsnapshot_take
    return found


def loaders() -> dict[str, tuple[Save, Load]]:
    """Return how each installed peer saves, and loads in place what it saved."""
    loads = {
        TORCH: torch_load,
        DCP: dcp_load,
        SAFETENSORS: safetensors_load,
        TORCHSNAPSHOT: torchsnapshot_restore,
    }
    return {name: (save, loads[name]) for name, save in savers().items() if name in loads}


def loaded_by(name: str) -> str:
    """Return what the loading of a contender is called."""
    return _LOADED_BY.get(name, name)


def kept_stager() -> DefaultStager:
    """Return a stager with the options of dcp's default one, to be used for many saves."""
    return DefaultStager(StagingOptions(False, False, False, False))


def dcp_async_save(state: State, path: Path, stager: DefaultStager | None) -> Any:
    """Start a save by dcp; returns once staged, with the future of the rest."""
    return dcp.async_save({"model": state}, checkpoint_id=path, async_stager=stager)
