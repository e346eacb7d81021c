"""Tensors in files, as leaves of a take: over a mapping of the file, which takes no memory.

The content of such a leaf is bytes, with one more axis than the tensor: the bytes of an element. So
it does not matter whether the elements are aligned in the file.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from casnap.errors import FileFormatError
from casnap.format.entries import Payload, TensorEntry
from casnap.format.region import Region, cover_once
from casnap.runtime.buffers import address_of, view_at
from casnap.state.sharded import Shards
from casnap.state.tensors import TENSOR_DTYPES, Leaf

_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python has no name for
_MOST_AXES = 64


def _mapping(fd: int, nbytes: int, path: Path) -> mmap.mmap:
    # Before Python 3.13 a mapping keeps a descriptor of its own for as long as it is there.
    untracked = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE | _NO_RESERVE, **untracked)
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
        what = "too many open files; each file of an import needs one: raise the limit (ulimit -n)"
        raise OSError(e.errno, what, str(path)) from e


def check_regular(path: Path) -> None:
    """Check that a file that exists is not a pipe or device: these cannot be mapped.

    Raises:
        FileFormatError: It is one.
    """
    if path.exists() and not path.is_file():
        raise FileFormatError(f"{path} is not a regular file; write its content to one first")


def check_shape(shape: Sequence[int], what: str = "") -> None:
    """Check that torch can have a tensor of a shape.

    Raises:
        FileFormatError: It cannot.
    """
    # An axis without elements counts as one in strides.
    if len(shape) > _MOST_AXES or min(shape, default=0) < 0 or prod(n or 1 for n in shape) >> 58:
        raise FileFormatError(f"{what}no tensor can have the shape {list(shape)[:8]}")


class MappedFile:
    """A file in memory. Its pages belong to the page cache.

    Args:
        path: The file.

    Raises:
        FileFormatError: It is a pipe or a device.
        OSError: It cannot be read.

    Attributes:
        bytes: The file, as a tensor of bytes.
        view: The same; the tensor must outlive it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with path.open("rb") as stream:
            nbytes = stream.seek(0, 2)
            if nbytes:
                # torch.from_file would reserve memory for all of the file, which may be more than
                # there is.
                held = _mapping(stream.fileno(), nbytes, path)
                self.bytes = torch.frombuffer(held, dtype=torch.uint8)
        self.view = view_at(self.bytes.data_ptr(), nbytes) if nbytes else memoryview(b"")

    def elements(
        self, start: int, shape: Sequence[int], itemsize: int, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return elements of the file as the content of a leaf.

        Args:
            start: The byte of the file where the first element is.
            shape: The shape.
            itemsize: The bytes of one element.
            strides: The strides, in elements; by default those of contiguous elements.
        """
        if not prod(shape):
            return self.bytes.new_empty(0)
        check_shape(shape, f"{self.path}: ")
        if strides is None:
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        steps = (*(n * itemsize for n in strides), 1)
        return self.bytes.as_strided((*shape, itemsize), steps, start)

    def offset_of(self, part: memoryview) -> int:
        """Return where a part of the view begins in the file."""
        return address_of(part) - self.bytes.data_ptr() if len(part) else 0


def file_leaf(path: str, dtype: str, shape: tuple[int, ...], content: torch.Tensor) -> Leaf:
    """Return a tensor of a file as a leaf.

    Args:
        path: Its path in the snapshot.
        dtype: Its dtype, by torch's name.
        shape: Its shape.
        content: Its elements.
    """
    return Leaf(path, _entry(path, dtype, shape), content)


def joined_leaf(
    path: str, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[Region, torch.Tensor]]
) -> Leaf:
    """Return a tensor that lies in several boxes as a leaf.

    Raises:
        FileFormatError: The boxes do not cover the tensor once.
    """
    whole = Region.whole(shape)
    held = [(box, content) for box, content in parts if box.numel]
    if [box for box, _ in held] == [whole]:
        return file_leaf(path, dtype, shape, held[0][1])
    if not whole.numel and not held:
        return file_leaf(path, dtype, shape, torch.empty(0, dtype=torch.uint8))
    if not cover_once(shape, [box for box, _ in held]):
        raise FileFormatError(f"{path}: its parts do not make up a tensor of shape {list(shape)}")
    boxes, contents = zip(*held, strict=True)
    return Leaf(path, _entry(path, dtype, shape), Shards(shape, boxes, contents, contents[0]))


def _entry(path: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    known = TENSOR_DTYPES.get(dtype)
    if known is None:
        raise FileFormatError(f"{path}: tensors of dtype {dtype!r:.40} cannot be imported")
    check_shape(shape, f"{path}: ")
    return TensorEntry(dtype, shape, Payload(prod(shape) * known.itemsize))
