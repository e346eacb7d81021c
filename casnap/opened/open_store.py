"""An open store: the base of :class:`casnap.Store` and :class:`casnap.Snapshot`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar
from weakref import ref

import msgspec

from casnap.backends import Backend
from casnap.errors import (
    MirrorError,
    NotAStoreError,
    SnapshotNotFoundError,
    UnsupportedFormatError,
    nearest,
)
from casnap.format.codec import Codec
from casnap.format.names import STORE_FOLDER, check_name
from casnap.format.records import CONFIG_KEY, DEFAULT_CHUNK_SIZE, Row, StoreConfig
from casnap.runtime.environment import threads_asked
from casnap.storage.chunk_cache import room_for
from casnap.storage.config import not_a_store_error, object_error
from casnap.storage.creation import Made, create_store
from casnap.storage.foreign import hint_at, no_store_error
from casnap.storage.location import Location, exists, locate_store, narrow_hint
from casnap.storage.mirrored import not_that_mirror, place_of
from casnap.storage.objects import Objects
from casnap.storage.settings import CODEC, settings_of
from casnap.storage.table import Table, only_marker_error, snapshots_in
from casnap.storage.uris import joined

if TYPE_CHECKING:
    from casnap.ranks.comm import Comm
    from casnap.state.stateful import Stateful
    from casnap.store import Store
    from casnap.take.capturable import Capturable
    from casnap.take.options import TakeOptions
    from casnap.take.pending import PendingTake
    from casnap.transfer.mirror import Mirror
    from casnap.transfer.mirror_report import MirrorOptions

V = TypeVar("V")
_log = logging.getLogger("casnap")


class Found(NamedTuple):
    """A snapshot that was looked up, or has just been taken.

    Attributes:
        opened: The store that holds the snapshot.
        name: The snapshot's name in ``opened``.
        row: The snapshot's row in the store's table.
        requests: How many requests the take made, by kind, if it was taken just now.
    """

    opened: OpenStore
    name: str
    row: Row
    requests: Mapping[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How this process uses a store. :class:`casnap.Store` describes the options.

    Attributes:
        threads: By default what the environment says.
    """

    markers: bool = True
    threads: int | None = field(default_factory=threads_asked)
    mirror: MirrorOptions | None = None


