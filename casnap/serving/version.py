"""A version: one folder with the tensors of one snapshot, and a record of which snapshot it is.

Next to the files for readers, the folder holds the digests of all chunks. So the next version can
take unchanged chunks from it, and the bases of deltas, even if its snapshot was deleted.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from casnap.backends.local_files import (
    Owners,
    is_of_the_place,
    is_taken,
    open_file,
    read_file,
    read_run,
)
from casnap.errors import PLACE_ERRORS, BackendError, DamagedError, FileFormatError
from casnap.files.layout import PlacedTensor
from casnap.files.safetensors_header import itemsize_of
from casnap.format.decoding import json_decoder
from casnap.format.digest import Digest, digest_of, digest_of_parts, split_digests
from casnap.format.grid import grid_of
from casnap.runtime.descriptors import Descriptor
from casnap.runtime.fork import cached_property
from casnap.runtime.threads import cores, mapped
from casnap.runtime.typing import override
from casnap.storage import Contents, Fill

RECORD, CHUNKS = "casnap-version.json", "casnap-chunks"
"""The files of a version's record and of the digests of its chunks."""
CHANGING = "casnap-changing.json"
"""Takes the place of the record while a pull changes the folder in place: see :class:`Trace`."""
LOCK = ".lock"
"""The file that a pull locks, in the folder of all versions."""
_Kind = TypeVar("_Kind")
# The characters that a shell, JSON, HTML or a URL may interpret.
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.=-]")
PARTS = 17
"""A pull reads one of this many parts of the bytes that it keeps; the next pull reads the next.

So damage shows after this many pulls at the latest. The number is a prime: if two versions are
current in turns, all parts of each are still read.
"""
_MOST_RECORD = 1 << 30
_READ_BYTES = 16 << 20


class VersionTensor(Struct, omit_defaults=True):
    """A tensor of a version.

    Attributes:
        path: Its path in the snapshot.
        dtype: Its dtype, by torch's name.
        shape: Its shape.
        digest: The BLAKE3 of the BLAKE3 digests of its chunks, as the snapshot has them.
        file: The file that holds it.
        start: Where it begins in the file, in bytes.
        cast_from: The dtype that the tensor has in the snapshot, if it was cast.
        cast_digest: If it was cast: the same kind of digest, of the chunks in the file.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str
    start: int
    cast_from: str = ""
    cast_digest: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in the file."""
        return itemsize_of(self.dtype) * prod(self.shape)

    @staticmethod
    def of(tensor: PlacedTensor, file: str) -> VersionTensor:
        """Return the record of a tensor that lies in a file."""
        return VersionTensor(
            tensor.path,
            tensor.dtype,
            tensor.entry.shape,
            tensor.digest,
            file,
            tensor.start,
            tensor.entry.dtype if tensor.cast else "",
            digest_of(b"".join(tensor.cast_digests)).hex() if tensor.cast else "",
        )

    def differs_from(self, other: VersionTensor) -> bool:
        """Whether this tensor has other bytes, another dtype or another shape than ``other``."""
        ours = (self.dtype, self.shape, self.digest, self.cast_from)
        return ours != (other.dtype, other.shape, other.digest, other.cast_from)


class VersionFile(Struct):
    """A file of a version.

    Attributes:
        file_bytes: Its length.
        head_bytes: How many bytes lie before its tensors; all, in a file without tensors.
        digest: The BLAKE3 of these first bytes.
        mtime_ns: When it was last written, in nanoseconds since the epoch. A file with another time
            is verified again.
        inode: Its inode, only in records of earlier versions of casnap. Unused, since some file
            systems change it.
    """

    file_bytes: int
    head_bytes: int
    digest: str
    inode: int | UnsetType = UNSET
    mtime_ns: int = 0


