"""Tensors that a framework has divided among ranks: each rank stores and fills its own boxes.

This module imports ``files``, ``take``, ``restore`` and lower layers, but no public class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import torch

from casnap.errors import MismatchError
from casnap.files.dcp_names import ObjectPath, casnap_path
from casnap.format.entries import Entry, TensorEntry
from casnap.format.region import Region
from casnap.ranks.comm import Comm
from casnap.restore.loading import Loading
from casnap.restore.remarks import log_remarks
from casnap.restore.shared_reads import fetch_shared
from casnap.restore.targets import why_unfit
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import inflate
from casnap.state.sharded import Shards
from casnap.state.stateful import Stateful
from casnap.state.tensors import Leaf, describe_shards
from casnap.storage import Entries
from casnap.take.capture import CapturedState, DividedLeaves, LiveState

if TYPE_CHECKING:
    import casnap
else:
    casnap = ModuleLater("casnap")

Part: TypeAlias = tuple[Region, torch.Tensor]
"""A box of a tensor, and the memory of its elements, of the same shape."""


def leaf_of_parts(path: str, shape: tuple[int, ...], parts: Iterable[Part]) -> Iterator[Leaf]:
    """Yield the leaf of a tensor whose boxes this rank holds; nothing if they have no elements.

    Args:
        path: The path of the tensor.
        shape: The shape of the whole tensor.
        parts: The boxes that this rank holds, each with its memory.
    """
    held = [(box, memory) for box, memory in parts if box.numel]
    if held:
        boxes, tensors = zip(*held, strict=True)
        yield describe_shards(path, Shards(shape, boxes, tensors, tensors[0]))


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes that together hold some consecutive elements (row-major), in their order.

    Args:
        shape: The shape of the tensor.
        start: The row-major number of the first element.
        stop: The number of the last element, plus one.
    """
    if start >= stop:
        return
    if not shape:
        yield Region((), ())
        return
    inner = torch.Size(shape[1:]).numel()
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        yield from _within_row(shape, last, start, stop)
        return
    yield from _within_row(shape, first - 1, start, first * inner)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Region((first, *zeros), (last - first, *shape[1:]))
    yield from _within_row(shape, last, last * inner, stop)


