"""The owner of a path: the rank that plans its tensor, and compares what ranks say about it.

A hash of the path names the owner. All ranks that hold the path, or pieces of it, send the owner
their *claims*, and get an *answer* that says what to do. So no rank sees everything, and all ranks
have about as much to plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import msgspec

from casnap.errors import StateError, with_article
from casnap.format.digest import digest_of
from casnap.format.entries import KnownEntry, TensorEntry
from casnap.format.grid import grid_of
from casnap.format.names import rank_names
from casnap.format.region import Region
from casnap.state.tensors import itemsize_of
from casnap.take.plan import RankPlan, plan_tensor

ID_BYTES = 16
NAMING_ADVICE = (
    "Give different tensors different names; for optimizers, get_optimizer_state_dict() of "
    "torch.distributed.checkpoint.state_dict has the names of the parameters"
)


TensorPlan = dict[int, RankPlan]
"""The plan of each rank that has something to do for a tensor."""


class OwnedTensor(NamedTuple):
    """A sharded tensor that this rank owns.

    Attributes:
        path: Its path.
        entry: Its entry, without digests.
        cells: The number of its cells.
        ranks: The ranks that hold pieces of it.
    """

    path: str
    entry: KnownEntry
    cells: int
    ranks: list[int]


class ShardClaim(msgspec.Struct, array_like=True):
    """The part of a sharded leaf that one rank holds.

    Attributes:
        boxes: The boxes of the tensor that it holds.
        samples: A sample of each.
    """

    leaf_id: bytes
    path: str
    entry: KnownEntry
    boxes: tuple[Region, ...]
    samples: list[bytes]


class Claims(msgspec.Struct, array_like=True):
    """Everything that a rank tells one owner.

    Attributes:
        sharded: The leaves of which it holds pieces.
        replicated: Id and description of each leaf that is declared equal on all ranks.
        samples: A sample of each of these; empty where it need not be equal.
    """

    sharded: list[ShardClaim]
    replicated: list[tuple[bytes, bytes]]
    samples: list[bytes]


class Replica(IntEnum):
    """What the owner finds about a leaf that is declared equal on all ranks."""

    MISMATCHED = 0  # some ranks do not have it, or have another shape or dtype
    EQUAL = 1
    DIFFERENT = 2  # shape and dtype are the same, but the bytes are not


class Answer(msgspec.Struct, array_like=True):
    """Everything that an owner tells one rank, in the order of its claims.

    Attributes:
        sharded: What the rank is to do for each sharded leaf.
        replicated: A ``Replica`` for each leaf that is declared equal.
        splits: Whether shard edges cut a cell of any tensor of the owner.
    """

    sharded: list[RankPlan]
    replicated: bytes
    splits: bool


def id_of_path(path: str) -> bytes:
    """Return the id by which all ranks know a path."""
    return digest_of(path.encode("utf-8", "surrogatepass"))[:ID_BYTES]


def path_part(leaf_id: bytes) -> bytes:
    """Return the part of a sharded tensor's id that depends on its path alone."""
    return leaf_id[:ID_BYTES]


def owner_of(leaf_id: bytes, size: int) -> int:
    """Return the rank that owns a path, of so many ranks."""
    return int.from_bytes(leaf_id[:8], "big") % size


def equal_on_all_ranks(reports: Sequence[Sequence[tuple[bytes, bytes]]]) -> dict[bytes, bool]:
    """Return, for each id that some rank names, whether all ranks give the same value for it."""
    values_of: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for leaf_id, value in chain.from_iterable(reports):
        values_of[leaf_id].append(value)
    return {leaf_id: values == [values[0]] * len(reports) for leaf_id, values in values_of.items()}


def few_paths(paths: Sequence[str]) -> str:
    """Return some paths for a message; of many, the first three."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(sorted(paths)[:3]) + more


def answers_of(
    claims: list[Claims], plans: Mapping[bytes, TensorPlan], replicas: Mapping[bytes, Replica]
) -> list[Answer]:
    """Return the owner's answer to each rank."""
    splits = any(rank.joints for plan in plans.values() for rank in plan.values())
    return [
        Answer(
            [plans[claim.leaf_id].get(rank, RankPlan()) for claim in of_rank.sharded],
            bytes(replicas[leaf_id] for leaf_id, _ in of_rank.replicated),
            splits,
        )
        for rank, of_rank in enumerate(claims)
    ]


# --- leaves that are declared equal -----------------------------------------------------------


def compare_replicas(claims: list[Claims]) -> dict[bytes, Replica]:
    """Compare the leaves that are declared equal on all ranks, by id."""
    descriptions = equal_on_all_ranks([of_rank.replicated for of_rank in claims])
    samples = equal_on_all_ranks([_samples_by_id(of_rank) for of_rank in claims])
    replicas = dict.fromkeys(descriptions, Replica.MISMATCHED)
    for leaf_id, are_alike in descriptions.items():
        if are_alike:
            replicas[leaf_id] = Replica.EQUAL if samples[leaf_id] else Replica.DIFFERENT
    return replicas


