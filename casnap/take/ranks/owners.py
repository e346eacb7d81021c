"""The owner of a path: the rank that plans its tensor, and compares what ranks hold of it.

A hash of the path names the owner. All ranks that hold the tensor, or shards of it, tell the owner
what they hold (their *holdings*), and get an *answer* that says what to do. So each rank plans
about equally many paths, and no rank needs the holdings for all paths.
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
        ranks: The ranks that hold shards of it.
    """

    path: str
    entry: KnownEntry
    cells: int
    ranks: list[int]


class HeldShards(msgspec.Struct, array_like=True):
    """The part of a sharded tensor that one rank holds.

    Attributes:
        leaf_id: The id of the leaf.
        path: Its path.
        entry: Its entry, without digests.
        boxes: The boxes of the tensor that the rank holds.
        samples: A sample of each box.
    """

    leaf_id: bytes
    path: str
    entry: KnownEntry
    boxes: tuple[Region, ...]
    samples: list[bytes]


class HeldReplica(msgspec.Struct, array_like=True):
    """A leaf of one rank that is declared equal on all ranks.

    Attributes:
        leaf_id: The id of the leaf.
        description: A digest of all that must be the same on all ranks, except the bytes.
        sample: A sample of the bytes; empty if the bytes need not be equal.
    """

    leaf_id: bytes
    description: bytes
    sample: bytes


class Holdings(msgspec.Struct, array_like=True):
    """A message to an owner: the leaves that the sending rank holds, among those of this owner.

    Each rank sends it before it hashes anything.

    Attributes:
        sharded: The tensors of which the rank holds shards.
        replicated: The leaves that are declared equal on all ranks.
    """

    sharded: list[HeldShards]
    replicated: list[HeldReplica]


class Replica(IntEnum):
    """What an owner found when it compared all ranks' replicas of a leaf declared equal."""

    MISMATCHED = 0  # some ranks do not have it, or have another shape or dtype
    EQUAL = 1
    DIFFERENT = 2  # shape and dtype are the same, but the bytes are not


class Answer(msgspec.Struct, array_like=True):
    """An owner's answer to :class:`Holdings`: what the rank has to do with each leaf in them.

    Attributes:
        sharded: The rank's plan for each sharded leaf, in the order of the holdings.
        replicated: A ``Replica`` for each leaf that is declared equal, in the order of the
            holdings.
        splits: Whether shard edges cut a cell of any tensor of the owner.
    """

    sharded: list[RankPlan]
    replicated: bytes
    splits: bool


def id_of_path(path: str) -> bytes:
    """Return the id by which all ranks know a path."""
    return digest_of(path.encode("utf-8", "surrogatepass"))[:ID_BYTES]


def path_part(leaf_id: bytes) -> bytes:
    """Return the first bytes of a sharded tensor's id. They depend on its path alone."""
    return leaf_id[:ID_BYTES]


def owner_of(leaf_id: bytes, size: int) -> int:
    """Return which of ``size`` ranks owns a path."""
    return int.from_bytes(leaf_id[:8], "big") % size


def equal_on_all_ranks(told: Sequence[Sequence[tuple[bytes, bytes]]]) -> dict[bytes, bool]:
    """Return, for each id, whether every rank has sent it, and with the same value.

    Args:
        told: For each rank, the pairs of an id and a value that it has sent.
    """
    values_of: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for leaf_id, value in chain.from_iterable(told):
        values_of[leaf_id].append(value)
    return {leaf_id: values == [values[0]] * len(told) for leaf_id, values in values_of.items()}


def few_paths(paths: Sequence[str]) -> str:
    """Return up to three of the paths as text for a message, and how many more there are."""
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(sorted(paths)[:3]) + more


def answers_of(
    holdings: list[Holdings], plans: Mapping[bytes, TensorPlan], replicas: Mapping[bytes, Replica]
) -> list[Answer]:
    """Return the owner's answer to each rank.

    Args:
        holdings: What each rank holds.
        plans: Id of each sharded tensor → its plan.
        replicas: Id of each leaf that is declared equal → what the owner has found.
    """
    splits = any(rank.joints for plan in plans.values() for rank in plan.values())
    return [
        Answer(
            [plans[held.leaf_id].get(rank, RankPlan()) for held in of_rank.sharded],
            bytes(replicas[held.leaf_id] for held in of_rank.replicated),
            splits,
        )
        for rank, of_rank in enumerate(holdings)
    ]


# --- leaves that are declared equal -----------------------------------------------------------