def _within_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes of consecutive elements that lie within one row of the first axis.

    Args:
        shape: The shape of the tensor.
        row: The index of the row on the first axis.
        start: The row-major number of the first element, in the whole tensor.
        stop: The number of the last element, plus one.
    """
    begin = row * torch.Size(shape[1:]).numel()
    for box in boxes_of_run(shape[1:], start - begin, stop - begin):
        yield Region((row, *box.offsets), (1, *box.sizes))


class WithOthers:
    """The input of a take whose state has two parts: one that ranks divide, and other values.

    Args:
        divided: The leaves of the divided part that this rank stores.
        others: The other values by key. No key may be a key of the divided part.
    """

    def __init__(self, divided: DividedLeaves, others: Mapping[str, Stateful]) -> None:
        self._divided = divided
        self._others = LiveState(others)
        self.values = self._others.values

    def keys(self) -> list[str]:
        """Return the keys of both parts."""
        return [*self._others.keys(), *self._divided.keys()]

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> CapturedState:
        """Capture the values of the keys.

        Args:
            keys: All keys, in the order on which all ranks agreed.
            chunk_size: The chunk size of the store, in bytes.
            allow_pickle: Whether values without a safe encoding may be pickled.
        """
        others = self._others.capture(
            [key for key in keys if key in self.values], chunk_size, allow_pickle=allow_pickle
        )
        divided = self._divided.capture(
            [key for key in keys if key not in self.values], chunk_size, allow_pickle=allow_pickle
        )
        shift = len(others.leaves)
        spans = [
            span._replace(start=span.start + shift, stop=span.stop + shift)
            for span in divided.spans
        ]
        return CapturedState([*others.leaves, *divided.leaves], [*others.spans, *spans], chunk_size)


class Target(NamedTuple):
    """A tensor of a snapshot, and the boxes of it that this rank fills.

    Attributes:
        path: The path of the tensor.
        shape: The shape that the stored tensor must have; None for any. With None, elements of a
            box that lie outside of the stored tensor become 0.
        parts: The boxes, each with the memory for its elements.
    """

    path: ObjectPath
    shape: tuple[int, ...] | None
    parts: list[Part]


class _Commit(msgspec.Struct, array_like=True):
    commit: bytes


@dataclass(frozen=True)
class Fit:
    """Further conditions for loading a snapshot. The tensors to fill are checked in any case.

    Attributes:
        names: The path of a dict → the names that this rank has in it. The snapshot must have no
            other names there.
        problems: Problems that the caller has found already, in words.
    """

    names: Mapping[ObjectPath, Collection[str]] = field(default_factory=dict)
    problems: Sequence[str] = ()


def check_together(
    snapshot: casnap.Snapshot, comm: Comm, targets: Iterable[Target], fit: Fit
) -> None:
    """Check that each rank can load its targets. All ranks call this, each with its own targets.

    Args:
        snapshot: The snapshot.
        comm: The ranks.
        targets: The tensors that this rank wants to fill.
        fit: Further conditions of this rank.

    Raises:
        MismatchError: A rank cannot load its targets. All ranks raise this; on a rank with
            problems, the error lists all of them.
    """
    _match(snapshot, comm, targets, (), fit)
    comm.all_gather(b"")


def load_together(
    snapshot: casnap.Snapshot,
    comm: Comm,
    targets: Iterable[Target],
    values: Iterable[ObjectPath] = (),
    *,
    allow_pickle: bool = False,
) -> dict[ObjectPath, Any]:
    """Fill the targets of this rank, and read values. All ranks call this, each for itself.

    Args:
        snapshot: The snapshot.
        comm: The ranks.
        targets: The tensors to fill.
        values: The paths of the values to read.
        allow_pickle: Whether to unpickle values that were stored by pickle.

    Returns:
        The values, by their paths.

    Raises:
        MismatchError: A target does not fit the snapshot; no rank has filled anything.
        UnsupportedTypeError: A value cannot be read; no rank has filled anything.
        DamagedError: Stored bytes are missing or damaged.
    """
    contents, paths = snapshot.contents, {value: casnap_path(value) for value in values}
    loading, to_clear = _match(snapshot, comm, targets, paths.values(), Fit())
    fetch, entries = partial(fetch_shared, comm, contents.store), list(loading.entries)
    with torch.no_grad(), without_torch_modes():
        known = loading.load_values(fetch, allow_pickle=allow_pickle)
        comm.all_gather(b"")  # returns once all ranks have compared: none writes before that
        for memory in to_clear:
            memory.zero_()
        leaves = loading.load(fetch=fetch)
    comm.all_gather(b"")
    log_remarks(contents, entries, comm.rank, comm.size)
    return {value: inflate(path, leaves, known=known) for value, path in paths.items()}


def _match(
    snapshot: casnap.Snapshot,
    comm: Comm,
    targets: Iterable[Target],
    values: Iterable[str],
    fit: Fit,
) -> tuple[Loading, list[torch.Tensor]]:
    """Compare the targets and values of this rank with the snapshot.

    Returns:
        What to load; and the memory to set to 0 first, since not all of it gets filled.

    Raises:
        MismatchError: A target or value does not fit the snapshot.
    """
    contents = snapshot.contents
    first = comm.broadcast_message(_Commit(contents.row.commit), _Commit)
    comm.check_same(f"the commit of {snapshot.path}", contents.row.commit.hex(), first.commit.hex())
    loading, problems = Loading(contents), list(fit.problems)
    trees, to_clear = contents.trees(comm.rank), list[torch.Tensor]()
    for target in targets:
        path = casnap_path(target.path)
        entry = _entry_at(trees, path)
        if problem := _why_not_filled(entry, target):
            problems.append(f"{path}: {problem}")
            continue
        assert isinstance(entry, TensorEntry)
        if target.shape is None:
            to_clear += [memory for _, memory in target.parts]
            loading.add(path, entry, _within(entry, target))
        else:
            loading.add(path, entry, target.parts)
    for path in values:
        if _entry_at(trees, path) is None:
            problems.append(f"{path}: not in the snapshot")
            continue
        for inner_path, inner in entries_below(trees, path):
            loading.add(inner_path, inner)
    for dict_path, names in fit.names.items():
        known = {casnap_path((*dict_path, name)) for name in names}
        if _entry_at(trees, path := casnap_path(dict_path)) is not None:
            below = (inner for inner, _ in entries_below(trees, path))
            stored = {inner for inner in below if inner.count("/") == len(dict_path)}
            problems += [f"{inner}: in the snapshot alone" for inner in sorted(stored - known)]
    check_fit(snapshot, problems)
    return loading, to_clear


def entries_below(trees: Mapping[str, Entries], path: str) -> Iterator[tuple[str, Entry]]:
    """Yield the path and entry of a value, and of each value inside it.

    Args:
        trees: The trees of the keys, as a rank sees them.
        path: The path of the value.
    """
    key, slash, inner = path.partition("/")
    entry = _entry_at(trees, path)
    assert entry is not None
    yield path, entry
    yield from ((key + below, e) for below, e in trees[key].items_below(f"{slash}{inner}/"))


def _entry_at(trees: Mapping[str, Entries], path: str) -> Entry | None:
    key, slash, inner = path.partition("/")
    return trees[key].get(slash + inner) if key in trees else None


def _why_not_filled(entry: Entry | None, target: Target) -> str:
    if entry is None:
        return "not in the snapshot"
    shape = target.shape
    if shape is None and isinstance(entry, TensorEntry):
        shape, axes = entry.shape, len(target.parts[0][0].sizes)
        if axes != len(shape):
            return f"{axes} axes here, {len(shape)} in the snapshot"
    return why_unfit(entry, shape or (), *(memory for _, memory in target.parts))


def _within(entry: TensorEntry, target: Target) -> Iterator[Part]:
    """Yield the parts of the target's boxes within the stored tensor, with their memory."""
    for box, memory in target.parts:
        common = box.intersect(Region.whole(entry.shape))
        if common is not None:
            yield common, memory[common.within(box)]


def check_fit(snapshot: casnap.Snapshot, problems: Collection[str]) -> None:
    """Check that there are no problems; else raise one error that lists all of them.

    Args:
        snapshot: The snapshot.
        problems: The problems in words. Nothing has been loaded yet: the error says so.

    Raises:
        MismatchError: There are problems.
    """
    if problems:
        raise MismatchError(
            f"{snapshot.path} does not fit what is to be loaded; nothing was loaded: "
            + "; ".join(problems)
        )
