"""Write a version: from the bytes of the version before, and from new chunks of the store.

A file that has not changed becomes a hard link. For any other file, each chunk is copied from the
old version or read from the store; if the store has a delta on a chunk of the old version, only
that delta is read. Every written chunk is verified. The version gets its name once it is durable.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from casnap.backends.local_files import NO_SPACE, write_cached
from casnap.errors import PLACE_ERRORS
from casnap.files.export_output import ExportOutput
from casnap.files.layout import FileLayout, PlacedChunk, PlacedTensor, PlannedFile
from casnap.format.digest import Digest, digest_of
from casnap.runtime.progress import Progress, ProgressCounter
from casnap.runtime.threads import cores, mapped
from casnap.runtime.units import bytes_of
from casnap.serving.folder import FILE_MODE
from casnap.serving.options import FLOATS, PullOptions, PullReport
from casnap.serving.patches import PATCHES, Differences, are_alike
from casnap.serving.version import (
    CHUNKS,
    RECORD,
    StoredCell,
    Version,
    VersionFile,
    VersionRecord,
    VersionTensor,
)
from casnap.storage import Contents, ReadOptions, Want

# The request to share the blocks of another file.
_FICLONE = 0x40049409


def write_version(
    folder: Path,
    contents: Contents,
    options: PullOptions,
    old: Version | None,
    report: PullReport,
    progress: Progress | None,
) -> Version:
    """Write a new version of a snapshot, and return it once it is durable.

    Args:
        folder: Its folder, which is not there yet.
        contents: The snapshot.
        options: The options of the pull.
        old: A version whose equal files and chunks are reused.
        report: Gets how much was written, and how.
        progress: Called with the phase, the bytes written, and the total.

    Raises:
        OSError: The version cannot be written; nothing of it is left.
    """
    layout = layout_of(contents, options)
    report.equal = layout.equal
    writer = Writer(contents, layout, options, old, report, progress)
    output = ExportOutput(folder, is_folder=True, nbytes=writer.counter.total, mode=FILE_MODE)
    with output:
        record = writer.write(output)
    return Version(folder, record)


def layout_of(contents: Contents, options: PullOptions) -> FileLayout:
    """Return where the tensors of a snapshot lie in the files of its version.

    Raises:
        EntryNotFoundError: There is nothing at ``options.path``, or several ranks have entries of
            their own there.
        FileFormatError: There are no tensors, or two would get one name.
        DamagedError: A part of the snapshot is missing or damaged.
    """

    def dtype_of(dtype: str) -> str:
        return options.dtype if options.dtype and dtype in FLOATS else dtype

    return FileLayout.of(
        contents,
        options.path,
        rename=options.renaming(),
        dtype_of=dtype_of,
        tied=options.tied,
        max_shard_size=bytes_of("max_shard_size", options.max_shard_size),
    )


class ChunkToWrite(NamedTuple):
    """A chunk to write into a file.

    Attributes:
        name: The name of its tensor.
        tensor: The tensor.
        number: The number of the chunk in the tensor.
        cell: Its place in the file.
    """

    name: str
    tensor: PlacedTensor
    number: int
    cell: PlacedChunk


class Writer:
    """Writes the files of a version.

    Attributes:
        same: The name of each file → the name of an equal file of the old version; "" for none.
    """

    def __init__(
        self,
        contents: Contents,
        layout: FileLayout,
        options: PullOptions,
        old: Version | None,
        report: PullReport,
        progress: Progress | None,
    ) -> None:
        self._contents = contents
        self._layout = layout
        self._options = options
        self._old = old
        self._report = report
        self._lock = threading.Lock()
        self._differences: Differences | None = None
        self._takes_deltas = options.patches
        self.same = {file.name: self._same_file(file) for file in layout.files}
        new_bytes = sum(file.nbytes for file in layout.files if not self.same[file.name])
        self.counter = ProgressCounter(progress, "writing", new_bytes)

    def _same_file(self, file: PlannedFile) -> str:
        """Return the name of the old version's file that equals a planned one; "" for none."""
        if self._old is None:
            return ""
        record = self._old.record
        tensors = {
            name: VersionTensor.of(tensor, file.name) for name, tensor in file.tensors.items()
        }
        for name, about in record.files.items():
            if about.digest == digest_of(file.header).hex() and self._old.is_intact(name):
                before = {n: t for n, t in record.tensors.items() if t.file == name}
                if before.keys() == tensors.keys() and not any(
                    tensors[n].differs_from(before[n]) for n in tensors
                ):
                    return name
        return ""

    def write(self, output: ExportOutput) -> VersionRecord:
        """Write all files; return the record of the version."""
        if self._options.patches and self._old is not None:
            self._differences = self._differences_from(self._old)
        for file in self._layout.files:
            if not self._link(output, file):
                with output.file(file.name) as fd:
                    self._fill(fd, file)
        record, chunks = self._described()
        for name, raw in {**self._layout.others, CHUNKS: chunks}.items():
            with output.file(name) as fd:
                write_cached(fd, memoryview(raw), 0)
        self._settle()
        for name, about in record.files.items():
            about.mtime_ns = output.stat(name).st_mtime_ns
        record.digest = record.own_digest()
        if self._differences is not None:
            patches = self._differences.encoded(record.content)
            with output.file(f"{PATCHES}.{digest_of(patches).hex()}") as fd:
                write_cached(fd, memoryview(patches), 0)
        with output.file(RECORD) as fd:
            write_cached(fd, memoryview(record.encode()), 0)
        return record

    def _described(self) -> tuple[VersionRecord, bytes]:
        """Return the version's record, without its digest, and its chunks' joined digests."""
        contents, layout = self._contents, self._layout
        files, tensors = dict[str, VersionFile](), dict[str, VersionTensor]()
        chunks = list[Digest]()
        for file in layout.files:
            files[file.name] = VersionFile(
                file.nbytes, len(file.header), digest_of(file.header).hex()
            )
            for name, tensor in file.tensors.items():
                tensors[name] = VersionTensor.of(tensor, file.name)
                chunks += [cell.digest for cell in tensor.cells] + tensor.cast_digests
        listed = b"".join(chunks)
        for name, raw in {**layout.others, CHUNKS: listed}.items():
            files[name] = VersionFile(len(raw), len(raw), digest_of(raw).hex())
        record = VersionRecord.of(
            contents,
            files,
            tensors,
            mapping=self._options.mapping,
            exact=not any(tensor.cast_from for tensor in tensors.values()),
            tied=layout.tied,
            left_out=layout.left_out,
        )
        return record, listed

    def _settle(self) -> None:
        """Write the chunks that were kept in memory. Here there are none; a subclass keeps some."""

    def _differences_from(self, old: Version) -> Differences | None:
        """Return a collector of the differences from an old version.

        The result is None if the two versions have different tensors: there can be no patches then.
        """
        placed = {
            name: (tensor, VersionTensor.of(tensor, file.name))
            for file in self._layout.files
            for name, tensor in file.tensors.items()
        }
        new, before = {name: about for name, (_, about) in placed.items()}, old.record.tensors
        if not are_alike(before, new):
            return None
        sizes = {
            name: [cell.nbytes for cell in tensor.cells]
            for name, (tensor, about) in placed.items()
            if about.differs_from(before[name])
        }
        return Differences(old, new, sizes)

    def _link(self, output: ExportOutput, file: PlannedFile) -> bool:
        """Make a hard link to the old version's file that equals a planned one, or return False."""
        name, cast_digests = self.same[file.name], list[tuple[ChunkToWrite, Digest]]()
        if self._old is None or not name:
            return False
        for chunk in _chunks_of(file):
            if chunk.tensor.cast:
                before = self._old.cells.get((chunk.cell.digest, chunk.tensor.cast))
                if before is None:
                    return False
                cast_digests.append((chunk, before.digest))
        try:
            output.link(file.name, self._old.folder / name)
        except OSError as e:
            if e.errno in NO_SPACE:
                raise
            return False  # no hard links here, or no more of them to this file
        for chunk, digest in cast_digests:
            chunk.tensor.cast_digests[chunk.number] = digest
        self._report.linked_bytes += file.nbytes
        return True

    def _fill(self, fd: int, file: PlannedFile) -> None:
        """Write a file: copy chunks from the old version, and read the others from the store."""
        cloned = self._clone(fd, file)
        if not cloned:
            os.posix_fallocate(fd, 0, file.nbytes)
            write_cached(fd, memoryview(file.header), 0)
        copy = partial(self._copy, fd, cloned)
        elsewhere = [chunk for chunk, done in mapped(copy, _chunks_of(file), cores()) if not done]
        options = ReadOptions() if self._old is None else ReadOptions(base=self._old.base)
        self._contents.store.fetch(self._wants(fd, elsewhere), options)

    def _clone(self, fd: int, file: PlannedFile) -> str:
        """Make a file a clone of the old version's file of the same name and layout.

        Returns:
            The name of the old file; "" if there is none, or the file system cannot share blocks.
        """
        old = self._old
        about = None if old is None else old.record.files.get(file.name)
        header = digest_of(file.header).hex()
        if old is None or about is None or about.digest != header or not old.is_intact(file.name):
            return ""
        with suppress(*PLACE_ERRORS, OSError):
            fcntl.ioctl(fd, _FICLONE, old.open(file.name))
            return file.name
        return ""

    def _copy(self, fd: int, cloned: str, chunk: ChunkToWrite) -> bool:
        """Copy a chunk from the old version; return False if it is not there or damaged.

        Args:
            fd: The file to write.
            cloned: The name of the old file that the new one is a clone of; "" for none.
            chunk: The chunk.
        """
        _, tensor, number, cell = chunk
        if self._old is None:
            return False
        before = self._old.cells.get((cell.digest, tensor.cast))
        raw = None if before is None else self._old.read(before)
        if before is None or raw is None or len(raw) != cell.nbytes:
            return False
        if digest_of(raw) != before.digest:
            return False
        if (before.file, before.start) != (cloned, cell.start):
            self._write(fd, chunk, memoryview(raw))
        if not self._is_in_place(chunk, before):
            self._note(chunk, memoryview(raw))
        if tensor.cast:
            tensor.cast_digests[number] = before.digest
        with self._lock:
            self._report.copied_bytes += cell.nbytes
        self.counter.add(cell.nbytes)
        return True

    def _write(
        self, fd: int, chunk: ChunkToWrite, raw: memoryview, stored_form: memoryview | None = None
    ) -> None:
        """Write the verified bytes of a chunk to its place in a file.

        Args:
            fd: The file.
            chunk: The chunk.
            raw: Its bytes, cast if need be.
            stored_form: The delta from which they were made, for subclasses that write deltas.
        """
        write_cached(fd, raw, chunk.cell.start)
        with self._lock:
            self._report.written_bytes += len(raw)

    def _is_in_place(self, chunk: ChunkToWrite, before: StoredCell) -> bool:
        """Whether a chunk lies at the same place of the same tensor as in the old version.

        Args:
            chunk: The chunk.
            before: Where the old version has its bytes.
        """
        assert self._old is not None
        tensor = self._old.record.tensors.get(chunk.name)
        place = None if tensor is None else (tensor.file, before.start - tensor.start)
        return place == (before.file, chunk.cell.start - chunk.tensor.start)

    def _wants(self, fd: int, chunks: list[ChunkToWrite]) -> Iterator[Want]:
        for chunk in chunks:
            _, tensor, _, cell = chunk
            if (held := tensor.held_bytes) is not None:
                self._put(fd, chunk, memoryview(held))
            else:
                sink = partial(self._put, fd, chunk)
                put_delta = partial(self._put_delta, fd, chunk) if self._takes_deltas else None
                yield Want(cell.digest, cell.raw_bytes, sink, tensor.path, as_delta=put_delta)

    def _note(
        self, chunk: ChunkToWrite, raw: memoryview, stored_form: memoryview | None = None
    ) -> None:
        """If patches are wanted, note how a chunk differs from the one in its place before.

        Args:
            chunk: The chunk.
            raw: Its bytes.
            stored_form: The delta from which they were made; None if there was none.
        """
        if self._differences is not None:
            self._differences.note(chunk.name, chunk.number, raw, stored_form)

    def _put_delta(
        self, fd: int, chunk: ChunkToWrite, stored_form: memoryview, raw: memoryview
    ) -> None:
        """Write a chunk that the store has as a delta: its verified bytes go to their place.

        Args:
            fd: The file.
            chunk: The chunk.
            stored_form: The delta.
            raw: The bytes made from it.
        """
        self._put(fd, chunk, raw, stored_form)

    def _put(
        self, fd: int, chunk: ChunkToWrite, raw: memoryview, stored_form: memoryview | None = None
    ) -> None:
        """Write a verified chunk of the store to its place in a file; cast it first, if need be.

        Args:
            fd: The file.
            chunk: The chunk.
            raw: Its bytes.
            stored_form: The delta from which they were made; None if there was none.
        """
        _, tensor, number, cell = chunk
        if tensor.cast:
            raw = _cast(raw, tensor.entry.dtype, tensor.dtype)
            tensor.cast_digests[number] = digest_of(raw)
            stored_form = None
        self._write(fd, chunk, raw, stored_form)
        self._note(chunk, raw, stored_form)
        with self._lock:
            self._report.fetched_bytes += cell.nbytes
        self.counter.add(cell.nbytes)


def _chunks_of(file: PlannedFile) -> Iterator[ChunkToWrite]:
    for name, tensor in file.tensors.items():
        for number, cell in enumerate(tensor.cells):
            yield ChunkToWrite(name, tensor, number, cell)


def _cast(raw: memoryview, dtype: str, wanted: str) -> memoryview:
    """Return the elements of a chunk in another dtype.

    Args:
        raw: The bytes of the chunk.
        dtype: The dtype of its elements, by torch's name.
        wanted: The dtype to cast to.
    """
    import torch

    from casnap.runtime.torch_modes import without_torch_modes

    with without_torch_modes():
        elements = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype))
        cast = elements.to(getattr(torch, wanted)).view(torch.uint8)
        return memoryview(cast.numpy().data)
