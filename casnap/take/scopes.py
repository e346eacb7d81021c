"""Whose each leaf is, as far as its own rank can tell, and what is declared about that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from casnap.format.entries import ContainerEntry, TensorEntry
from casnap.state.containers import segment_of
from casnap.state.numpy_values import is_numpy
from casnap.state.sharded import Shards
from casnap.state.tensors import Leaf
from casnap.take.capture import Capture


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

    def is_said(self, path: str) -> bool:
        """Whether somebody says in so many words that all ranks hold a path alike."""
        return path not in self.pinned and _matches(path, self.replicated)


def rules_for(
    app_state: Mapping[str, Any],
    replicated: Iterable[str],
    per_rank: Iterable[str],
    ranks: Sequence[int],
) -> Rules:
    """Return what is declared, by globs and by DDP modules of the ranks that take part.

    DDP keeps parameters equal, and gives all ranks the buffers of rank 0 at the next step, unless
    it is told not to, or to do something else with them. It knows of nothing else in the state.
    """
    alike, pinned = set[str](), set[str]()
    for key, value in app_state.items():
        if not isinstance(value, torch.nn.parallel.DistributedDataParallel):
            continue
        if set(dist.get_process_group_ranks(value.process_group)) != set(ranks):
            # Others may hold another module under this name.
            continue
        ignored = {f"module.{name}" for name in getattr(value, "parameters_to_ignore", ())}
        segment = segment_of(key)
        parameters = dict(value.named_parameters(remove_duplicate=False)).keys() - ignored
        alike |= {f"{segment}/{segment_of(name)}" for name in parameters}
        if value.broadcast_buffers and not hasattr(value, "buffer_hook"):
            buffers = dict(value.named_buffers(remove_duplicate=False)).keys() - ignored
            pinned |= {f"{segment}/{segment_of(name)}" for name in buffers}
    return Rules(tuple(replicated), tuple(per_rank), frozenset(pinned), frozenset(alike))


def scopes_of(capture: Capture, rules: Rules) -> list[Scope]:
    """Return the scope of each leaf."""
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
