"""What the ranks of a take hold in common, and who hashes which cells of it.

The plan of a path is made by its *owner*, a rank that a hash of the path names: it hears from all
who hold the path or pieces of it, and tells each what to do. So nobody sees everything, and all
ranks have about as much to plan.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import chain
from math import prod
from typing import NamedTuple

import msgspec
import torch

from casnap.errors import StateError
from casnap.format.digest import digest_of
from casnap.format.entries import BoxedTensorEntry, Boxes, Entry, TensorEntry
from casnap.format.grid import Grid, grid_of
from casnap.format.names import rank_names
from casnap.format.records import encode
from casnap.format.region import Region
from casnap.format.tiling import MAX_BOXES, Tiling
from casnap.ranks.comm import Comm
from casnap.state.sharded import Shards, holders_of
from casnap.state.tensors import itemsize_of
from casnap.take.capture import Assignment, Capture, grid_of_leaf
from casnap.take.plan import RankPlan, TensorPlan, part_region, plan_tensor, replicated_runs
from casnap.take.replica_samples import Sampler
from casnap.take.scopes import Declarations, Scope, scopes_of
from casnap.take.split_cells import AssembledLeaf
from casnap.take.staging import CellPart

_log = logging.getLogger("casnap")
_KEY_BYTES, _GROUP_BYTES = 16, 8

NAMING_ADVICE = (
    "Give different tensors different names; for optimizers, get_optimizer_state_dict() of "
    "torch.distributed.checkpoint.state_dict has the names of the parameters"
)


class OwnedTensor(NamedTuple):
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
    owned: dict[bytes, OwnedTensor]
    targets: dict[bytes, AssembledLeaf]


class _Claim(msgspec.Struct, array_like=True):
    """A sharded leaf, as one of its holders describes it, with a sample of each box."""

    key: bytes
    path: str
    entry: Entry
    boxes: Boxes
    samples: list[bytes]


class _Claims(msgspec.Struct, array_like=True):
    """All that a rank tells one owner.

    Attributes:
        sharded: Leaves of which it holds pieces.
        replicated: Key and look of those that all ranks are said to hold alike.
        samples: A sample of each of the latter; empty where it need not be the same.
    """

    sharded: list[_Claim]
    replicated: list[tuple[bytes, bytes]]
    samples: list[bytes]


class _Replica(IntEnum):
    """What the owner finds of a leaf that all ranks are said to hold alike."""

    MISMATCHED = 0  # it is there on some ranks alone, or looks otherwise
    EQUAL = 1
    DIFFERENT = 2  # it looks alike, but its bytes are not the same


class _Reply(msgspec.Struct, array_like=True):
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


def divide(
    comm: Comm, capture: Capture, declared: Declarations, chunk_size: int, seed: int = 0
) -> Division:
    """Find out what ranks hold in common, and assign to this one what it hashes of that.

    What ranks share out is compared by samples first: each hashes but a part of it.

    Args:
        comm: The ranks.
        capture: What this one holds.
        declared: What is declared of it.
        chunk_size: The store's, in bytes.
        seed: Chooses what is compared; the same on all ranks.

    Raises:
        StateError: Ranks contradict each other.
    """
    scopes, keys = scopes_of(capture, declared), _keys(capture)
    asked: list[list[int]] = [[] for _ in range(comm.size)]
    for i, scope in enumerate(scopes):
        if scope in (Scope.SHARDED, Scope.REPLICATED, Scope.FROM_RANK_0):
            asked[owner_of(keys[i], comm.size)].append(i)
    samples = _samples(capture, scopes, declared, Sampler(seed, chunk_size))
    claims = comm.all_to_all(
        [encode(_claims(capture, scopes, keys, own, samples)) for own in asked]
    )
    heard = [msgspec.msgpack.decode(claim, type=_Claims) for claim in claims]
    owned, plans = _plan_sharded(heard, chunk_size)
    found = _compare_replicas(heard)
    mine = {keys[i]: capture.leaves[i].path for i in asked[comm.rank]}
    _check_declared(heard, found, mine, declared)
    answers = comm.all_to_all([encode(v) for v in _replies(heard, plans, found)])
    division = Division(scopes, keys, owned, {})
    different = []
    for own, answer in zip(asked, answers, strict=True):
        verdict = msgspec.msgpack.decode(answer, type=_Reply)
        sharded = iter(verdict.sharded)
        replicated = iter(verdict.replicated)
        for i in own:
            if scopes[i] is Scope.SHARDED:
                _assign_sharded(capture, i, next(sharded), comm.rank, chunk_size)
            elif (replica := next(replicated)) != _Replica.EQUAL:
                # As if nobody had declared it; that is TorchSnapshot's rule, too.
                scopes[i] = Scope.UNDECIDED
                different += [capture.leaves[i].path] if replica == _Replica.DIFFERENT else []
    if different and comm.rank == 0:
        _log.warning(
            "%s: DDP does not keep %s equal on all ranks; each rank's own is stored",
            comm.operation,
            _few(different),
        )
    _assign_replicated(capture, scopes, comm, chunk_size)
    for i, assignment in capture.assigned.items():
        division.targets[keys[i]] = AssembledLeaf(i, assignment.grid)
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


def _few(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(sorted(paths)[:3]) + more


# --- what is asked, and answered --------------------------------------------------------------


def _samples(
    capture: Capture, scopes: list[Scope], declared: Declarations, sampler: Sampler
) -> dict[int, list[bytes]]:
    """Return samples of all that has to be the same on several ranks, by leaf."""
    contents: dict[int, Sequence[torch.Tensor | bytes]] = {}
    for i, (path, _, content) in enumerate(capture.leaves):
        if isinstance(content, Shards):
            contents[i] = content.tensors
        elif (
            scopes[i] in (Scope.REPLICATED, Scope.FROM_RANK_0) and path not in declared.ddp_buffers
        ):
            contents[i] = [content]
    drawn = iter(sampler.samples(list(chain.from_iterable(contents.values()))))
    return {i: [next(drawn) for _ in several] for i, several in contents.items()}


def _claims(
    capture: Capture,
    scopes: list[Scope],
    keys: list[bytes],
    leaves: list[int],
    samples: Mapping[int, list[bytes]],
) -> _Claims:
    claims = _Claims([], [], [])
    for i in leaves:
        path, entry, content = capture.leaves[i]
        if isinstance(content, Shards):
            boxes = tuple((box.offsets, box.sizes) for box in content.boxes)
            claims.sharded.append(_Claim(keys[i], path, entry, boxes, samples[i]))
        else:
            tensor = isinstance(entry, TensorEntry)
            look = encode((scopes[i].name, entry if tensor else None))
            claims.replicated.append((keys[i], digest_of(look)[:_KEY_BYTES]))
            claims.samples += samples.get(i, [b""])
    return claims


def _compare_replicas(heard: list[_Claims]) -> dict[bytes, _Replica]:
    """Return what ranks that are said to hold the same really hold, by key."""
    looks = equal_on_all_ranks([claims.replicated for claims in heard])
    bytes_ = equal_on_all_ranks([_samples_by_key(claims) for claims in heard])
    return {
        key: (_Replica.EQUAL if bytes_[key] else _Replica.DIFFERENT)
        if same
        else _Replica.MISMATCHED
        for key, same in looks.items()
    }


def _samples_by_key(claims: _Claims) -> list[tuple[bytes, bytes]]:
    return [(key, s) for (key, _), s in zip(claims.replicated, claims.samples, strict=True)]


def _check_declared(
    heard: list[_Claims],
    found: Mapping[bytes, _Replica],
    paths: Mapping[bytes, str],
    declared: Declarations,
) -> None:
    """Check that what ``replicated=`` says is true, of the paths that this rank is the owner of.

    Raises:
        StateError: It is not.
    """
    wrong = {
        path: key
        for key, path in paths.items()
        if found.get(key) is _Replica.DIFFERENT and declared.is_named_replicated(path)
    }
    if not wrong:
        return
    path = min(wrong)
    samples = [dict(_samples_by_key(claims))[wrong[path]] for claims in heard]
    others = [rank for rank, sample in enumerate(samples) if sample != samples[0]]
    more = f" (nor are {_few([*wrong.keys() - {path}])})" if len(wrong) > 1 else ""
    raise StateError(
        f"{path} is named by replicated=, but is not the same on all ranks{more}: on "
        f"{rank_names(others)} it is not what it is on rank 0. Make it equal, leave it out of "
        "replicated= (what is equal is found out), or have per_rank= name it"
    )


def _plan_sharded(
    heard: list[_Claims], chunk_size: int
) -> tuple[dict[bytes, OwnedTensor], dict[bytes, TensorPlan]]:
    """Plan all sharded tensors that this rank is the owner of."""
    holders: defaultdict[bytes, list[tuple[int, _Claim]]] = defaultdict(list)
    firsts: dict[bytes, tuple[int, Entry]] = {}
    for rank, claims in enumerate(heard):
        for claim in claims.sharded:
            holders[claim.key].append((rank, claim))
            first_rank, first = firsts.setdefault(path_part(claim.key), (rank, claim.entry))
            if claim.entry != first:
                raise StateError(
                    f"{claim.path} is {_description(first)} on rank {first_rank}, but "
                    f"{_description(claim.entry)} on rank {rank}; all ranks must hold pieces of "
                    f"one tensor. {NAMING_ADVICE}"
                )
    owned, plans = {}, {}
    loads: defaultdict[int, int] = defaultdict(int)
    for key, held in holders.items():
        path, entry = held[0][1].path, held[0][1].entry
        assert isinstance(entry, TensorEntry)
        _check_replicas(path, entry.shape, held)
        itemsize = itemsize_of(entry)
        boxes = [(rank, Region(*box)) for rank, claim in held for box in claim.boxes]
        turn = int.from_bytes(key[8:], "big")
        plan = plan_tensor(
            entry.shape, itemsize, chunk_size, boxes, name=path, turn=turn, loads=loads
        )
        plans[key] = plan
        stored, cells = _stored(path, entry, itemsize, plan, chunk_size)
        owned[key] = OwnedTensor(path, stored, cells, [rank for rank, _ in held])
    return owned, plans


def _check_replicas(path: str, shape: tuple[int, ...], held: Sequence[tuple[int, _Claim]]) -> None:
    """Check that ranks that hold the same box of a tensor hold the same in it.

    Raises:
        StateError: They do not, or boxes overlap without being the same, which nobody compares.
    """
    first: dict[Region, tuple[int, bytes]] = {}
    for rank, claim in held:
        for at, sample in zip(claim.boxes, claim.samples, strict=True):
            box = Region(*at)
            before, known = first.setdefault(box, (rank, sample))
            if known != sample:
                raise StateError(
                    f"{path}: ranks {before} and {rank} hold replicas of one part of it (offsets "
                    f"{box.offsets}, sizes {box.sizes}), which are not the same. Make them equal, "
                    "as by a broadcast over that dimension of the mesh, or store value.to_local() "
                    "under a name of its own that per_rank= has"
                )
    if sum(box.numel for box in first) > prod(shape):
        raise StateError(
            f"{path}: its shards overlap without being the same, so that nobody can tell whose "
            "elements count; make it anew with shards that do not"
        )


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


def _description(entry: Entry) -> str:
    if isinstance(entry, TensorEntry):
        return f"a {entry.kind} of {entry.dtype} and shape {entry.shape}"
    return f"a {type(entry).__name__}"


def equal_on_all_ranks(said: Sequence[Sequence[tuple[bytes, bytes]]]) -> dict[bytes, bool]:
    """Return, for each key of which ranks say something, whether all of them say the same."""
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key, look in chain.from_iterable(said):
        found[key].append(look)
    return {key: looks == [looks[0]] * len(said) for key, looks in found.items()}


def _replies(
    heard: list[_Claims], plans: dict[bytes, TensorPlan], found: Mapping[bytes, _Replica]
) -> list[_Reply]:
    return [
        _Reply(
            [plans[claim.key].ranks.get(rank, RankPlan()) for claim in claims.sharded],
            bytes(found[key] for key, _ in claims.replicated),
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
        grid = _tiling(entry.shape, itemsize, plan, chunk_size)
    else:
        assert isinstance(grid, Grid)
        sends = [(send.cell, send.to, send.start, send.stop) for send in plan.sends]
        sends += [
            (assembly.cell, rank, part.start, part.stop)
            for assembly in plan.assemblies
            for part in assembly.parts
            if part.source == rank
        ]
        for cell, to, start, stop in sends:
            parts.append((cell, CellPart(to, start, part_region(grid, cell, start, stop))))
    capture.assigned[leaf] = Assignment(
        grid, plan.runs, parts, [assembly.cell for assembly in plan.assemblies]
    )


def _tiling(shape: tuple[int, ...], itemsize: int, plan: RankPlan, chunk_size: int) -> Tiling:
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
    grids = [grid_of_leaf(capture.leaves[i], chunk_size) for i in shared]
    runs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, first, stop in replicated_runs(grids, comm.rank, comm.size):
        runs[shared[number]].append((first, stop))
    for i, grid in zip(shared, grids, strict=True):
        capture.assigned[i] = Assignment(grid, runs[i], [], [])
    for i, scope in enumerate(scopes):
        if scope is Scope.FROM_RANK_0 and comm.rank and capture.grids[i] is not None:
            capture.assigned[i] = Assignment(
                grid_of_leaf(capture.leaves[i], chunk_size), [], [], []
            )
