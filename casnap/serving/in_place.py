"""Pull in place: into one real folder, whose files get only the chunks that differ.

The pull first reads and verifies chunks, and keeps them in memory: deltas in their stored form.
Then it durably replaces the record by ``casnap-changing.json``, which says that the folder is being
changed. From then on, each place in the files may hold a chunk of an old version or of the new one;
its digest tells which. The pull writes the new record last. If the layout of a file changes, the
pull writes a new file, and renames it into the folder.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from casnap.backends.local_files import (
    ABSENT,
    HeldFolder,
    is_taken,
    read_run,
    status,
    sync_folder,
    translated,
    write_cached,
)
from casnap.errors import PLACE_ERRORS, CasnapError, FileFormatError
from casnap.files.export_output import ExportOutput
from casnap.files.layout import PlacedChunk, PlannedFile
from casnap.format.delta import apply_delta, base_of
from casnap.format.digest import Digest, digest_of
from casnap.runtime.descriptors import opened
from casnap.runtime.fork import cached_property, new_lock
from casnap.runtime.machine import memory_bytes
from casnap.runtime.progress import Progress
from casnap.runtime.threads import cores, mapped
from casnap.runtime.typing import override
from casnap.serving.folder import FILE_MODE, VERSION, ServedFolder
from casnap.serving.options import PullOptions, PullReport
from casnap.serving.version import (
    CHANGING,
    CHUNKS,
    RECORD,
    MixedVersion,
    StoredCell,
    Trace,
    Version,
    VersionRecord,
    read_traces,
)
from casnap.serving.writing import ChunkToWrite, Writer, layout_of
from casnap.storage import Contents

_WEIGHTS = re.compile(r"(adapter_)?model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?")
_OPENED = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


# How many bytes of chunks and deltas a pull keeps before it writes any of them.
_MOST_KEPT = min(16 << 30, memory_bytes() // 8)


class WithdrawnError(Exception):
    """The snapshot is no longer to be served; the folder was not changed yet."""


class FolderInPlace(ServedFolder):
    """A real folder with one version, whose files are changed in place.

    ``DIR.versions`` beside it has the lock, and new files until they are whole.
    """

    @override
    def _check_link(self) -> None:
        info = status(self.link, follow=False)
        if info is None:
            return
        self._check_kind(stat.S_ISLNK(info.st_mode), "without")
        if not (stat.S_ISDIR(info.st_mode) and self._has_files):
            raise self._foreign()
        if self._held is not None:
            with HeldFolder(str(self.link)) as folder:
                self._owners.close_to_others(folder.fd)
                why = self._owners.why_not(folder.status())
            if why is not None:
                raise FileFormatError(
                    f"{self.link} {why}, so what is in it need not be what a pull has written. "
                    "Remove it, or name another folder"
                )

    @override
    def close_to_others(self) -> None:
        super().close_to_others()
        self._check_link()

    @override
    def current(self) -> Version | None:
        """Return the version in the folder; None if there is none, or it is being changed."""
        return self._version(self.link)

    def held(self) -> Version | None:
        """Return the version in the folder, whole or mixed; None if no record describes it."""
        version = self.current()
        if version is None:
            path = self.link / CHANGING
            info = status(path, follow=False)
            if info is not None and self._owners.why_not(info) is None:
                traces = read_traces(path)
                version = MixedVersion(self.link, traces, self._owners) if traces else None
        return version

    @property
    def is_there(self) -> bool:
        """Whether the folder's path exists."""
        return is_taken(self.link)

    @override
    def of(self, store_id: str, commit: str, mapping: object) -> Version | None:
        """Return a snapshot's version that a pull wrote whole, but did not move into place.

        If the folder exists, return None. If not, also delete all other versions in
        ``DIR.versions``: none of them was moved into place either.
        """
        if self.is_there:
            return None
        found = super().of(store_id, commit, mapping)
        kept = None if found is None else found.folder.name
        self._remove(self._names(lambda name: VERSION.fullmatch(name) and name != kept))
        return found

    @override
    def switch(self, version: Version) -> Version:
        """Rename the first version to the folder's name. Later versions are in place already."""
        if version.folder == self.link:
            return version
        if self.is_there:
            raise FileFormatError(f"{self.link} has come to be meanwhile, and no pull made it")
        os.rename(version.folder.name, self.link, src_dir_fd=self._folder.fd)
        sync_folder(str(self.link.parent))
        return Version(self.link, version.record, self._owners)

    @override
    def clean_up(self, keep: int, *, is_announced: bool = False) -> None:
        """If the folder has a record, and so is whole, delete its ``casnap-changing.json``."""
        with suppress(OSError, *PLACE_ERRORS):
            if is_taken(self.link / RECORD):
                with HeldFolder(str(self.link)) as folder:
                    folder.unlink(CHANGING)

    @override
    def translated(self) -> AbstractContextManager[None]:
        def kept() -> str:
            is_changed = is_taken(self.link / CHANGING) and not is_taken(self.link / RECORD)
            state = "is whole after the next pull" if is_changed else "stays as it is"
            return f"{self.link} {state}"

        return translated(lambda e: str(self.link / os.fsdecode(e.filename or "")), kept)

    def can_change(self, fd: int, file: PlannedFile) -> bool:
        """Whether a file may be changed in place: it has the new layout, and is not shared.

        It is shared if it has a second name, or if another user may have written to it.

        Args:
            fd: The open file.
            file: The new layout.
        """
        info, header = os.fstat(fd), bytearray(len(file.header))
        return (
            stat.S_ISREG(info.st_mode)
            and info.st_size == file.nbytes
            # A user may have kept the present content under another name.
            and info.st_nlink == 1
            and self._owners.why_not(info) is None
            and read_run(fd, memoryview(header), 0) == len(header)
            and header == file.header
        )


