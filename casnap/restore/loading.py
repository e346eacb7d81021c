"""Load entries into memory: which chunks to read, and where their bytes go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, TypeAlias

import torch
from msgspec import Struct

from casnap.errors import DamagedError, MismatchError, StateError
from casnap.format.digest import split_digests
from casnap.format.entries import (
    INLINE_BYTES,
    Entry,
    KnownEntry,
    Payload,
    TensorEntry,
    UnknownEntry,
    check_known,
    unknown_in,
)
from casnap.format.grid import Grid
from casnap.format.region import Region
from casnap.restore.indexing import Selection
from casnap.restore.landings import Landings
from casnap.restore.reuse import Candidate, lacking
from casnap.runtime import buffers
from casnap.runtime.buffers import Slot, address_of, view_at
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import fill
from casnap.runtime.units import Size, bytes_if_given
from casnap.state.devices import pin, synchronize_workers
from casnap.state.numpy_values import is_numpy
from casnap.state.tensors import (
    Leaf,
    allocate,
    as_copyable,
    carrier_dtype,
    check_tensor,
    is_its_memory,
    is_its_storage,
    is_wrapper,
    itemsize_of,
)
from casnap.storage import (
    Contents,
    ReadOptions,
    Want,
)

_INTEGERS = {
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
Sink = Callable[[memoryview], None]
Fetch = Callable[[Iterable[Want], ReadOptions], None]
"""Reads chunks, as :meth:`casnap.storage.reading.repository.Repository.fetch` does."""
FillTarget: TypeAlias = tuple[Region | Selection, torch.Tensor]
"""Which elements of an entry to read, and the tensor to fill with them."""


class _TensorToFill(Struct, frozen=True):
    """A tensor to fill with some elements of an entry.

    Attributes:
        box: The elements of the entry to read.
        tensor: The tensor.
        held: A tensor that may have these elements already, perhaps ``tensor`` itself; or None.
        narrower: A tensor of integers with fewer bits, which gets the elements of ``tensor`` in the
            end if they fit; mostly None.
    """

    box: Region | Selection
    tensor: torch.Tensor
    held: torch.Tensor | None
    narrower: torch.Tensor | None = None


class _EntryToLoad(Struct, frozen=True):
    """An entry to load.

    Attributes:
        path: Its path.
        entry: The entry.
        content: The tensor or bytes that :meth:`Loading.load` returns for the entry; None if
            ``load`` returns nothing for it.
        targets: The tensors to fill, if the entry is a tensor.
    """

    path: str
    entry: KnownEntry
    content: torch.Tensor | bytearray | None
    targets: Sequence[_TensorToFill] = ()


class _Move(Struct, frozen=True):
    """A *move*: how one cell, once it is read, gets into the memory to fill.

    Attributes:
        number: The number of the cell in the grid of its entry.
        nbytes: The bytes of the cell.
        nbytes_kept: How many of these bytes are needed.
        sink: Takes the bytes.
        target: Memory that the bytes of the cell fill exactly, so that they may be read straight
            into it; None if there is none.
        on_device: The same on a device, as a tensor; None if there is none.
    """

    number: int
    nbytes: int
    nbytes_kept: int
    sink: Sink
    target: memoryview | None = None
    on_device: torch.Tensor | None = None


class Loading:
    """Loads entries of a snapshot into memory: first add all of them, then load.

    Args:
        contents: The snapshot.
        progress: Called with the phase, the bytes done, and the total.

    Attributes:
        kept_bytes: How many bytes :meth:`load` did not read, since tensors held them.
    """

    def __init__(self, contents: Contents, progress: Progress | None = None) -> None:
        self.kept_bytes = 0
        self._contents = contents
        self._counter = ProgressCounter(progress, "reading")
        self._reports = progress is not None
        self._items: list[_EntryToLoad] = []
        self._unknown: list[tuple[str, Entry]] = []
        self._landings = Landings(())

    @property
    def entries(self) -> Iterator[tuple[str, Entry]]:
        """The path and entry of each value that is still to be loaded."""
        return ((item.path, item.entry) for item in self._items)

    def add(
        self,
        path: str,
        entry: Entry,
        targets: Iterable[FillTarget] | None = None,
        content: torch.Tensor | None = None,
        held: Iterable[torch.Tensor] = (),
    ) -> None:
        """Add an entry to load. A tensor's cells are read only if the targets need them.

        Args:
            path: The entry's path.
            entry: The entry.
            targets: Boxes or selections of the entry, each with the tensor to fill, which has the
                same shape, but may have any dtype, device and strides. The boxes may overlap, the
                tensors may not. None for new memory.
            content: The tensor that :meth:`load` returns for the entry; None if it returns nothing.
            held: For each target, in order, a tensor that may have its elements already, such as
                the tensor to fill itself. It is hashed, and cells with equal digests are not read.

        Raises:
            DamagedError: The entry contradicts itself.
            StateError: There is not enough memory.
        """
        if isinstance(entry, UnknownEntry) or unknown_in(entry):
            # One error names all unknown entries, before anything is read.
            self._unknown.append((path, entry))
            return
        if not isinstance(entry, TensorEntry):
            # Memory is taken later, once it is known that there are chunks for it.
            self._counter.total += entry.payload.nbytes
            self._items.append(_EntryToLoad(path, entry, bytearray()))
            return
        with naming(self._contents, path):
            check_tensor(entry)
            if targets is None:
                content = allocate(entry)
                targets = ((Region.whole(entry.shape), with_item_axis(entry, content)),)
        parts = [
            _target(entry, box, tensor, holder)
            for (box, tensor), holder in zip_longest(targets, held)
            if box.numel
        ]
        if self._reports:
            self._counter.total += sum(part.box.numel for part in parts) * itemsize_of(entry)
        self._items.append(_EntryToLoad(path, entry, content, parts))

    def load_values(
        self, fetch: Fetch | None = None, *, allow_pickle: bool | None = None
    ) -> dict[str, Any]:
        """Read the values and containers that were added; return them decoded, by path.

        :func:`casnap.state.flatten.inflate` takes them as ``known``. Call :meth:`load` afterwards,
        for the tensors. So no tensor is overwritten if a value cannot be read.

        Args:
            fetch: Reads the chunks; by default from the store, for this process alone.
            allow_pickle: Whether to unpickle pickled values. Only for a trusted store.

        Raises:
            DamagedError: Some chunks are missing or damaged, or a value is damaged.
            UnsupportedTypeError: A value needs a class that is not imported, or ``allow_pickle``.
            UnsupportedFormatError: A newer version wrote a value.
        """
        from casnap.state.flatten import decode  # not needed by who reads tensors alone

        all_items = self._items
        self._items = [item for item in all_items if not isinstance(item.entry, TensorEntry)]
        leaves = self.load(fetch=fetch)
        self._items = [item for item in all_items if isinstance(item.entry, TensorEntry)]
        return decode(leaves.values(), allow_pickle=allow_pickle)

    def load(self, budget: Size | None = None, fetch: Fetch | None = None) -> dict[str, Leaf]:
        """Read and verify all chunks, fill the tensors, and return the leaves by path.

        Args:
            budget: The most bytes of buffers to read with.
            fetch: Reads the chunks; by default from the store, for this process alone.

        Raises:
            DamagedError: Some chunks are missing or damaged. All others were read.
            DeviceError: A device does not hold what was copied to it, or computes wrong digests.
            MismatchError: A tensor to fill cannot hold an integer of its entry.
            UnsupportedFormatError: A newer version wrote some entries. Nothing was read.
        """
        check_known(self._contents.label, self._unknown)
        fetch = fetch or self._contents.store.fetch
        most = bytes_if_given("memory_budget_bytes", budget, least=0)
        self._landings = Landings(self._tensors_to_fill())
        options = ReadOptions(most, _preparation(self._tensors_to_fill()))
        if self._landings.devices:
            options = options._replace(settle=self._landings.settle)
        try:
            with python_gc_paused():
                fetch(self._wants(), options)
        finally:
            # torch does not see these writes. A backward that needs older values must fail.
            torch.autograd.graph.increment_version(self._tensors_to_fill())
        synchronize_workers(self._tensors_to_fill())
        leaves: dict[str, Leaf] = {}
        for item in self._items:
            for target in item.targets:
                if target.narrower is not None:
                    self._narrow(item.path, target.tensor, target.narrower)
            if item.content is not None:
                content = item.content
                filled = bytes(content) if isinstance(content, bytearray) else content
                leaves[item.path] = Leaf(item.path, item.entry, filled)
        return leaves

    def _narrow(self, path: str, read: torch.Tensor, narrower: torch.Tensor) -> None:
        """Fill a tensor of fewer bits than the integers that were read have, if they fit.

        Raises:
            MismatchError: An integer does not fit. Torch would store another one, without a word.
        """
        cast = read.to(narrower.dtype)
        if not _are_equal(cast, read):
            raise MismatchError(
                f"{self._contents.label}: {path}: integers of {read.dtype} in the "
                f"snapshot do not fit {narrower.dtype}, as it is here; give it more bits"
            )
        fill(narrower, cast)

    def _tensors_to_fill(self) -> Iterator[torch.Tensor]:
        return (target.tensor for item in self._items for target in item.targets)

    def _wants(self) -> Iterator[Want]:
        candidates: Iterator[Any] = self._candidates()
        targets = (target for item in self._items for target in item.targets)
        return lacking(candidates) if any(t.held is not None for t in targets) else candidates

    def _candidates(self) -> Iterator[Want | Candidate]:
        """Yield the chunks to read. Fill small tensors here: their entries hold their bytes.

        Raises:
            DamagedError: An entry and its digests contradict each other.
        """
        for item in self._items:
            path, entry, content = item.path, item.entry, item.content
            payload = entry.payload
            if payload.nbytes <= INLINE_BYTES:
                self._fill_inline(item, payload)
                continue
            cells = self._contents.cells(path, entry)
            digests = split_digests(self._contents.digests(payload, cells, path))
            each: list[tuple[_TensorToFill | None, Iterator[_Move]]]
            if isinstance(content, bytearray):
                content.extend(bytes(payload.nbytes))
                each = [(None, _copies(cells, memoryview(content)))]
            else:
                assert isinstance(entry, TensorEntry)
                each = [(t, _moves(entry, cells, t.box, t.tensor)) for t in item.targets]
            for target, moves in each:
                for move in moves:
                    sink, part = move.sink, move.on_device
                    if self._reports:
                        sink = self._counting(sink, move.nbytes_kept)
                    there = part if part is not None and self._landings.accept(part) else None
                    digest = digests[move.number]
                    want = Want(digest, move.nbytes, sink, path, move.target, there)
                    if target is None or target.held is None:
                        yield want
                    else:
                        yield self._candidate(want, target, cells.region(move.number))

    def _candidate(self, want: Want, target: _TensorToFill, cell: Region) -> Want | Candidate:
        """Pair a chunk to read with the part of a live tensor that may hold its elements already.

        Args:
            want: The chunk.
            target: The tensor to fill, and the live tensor.
            cell: The box of the chunk.

        Returns:
            The pair; only ``want`` if the live tensor cannot hold the whole cell.
        """
        box, tensor, held = target.box, target.tensor, target.held
        if held is None or not isinstance(box, Region) or cell.intersect(box) != cell:
            return want
        place = cell.within(box)
        part = held[place]

        def keep() -> None:
            if held is not tensor:
                fill(tensor[place], part)
            self.kept_bytes += want.nbytes
            if self._reports:
                self._counter.add(want.nbytes)

        return Candidate(want, part, keep)

    def _fill_inline(self, item: _EntryToLoad, payload: Payload) -> None:
        inline, path = payload.inline, item.path
        if len(inline) != payload.nbytes:
            raise DamagedError(f"{self._contents.label}: {path} is cut off", (path,))
        if isinstance(item.content, bytearray):
            item.content.extend(inline)
            return
        entry = item.entry
        assert isinstance(entry, TensorEntry)
        region = Region.whole(entry.shape)
        for target in item.targets:
            box, tensor = target.box, target.tensor
            if box == region and _is_direct(entry, tensor):
                # For few bytes, this takes half as long as to make a tensor of them.
                memmove(tensor.data_ptr(), inline, payload.nbytes)
                continue
            elements = elements_of(entry, memoryview(bytearray(inline)), region)
            fill(tensor, elements if box == region else elements[box.within(region)])

    def _counting(self, sink: Sink, bytes_kept: int) -> Sink:
        def count(raw: memoryview) -> None:
            sink(raw)
            self._counter.add(bytes_kept)

        return count


def _preparation(tensors: Iterable[torch.Tensor]) -> Callable[[Slot], object] | None:
    """Return a function that pins a buffer for the tensors' device; None if all are on the CPU."""
    device = next((tensor.device for tensor in tensors if not tensor.is_cpu), None)
    return None if device is None else partial(pin, device=device)


