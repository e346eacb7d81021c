"""Fill the parameters and buffers of a module in place, without its ``load_state_dict``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from casnap.errors import EntryNotFoundError, MismatchError, nearest, with_article
from casnap.format.entries import ContainerEntry, TensorEntry, check_known
from casnap.format.names import key_of
from casnap.format.region import Region
from casnap.restore.loading import Loading
from casnap.restore.remarks import warn_of_health
from casnap.restore.renaming import Rename, renamed
from casnap.restore.restore_report import RestoreReport, mismatch_message
from casnap.restore.targets import fits, memory_of, why_unfit
from casnap.restore.ties import conflict_text, conflicting_ties
from casnap.restore.wrappers import advice_on_wrappers
from casnap.runtime.machine import DiskReads
from casnap.runtime.progress import Progress
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.devices import synchronize
from casnap.state.overlap import overlaps_itself
from casnap.state.parts import holds_parts, why_not_whole
from casnap.state.sharded import Shards, shard_again, shards_of
from casnap.state.tensors import is_fillable, why_not_writable
from casnap.storage import Contents, Listed

_log = logging.getLogger("casnap")
_EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class LiveTensor(NamedTuple):
    """A parameter or persistent buffer of a module, or a tensor of a state dict.

    Attributes:
        tensors: The dict that holds the tensor: a submodule's parameters or buffers, or the state
            dict.
        key: The tensor's key in that dict.
        value: The tensor.
    """

    tensors: MutableMapping[str, Any]
    key: str
    value: torch.Tensor


@without_torch_modes()
def load_into(
    contents: Contents,
    module: torch.nn.Module,
    prefix: str,
    rename: Rename | None,
    device: torch.device | str | None,
    *,
    strict: bool,
    progress: Progress | None = None,
    reuse: bool = False,
) -> RestoreReport:
    """Fill the parameters and buffers of a module in place.

    Args:
        contents: The snapshot.
        module: The module.
        prefix: The path below which the snapshot has the module's entries.
        rename: Maps names in the snapshot to names in the module; None if they are the same.
        device: The device for the new memory of tensors that are on the meta device; None if no
            tensor may be there.
        strict: Whether a difference between module and snapshot is an error.
        progress: Called with the phase, the bytes done, and the total.
        reuse: Whether to hash the tensors, and read only chunks that differ.

    Raises:
        EntryNotFoundError: There is nothing below ``prefix``, or several ranks have their own.
        MismatchError: With ``strict``, the module and the entries below ``prefix`` differ.
        DamagedError: Stored bytes are missing or damaged.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"load_into() fills a torch.nn.Module; got {with_article(type(module).__name__)}. "
            "restore() fills other states, and read_object(path, tensor) a tensor"
        )
    shard_again(module)
    tensors = dict(tensors_of(module))
    report = RestoreReport()
    entries, places = match(contents, tensors, prefix, rename, device, report)
    extra_states = _extra_states_of(module)
    left = {e.path: n for n, e in entries.items() if n.partition("/")[0] in extra_states}
    report.unexpected = [path for path in report.unexpected if path not in left]
    report.missing += [
        f"{name}: on the meta device here, and not persistent, so in no snapshot; give it values"
        for name, each in tensors_of(module, persistent=False)
        if each.value.is_meta
    ]
    if strict and report:
        raise mismatch(contents, prefix, report, fits=bool(places))
    disk = DiskReads()
    loading = Loading(contents, progress)
    synchronize(memory_of(places).values())
    for name, shards in places.items():
        filled_boxes = zip(shards.boxes, shards.tensors, strict=True)
        # A tensor on the meta device has no values that could be kept.
        held = shards.tensors if reuse and not tensors[name].value.is_meta else ()
        loading.add(entries[name].path, entries[name].entry, filled_boxes, held=held)
    try:
        loading.load()
    finally:
        # torch counts writes to a sharded tensor apart from writes to its shards.
        torch.autograd.graph.increment_version([shards.value for shards in places.values()])
    if left:
        _log.warning(
            "%s: load_into() fills parameters and buffers; the extra state of the module stays as "
            "it is (%s). restore() loads it",
            contents.label,
            ", ".join(dict.fromkeys(name.partition("/")[0] for name in left.values())),
        )
    _replace(tensors, places)
    report.kept_bytes = loading.kept_bytes
    report.disk_bytes = disk.nbytes()
    warn_of_health(contents)
    return report


