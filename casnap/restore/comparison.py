"""Report how a state differs from a snapshot, and load what fits into a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from casnap.errors import MismatchError, with_article
from casnap.format.entries import ContainerEntry, Entry, TensorEntry, ValueEntry
from casnap.format.names import component_of, key_of
from casnap.restore.key_state import KeyState, packed_lists
from casnap.restore.loaders import known_loader
from casnap.restore.loading import Loading
from casnap.restore.restore_report import RestoreReport
from casnap.restore.targets import is_extra_state, why_unfit
from casnap.restore.versions import added_by_module
from casnap.state.containers import DICT_KINDS, container_builder, live_components
from casnap.state.stateful import TORCH_NAMES, RNGState
from casnap.state.values import encode_key
from casnap.storage import Contents

# FSDP2's hook is there from the first forward on, and only shards the parameters again. The hook of
# activation checkpointing adds its wrapper's prefix to names; state dicts have names without it.
_HARMLESS_HOOKS = (
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.algorithms._checkpoint.",
)


def compare(
    contents: Contents, state: KeyState, module: torch.nn.Module, report: RestoreReport
) -> KeyState:
    """Report how a module differs from the snapshot; return its key with only what fits.

    A submodule is not compared if one of its hooks may change names or values while it loads. If a
    hook may only permit missing or unexpected names, the submodule's shapes are compared, but not
    its names.

    Args:
        contents: The snapshot.
        state: The key of the module.
        module: The module.
        report: Gets the differences.
    """
    rewritten = _paths_of_children(state, module, _rewrites)
    unchecked = rewritten + _paths_of_children(state, module, _forgives)
    stored_names = {p for p in state.entries if p.count("/") == 1 and not p.startswith(unchecked)}
    live_names = {f"{state.component}/{c}" for c in live_components(state.current)}
    live_names = {path for path in live_names if not path.startswith(unchecked)}
    shapes = {p: s for p, s in _other_shapes(state).items() if not p.startswith(rewritten)}
    missing = live_names - stored_names - state.skipped
    report.missing += sorted(missing - added_by_module(contents, state, module, missing))
    report.unexpected += sorted(stored_names - live_names)
    report.mismatched += [shapes[p] for p in sorted(shapes)]
    unfit = (stored_names ^ live_names) | shapes.keys()
    return replace(
        state.without(unfit),
        rewritten=rewritten,
        unchecked=unchecked,
        skipped=state.skipped | unfit,
    )


def load_whole(state: KeyState, module: torch.nn.Module, values: dict[str, Any]) -> None:
    """Load all of a state into a module.

    Some modules give items in ``state_dict()`` that they do not load, such as the scales of 4-bit
    weights. Such an item is allowed if its live tensor already has the value in the snapshot, as
    after a restore in place.

    Args:
        state: The key of the module.
        module: The module.
        values: The state to load, by name. Items that the module does not load are removed.

    Raises:
        MismatchError: The module does not load an item that its ``state_dict()`` gives, and its
            live value is not the one in the snapshot.
    """
    try:
        module.load_state_dict(values)
    except RuntimeError:
        unexpected_keys = module.load_state_dict(values, strict=False).unexpected_keys
        given = [key for key in unexpected_keys if key in state.current]
        if not given:
            raise
        # Only items are removed: the versions of the modules are an attribute of the dict.
        not_loaded = {key: values.pop(key) for key in given}
        # This raises an error if there are more items that the module does not load.
        module.load_state_dict(values)
        current = module.state_dict()
        unlike = [k for k, value in not_loaded.items() if not _is_alike(current.get(k), value)]
        if unlike:
            raise MismatchError(
                f"the state_dict() of {key_of(state.component)!r} gives {', '.join(unlike)}, but "
                "its load_state_dict() does not load that, and the live value differs from the one "
                "in the snapshot"
            ) from None


def _is_alike(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value, other)
    return bool(value == other)


def load_what_fits(
    state: KeyState, module: torch.nn.Module, values: dict[str, Any], report: RestoreReport
) -> None:
    """Load the values that fit a module's names and shapes; report the others.

    Args:
        state: The key of the module.
        module: The module.
        values: The state to load, by name.
        report: Gets the names and shapes that do not fit.
    """

    def path_of(key: object) -> str:
        return f"{state.component}/{component_of(encode_key(key))}"

    if _has_own_loader(module) and "strict" not in signature(module.load_state_dict).parameters:
        module.load_state_dict(values)
        return
    shapes: dict[str, str] = {}
    try:
        mismatch: Any = module.load_state_dict(values, strict=False)
    except RuntimeError:
        shapes = _other_shapes(state)
        unfit = [key for key in values if path_of(key) in shapes]
        if not unfit:
            raise
        for key in unfit:
            del values[key]
        mismatch = module.load_state_dict(values, strict=False)
    report.mismatched += [shapes[p] for p in sorted(shapes)]
    for keys, paths in (
        (getattr(mismatch, "missing_keys", ()), report.missing),
        (getattr(mismatch, "unexpected_keys", ()), report.unexpected),
    ):
        unchecked = [p for p in map(path_of, keys) if p.startswith(state.unchecked)]
        paths += [p for p in unchecked if p not in shapes and p not in state.skipped]


def _paths_of_children(
    state: KeyState, module: torch.nn.Module, does: Callable[[torch.nn.Module], bool]
) -> tuple[str, ...]:
    """Return the path prefix of each module, at any depth, for which ``does`` returns True.

    ``module`` is one of them. If it overrides ``load_state_dict``, nobody knows which names that
    takes: the only prefix is that of all of ``module``.
    """
    if _has_own_loader(module):
        return (f"{state.component}/",)
    return tuple(
        f"{state.component}/{component_of(f'{name}.' if name else '')}"
        for name, child in module.named_modules(remove_duplicate=False)
        if does(child)
    )


def _rewrites(module: torch.nn.Module) -> bool:
    """Whether a module itself, or a hook of it, may change keys or values while it loads."""
    loader, hooks = module._load_from_state_dict, module._load_state_dict_pre_hooks.values()
    is_hooked = not all(hook.__module__.startswith(_HARMLESS_HOOKS) for hook in hooks)
    return is_hooked or not loader.__module__.startswith("torch.nn.")


def _forgives(module: torch.nn.Module) -> bool:
    """Whether a module has a hook after loading, which may permit missing or unexpected names."""
    return bool(module._load_state_dict_post_hooks)


def _has_own_loader(module: torch.nn.Module) -> bool:
    return known_loader(module) is not torch.nn.Module


def _other_shapes(state: KeyState) -> dict[str, str]:
    """Return, by path, why a tensor of a module does not fit its entry, in words."""
    shapes = {}
    components = live_components(state.current)
    for component, value in zip(components, state.current.values(), strict=True):
        path = f"{state.component}/{component}"
        entry = state.entries.get(path)
        # A sparse tensor is a container in the snapshot.
        if not isinstance(entry, TensorEntry | ValueEntry) or not isinstance(value, torch.Tensor):
            continue
        if torch.nn.parameter.is_lazy(value) or is_extra_state(path):
            continue  # it takes any shape
        if reason := why_unfit(entry, tuple(value.shape), value):
            shapes[path] = f"{path}: {reason}"
    return shapes


# --- optimizers, and other states that are no modules -------------------------------------------


def why_refused(contents: Contents, state: KeyState) -> list[str]:
    """Return, in words, why a value cannot load its state in the snapshot; empty if it can.

    Only the loaders of torch and casnap are checked. Any other loader raises its own errors.

    Args:
        contents: The snapshot.
        state: The key of the value.
    """
    component, stateful, entries = state.component, state.stateful, state.entries
    loader = known_loader(stateful)
    if component in entries and loader is not None:
        entry = entries[component]
        if not isinstance(entry, ContainerEntry) or entry.kind not in DICT_KINDS:
            type_name = type(stateful).__name__
            advice = f"read_object({component!r}) reads it"
            return [
                f"{component}: {_type_text(entry)} in the snapshot; {type_name} loads a dict; "
                f"{advice}"
            ]
    if isinstance(stateful, torch.optim.Optimizer) and loader is torch.optim.Optimizer:
        return list(_other_groups(contents, stateful, state))
    if loader is RNGState and component in entries:
        return list(_no_random_state(component, state))
    return list(_other_keys(contents, state))


def _other_groups(
    contents: Contents, optimizer: torch.optim.Optimizer, state: KeyState
) -> Iterator[str]:
    groups, groups_path = optimizer.param_groups, f"{state.component}/param_groups"
    if groups_path in state.known:
        return  # they stay as they are
    for path in (groups_path, f"{state.component}/state"):
        if path not in state.entries:
            yield f"{path}: not in the snapshot; an optimizer needs it"
            return
    live, in_snapshot = len(groups), _count(state.entries[groups_path])
    if live != in_snapshot:
        yield f"{groups_path}: {live} parameter groups here, {in_snapshot} in the snapshot"
        return
    paths = [f"{groups_path}/{i}/params" for i in range(live)]
    packed = packed_lists(contents, state, paths)
    for i, path in enumerate(paths):
        live = len(groups[i]["params"])
        in_snapshot = len(packed[path]) if path in packed else _count(state.entries.get(path))
        if live != in_snapshot:
            yield f"{groups_path}/{i}: {live} parameters here, {in_snapshot} in the snapshot"


def _other_keys(contents: Contents, state: KeyState) -> Iterator[str]:
    """Yield a sentence for each dict whose keys are numbers here, but strings in the snapshot.

    Checkpoints of DCP hold all keys as strings. A value that loads such a dict would look for its
    numbers, and not find them.
    """
    loading, live_keys = Loading(contents), dict[str, set[Any]]()
    for path, mapping in state.mappings():
        entry = state.entries.get(path)
        if isinstance(entry, ContainerEntry) and not all(type(key) is str for key in mapping):
            loading.add(path, entry)
            live_keys[path] = set(mapping)
    for path, leaf in loading.load().items():
        entry, content = leaf.entry, leaf.content
        if not isinstance(entry, ContainerEntry) or entry.kind not in DICT_KINDS:
            continue
        assert isinstance(content, bytes)
        keys = set(container_builder(path, entry, content)[1]([None] * entry.count))
        numbers = {key for key in live_keys[path] if type(key) is not str}
        texts = {k for k in keys - live_keys[path] if k in map(str, numbers) or _is_number(k)}
        if texts and all(type(key) is str for key in keys):
            yield (
                f"{path}: the key {min(texts)!r:.80} is a text in the snapshot, where this state "
                f"has keys like {next(iter(numbers))!r:.80}: DCP's own files hold all keys as "
                f"texts. read_object({state.component!r}) reads it; give the keys their type, then "
                "load that"
            )


def _is_number(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit()


def _no_random_state(component: str, state: KeyState) -> Iterator[str]:
    parts = [f"{component}/{name}" for name in TORCH_NAMES]
    if not any(isinstance(state.entries.get(part), TensorEntry) for part in parts):
        yield f"{component}: no random state of torch in the snapshot, none of {', '.join(parts)}"


def _count(entry: Entry | None) -> int:
    return entry.count if isinstance(entry, ContainerEntry) else 0


def _type_text(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return with_article(entry.kind)
    return f"a value of kind {entry.kind}"