@contextmanager
def naming(contents: Contents, path: str) -> Iterator[None]:
    """Within this ``with`` block, add the snapshot and the path to errors about an entry."""
    try:
        yield
    except DamagedError as e:
        raise DamagedError(f"{contents.label}: {path}: {e}", (path,)) from e
    except StateError as e:
        raise type(e)(f"{contents.label}: {path}: {e}") from e


def _target(
    entry: TensorEntry, box: Region | Selection, tensor: torch.Tensor, held: torch.Tensor | None
) -> _TensorToFill:
    """Make the :class:`_TensorToFill` for a tensor.

    Args:
        entry: The entry to fill the tensor with.
        box: The elements of the entry to read.
        tensor: The tensor.
        held: A tensor that may have these elements already. It is left out if its memory cannot
            have them in the stored form, for example because its dtype differs.
    """
    target = as_copyable(tensor.detach())
    if target.dtype in _INTEGERS and _may_not_fit(carrier_dtype(entry), target.dtype):
        read = torch.empty(box.sizes, dtype=carrier_dtype(entry), device=target.device)
        return _TensorToFill(box, read, None, target)
    if held is None or is_wrapper(held) or not is_its_storage(held) or is_numpy(entry):
        return _TensorToFill(box, target, None)
    holder = target if held is tensor else as_copyable(held.detach())
    is_alike = holder.dtype == carrier_dtype(entry) and tuple(holder.shape) == box.sizes
    return _TensorToFill(box, target, holder if is_alike else None)


