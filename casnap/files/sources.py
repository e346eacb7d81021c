"""The source of an import: files, whose tensors become the leaves of a take.

Files are mapped, which takes no memory. The content of a leaf is a tensor of bytes: its last axis
has the bytes of an element. So elements need not be aligned in the file.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from casnap.backends.local_files import exists, is_file
from casnap.errors import FileFormatError, InvalidNameError
from casnap.format.entries import ContainerEntry, Payload, TensorEntry
from casnap.format.region import Region, cover_once
from casnap.runtime.buffers import address_of, view_at
from casnap.state.sharded import Shards
from casnap.state.tensors import TENSOR_DTYPES, Leaf

_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python has no name for
_MOST_AXES = 64


MODEL = "model"
"""The key under which a state that is not an app state is imported."""


@dataclass
class SourceFiles:
    """The state in some files.

    Attributes:
        format: The format.
        files: How many files there are.
        leaves: The tensors and values of the state as leaves of a take, by key.
        metadata: Metadata that the files hold.
    """

    format: str
    files: int
    leaves: dict[str, list[Leaf]]
    metadata: dict[str, Any] = field(default_factory=dict)

    def count(self) -> tuple[int, int, int]:
        """Return how many tensors and how many other values there are, and the bytes of all."""
        entries = [leaf.entry for leaves in self.leaves.values() for leaf in leaves]
        tensors = sum(isinstance(entry, TensorEntry) for entry in entries)
        containers = sum(isinstance(entry, ContainerEntry) for entry in entries)
        nbytes = sum(entry.payload.nbytes for entry in entries)
        return tensors, len(entries) - tensors - containers, nbytes


# --- files ------------------------------------------------------------------------------------


def check_regular(path: Path) -> None:
    """Check that an existing file can be mapped: that it is no pipe and no device.

    Raises:
        FileFormatError: It is a pipe or a device.
    """
    if exists(path) and not is_file(path):
        raise FileFormatError(f"{path} is not a regular file; write its content to one first")


class MappedFile:
    """A file that is mapped into memory. Its pages belong to the page cache.

    Args:
        path: The file.

    Raises:
        FileFormatError: It is a pipe or a device.
        OSError: The file cannot be read.

    Attributes:
        bytes: The file, as a tensor of bytes.
        view: The same bytes as a memoryview. It is valid as long as ``bytes`` is alive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with path.open("rb") as stream:
            nbytes = stream.seek(0, 2)
            if nbytes:
                self.bytes = torch.frombuffer(
                    _mapping(stream.fileno(), nbytes, path), dtype=torch.uint8
                )
        self.view = view_at(self.bytes.data_ptr(), nbytes)

    def elements(
        self, start: int, shape: Sequence[int], itemsize: int, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return elements of the file as the content of a leaf, a tensor of bytes.

        Args:
            start: The offset of the first element in the file, in bytes.
            shape: The shape of the tensor, to which the content adds an axis for ``itemsize``.
            itemsize: The bytes of one element.
            strides: The strides, in elements; by default those of contiguous elements.
        """
        if not prod(shape):
            return self.bytes.new_empty(0)
        _check_shape(shape, str(self.path))
        if strides is None:
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        steps = (*(n * itemsize for n in strides), 1)
        return self.bytes.as_strided((*shape, itemsize), steps, start)

    def offset_of(self, part: memoryview) -> int:
        """Return the offset in the file at which a part of ``view`` begins."""
        return address_of(part) - self.bytes.data_ptr() if len(part) else 0


def _mapping(fd: int, nbytes: int, path: Path) -> mmap.mmap:
    # Not torch.from_file: it would reserve memory for the whole file, which the host may not have.
    # Before Python 3.13 each mapping keeps a descriptor of its own.
    untracked = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE | _NO_RESERVE, **untracked)
    except OSError as e:
        if e.errno != errno.EMFILE:
            raise
        problem = (
            "too many open files; each file of an import needs one: raise the limit (ulimit -n)"
        )
        raise OSError(e.errno, problem, str(path)) from e


class MappedFolder:
    """The files of a folder that an index in it names, each mapped once.

    Args:
        folder: The folder.
        index: The name of the index, for messages.

    Attributes:
        path: The folder.
        files: The files that were mapped so far, by name.
    """

    def __init__(self, folder: Path, index: str) -> None:
        self.path = folder
        self._index = index
        self.files: dict[str, MappedFile] = {}

    def file(self, name: str) -> MappedFile:
        """Return a file of the folder, mapped.

        Raises:
            FileFormatError: The name leads out of the folder, or there is no such file.
        """
        if name not in self.files:
            self.files[name] = MappedFile(path_below(self.path, name, f"{self.path}/{self._index}"))
        return self.files[name]


def path_below(folder: Path, name: str, index: str, *, links: bool = False) -> Path:
    """Return the path of a file that an index in its folder names.

    Args:
        folder: The folder.
        name: The name of the file.
        index: The name of the index, for messages.
        links: Whether the file may be a symbolic link that leads out of the folder.

    Raises:
        FileFormatError: The name leads out of the folder, or there is no such file.
    """
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise FileFormatError(f"{index} names {name!r:.200}, which is not below its folder")
    file = folder / name
    try:
        is_there = is_file(file)
    except InvalidNameError:
        is_there = False
    if not is_there:
        raise FileFormatError(f"{index} names {name!r:.200}, which is missing")
    if not links and folder.resolve() not in (real := file.resolve()).parents:
        raise FileFormatError(
            f"{file} leads out of the folder, to {real}; if that belongs to the checkpoint, copy "
            "the folder by cp -rL, and import the copy"
        )
    return file


# --- leaves -----------------------------------------------------------------------------------


def file_leaf(path: str, dtype: str, shape: tuple[int, ...], content: torch.Tensor) -> Leaf:
    """Return the leaf of a tensor in a file.

    Args:
        path: Its path in the snapshot.
        dtype: Its dtype, by torch's name.
        shape: Its shape.
        content: Its elements, as :meth:`MappedFile.elements` returns them.
    """
    return Leaf(path, _entry(path, dtype, shape), content)


def joined_leaf(
    path: str, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[Region, torch.Tensor]]
) -> Leaf:
    """Return the leaf of a tensor that lies in a file in several boxes.

    Args:
        path: Its path in the snapshot.
        dtype: Its dtype, by torch's name.
        shape: Its shape.
        parts: The boxes, each with its elements.

    Raises:
        FileFormatError: The boxes do not cover each element exactly once.
    """
    return joined(path, _entry(path, dtype, shape), parts)


def joined(path: str, entry: TensorEntry, parts: Sequence[tuple[Region, torch.Tensor]]) -> Leaf:
    """Return the leaf of a tensor that lies in several boxes, given its entry.

    Args:
        path: Its path in the snapshot.
        entry: Its entry.
        parts: The boxes, each with its elements.

    Raises:
        FileFormatError: The boxes do not cover each element exactly once.
    """
    shape = entry.shape
    parts = [(box, content) for box, content in parts if box.numel]
    if [box for box, _ in parts] == [Region.whole(shape)]:
        return Leaf(path, entry, parts[0][1])
    if not prod(shape) and not parts:
        return Leaf(path, entry, torch.empty(0, dtype=torch.uint8))
    if not cover_once(shape, [box for box, _ in parts]):
        raise FileFormatError(f"{path}: its parts do not make up a tensor of shape {list(shape)}")
    boxes, contents = zip(*parts, strict=True)
    return Leaf(path, entry, Shards(shape, boxes, contents, contents[0]))


def _check_shape(shape: Sequence[int], label: str) -> None:
    """Check that a tensor of a shape can exist in torch.

    Raises:
        FileFormatError: It cannot.
    """
    # An axis without elements counts as one in strides.
    if len(shape) > _MOST_AXES or min(shape, default=0) < 0 or prod(n or 1 for n in shape) >> 58:
        raise FileFormatError(f"{label}: no tensor can have the shape {list(shape)[:8]}")


def _entry(path: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    torch_dtype = TENSOR_DTYPES.get(dtype)
    if torch_dtype is None:
        raise FileFormatError(f"{path}: tensors of dtype {dtype!r:.40} cannot be imported")
    _check_shape(shape, path)
    return TensorEntry(Payload(prod(shape) * torch_dtype.itemsize), dtype, shape)