def compare_replicas(holdings: list[Holdings]) -> dict[bytes, Replica]:
    """Compare all ranks' replicas of the leaves that are declared equal.

    Args:
        holdings: The holdings of each rank.

    Returns:
        Id of the leaf → whether its replicas are equal.
    """
    descriptions = equal_on_all_ranks(
        [[(held.leaf_id, held.description) for held in of_rank.replicated] for of_rank in holdings]
    )
    samples = equal_on_all_ranks(
        [[(held.leaf_id, held.sample) for held in of_rank.replicated] for of_rank in holdings]
    )
    replicas = dict.fromkeys(descriptions, Replica.MISMATCHED)
    for leaf_id, are_alike in descriptions.items():
        if are_alike:
            replicas[leaf_id] = Replica.EQUAL if samples[leaf_id] else Replica.DIFFERENT
    return replicas


def check_replicated(
    holdings: list[Holdings], replicas: Mapping[bytes, Replica], paths_by_id: Mapping[bytes, str]
) -> None:
    """Check that the paths that ``replicated=`` names are equal on all ranks.

    Args:
        holdings: What each rank holds.
        replicas: What this rank found about the leaves that it owns, by id.
        paths_by_id: Id → path, for the named paths that this rank owns.

    Raises:
        StateError: Some of the paths are not equal on all ranks.
    """
    wrong = {
        path: leaf_id
        for leaf_id, path in paths_by_id.items()
        if replicas.get(leaf_id) is Replica.DIFFERENT
    }
    if not wrong:
        return
    path = min(wrong)
    samples = [
        held.sample
        for of_rank in holdings
        for held in of_rank.replicated
        if held.leaf_id == wrong[path]
    ]
    others = [rank for rank, sample in enumerate(samples) if sample != samples[0]]
    more = f" (nor are {few_paths([*wrong.keys() - {path}])})" if len(wrong) > 1 else ""
    raise StateError(
        f"{path} is named by replicated=, but is not the same on all ranks{more}: on "
        f"{rank_names(others)} it differs from rank 0. Make it equal, leave it out of "
        "replicated= (casnap finds equal values by itself), or name it in per_rank="
    )


# --- sharded tensors --------------------------------------------------------------------------


def plan_sharded(
    holdings: list[Holdings], chunk_size: int, hosts: Sequence[int]
) -> tuple[dict[bytes, OwnedTensor], dict[bytes, TensorPlan]]:
    """Plan all sharded tensors that this rank owns.

    Args:
        holdings: What each rank holds.
        chunk_size: The chunk size of the store, in bytes.
        hosts: For each rank, the number of its host.

    Returns:
        The tensors, and their plans, both by id.

    Raises:
        StateError: Ranks hold shards of different tensors under one name, replicas that differ, or
            boxes that do not cover the tensor.
    """
    owned, plans = {}, {}
    loads: defaultdict[int, int] = defaultdict(int)
    for leaf_id, holders in _holders(holdings).items():
        path, entry = holders[0][1].path, holders[0][1].entry
        assert isinstance(entry, TensorEntry)
        _check_shard_replicas(path, holders)
        itemsize = itemsize_of(entry)
        boxes = [(rank, box) for rank, held in holders for box in held.boxes]
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


def _holders(holdings: list[Holdings]) -> dict[bytes, list[tuple[int, HeldShards]]]:
    """Return, by id of the sharded tensor, each rank that holds shards of it, with these shards.

    Raises:
        StateError: Two ranks describe the tensor at one path differently.
    """
    holders: defaultdict[bytes, list[tuple[int, HeldShards]]] = defaultdict(list)
    firsts: dict[bytes, tuple[int, KnownEntry]] = {}
    for rank, of_rank in enumerate(holdings):
        for held in of_rank.sharded:
            holders[held.leaf_id].append((rank, held))
            of_path = path_part(held.leaf_id)
            first_rank, first_entry = firsts.setdefault(of_path, (rank, held.entry))
            if held.entry != first_entry:
                raise StateError(
                    f"{held.path} is {_description(first_entry)} on rank {first_rank}, but "
                    f"{_description(held.entry)} on rank {rank}; all ranks must hold pieces of "
                    f"one tensor. {NAMING_ADVICE}"
                )
    return holders


def _check_shard_replicas(path: str, holders: Sequence[tuple[int, HeldShards]]) -> None:
    """Check that ranks that hold the same box of a tensor hold the same bytes in it.

    Raises:
        StateError: The bytes differ.
    """
    first_seen: dict[Region, tuple[int, bytes]] = {}
    for rank, held in holders:
        for box, sample in zip(held.boxes, held.samples, strict=True):
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