class VersionRecord(Struct):
    """The content of ``casnap-version.json``.

    Attributes:
        version: The version of this file's format.
        store: The URI of the store.
        store_id: The id of the store.
        snapshot: The full name of the snapshot.
        commit: The commit id of the snapshot.
        time: When it was taken, in seconds since the epoch.
        metadata: The user's metadata.
        mapping: The options of the pull that change the content: :meth:`PullOptions.mapping`.
        exact: Whether all tensors are those of the snapshot, bit for bit.
        chunk_bytes: The size of the largest chunks.
        tied: Each tensor that is left out → the equal tensor that is written instead.
        left_out: The paths of values that safetensors cannot hold.
        tensors: The tensors by name.
        files: The files by name.
        digest: The BLAKE3 of all the above.
    """

    version: int
    store: str
    store_id: str
    snapshot: str
    commit: str
    time: float
    metadata: dict[str, Any]
    mapping: dict[str, Any]
    exact: bool
    chunk_bytes: int
    tied: dict[str, str]
    left_out: list[str]
    tensors: dict[str, VersionTensor]
    files: dict[str, VersionFile]
    digest: str = ""

    @classmethod
    def of(
        cls,
        contents: Contents,
        files: dict[str, VersionFile],
        tensors: dict[str, VersionTensor],
        *,
        mapping: dict[str, Any],
        exact: bool,
        tied: dict[str, str],
        left_out: list[str],
    ) -> VersionRecord:
        """Return the record of a version of a snapshot. Its own digest is still to be set.

        Args:
            contents: The snapshot.
            files: The files of the version, by name.
            tensors: Its tensors, by name.
            mapping: The options on which the content depends.
            exact: Whether all tensors are those of the snapshot, bit for bit.
            tied: Each tensor that is left out → the equal tensor that is written instead.
            left_out: The paths of values that safetensors cannot hold.
        """
        return cls(
            version=1,
            store=contents.store.backend.uri,
            store_id=contents.store.config.store_id,
            snapshot=contents.name,
            commit=contents.row.commit.hex(),
            time=contents.row.time,
            metadata=contents.metadata,
            mapping=mapping,
            exact=exact,
            chunk_bytes=contents.store.config.chunk_size,
            tied=tied,
            left_out=left_out,
            tensors=tensors,
            files=files,
        )

    @property
    def content(self) -> str:
        """A digest of what decides the content: store, commit and :attr:`mapping`.

        It is the same on each host and in each folder.
        """
        described = [self.store_id, self.commit, self.mapping]
        return digest_of(msgspec.json.encode(described, order="deterministic")).hex()

    def own_digest(self) -> str:
        """Return the right value of ``digest`` for the other fields."""
        return digest_of(msgspec.json.encode(msgspec.structs.replace(self, digest=""))).hex()

    def encode(self) -> bytes:
        """Return the record as the bytes of its file."""
        # Numbers that JSON cannot write, such as a NaN loss, become null.
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def changed_since(self, other: VersionRecord | None) -> list[str]:
        """Return the names of tensors that another version lacks, or holds with other bytes.

        Args:
            other: The record of the other version; None: it lacks all of them.
        """
        before = {} if other is None else other.tensors
        return [
            name
            for name, tensor in self.tensors.items()
            if name not in before or tensor.differs_from(before[name])
        ]


class Trace(Struct):
    """A version whose chunks a folder may hold, because a change in place has not ended.

    Attributes:
        record: The record of the version.
        chunks: The digests of its chunks.
    """

    record: VersionRecord
    chunks: bytes


class StoredCell(NamedTuple):
    """A chunk in a file of a version.

    Attributes:
        file: The name of the file.
        start: Where the chunk begins in the file, in bytes.
        nbytes: Its length.
        digest: The digest of its bytes in the file.
    """

    file: str
    start: int
    nbytes: int
    digest: Digest


