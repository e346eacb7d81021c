"""Pull: choose the snapshot, write its version, and make the link lead to it."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NamedTuple

from casnap.errors import SnapshotNotFoundError
from casnap.format.records import Root, Row
from casnap.runtime.progress import Progress
from casnap.serving.folder import ServedFolder
from casnap.serving.in_place import FolderInPlace, WithdrawnError, change
from casnap.serving.options import PullOptions, PullReport
from casnap.serving.version import Version
from casnap.serving.writing import write_version
from casnap.storage import Contents, Location, Repository, Tags

_log = logging.getLogger("casnap")


class Wanted(NamedTuple):
    """The snapshot to serve now.

    Attributes:
        contents: The snapshot.
        number: The number of the root that published it by the tag, or else committed it.
        published_time: When that root was put, in seconds since the epoch, by its writer's clock.
    """

    contents: Contents
    number: int
    published_time: float


@dataclass(frozen=True)
class Source:
    """A store, or a part of it, from which snapshots are pulled.

    Attributes:
        store: The store.
        name: The full name of a snapshot, or of a folder of snapshots; "" for all.
    """

    store: Repository
    name: str = ""

    def newest(self, options: PullOptions) -> Wanted:
        """Return the newest snapshot among those that the options select.

        Raises:
            SnapshotNotFoundError: The options select no snapshot.
        """

        def look(root: Root) -> Wanted | None:
            table = self.store.table(root)
            row = table.get(self.name) if self.name else None
            rows = table.items_in(self.name) if row is None else iter([(self.name, row)])
            meant = [each for each in rows if self._is_meant(*each, options)]
            if not meant:
                return None
            name, row = max(meant, key=lambda each: each[1].seq)
            move = None if options.tag is None else Tags.move_in(root, options.tag)
            contents = Contents(self.store, name, row)
            # The run may have gone back since: then the name is that of another snapshot.
            if move is not None and move.commit == row.commit.hex():
                return Wanted(contents, move.root, move.time)
            return Wanted(contents, row.seq, row.time)

        wanted = self.store.read_at_newest(look)
        if wanted is None:
            asked = [f"below {self.name!r}"] if self.name else []
            asked += [f"tagged {options.tag!r}"] if options.tag else []
            asked += [f"that matches {options.match!r}"] if options.match else []
            uri, what = self.store.backend.uri, " and ".join(asked)
            advice = Location(self.store.backend, self.name).link_advice()
            raise SnapshotNotFoundError(f"{uri} holds no snapshot {what}".rstrip() + advice)
        return wanted

    def has_withdrawn(self, contents: Contents, options: PullOptions) -> bool:
        """Whether a snapshot must no longer be served: the newest one is older, or none is left.

        Args:
            contents: The snapshot, which was the newest.
            options: Which snapshots count.
        """
        try:
            return self.newest(options).contents.row.seq < contents.row.seq
        except SnapshotNotFoundError:
            return True

    def _is_meant(self, name: str, row: Row, options: PullOptions) -> bool:
        below = name[len(self.name) + 1 :] if self.name else name
        matches = options.match is None or not below or fnmatchcase(below, options.match)
        if options.tag is not None:
            return matches and options.tag in row.tags
        return matches and (not below or not row.is_rewound)


def folder_for(out: Path, options: PullOptions) -> ServedFolder:
    """Return the served folder at a path, changed in place or not, as the options say."""
    return FolderInPlace(out) if options.in_place else ServedFolder(out)


def pull(
    source: Source, out: Path, options: PullOptions, progress: Progress | None = None
) -> PullReport:
    """Bring a folder to the newest snapshot, as :meth:`casnap.Store.pull` describes."""
    with folder_for(out, options).locked() as served:
        report = update(served, source, options, progress)
        served.clean_up(options.keep)
        return report


def update(
    served: ServedFolder, source: Source, options: PullOptions, progress: Progress | None
) -> PullReport:
    """Bring a folder to the newest snapshot; do not delete old versions.

    The caller holds the lock of the folder.

    Args:
        served: The folder.
        source: The store.
        options: The options of the pull.
        progress: Called with the phase, the bytes done, and the total.
    """
    start = time.monotonic()
    received = source.store.backend.received_bytes
    version = None
    while version is None:
        contents, number, published = source.newest(options)
        report = PullReport("", contents.name, contents.row.commit.hex(), number, published)
        with served.translated():
            version = _switched(served, source, contents, options, report, progress)
    record, report.folder = version.record, os.path.realpath(version.folder)
    report.tensors, report.left_out = len(record.tensors), record.left_out
    report.total_bytes = sum(file.file_bytes for file in record.files.values())
    report.received_bytes = source.store.backend.received_bytes - received
    report.seconds = time.monotonic() - start
    return report


def _switched(
    served: ServedFolder,
    source: Source,
    contents: Contents,
    options: PullOptions,
    report: PullReport,
    progress: Progress | None,
) -> Version | None:
    """Write the version of a snapshot, unless it is there, and make the link lead to it.

    Args:
        served: The folder.
        source: The store.
        contents: The snapshot.
        options: The options of the pull.
        report: Gets what was written, and how.
        progress: Called with the phase, the bytes done, and the total.

    Returns:
        The version; None if the snapshot was withdrawn meanwhile, and so is not served.
    """
    served.close_to_others()
    current = served.current()
    try:
        wanted = (source.store.config.store_id, report.commit, options.mapping)
        if current is not None and current.is_of(*wanted):
            return current
        version = served.of(*wanted)
        kept = version or current
        is_sound = kept is None or _holds(kept, served.next_turn())
        doubtful = set().union(*(v.doubtful() for v in (current, version) if v is not None))
        if doubtful:
            served.note_doubtful(doubtful)
        if not is_sound:
            version = None
        if version is None:
            with contents.reading():
                if isinstance(served, FolderInPlace) and served.is_there:
                    withdrawn = partial(source.has_withdrawn, contents, options)
                    version = change(served, contents, options, report, progress, withdrawn)
                else:
                    folder = served.new_name(contents.name, report.commit)
                    version = write_version(folder, contents, options, current, report, progress)
            if source.has_withdrawn(contents, options):
                return None
        report.switched = True
        before = None if current is None else current.record
        changed = doubtful.union(version.record.changed_since(before))
        report.changed = [name for name in version.record.tensors if name in changed]
        return served.switch(version)
    except WithdrawnError:
        return None
    finally:
        if current is not None:
            current.close()


def _holds(version: Version, turn: int) -> bool:
    """Verify the part of a version's bytes that is due in this pull; have damaged files rewritten.

    Args:
        version: The version.
        turn: The number of this pull, which selects the part; see :data:`PARTS`.

    Returns:
        Whether the part has the bytes that were pulled.
    """
    try:
        damaged = version.damaged(turn)
    finally:
        version.close()
    if files := version.doubt(damaged):
        _log.warning(
            "%s: the bytes of %s have changed, though not its length and time, so a disk may fail. "
            "This pull makes it anew",
            version.folder,
            ", ".join(files[:8]),
        )
    return not damaged