def change(
    served: FolderInPlace,
    contents: Contents,
    options: PullOptions,
    report: PullReport,
    progress: Progress | None,
    is_withdrawn: Callable[[], bool],
) -> Version:
    """Bring an existing folder to a snapshot; return the version once it is durable.

    Args:
        served: The folder.
        contents: The snapshot.
        options: The options of the pull.
        report: Gets what was written, and how.
        progress: Called with the phase, the bytes done, and the total.
        is_withdrawn: Returns whether the snapshot was withdrawn meanwhile.

    Raises:
        WithdrawnError: The snapshot was withdrawn; the folder is unchanged.
        OSError: The folder cannot be written.
    """
    layout = layout_of(contents, options)
    report.equal = layout.equal
    with ExitStack() as stack:
        folder = stack.enter_context(HeldFolder(str(served.link)))
        ours = {file.name for file in layout.files} | {*layout.others, CHUNKS, RECORD, CHANGING}
        there = (path.name for path in served.link.iterdir())
        for name in ours | set(filter(_WEIGHTS.fullmatch, there)):
            info = status(served.link / name, follow=False)
            if info is not None and stat.S_ISDIR(info.st_mode):
                raise FileFormatError(f"{served.link / name} is a folder; move it away")
        old = served.held()
        if old is not None:
            stack.callback(old.close)
        files = dict[str, int]()
        for file in layout.files:
            try:
                fd = stack.enter_context(opened(file.name, _OPENED, folder=folder.fd))
            except OSError as e:
                if e.errno in {*ABSENT, errno.ENXIO, errno.EACCES, errno.EPERM}:
                    continue  # the file is written as a new one
                raise
            if served.can_change(fd, file):
                files[file.name] = fd
        writer = _WriterInPlace(contents, layout, options, old, report, progress)
        path = served.new_name(contents.name, contents.row.commit.hex())
        new = [f for f in layout.files if f.name not in files and writer.same[f.name] != f.name]
        new_bytes = sum(file.nbytes for file in new)
        output = _ChangedFolder(served.link, folder, files, old, path, new_bytes)
        writer.begin(output, is_withdrawn)
        with output:
            record = writer.write(output)
    return Version(served.link, record)