def mismatch(
    contents: Contents, prefix: str, report: RestoreReport, *, fits: bool
) -> MismatchError:
    """Return the error for tensors that do not all fit the entries below a prefix.

    Args:
        contents: The snapshot.
        prefix: The prefix.
        report: The tensors and entries that do not fit.
        fits: Whether some tensors do fit.
    """
    start = prefix.rstrip("/")
    unexpected = [path[len(start) + 1 :] for path in report.unexpected]
    advice = advice_on_wrappers(start, report.missing, unexpected)
    lines = [advice] * bool(advice)
    if any(_EXTRA_STATE in path for path in report.unexpected):
        lines.append("restore() alone loads extra state of modules.")
    lines += ["Pass strict=False to fill what fits."] * fits
    return MismatchError(mismatch_message(report, contents.label, lines))


def match(
    contents: Contents,
    tensors: Mapping[str, LiveTensor],
    prefix: str,
    rename: Rename | None,
    device: torch.device | str | None,
    report: RestoreReport,
) -> tuple[dict[str, Listed], dict[str, Shards]]:
    """Match live tensors with the entries below a prefix.

    Args:
        contents: The snapshot.
        tensors: The live tensors, by name.
        prefix: The path below which the snapshot has the entries.
        rename: Maps names in the snapshot to names of live tensors; None if they are the same.
        device: The device for the new memory of tensors that are on the meta device; None if no
            tensor may be there.
        report: Gets everything that does not fit.

    Returns:
        Name of the live tensor → entry; and name → memory to fill; both for tensors that fit.
    """
    entries = _entries_below(contents, prefix)
    if rename is not None:
        names = renamed(contents.label, {n: each.path for n, each in entries.items()}, rename)
        entries = {new_name: entries[name] for new_name, name in names.items()}
    check_known(contents.label, ((e.path, e.entry) for n, e in entries.items() if n in tensors))
    places = _places(tensors, entries, device, report)
    by_path = {entries[name].path: name for name in places}
    targets = {path: places[name] for path, name in by_path.items()}
    stored = {path: entries[name].entry for path, name in by_path.items()}
    for paths in conflicting_ties(contents, targets, stored):
        report.mismatched.append(conflict_text(paths))
        for path in paths:
            del places[by_path[path]]
    filled = {id(tensors[name].value) for name in places}
    report.missing += sorted(
        name
        for name, each in tensors.items()
        # A tied tensor may be stored under one of its names.
        if name not in entries and id(each.value) not in filled
    )
    report.unexpected += sorted(each.path for name, each in entries.items() if name not in tensors)
    return entries, places


# --- what the snapshot has ----------------------------------------------------------------------


def _entries_below(contents: Contents, prefix: str) -> dict[str, Listed]:
    """Return the tensors and values below a path, by their names below it.

    ``prefix`` may also name a submodule: then the names in the snapshot go on with a dot.

    Raises:
        EntryNotFoundError: There is nothing below ``prefix``, or several ranks have their own.
    """
    prefix = prefix.rstrip("/")
    for start in (f"{prefix}/", prefix if prefix.endswith(".") else f"{prefix}."):
        by_name: dict[str, list[Listed]] = {}
        for each in contents.listed(start):
            if not isinstance(each.entry, ContainerEntry):
                by_name.setdefault(each.path, []).append(each)
        for path, names in by_name.items():
            shared = [each for each in names if each.owner is None]
            owners = [each.owner for each in names if each.owner is not None]
            if not shared:
                contents.check_one_keeper(path, owners, prefix)
        if by_name:
            return {
                "/".join(map(key_of, path[len(start) :].split("/"))): names[0]
                for path, names in by_name.items()
            }
    keys = sorted(contents.trees(None))
    advice = nearest(prefix, keys) or f"; it has the keys {', '.join(keys)[:200]}"
    raise EntryNotFoundError(f"{contents.label} has nothing below {prefix!r}{advice}")


# --- what the module has ------------------------------------------------------------------------

# Activation checkpointing adds this part to names; a state dict has the names without it.
_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."


def _extra_states_of(module: torch.nn.Module) -> set[str]:
    """Return the names, in ``state_dict()``, of the extra states that submodules load."""
    return {
        f"{path}.{_EXTRA_STATE}".replace(_CHECKPOINT_WRAPPER, "").removeprefix(".")
        for path, part in module.named_modules(remove_duplicate=False)
        if type(part).set_extra_state is not torch.nn.Module.set_extra_state
    }


