"""Which tensors of several snapshots have a mean, and why others have none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from casnap.errors import StateError
from casnap.format.entries import Entry, TensorEntry, type_text, unknown_in
from casnap.state.roles import role_of
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

# The statistics of BatchNorm. Their mean fits no model: `torch.optim.swa_utils.update_bn` makes
# those of an average. A plain state dict does not say that they are buffers.
_OF_BATCHES = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True)
class TensorToAverage:
    """A tensor whose mean is to be computed.

    Attributes:
        owner: The rank that owns it; None for a global tensor.
        component: The key of the app state, as a component of paths.
        inner: The path below the key.
        entries: Its entry in each snapshot.
    """

    owner: int | None
    component: str
    inner: str
    entries: tuple[TensorEntry, ...]

    @property
    def entry(self) -> TensorEntry:
        """The entry in the last snapshot."""
        return self.entries[-1]

    @property
    def path(self) -> str:
        """The path, in errors and reports."""
        return _path(self.owner, self.component, self.inner)


@dataclass(frozen=True)
class AveragingPlan:
    """For each tensor of the last snapshot, whether it is averaged, equal in all, or kept.

    Attributes:
        tensors: The tensors to average.
        equal: How many tensors are equal in all snapshots, so that nothing is computed.
        kept: The path of each other tensor → why the one of the last snapshot is kept.
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
    plan = AveragingPlan([], 0, {})
    tensors, equal = plan.tensors, 0
    for owner, component, inner, entry, others in _tensors_of_last(sources):
        found = [get(inner) for get in others]
        why = _why_no_mean(component + inner, entry)
        for source, other in zip(sources, found, strict=False):
            why = why or _why_apart(source.name, other, entry)
        if why:
            plan.kept[_path(owner, component, inner)] = why
        elif (keeps_equal or not entry.payload.nbytes) and all(e == entry for e in found):
            equal += 1
        else:
            entries = [e for e in (*found, entry) if isinstance(e, TensorEntry)]
            tensors.append(TensorToAverage(owner, component, inner, tuple(entries)))
    if not tensors and not equal:
        raise StateError(
            f"no tensor of weights has one shape and dtype in all of the snapshots "
            f"{', '.join(source.name for source in sources)[:400]}, so they have no average"
        )
    return AveragingPlan(tensors, equal, plan.kept)


_Get = Callable[[str], Entry | None]


def _tensors_of_last(
    sources: Sequence[Contents],
) -> Iterator[tuple[int | None, str, str, TensorEntry, list[_Get]]]:
    """Yield owner, key, path and entry of each tensor of the last snapshot.

    With each comes, for every other snapshot, the function that returns its entry of a path.
    """
    last = sources[-1]
    manifest = last.manifest
    owners: list[tuple[int | None, dict[str, bytes]]] = [(None, manifest.shared)]
    owners += [(int(rank), trees) for rank, trees in manifest.ranks.items()]
    for owner, trees in owners:
        for component, digest in trees.items():
            others = [_getter(source, owner, component) for source in sources[:-1]]
            for inner, entry in last.tree(digest).items():
                if isinstance(entry, TensorEntry):
                    yield owner, component, inner, entry, others


def _getter(contents: Contents, owner: int | None, component: str) -> _Get:
    """Return the function that returns a snapshot's entry of a path, as one owner sees it."""
    layers = [contents.manifest.shared]
    if owner is not None:
        layers.insert(0, contents.manifest.ranks.get(str(owner), {}))
    trees = [contents.tree(layer[component]) for layer in layers if component in layer]
    return lambda inner: next((e for tree in trees if (e := tree.get(inner)) is not None), None)


def _path(owner: int | None, component: str, inner: str) -> str:
    return ("" if owner is None else f"{owner}/") + component + inner


def _why_no_mean(path: str, entry: TensorEntry) -> str:
    """Return why a tensor is not averaged, whatever the other snapshots hold; "" if it is."""
    role = role_of(path, entry)
    if role != "weights":
        return role
    if entry.kind == "buffer" or path.rpartition(".")[2] in _OF_BATCHES:
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
    return ""