class OpenStore:
    """An open store, or a view of the snapshots below a prefix.

    Args:
        objects: The objects of the store.
        prefix: The beginning of the full names of all snapshots; empty for the whole store.
        options: How this process uses the store.
        mirror: The mirror that the options name, if there is one.
        is_new: Whether the store was made just now.
    """

    store_class: ClassVar[type[Store]]
    """:class:`casnap.Store`. Its module sets this, since it stands above this one."""

    def __init__(
        self,
        objects: Objects,
        prefix: str,
        options: StoreOptions | None = None,
        mirror: Mirror | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self.objects = objects
        self.prefix = prefix
        self.options = options or StoreOptions()
        self.mirror = mirror
        self.is_new = is_new
        # Weak, since the Store refers to this: else both would stay until a garbage collection.
        self._store: ref[Store] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process open the store anew, as a spawned worker of a data loader does."""
        cache = self.objects.chunk_cache
        cached = 0 if cache is None else cache.nbytes
        return _open_again, (self.objects.backend, self.prefix, self.options, cached)

    def whole(self) -> OpenStore:
        """Return the whole store that this is a view of."""
        if not self.prefix:
            return self
        return OpenStore(self.objects, "", self.options, self.mirror, is_new=self.is_new)

    @property
    def store(self) -> Store:
        """The Store that opened this; if a Snapshot opened this or the Store is gone, a new one."""
        store = self._store() if self._store is not None else None
        return OpenStore.store_class(self) if store is None else store

    def note_store(self, store: Store) -> None:
        """Note the Store that this belongs to; it must keep this."""
        self._store = ref(store)

    # --- names ---

    @property
    def uri(self) -> str:
        """The URI of the store, and the prefix."""
        return joined(self.objects.backend.uri, self.prefix, is_view=True)

    def path_of(self, name: str) -> str:
        """Return the path or URI of a snapshot."""
        return joined(self.uri, name)

    def full_name(self, name: str) -> str:
        """Return the full name of a snapshot: the prefix, then the name.

        Raises:
            InvalidNameError: The name cannot be used.
        """
        return check_name(self.outer_name(check_name(name)))

    def outer_name(self, name: str) -> str:
        """Return the full name for a name that is known to be valid."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def inner_name(self, full: str) -> str:
        """Return a full name without the prefix that it begins with."""
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def folder(self, prefix: str | None) -> str:
        """Return the full name of a folder of this view; "" for the whole store."""
        return "/".join(p for p in (self.prefix, (prefix or "").strip("/")) if p)

    # --- snapshots ---

    def read(self, look: Callable[[Table], V]) -> V:
        """Call a function with the newest table, and return its result."""
        objects = self.objects
        return objects.current(lambda root: look(objects.table(root)))

    def row(self, name: str) -> Row:
        """Return the row that the table has for a snapshot.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
        """
        full = self.full_name(name)

        def found(table: Table) -> Row:
            row = table.get(full)
            if row is None:
                folder = self.objects.backend.folder
                hint = "" if folder is None else hint_at(folder / full)
                hint = hint or nearest(full, (name for name, _ in snapshots_in(table)))
                raise SnapshotNotFoundError(
                    f"{self.objects.backend.uri} holds no snapshot {full!r}{hint}"
                )
            return row

        return self.read(found)

    def at_mirror(self) -> OpenStore | None:
        """Return the store at the mirror, open; None if there is no mirror.

        Raises:
            StoreError: It cannot be used, or not be reached just now.
        """
        if self.mirror is None:
            return None
        there = self.mirror.destination()
        return OpenStore(there.objects, there.prefix)

    @property
    def on_commit(self) -> Callable[[], None] | None:
        """What to call after each commit of a snapshot; None if there is no mirror."""
        return None if self.mirror is None else self.mirror.wake

    def _completed(self, options: TakeOptions) -> TakeOptions:
        """Add the settings of the store to the options of a take."""
        return replace(
            options,
            on_commit=self.on_commit,
            threads=options.threads or self.options.threads,
        )

    def take(
        self, comm: Comm, app_state: Mapping[str, Stateful], name: str, options: TakeOptions
    ) -> Found:
        """Take a snapshot with the other ranks of ``comm``; at the end, leave it."""
        from casnap.take.capturable import LiveState

        return self.take_asked(comm, lambda: LiveState(app_state), name, options)

    def take_asked(
        self, comm: Comm, asked: Callable[[], Capturable], name: str, options: TakeOptions
    ) -> Found:
        """Take a snapshot of what ``asked`` returns; as :meth:`take`."""
        from casnap.take.take import take

        with comm:
            options = self._completed(options)
            taken = take(self.objects, self.full_name(name), asked(), options, comm)
        return Found(self, check_name(name), *msgspec.structs.astuple(taken))

    def async_take(
        self, comm: Comm, app_state: Mapping[str, Stateful], name: str, options: TakeOptions
    ) -> PendingTake:
        """Begin a take with the other ranks of ``comm``; at its end, it leaves that."""
        from casnap.take.capturable import LiveState
        from casnap.take.take import async_take

        options = self._completed(options)
        full, asked = self.full_name(name), LiveState(app_state)
        return async_take(self.objects, full, asked, options, comm)


def _open_again(
    backend: Backend, prefix: str, options: StoreOptions, cache_bytes: int
) -> OpenStore:
    # The mirror is not started: a worker that only reads has no use for it, and a take starts it.
    found = Location(backend, prefix, exists=True)
    return open_store(found, create=False, cache_bytes=cache_bytes, options=options)


def _mirror_of(objects: Objects, prefix: str, how: MirrorOptions) -> Mirror:
    """Return the mirror of a store.

    Raises:
        CasnapError: It cannot be the mirror of this store.
        TypeError: It is not a path or URI.
    """
    from casnap.take.pending import under_way
    from casnap.transfer.mirror import Mirror
    from casnap.transfer.mirror_report import Destination

    if prefix:
        uri = objects.backend.uri
        raise MirrorError(
            f"{uri}/{prefix} is a view of the store {uri}; the mirror is of a whole store: give "
            "mirror= to that one"
        )
    if not isinstance(how.uri, str | os.PathLike | Backend):
        raise TypeError(f"mirror= is a path or URI of a store; got a {type(how.uri).__name__}")
    found = located(how.uri, how.options)

    def open_there() -> Destination:
        root = objects.newest()
        known = place_of(root, objects.backend.uri)
        zstd = settings_of(root)[CODEC] == "zstd"
        try:
            there = open_store(
                found,
                create=known is None,
                chunk_size=objects.config.chunk_size,
                codec=Codec.ZSTD if zstd else Codec.RAW,
            )
        except NotAStoreError as e:
            if known is None:
                raise
            raise not_that_mirror(objects, known, f"there is no store: {e}") from e
        there.objects.check_writable("mirror to")
        return Destination(there.objects, there.prefix)

    distributed: Any = sys.modules.get("torch.distributed")
    # On many ranks, rank 0 commits, and copies.
    has_ranks = distributed is not None and distributed.is_available()
    passive = has_ranks and distributed.is_initialized() and distributed.get_rank() != 0
    there = found.backend.uri
    return Mirror(objects, how, there, open_there, is_taking=under_way, passive=passive)


def open_store(
    found: Location,
    *,
    create: bool,
    asked: bool = True,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    codec: Codec = Codec.RAW,
    exclusive: bool = False,
    config: StoreConfig | None = None,
    ahead: bool = False,
    cache_bytes: int | None = None,
    options: StoreOptions | None = None,
) -> OpenStore:
    """Open a store, or a view of the snapshots below a prefix.

    Args:
        found: The place of the store, and the prefix.
        create: Make the store if there is none.
        asked: Whether the user named this very place as a store.
        chunk_size: For a new store, in bytes.
        codec: For a new store: how new chunks are stored.
        exclusive: Whether the user vouches that no other process writes to the store.
        config: The record of the store, if it was read already.
        ahead: Whether a use follows at once, so that a remote store looks for its newest root now.
        cache_bytes: How many bytes of chunks of remote stores this host keeps; 0 for none, None for
            the bound in the environment.
        options: How this process uses the store.

    Raises:
        NotAStoreError: There is no store, and ``create`` is False.
        MirrorError: The options name a mirror that this store cannot have.
        UnsupportedFormatError: A newer casnap made the store, or this machine is big-endian.
        StoreError: A store cannot be made at this place, or the cache is not to be used.
        ValueError: ``cache_bytes`` were given for a store on this machine.
    """
    backend = found.backend
    if sys.byteorder != "little":
        raise UnsupportedFormatError(
            f"{backend.uri} cannot be used on this machine: the bytes of tensors are "
            "little-endian, and this casnap does not swap them for a big-endian one"
        )
    room = room_for(backend, cache_bytes)
    backend.exclusive |= exclusive
    # If only the record of the store above is there, its making was cut off.
    may_make = create and (not found.name or (found.exists and not backend.is_remote))
    options = options or StoreOptions()
    new_objects = partial(Objects, backend, marks=options.markers)
    objects = new_objects(config=config) if config is not None else None
    made: Made | None = None
    if objects is None and backend.is_remote:
        objects = _at(backend, or_none=may_make, ahead=ahead, marks=options.markers)
    if objects is None and may_make:
        # If the store exists, this finishes a creation that was interrupted.
        made = create_store(backend, chunk_size=chunk_size, asked=asked, codec=codec)
        if made.is_new and backend.folder and (narrow := narrow_hint(backend.folder)):
            level = logging.INFO if asked else logging.WARNING
            _log.log(level, "%s is a store of its own now%s", backend.uri, narrow)
        objects = new_objects(config=made.config)
        if made.root is not None and backend.is_remote:
            objects.note_newest(made.root)
    elif objects is None and not found.exists:
        raise (
            only_marker_error(backend, "")
            or _no_name_error(backend)
            or (
                not_a_store_error(backend) if (at := backend.folder) is None else no_store_error(at)
            )
        )
    objects = objects or new_objects()
    if room is not None:
        objects.chunk_cache = room.of(objects.config, backend)
    is_new = made is not None and made.is_new
    mirror = None if options.mirror is None else _mirror_of(objects, found.name, options.mirror)
    return OpenStore(objects, found.name, options, mirror, is_new=is_new)


def _no_name_error(backend: Backend) -> NotAStoreError | None:
    """Return the error for a path right in the folder of a store that has no such name."""
    folder = backend.folder
    if folder is None or not exists(folder.parent / STORE_FOLDER / CONFIG_KEY):
        return None
    return NotAStoreError(
        f"{folder} is not a casnap store, and the store {folder.parent} has no snapshot "
        f"{folder.name!r}; `casnap ls {folder.parent}` lists those that it has"
        f"{narrow_hint(folder)}"
    )


def located(
    uri: str | os.PathLike[str] | Backend, storage_options: Mapping[str, Any] | None
) -> Location:
    """Return the store that a URI or a backend means, and the prefix in it."""
    if not isinstance(uri, Backend):
        return locate_store(uri, storage_options)
    if storage_options:
        raise ValueError("a backend knows how it is reached; give storage_options to its maker")
    # A backend without a store is noticed when the store's record is read.
    return Location(uri, "", True)


def open_or_make(
    found: Location, *, chunk_size: int, exclusive: bool, dry_run: bool
) -> OpenStore | None:
    """Open a store to copy to, or make it; return None for a dry run if there is none.

    Args:
        found: The place of the store, and the prefix.
        chunk_size: For a new store, in bytes.
        exclusive: Whether the user vouches that no other process writes to the store.
        dry_run: Whether nothing is to be made.

    Raises:
        StoreError: A store can neither be used nor made at this place.
    """
    try:
        return open_store(found, create=not dry_run, chunk_size=chunk_size, exclusive=exclusive)
    except NotAStoreError:
        if not dry_run:
            raise
        return None


def _at(backend: Backend, *, or_none: bool, ahead: bool, marks: bool) -> Objects | None:
    """Open a remote store; with ``ahead`` for a use that follows at once.

    Raises:
        NotAStoreError: There is no store, or its creation was cut off; unless ``or_none``.
    """
    try:
        return Objects.at(backend, ahead=ahead, marks=marks)
    except NotAStoreError:
        if or_none:
            return None
        if backend.is_object():
            raise object_error(backend.uri) from None
        raise
