"""Entries on their way from the store into memory: which chunks to read, and where each goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch

from casnap.errors import DamagedError, StateError
from casnap.format.digest import split_digests
from casnap.format.entries import (
    INLINE_BYTES,
    BoxedTensorEntry,
    Entry,
    Payload,
    TensorEntry,
    payload_of,
)
from casnap.format.grid import Cells, Grid
from casnap.format.region import Region
from casnap.format.tiling import tiling_of
from casnap.runtime import buffers
from casnap.runtime.buffers import Slot, address_of, view_at
from casnap.runtime.threads import collector_paused
from casnap.runtime.torch_modes import fill
from casnap.state.cuda import pin, settle_workers
from casnap.state.tensors import (
    Leaf,
    allocate,
    carrier_dtype,
    check_shape,
    elements,
    is_numpy,
    itemsize_of,
)
from casnap.storage.contents import Contents
from casnap.storage.objects import ReadOptions, Want

Progress = Callable[[int, int], None]
Sink = Callable[[memoryview], None]
Fetch = Callable[[Iterable[Want], ReadOptions], None]
"""Does what :meth:`casnap.storage.objects.Objects.fetch` does."""
Part: TypeAlias = tuple[Region, torch.Tensor]
"""A box of a tensor, and a tensor of the box's shape, to be filled with it."""


class _Item(NamedTuple):
    """An entry to load.

    Attributes:
        path: Its path.
        entry: The entry.
        content: What its leaf will hold; None for no leaf.
        given: The parts of a tensor that are filled; None for all of ``content``.
    """

    path: str
    entry: Entry
    content: torch.Tensor | bytearray | None
    given: Sequence[Part] | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """What is filled of a tensor."""
        if self.given is not None or not isinstance(self.content, torch.Tensor):
            return self.given or ()
        assert isinstance(self.entry, TensorEntry)
        carrier = with_item_axis(self.entry, self.content.detach())
        return ((Region.whole(self.entry.shape), carrier),)


class _Move(NamedTuple):
    """What happens with a cell: its number, its bytes, those of them that are kept, and how."""

    number: int
    nbytes: int
    kept: int
    sink: Sink


class Loading:
    """Entries on their way from the store into memory: what to read, and where it goes.

    Args:
        contents: The snapshot.
        progress: Told the bytes done and in all.
    """

    def __init__(self, contents: Contents, progress: Progress | None = None) -> None:
        self._contents = contents
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._items: list[_Item] = []

    def add(self, path: str, entry: Entry, target: torch.Tensor | None = None) -> None:
        """Ask for an entry: into ``target`` (same shape, any dtype), or into new memory.

        Raises:
            DamagedError: The entry contradicts itself.
            StateError: There is not so much memory.
        """
        self._total += payload_of(entry).nbytes
        if not isinstance(entry, TensorEntry):
            # Memory is taken only once it is known that there are chunks for it.
            self._items.append(_Item(path, entry, bytearray()))
            return
        with naming(self._contents, path):
            check_entry(entry, self._contents.objects.config.chunk_size)
            content = allocate(entry) if target is None else target
        self._items.append(_Item(path, entry, content))

    def add_parts(
        self,
        path: str,
        entry: TensorEntry,
        parts: Sequence[Part],
        content: torch.Tensor | None = None,
    ) -> None:
        """Ask for parts of a torch tensor; only the cells that share an element with one are read.

        Args:
            path: The entry's path.
            entry: The entry.
            parts: Boxes of the tensor, and what is filled with each, of any dtype, device and
                strides. The boxes may overlap, what is filled may not.
            content: What the leaf holds that :meth:`load` returns; without it there is none.

        Raises:
            DamagedError: The entry contradicts itself.
        """
        with naming(self._contents, path):
            check_entry(entry, self._contents.objects.config.chunk_size)
            self._total += sum(region.numel for region, _ in parts) * itemsize_of(entry)
        parts = [(region, elements(tensor.detach())) for region, tensor in parts if region.numel]
        self._items.append(_Item(path, entry, content, parts))

    def load(self, budget: int | None = None, fetch: Fetch | None = None) -> dict[str, Leaf]:
        """Read everything, verified, and return it by path.

        Args:
            budget: The most bytes of buffers to read with.
            fetch: What reads; by default the store, for this process alone.

        Raises:
            DamagedError: Something is missing or damaged; all else was read.
        """
        fetch = fetch or self._contents.objects.fetch
        with collector_paused():
            fetch(self.wants(), ReadOptions(budget, preparation(self._filled())))
        settle_workers(self._filled())
        return {
            path: Leaf(path, entry, bytes(content) if isinstance(content, bytearray) else content)
            for path, entry, content, _ in self._items
            if content is not None
        }

    def _filled(self) -> Iterator[torch.Tensor]:
        for item in self._items:
            if item.given is not None:
                yield from (tensor for _, tensor in item.given)
            elif isinstance(item.content, torch.Tensor):
                yield item.content

    def wants(self) -> Iterator[Want]:
        """Yield the chunks to read; what stands in an entry itself is filled in on the way.

        Raises:
            DamagedError: An entry and its digests do not fit each other.
        """
        for item in self._items:
            path, entry, content, _ = item
            payload = payload_of(entry)
            if payload.nbytes <= INLINE_BYTES:
                self._fill_inline(item, payload)
                continue
            cells = self._contents.cells(path, entry)
            digests = split_digests(self._contents.digests(payload, cells, path))
            if isinstance(content, bytearray):
                content.extend(bytes(payload.nbytes))
                moves = _copies(cells, memoryview(content))
            else:
                assert isinstance(entry, TensorEntry)
                each = (_moves(entry, cells, region, tensor) for region, tensor in item.parts)
                moves = chain.from_iterable(each)
            for number, nbytes, kept, sink in moves:
                counted = self._counted(sink, kept) if self._progress else sink
                yield Want(digests[number], nbytes, counted, path)

    def _fill_inline(self, item: _Item, payload: Payload) -> None:
        inline = inline_bytes(self._contents, item.path, payload)
        if isinstance(item.content, bytearray):
            item.content.extend(inline)
        for region, tensor in item.parts:
            if tensor.numel():
                assert isinstance(item.entry, TensorEntry)
                whole = Region.whole(item.entry.shape)
                elements = elements_of(item.entry, memoryview(bytearray(inline)), whole)
                fill(tensor, elements if region == whole else elements[region.within(whole)])

    def _counted(self, sink: Sink, kept: int) -> Sink:
        def counted(raw: memoryview) -> None:
            sink(raw)
            with self._lock:
                self._done += kept
                assert self._progress is not None
                self._progress(self._done, self._total)

        return counted


