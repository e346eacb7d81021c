"""Tensors in files, as leaves of a take: over a mapping of the file, so that nothing is copied.

Their content is bytes, with one more axis than the tensor: the bytes of an element. So it does not
matter whether the elements are aligned in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from casnap.errors import FileFormatError
from casnap.format.entries import Payload, TensorEntry
from casnap.format.region import Region
from casnap.runtime.buffers import address_of, view_at
from casnap.state.sharded import Shards
from casnap.state.tensors import TENSOR_DTYPES, Leaf


class MappedFile:
    """A file in memory. Its pages belong to the page cache; no file descriptor stays open.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read.

    Attributes:
        bytes: The file, as a tensor of bytes.
        view: The same; the tensor must outlive it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as stream:
            nbytes = stream.seek(0, 2)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            self.bytes = torch.from_file(
                str(path), shared=False, size=nbytes, dtype=torch.uint8, requires_grad=False
            )
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
            return self.bytes.new_empty((*shape, itemsize))
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
        FileFormatError: The boxes do not tile the tensor.
    """
    whole = Region.whole(shape)
    held = [(box, content) for box, content in parts if box.numel]
    if [box for box, _ in held] == [whole]:
        return file_leaf(path, dtype, shape, held[0][1])
    if not whole.numel:
        return file_leaf(path, dtype, shape, torch.empty(0, dtype=torch.uint8))
    inside = all(box.intersect(whole) == box for box, _ in held)
    if not inside or sum(box.numel for box, _ in held) != whole.numel or _overlap(held):
        raise FileFormatError(f"{path}: its parts do not make up a tensor of shape {list(shape)}")
    boxes, contents = zip(*held, strict=True)
    return Leaf(path, _entry(path, dtype, shape), Shards(shape, boxes, contents, contents[0]))


def _overlap(held: Sequence[tuple[Region, torch.Tensor]]) -> bool:
    """Whether two boxes have an element in common; only those that can reach it are compared."""
    boxes = sorted((box for box, _ in held), key=lambda box: box.offsets)
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if box.intersect(other) is not None:
                return True
    return False


def _entry(path: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    known = TENSOR_DTYPES.get(dtype)
    if known is None:
        raise FileFormatError(f"{path}: tensors of dtype {dtype!r:.40} cannot be imported")
    if not all(0 <= n < 1 << 63 for n in shape) or prod(shape) >= 1 << 62:
        raise FileFormatError(f"{path}: no tensor can have the shape {list(shape)[:8]}")
    return TensorEntry(dtype, shape, Payload(prod(shape) * known.itemsize))
