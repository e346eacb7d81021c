"""The snapshots of a store that lie below a prefix. ``Store`` and ``Snapshot`` are built on it.

This module imports ``storage`` and lower layers. When it opens a store that has a mirror, it
also imports ``mirror`` and ``take``; once a take has committed, ``comparing``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from casnap.backends import Backend
from casnap.backends.uris import joined, name_below
from casnap.errors import (
    PLACE_ERRORS,
    DamagedError,
    NotAStoreError,
    SnapshotNotFoundError,
    shell_word,
    with_article,
)
from casnap.format.names import check_name, name_text
from casnap.format.records import Root, Row, StoreConfig
from casnap.runtime.environment import given_path, threads_asked
from casnap.runtime.units import Size
from casnap.storage import Location, Repository, Table, open_at
from casnap.take.options import HealthOptions

if TYPE_CHECKING:
    from casnap.mirror.mirror import Mirror
    from casnap.mirror.status import MirrorOptions
    from casnap.ranks.comm import Comm
    from casnap.storage import AutomaticCollector, CommitHooks, PruneReport

_log = logging.getLogger("casnap")
V = TypeVar("V")
# The stores, with their newest roots, about which this process has warned that it reads an older
# root.
_told: set[tuple[str, int]] = set()
_ADVICE = "Copy it again, or have `casnap repair {uri}` save what is here"
Opening = Callable[..., tuple[Repository, bool]]


class View:
    """The snapshots of a store below a prefix, by their local names. The store may not exist yet.

    Args:
        uri: The store, as the user has named it.
        place: The location of the store, whether it exists or not.
        opening: Opens or makes the store, as :func:`casnap.storage.opening.opening.open_at` does.
        create: Whether to make the store if there is none.
        threads: How many threads of each step of a take may run, by default.
        environment: Whether takes note what they were made with.
        health: How takes measure tensors; None asks the environment of the process.
        mirror_options: The user's options for the mirror; None without a mirror.

    Attributes:
        is_new: Whether this object has made the store.
        mirror: The mirror of the open store, if there is one.
        threads: As given.
        environment: As given.
        health: How takes measure tensors; None: not at all.
    """

    def __init__(
        self,
        uri: str | Backend,
        place: Location,
        opening: Opening,
        *,
        create: bool,
        threads: int | None = None,
        environment: bool = True,
        health: HealthOptions | bool | None = None,
        mirror_options: MirrorOptions | None = None,
    ) -> None:
        self._uri = uri
        self._place = place
        self._opening = opening
        self._create = create
        self._mirror_options = mirror_options
        self._repository: Repository | None = None
        # The same repository, read as of an older root: set once all newer roots lack files.
        self._older: Repository | None = None
        self.threads = threads or threads_asked()
        self.environment = environment
        self.health = HealthOptions.of(health)
        self.mirror: Mirror | None = None
        self.is_new = False

    @classmethod
    def at(
        cls,
        uri: str | os.PathLike[str] | Backend,
        *,
        create: bool,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        environment: bool = True,
        health: HealthOptions | bool | None = None,
        mirror_options: MirrorOptions | None = None,
        **options: Any,
    ) -> View:
        """Return a view of the store at a place. If the store exists, it is open.

        Args:
            uri: Its path, URI or backend.
            create: Whether to make the store if there is none: with a mirror at once, otherwise
                when it is needed.
            storage_options: How to reach a remote store.
            threads: As for the class.
            environment: As for the class.
            health: As for the class.
            mirror_options: As for the class.
            options: Further arguments of :func:`casnap.storage.opening.opening.open_at`, which also
                says what is raised.
        """
        place = Location.of_store(uri, storage_options, may_take=create)
        given = place.backend if isinstance(uri, Backend) else given_path(uri)
        opening = partial(open_at, **options)
        view = cls(
            given,
            place,
            opening,
            create=create,
            threads=threads,
            environment=environment,
            health=health,
            mirror_options=mirror_options,
        )
        if mirror_options is not None and create:
            view._open(place, create=True)
        else:
            view._look(place)
        return view

    @classmethod
    def of(
        cls,
        repository: Repository,
        prefix: str = "",
        *,
        is_new: bool = False,
        threads: int | None = None,
        environment: bool = True,
        health: HealthOptions | bool | None = None,
    ) -> View:
        """Return a view of an open store.

        Args:
            repository: The store.
            prefix: The prefix of the full names of all snapshots in the view.
            is_new: Whether the store was just made.
            threads: How many threads of each step of a take may run, by default.
            environment: Whether takes note what they were made with.
            health: How takes measure tensors; None asks the environment of the process.
        """
        backend = repository.backend
        opening = partial(open_at, markers=repository.marks)
        place = Location(backend, prefix, exists=True)
        view = cls(
            backend,
            place,
            opening,
            create=False,
            threads=threads,
            environment=environment,
            health=health,
        )
        view._repository, view.is_new = repository, is_new
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options, so that another process opens the store again."""
        opening = self._opening
        if self._repository is not None:
            cache = self._repository.chunk_cache
            opening = partial(opening, cache_bytes=0 if cache is None else cache.nbytes)
        options = {
            "create": self._create,
            "threads": self.threads,
            "environment": self.environment,
            "health": self.health or False,
            "mirror_options": self._mirror_options,
        }
        fields = self._uri, self._place, opening, options
        return _unpickled, (fields, self._repository is not None)

    # --- the store, which may not exist yet ---

    def _open(self, place: Location, *, create: bool, start_mirror: bool = True) -> Repository:
        repository, self.is_new = self._opening(place, create=create)
        options, mirror = self._mirror_options, None
        if options is not None:
            from casnap.mirror.mirror import Mirror
            from casnap.take.pending import under_way

            mirror = Mirror(
                repository, place.name, options, hooks_of=_disk_hooks, is_taking=under_way
            )
        self._repository, self.mirror = repository, mirror
        self._place = place._replace(exists=True)
        if mirror is not None and start_mirror:
            mirror.start()
        return repository

    @property
    def place(self) -> Location:
        """The location of the store, whether it exists or not. Finding it makes no request."""
        if self._repository is not None or self._place.backend.costly_requests:
            return self._place
        # A new look: a store above may have been made since, or could not be looked at before.
        return Location.of_store(self._uri, None, may_take=self._create)

    def look(self) -> Repository | None:
        """Open the store if it exists; return None if there is none, but one may be made."""
        return self._repository or self._look(self.place)

    def _look(self, place: Location) -> Repository | None:
        if self._repository is None:
            if not self._create or place.exists:
                # If the making of the store was cut off, this completes it.
                self._open(place, create=self._create)
            elif place.exists is None:
                with suppress(NotAStoreError):
                    self._open(place, create=False)
        return self._repository

    def make(self) -> Repository:
        """Make the store now, if there is none; return it."""
        place = self.place
        place.backend.check_changes()
        return self._repository or self._open(place, create=self._create)

    @property
    def repository(self) -> Repository:
        """The open store.

        Raises:
            NotAStoreError: There is none yet.
        """
        # Opening a store that does not exist raises the right error.
        return self.look() or self._open(self.place, create=False)

    def whole(self) -> View:
        """Return the view of all snapshots of the store."""
        if not self.prefix:
            return self
        return View.of(
            self.repository,
            threads=self.threads,
            environment=self.environment,
            health=self.health or False,
        )

    def at_mirror(self) -> View | None:
        """Return the view of the snapshots at the mirror; None if there is no mirror.

        Raises:
            StoreError: The mirror cannot be used, or cannot be reached just now.
        """
        # A store that does not exist yet has no mirror: a store with a mirror is made at once.
        if self.mirror is None:
            return None
        destination = self.mirror.destination()
        return View.of(destination.store, destination.place.prefix)

    @property
    def hooks(self) -> CommitHooks:
        """The hooks of each commit to the store: for its mirror, and for garbage on its disk.

        They also look at each snapshot that was taken: see ``comparing/standstill.py``.
        """
        hooks = replace(_disk_hooks(self.repository), on_taken=self._look_at_take)
        if self.mirror is None:
            return hooks
        return replace(hooks, notes=self.mirror.notes, on_commit=self.mirror.wake)

    def _look_at_take(self, name: str, row: Row) -> None:
        from casnap.comparing.standstill import look_at_take

        look_at_take(self.repository, name, row)

    # --- names ---

    @property
    def uri(self) -> str:
        """The URI of the store, and the prefix."""
        return self.place.uri

    @property
    def prefix(self) -> str:
        """The prefix of the full names of all snapshots in this view; empty for the whole store."""
        return self.place.name

    def path_of(self, name: str) -> str:
        """Return the path or URI of a snapshot."""
        return joined(self.uri, name)

    # A *local* name is the name in this view; a *full* name begins with the prefix. A name that the
    # user gives is made local only once: a local name may look like a path of the view, and a
    # second time would cut it.

    def local_name(self, given: str) -> str:
        """Return the local name of a snapshot that a user names.

        Args:
            given: A local name, or the path or URI of the snapshot.

        Raises:
            InvalidNameError: The name cannot be used, or is a path that leads elsewhere.
        """
        return check_name(self._without_path(given))

    def _without_path(self, given: object) -> str:
        place = self.place
        uri = self._uri if isinstance(self._uri, str) else place.backend.uri
        return name_below(name_text(given), uri, place.uri)

    def full_name(self, given: str) -> str:
        """Return the full name of a snapshot that a user names.

        Args:
            given: A local name, or the path or URI of the snapshot.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return check_name(self.full_of(self.local_name(given)))

    def full_of(self, local: str) -> str:
        """Return the full name for a local one."""
        return f"{self.prefix}/{local}" if self.prefix else local

    def local_of(self, full: str) -> str:
        """Return the local name for a full one, which begins with the prefix."""
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def folder(self, prefix: str | None) -> str:
        """Return the full name of a folder of this view; "" for the whole store.

        Raises:
            InvalidNameError: No snapshot can be below a folder of this name.
        """
        local = self._without_path("" if prefix is None else prefix)
        return self.full_of(check_name(local)) if local.strip("/") else self.prefix

    def folder_on_disk(self, prefix: str | None) -> Path | None:
        """Return the folder of this machine for the markers of snapshots; None for a remote store.

        Args:
            prefix: The folder in this view; None for the view itself.
        """
        place = self.place
        folder = place.backend.folder
        return None if folder is None else folder / self.folder(prefix)

    # --- rows ---

    @property
    def readable(self) -> Repository:
        """The repository to read from; as of an older root, if the newest one lacks files."""
        return self._older or self.repository

    def read(self, look: Callable[[Table], V]) -> V:
        """Call a function with the newest table, and return its result.

        If files of the newest root are missing, the table is that of the newest whole root.

        Args:
            look: The function.
        """
        return self.read_with_root(lambda _, table: look(table))

    def read_with_root(self, look: Callable[[Root, Table], V]) -> V:
        """Call a function with a root and its table, as :meth:`read` does with the table alone.

        Args:
            look: The function.
        """
        roots: list[Root] = []

        def look_at(table: Table) -> V:
            return look(roots[-1], table)

        try:
            return self.readable.read_table(look_at, roots.append)
        except DamagedError:
            # Without a root that could be read, older ones are not looked for.
            older = self.repository.as_of_whole_root() if roots else None
            if older is None:
                raise
        self._older = older
        _tell_of_older(self.repository, older)
        return older.read_table(look_at, roots.append)

    def find(self, given: str) -> tuple[str, Row]:
        """Return the full name and the row of a snapshot, by the name that a user gives.

        Raises:
            InvalidNameError: The name cannot be used.
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        local = self.local_name(given)
        return self.full_of(local), self.row_of(local)

    def row_of(self, local: str) -> Row:
        """Return the row of a snapshot, by its local name.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
            DamagedError: The store can be read only as of an older root, and a newer root may have
                it.
        """
        full = check_name(self.full_of(local))
        if self.look() is None:
            raise SnapshotNotFoundError(
                f"there is no snapshot {local!r}: {self.uri} is not a store yet; the "
                "first take to it makes one"
            )
        try:
            return self.read(lambda table: Location(self.repository.backend, full).row_in(table))
        except SnapshotNotFoundError:
            self._check_absent(repr(full))
            raise

    def tagged(self, tag: str) -> tuple[str, Row]:
        """Return the full name and the row of the one snapshot of this view that has a tag.

        Raises:
            InvalidNameError: The tag is not a str.
            SnapshotNotFoundError: No snapshot of this view has the tag.
            SnapshotError: Several snapshots have the tag, and it is not published.
            DamagedError: The store can be read only as of an older root, and a newer root may have
                such a snapshot.
        """
        from casnap.storage import Tags

        store, folder = self.repository, self.folder(None)
        try:
            return self.read_with_root(partial(Tags(store).find_in, tag=tag, folder=folder))
        except SnapshotNotFoundError:
            self._check_absent(f"tagged {tag!r}")
            raise

    def rows(self, prefix: str | None) -> list[tuple[str, Row]]:
        """Return the names and rows of the snapshots below a folder, in the order of commits.

        Raises:
            DamagedError: There are none, but the store can be read only as of an older root, and a
                newer root may have some.
        """
        folder = self.folder(prefix)
        if self.look() is None:
            return []
        rows = self.read(lambda table: table.rows_in(folder))
        if not rows:
            self._check_absent(f"below {folder!r}")
        return [(self.local_of(name), row) for name, row in Table.in_commit_order(rows)]

    def _check_absent(self, what: str) -> None:
        """Check that snapshots that were not found are absent from the newest root too.

        If the store is read as of an older root, a newer root may have them. Without the error, a
        run that began after the older root would start from the beginning.

        Args:
            what: The snapshots, for the message.

        Raises:
            DamagedError: A newer root may have them.
        """
        if self._older is None:
            return
        older, newest = self._older.newest().seq, self.repository.newest().seq
        if older < newest:
            raise DamagedError(
                f"{self.uri} can be read only as of root {older}, which has no snapshot {what}. "
                f"Root {newest} may have one, but names files that are not here. "
                + _ADVICE.format(uri=shell_word(self.uri))
            )

    def named_here(self, report: PruneReport) -> PruneReport:
        """Return a report with the local names of snapshots in place of their full names."""
        return replace(
            report,
            verdicts=[replace(each, name=self.local_of(each.name)) for each in report.verdicts],
            thinned={self.local_of(name): keys for name, keys in report.thinned.items()},
        )

    def free_later(self, rows: Sequence[Row]) -> None:
        """Let the bytes of deleted snapshots be freed: now if the disk is nearly full, else later.

        Args:
            rows: The rows of the deleted snapshots.
        """
        hooks = self.hooks
        hooks.on_release(rows)
        nbytes = max((row.stats.logical_bytes for row in rows), default=0)
        # The snapshots are deleted already, so an error here is ignored.
        with suppress(*PLACE_ERRORS):
            free = self.repository.backend.free_bytes()
            if free is not None and free <= nbytes:
                hooks.make_room(lambda: nbytes)


