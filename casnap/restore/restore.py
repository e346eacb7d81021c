"""Giving whole app states back, in place where it can be, by one process or many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import msgspec
import torch

from casnap.errors import MismatchError
from casnap.format.entries import ContainerEntry, Entry, TensorEntry
from casnap.format.names import rank_names
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.restore.loading import Loading
from casnap.restore.shared_reads import fetch_shared
from casnap.runtime.progress import Progress
from casnap.runtime.torch_modes import plain
from casnap.state.containers import component_of, container_builder
from casnap.state.cuda import synchronize
from casnap.state.flatten import flatten, inflate, shard_targets, tensor_targets
from casnap.state.overlap import conflicting_groups, end_address, fill_shared_memory
from casnap.state.sharded import Shards, shards_of, without_torch_function
from casnap.state.stateful import RNGState, Stateful, random_states_first
from casnap.state.tensors import Leaf, carrier_dtype, holds_no_values, is_float4
from casnap.storage.contents import Contents


@dataclass
class RestoreReport:
    """What a restore left alone.

    Attributes:
        missing: Paths of the state that the snapshot lacks, or keeps for other ranks alone.
        unexpected: Paths of the snapshot that the state lacks.
        mismatched: Paths whose shapes differ.
        left_behind: Keys, with their ranks, of ranks that this world does not have. That is no
            error.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything of the state was left alone."""
        return bool(self.missing or self.unexpected or self.mismatched)


@dataclass(frozen=True)
class RestoreOptions:
    """How to restore; see :meth:`casnap.Snapshot.restore`."""

    strict: bool = True
    allow_pickle: bool = False
    progress: Progress | None = None
    read_once: bool = True


@dataclass
class _Part:
    """One key of the app state to be restored; what is ``given`` is not read.

    Whether names below the prefixes ``unchecked`` fit is known to the module alone.
    """

    key: str
    component: str
    stateful: Stateful
    current: Any
    entries: dict[str, Entry]
    given: dict[str, Leaf] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    unchecked: tuple[str, ...] = ()


class _Targets:
    """What is filled in place: tensors, and what this rank holds of sharded ones, by path."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, Shards] = {}

    def memory(self) -> dict[tuple[str, int], torch.Tensor]:
        """Return all that is filled, by path and number of the part."""
        parts = {
            (path, i): tensor
            for path, shards in self.shards.items()
            for i, tensor in enumerate(_extents(shards.tensors))
        }
        return {(path, 0): tensor for path, tensor in self.tensors.items()} | parts


