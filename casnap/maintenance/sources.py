"""Tensors in files of other formats: a source for chunks that a store has lost."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from casnap.format.digest import Digest, digest_of
from casnap.format.grid import grid_of
from casnap.runtime.buffers import view_at
from casnap.state.safetensors import read_header


class FileTensor(NamedTuple):
    """A tensor in a file: its shape, the bytes of one element, and all its bytes, row-major."""

    shape: tuple[int, ...]
    itemsize: int
    raw: memoryview


def chunks_in(
    path: Path,
    chunk_size: int,
    sizes: Collection[int],
    skipped: Callable[[str], None],
) -> Iterator[tuple[Digest, memoryview]]:
    """Yield the chunks that the tensors in some files would have in a store.

    Args:
        path: A file or a folder; files of other formats are ignored.
        chunk_size: The chunk size of the store.
        sizes: The lengths of chunks to yield; empty for all.
        skipped: Called with a message for each file that cannot be read.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    if path.is_file() and path.suffix not in _READERS:
        skipped(f"{path} is neither a file of {', '.join(_READERS)} nor a casnap store")
    for file in files:
        read = _READERS.get(file.suffix)
        if read is None or not file.is_file():
            continue
        try:
            for found in read(file):
                if found.itemsize <= chunk_size:
                    yield from _cut(found, chunk_size, sizes)
        except Exception as e:  # noqa: BLE001 - a file may hold anything, and other files may help
            skipped(f"{file} cannot be read: {' '.join(str(e).split()):.200}")


def _cut(
    found: FileTensor, chunk_size: int, sizes: Collection[int]
) -> Iterator[tuple[Digest, memoryview]]:
    at = 0
    for nbytes in grid_of(found.shape, found.itemsize, chunk_size).sizes():
        if not sizes or nbytes in sizes:
            raw = found.raw[at : at + nbytes]
            yield digest_of(raw), raw
        at += nbytes


def _safetensors(file: Path) -> Iterator[FileTensor]:
    with file.open("rb") as stream:
        whole = _mapped(stream)
    for tensor in read_header(whole).tensors:
        yield FileTensor(tensor.shape, tensor.itemsize, whole[tensor.start : tensor.stop])


def _mapped(stream: BinaryIO) -> memoryview:
    # Unmapped when its last view is gone. Writable since torch wants that; it is never written.
    return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))


def _numpy(file: Path) -> Iterator[FileTensor]:
    import numpy as np

    array = np.load(file, mmap_mode="c", allow_pickle=False)
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    yield FileTensor(
        array.shape, array.dtype.itemsize, memoryview(little.reshape(-1).view(np.uint8).data)
    )


def _torch(file: Path) -> Iterator[FileTensor]:
    from casnap.state.torch_save import tensors_in

    with file.open("rb") as stream:
        for tensor in tensors_in(_mapped(stream)):
            whole = tensor.contiguous()
            raw = view_at(whole.data_ptr(), whole.nbytes)
            yield FileTensor(tuple(whole.shape), whole.element_size(), raw)


_READERS: dict[str, Callable[[Path], Iterator[FileTensor]]] = {
    ".safetensors": _safetensors,
    ".npy": _numpy,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _torch),
}