def _tell_of_older(store: Repository, older: Repository) -> None:
    """Log a warning, once for a store and root, that the store is read as of an older root."""
    newest = store.newest().seq
    if (told := (store.backend.identity, newest)) in _told:
        return
    _told.add(told)
    _log.warning(
        "%s is read as of root %d, the newest whole one: root %d names files that are not here, as "
        "where a store was copied while it was written. %s; nothing can be committed before",
        store.backend.uri,
        older.newest().seq,
        newest,
        _ADVICE.format(uri=shell_word(store.backend.uri)),
    )


def _unpickled(fields: tuple[Any, ...], is_open: bool) -> View:
    uri, place, opening, options = fields
    view = View(uri, place, opening, **options)
    if is_open:
        # A take starts the mirror; a worker that only reads does not need it.
        view._open(place, create=False, start_mirror=False)
    return view


def _disk_hooks(repository: Repository) -> CommitHooks:
    """Return the hooks that let garbage of a store be collected in the background."""
    from casnap.storage import CommitHooks

    def collector() -> AutomaticCollector:
        # Imported at its first use: of many ranks, only rank 0 uses it.
        from casnap.storage import AutomaticCollector

        return AutomaticCollector.of(repository)

    return CommitHooks(
        make_room=lambda count: collector().make_room(repository, count),
        on_full=lambda error, count: collector().meet_full_disk(repository, error, count),
        on_release=lambda rows: collector().note(repository, rows),
        count_freed=lambda: collector().count_freed(),
    )


