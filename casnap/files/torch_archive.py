"""Lay out the zip archive that ``torch.save`` writes, before its tensors are read.

The layout leaves room for the bytes of tensors, which are written later, in any order.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle  # noqa: TID251 - written, never read
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from casnap.files.export_selection import StoredTensor
from casnap.files.tensor_writer import Placed, TensorWriter
from casnap.format.entries import TensorEntry
from casnap.runtime.buffers import PAGE, view_at
from casnap.runtime.threads import cores, mapped
from casnap.state.tensors import TENSOR_DTYPES

ALIGNMENT = 64
PAGED_BYTES = 256 << 10
"""Tensors of at least this many bytes begin on a page."""
_LARGE = 0xFFFFFFFF
_PIECE_BYTES = 1 << 20
_DAY = 0x21  # 1980-01-01, the first day that zip knows
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python has no name for


class StandIns:
    """Stand-ins for tensors of a snapshot: tensors of the same shapes whose bytes are never read.

    Args:
        entries: The entries of these tensors.
    """

    def __init__(self, entries: Iterable[TensorEntry]) -> None:
        nbytes = sum(entry.payload.nbytes + ALIGNMENT for entry in entries)
        # The mapping takes no memory, since nobody touches its pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = mmap.mmap(-1, nbytes or 1, flags)
        self._fill = 0
        self._tensors: dict[int, StoredTensor] = {}

    def tensor(self, path: str, entry: TensorEntry) -> torch.Tensor:
        """Return a new stand-in for a tensor of the snapshot."""
        dtype = TENSOR_DTYPES[entry.dtype]
        count = prod(entry.shape) * dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=self._fill)
        self._fill += -(-count // ALIGNMENT) * ALIGNMENT
        self._tensors[flat.data_ptr()] = StoredTensor(path, entry)
        return flat.view(dtype).reshape(entry.shape)

    def tensor_of(self, storage: torch.UntypedStorage) -> StoredTensor | None:
        """Return the snapshot's tensor whose stand-in has this storage; None if there is none."""
        return self._tensors.get(storage.data_ptr())


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and collects the storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the reference that stands for a storage in the pickle; None for other objects."""
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
        # Told apart by address: one storage may have several Python objects.
        key, _ = self.storages.setdefault(storage._cdata, (len(self.storages), storage))
        return "storage", getattr(torch, kind), str(key), "cpu", count


class Archive:
    """The archive of one value, at its place in a file.

    Args:
        at: The offset in the file at which the archive begins.
        value: The value.
        stand_ins: The stand-ins in the value for tensors of a snapshot.

    Attributes:
        nbytes: The length of the archive.
        placed: The tensors to write, with their places.
    """

    def __init__(self, at: int, value: object, stand_ins: StandIns) -> None:
        out = io.BytesIO()
        pickler = _Pickler(out)
        pickler.dump(value)
        self._at = at
        self._pickle = out.getvalue()
        self._storages = [storage for _, storage in pickler.storages.values()]
        _, starts, self.nbytes = self._lay_out([0] * len(self._storages))
        self.placed: list[Placed] = []
        self._values: dict[int, bytes] = {}
        self._starts = [at + start for start in starts]
        for start, storage in zip(self._starts, self._storages, strict=True):
            if (tensor := stand_ins.tensor_of(storage)) is not None:
                self.placed.append(Placed(*tensor, start))
            else:
                nbytes = storage.nbytes()
                self._values[start] = bytes(view_at(storage.data_ptr(), nbytes))

    def finish(self, fd: int, crcs: Mapping[int, int]) -> None:
        """Write all of the archive but the snapshot's tensors, which were written before.

        Args:
            fd: The file.
            crcs: The CRC-32 of each tensor, by its offset in the file.
        """
        sums = {start: zlib.crc32(data) for start, data in self._values.items()}
        pieces, _, _ = self._lay_out([sums[s] if s in sums else crcs[s] for s in self._starts])
        for offset, data in pieces.items():
            os.pwrite(fd, data, self._at + offset)
        for start, data in self._values.items():
            os.pwrite(fd, data, start)

    def _lay_out(self, crcs: Sequence[int]) -> tuple[dict[int, bytes], list[int], int]:
        """Lay out the archive. Its offsets do not depend on the CRCs, which may still be zeros.

        Args:
            crcs: The CRC-32 of each storage.

        Returns: The bytes of all but storages, by offset; the offset of each storage; and the
        length of the archive.
        """
        members = [
            _text("data.pkl", self._pickle),
            _text("byteorder", b"little"),
            *(
                (f"data/{i}", b"", storage.nbytes(), crc)
                for i, (storage, crc) in enumerate(zip(self._storages, crcs, strict=True))
            ),
            _text("version", b"3\n"),
        ]
        pieces, starts, at, directory = dict[int, bytes](), list[int](), 0, bytearray()
        for name, data, size, crc in members:
            path = f"archive/{name}".encode()
            header = _local_header(path, crc, size, at)
            directory += _directory_entry(path, crc, size, at)
            pieces[at] = header + data
            at += len(header)
            if name.startswith("data/"):
                starts.append(at)
            at += size
        end = _end(len(members), len(directory), at)
        pieces[at] = bytes(directory) + end
        return pieces, starts, at + len(directory) + len(end)


def _text(name: str, data: bytes) -> tuple[str, bytes, int, int]:
    return name, data, len(data), zlib.crc32(data)


def write_archives(fd: int, writer: TensorWriter, archives: list[Archive], nbytes: int) -> None:
    """Write archives, with the tensors of the snapshot, to their places in a file.

    Args:
        fd: The file.
        writer: Writes the tensors.
        archives: The archives.
        nbytes: The length of the file.
    """
    os.posix_fallocate(fd, 0, nbytes)
    placed = [tensor for archive in archives for tensor in archive.placed]
    writer.write(fd, placed)
    crcs = {tensor.start: crc for tensor, crc in mapped(partial(_crc_of, fd), placed, cores())}
    for archive in archives:
        archive.finish(fd, crcs)


def _crc_of(fd: int, tensor: Placed) -> int:
    """Return the CRC-32 of a tensor in the file. It was just written, so the page cache has it."""
    crc, at, end = 0, tensor.start, tensor.start + tensor.entry.payload.nbytes
    while at < end:
        piece = os.pread(fd, min(_PIECE_BYTES, end - at), at)
        crc = zlib.crc32(piece, crc)
        at += len(piece)
    return crc


def _local_header(name: bytes, crc: int, size: int, at: int) -> bytes:
    large = size >= _LARGE
    extra = struct.pack("<HHQQ", 1, 16, size, size) if large else b""
    # An extra field, which begins with "FB" as in torch, aligns the content.
    end = at + 30 + len(name) + len(extra) + 4
    padding = -end % (PAGE if size >= PAGED_BYTES else ALIGNMENT)
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
    small, position = (_LARGE, _LARGE) if large else (size, at)
    return (
        struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45 if large else 20, 0, 0, 0, _DAY, crc, small,
            small, len(name), len(extra), 0, 0, 0, 0, position,
        )
        + name
        + extra
    )  # fmt: skip


def _end(count: int, nbytes: int, at: int) -> bytes:
    """Return the end record of an archive.

    Args:
        count: The number of members in its directory.
        nbytes: The length of the directory.
        at: The offset of the directory.
    """
    end = b""
    if count >= 0xFFFF or nbytes >= _LARGE or at >= _LARGE:
        end = struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, at
        ) + struct.pack("<IIQI", 0x07064B50, 0, at + nbytes, 1)
    few = min(count, 0xFFFF)
    return end + struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(nbytes, _LARGE), min(at, _LARGE), 0
    )