class Version:
    """A version that was written whole.

    Args:
        folder: Its folder.
        record: The record that the folder has.
        owners: The users whose files count as written by a pull; by default, this user.
        chunks: The digests of its chunks; by default, its file :data:`CHUNKS` has them.
    """

    def __init__(
        self,
        folder: Path,
        record: VersionRecord,
        owners: Owners | None = None,
        chunks: bytes | None = None,
    ) -> None:
        self.folder = folder
        self.record = record
        self._chunks = chunks
        self._owners = owners or Owners.by()
        self._files: dict[str, Descriptor] = {}
        self._lock = threading.Lock()

    @classmethod
    def at(cls, folder: Path) -> Version | None:
        """Return the version in a folder; None if the folder is no version.

        Raises:
            PlaceError: The system cannot look at the folder.
        """
        place = Path(os.path.realpath(folder))
        record = read_record(place / RECORD)
        return None if record is None else cls(place, record)

    @staticmethod
    def is_in_place(folder: Path) -> bool:
        """Whether pulls change this folder in place.

        Args:
            folder: The folder, by a path without links.
        """
        return is_taken(folder.with_name(f"{folder.name}.versions") / LOCK)

    @staticmethod
    def name_of(folder: Path) -> str:
        """Return the name of the version in a folder.

        It is the folder's own name. If the folder is changed in place, its record gives the name.
        """
        record = read_record(folder / RECORD) if Version.is_in_place(folder) else None
        return folder.name if record is None else folder_name(record.snapshot, record.commit)

    @property
    def content(self) -> str:
        """A digest that identifies the content: :attr:`VersionRecord.content`."""
        return self.record.content

    def is_intact(self, file: str) -> bool:
        """Whether a file has the length, time and owner as written; reads none of its bytes."""
        about = self.record.files.get(file)
        with suppress(OSError):
            info = (self.folder / file).stat(follow_symlinks=False)
            # Another user could set any time on a file of their own.
            return (
                about is not None
                and (info.st_size, info.st_mtime_ns) == (about.file_bytes, about.mtime_ns)
                and self._owners.why_not(info) is None
            )
        return False

    def is_whole(self) -> bool:
        """Whether all files are intact."""
        return all(self.is_intact(file) for file in self.record.files)

    def doubtful(self) -> set[str]:
        """Return the tensors in files that are not intact: an engine may have read wrong bytes."""
        files = {file for file in self.record.files if not self.is_intact(file)}
        return {name for name, tensor in self.record.tensors.items() if tensor.file in files}

    def is_of(self, store_id: str, commit: str, mapping: object) -> bool:
        """Whether this version is whole, and was made of a snapshot by the given options.

        Args:
            store_id: The id of the store of the snapshot.
            commit: The commit id of the snapshot.
            mapping: The options that a version depends on: :meth:`PullOptions.mapping`.
        """
        record = self.record
        about = (record.store_id, record.commit, record.mapping)
        return about == (store_id, commit, mapping) and self.is_whole()

    # --- its chunks ---

    @property
    def traces(self) -> list[Trace]:
        """The versions that chunks in the folder may belong to; here this version alone."""
        return [Trace(self.record, self._chunk_digests())]

    def _chunk_digests(self) -> bytes:
        if self._chunks is not None:
            return self._chunks
        about = self.record.files.get(CHUNKS)
        with suppress(*PLACE_ERRORS, DamagedError, OSError):
            return read_file(str(self.folder / CHUNKS), about.file_bytes if about else 0)[0]
        return b""

    def each_cell(self) -> Iterator[tuple[str, Digest, str, StoredCell]]:
        """Yield the tensor's name, the digest in the store, the cast and the cell of each chunk.

        The cast is ``from>to``; empty if there is none.
        """
        digests = split_digests(self._chunk_digests())
        at = 0
        for name, tensor in self.record.tensors.items():
            itemsize = itemsize_of(tensor.cast_from or tensor.dtype)
            grid = grid_of(tensor.shape, itemsize, self.record.chunk_bytes)
            cast = f"{tensor.cast_from}>{tensor.dtype}" if tensor.cast_from else ""
            sources = here = digests[at : at + grid.count]
            at += grid.count
            if cast:
                here = digests[at : at + grid.count]
                at += grid.count
            start = tensor.start
            wanted = tensor.cast_digest or tensor.digest
            if digest_of(b"".join(here)).hex() != wanted or len(sources) != grid.count:
                continue
            for source, digest, raw_bytes in zip(sources, here, grid.sizes(), strict=True):
                nbytes = raw_bytes // itemsize * itemsize_of(tensor.dtype)
                yield name, source, cast, StoredCell(tensor.file, start, nbytes, digest)
                start += nbytes

    @cached_property
    def cells(self) -> dict[tuple[Digest, str], StoredCell]:
        """The digest in the store and the cast of each chunk → where the chunk lies in a file."""
        return {(source, cast): cell for _, source, cast, cell in self.each_cell()}

    @cached_property
    def cells_of(self) -> dict[str, list[tuple[Digest, StoredCell]]]:
        """Name of each tensor → its chunks in order: digest in the store, and cell in a file."""
        found: dict[str, list[tuple[Digest, StoredCell]]] = {}
        for name, source, _, cell in self.each_cell():
            found.setdefault(name, []).append((source, cell))
        return found

    def read(self, cell: StoredCell) -> bytearray | None:
        """Return the bytes of a chunk, unverified; None if they cannot be read."""
        raw = bytearray(cell.nbytes)
        return raw if self._fill(cell, memoryview(raw)) else None

    def verified(self, cell: StoredCell) -> bytearray | None:
        """Return the verified bytes of a chunk; None if they cannot be read, or have changed."""
        raw = self.read(cell)
        return None if raw is None or digest_of(raw) != cell.digest else raw

    def _fill(self, cell: StoredCell, memory: memoryview) -> bool:
        if len(memory) != cell.nbytes:
            return False
        try:
            return read_run(self.open(cell.file), memory, cell.start) == cell.nbytes
        except (*PLACE_ERRORS, OSError):
            return False

    def base(self, digest: Digest) -> Fill | None:
        """Return a function that reads a chunk, unverified; None if this version does not hold it.

        Args:
            digest: The digest of the chunk in the store.
        """
        cell = self.cells.get((digest, ""))
        return None if cell is None else partial(self._fill, cell)

    def open(self, file: str) -> int:
        """Open a file for reading; return its descriptor, which :meth:`close` closes.

        Raises:
            BackendError: It is no regular file.
            OSError: The file cannot be opened.
        """
        with self._lock:
            if file not in self._files:
                self._files[file], _ = open_file(str(self.folder / file))
            return self._files[file].fd

    def close(self) -> None:
        """Close the files that :meth:`open` has opened."""
        while self._files:
            self._files.popitem()[1].close()

    # --- verification ---

    def damaged(self, turn: int | None = None) -> list[str]:
        """Read the files; return the names of damaged tensors and of files whose head is damaged.

        Args:
            turn: Which of the :data:`PARTS` of each tensor to read; None for all.
        """
        seen: dict[str, int] = dict.fromkeys(self.record.tensors, 0)
        bad: dict[str, None] = {}

        def due() -> Iterator[tuple[str, StoredCell]]:
            for name, _, _, cell in self.each_cell():
                seen[name] += cell.nbytes
                # Counted by offset, which stays the same in the next version if the file is kept.
                part = cell.start // self.record.chunk_bytes
                if turn is None or (part - turn) % PARTS == 0:
                    yield name, cell

        def is_bad(item: tuple[str, StoredCell]) -> bool:
            return self.verified(item[1]) is None

        for (name, _), failed in mapped(is_bad, due(), cores()):
            if failed:
                bad[name] = None
        for name, tensor in self.record.tensors.items():
            if seen[name] != tensor.nbytes:
                bad[name] = None
        return [*bad, *(file for file in self.record.files if not self._begins_rightly(file))]

    def is_as_written(self, file: str) -> bool:
        """Whether a file has the bytes that a pull wrote, whatever its time; reads the file."""
        about = self.record.files[file]
        cells = [cell for _, _, _, cell in self.each_cell() if cell.file == file]
        if about.head_bytes + sum(cell.nbytes for cell in cells) != about.file_bytes:
            return False  # the digests of some chunks are gone
        try:
            return self._begins_rightly(file) and all(
                mapped(lambda cell: self.verified(cell) is not None, cells, cores())
            )
        finally:
            self.close()

    def _begins_rightly(self, file: str) -> bool:
        """Whether a file has its length, and the right header before its tensors."""
        about = self.record.files[file]
        with suppress(*PLACE_ERRORS, OSError):
            if os.fstat(self.open(file)).st_size == about.file_bytes >= about.head_bytes:
                parts = self._parts(file, about.head_bytes)
                return digest_of_parts(parts).hex() == about.digest
        return False

    def _parts(self, file: str, nbytes: int) -> Iterator[bytearray]:
        """Yield the first ``nbytes`` bytes of a file, in parts of bounded size."""
        for start in range(0, nbytes, _READ_BYTES):
            part = bytearray(min(_READ_BYTES, nbytes - start))
            read_run(self.open(file), memoryview(part), start)
            yield part

    def doubt(self, damaged: Iterable[str]) -> list[str]:
        """Set the time of damaged files to 0, so that the next pull writes these files again.

        Args:
            damaged: The names of damaged tensors and files.

        Returns:
            The damaged files that would have counted as intact.
        """
        tensors = self.record.tensors
        files = {tensors[name].file if name in tensors else name for name in damaged}
        # Change only intact files. A file that a user has put here may have another name elsewhere,
        # so its time must stay.
        intact = sorted(filter(self.is_intact, files))
        for file in intact:
            with suppress(OSError):
                os.utime(self.folder / file, ns=(0, 0), follow_symlinks=False)
        return intact