def tensors_of(
    module: torch.nn.Module, *, persistent: bool = True
) -> Iterator[tuple[str, LiveTensor]]:
    """Yield the parameters and persistent buffers by name, or only the buffers that do not persist.

    A parameter that FSDP2 has gathered for a forward is yielded whole.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        lead = f"{path}.".replace(_CHECKPOINT_WRAPPER, "") if path else ""
        transient = part._non_persistent_buffers_set
        for tensors in (part._parameters, part._buffers) if persistent else (part._buffers,):
            for key, value in tensors.items():
                if value is not None and (key in transient) != persistent:
                    yield lead + key, LiveTensor(tensors, key, value)


def _places(
    tensors: Mapping[str, LiveTensor],
    entries: Mapping[str, Listed],
    device: torch.device | str | None,
    report: RestoreReport,
) -> dict[str, Shards]:
    """Return, by name, the memory to fill; report the tensors that cannot be filled.

    Tensors on the meta device get new memory. Tied ones share it.

    Args:
        tensors: The live tensors, by name. Those without an entry are ignored.
        entries: The entries, by name.
        device: The device of new memory; None if no tensor may be on the meta device.
        report: Gets the tensors that cannot be filled, and why.
    """
    device_asked = None if device is None else torch.device(device)
    places: dict[str, Shards] = {}
    by_address: dict[int, torch.Tensor] = {}
    unfit: dict[str, str] = {}
    for name, each in tensors.items():
        if name not in entries:
            continue
        value = each.value
        reason = _why_not_loaded(value, entries[name], device_asked)
        if reason:
            unfit[name] = f"{entries[name].path}: {reason}"
            continue
        if value.is_meta:
            if id(value) not in by_address:
                by_address[id(value)] = torch.empty_like(value, device=device_asked)
            value = by_address[id(value)]
        shape = tuple(value.shape)
        shards = Shards(shape, (Region.whole(shape),), (value,), value)
        places[name] = shards_of(name, value) or shards
    report.mismatched += [unfit[name] for name in sorted(unfit)]
    return places


def _why_not_loaded(value: torch.Tensor, each: Listed, device: torch.device | None) -> str:
    """Return why a tensor cannot be filled with an entry; empty if it can.

    Args:
        value: The tensor.
        each: The entry.
        device: The device of new memory for tensors on the meta device.
    """
    entry = each.entry
    if reason := _why_not_one_box(value) or why_unfit(entry, tuple(value.shape)):
        return reason
    assert isinstance(entry, TensorEntry)
    if not fits(entry, value):
        return f"{value.dtype} here, {entry.kind} of {entry.dtype} in the snapshot: no such cast"
    if value.is_meta:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        if device is not None and is_plain:
            return ""
        advice = ", or pass device=" if is_plain else ""
        return f"on the meta device here; call to_empty(device=...) first{advice}"
    if device is not None and not _is_on(value, device):
        return f"on {value.device} here; device= is for tensors on the meta device: use to() first"
    shards = shards_of(each.path, value)
    return next(filter(None, map(_why_not_filled, shards.tensors if shards else (value,))), "")


def _why_not_one_box(value: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(value):
        return "has no shape here yet; run the module once first"
    if value.is_nested:
        return "a nested tensor here; use a plain tensor"
    return why_not_whole(value) if holds_parts(value) else ""


def _why_not_filled(memory: torch.Tensor) -> str:
    if reason := why_not_writable(memory):
        return reason
    if not is_fillable(memory) or overlaps_itself(memory):
        return "cannot be filled in place here; use restore(), or a plain tensor"
    return ""


def _is_on(value: torch.Tensor, device: torch.device) -> bool:
    return value.device.type == device.type and device.index in (None, value.device.index)


def _replace(tensors: Mapping[str, LiveTensor], places: Mapping[str, Shards]) -> None:
    """Replace the module's tensors on the meta device by their new memory; keep ties.

    Args:
        tensors: The live tensors, by name.
        places: The memory that was filled, by name.
    """
    replaced: dict[int, torch.Tensor] = {}
    by_id = {id(tensors[name].value): places[name].value for name in places}
    for each in tensors.values():
        value = each.value
        if not value.is_meta or id(value) not in by_id:
            continue
        if id(value) not in replaced:
            fresh = by_id[id(value)]
            is_parameter = isinstance(value, torch.nn.Parameter)
            replaced[id(value)] = (
                torch.nn.Parameter(fresh, value.requires_grad) if is_parameter else fresh
            )
        each.tensors[each.key] = replaced[id(value)]