def _may_not_fit(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether integers of a snapshot may be none that a tensor of integers can hold."""
    if stored == wanted or stored not in _INTEGERS:
        return False
    given, room = torch.iinfo(stored), torch.iinfo(wanted)
    return given.min < room.min or given.max > room.max


def _are_equal(cast: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether integers are the same numbers after a cast."""
    # As bytes: torch may not compare unsigned integers.
    again, given = (t.reshape(-1).view(torch.uint8) for t in (cast.to(read.dtype), read))
    if not torch.equal(again, given):
        return False
    # A cast there and back hides that a number has changed its sign.
    if cast.dtype.is_signed == read.dtype.is_signed:
        return True
    return not bool(((cast if cast.dtype.is_signed else read) < 0).any())


def with_item_axis(entry: TensorEntry, carrier: torch.Tensor) -> torch.Tensor:
    """Return an entry's carrier (a plain tensor of its elements) as a view to fill or to compare.

    A NumPy array has a carrier of bytes. Its view has the array's axes, and one more for the bytes
    of an element.
    """
    if is_numpy(entry):
        return carrier.reshape(*entry.shape, itemsize_of(entry))
    return as_copyable(carrier)


def elements_of(entry: TensorEntry, raw: memoryview, region: Region) -> torch.Tensor:
    """Return the elements of a box of an entry as a tensor.

    Args:
        entry: The entry.
        raw: The bytes of the box.
        region: The box.

    Returns:
        The tensor. For a NumPy array it has one more axis, as in :func:`with_item_axis`.
    """
    dtype = carrier_dtype(entry)
    # Small chunks lie anywhere in a pack, and torch crashes on unaligned elements. torch also warns
    # of read-only bytes, such as decompressed ones.
    if raw.readonly or address_of(raw) % dtype.itemsize:
        raw = memoryview(bytearray(raw))
    shape = (*region.sizes, itemsize_of(entry)) if is_numpy(entry) else region.sizes
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _copies(cells: Grid, target: memoryview) -> Iterator[_Move]:
    """Yield a :class:`_Move` for each cell. The cells fill ``target``, one after the other."""
    start = 0
    for number, nbytes in enumerate(cells.sizes()):
        yield _filling(number, target[start : start + nbytes])
        start += nbytes


def _filling(number: int, target: memoryview) -> _Move:
    """Return the :class:`_Move` of a cell that fills memory exactly, so it can be read there.

    Args:
        number: The number of the cell in the grid of its entry.
        target: The memory, as long as the cell.
    """
    return _Move(number, len(target), len(target), _copy_to(target), target)


def _copy_to(target: memoryview, offset: int = 0) -> Sink:
    def sink(raw: memoryview) -> None:
        if raw is not target:  # else it was read straight into its place
            buffers.copy(target, raw[offset : offset + len(target)])

    return sink


def _moves(
    entry: TensorEntry, cells: Grid, region: Region | Selection, target: torch.Tensor
) -> Iterator[_Move]:
    """Yield a :class:`_Move` for each cell that has elements of ``region`` to fill a tensor with.

    Args:
        entry: The entry.
        cells: The grid of the entry.
        region: The elements of the entry to read.
        target: The tensor to fill, in the shape of ``region``.
    """
    if isinstance(region, Selection):
        itemsize = itemsize_of(entry)
        for number, source, place in region.cells(cells):
            cell = cells.region(number)
            bytes_kept = prod(axis.stop - axis.start for axis in place) * itemsize
            sink = _elements_to(entry, target[place], cell, source)
            yield _Move(number, cell.numel * itemsize, bytes_kept, sink)
        return
    flat = view_at(target.data_ptr(), target.nbytes) if _is_direct(entry, target) else None
    if flat is not None and region.sizes == cells.shape:
        yield from _copies(cells, flat)
        return
    itemsize = itemsize_of(entry)
    is_on_device = not target.is_cpu and _has_stored_form(entry, target)
    for number in cells.covering(region):
        cell = cells.region(number)
        common = cell.intersect(region)
        assert common is not None
        bytes_kept, nbytes = common.numel * itemsize, cell.numel * itemsize
        run, start_in_cell = None, common.start_in(cell)
        if flat is not None and (start := common.start_in(region)) is not None:
            run = flat[start * itemsize : start * itemsize + bytes_kept]
        if run is None or start_in_cell is None:
            box = target[common.within(region)]
            sink = _elements_to(entry, box, cell, common.within(cell))
            is_run = is_on_device and bytes_kept == nbytes and box.is_contiguous()
            yield _Move(number, nbytes, bytes_kept, sink, on_device=box if is_run else None)
        elif bytes_kept == nbytes:
            yield _filling(number, run)
        else:
            yield _Move(number, nbytes, bytes_kept, _copy_to(run, start_in_cell * itemsize))


def _is_direct(entry: TensorEntry, target: torch.Tensor) -> bool:
    """Whether the stored bytes of an entry are those of the tensor to fill."""
    return target.dtype == carrier_dtype(entry) and is_its_memory(target)


def _has_stored_form(entry: TensorEntry, target: torch.Tensor) -> bool:
    """Whether each element of the tensor to fill is, in memory, as the entry stores it."""
    is_alike = target.dtype == carrier_dtype(entry)
    return is_alike and is_its_storage(target) and not is_wrapper(target)


def _elements_to(
    entry: TensorEntry, box: torch.Tensor, cell: Region, box_of_cell: tuple[slice, ...]
) -> Sink:
    def sink(raw: memoryview) -> None:
        fill(box, elements_of(entry, raw, cell)[box_of_cell])

    return sink
