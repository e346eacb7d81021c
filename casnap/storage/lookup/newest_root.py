"""The newest root of a store, which says what the store holds.

On a disk, each look reads the root from the store. On a remote store, the root is remembered: this
process knows when it saw the root, and this host keeps a note of the root, so that opening a store
needs no listing. The note has the root's number and commit id. Roots are never removed, and commit
ids are random. So a look reads the root of the noted number. If this root has the noted commit id,
the place still has the same store, and the newest root is this one or a later one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec

from casnap.backends.base import Backend
from casnap.backends.local_files import gone_error
from casnap.errors import BackendError, DamagedError, NotAStoreError
from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.records import CONFIG_KEY, Root, StoreConfig, encode
from casnap.runtime.typing import override
from casnap.storage.commit_log.config import config_in, read_config
from casnap.storage.commit_log.roots import last_listed, newest_root, read_root, root_and_next
from casnap.storage.commit_log.same_store import check_same_store, id_in
from casnap.storage.lookup.index_cache import IndexCache, open_cache

V = TypeVar("V")

# How many times to read from newer roots, after a collector has changed the store.
_TRIES = 10
_NOTE = b"last root"


class NewestRoot:
    """The newest root of a store on a disk.

    Creating this object tells the backend which store is at the place. From then on the backend
    refuses changes if another store has taken this place.

    Args:
        backend: The backend of the place.
        config: The store's ``casnap.json``.
    """

    def __init__(self, backend: Backend, config: StoreConfig) -> None:
        self._backend = backend
        self._config = config
        self._known: Root | None = None
        backend.belong(partial(check_same_store, store_id=config.store_id))

    def look(self) -> Root:
        """Return the newest root.

        Raises:
            StoreError: Another store has taken this place, or the store is gone.
        """
        root = self._look(stands=False)
        self.note(root)
        return root

    def _look(self, *, stands: bool) -> Root:
        try:
            root = newest_root(self._backend, self._known, stands=stands)
        except NotAStoreError as e:
            # The record was there when the store was opened.
            if self._backend.size_if_there(CONFIG_KEY) is None:
                raise gone_error(self._backend.uri) from e
            raise
        if root is not self._known and id_in(root) not in (None, self._config.store_id):
            check_same_store(self._backend, self._config.store_id)
        return root

    def recent(self) -> Root:
        """Return the newest root.

        On a remote store, it may have been the newest some seconds ago.
        """
        return self.look()

    def note(self, root: Root) -> None:
        """Note a root that this process has just read or put, and which is the newest one."""
        self._known = root

    def observe(self, root: Root) -> None:
        """Note a root that another rank has just read.

        If this process knows a newer one, do nothing.
        """
        if self._known is None or root.seq >= self._known.seq:
            self.note(root)

    def read(self, read: Callable[[Root], V], first_root: Callable[[], Root] | None = None) -> V:
        """Read from the newest root.

        If a collector moves data meanwhile, read again from a newer root.

        Args:
            read: Reads from the store, given a root.
            first_root: Returns the root to begin with; by default the newest.

        Returns:
            The result of ``read``.

        Raises:
            DamagedError: The read failed, though no collector moved data: the store is damaged.
        """
        for attempt in count(1):
            root = (first_root or self.look)() if attempt == 1 else self.look()
            try:
                return read(root)
            except DamagedError:
                newer = self.look()
                # If segments were only added, no collector has moved anything.
                if attempt == _TRIES or set(root.segments) <= set(newer.segments):
                    raise
        raise AssertionError


class RememberedRoot(NewestRoot):
    """The newest root of a remote store. It is read from the store only when that is needed."""

    def __init__(self, backend: Backend, config: StoreConfig) -> None:
        super().__init__(backend, config)
        # When the root was last read or put, and when it was last the newest, by `time.monotonic`.
        self._seen_at = self._newest_at = -math.inf
        self._looked_ahead = False
        # Number and commit of the root that this process has noted for this host.
        self._kept: tuple[int, bytes] | None = None

    @classmethod
    def at(cls, backend: Backend, *, look_ahead: bool) -> tuple[StoreConfig, RememberedRoot]:
        """Return ``casnap.json`` of a store, and its newest root.

        If this host knows the store, this takes one round trip.

        Args:
            backend: The backend of the place.
            look_ahead: Whether to read the newest root now. Otherwise its first use reads it.

        Raises:
            NotAStoreError: There is no store, or its creation was cut off.
        """
        known = _known_to_host(backend, look_ahead=look_ahead)
        if known is None:
            root = _try(newest_root if look_ahead else last_listed, backend)
            copy = config_in(root) if isinstance(root, Root) else None
            config = copy or read_config(backend)
        else:
            config, root = known
        if isinstance(root, NotAStoreError):
            raise root
        newest = cls(backend, config)
        # The first use reports a damaged root.
        if isinstance(root, Root):
            newest.note(root)
            newest._looked_ahead = look_ahead
            if known is not None and not look_ahead:
                # This host may have looked long ago.
                newest._newest_at = -math.inf
        return config, newest

    @override
    def look(self) -> Root:
        # Roots are never removed, so a known root is not read again each time. It is read now and
        # then, since the store may have been rolled back.
        known, looked_ahead = self._known, self._looked_ahead
        self._looked_ahead = False
        if (
            known is not None
            and looked_ahead
            and _is_within(self._backend.costs.recent, self._newest_at)
        ):
            return known
        stands = _is_within(self._backend.costs.stands, self._seen_at)
        root = self._look(stands=stands)
        if root is not known or not stands:
            self.note(root)
        self._newest_at = time.monotonic()
        return root

    @override
    def recent(self) -> Root:
        if self._known is None or not _is_within(self._backend.costs.recent, self._newest_at):
            return self.look()
        self._looked_ahead = False
        return self._known

    @override
    def note(self, root: Root) -> None:
        super().note(root)
        self._looked_ahead = False
        self._seen_at = self._newest_at = time.monotonic()
        if self._kept != (root.seq, root.commit):
            self._kept = (root.seq, root.commit)
            note = _RootNote(self._config, root.seq, root.commit)
            _host_notes(self._backend).keep_notes({_NOTE: encode(note)})


class _RootNote(msgspec.Struct, array_like=True):
    config: StoreConfig
    seq: int
    commit: bytes


def _host_notes(backend: Backend) -> IndexCache:
    # Not the cache of the store: its name contains the store's id, which is not known yet.
    name = digest_of(os.fsencode(backend.identity)).hex()[:32]
    return open_cache(name, backend.uri)


def _known_to_host(backend: Backend, *, look_ahead: bool) -> tuple[StoreConfig, Root] | None:
    """Return ``casnap.json`` of the store, and the root that a note on this host names.

    Args:
        backend: The backend of the place.
        look_ahead: Whether to return the newest root, instead of the one in the note.

    Returns:
        The record and the root; None if this host has no note of the place, or the root in the note
        no longer exists.
    """
    try:
        note = decoder(_RootNote).decode(_host_notes(backend).note(_NOTE) or b"")
        if look_ahead:
            root, newer = root_and_next(backend, note.seq)
        else:
            root, newer = read_root(backend, note.seq), None
    except (msgspec.DecodeError, FileNotFoundError, DamagedError, BackendError):
        return None
    if root.commit != note.commit:
        return None
    return note.config, root if newer is None else newest_root(backend, newer, stands=True)


def _is_within(seconds: float, since: float) -> bool:
    return time.monotonic() - since < seconds


def _try(look: Callable[[Backend], Root], backend: Backend) -> Root | NotAStoreError | DamagedError:
    """Call ``look`` for a root; return the root, or the error if it is missing or damaged."""
    try:
        return look(backend)
    except (NotAStoreError, DamagedError) as e:
        return e
