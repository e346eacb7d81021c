"""Giving whole app states back, in place where it can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

from casnap.capture import random_states_first
from casnap.containers import segment_of
from casnap.contents import Contents
from casnap.errors import MismatchError
from casnap.flatten import inflate, tensor_targets
from casnap.format import Entry, TensorEntry, payload_of
from casnap.loading import Loading, Progress
from casnap.overlap import filled_in_place, overlapping
from casnap.staging import settle
from casnap.state import RNGState, Stateful
from casnap.tensors import carrier_dtype


@dataclass
class RestoreReport:
    """What a restore with ``strict=False`` left alone.

    Attributes:
        missing: Paths of the state that the snapshot lacks.
        unexpected: Paths of the snapshot that the state lacks.
        mismatched: Paths whose shapes differ.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was left alone."""
        return bool(self.missing or self.unexpected or self.mismatched)


@dataclass
class _Part:
    """One key of the app state to be restored."""

    key: str
    segment: str
    stateful: Stateful
    current: Any
    entries: dict[str, Entry]
    skipped: set[str] = field(default_factory=set)


def restore(
    contents: Contents,
    app_state: Mapping[str, Stateful],
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> RestoreReport:
    """Restore an app state, or some keys of it.

    Raises:
        MismatchError: Under ``strict``, the snapshot lacks a key, or a module differs from it;
            all that differs is listed, and nothing was written.
        DamagedError: Something could not be read whole; no ``load_state_dict`` was called, but
            tensors that are restored in place may hold new values already.
    """
    keys = random_states_first(app_state)
    report = RestoreReport()
    parts = [p for k in keys if (p := _part(contents, k, app_state[k], report)) is not None]
    loading = Loading(contents, progress)
    targets: dict[str, torch.Tensor] = {}
    for part in parts:
        targets |= _targets(part, report)
    if strict and report:
        raise MismatchError(_mismatch(contents, report))
    entries = {path: entry for part in parts for path, entry in part.entries.items()}
    # Each could overwrite a part of the other, so these are read apart at first.
    groups = overlapping(targets, lambda path: payload_of(entries[path]))
    apart = {path for group in groups for path in group}
    settle(targets.values())
    for path, entry in entries.items():
        loading.add(path, entry, None if path in apart else targets.get(path))
    leaves = loading.load()
    for group in groups:
        if filled_in_place((targets[p], leaves[p].content) for p in group):
            leaves |= {p: leaves[p]._replace(content=targets[p]) for p in group}
    # The random state last: to load the others may draw from it.
    for part in sorted(parts, key=lambda p: isinstance(p.stateful, RNGState)):
        state = inflate(part.segment, leaves, allow_pickle=allow_pickle)
        if isinstance(part.stateful, torch.nn.Module) and not strict:
            _load_what_fits(part, part.stateful, state, report)
        else:
            part.stateful.load_state_dict(state)
    return report


def _part(contents: Contents, key: str, stateful: Stateful, report: RestoreReport) -> _Part | None:
    segment = segment_of(key)
    seen = contents.trees(0).get(segment)
    if seen is None:
        report.missing.append(key)
        return None
    entries = {segment + inner: e for inner, e in seen.items()}
    return _Part(key, segment, stateful, stateful.state_dict(), entries)


def _targets(part: _Part, report: RestoreReport) -> dict[str, torch.Tensor]:
    """Return the tensors to fill in place; note where module and snapshot differ."""
    targets = tensor_targets(part.current, part.segment)
    if isinstance(part.stateful, torch.nn.Module):
        rewritten = [f"{part.segment}/{segment_of(name)}" for name in _rewritten(part.stateful)]
        if not rewritten:
            part.skipped = _compare(part, report)
        # Filled in place, what is renamed on its way could be overwritten before it is read.
        targets = {p: t for p, t in targets.items() if not p.startswith(tuple(rewritten))}
    return {p: t for p, t in targets.items() if p in part.entries and _fits(part.entries[p], t)}


def _fits(entry: Entry, current: torch.Tensor) -> bool:
    """Whether a tensor of the state can be filled with an entry and lose nothing."""
    return (
        isinstance(entry, TensorEntry)
        and entry.kind in ("tensor", "parameter", "buffer")
        and entry.quantization is None
        and tuple(current.shape) == entry.shape
        and torch.can_cast(carrier_dtype(entry), current.dtype)
    )


def _rewritten(module: torch.nn.Module) -> list[str]:
    """Return the prefixes of a module's keys that may be renamed or changed on their way in.

    Where there are any, keys cannot be compared beforehand.
    """
    if _has_own_loader(module):
        return [""]
    return [
        f"{name}." if name else ""
        for name, child in module.named_modules(remove_duplicate=False)
        if child._load_state_dict_pre_hooks
        or not type(child)._load_from_state_dict.__module__.startswith("torch.nn.")
    ]


def _has_own_loader(module: torch.nn.Module) -> bool:
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict


def _load_what_fits(
    part: _Part, module: torch.nn.Module, state: dict[str, Any], report: RestoreReport
) -> None:
    for key in [k for k in state if f"{part.segment}/{segment_of(k)}" in part.skipped]:
        del state[key]
    if _has_own_loader(module) and "strict" not in signature(module.load_state_dict).parameters:
        module.load_state_dict(state)
        return
    left: Any = module.load_state_dict(state, strict=False)
    if _rewritten(module) and left is not None:
        report.missing += [f"{part.segment}/{segment_of(k)}" for k in left.missing_keys]
        report.unexpected += [f"{part.segment}/{segment_of(k)}" for k in left.unexpected_keys]


def _compare(part: _Part, report: RestoreReport) -> set[str]:
    """Note what differs between a module and the snapshot; return what must not be loaded."""
    there = {p for p in part.entries if p.count("/") == 1}
    here = {f"{part.segment}/{segment_of(k)}" for k in part.current}
    shapes = {}
    for key, value in part.current.items():
        path = f"{part.segment}/{segment_of(key)}"
        entry = part.entries.get(path)
        if not isinstance(entry, TensorEntry) or not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            shapes[path] = f"{path}: on the meta device here; call to_empty(device=...) first"
        elif tuple(value.shape) != entry.shape:
            shapes[path] = f"{path}: {tuple(value.shape)} here, {entry.shape} in the snapshot"
    report.missing += sorted(here - there)
    report.unexpected += sorted(there - here)
    report.mismatched += [shapes[p] for p in sorted(shapes)]
    return (there - here) | shapes.keys()


def _mismatch(contents: Contents, report: RestoreReport) -> str:
    lines = [f"{contents.where} does not fit the state; nothing was restored"]
    for what, paths in (
        ("missing in the snapshot", report.missing),
        ("unexpected in the snapshot", report.unexpected),
        ("of another shape", report.mismatched),
    ):
        lines += [f"  {what} ({len(paths)}):"] + [f"    {p}" for p in paths] if paths else []
    lines.append("Pass strict=False to restore what fits.")
    return "\n".join(lines)