# --- the view that a path means ---


class _SnapshotPlace(msgspec.Struct, array_like=True):
    """Rank 0's message about a new snapshot: its store and its name.

    Attributes:
        path: The path that the caller gave to rank 0.
        uri: The store.
        name: The full name of the snapshot.
        config: The record of a remote store, so that no other rank has to read it.
        root: A recent root of that store.
    """

    path: str
    uri: str
    name: str
    config: StoreConfig | None = None
    root: Root | None = None


def find_view(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    store: object = None,
    *,
    create: bool,
    cache_bytes: Size | None = None,
) -> tuple[View, str]:
    """Find the store that holds a snapshot, or is to hold it.

    Args:
        path: The path of the snapshot; with ``store``, its name in that store.
        storage_options: How to reach a remote store.
        store: A :class:`casnap.Store`, or the path or URI of one; by default the store in which
            ``path`` lies.
        create: Whether to make the store if there is none.
        cache_bytes: How many bytes of chunks of remote stores this host keeps.

    Returns:
        The view, and the local name of the snapshot.

    Raises:
        ValueError: ``storage_options`` or ``cache_bytes`` were given for a local or open store.
    """
    if store is None:
        return view_above(path, storage_options, create=create, cache_bytes=cache_bytes)
    if isinstance(store, str | os.PathLike):
        view = View.at(
            store, create=create, storage_options=storage_options, cache_bytes=cache_bytes
        )
    else:
        view = view_of(store)
        if storage_options or cache_bytes is not None:
            option = "storage_options" if storage_options else "cache_bytes"
            raise ValueError(f"{view.uri} is open already; give {option} to Store(...)")
    if create:
        view.make()
    return view, view.local_name(name_text(path))


