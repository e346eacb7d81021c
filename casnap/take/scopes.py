"""The scope of each leaf: global or of one rank, as far as its own rank can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from casnap.format.entries import ContainerEntry, TensorEntry
from casnap.format.names import component_of
from casnap.state.numpy_values import is_numpy
from casnap.state.sharded import Shards
from casnap.state.tensors import Leaf
from casnap.take.capture import Capture, KeySpan
from casnap.take.options import TakeOptions


class Scope(Enum):
    """Whether a leaf is global, and which ranks hash it."""

    UNDECIDED = "global if all ranks turn out to hold the same, else its rank's"
    PER_RANK = "its rank's"
    SHARDED = "global; ranks hold pieces, and share the work"
    REPLICATED = "global; declared equal on all ranks, which share the work"
    FROM_RANK_0 = "global; rank 0 hashes it"
    GIVEN = "global; this rank alone has it"
    EQUAL = "global; it was undecided, and all ranks hold the same"


class Declarations(NamedTuple):
    """What the caller and DDP declare about the leaves.

    Attributes:
        replicated: Globs of paths that are equal on all ranks.
        per_rank: Globs of paths that belong to their rank.
        ddp_parameters: Paths of parameters of DDP modules: equal on all ranks.
        ddp_buffers: Paths of buffers of DDP modules: those of rank 0 count.
    """

    replicated: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ()
    ddp_parameters: frozenset[str] = frozenset()
    ddp_buffers: frozenset[str] = frozenset()

    def is_named_replicated(self, path: str) -> bool:
        """Whether ``replicated=`` names a path, which is not a buffer of a DDP module."""
        return path not in self.ddp_buffers and _matches(path, self.replicated)


def declarations_of(
    app_state: Mapping[str, Any], options: TakeOptions, ranks: Sequence[int]
) -> Declarations:
    """Return what the options declare, and the DDP modules of the ranks that take part.

    DDP keeps parameters equal, and gives all ranks the buffers of rank 0 at the next step, unless
    it is told not to, or has a hook for buffers. It says nothing about the rest of the state.
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
    return Declarations(
        tuple(options.replicated or ()),
        tuple(options.per_rank or ()),
        frozenset(parameters),
        frozenset(buffers),
    )


def scopes_of(capture: Capture, declared: Declarations) -> list[Scope]:
    """Return the scope of each leaf."""
    return [
        Scope.PER_RANK if span.per_rank else _scope(leaf, span, declared)
        for span in capture.spans
        for leaf in capture.leaves[span.start : span.stop]
    ]


def _scope(leaf: Leaf, span: KeySpan, declared: Declarations) -> Scope:
    path = leaf.path
    if isinstance(leaf.content, Shards):
        return Scope.SHARDED
    if span.given:
        return Scope.GIVEN
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