def preparation(filled: Iterable[torch.Tensor]) -> Callable[[Slot], None] | None:
    """Return what is done with buffers, once each, that tensors are filled from."""
    device = next((tensor.device for tensor in filled if tensor.is_cuda), None)
    return None if device is None else partial(pin, device=device)


def check_entry(entry: TensorEntry, chunk_size: int) -> None:
    """Check shape, length and boxes of an entry from a store, before memory is taken for it.

    Raises:
        DamagedError: They do not fit each other.
        UnsupportedTypeError: This torch does not know the dtype.
    """
    check_shape(entry)
    if isinstance(entry, BoxedTensorEntry):
        tiling_of(entry, itemsize_of(entry), chunk_size)


@contextmanager
def naming(contents: Contents, path: str) -> Iterator[None]:
    """Say, where an entry cannot be given memory, which one it is."""
    try:
        yield
    except DamagedError as e:
        raise DamagedError(f"{contents.where}: {path}: {e}", (path,)) from e
    except StateError as e:
        raise type(e)(f"{contents.where}: {path}: {e}") from e


def inline_bytes(contents: Contents, path: str, payload: Payload) -> bytes:
    """Return the bytes that stand in a payload itself.

    Raises:
        DamagedError: They are not as many as it says.
    """
    if len(payload.inline) != payload.nbytes:
        raise DamagedError(f"{contents.where}: {path} is cut off", (path,))
    return payload.inline


def with_item_axis(entry: TensorEntry, carrier: torch.Tensor) -> torch.Tensor:
    """Return a carrier in the shape of its entry; numpy has one more axis: the bytes of an item."""
    if is_numpy(entry):
        return carrier.reshape(*entry.shape, itemsize_of(entry))
    return elements(carrier)


def elements_of(entry: TensorEntry, raw: memoryview, region: Region) -> torch.Tensor:
    """Return the bytes of a box of an entry as a tensor, see :func:`with_item_axis`."""
    dtype = carrier_dtype(entry)
    # Small chunks lie anywhere in a pack, and torch crashes on elements that are not aligned;
    # of bytes that are read-only, as decompressed ones are, it warns.
    if raw.readonly or address_of(raw) % dtype.itemsize:
        raw = memoryview(bytearray(raw))
    shape = (*region.sizes, itemsize_of(entry)) if is_numpy(entry) else region.sizes
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _copies(cells: Cells, target: memoryview) -> Iterator[_Move]:
    """Yield how the cells fill memory one behind the other."""
    start = 0
    for number, nbytes in enumerate(cells.sizes()):
        yield _Move(number, nbytes, nbytes, _copy_to(target[start : start + nbytes]))
        start += nbytes


def _copy_to(target: memoryview, first: int = 0) -> Sink:
    def sink(raw: memoryview) -> None:
        buffers.copy(target, raw[first : first + len(target)])

    return sink


def _moves(
    entry: TensorEntry, cells: Cells, region: Region, target: torch.Tensor
) -> Iterator[_Move]:
    """Yield how cells fill a tensor with a box of an entry; only those that it takes."""
    plain = target.device.type == "cpu" and target.dtype == carrier_dtype(entry)
    flat = view_at(target.data_ptr(), target.nbytes) if plain and target.is_contiguous() else None
    if flat is not None and isinstance(cells, Grid) and region.sizes == cells.shape:
        yield from _copies(cells, flat)
        return
    itemsize = itemsize_of(entry)
    for number in cells.covering(region):
        cell = cells.region(number)
        common = cell.intersect(region)
        assert common is not None
        kept = common.numel * itemsize
        sink = None
        if flat is not None:
            sink = _run(flat, common.start_in(region), common.start_in(cell), itemsize, kept)
        if sink is None:
            box = target[common.within(region)]
            sink = _elements_to(entry, box, cell, common.within(cell))
        yield _Move(number, cell.numel * itemsize, kept, sink)


def _run(
    flat: memoryview, start: int | None, first: int | None, itemsize: int, nbytes: int
) -> Sink | None:
    """Return a copy of bytes, where elements are a run of consecutive ones on both sides."""
    if start is None or first is None:
        return None
    return _copy_to(flat[start * itemsize : start * itemsize + nbytes], first * itemsize)


def _elements_to(
    entry: TensorEntry, box: torch.Tensor, cell: Region, taken: tuple[slice, ...]
) -> Sink:
    def sink(raw: memoryview) -> None:
        fill(box, elements_of(entry, raw, cell)[taken])

    return sink
