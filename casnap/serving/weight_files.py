"""Put files of weights beside a snapshot, for programs that open a checkpoint without casnap.

The files are those that a pull writes. They lie in the folder of the snapshot itself, and are
written after its commit. A reader finds all of them or none. They are written in a temporary
folder, then moved; the record that lists them is moved first. If there are several files, a notice
that no reader can load stands in place of the first one until all others are there. They are
removed in the opposite order.

Other programs write into the same folder. :meth:`WeightFiles.others_than` finds weights there that
differ from the snapshot's.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from casnap.backends.local_files import (
    is_folder,
    matching,
    paths_in,
    put_whole,
    status,
    sync_folder,
)
from casnap.errors import PLACE_ERRORS, FileFormatError
from casnap.format.digest import digest_of_parts
from casnap.format.notices import notice
from casnap.runtime.units import Size
from casnap.serving.options import PullOptions, PullReport
from casnap.serving.version import (
    CHUNKS,
    RECORD,
    Version,
    VersionFile,
    VersionRecord,
)
from casnap.serving.writing import layout_of, write_version
from casnap.storage import Contents, ForeignCheckpoints

_log = logging.getLogger("casnap")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_model.bin")
_READ_BYTES = 16 << 20
_MIXED = "the weights beside this snapshot are just put there, or taken away"


class WeightFiles:
    """The weights in the folder of a snapshot.

    Args:
        folder: The folder, which need not be there.

    Attributes:
        STAGED: The name of the temporary folder, inside ``folder``, where files are written first.
    """

    STAGED = "casnap-weights"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(
        self,
        contents: Contents,
        *,
        others: Iterable[Path] = (),
        tied: Collection[str] = (),
        max_shard_size: Size = "50GB",
        write: Callable[[Path], object] | None = None,
        make_room: Callable[[], object] | None = None,
    ) -> None:
        """Put the weights of a snapshot into the folder, whole. If that fails, only warn.

        Args:
            contents: The snapshot, whose weights are at ``model``.
            others: Folders of other snapshots. The first one with weights counts: a file that
                equals one there becomes a hard link to it, or shares blocks with it where the file
                system can.
            tied: Tensors to leave out if another one has their bytes.
            max_shard_size: The most bytes of a file.
            write: If given, writes the weights into a folder, in place of the weights in the
                snapshot.
            make_room: Called if the weights cannot be put, as on a full disk. It deletes what the
                disk need not hold, such as weights beside other snapshots. Then they are put once
                more.
        """
        folder, staged = self.folder, self.folder / self.STAGED

        def put() -> None:
            self.remove()
            if write is None:
                _pull(contents, staged, others, PullOptions(max_shard_size=max_shard_size), tied)
            else:
                write(staged)
                put_whole(staged / RECORD, _record_of(contents, staged).encode())
            _publish(staged, folder)

        try:
            try:
                put()
            except Exception:
                if make_room is None:
                    raise
                self.remove()
                make_room()
                put()
        except Exception as e:  # noqa: BLE001 - the snapshot is committed, whatever the error is
            with suppress(OSError, *PLACE_ERRORS):
                self.remove()
            _log.warning(
                "%s is committed, but its weights cannot be put beside it: %s. `casnap pull` makes "
                "a folder with them",
                folder,
                e,
            )

    def remove(self) -> None:
        """Delete the weights that were put into the folder, and unfinished files of a kill.

        A file that was changed since is not casnap's any more, and stays. The folder keeps its
        time, by which trainers sort checkpoints.

        Raises:
            OSError: Some files cannot be deleted.
            PlaceError: The folder cannot be looked at.
        """
        folder = self.folder
        info = status(folder)
        parts, version = matching(folder, self.STAGED, ".*.partial"), Version.at(folder)
        for part in parts:
            shutil.rmtree(part) if is_folder(part) else part.unlink()
        if version is not None:
            first, *more = [folder / name for name in _names(version)]
            is_notice = ForeignCheckpoints.is_notice
            ours = [path for path in (*more, first) if is_notice(path) or _is_ours(version, path)]
            if more and first in ours:
                with suppress(OSError):  # on a full disk
                    put_whole(first, notice(_MIXED))
            for path in (*ours, folder / CHUNKS, folder / RECORD):
                path.unlink(missing_ok=True)
        if info is not None and (parts or version is not None):
            os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))

    def names(self) -> set[str]:
        """Return the names of the files that were put into the folder, and are unchanged.

        Files whose time has changed, as in a copy of the folder, are read.
        """
        version = Version.at(self.folder)
        names = [] if version is None else _names(version)
        return {name for name in names if version and _is_ours(version, self.folder / name)}

    @staticmethod
    def others_than(
        contents: Contents, paths: Iterable[Path], keys: Collection[str] = ("model",)
    ) -> list[Path]:
        """Return which of some files and folders have other weights than a snapshot.

        A file that casnap has put beside the snapshot, and that still has its length and time, is
        not read. All others are hashed. They count as the snapshot's if they have its tensors,
        whichever program has written them.

        Args:
            contents: The snapshot.
            paths: The files: weights, or indexes of shards; or folders of DCP. Notices are ignored.
            keys: The keys of the snapshot that hold weights.

        Raises:
            PlaceError: A file cannot be looked at.
            DamagedError: A part of the snapshot is missing or damaged.
        """
        commit = contents.row.commit.hex()
        unknown = list[Path]()
        versions = dict[Path, Version | None]()
        for path in paths:
            folder = path.parent
            if folder not in versions:
                versions[folder] = Version.at(folder)
            version = versions[folder]
            if version is not None and version.record.commit != commit:
                version = None
            is_known = version is not None and path.name in _names(version)
            if not ForeignCheckpoints.is_notice(path) and not (
                is_known and version and _is_ours(version, path)
            ):
                unknown.append(path)
        return list(_differing(contents, unknown, keys)) if unknown else []

    @staticmethod
    def shapes_in(contents: Contents) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of each tensor of weights that :meth:`put` would write."""
        files = layout_of(contents, PullOptions()).files
        return {name: t.entry.shape for file in files for name, t in file.tensors.items()}


