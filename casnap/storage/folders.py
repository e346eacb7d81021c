"""Snapshots whose folders were deleted, as trainers forget their checkpoints.

A snapshot on a disk has a folder of its own, with a marker in it. A note in the cache says which
markers this host has seen in the folder of a run. A snapshot is missing if its marker was seen, and
its folder is gone later. To rule out other causes, the folder of the run must be the same one, and
another seen marker must still be there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from casnap.backends.base import Backend, translated
from casnap.backends.door import opened
from casnap.errors import BackendError, DamagedError, StoreError, UnavailableError
from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.names import MARKER, STORE_FOLDER
from casnap.format.records import Row, encode
from casnap.runtime.typing import override
from casnap.storage.mirrored import in_order, is_unmirrored, was_taken_here
from casnap.storage.objects import Objects
from casnap.storage.retention import Judging, Verdict, prune
from casnap.storage.table import Table, commit_in, snapshots_in

NOT_SEEN = "this host saw no marker of it"
"""Why a snapshot is kept that has no folder, and of which nothing is noted."""

_NOTE = b"folders"
_OWN = {STORE_FOLDER}
_MOST_NAMES = 10_000


class _Sightings(msgspec.Struct, array_like=True):
    """What this host saw in the folder of a run.

    Attributes:
        device: The device of the folder.
        inode: Its inode.
        markers: The commit that each marker named, by the name of the snapshot's folder.
    """

    device: int
    inode: int
    markers: dict[str, bytes]


class _Listing(NamedTuple):
    """The folder of a run, as it is now: itself, and the names in it."""

    backend: Backend
    run: str
    device: int
    inode: int
    names: frozenset[str]

    def marked(self, name: str) -> bytes | None:
        """Return the commit that the marker in a folder here names; None if there is no marker."""
        key = "/".join(part for part in (self.run, name, MARKER) if part)
        try:
            return commit_in(self.backend.read_marker(key))
        except UnavailableError:
            raise
        except (FileNotFoundError, DamagedError, BackendError):
            return None

    def markers(self) -> set[bytes]:
        """Return the commits that the markers in all folders here name."""
        found = map(self.marked, self.names)
        return {commit for commit in found if commit is not None}


def check_has_folders(backend: Backend) -> Path:
    """Return the folder of a store.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """
    if backend.folder is None:
        raise StoreError(
            f"{backend.uri} is not in a folder of this machine, so its snapshots have no folders "
            "whose deletion could be seen; use delete(), or a retention"
        )
    return backend.folder


def check_followed(backend: Backend, *, markers: bool) -> None:
    """Check that the folders of snapshots can be followed.

    Raises:
        StoreError: The store is not in a folder of this machine.
        ValueError: There are to be no markers.
    """
    check_has_folders(backend)
    if not markers:
        raise ValueError("follow_folders=True needs markers: a folder is known by its marker")


class MissingFolders(Judging):
    """The change of a table that removes the snapshots whose folders were deleted.

    Args:
        objects: The store.
        folder: Where the runs are; "" for the whole store.
        only: Whether to judge only the run right in the folder.

    Raises:
        StoreError: The store is not in a folder of this machine.
    """

    def __init__(self, objects: Objects, folder: str, *, only: bool = False) -> None:
        super().__init__()
        self._objects = objects
        self._base = check_has_folders(objects.backend)
        self._folder = folder
        self._only = only
        self._sightings: dict[str, _Sightings] = {}

    @override
    def judge(self, table: Table) -> list[Verdict]:
        """Return the verdicts on the snapshots of a table."""
        runs: dict[str, dict[str, Row]] = defaultdict(dict)
        rows = []
        for name, row in snapshots_in(table, self._folder):
            run, _, last = name.rpartition("/")
            if run == self._folder or not self._only:
                runs[run][last] = row
                rows.append((name, row))
        self._sightings = {}
        reasons: dict[str, str] = {}
        for run, own in runs.items():
            why = self._judge_run(run, own)
            reasons.update({f"{run}/{last}".lstrip("/"): said for last, said in why.items()})
        return [Verdict(n, row, tuple(filter(None, [reasons[n]]))) for n, row in in_order(rows)]

    @override
    def settle(self) -> None:
        """Note what was seen."""
        notes = {_key(run): encode(seen) for run, seen in self._sightings.items()}
        if notes:
            self._objects.index.cache.keep_notes(notes)

    def _judge_run(self, run: str, rows: dict[str, Row]) -> dict[str, str]:
        """Return why each snapshot of a run is kept, by the name of its folder; "" if it is not."""
        listing = _listed(self._objects.backend, f"{self._base}/{run}".rstrip("/"), run)
        if listing is None:
            return dict.fromkeys(rows, "the folder of its run is gone")
        noted = self._noted(run)
        seen: dict[str, bytes] = {}
        if noted is not None and (noted.device, noted.inode) == (listing.device, listing.inode):
            known = noted.markers.items()
            seen = {last: c for last, c in known if last in rows and rows[last].commit == c}
        gone = seen.keys() - listing.names
        standing = listing.markers() if gone else set()
        is_sure = not standing.isdisjoint(seen.values())
        reasons, left = {}, {}
        for last, row in rows.items():
            if last in gone:
                reasons[last], stays = self._of_gone(row, standing, is_sure=is_sure)
            else:
                stays = last in seen or (
                    last in listing.names and listing.marked(last) == row.commit
                )
                reasons[last] = "its folder stands" if stays else NOT_SEEN
            if stays:
                left[last] = row.commit
        now = _Sightings(listing.device, listing.inode, left)
        if now != noted:
            self._sightings[run] = now
        return reasons

    def _of_gone(self, row: Row, standing: set[bytes], *, is_sure: bool) -> tuple[str, bool]:
        """Return why a snapshot is kept though its folder is gone, and whether that may pass."""
        if row.user_tags:
            return "tagged", True
        if is_unmirrored(row):
            return "not mirrored yet", True
        if row.commit in standing:
            return "its folder was renamed", False
        if not is_sure:
            return "all folders of its run that were seen are gone", False
        if not was_taken_here(self._objects, row):
            return "copied from another store", False
        return "", False

    def _noted(self, run: str) -> _Sightings | None:
        note = self._objects.index.cache.note(_key(run))
        with suppress(msgspec.DecodeError):
            return decoder(_Sightings).decode(note or b"")
        return None


def follow_folders(objects: Objects, run: str) -> list[Verdict]:
    """Forget the snapshots of a run whose folders were deleted; return the verdicts on them.

    If none was, this only lists the folder of the run.
    """
    missing = MissingFolders(objects, run, only=True)
    verdicts = objects.current(lambda root: missing.judge(objects.table(root)))
    if all(v.kept for v in verdicts):
        missing.settle()
        return []
    return [v for v in prune(objects, missing) if not v.kept]


def _key(run: str) -> bytes:
    return _NOTE + digest_of(run.encode())


def _listed(backend: Backend, path: str, run: str) -> _Listing | None:
    """List the folder of a run; return None if there is none."""
    with translated(path):
        try:
            with opened(path, listed=True) as fd:
                found, names = os.fstat(fd), os.listdir(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return _Listing(backend, run, found.st_dev, found.st_ino, frozenset(names))


def unknown_markers(objects: Objects) -> dict[str, bytes]:
    """Return the markers that name a commit which no snapshot has; nothing for a remote store.

    A marker is written after its commit, and removed with its snapshot. So such a one is of a
    commit whose root is lost, or of a folder that a user has copied from elsewhere.

    Returns:
        The commit by the name of the snapshot's folder. Looked at are the folders of all runs that
        have a snapshot, and those right in the store's folder; but none with very many names, and
        none that is a link.
    """
    backend = objects.backend
    if backend.folder is None:
        return {}
    rows = dict(snapshots_in(objects.table(objects.newest())))
    base = check_has_folders(backend)
    top = _listed(backend, str(base), "")
    runs = {name.rpartition("/")[0] for name in rows} | {""} | (top.names if top else set())
    found: dict[str, bytes] = {}
    for run in sorted(runs - _OWN):
        try:
            listing = _listed(backend, str(base / run), run)
        except UnavailableError:
            raise
        except BackendError:
            continue
        if listing is None or len(listing.names) > _MOST_NAMES:
            continue
        for name in sorted(listing.names):
            commit = listing.marked(name)
            if commit is not None:
                found[f"{run}/{name}".strip("/")] = commit
    # A take may have committed meanwhile.
    known = {row.commit for _, row in snapshots_in(objects.table(objects.newest()))}
    return {name: commit for name, commit in found.items() if commit not in known}
