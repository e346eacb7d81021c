"""Divide the work of a take: find out what ranks hold in common, and which rank hashes which cells.

The owner of a sharded tensor's path plans that tensor (:mod:`casnap.take.ranks.owners`). Tensors
that all ranks hold need no owner: each rank computes its own share of their bytes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from casnap.format.digest import digest_of
from casnap.format.entries import ContainerEntry, TensorEntry
from casnap.format.names import component_of
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.numpy_values import is_numpy
from casnap.state.sharded import Shards, holders_of
from casnap.state.tensors import Leaf
from casnap.take.capture import CapturedState, KeySpan, Scope
from casnap.take.options import TakeOptions
from casnap.take.plan import RankPlan, replicated_runs
from casnap.take.ranks.owners import (
    ID_BYTES,
    Answer,
    HeldReplica,
    HeldShards,
    Holdings,
    OwnedTensor,
    Replica,
    answers_of,
    check_replicated,
    compare_replicas,
    few_paths,
    id_of_path,
    owner_of,
    plan_sharded,
)
from casnap.take.ranks.replica_samples import Sampler

_log = logging.getLogger("casnap")
_GROUP_BYTES = 8


class Division(NamedTuple):
    """The division of a take's work, as far as this rank has to know it.

    Attributes:
        scopes: The scope of each leaf of this rank.
        leaf_ids: The id by which all ranks know each leaf. An id is made from the path of the leaf;
            the id of a sharded leaf also from the ranks that hold the leaf. Empty if a single
            process hashes the whole state.
        owned: Id of the leaf → sharded tensor, for those that this rank owns.
        plans: Leaf → this rank's work for it, for leaves that other ranks hold too. The order of
            the dict is the order in which all ranks put together cells that shard edges cut.
        splits: Whether there is any such cell, in any tensor of any rank.
        is_single_process: Whether a single process hashes the whole state.
    """

    scopes: list[Scope]
    leaf_ids: list[bytes]
    owned: dict[bytes, OwnedTensor]
    plans: dict[int, RankPlan]
    splits: bool
    is_single_process: bool = False


@without_torch_modes()
def divide(
    comm: Comm,
    state: CapturedState,
    app_state: Mapping[str, Any],
    options: TakeOptions,
    chunk_size: int,
    seed: int,
) -> Division:
    """Find out which leaves several ranks hold, and which cells this rank is to hash.

    Each rank hashes only a part of a leaf that others hold too. So ranks first compare samples of
    their replicas.

    Args:
        comm: The ranks.
        state: The state of this rank.
        app_state: The values that it was captured from.
        options: What the caller declares about the values.
        chunk_size: The chunk size of the store, in bytes.
        seed: Chooses the samples; the same on all ranks.

    Raises:
        StateError: Two ranks name one path, but hold different things there.
    """
    if comm.size == 1 and not state.sharded:
        return _of_one_process(state)
    declared = _declarations(app_state, options, comm.ranks)
    scopes, leaf_ids = _scopes(state, declared), _leaf_ids(state)
    by_owner: list[list[int]] = [[] for _ in range(comm.size)]
    for i, scope in enumerate(scopes):
        if scope in (Scope.SHARDED, Scope.REPLICATED, Scope.FROM_RANK_0):
            by_owner[owner_of(leaf_ids[i], comm.size)].append(i)
    samples = _samples(state, scopes, declared, Sampler(seed, chunk_size))
    holdings = comm.exchange_messages(
        [_holdings(state, scopes, leaf_ids, leaves, samples) for leaves in by_owner], Holdings
    )
    owned, plans = plan_sharded(holdings, chunk_size, comm.hosts)
    replicas = compare_replicas(holdings)
    paths_by_id = {
        leaf_ids[i]: path
        for i in by_owner[comm.rank]
        if (path := state.leaves[i].path) not in declared.ddp_buffers
        and _matches(path, declared.replicated)
    }
    check_replicated(holdings, replicas, paths_by_id)
    answers = comm.exchange_messages(answers_of(holdings, plans, replicas), Answer)
    own_plans, different = _take_in(answers, by_owner, scopes)
    if different and comm.rank == 0:
        _log.warning(
            "%s: DDP does not keep %s equal on all ranks; each rank's own is stored",
            comm.operation,
            few_paths([state.leaves[i].path for i in different]),
        )
    in_order = sorted(own_plans, key=lambda i: (state.leaves[i].path, leaf_ids[i]))
    own_plans = {i: own_plans[i] for i in in_order} | _replicated(state, scopes, comm)
    return Division(scopes, leaf_ids, owned, own_plans, any(answer.splits for answer in answers))


def _of_one_process(state: CapturedState) -> Division:
    """Return the division for a single process: all leaves are global, except random states."""
    scopes: list[Scope] = []
    for span in state.spans:
        scope = Scope.PER_RANK if span.scope is Scope.PER_RANK else Scope.FROM_RANK_0
        scopes += [scope] * (span.stop - span.start)
    return Division(scopes, [], {}, {}, splits=False, is_single_process=True)


def _leaf_ids(state: CapturedState) -> list[bytes]:
    """Return the id of each leaf.

    The id of a sharded tensor also names the ranks that hold it. Two tensors of one path on two
    meshes may be replicas. They may also be different tensors that two stages of a pipeline name
    alike.
    """
    groups: dict[tuple[int, ...], bytes] = {(): bytes(_GROUP_BYTES)}
    leaf_ids = []
    # Most tensors have one mesh, and its ranks take long to list.
    ranks_of_mesh: dict[int, tuple[int, ...]] = {}
    for leaf in state.leaves:
        content = leaf.content
        leaf_ids.append(id_of_path(leaf.path))
        if isinstance(content, Shards):
            mesh = id(getattr(content.value, "device_mesh", content))
            if mesh not in ranks_of_mesh:
                ranks_of_mesh[mesh] = holders_of(content.value)
            holders = ranks_of_mesh[mesh]
            if holders not in groups:
                groups[holders] = digest_of(encode(holders))[:_GROUP_BYTES]
            leaf_ids[-1] += groups[holders]
    return leaf_ids


# --- what this rank can tell by itself ----------------------------------------------------------


class _Declarations(NamedTuple):
    """Declarations about the leaves, by the caller and by DDP modules.

    Attributes:
        replicated: Globs of paths that are equal on all ranks.
        per_rank: Globs of paths that belong to their rank.
        ddp_parameters: Paths of parameters of DDP modules: equal on all ranks.
        ddp_buffers: Paths of buffers of DDP modules: rank 0's are stored.
    """

    replicated: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    ddp_parameters: frozenset[str] = frozenset()
    ddp_buffers: frozenset[str] = frozenset()


def _declarations(
    app_state: Mapping[str, Any], options: TakeOptions, ranks: Sequence[int]
) -> _Declarations:
    """Return which leaves are equal on all ranks, and which belong to one rank.

    The options say so by globs. A DDP module says so by its kind, if its process group has exactly
    ``ranks``: its parameters are equal on all ranks; its buffers too, since DDP sends those of rank
    0 at each step, unless ``broadcast_buffers`` is off or a buffer hook is set.
    """
    parameters, buffers = set[str](), set[str]()
    for key, value in app_state.items():
        if not isinstance(value, torch.nn.parallel.DistributedDataParallel):
            continue
        if set(dist.get_process_group_ranks(value.process_group)) != set(ranks):
            # Other ranks may hold another module under this name.
            continue
        ignored = {f"module.{name}" for name in getattr(value, "parameters_to_ignore", ())}
        component = component_of(key)
        names = dict(value.named_parameters(remove_duplicate=False)).keys() - ignored
        parameters |= {f"{component}/{component_of(name)}" for name in names}
        if value.broadcast_buffers and not hasattr(value, "buffer_hook"):
            names = dict(value.named_buffers(remove_duplicate=False)).keys() - ignored
            buffers |= {f"{component}/{component_of(name)}" for name in names}
    return _Declarations(
        tuple(options.replicated or ()),
        tuple(options.per_rank or ()),
        frozenset(parameters),
        frozenset(buffers),
    )


def _scopes(state: CapturedState, declared: _Declarations) -> list[Scope]:
    """Return the scope of each leaf."""
    return [
        _scope(leaf, span, declared)
        for span in state.spans
        for leaf in state.leaves[span.start : span.stop]
    ]


def _scope(leaf: Leaf, span: KeySpan, declared: _Declarations) -> Scope:
    path = leaf.path
    if isinstance(leaf.content, Shards):
        return Scope.SHARDED
    if span.scope is not Scope.UNDECIDED:
        return span.scope
    if _matches(path, declared.per_rank):
        return Scope.PER_RANK
    if path in declared.ddp_buffers:
        return Scope.FROM_RANK_0
    # A container may have other elements on other ranks, even if it is declared equal.
    if isinstance(leaf.entry, ContainerEntry):
        return Scope.UNDECIDED
    if path not in declared.ddp_parameters and not _matches(path, declared.replicated):
        return Scope.UNDECIDED
    can_be_split = isinstance(leaf.entry, TensorEntry) and not is_numpy(leaf.entry)
    return Scope.REPLICATED if can_be_split else Scope.FROM_RANK_0


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


# --- what this rank tells the owners ----------------------------------------------------------


def _samples(
    state: CapturedState, scopes: list[Scope], declared: _Declarations, sampler: Sampler
) -> dict[int, list[bytes]]:
    """Return leaf → its samples, for each leaf whose replicas the ranks will compare.

    These are sharded leaves, and leaves that are declared equal, except buffers that DDP
    broadcasts.
    """
    contents: dict[int, Sequence[torch.Tensor | bytes]] = {}
    equal = (Scope.REPLICATED, Scope.FROM_RANK_0)
    for i, leaf in enumerate(state.leaves):
        content = leaf.content
        if isinstance(content, Shards):
            contents[i] = content.tensors
        elif scopes[i] in equal and leaf.path not in declared.ddp_buffers:
            contents[i] = [content]
    drawn = iter(sampler.samples(list(chain.from_iterable(contents.values()))))
    return {i: [next(drawn) for _ in several] for i, several in contents.items()}


def _holdings(
    state: CapturedState,
    scopes: list[Scope],
    leaf_ids: list[bytes],
    leaves: list[int],
    samples: Mapping[int, list[bytes]],
) -> Holdings:
    """Return this rank's message to one owner.

    Args:
        state: The state of this rank.
        scopes: The scope of each leaf.
        leaf_ids: The id of each leaf.
        leaves: The numbers of the leaves whose paths the owner owns.
        samples: Leaf → samples of its content.
    """
    holdings = Holdings([], [])
    for i in leaves:
        leaf = state.leaves[i]
        entry, content = leaf.entry, leaf.content
        if isinstance(content, Shards):
            held = HeldShards(leaf_ids[i], leaf.path, entry, content.boxes, samples[i])
            holdings.sharded.append(held)
        else:
            is_tensor = isinstance(entry, TensorEntry)
            description = digest_of(encode((scopes[i].name, entry if is_tensor else None)))
            [sample] = samples.get(i, [b""])
            holdings.replicated.append(HeldReplica(leaf_ids[i], description[:ID_BYTES], sample))
    return holdings


def _take_in(
    answers: list[Answer], by_owner: list[list[int]], scopes: list[Scope]
) -> tuple[dict[int, RankPlan], list[int]]:
    """Read the owners' answers. Set the scope of leaves that are not equal as declared.

    A leaf that is declared equal, but is not equal on all ranks, counts as not declared, as in
    TorchSnapshot: its scope becomes UNDECIDED.

    Args:
        answers: The answer of each owner.
        by_owner: For each owner, the numbers of the leaves that the answer is about, in order.
        scopes: The scope of each leaf.

    Returns:
        Leaf → plan, for sharded leaves; and the leaves whose replicas have different bytes.
    """
    plans, different = dict[int, RankPlan](), list[int]()
    for leaves, answer in zip(by_owner, answers, strict=True):
        sharded, replicated = iter(answer.sharded), iter(answer.replicated)
        for i in leaves:
            if scopes[i] is Scope.SHARDED:
                plans[i] = next(sharded)
            elif (replica := next(replicated)) != Replica.EQUAL:
                scopes[i] = Scope.UNDECIDED
                different += [i] if replica == Replica.DIFFERENT else []
    return plans, different


# --- what this rank hashes --------------------------------------------------------------------


def _replicated(state: CapturedState, scopes: list[Scope], comm: Comm) -> dict[int, RankPlan]:
    """Return this rank's plans, by leaf, for the leaves that are declared equal on all ranks.

    The ranks share the cells of a REPLICATED leaf. A FROM_RANK_0 leaf has an empty plan on all
    ranks but rank 0, which hashes it.
    """
    shared = sorted(
        (i for i, s in enumerate(scopes) if s is Scope.REPLICATED and i not in state.inline),
        key=lambda i: state.leaves[i].path,
    )
    grids = [state.grids[i] for i in shared]
    runs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, first_cell, stop in replicated_runs(grids, comm.rank, comm.size):
        runs[shared[number]].append((first_cell, stop))
    plans = {i: RankPlan(runs[i]) for i in shared}
    if comm.rank:
        for i, scope in enumerate(scopes):
            if scope is Scope.FROM_RANK_0 and i in state.grids:
                plans[i] = RankPlan()
    return plans
