"""Which tensors of several snapshots have a mean, and why others have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from casnap.errors import StateError
from casnap.format.entries import Entry, OwnedTree, TensorEntry, type_text, unknown_in
from casnap.format.tree import Tree
from casnap.state.containers import is_sparse
from casnap.state.roles import is_buffer, stricter_role_of
from casnap.state.tensors import check_tensor
from casnap.storage import Contents

SUM_DTYPES = {
    "float16": torch.float32,
    "bfloat16": torch.float32,
    "float32": torch.float32,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
"""The dtype of a tensor that can be averaged → the dtype of the sum."""


@dataclass(frozen=True)
class TensorToAverage:
    """A tensor whose mean is to be computed.

    Attributes:
        tree: The tree of the last snapshot that has it.
        inner: The path below the key.
        entries: Its entry in each snapshot.
    """

    tree: OwnedTree
    inner: str
    entries: tuple[TensorEntry, ...]

    @property
    def entry(self) -> TensorEntry:
        """The entry in the last snapshot."""
        return self.entries[-1]

    @property
    def path(self) -> str:
        """The path, in errors and reports."""
        return self.tree.label + self.inner


@dataclass(frozen=True)
class AveragingPlan:
    """For each tensor of the last snapshot, whether it is averaged, equal in all, or kept.

    Attributes:
        tensors: The tensors to average.
        equal: How many tensors are equal in all snapshots, so that nothing is computed.
        kept: The path of each other tensor → why the last snapshot's tensor is kept.
    """

    tensors: list[TensorToAverage]
    equal: int
    kept: dict[str, str]


def plan_average(sources: Sequence[Contents], *, keeps_equal: bool) -> AveragingPlan:
    """Decide for each tensor of the last snapshot whether to average it.

    Args:
        sources: The snapshots.
        keeps_equal: Whether tensors that are equal in all snapshots stay as they are.

    Raises:
        StateError: No tensor of weights has one shape and dtype in all snapshots.
        DamagedError: A node is missing or damaged.
    """
    tensors, equal, kept = list[TensorToAverage](), 0, dict[str, str]()
    for found in _tensors_of_last(sources):
        entry, others = found.entry, found.others
        why = _why_no_mean(found)
        for source, other in zip(sources, others, strict=False):
            why = why or _why_apart(source.name, other, entry)
        if why:
            kept[found.tree.label + found.inner] = why
        elif (keeps_equal or not entry.payload.nbytes) and all(e == entry for e in others):
            equal += 1
        else:
            entries = tuple(e for e in (*others, entry) if isinstance(e, TensorEntry))
            tensors.append(TensorToAverage(found.tree, found.inner, entries))
    if not tensors and not equal:
        raise StateError(
            f"no tensor of weights has one shape and dtype in all of the snapshots "
            f"{', '.join(source.name for source in sources)[:400]}, so they have no average"
        )
    return AveragingPlan(tensors, equal, kept)


class _Found(NamedTuple):
    """A tensor of the last snapshot, and what the other snapshots have at its path.

    Attributes:
        tree: The tree that has it.
        inner: The path below the key.
        entry: The entry of the tensor.
        is_part: Whether it is a part of a sparse tensor.
        others: The entry of each other snapshot; None where there is none.
    """

    tree: OwnedTree
    inner: str
    entry: TensorEntry
    is_part: bool
    others: list[Entry | None]


def _tensors_of_last(sources: Sequence[Contents]) -> Iterator[_Found]:
    """Yield each tensor of the last snapshot."""
    *others, last = sources
    for tree in last.manifest.trees():
        seen = [_trees_seen(other, tree.owner, tree.component) for other in others]
        sparse = set[str]()
        for inner, entry in last.tree(tree.digest).items():
            if isinstance(entry, TensorEntry):
                is_part = inner.rpartition("/")[0] in sparse
                found = [_first(trees, inner) for trees in seen]
                yield _Found(tree, inner, entry, is_part, found)
            elif is_sparse(entry):
                sparse.add(inner)


def _trees_seen(contents: Contents, owner: int | None, component: str) -> list[Tree[Entry]]:
    """Return the trees in which a rank looks for an entry: its own tree, then the global one.

    Args:
        contents: The snapshot.
        owner: The rank; None to look only in the global tree.
        component: The key of the app state, as a component of paths.
    """
    layers = [contents.manifest.shared]
    if owner is not None:
        layers.insert(0, contents.manifest.ranks.get(str(owner), {}))
    return [contents.tree(layer[component]) for layer in layers if component in layer]


def _first(trees: Sequence[Tree[Entry]], inner: str) -> Entry | None:
    """Return the entry at a path in the first tree that has one; None if no tree has."""
    return next((e for tree in trees if (e := tree.get(inner)) is not None), None)


def _why_no_mean(found: _Found) -> str:
    """Return why a tensor has no mean, going by the last snapshot alone; "" if it can have one."""
    path, entry = found.tree.component + found.inner, found.entry
    role = stricter_role_of(path, entry)
    if role != "weights":
        return role
    if found.is_part:
        return "a part of a sparse tensor"
    # The mean of the statistics of BatchNorm fits no model: `torch.optim.swa_utils.update_bn`
    # computes them for an averaged model.
    if is_buffer(path, entry):
        return "a buffer"
    if entry.dtype not in SUM_DTYPES:
        return f"of {entry.dtype}"
    if why := unknown_in(entry):
        return why
    check_tensor(entry)
    return ""


def _why_apart(name: str, other: Entry | None, entry: TensorEntry) -> str:
    """Return why a tensor has no mean with the entry of another snapshot; "" if it has."""
    if other is None:
        return f"not in {name}"
    if unknown_in(other):
        return f"{name} has {unknown_in(other)}"
    if not isinstance(other, TensorEntry) or (other.dtype, other.shape) != (
        entry.dtype,
        entry.shape,
    ):
        return f"{type_text(other)} in {name}"
    check_tensor(other)
    return ""