class _ChangedFolder(ExportOutput):
    """The output of a pull in place: it changes some files, and renames new ones into the folder.

    Args:
        link: The path of the folder. A plain pull would have its link there.
        folder: The same folder, open.
        files: The name of each file that is changed in place → its descriptor.
        old: The version that the folder holds; None if it is unknown.
        out: Where new files are written before they are renamed.
        nbytes: About how many bytes the new files will have.
    """

    def __init__(
        self,
        link: Path,
        folder: HeldFolder,
        files: dict[str, int],
        old: Version | None,
        out: Path,
        nbytes: int,
    ) -> None:
        super().__init__(out, is_folder=True, nbytes=nbytes, mode=FILE_MODE)
        self.files = files
        self.is_marked = False
        self._staying = set(files)
        self._link, self._folder = link, folder
        self._old = old

    @contextmanager
    @override
    def file(self, name: str, nbytes: int = 0) -> Iterator[int]:
        if name in self.files:
            yield self.files[name]
            return
        with super().file(name, nbytes) as fd:
            yield fd

    @override
    def link(self, name: str, file: Path) -> None:
        """Keep a file of the folder under its name.

        Raises:
            OSError: ``file`` has another name than ``name``. A hard link would be wrong, since
                later pulls would change the content under both names.
        """
        if file != self._link / name:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(file))
        self._staying.add(name)

    @override
    def stat(self, name: str) -> os.stat_result:
        if name in self.sizes:
            return super().stat(name)
        return self._folder.status(name)

    def mark(self, record: VersionRecord, chunks: bytes) -> None:
        """Write durably, once, that the folder is being changed to a version.

        Args:
            record: The record of the new version.
            chunks: The digests of its chunks.
        """
        if self.is_marked:
            return
        before = [] if self._old is None else self._old.traces
        traces = [each for each in before if each.record.content != record.content]
        record.digest = record.own_digest()
        with self.file(CHANGING) as fd:
            raw = msgspec.json.encode([*traces, Trace(record, chunks)])
            write_cached(fd, memoryview(raw), 0)
        self._move(CHANGING)
        self._folder.sync()
        self.is_marked = True
        self._folder.unlink(RECORD)
        self._folder.sync()

    def sync(self, name: str) -> None:
        """Sync a file that was changed in place; delete it if the sync fails.

        After a failed sync the system may go on showing bytes that the disk did not take. The next
        pull would find them right, and its sync would report no error.
        """
        try:
            os.fsync(self.files[name])
        except OSError:
            with suppress(OSError, *PLACE_ERRORS):
                self._folder.unlink(name)
            raise

    def _move(self, name: str) -> None:
        os.rename(self._partial / name, name, dst_dir_fd=self._folder.fd)
        del self.sizes[name]

    @override
    def _publish(self) -> None:
        new = {*self._staying, *self.sizes}
        for name in [name for name in self.sizes if name != RECORD]:
            self._move(name)
        # Delete files of weights that the new version lacks, even if no record names them: a loader
        # might take them for a part of it.
        there = set(self._folder.names(_WEIGHTS.fullmatch))
        for trace in [] if self._old is None else self._old.traces:
            there |= trace.record.files.keys()
        for name in there - new:
            self._folder.unlink(name)
        self._folder.sync()
        self._move(RECORD)
        self._folder.sync()


class _KeptChunk(NamedTuple):
    """A chunk that is kept in memory until it is written.

    Attributes:
        fd: The file.
        cell: Its place in the file.
        content: Its bytes, or a delta.
        is_delta: Whether ``content`` is a delta on the chunk that lies there.
    """

    fd: int
    cell: PlacedChunk
    content: bytes
    is_delta: bool