def _samples_by_id(claims: Claims) -> list[tuple[bytes, bytes]]:
    return [(leaf_id, s) for (leaf_id, _), s in zip(claims.replicated, claims.samples, strict=True)]


def check_replicated(
    claims: list[Claims], replicas: Mapping[bytes, Replica], paths_by_id: Mapping[bytes, str]
) -> None:
    """Check that the paths that ``replicated=`` names are equal on all ranks.

    Args:
        claims: What each rank claims.
        replicas: What the owner found about them.
        paths_by_id: Id → path, of these paths that this rank owns.

    Raises:
        StateError: Some are not equal.
    """
    wrong = {
        path: leaf_id
        for leaf_id, path in paths_by_id.items()
        if replicas.get(leaf_id) is Replica.DIFFERENT
    }
    if not wrong:
        return
    path = min(wrong)
    samples = [dict(_samples_by_id(of_rank))[wrong[path]] for of_rank in claims]
    others = [rank for rank, sample in enumerate(samples) if sample != samples[0]]
    more = f" (nor are {few_paths([*wrong.keys() - {path}])})" if len(wrong) > 1 else ""
    raise StateError(
        f"{path} is named by replicated=, but is not the same on all ranks{more}: on "
        f"{rank_names(others)} it differs from rank 0. Make it equal, leave it out of "
        "replicated= (what is equal is found out), or have per_rank= name it"
    )


# --- sharded tensors --------------------------------------------------------------------------


def plan_sharded(
    claims: list[Claims], chunk_size: int, hosts: Sequence[int]
) -> tuple[dict[bytes, OwnedTensor], dict[bytes, TensorPlan]]:
    """Plan all sharded tensors that this rank owns.

    Args:
        claims: What each rank claims.
        chunk_size: The store's, in bytes.
        hosts: A number for each rank, which ranks of one host have in common.

    Raises:
        StateError: Ranks hold pieces of different tensors under one name, replicas that differ, or
            boxes that do not cover the tensor.
    """
    owned, plans = {}, {}
    loads: defaultdict[int, int] = defaultdict(int)
    for leaf_id, holders in _holders(claims).items():
        path, entry = holders[0][1].path, holders[0][1].entry
        assert isinstance(entry, TensorEntry)
        _check_shard_replicas(path, holders)
        itemsize = itemsize_of(entry)
        boxes = [(rank, box) for rank, claim in holders for box in claim.boxes]
        tiebreak = int.from_bytes(leaf_id[8:], "big")
        plans[leaf_id] = plan_tensor(
            entry.shape,
            itemsize,
            chunk_size,
            boxes,
            name=path,
            tiebreak=tiebreak,
            loads=loads,
            hosts=hosts,
        )
        cells = grid_of(entry.shape, itemsize, chunk_size).count
        owned[leaf_id] = OwnedTensor(path, entry, cells, [rank for rank, _ in holders])
    return owned, plans


def _holders(claims: list[Claims]) -> dict[bytes, list[tuple[int, ShardClaim]]]:
    """Return, for each sharded tensor, the ranks that hold pieces of it, and their claims."""
    holders: defaultdict[bytes, list[tuple[int, ShardClaim]]] = defaultdict(list)
    firsts: dict[bytes, tuple[int, KnownEntry]] = {}
    for rank, of_rank in enumerate(claims):
        for claim in of_rank.sharded:
            holders[claim.leaf_id].append((rank, claim))
            of_path = path_part(claim.leaf_id)
            first_rank, first_entry = firsts.setdefault(of_path, (rank, claim.entry))
            if claim.entry != first_entry:
                raise StateError(
                    f"{claim.path} is {_description(first_entry)} on rank {first_rank}, but "
                    f"{_description(claim.entry)} on rank {rank}; all ranks must hold pieces of "
                    f"one tensor. {NAMING_ADVICE}"
                )
    return holders


def _check_shard_replicas(path: str, holders: Sequence[tuple[int, ShardClaim]]) -> None:
    """Check that ranks that hold the same box of a tensor hold the same bytes in it.

    Raises:
        StateError: They do not.
    """
    first_seen: dict[Region, tuple[int, bytes]] = {}
    for rank, claim in holders:
        for box, sample in zip(claim.boxes, claim.samples, strict=True):
            before, sample_before = first_seen.setdefault(box, (rank, sample))
            if sample_before != sample:
                raise StateError(
                    f"{path}: ranks {before} and {rank} hold replicas of one part of it (offsets "
                    f"{box.offsets}, sizes {box.sizes}), which are not the same. Make them equal, "
                    "as by a broadcast over that dimension of the mesh, or store value.to_local() "
                    "under a name of its own that per_rank= has"
                )


def _description(entry: KnownEntry) -> str:
    if isinstance(entry, TensorEntry):
        return f"{with_article(entry.kind)} of {entry.dtype} and shape {entry.shape}"
    return with_article(type(entry).__name__)
