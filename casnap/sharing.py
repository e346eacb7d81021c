"""What the ranks of a take hold in common, and who hashes which cells of it.

The plan of a path is made by its *owner*, a rank that a hash of the path names: it hears from all
who hold the path or pieces of it, and tells each what to do. So nobody sees everything, and all
ranks have about as much to plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from casnap.capture import Assignment, Capture, grid_for
from casnap.comm import Comm
from casnap.containers import segment_of
from casnap.digest import digest_of
from casnap.edges import Target
from casnap.errors import StateError
from casnap.format import (
    BoxedTensorEntry,
    Boxes,
    ContainerEntry,
    Entry,
    TensorEntry,
    encode,
)
from casnap.grid import Grid, grid_of
from casnap.plan import RankPlan, TensorPlan, own_runs, part_region, plan_tensor
from casnap.region import Region
from casnap.sharding import Shards, holders_of
from casnap.staging import Part
from casnap.tensors import Leaf, is_numpy, itemsize_of
from casnap.tiling import MAX_BOXES, Tiling

_KEY_BYTES, _GROUP_BYTES = 16, 8

OWN_NAMES = (
    "Give different tensors different names; for optimizers, get_optimizer_state_dict() of "
    "torch.distributed.checkpoint.state_dict has the names of the parameters"
)


class Scope(Enum):
    """Whose a leaf is, as far as its own rank can tell."""

    OPEN = "everyone's if all ranks turn out to hold the same, else its rank's"
    PRIVATE = "its rank's"
    SHARDED = "everyone's; ranks hold pieces"
    REPLICATED = "everyone's; all ranks are said to hold the same, and share the work"
    PINNED = "everyone's; that of rank 0 counts"


class Rules(NamedTuple):
    """What is declared about the leaves.

    Attributes:
        replicated: Globs of paths that all ranks hold alike.
        alike: Paths that they do: the parameters of DDP modules.
        per_rank: Globs of paths that belong to their rank.
        pinned: Paths of which rank 0's is the truth: the buffers of DDP modules.
    """

    replicated: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()
    alike: frozenset[str] = frozenset()


class Owned(NamedTuple):
    """A sharded tensor that this rank plans for all.

    Attributes:
        path: Its path.
        entry: Its entry, without digests.
        cells: The number of its cells.
        ranks: Who holds pieces of it.
    """

    path: str
    entry: Entry
    cells: int
    ranks: list[int]


class Division(NamedTuple):
    """Who does what.

    Attributes:
        scopes: Of each leaf of this rank.
        keys: What all ranks know each leaf by: its path and, if it is sharded, who holds it
            together.
        owned: The sharded tensors that this rank is the owner of.
        targets: The leaves whose cells may be put together here.
    """

    scopes: list[Scope]
    keys: list[bytes]
    owned: dict[bytes, Owned]
    targets: dict[bytes, Target]


class _Claim(msgspec.Struct, array_like=True):
    """A sharded leaf, as one of its holders describes it."""

    key: bytes
    path: str
    entry: Entry
    boxes: Boxes


class _Claims(msgspec.Struct, array_like=True):
    """All that a rank tells one owner: sharded leaves, and key and look of replicated ones."""

    sharded: list[_Claim]
    replicated: list[tuple[bytes, bytes]]


class _Verdict(msgspec.Struct, array_like=True):
    """All that an owner tells one rank, in the order of its claims."""

    sharded: list[RankPlan]
    replicated: bytes


def key_of(path: str) -> bytes:
    """Return what all ranks know a path by."""
    return digest_of(path.encode("utf-8", "surrogatepass"))[:_KEY_BYTES]


def path_part(key: bytes) -> bytes:
    """Return what the key of a sharded tensor has in common with others of its path."""
    return key[:_KEY_BYTES]


def owner_of(key: bytes, size: int) -> int:
    """Return the rank that plans, and settles, all about a path."""
    return int.from_bytes(key[:8], "big") % size


def rules_for(
    app_state: Mapping[str, Any],
    replicated: Iterable[str],
    per_rank: Iterable[str],
    ranks: Sequence[int],
) -> Rules:
    """Return what is declared, by globs and by DDP modules of the ranks that take part.

    DDP keeps parameters equal, and gives all ranks the buffers of rank 0 at the next step.
    """
    alike, pinned = set[str](), set[str]()
    for key, value in app_state.items():
        if not isinstance(value, torch.nn.parallel.DistributedDataParallel):
            continue
        if set(dist.get_process_group_ranks(value.process_group)) != set(ranks):
            # Others may hold another module under this name.
            continue
        ignored = {f"module.{name}" for name in getattr(value, "parameters_to_ignore", ())}
        names = value.state_dict().keys() - ignored
        buffers = {name for name, _ in value.named_buffers()} - ignored
        segment = segment_of(key)
        alike |= {f"{segment}/{segment_of(name)}" for name in names - buffers}
        pinned |= {f"{segment}/{segment_of(name)}" for name in buffers}
    return Rules(tuple(replicated), tuple(per_rank), frozenset(pinned), frozenset(alike))


def divide(comm: Comm, capture: Capture, rules: Rules, chunk_size: int) -> Division:
    """Find out what ranks hold in common, and assign to this one what it hashes of that.

    Raises:
        StateError: Ranks contradict each other.
    """
    scopes, keys = _scopes(capture, rules), _keys(capture)
    asked: list[list[int]] = [[] for _ in range(comm.size)]
    for i, scope in enumerate(scopes):
        if scope in (Scope.SHARDED, Scope.REPLICATED, Scope.PINNED):
            asked[owner_of(keys[i], comm.size)].append(i)
    claims = comm.all_to_all([encode(_claims(capture, scopes, keys, own)) for own in asked])
    heard = [msgspec.msgpack.decode(claim, type=_Claims) for claim in claims]
    owned, plans = _planned(heard, chunk_size)
    answers = comm.all_to_all([encode(v) for v in _verdicts(heard, plans)])
    division = Division(scopes, keys, owned, {})
    for own, answer in zip(asked, answers, strict=True):
        verdict = msgspec.msgpack.decode(answer, type=_Verdict)
        sharded = iter(verdict.sharded)
        agreed = iter(verdict.replicated)
        for i in own:
            if scopes[i] is Scope.SHARDED:
                _assign_sharded(capture, i, next(sharded), comm.rank, chunk_size)
            elif not next(agreed):
                # TorchSnapshot's rule: it is there on some ranks alone, or looks otherwise.
                scopes[i] = Scope.OPEN
    _assign_replicated(capture, scopes, comm, chunk_size)
    for i, assignment in capture.assigned.items():
        division.targets[keys[i]] = Target(i, assignment.grid)
        capture.grids[i] = None
    capture.untie()
    return division


def _keys(capture: Capture) -> list[bytes]:
    """Return the key of each leaf; sharded tensors of one path on several meshes are several.

    They may be replicas, but also what two stages of a pipeline call by the same name.
    """
    groups: dict[tuple[int, ...], bytes] = {(): bytes(_GROUP_BYTES)}
    keys = []
    for path, _, content in capture.leaves:
        keys.append(key_of(path))
        if isinstance(content, Shards):
            holders = holders_of(content.value)
            if holders not in groups:
                groups[holders] = digest_of(encode(holders))[:_GROUP_BYTES]
            keys[-1] += groups[holders]
    return keys


def _scopes(capture: Capture, rules: Rules) -> list[Scope]:
    return [
        Scope.PRIVATE if span.private else _scope(leaf, rules)
        for span in capture.spans
        for leaf in capture.leaves[span.start : span.stop]
    ]


def _scope(leaf: Leaf, rules: Rules) -> Scope:
    path = leaf.path
    if isinstance(leaf.content, Shards):
        return Scope.SHARDED
    if _matches(path, rules.per_rank):
        return Scope.PRIVATE
    if path in rules.pinned:
        return Scope.PINNED
    # A container that is said to be equal may have other elements all the same.
    if isinstance(leaf.entry, ContainerEntry):
        return Scope.OPEN
    if path not in rules.alike and not _matches(path, rules.replicated):
        return Scope.OPEN
    splits = isinstance(leaf.entry, TensorEntry) and not is_numpy(leaf.entry)
    return Scope.REPLICATED if splits else Scope.PINNED


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


# --- what is asked, and answered --------------------------------------------------------------


def _claims(capture: Capture, scopes: list[Scope], keys: list[bytes], leaves: list[int]) -> _Claims:
    claims = _Claims([], [])
    for i in leaves:
        path, entry, content = capture.leaves[i]
        if isinstance(content, Shards):
            boxes = tuple((box.offsets, box.sizes) for box in content.boxes)
            claims.sharded.append(_Claim(keys[i], path, entry, boxes))
        else:
            tensor = isinstance(entry, TensorEntry)
            look = encode((scopes[i].name, entry if tensor else None))
            claims.replicated.append((keys[i], digest_of(look)[:_KEY_BYTES]))
    return claims


def _planned(
    heard: list[_Claims], chunk_size: int
) -> tuple[dict[bytes, Owned], dict[bytes, TensorPlan]]:
    """Plan all sharded tensors that this rank is the owner of."""
    holders: defaultdict[bytes, list[tuple[int, _Claim]]] = defaultdict(list)
    firsts: dict[bytes, tuple[int, Entry]] = {}
    for rank, claims in enumerate(heard):
        for claim in claims.sharded:
            holders[claim.key].append((rank, claim))
            first_rank, first = firsts.setdefault(path_part(claim.key), (rank, claim.entry))
            if claim.entry != first:
                raise StateError(
                    f"{claim.path} is {_look(first)} on rank {first_rank}, but "
                    f"{_look(claim.entry)} on rank {rank}; all ranks must hold pieces of one "
                    f"tensor. {OWN_NAMES}"
                )
    owned, plans = {}, {}
    loads: defaultdict[int, int] = defaultdict(int)
    for key, held in holders.items():
        path, entry = held[0][1].path, held[0][1].entry
        assert isinstance(entry, TensorEntry)
        itemsize = itemsize_of(entry)
        boxes = [(rank, Region(*box)) for rank, claim in held for box in claim.boxes]
        turn = int.from_bytes(key[8:], "big")
        plan = plan_tensor(
            entry.shape, itemsize, chunk_size, boxes, name=path, turn=turn, loads=loads
        )
        plans[key] = plan
        stored, cells = _stored(path, entry, itemsize, plan, chunk_size)
        owned[key] = Owned(path, stored, cells, [rank for rank, _ in held])
    return owned, plans


def _stored(
    path: str, entry: TensorEntry, itemsize: int, plan: TensorPlan, chunk_size: int
) -> tuple[TensorEntry, int]:
    """Return the entry of a tensor as it is stored, without digests, and the number of cells."""
    if len(plan.boxes) > MAX_BOXES:
        raise StateError(
            f"{path} lies in {len(plan.boxes):,} boxes, more than {MAX_BOXES:,}; redistribute it "
            "to Shard on one dimension first"
        )
    if not plan.boxes:
        return entry, grid_of(entry.shape, itemsize, chunk_size).count
    boxed = BoxedTensorEntry(
        entry.dtype,
        entry.shape,
        entry.data,
        entry.kind,
        entry.requires_grad,
        entry.quantization,
        tuple((box.offsets, box.sizes) for box in plan.boxes),
    )
    count = sum(grid_of(box.sizes, itemsize, chunk_size).count for box in plan.boxes)
    return boxed, count


def _look(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"a {entry.kind} of {entry.dtype} and shape {entry.shape}"
    return f"a {type(entry).__name__}"


def said_by_all(said: Sequence[Sequence[tuple[bytes, bytes]]]) -> dict[bytes, bool]:
    """Return, for each key of which ranks say something, whether all of them say the same."""
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key, look in chain.from_iterable(said):
        found[key].append(look)
    return {key: looks == [looks[0]] * len(said) for key, looks in found.items()}


def _verdicts(heard: list[_Claims], plans: dict[bytes, TensorPlan]) -> list[_Verdict]:
    agreed = said_by_all([claims.replicated for claims in heard])
    return [
        _Verdict(
            [plans[claim.key].ranks.get(rank, RankPlan()) for claim in claims.sharded],
            bytes(agreed[key] for key, _ in claims.replicated),
        )
        for rank, claims in enumerate(heard)
    ]


# --- what this rank does ----------------------------------------------------------------------


def _assign_sharded(
    capture: Capture, leaf: int, plan: RankPlan, rank: int, chunk_size: int
) -> None:
    entry = capture.leaves[leaf].entry
    assert isinstance(entry, TensorEntry)
    itemsize = itemsize_of(entry)
    grid: Grid | Tiling = grid_of(entry.shape, itemsize, chunk_size)
    parts = []
    if plan.boxes:
        grid = _some_boxes(entry.shape, itemsize, plan, chunk_size)
    else:
        assert isinstance(grid, Grid)
        sends = [(send.cell, send.to, send.start, send.stop) for send in plan.sends]
        sends += [
            (get.cell, rank, part.start, part.stop)
            for get in plan.gets
            for part in get.parts
            if part.source == rank
        ]
        for cell, to, start, stop in sends:
            parts.append((cell, Part(to, start, part_region(grid, cell, start, stop))))
    capture.assigned[leaf] = Assignment(grid, plan.runs, parts, [get.cell for get in plan.gets])


def _some_boxes(shape: tuple[int, ...], itemsize: int, plan: RankPlan, chunk_size: int) -> Tiling:
    """Return the tiling as far as this rank has to know it."""
    return Tiling(
        shape,
        itemsize,
        tuple(Region(box.offsets, box.sizes) for box in plan.boxes),
        tuple(grid_of(box.sizes, itemsize, chunk_size) for box in plan.boxes),
        tuple(box.first for box in plan.boxes),
        0,
    )


def _assign_replicated(capture: Capture, scopes: list[Scope], comm: Comm, chunk_size: int) -> None:
    shared = sorted(
        (i for i, s in enumerate(scopes) if s is Scope.REPLICATED and i not in capture.inline),
        key=lambda i: capture.leaves[i].path,
    )
    grids = [grid_for(capture.leaves[i], chunk_size) for i in shared]
    runs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, first, stop in own_runs(grids, comm.rank, comm.size):
        runs[shared[number]].append((first, stop))
    for i, grid in zip(shared, grids, strict=True):
        capture.assigned[i] = Assignment(grid, runs[i], [], [])
    for i, scope in enumerate(scopes):
        if scope is Scope.PINNED and comm.rank and capture.grids[i] is not None:
            capture.assigned[i] = Assignment(grid_for(capture.leaves[i], chunk_size), [], [], [])
