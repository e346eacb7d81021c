"""Count how many bytes snapshots take up in their store, alone and together.

A snapshot is a tree of nodes that refer to chunks. The walk enters the snapshots one after the
other and counts references. It leaves a snapshot only after entering the next one, so nodes and
chunks that two neighbours share are neither read nor counted again.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from casnap.errors import SnapshotNotFoundError
from casnap.format.codec import Codec
from casnap.format.digest import Digest
from casnap.format.entries import Entry
from casnap.format.names import folder_of
from casnap.format.records import DeltaPlace, Root, Row, pack_key, segment_key
from casnap.runtime.progress import Progress
from casnap.storage import Contents, Repository
from casnap.storage.inspecting import (
    MANIFEST,
    IndexView,
    StoredFiles,
    digest_in,
    is_node,
    references,
    walk,
)

_NO_OWNER, _SHARED = -1, -2


@dataclass(frozen=True)
class Usage:
    """How many bytes one snapshot takes up.

    Attributes:
        name: Its name in the store, without the prefix of a view.
        logical_bytes: Bytes of its state.
        stored_bytes: Stored bytes of all chunks and nodes that it refers to, and of the chunks that
            these are deltas of.
        unique_bytes: How many of these bytes no other snapshot of the store needs.
    """

    name: str
    logical_bytes: int
    stored_bytes: int
    unique_bytes: int


def usage(
    snapshots: list[Contents], store: Repository, progress: Progress | None = None
) -> list[Usage]:
    """Return how many bytes each of some snapshots takes up.

    All other snapshots of the store are read too, since they may share chunks. If a snapshot is
    deleted, replaced or thinned meanwhile, and its bytes are collected, it is left out.

    Args:
        snapshots: The snapshots.
        store: Their store.
        progress: Called with the number of snapshots that were read, and the total.

    Raises:
        DamagedError: A node is missing or damaged.
    """
    view, there = store.read_at_newest(partial(_snapshots, store))
    by_commit = {(c.name, c.row.commit): c for c in there}
    by_commit.update({(c.name, c.row.commit): c for c in snapshots})
    # Neighbours share most, so put the snapshots of one run side by side.
    order = sorted(by_commit.values(), key=lambda c: (folder_of(c.name), c.row.seq))
    report = progress or (lambda phase, done, total: None)
    report("reading snapshots", 0, len(order))
    Contents.read_ahead(order)
    walk, sizes = _Walk(store, view), {}
    for index, contents in enumerate(order):
        try:
            with contents.reading():
                sizes[contents.name, contents.row.commit] = (index, walk.step(contents.row))
        except SnapshotNotFoundError:
            # A part of the snapshot may be counted, so count all again without it.
            return usage([c for c in snapshots if c is not contents], store, progress)
        report("reading snapshots", index + 1, len(order))
    unique = walk.unique(len(order))
    usages = []
    for contents in snapshots:
        number, nbytes = sizes[contents.name, contents.row.commit]
        logical = contents.row.stats.logical_bytes
        usages.append(Usage(contents.name, logical, nbytes, unique[number]))
    return usages


@dataclass(frozen=True)
class DiskUsage:
    """The bytes that a store takes up, without the markers of its snapshots.

    Attributes:
        kept_bytes: Packs and segments that the newest root names, without condemned packs.
        waiting_bytes: Condemned packs, which a collector deletes later.
        orphaned_bytes: Packs and segments that the root does not name: takes that failed have left
            them, or takes are writing them.
        saved_bytes: How many bytes deltas and compression save: the raw bytes of the kept chunks
            minus their stored bytes.
        other_bytes: Roots and files that are being written; on a disk also the rest of the last
            block of each file.
    """

    kept_bytes: int
    waiting_bytes: int
    orphaned_bytes: int
    saved_bytes: int
    other_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return self.kept_bytes + self.waiting_bytes + self.orphaned_bytes + self.other_bytes


def disk_usage(store: Repository) -> DiskUsage:
    """Return how many bytes a store takes up, by purpose."""
    return store.read_at_newest(partial(_disk_usage, store))


def _disk_usage(store: Repository, root: Root) -> DiskUsage:
    view = store.view_at(root)
    files = StoredFiles(store, view.root)
    segments = (segment_key(segment) for segment in view.segments)
    kept = files.size_of([*map(pack_key, view.live), *segments])
    waiting = files.size_of(map(pack_key, view.root.condemned))
    orphaned = files.size_of(files.unnamed(view))
    if not store.backend.costs.free_looks:
        # All other files were listed above.
        other = store.backend.taken_up("roots")
    else:
        # A file system that compresses may need less than the lengths of the files.
        other = max(0, store.backend.taken_up("") - kept - waiting - orphaned)
    return DiskUsage(kept, waiting, orphaned, _saved_bytes(store, view), other)


def _saved_bytes(store: Repository, view: IndexView) -> int:
    saved = 0
    for segment in view.root.segments:
        sealed = store.segment(segment)
        is_live = [pack in view.live for pack in sealed.packs]
        saved += sum(
            raw_size - stored_size
            for _, n, _, stored_size, raw_size, codec in sealed.records()
            if codec != Codec.RAW and is_live[n]
        )
    return saved


def shared_bytes(
    contents: Contents, path: str, entry: Entry, progress: Progress | None = None
) -> int:
    """Return how many bytes of an entry are in chunks that an earlier snapshot refers to.

    Args:
        contents: The snapshot.
        path: The entry's path, for messages.
        entry: The entry.
        progress: Called with the number of earlier snapshots that were read, and the total.

    Raises:
        DamagedError: A node is missing or damaged.
    """
    store = contents.store
    chunks = contents.chunks(path, entry)
    unseen: set[bytes] = {digest for digest, _ in chunks}
    _, snapshots = store.read_at_newest(partial(_snapshots, store))
    earlier = [c for c in snapshots if c.row.seq < contents.row.seq]
    earlier.sort(key=lambda c: -c.row.seq)
    visited: set[bytes] = set()
    for number, other in enumerate(earlier):
        if not unseen:
            break
        if progress is not None:
            progress("looking through earlier snapshots", number, len(earlier))
        # A snapshot that is deleted and collected while this reads shares nothing any more.
        with suppress(SnapshotNotFoundError), other.reading():
            for _, children in walk(store, [MANIFEST + other.row.manifest.digest], visited):
                unseen.difference_update(children)
                if not unseen:
                    break
    return sum(nbytes for digest, nbytes in chunks if digest not in unseen)


def _snapshots(store: Repository, root: Root) -> tuple[IndexView, list[Contents]]:
    rows = store.table(root).rows_in()
    return store.view_at(root), [Contents(store, name, row) for name, row in rows]


class _Walk:
    """Walks over snapshots one after the other, and counts the bytes that each refers to.

    Nodes and chunks get numbers. If a single snapshot refers to a node or chunk, that snapshot owns
    it.

    Args:
        store: The store.
        view: The view of the index that gives the places.
    """

    def __init__(self, store: Repository, view: IndexView) -> None:
        self._store = store
        self._view = view
        self._numbers: dict[bytes, int] = {}
        self._nodes: dict[int, bytes] = {}
        # The base of each chunk that is stored as a delta. A base is entered like a child of a
        # node, so it counts once however many chunks are deltas of it.
        self._bases: dict[int, bytes] = {}
        self._stored = array("Q")
        self._owner = array("q")
        self._count = array("I")
        self._below: dict[int, array[int]] = {}
        self._step = _NO_OWNER
        self._top: int | None = None
        self._bytes = 0

    def step(self, row: Row) -> int:
        """Move on to the next snapshot; return the stored bytes of all that it refers to."""
        self._step += 1
        # The hint finds the node without the index. From now on it is cached.
        self._store.node(Digest(row.manifest.digest), row.manifest.hint)
        previous = self._top
        top = self._top = self._number([MANIFEST + row.manifest.digest])[0]
        self._enter(top)
        if previous is not None:
            self._leave(previous)
        return self._bytes

    def unique(self, steps: int) -> list[int]:
        """Return, for each visited snapshot in order, the stored bytes that only it refers to.

        Args:
            steps: How many snapshots the walk has visited.
        """
        unique = [0] * steps
        for owner, stored_bytes in zip(self._owner, self._stored, strict=True):
            if owner >= 0:
                unique[owner] += stored_bytes
        return unique

    def _number(self, references: list[bytes]) -> array[int]:
        """Return the numbers of some nodes and chunks; new ones get the next numbers."""
        unnumbered = [r for r in dict.fromkeys(references) if r not in self._numbers]
        places = self._store.find([digest_in(r) for r in unnumbered], self._view)
        for reference, place in zip(unnumbered, places, strict=True):
            number = self._numbers[reference] = len(self._numbers)
            if is_node(reference):
                self._nodes[number] = reference
            elif isinstance(place, DeltaPlace):
                self._bases[number] = place.base
            self._stored.append(place.stored_size if place else 0)
            self._owner.append(_NO_OWNER)
            self._count.append(0)
        return array("I", [self._numbers[r] for r in references])

    def _enter(self, top: int) -> None:
        """Count a reference to a node or chunk; if it is the first one, enter all below it too."""
        pending = [top]
        while pending:
            number = pending.pop()
            self._count[number] += 1
            owner = self._owner[number]
            if self._count[number] > 1:
                if owner not in (self._step, _SHARED):
                    self._share(number)
                continue
            self._bytes += self._stored[number]
            self._owner[number] = self._step if owner == _NO_OWNER else _SHARED
            if number in self._nodes:
                children = self._number(references(self._store.node, self._nodes[number]))
            elif number in self._bases:
                children = self._number([self._bases[number]])
            else:
                continue
            self._below[number] = children
            pending += children

    def _leave(self, top: int) -> None:
        """Take back a reference to a node or chunk; if it was the last, leave all below it too."""
        pending = [top]
        while pending:
            number = pending.pop()
            self._count[number] -= 1
            if self._count[number] == 0:
                self._bytes -= self._stored[number]
                pending += self._below.pop(number, ())

    def _share(self, top: int) -> None:
        """Note that several snapshots share a node or chunk, and all below it."""
        pending = [top]
        while pending:
            number = pending.pop()
            if self._owner[number] != _SHARED:
                self._owner[number] = _SHARED
                pending += self._below.get(number, ())