class MixedVersion(Version):
    """A folder in which a change in place did not end: it holds chunks of several versions.

    Args:
        folder: The folder.
        traces: The versions, the newest last.
        owners: The users whose files count as written by a pull.
    """

    def __init__(self, folder: Path, traces: list[Trace], owners: Owners) -> None:
        super().__init__(folder, traces[-1].record, owners)
        self._traces = traces

    @property
    @override
    def traces(self) -> list[Trace]:
        return self._traces

    @override
    def is_intact(self, file: str) -> bool:
        return False

    @override
    def each_cell(self) -> Iterator[tuple[str, Digest, str, StoredCell]]:
        # Newest first, so that cells of older versions win: the newest may lack digests of cast
        # chunks.
        for record, chunks in ((trace.record, trace.chunks) for trace in reversed(self._traces)):
            yield from Version(self.folder, record, self._owners, chunks).each_cell()

    @override
    def base(self, digest: Digest) -> Fill | None:
        cell = self.cells.get((digest, ""))
        # Verified now: a caller may rely on the base once it has it.
        return None if cell is None or self.verified(cell) is None else partial(self._fill, cell)


def folder_name(snapshot: str, commit: str) -> str:
    """Return the name of the folder for a version.

    Args:
        snapshot: The name of the snapshot.
        commit: Its commit id, in hex.
    """
    # A name has at most 255 bytes.
    return f"{_NOT_PLAIN.sub('_', snapshot.rpartition('/')[2])[:180]}@{commit}"


