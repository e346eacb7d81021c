"""The zip archive that ``torch.save`` writes, laid out before its tensors are read.

The bytes of tensors are left open: they are written to their places later, in any order.
"""

from __future__ import annotations

import io
import mmap
import pickle  # noqa: TID251 - written, never read
import struct
import zlib
from math import prod
from typing import Any, NamedTuple

import torch

from casnap.runtime.buffers import PAGE, bytes_at
from casnap.state.tensors import TENSOR_DTYPES

_ALIGNMENT = 64
PAGED_BYTES = 256 << 10
"""Tensors of so many bytes begin on a page."""
_LARGE = 0xFFFFFFFF
_DAY = 0x21  # 1980-01-01, the first day that zip knows


class Reserved:
    """Tensors of the right shapes, as stand-ins: their bytes are never read.

    Args:
        fd: A file; while it is in use, it may be extended by the bytes of the tensors, unwritten.
        nbytes: So many bytes at most, with 64 for each tensor.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._at = 0
        self._memory: mmap.mmap | None = None
        self._names: dict[int, int] = {}
        if nbytes:
            # Shared, and of a file: so it counts as memory nowhere.
            with open(fd, "r+b", buffering=0, closefd=False) as file:
                file.truncate(nbytes)
            self._memory = mmap.mmap(fd, nbytes)

    def tensor(self, number: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor, and note its owner.

        Args:
            number: What :meth:`owner` returns for its storage.
            dtype: The dtype, by torch's name.
            shape: The shape.
        """
        kind = TENSOR_DTYPES[dtype]
        count = prod(shape) * kind.itemsize
        if not count:
            return torch.empty(shape, dtype=kind)
        assert self._memory is not None
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=self._at)
        self._at += -(-count // _ALIGNMENT) * _ALIGNMENT
        self._names[flat.data_ptr()] = number
        return flat.view(kind).reshape(shape)

    def owner(self, storage: torch.UntypedStorage) -> int | None:
        """Return the owner of a storage; None if it is another tensor's, with the same bytes."""
        return self._names.get(storage.data_ptr())


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, and notes the storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference to a storage in the pickle."""
        storage: torch.UntypedStorage
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            storage, kind, count = (
                typed._untyped_storage,
                typed._pickle_storage_type(),
                typed._size(),
            )
        elif isinstance(obj, torch.UntypedStorage):
            storage, kind, count = obj, "UntypedStorage", obj.nbytes()
        else:
            return None
        # By its address, not by an object of Python, of which a storage may have several.
        key, _ = self.storages.setdefault(storage._cdata, (len(self.storages), storage))
        return "storage", getattr(torch, kind), str(key), "cpu", count


class Pickled(NamedTuple):
    """A value as torch.save pickles it, and its storages, in the order of their names."""

    data: bytes
    storages: list[torch.UntypedStorage]


def pickled(value: object) -> Pickled:
    """Return a value as torch.save pickles it."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    return Pickled(out.getvalue(), [storage for _, storage in pickler.storages.values()])


class Layout(NamedTuple):
    """An archive.

    Attributes:
        pieces: Offset → the bytes there, except for those of storages.
        starts: Where the bytes of each storage begin.
        nbytes: The length of the archive.
    """

    pieces: dict[int, bytes]
    starts: list[int]
    nbytes: int


def laid_out(value: Pickled, crcs: list[int] | None = None) -> Layout:
    """Return the archive of a value.

    Args:
        value: The value.
        crcs: The CRC-32 of each storage; None if they are not known yet. They change only bytes,
            not places.
    """
    names: list[tuple[str, bytes | int]] = [
        ("data.pkl", value.data),
        ("byteorder", b"little"),
        *((f"data/{i}", storage.nbytes()) for i, storage in enumerate(value.storages)),
        ("version", b"3\n"),
    ]
    sums = iter(crcs if crcs is not None else [0] * len(value.storages))
    pieces, starts, at, directory = dict[int, bytes](), list[int](), 0, bytearray()
    for name, content in names:
        data = content if isinstance(content, bytes) else b""
        size = len(data) if isinstance(content, bytes) else content
        crc = zlib.crc32(data) if isinstance(content, bytes) else next(sums)
        head = _local_header(f"archive/{name}".encode(), crc, size, at)
        directory += _directory_entry(f"archive/{name}".encode(), crc, size, at)
        pieces[at] = head + data
        at += len(head)
        if not isinstance(content, bytes):
            starts.append(at)
        at += size
    end = _end(len(names), len(directory), at)
    pieces[at] = bytes(directory) + end
    return Layout(pieces, starts, at + len(directory) + len(end))


def known_bytes(storage: torch.UntypedStorage) -> bytes:
    """Return the bytes of a storage."""
    return bytes_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def _local_header(name: bytes, crc: int, size: int, at: int) -> bytes:
    large = size >= _LARGE
    extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
    # The content is aligned by an extra field, which begins with "FB" as in torch.
    behind = at + 30 + len(name) + len(extra) + 4
    padding = -behind % (PAGE if size >= PAGED_BYTES else _ALIGNMENT)
    extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    small = _LARGE if large else size
    return (
        struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 45 if large else 20, 0, 0, 0, _DAY, crc, small, small,
            len(name), len(extra),
        )
        + name
        + extra
    )  # fmt: skip


def _directory_entry(name: bytes, crc: int, size: int, at: int) -> bytes:
    large = size >= _LARGE or at >= _LARGE
    extra = struct.pack("<HHQQQ", 1, 24, size, size, at) if large else b""
    small, where = (_LARGE, _LARGE) if large else (size, at)
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45 if large else 20, 0, 0, 0, _DAY, crc, small,
            small, len(name), len(extra), 0, 0, 0, 0, where,
        )
        + name
        + extra
    )  # fmt: skip


def _end(count: int, nbytes: int, at: int) -> bytes:
    """Return the end of an archive, given the number, length and place of its directory."""
    end = b""
    if count >= 0xFFFF or nbytes >= _LARGE or at >= _LARGE:
        end = struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, at
        ) + struct.pack("<IIQI", 0x07064B50, 0, at + nbytes, 1)
    few = min(count, 0xFFFF)
    return end + struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(nbytes, _LARGE), min(at, _LARGE), 0
    )
