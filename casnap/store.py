"""Everything at one URI: many snapshots that share their chunks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from casnap.codec import Codec
from casnap.errors import NotAStoreError, SnapshotNotFoundError, StoreError
from casnap.format import DEFAULT_CHUNK_SIZE, MARKER, Row, check_name
from casnap.location import Location, create_store, locate_snapshot, locate_store
from casnap.objects import Objects
from casnap.snapshot import PendingSnapshot, Progress, Snapshot

if TYPE_CHECKING:
    from casnap.diff import Diff
    from casnap.state import Stateful
    from casnap.usage import Usage

_log = logging.getLogger("casnap")


class Store:
    """Many snapshots at one place, each chunk stored once.

    Args:
        uri: A folder (or ``memory://name``). Below an existing store this is a view of it whose
            names all begin with the rest of the path.
        create: Make the store if there is none.
        chunk_size: For a new store: bytes, a power of two from 64 KiB to 64 MiB.
        compress: Compress new chunks with zstd, where that makes them smaller.
        storage_options: Must be empty in this version.

    Raises:
        NotAStoreError: There is none, and it was not to be created.
        UnsupportedFormatError: A newer casnap made it.
        StoreError: This is no place for a store.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        create: bool = True,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        compress: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if storage_options:
            raise NotImplementedError("storage_options are not supported in this version")
        self._open(locate_store(uri), create=create, asked=True, chunk_size=chunk_size)
        self._codec = Codec.ZSTD if compress else Codec.RAW

    @classmethod
    def _for_snapshot(cls, path: str | os.PathLike[str], *, create: bool) -> tuple[Store, str]:
        found = locate_snapshot(path)
        store = cls.__new__(cls)
        store._codec = Codec.RAW
        store._open(found._replace(name=""), create=create, asked=False)
        return store, found.name

    def _open(
        self, found: Location, *, create: bool, asked: bool, chunk_size: int = DEFAULT_CHUNK_SIZE
    ) -> None:
        if create and not found.name:
            # Where the store exists this finishes a creation that was cut off.
            create_store(found.backend, chunk_size=chunk_size, asked=asked)
        elif not found.exists:
            raise NotAStoreError(
                f"{found.backend.uri} is not a casnap store, nor is any folder above it; make one "
                f"with `casnap init {found.backend.uri}`, or check the path"
            )
        self.objects = Objects(found.backend)
        self.prefix = found.name

    # --- what it is ---

    @property
    def uri(self) -> str:
        """Where it is, with the prefix."""
        root = self.objects.backend.uri
        return f"{root}/{self.prefix}" if self.prefix else root

    @property
    def id(self) -> str:
        """What tells this store from others, 32 hex digits."""
        return self.objects.config.store_id

    @property
    def chunk_size(self) -> int:
        """The largest chunk, in bytes."""
        return self.objects.config.chunk_size

    def __repr__(self) -> str:
        """Say where it is."""
        return f"Store({self.uri!r})"

    def full_name(self, name: str) -> str:
        """Return a name as it stands in the table, with this view's prefix.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return check_name(self.outer_name(check_name(name)))

    def outer_name(self, name: str) -> str:
        """Return a name that was checked, or comes from the table, with this view's prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    # --- snapshots ---

    def take(
        self,
        app_state: Mapping[str, Stateful],
        name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        progress: Progress | None = None,
    ) -> Snapshot:
        """Take a snapshot; see :meth:`Snapshot.take`."""
        from casnap.take import TakeOptions, take

        options = TakeOptions(metadata or {}, overwrite, allow_pickle, None, progress, self._codec)
        row = take(self.objects, self.full_name(name), app_state, options)
        return Snapshot._of(self, check_name(name), row)

    def async_take(
        self,
        app_state: Mapping[str, Stateful],
        name: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
        max_staging_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> PendingSnapshot:
        """Take a snapshot in the background; see :meth:`Snapshot.async_take`."""
        from casnap.take import TakeOptions, async_take

        options = TakeOptions(
            metadata or {}, overwrite, allow_pickle, max_staging_bytes, progress, self._codec
        )
        pending = async_take(self.objects, self.full_name(name), app_state, options)
        return PendingSnapshot(self, pending, check_name(name))

    def row(self, name: str) -> Row:
        """Return the table's row of a snapshot.

        Raises:
            SnapshotNotFoundError: There is none of this name.
        """
        full = self.full_name(name)
        table = self.objects.tree(self.objects.newest().table, Row)
        row = table.get(full)
        if row is None:
            import difflib

            near = difflib.get_close_matches(full, [k for k, _ in table.items()], 3, 0.5)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise SnapshotNotFoundError(
                f"{self.objects.backend.uri} holds no snapshot {full!r}{hint}"
            )
        return row

    def __getitem__(self, name: str) -> Snapshot:
        """Return a snapshot by name, or raise :class:`SnapshotNotFoundError`."""
        return Snapshot._of(self, check_name(name), self.row(name))

    def __contains__(self, name: object) -> bool:
        """Whether there is a snapshot of this name."""
        if not isinstance(name, str):
            return False
        try:
            self.row(name)
        except SnapshotNotFoundError:
            return False
        return True

    def snapshots(self, prefix: str | None = None) -> list[Snapshot]:
        """Return the snapshots, or those below a prefix, in the order of their commits."""
        outer = "/".join(p for p in (self.prefix, (prefix or "").strip("/")) if p)
        table = self.objects.tree(self.objects.newest().table, Row)
        rows = table.below(f"{outer}/") if outer else table.items()
        skip = len(self.prefix) + 1 if self.prefix else 0
        found = [Snapshot._of(self, name[skip:], row) for name, row in rows]
        return sorted(found, key=lambda s: s.seq)

    def latest(self, prefix: str | None = None) -> Snapshot | None:
        """Return the snapshot that was committed last, or None where there is none."""
        return max(self.snapshots(prefix), key=lambda s: s.seq, default=None)

    def delete(self, name: str) -> None:
        """Forget a snapshot; its bytes are freed by garbage collection.

        Raises:
            SnapshotNotFoundError: There is none of this name.
        """
        from casnap.commit import Transaction
        from casnap.pipeline import Crew, undisturbed
        from casnap.table import removing

        full, row = self.full_name(name), self.row(name)
        backend = self.objects.backend
        change = removing(full, row.commit, backend.uri)

        def publish(crew: Crew) -> None:
            transaction = Transaction(self.objects, crew)
            try:
                transaction.publish(change)
            finally:
                transaction.close()

        undisturbed(publish)
        try:
            backend.mark(f"{full}/{MARKER}", None)
        except (StoreError, OSError) as e:
            _log.warning("%s is deleted, but its marker file cannot be: %s", full, e)

    def diff(self, a: str, b: str) -> Diff:
        """Return what differs between two snapshots, reading only subtrees that do."""
        from casnap.diff import diff

        return diff(self[a].contents, self[b].contents)

    def usage(self, prefix: str | None = None) -> list[Usage]:
        """Return logical, stored and unique bytes of each snapshot, in the order of commits."""
        from casnap.usage import usage

        return usage([s.contents for s in self.snapshots(prefix)], self.objects)
