"""Put files of weights beside a snapshot, for programs that open a checkpoint without casnap.

The files are those that a pull writes (``casnap/serving``). They lie in the folder of the snapshot
itself, and are written after its commit. A reader finds all of them or none. They are written in a
folder of their own, then moved, the record that lists them first. If there are several files, a
notice that no reader can load stands in place of the first one until all others are there. They are
removed in the opposite order.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from casnap import Snapshot
from casnap.backends.local import put_whole, status, sync_folder
from casnap.errors import PLACE_ERRORS
from casnap.extending import is_folder, matching, paths_in
from casnap.format.digest import digest_of
from casnap.format.notices import notice
from casnap.integrations.notices import is_notice
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

_log = logging.getLogger("casnap")
_STAGED = "casnap-weights"
_PARTS = (_STAGED, ".*.partial")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_MIXED = "the weights beside this snapshot are just put there, or taken away"


def put_weights(
    snapshot: Snapshot,
    *,
    others: Iterable[Path] = (),
    tied: Collection[str] = (),
    max_shard_size: Size = "50GB",
    write: Callable[[Path], object] | None = None,
) -> None:
    """Put the weights of a snapshot into its folder, whole. If that fails, only warn.

    Args:
        snapshot: The snapshot, whose weights are at ``model``.
        others: Folders of other snapshots. A file that equals one in the first of them with weights
            becomes a hard link, or shares blocks where the file system can.
        tied: Tensors to leave out if another one has their bytes.
        max_shard_size: The most bytes of a file.
        write: Writes the weights into a folder, if they differ from those of the snapshot.
    """
    folder = Path(snapshot.path)
    staged = folder / _STAGED
    try:
        remove_weights(folder)
        if write is None:
            _pull(snapshot, staged, others, PullOptions(max_shard_size=max_shard_size), tied)
        else:
            write(staged)
            put_whole(staged / RECORD, _record_of(snapshot, staged).encode())
        _publish(staged, folder)
    except Exception as e:  # noqa: BLE001 - the snapshot is committed, whatever the error is
        with suppress(OSError, *PLACE_ERRORS):
            remove_weights(folder)
        _log.warning(
            "%s is committed, but its weights cannot be put beside it: %s. `casnap pull` makes a "
            "folder with them",
            folder,
            e,
        )


def remove_weights(folder: Path) -> None:
    """Remove the weights that were put beside a snapshot, and unfinished files of a kill.

    Files that were changed since are not casnap's any more, and stay. The folder keeps its time, by
    which trainers sort checkpoints.

    Raises:
        OSError: Some cannot be removed.
        PlaceError: The folder cannot be looked at.
    """
    info = status(folder)
    parts, version = matching(folder, *_PARTS), Version.at(folder)
    for part in parts:
        shutil.rmtree(part) if is_folder(part) else part.unlink()
    if version is not None:
        first, *more = [folder / name for name in _names(version)]
        ours = [path for path in (*more, first) if _is_ours(version, path) or is_notice(path)]
        if more and first in ours:
            with suppress(OSError):  # on a full disk
                put_whole(first, notice(_MIXED))
        for path in (*ours, folder / CHUNKS, folder / RECORD):
            path.unlink(missing_ok=True)
    if info is not None and (parts or version is not None):
        os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))


def names_put(folder: Path) -> set[str]:
    """Return the names of the files of weights that were put into a folder, and are unchanged."""
    version = Version.at(folder)
    names = [] if version is None else _names(version)
    return {name for name in names if version is not None and _is_ours(version, folder / name)}


def shapes_of(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights of a snapshot."""
    files = layout_of(snapshot.contents, PullOptions()).files
    return {name: t.entry.shape for file in files for name, t in file.tensors.items()}


def _pull(
    snapshot: Snapshot,
    staged: Path,
    others: Iterable[Path],
    options: PullOptions,
    tied: Collection[str],
) -> None:
    contents = snapshot.contents
    # Of a group of equal tensors one stays, whichever are said to be tied.
    groups: dict[str, list[str]] = {}
    for name, first in layout_of(contents, options).equal.items():
        groups.setdefault(first, [first]).append(name)
    equal = [sorted(names, key=lambda name: name in tied)[1:] for names in groups.values()]
    left_out = [name for names in equal for name in names if name in tied]
    old = next((version for version in map(Version.at, others) if version is not None), None)
    try:
        # What is linked is not read: each time, another part of it is verified.
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


def _record_of(snapshot: Snapshot, staged: Path) -> VersionRecord:
    """Make files that others have written durable; return a record that lists them.

    Args:
        snapshot: The snapshot that they belong to.
        staged: The folder with the files.
    """
    files = {}
    for path in paths_in(staged):
        if _is_weights(path.name):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            info = path.stat()
            files[path.name] = VersionFile(
                info.st_size, 0, digest_of(b"").hex(), mtime_ns=info.st_mtime_ns
            )
    record = VersionRecord.of(
        snapshot.contents, files, {}, mapping={}, exact=False, tied={}, left_out=[]
    )
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
    """Whether a file has the length and time with which it was put there, whoever owns it."""
    info, about = status(path, follow=False), version.record.files[path.name]
    return info is not None and (info.st_size, info.st_mtime_ns) == (
        about.file_bytes,
        about.mtime_ns,
    )


def _names(version: Version) -> list[str]:
    """Return the names of a version's files of weights, an index last."""
    names = filter(_is_weights, version.record.files)
    return sorted(names, key=lambda name: (name.endswith(".json"), name))


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _WEIGHTS)