def view_of(store: object) -> View:
    """Return the view of a :class:`casnap.Store`, a class that this module cannot import.

    Raises:
        TypeError: ``store`` is not a Store.
    """
    view = getattr(store, "_view", None)
    if not isinstance(view, View):
        kind = with_article(type(store).__name__)
        raise TypeError(f"store= is a Store or its URI; got {kind}")
    return view


def repository_of(store: object) -> Repository:
    """Return the open repository of a :class:`casnap.Store`.

    Raises:
        NotAStoreError: The store does not exist yet.
    """
    return view_of(store).repository


def view_above(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    *,
    create: bool,
    is_typed: bool = False,
    **options: Any,
) -> tuple[View, str]:
    """Return the view of the store in which the path of a snapshot lies, and the local name.

    Args:
        path: The path.
        storage_options: How to reach a remote store.
        create: Whether to make the store if there is none. If so, the caller is going to write to
            it.
        is_typed: Whether a person has typed the path. If so, a line says which store it is in.
        options: Further arguments of :func:`casnap.storage.opening.opening.open_at`, which also
            lists the errors.
    """
    place = Location.of_snapshot(path, storage_options, may_take=create, is_typed=is_typed)
    if create:
        place.backend.check_changes()
    try:
        repository, is_new = open_at(
            place._replace(name=""), create=create, is_explicit=False, look_ahead=True, **options
        )
    except NotAStoreError as e:
        raise place.only_marker_error() or e from None
    return View.of(repository, is_new=is_new), place.name