def _extents(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the memory that parts of one tensor lie in; where they take turns there, all as one."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for part in parts:
        by_storage.setdefault(part.untyped_storage().data_ptr(), []).append(part)
    for same in by_storage.values():
        first = min(same, key=torch.Tensor.data_ptr)
        stop = max(end_address(part) for part in same)
        yield first.as_strided(((stop - first.data_ptr()) // first.itemsize,), (1,))


def restore(
    contents: Contents, app_state: Mapping[str, Stateful], options: RestoreOptions, comm: Comm
) -> RestoreReport:
    """Restore an app state, or some keys of it; all ranks call this.

    Raises:
        MismatchError: Under ``strict``, the snapshot lacks a key, or a module differs from it;
            all that differs is listed, and nothing was written on any rank.
        DamagedError: Something could not be read whole; no ``load_state_dict`` was called, but
            tensors that are restored in place may hold new values already.
        RankError: Another rank failed, died or hangs.
    """
    comm.enter_phase("beginning a restore")
    keys = _agreed_keys(contents, app_state, options, comm)
    report = RestoreReport(left_behind=_left_behind(contents, comm.size))
    parts = [
        p for k in keys if (p := _part(contents, k, app_state[k], report, comm.rank)) is not None
    ]
    targets = _Targets()
    with plain():
        for part in parts:
            _add_targets(targets, part, report)
    if options.strict and report:
        raise MismatchError(_mismatch(contents, report))
    entries = {path: entry for part in parts for path, entry in part.entries.items()}
    comm.enter_phase("reading")
    leaves = _loaded(contents, entries, targets, options, comm)
    for part in parts:
        leaves |= part.given
    # Nobody changes anything that others could not follow.
    comm.all_gather(b"")
    comm.enter_phase("loading states")
    # The random state last: to load the others may draw from it.
    for part in sorted(parts, key=lambda p: isinstance(p.stateful, RNGState)):
        with plain():
            state = inflate(part.component, leaves, allow_pickle=options.allow_pickle)
        if isinstance(part.stateful, torch.nn.Module) and not options.strict:
            _load_what_fits(part, part.stateful, state, report)
        else:
            part.stateful.load_state_dict(state)
    comm.all_gather(b"")
    return report


def _agreed_keys(
    contents: Contents, app_state: Mapping[str, Stateful], options: RestoreOptions, comm: Comm
) -> list[str]:
    """Return the keys in an order that is the same on all ranks, though some may lack some.

    To read and load states may be a collective of their own.
    """
    keys = random_states_first(app_state)
    heard = comm.gather(encode(keys))
    everyone = [msgspec.msgpack.decode(said, type=list[str]) for said in heard]
    order = list(dict.fromkeys(key for theirs in everyone for key in theirs))
    said = comm.broadcast(encode((contents.row.commit, options.read_once, order)))
    commit, once, order = msgspec.msgpack.decode(said, type=tuple[bytes, bool, list[str]])
    comm.check_same(f"the commit of {contents.where}", contents.row.commit.hex(), commit.hex())
    comm.check_same("the option read_once=", options.read_once, once)
    return [key for key in order if key in app_state]


def _left_behind(contents: Contents, size: int) -> list[str]:
    ranks = (rank for rank in contents.ranks() if rank >= size)
    return [f"{rank}/{key}" for rank in ranks for key in sorted(contents.manifest.ranks[str(rank)])]


@plain()
def _loaded(
    contents: Contents,
    entries: dict[str, Entry],
    targets: _Targets,
    options: RestoreOptions,
    comm: Comm,
) -> dict[str, Leaf]:
    """Read all entries, those that have a target into it."""
    loading = Loading(contents, options.progress)
    memory = targets.memory()
    # Each could overwrite a part of the other, so these are read apart at first.
    groups = conflicting_groups(memory, lambda part: _meaning(entries[part[0]]))
    apart = {path for group in groups for path, _ in group}
    for path in sorted(apart & targets.shards.keys()):
        raise MismatchError(
            f"{contents.where}: {path} shares its memory with another tensor here, but differs "
            "from it in the snapshot; nothing was restored. Untie them, or restore into plain "
            "tensors"
        )
    synchronize(memory.values())
    for path, entry in entries.items():
        shards = targets.shards.get(path)
        if shards is not None and isinstance(entry, TensorEntry):
            parts = list(zip(shards.boxes, shards.tensors, strict=True))
            loading.add_parts(path, entry, parts, shards.value)
        else:
            loading.add(path, entry, None if path in apart else targets.tensors.get(path))
    # From here on tensors are written: no rank may find then that something does not fit.
    comm.all_gather(b"")
    together = comm.size > 1 and options.read_once
    leaves = loading.load(fetch=partial(fetch_shared, comm, contents.objects) if together else None)
    for group in groups:
        if fill_shared_memory((memory[part], leaves[part[0]].content) for part in group):
            leaves |= {part[0]: leaves[part[0]]._replace(content=memory[part]) for part in group}
    return leaves


def _meaning(entry: Entry) -> object:
    """Return what tells apart the values of tensors of one shape: equal bytes may mean others."""
    assert isinstance(entry, TensorEntry)
    return entry.dtype, getattr(entry, "boxes", None), entry.data


def _part(
    contents: Contents, key: str, stateful: Stateful, report: RestoreReport, rank: int
) -> _Part | None:
    component = component_of(key)
    seen = contents.trees(rank).get(component)
    entries = {} if seen is None else {component + inner: e for inner, e in seen.items()}
    # All ranks read the state, since that may be a collective of their own.
    current = stateful.state_dict()
    part = _Part(key, component, stateful, current, entries)
    if isinstance(stateful, torch.nn.Module) and _select(contents, part):
        return part
    kept = _kept_for_others(contents, component, rank, entries)
    if not kept and seen is not None:
        part.entries = _reached(contents, component, rank, entries)
        return part
    report.missing += kept or [key]
    return None


def _select(contents: Contents, part: _Part) -> bool:
    """Take what a module has, if the ranks had modules of different names; return whether it can.

    So do the stages of a pipeline; this one may have been cut elsewhere.
    """
    shared = contents.manifest.shared.get(part.component)
    if shared is None or contents.tree(shared).get("") is not None:
        return False
    names = {component_of(name) for name in part.current}
    if not names or not part.entries.keys() >= {f"{part.component}/{name}" for name in names}:
        return False
    part.entries = {p: e for p, e in part.entries.items() if "/" in p and p.split("/")[1] in names}
    part.given[part.component] = next(flatten(part.current, part.component))
    return True


def _reached(
    contents: Contents, component: str, rank: int, entries: dict[str, Entry]
) -> dict[str, Entry]:
    """Leave out what is everyone's, but in containers of other ranks alone."""
    digest = contents.manifest.ranks.get(str(rank), {}).get(component)
    own = {} if digest is None else dict(contents.tree(digest).items())
    loading = Loading(contents)
    for inner, entry in own.items():
        if isinstance(entry, ContainerEntry):
            loading.add(component + inner, entry)
    elements = {
        path: set(container_builder(path, leaf.entry, leaf.content)[0])
        for path, leaf in loading.load().items()
        if isinstance(leaf.entry, ContainerEntry) and isinstance(leaf.content, bytes)
    }
    if not elements:
        return entries
    reached = dict[str, Entry]()
    for path, entry in entries.items():  # each comes behind what it is in
        above, _, name = path.rpartition("/")
        if not above or (above in reached and name in elements.get(above, (name,))):
            reached[path] = entry
    return reached


def _kept_for_others(
    contents: Contents, component: str, rank: int, entries: Mapping[str, Entry]
) -> list[str]:
    """Return what stands in the way of a rank that the snapshot knows nothing of."""
    if rank < contents.row.world_size:
        return []
    holders: dict[str, list[int]] = {}
    for other in contents.ranks():
        digest = contents.manifest.ranks[str(other)].get(component)
        if digest is not None:
            for path in [component + inner for inner, _ in contents.tree(digest).items()]:
                holders.setdefault(path, []).append(other)
    return [
        f"{path} is kept for {rank_names(ranks)} alone; rank {rank} is new"
        for path, ranks in holders.items()
        if path not in entries
    ]


def _add_targets(targets: _Targets, part: _Part, report: RestoreReport) -> None:
    """Note the tensors to fill in place, and where module and snapshot differ."""
    tensors = tensor_targets(part.current, part.component)
    shards = shard_targets(part.current, part.component)
    if isinstance(part.stateful, torch.optim.Optimizer):
        shards |= _moments(part.stateful, part.component, part.entries)
    rewritten: tuple[str, ...] = ()
    if isinstance(part.stateful, torch.nn.Module):
        rewritten = _prefixes(part, _rewrites)
        part.unchecked = rewritten + _prefixes(part, _forgives)
        part.skipped = _compare(part, rewritten, report)

    def fits(path: str, current: torch.Tensor) -> bool:
        # Filled in place, what is renamed on its way could be overwritten before it is read.
        renamed = path.startswith(rewritten)
        return path in part.entries and not renamed and _fits(part.entries[path], current)

    targets.tensors |= {p: t for p, t in tensors.items() if fits(p, t)}
    targets.shards |= {p: s for p, s in shards.items() if fits(p, s.value)}


def _moments(
    optimizer: torch.optim.Optimizer, component: str, entries: Mapping[str, Entry]
) -> dict[str, Shards]:
    """Return new moments, sharded as their parameters are, for an optimizer that has none yet."""
    made = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for path, entry in entries.items():
        below, _, name = path.removeprefix(f"{component}/state/").partition("/")
        if not path.startswith(f"{component}/state/") or not below.isdigit() or "/" in name:
            continue
        parameter = parameters[int(below)] if int(below) < len(parameters) else None
        if parameter is None or name in optimizer.state.get(parameter, ()):
            continue
        if isinstance(entry, TensorEntry) and entry.shape == tuple(parameter.shape):
            shards = shards_of(path, parameter)
            if shards is not None:
                moment = torch.zeros_like(parameter.detach(), dtype=carrier_dtype(entry))
                fresh = shards_of(path, moment)
                assert fresh is not None
                made[path] = fresh
    return made


def _fits(entry: Entry, current: torch.Tensor) -> bool:
    """Whether a tensor of the state can be filled with an entry and lose nothing."""
    with without_torch_function():
        return (
            isinstance(entry, TensorEntry)
            and entry.kind in ("tensor", "parameter", "buffer")
            and entry.quantization is None
            and tuple(current.shape) == entry.shape
            and is_float4(entry) == is_float4(current)
            and torch.can_cast(carrier_dtype(entry), current.dtype)
        )


def _prefixes(part: _Part, does: Callable[[torch.nn.Module], bool]) -> tuple[str, ...]:
    """Return what the paths of those children of a module begin with that do something."""
    module = part.stateful
    assert isinstance(module, torch.nn.Module)
    if _has_own_loader(module):
        return (f"{part.component}/",)
    return tuple(
        f"{part.component}/{component_of(f'{name}.' if name else '')}"
        for name, child in module.named_modules(remove_duplicate=False)
        if does(child)
    )


def _rewrites(module: torch.nn.Module) -> bool:
    """Whether keys or values of a module may be changed on their way in."""
    loader = module._load_from_state_dict
    return bool(module._load_state_dict_pre_hooks) or not loader.__module__.startswith("torch.nn.")


def _forgives(module: torch.nn.Module) -> bool:
    """Whether a module may allow names to differ."""
    return bool(module._load_state_dict_post_hooks)


def _has_own_loader(module: torch.nn.Module) -> bool:
    loader = getattr(module.load_state_dict, "__func__", None)
    return loader is not torch.nn.Module.load_state_dict


def _load_what_fits(
    part: _Part, module: torch.nn.Module, state: dict[str, Any], report: RestoreReport
) -> None:
    def path_of(key: str) -> str:
        return f"{part.component}/{component_of(key)}"

    for key in [k for k in state if path_of(k) in part.skipped]:
        del state[key]
    if _has_own_loader(module) and "strict" not in signature(module.load_state_dict).parameters:
        module.load_state_dict(state)
        return
    shapes: dict[str, str] = {}
    try:
        left: Any = module.load_state_dict(state, strict=False)
    except RuntimeError:
        shapes = _other_shapes(part)
        unfit = [key for key in state if path_of(key) in shapes]
        if not unfit:
            raise
        for key in unfit:
            del state[key]
        left = module.load_state_dict(state, strict=False)
    report.mismatched += [shapes[p] for p in sorted(shapes)]
    for keys, paths in (
        (getattr(left, "missing_keys", ()), report.missing),
        (getattr(left, "unexpected_keys", ()), report.unexpected),
    ):
        unchecked = [p for p in map(path_of, keys) if p.startswith(part.unchecked)]
        paths += [p for p in unchecked if p not in shapes and p not in part.skipped]


def _compare(part: _Part, rewritten: tuple[str, ...], report: RestoreReport) -> set[str]:
    """Note what differs between a module and the snapshot; return what must not be loaded.

    What is rewritten on its way in is left to the module; what it may forgive, too, but for shapes.
    """
    there = {p for p in part.entries if p.count("/") == 1 and not p.startswith(part.unchecked)}
    here = {f"{part.component}/{component_of(k)}" for k in part.current}
    here = {path for path in here if not path.startswith(part.unchecked)}
    shapes = {p: s for p, s in _other_shapes(part).items() if not p.startswith(rewritten)}
    report.missing += sorted(here - there)
    report.unexpected += sorted(there - here)
    report.mismatched += [shapes[p] for p in sorted(shapes)]
    return (there - here) | shapes.keys()


def _other_shapes(part: _Part) -> dict[str, str]:
    """Return by path which tensors of a module have another shape in the snapshot, in words."""
    shapes = {}
    for key, value in part.current.items():
        path = f"{part.component}/{component_of(key)}"
        entry = part.entries.get(path)
        if not isinstance(entry, TensorEntry) or not isinstance(value, torch.Tensor):
            continue
        if torch.nn.parameter.is_lazy(value):
            continue  # it takes any shape
        if value.is_meta:
            shapes[path] = f"{path}: on the meta device here; call to_empty(device=...) first"
        elif holds_no_values(value):
            shapes[path] = f"{path}: fake here; make the module outside of FakeTensorMode"
        elif tuple(value.shape) != entry.shape:
            shapes[path] = f"{path}: {tuple(value.shape)} here, {entry.shape} in the snapshot"
    return shapes


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