def read_record(path: Path) -> VersionRecord | None:
    """Return the record of a version from its file; None if the file is absent or damaged.

    Raises:
        PlaceError: The file cannot be read now. If the result were None, the caller would write the
            whole version again.
    """
    record = _decoded(path, VersionRecord)
    return None if record is None or not _is_sound(record) else record


def read_traces(path: Path) -> list[Trace]:
    """Return the versions of which a folder may hold chunks, as its :data:`CHANGING` file lists.

    Raises:
        PlaceError: The file cannot be read.
    """
    return [trace for trace in _decoded(path, list[Trace]) or [] if _is_sound(trace.record)]


def _decoded(path: Path, kind: type[_Kind]) -> _Kind | None:
    try:
        raw, _ = read_file(str(path), _MOST_RECORD)
        return json_decoder(kind).decode(raw)
    except BackendError as e:
        if is_of_the_place(e):
            raise
        return None
    except (FileNotFoundError, DamagedError, ValueError, RecursionError):
        return None


def _is_sound(record: VersionRecord) -> bool:
    is_known = record.version == 1 and record.digest == record.own_digest()
    names = {*record.files, *(tensor.file for tensor in record.tensors.values())}
    # No pull has written a name that leads out of the folder.
    return is_known and all(map(_is_plain, names))


def _is_plain(name: str) -> bool:
    return "/" not in name and name not in ("", ".", "..")


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Read and verify the current version of a folder that :meth:`casnap.Store.pull` made.

    Damaged files keep their bytes, but their time is set to 0, so that the next pull writes them
    again.

    Args:
        folder: The folder.

    Returns:
        The names of damaged tensors and files.

    Raises:
        FileFormatError: No pull made the folder.
        PlaceError: The system cannot look at the folder.
    """
    place = Path(os.path.realpath(folder))
    record = read_record(place / RECORD)
    changing = FileFormatError(
        f"{folder} is no whole version: a pull with --inplace changes it, or has not ended. Pull "
        "into it again"
    )
    if record is None:
        if is_taken(place / CHANGING):
            raise changing
        raise FileFormatError(
            f"{folder} has no {RECORD} that can be read, so there is nothing to compare it with; "
            "pull it anew"
        )
    version = Version(place, record)
    try:
        damaged = version.damaged()
    finally:
        version.close()
    if damaged and read_record(place / RECORD) != record:
        raise changing
    version.doubt(damaged)
    return damaged
