"""How an optimizer, or another state that is no module, differs from a snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from casnap.format.entries import ContainerEntry, Entry, TensorEntry
from casnap.restore.key_state import KeyState
from casnap.state.containers import DICT_KINDS
from casnap.state.stateful import TORCH_NAMES, RNGState, StateDict


def why_unfit(state: KeyState) -> list[str]:
    """Return why a value would refuse to load what the snapshot has for it.

    Only loaders of torch and casnap are known. Any other loader says itself what it refuses.
    """
    component, stateful, entries = state.component, state.stateful, state.entries
    if component in entries and _wants_dict(stateful):
        entry = entries[component]
        if not isinstance(entry, ContainerEntry) or entry.kind not in DICT_KINDS:
            wanted = type(stateful).__name__
            read = f"read_object({component!r}) reads it"
            return [f"{component}: {_named(entry)} in the snapshot; {wanted} loads a dict; {read}"]
    if isinstance(stateful, torch.optim.Optimizer) and _is_of_torch(stateful):
        return list(_other_groups(component, stateful, state))
    if type(stateful) is RNGState and component in entries:
        return list(_no_random_state(component, state))
    return []


def _wants_dict(stateful: object) -> bool:
    loader = getattr(type(stateful), "load_state_dict", None)
    return (
        loader is torch.nn.Module.load_state_dict
        or loader is StateDict.load_state_dict
        or loader is RNGState.load_state_dict
        or (isinstance(stateful, torch.optim.Optimizer) and _is_of_torch(stateful))
    )


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it loads as torch does, and no hook changes the state before."""
    is_own = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not is_own and not getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)


def _other_groups(
    component: str, optimizer: torch.optim.Optimizer, state: KeyState
) -> Iterator[str]:
    groups, where = optimizer.param_groups, f"{component}/param_groups"
    for path in (where, f"{component}/state"):
        if path not in state.entries:
            yield f"{path}: not in the snapshot; an optimizer needs it"
            return
    live, in_snapshot = len(groups), _count(state.entries[where])
    if live != in_snapshot:
        yield f"{where}: {live} parameter groups here, {in_snapshot} in the snapshot"
        return
    for i, group in enumerate(groups):
        live, in_snapshot = len(group["params"]), _count(state.entries.get(f"{where}/{i}/params"))
        if live != in_snapshot:
            yield f"{where}/{i}: {live} parameters here, {in_snapshot} in the snapshot"


def _no_random_state(component: str, state: KeyState) -> Iterator[str]:
    parts = [f"{component}/{name}" for name in TORCH_NAMES]
    if not any(isinstance(state.entries.get(part), TensorEntry) for part in parts):
        yield f"{component}: no random state of torch in the snapshot, none of {', '.join(parts)}"


def _count(entry: Entry | None) -> int:
    return entry.count if isinstance(entry, ContainerEntry) else 0


def _named(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"a {entry.kind}"
    return f"a value of kind {entry.kind}"