def _differing(contents: Contents, paths: Iterable[Path], keys: Collection[str]) -> Iterator[Path]:
    """Yield the paths whose tensors differ from a snapshot's. The shards of a model are read once.

    Args:
        contents: The snapshot.
        paths: The files and folders.
        keys: The keys of the snapshot that hold weights.
    """
    # torch takes long to import, and most often there is nothing to compare.
    from casnap.files.importing import has_weights_of, with_shards

    judged = dict[frozenset[Path], bool]()
    for path in paths:
        try:
            files = with_shards(path)
            if files not in judged:
                judged[files] = has_weights_of(path, contents, keys)
            is_same = judged[files]
        except FileFormatError:
            is_same = False
        if not is_same:
            yield path


def _pull(
    contents: Contents,
    staged: Path,
    others: Iterable[Path],
    options: PullOptions,
    tied: Collection[str],
) -> None:
    # In a group of equal tensors, one stays, whichever are said to be tied.
    groups: dict[str, list[str]] = {}
    for name, first in layout_of(contents, options).equal.items():
        groups.setdefault(first, [first]).append(name)
    equal = [sorted(names, key=lambda name: name in tied)[1:] for names in groups.values()]
    left_out = [name for names in equal for name in names if name in tied]
    old = next((version for version in map(Version.at, others) if version is not None), None)
    try:
        # Files that become links are not read whole: each time, another part of them is verified.
        if old is not None and old.damaged(contents.row.seq):
            old.close()
            old = None
        with contents.reading():
            report = PullReport("", contents.name, contents.row.commit.hex())
            options = PullOptions(max_shard_size=options.max_shard_size, tied=left_out)
            write_version(staged, contents, options, old, report, None)
    finally:
        if old is not None:
            old.close()


def _record_of(contents: Contents, staged: Path) -> VersionRecord:
    """Sync files that ``write`` has written; return a record that lists them.

    Args:
        contents: The snapshot that they belong to.
        staged: The folder with the files.
    """
    files = {}
    for path in paths_in(staged):
        if _is_weights(path.name):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                digest = digest_of_parts(iter(partial(file.read, _READ_BYTES), b""))
            info = path.stat()
            files[path.name] = VersionFile(
                info.st_size, info.st_size, digest.hex(), mtime_ns=info.st_mtime_ns
            )
    record = VersionRecord.of(contents, files, {}, mapping={}, exact=False, tied={}, left_out=[])
    record.digest = record.own_digest()
    return record


def _publish(staged: Path, folder: Path) -> None:
    """Move the files of a version into a folder. A reader finds all of them there, or none.

    Args:
        staged: The folder in which they were written.
        folder: The folder of the snapshot.
    """
    version = Version.at(staged)
    assert version is not None
    first, *more = _names(version)
    if more:
        put_whole(folder / first, notice(_MIXED))
    for name in (RECORD, CHUNKS, *more, first):
        with suppress(FileNotFoundError):  # only a pull notes chunks
            (staged / name).rename(folder / name)
    shutil.rmtree(staged)
    sync_folder(os.path.realpath(folder))


def _is_ours(version: Version, path: Path) -> bool:
    """Whether a file has the bytes with which it was put there, whoever owns it.

    The file is read only if its time has changed, as in a copy of the folder.
    """
    info, about = status(path, follow=False), version.record.files[path.name]
    if info is None or info.st_size != about.file_bytes:
        return False
    return info.st_mtime_ns == about.mtime_ns or version.is_as_written(path.name)


def _names(version: Version) -> list[str]:
    """Return the names of a version's files of weights, an index last."""
    names = filter(_is_weights, version.record.files)
    return sorted(names, key=lambda name: (name.endswith(".json"), name))


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _WEIGHTS)
