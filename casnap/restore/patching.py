"""Bring live tensors from one snapshot to another. Only the chunks that differ are read.

A patch is staged first: each chunk that differs is read into new memory and verified. Then the
patch is applied by a mere copy. So nobody who reads the tensors sees a mix of two snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from casnap.errors import DamagedError
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.entries import INLINE_BYTES, TensorEntry
from casnap.format.grid import Grid
from casnap.format.region import Region
from casnap.restore.load_into import LiveTensor, match, mismatch, tensors_of
from casnap.restore.loading import Loading
from casnap.restore.renaming import Rename
from casnap.restore.restore_report import RestoreReport
from casnap.runtime import buffers
from casnap.runtime.buffers import fill_from, view_at
from casnap.runtime.torch_modes import fill, without_torch_modes
from casnap.state.devices import synchronize_devices
from casnap.state.sharded import Shards, shard_again, shards_of
from casnap.state.tensors import carrier_dtype, is_its_memory
from casnap.storage import (
    Contents,
    Fill,
    ReadOptions,
    Want,
)


class _Memory(NamedTuple):
    """Where a tensor's elements lie, and how often torch has written to them.

    A tensor has changed between two moments if its ``_Memory`` differs. Torch does not count writes
    through ``.data``, nor writes to tensors of inference mode: such changes are not noticed.

    Attributes:
        places: Address, dtype, device, shape and strides of each shard; a tensor that is not
            sharded is one shard.
        storages: Weak references to the storages. A new storage at the same address is not equal.
        versions: How often torch has written to the tensor, then to each shard.
    """

    places: tuple[tuple[object, ...], ...]
    storages: tuple[StorageWeakRef, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor, tensors: Iterable[torch.Tensor]) -> _Memory:
        """Note where a tensor lies now, and how often torch has written to it.

        A later note that differs shows that the tensor has changed meanwhile.

        Args:
            value: The tensor.
            tensors: Its shards on this rank; ``value`` alone if it is not sharded.
        """
        tensors = tuple(tensors)
        places = [(t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in tensors]
        # torch counts writes to a sharded tensor apart from writes to its shards.
        versions = [-1 if t.is_inference() else t._version for t in (value, *tensors)]
        storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]  # type: ignore[no-untyped-call]
        return cls(tuple(places), tuple(storages), tuple(versions))


class _HeldEntry(NamedTuple):
    """A live tensor, and the entry of a snapshot whose values it was filled with.

    Attributes:
        entry: The entry.
        digests: The joined digests of the entry's chunks.
        value: The tensor.
        memory: The ``_Memory`` of the tensor when it was filled. If it differs now, it is unknown
            what the tensor holds.
    """

    entry: TensorEntry
    digests: bytes
    value: torch.Tensor
    memory: _Memory


_Bases: TypeAlias = dict[bytes, tuple[torch.Tensor, tuple[slice, ...]]]
"""The digest of a chunk → a live tensor, and the slices of it that hold the chunk."""


@dataclass(frozen=True)
class LivePatch:
    """New values for live tensors, read and verified, that bring the tensors to a snapshot.

    Attributes:
        contents: The snapshot.
        copies: Parts of live tensors, each with the new values.
        values: The tensors to which these parts belong.
        held: The name of each tensor → what it holds after the patch.
        upon: The name of each tensor → what it must hold before the patch.
        whole: The names of the tensors whose elements are all replaced.
    """

    contents: Contents
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    values: list[torch.Tensor]
    held: dict[str, _HeldEntry]
    upon: dict[str, _HeldEntry]
    whole: set[str]

    @property
    def nbytes(self) -> int:
        """How many bytes the patch replaces."""
        return sum(source.nbytes for _, source in self.copies)


class LiveWeights:
    """Live tensors that patches bring from one snapshot to the next, in place.

    Args:
        target: A module, for its parameters and persistent buffers; or a state dict of tensors.
        prefix: Where the tensors are in a snapshot, as for :meth:`casnap.Snapshot.load_into`.
        rename: Maps names in a snapshot to names in the target, as for
            :meth:`casnap.Snapshot.load_into`.
        strict: Whether it is an error if the snapshot or the target has a name that the other one
            lacks.
    """

    def __init__(
        self,
        target: torch.nn.Module | MutableMapping[str, Any],
        prefix: str,
        rename: Rename | None,
        *,
        strict: bool,
    ) -> None:
        self._target = target
        # Note the sharded tensors now: while a patch is staged, a forward may have gathered them.
        self._sharded = dict[str, LiveTensor]()
        if isinstance(target, torch.nn.Module):
            shard_again(target)
            live = tensors_of(target)
            self._sharded = {n: each for n, each in live if shards_of(n, each.value) is not None}
        self._prefix = prefix
        self._rename = rename
        self._strict = strict
        self._held: dict[str, _HeldEntry] = {}

    @without_torch_modes()
    def stage(self, contents: Contents) -> LivePatch:
        """Read and verify the chunks of a snapshot that the tensors lack; write no tensor.

        Raises:
            EntryNotFoundError: There is nothing below the prefix.
            MismatchError: The tensors and the snapshot differ.
            DamagedError: Stored bytes are missing or damaged.
        """
        entries, places = self._matched(contents)
        loading, bases = Loading(contents), _Bases()
        patch = LivePatch(contents, [], [], {}, self._held, set())
        filled: set[tuple[object, ...]] = set()
        for name, shards in places.items():
            path, entry = entries[name]
            before, memory = patch.upon.get(name), _Memory.of(shards.value, shards.tensors)
            if before is not None and not _is_same(before, shards.value, memory):
                before = None
            if before is not None and before.entry == entry:
                patch.held[name] = before
                continue
            digests = _digests_of(contents, path, entry)
            held = patch.held[name] = _HeldEntry(entry, digests, shards.value, memory)
            if not entry.payload.nbytes:
                continue
            cells = contents.cells(path, entry)
            # A tensor is read whole if its shape or dtype differs, or if its entry has its bytes.
            is_alike = before is not None and _form(before.entry) == _form(entry)
            old = before.digests if before is not None and is_alike else b""
            runs = list(_changed_runs(cells, old, held.digests))
            if sum(stop - start for start, stop in runs) == cells.count:
                patch.whole.add(name)
            patch.values.append(shards.value)
            for box, tensor in zip(shards.boxes, shards.tensors, strict=True):
                # A tied tensor is stored under each of its names, and filled once.
                place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
                if place in filled:
                    continue
                filled.add(place)
                copies = [
                    (common, _memory_for(tensor, common))
                    for common in _common_regions(cells, runs, box)
                ]
                patch.copies.extend((tensor[common.within(box)], new) for common, new in copies)
                loading.add(path, entry, copies)
                if old and tensor.dtype == carrier_dtype(entry):
                    _note_bases(bases, cells, old, runs, (box, tensor))
        _load(contents, loading, bases)
        return patch

    def fits(self, patch: LivePatch) -> bool:
        """Whether the tensors still hold the values that they held when the patch was staged.

        A tensor that the patch replaces as a whole may have changed since.
        """
        if patch.upon is not self._held:
            return False
        live = self._live()
        for name, held in patch.held.items():
            if name not in live:
                return False
            value = live[name].value
            memory = _memory_of(name, value)
            if name in patch.whole:
                memory = memory._replace(versions=held.memory.versions)
            if not _is_same(held, value, memory):
                return False
        return True

    @without_torch_modes()
    def apply(self, patch: LivePatch) -> None:
        """Copy the new values of a patch into the tensors.

        Call this only if :meth:`fits` is true, and while nobody else uses the tensors.
        """
        if isinstance(self._target, torch.nn.Module):
            shard_again(self._target)
        synchronize_devices(patch.values)
        for target, new in patch.copies:
            if is_its_memory(target):
                # torch would divide the copy among its threads, which the forwards keep busy.
                buffers.copy(_bytes_of(target), _bytes_of(new))
            else:
                fill(target, new, non_blocking=True)
        synchronize_devices(patch.values)
        # torch counts writes to a sharded tensor apart from writes to its shards.
        torch.autograd.graph.increment_version([v for v in patch.values if not v.is_inference()])
        # The writes above count too, so the memory is noted anew.
        self._held = {
            name: held._replace(memory=_memory_of(name, held.value))
            for name, held in patch.held.items()
        }

    def _live(self) -> dict[str, LiveTensor]:
        """Return the tensors of the target, by name."""
        target = self._target
        if isinstance(target, torch.nn.Module):
            return {**dict(tensors_of(target)), **self._sharded}
        return {
            name: LiveTensor(target, name, value)
            for name, value in target.items()
            if isinstance(value, torch.Tensor)
        }

    def _matched(
        self, contents: Contents
    ) -> tuple[dict[str, tuple[str, TensorEntry]], dict[str, Shards]]:
        """Match the tensors with a snapshot.

        Returns:
            Name of the live tensor → path and entry; and name → the tensor's memory.

        Raises:
            MismatchError: The tensors and the snapshot differ.
        """
        report = RestoreReport()
        listed, places = match(contents, self._live(), self._prefix, self._rename, None, report)
        if report.mismatched or (self._strict and report):
            raise mismatch(contents, self._prefix, report, fits=bool(places))
        entries = {name: (listed[name].path, listed[name].entry) for name in places}
        return {n: (p, e) for n, (p, e) in entries.items() if isinstance(e, TensorEntry)}, places


# --- what differs -------------------------------------------------------------------------------


def _memory_of(name: str, value: torch.Tensor) -> _Memory:
    shards = shards_of(name, value)
    return _Memory.of(value, (value,) if shards is None else shards.tensors)


def _is_same(held: _HeldEntry, value: torch.Tensor, memory: _Memory) -> bool:
    """Whether a live tensor is the noted one, and its memory has not changed since.

    Args:
        held: What was noted: the entry whose values the tensor held, the tensor, and its memory.
        value: The live tensor.
        memory: Its memory now.
    """
    return held.value is value and held.memory == memory


def _digests_of(contents: Contents, path: str, entry: TensorEntry) -> bytes:
    payload = entry.payload
    if payload.nbytes <= INLINE_BYTES:
        return b""
    return contents.digests(payload, contents.cells(path, entry), path)


def _form(entry: TensorEntry) -> tuple[object, ...]:
    return entry.dtype, entry.shape


def _digest(digests: bytes, number: int) -> bytes:
    return digests[number * DIGEST_SIZE : (number + 1) * DIGEST_SIZE]


def _changed_runs(cells: Grid, old: bytes, new: bytes) -> Iterator[tuple[int, int]]:
    """Yield the runs of cells whose digests differ. The cells of each run form one box.

    Args:
        cells: The grid of the tensor.
        old: The digests that the tensor holds, joined; empty if no cell may be taken as equal.
        new: The digests that it is to hold, joined.

    Yields:
        The first cell of a run, and one past its last cell.
    """
    start = 0
    while start < cells.count:
        stop, end = start, min(cells.lead_stop(start), cells.count)
        while stop < end and (not old or _digest(old, stop) != _digest(new, stop)):
            stop += 1
        if stop > start:
            yield start, stop
        start = max(stop, start + 1)


def _common_regions(cells: Grid, runs: Iterable[tuple[int, int]], box: Region) -> Iterator[Region]:
    """Yield the regions that a box has in common with runs of cells."""
    for start, stop in runs:
        common = cells.region(start, stop).intersect(box)
        if common is not None:
            yield common


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return view_at(tensor.data_ptr(), tensor.nbytes)


def _memory_for(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Return new host memory for a part of a tensor; pinned if the tensor is on a GPU."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(region.sizes, dtype=tensor.dtype, pin_memory=pinned)


# --- deltas upon what the tensors hold ----------------------------------------------------------


def _note_bases(
    bases: _Bases,
    cells: Grid,
    old: bytes,
    runs: Iterable[tuple[int, int]],
    live: tuple[Region, torch.Tensor],
) -> None:
    """Note where a live tensor holds the chunks that a patch replaces: they may be bases of deltas.

    Args:
        bases: Digest of a chunk → the tensor and the slices that hold it.
        cells: The grid of the tensor.
        old: The digests that the tensor holds, joined.
        runs: The runs of cells to be replaced.
        live: A box of the tensor, and the elements in it. Only cells whole in the box are noted.
    """
    box, tensor = live
    for start, stop in runs:
        for number in range(start, stop):
            cell = cells.region(number)
            if cell.intersect(box) == cell:
                bases[_digest(old, number)] = (tensor, cell.within(box))


def _load(contents: Contents, loading: Loading, bases: _Bases) -> None:
    """Read all chunks of a patch. The base of a delta is taken from a live tensor that holds it.

    If a chunk seems damaged, other code may have changed the tensor with its base. All chunks are
    then read again, with bases from the store.
    """

    def fill(digest: Digest, memory: memoryview) -> bool:
        tensor, part = bases[digest]
        flat = tensor[part].detach().to("cpu").contiguous().reshape(-1)
        return fill_from(flat.view(torch.uint8).numpy().data, memory)

    def base(digest: Digest) -> Fill | None:
        return partial(fill, digest) if digest in bases else None

    def fetch(wants: Iterable[Want], options: ReadOptions) -> None:
        contents.store.fetch(wants, options._replace(base=base))

    try:
        loading.load(fetch=fetch)
    except DamagedError:
        if not bases:
            raise
        # Other code has changed the tensors, so deltas based on them give wrong chunks.
        bases.clear()
        loading.load()