class _WriterInPlace(Writer):
    """Writes the chunks that differ into the files of a folder.

    It keeps them in memory until all are read, so that the folder is changed only for a short time.
    """

    def begin(self, output: _ChangedFolder, is_withdrawn: Callable[[], bool]) -> None:
        """Set the output. Call this before :meth:`write`.

        Args:
            output: The output.
            is_withdrawn: Returns whether the snapshot was withdrawn meanwhile.
        """
        self._output = output
        self._is_withdrawn = is_withdrawn
        self._takes_deltas = True
        self._keeping = new_lock()
        self._kept: list[_KeptChunk] = []
        self._kept_bytes = 0
        self._names = {fd: name for name, fd in output.files.items()}
        old = self._old
        self._intact = {n for n in output.files if old is not None and old.is_intact(n)}
        self._synced = set(self._intact)

    @cached_property
    def _places(self) -> dict[tuple[str, int], list[tuple[Digest, str, StoredCell]]]:
        """File and offset → the chunks that may lie there, as the records of the old versions say.

        Each is given by its digest in the store, its cast (``from>to``, or ""), and its cell.
        """
        found: dict[tuple[str, int], list[tuple[Digest, str, StoredCell]]] = {}
        for _, source, cast, cell in () if self._old is None else self._old.each_cell():
            found.setdefault((cell.file, cell.start), []).append((source, cast, cell))
        return found

    @override
    def _clone(self, fd: int, file: PlannedFile) -> str:
        return self._names[fd] if fd in self._names else super()._clone(fd, file)

    @override
    def _copy(self, fd: int, cloned: str, chunk: ChunkToWrite) -> bool:
        here = self._here(fd, chunk) if fd in self._names else None
        if here is None:
            return super()._copy(fd, cloned, chunk)
        if chunk.tensor.cast:
            chunk.tensor.cast_digests[chunk.number] = here
        with self._lock:
            self._report.copied_bytes += chunk.cell.nbytes
        self.counter.add(chunk.cell.nbytes)
        return True

    def _here(self, fd: int, chunk: ChunkToWrite) -> Digest | None:
        """Return the digest of the bytes at a chunk's place; None unless they are that chunk."""
        name, (_, tensor, _, cell) = self._names[fd], chunk
        wanted = {
            here.digest
            for source, cast, here in self._places.get((name, cell.start), [])
            if (source, cast, here.nbytes) == (cell.digest, tensor.cast, cell.nbytes)
        }
        if name in self._intact:
            return next(iter(wanted), None)
        if not tensor.cast:
            wanted.add(cell.digest)
        raw = bytearray(cell.nbytes)
        read_run(fd, memoryview(raw), cell.start)
        found = digest_of(raw)
        return found if found in wanted else None

    @override
    def _write(
        self, fd: int, chunk: ChunkToWrite, raw: memoryview, stored_form: memoryview | None = None
    ) -> None:
        if fd not in self._names:
            super()._write(fd, chunk, raw)
            return
        # A kept delta takes about a hundredth of the bytes; applying it reads its base again.
        is_delta = stored_form is not None and self._holds(fd, chunk.cell, base_of(stored_form))
        content = bytes(stored_form if stored_form is not None and is_delta else raw)
        with self._keeping:
            self._kept.append(_KeptChunk(fd, chunk.cell, content, is_delta))
            self._kept_bytes += len(content)
            if self._kept_bytes > _MOST_KEPT:
                self._flush()

    def _holds(self, fd: int, cell: PlacedChunk, base: Digest) -> bool:
        """Whether a chunk certainly lies at a place, so that a delta on it can be applied.

        Args:
            fd: The file.
            cell: The place.
            base: The digest of the chunk in the store.
        """
        name = self._names[fd]
        # In files that are not intact, several chunks may lie at one place.
        places = self._places.get((name, cell.start), []) if name in self._intact else []
        return any((source, cast) == (base, "") for source, cast, _ in places)

    def _flush(self) -> None:
        """Mark the folder as being changed, then write the kept chunks and deltas."""
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        self._output.mark(*self._described())
        for _ in mapped(self._put_kept, kept, cores()):
            continue
        self._synced -= {self._names[each.fd] for each in kept}
        self._report.written_bytes += sum(each.cell.nbytes for each in kept)

    def _put_kept(self, kept: _KeptChunk) -> None:
        raw = memoryview(kept.content)
        if kept.is_delta:
            chunk = memoryview(bytearray(kept.cell.nbytes))
            read_run(kept.fd, chunk, kept.cell.start)
            apply_delta(raw, chunk)
            if digest_of(chunk) != kept.cell.digest:
                raise CasnapError(
                    f"{self._names[kept.fd]} was written to by another process while it was "
                    "pulled, or its disk fails. The next pull mends it"
                )
            raw = chunk
        write_cached(kept.fd, raw, kept.cell.start)

    @override
    def _settle(self) -> None:
        if not self._output.is_marked and self._is_withdrawn():
            raise WithdrawnError
        self._flush()
        # Bytes that a killed pull has written may not be on the disk yet.
        for name in self._output.files.keys() - self._synced:
            self._output.sync(name)