def find_view_together(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    store: object,
    comm: Comm,
    *,
    create: bool = True,
) -> tuple[View, str]:
    """Let rank 0 find the store for a new snapshot, or make it; return it on all ranks.

    Args:
        path: The path of the snapshot; with ``store``, its name in that store.
        storage_options: How this rank reaches a remote store.
        store: A :class:`casnap.Store`, or the path or URI of one; None: the store of ``path``.
        comm: The ranks; all call this.
        create: Whether to make the store if there is none.

    Returns:
        The view of the whole store, and the name of the snapshot in it.
    """
    with comm.reporting_errors():
        if comm.rank == 0:
            view, name = find_view(path, storage_options, store, create=create)
            repository = view.repository
            answer = _SnapshotPlace(os.fspath(path), repository.backend.uri, view.full_of(name))
            if repository.backend.costs.one_asks and comm.size > 1:
                answer.config, answer.root = repository.config, repository.recent()
            comm.broadcast_message(answer, _SnapshotPlace)
            return view, name
        answer = comm.broadcast_message(None, _SnapshotPlace)
        comm.check_same("the path", os.fspath(path), answer.path)
        # Each rank uses its own options to reach the store of rank 0, and never looks for another.
        if store is not None and not isinstance(store, str | os.PathLike):
            view = view_of(store)
            if view.repository.backend.uri == answer.uri:
                return view.whole(), answer.name
        place = Location.of_store(answer.uri, storage_options)
        repository, _ = open_at(place, create=False, config=answer.config)
        if answer.root is not None:
            repository.observe_root(answer.root)
        return View.of(repository, place.name), answer.name
