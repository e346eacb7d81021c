"""The newest root that this host saw at a remote place, so that opening lists nothing.

Roots are never removed, and a commit id is random. So if the root of that number still has that
commit id, the same store lies at the place, and no older root is the newest one.
"""

from __future__ import annotations

import os

import msgspec

from casnap.backends.base import Backend
from casnap.errors import BackendError, DamagedError, UnavailableError
from casnap.format.decoding import decoder
from casnap.format.digest import digest_of
from casnap.format.records import Root, StoreConfig, encode
from casnap.storage.log.roots import newest_root, read_root, root_and_next
from casnap.storage.lookup.index_cache import IndexCache, open_cache

_NOTE = b"last root"


class _Note(msgspec.Struct, array_like=True):
    config: StoreConfig
    seq: int
    commit: bytes


class RememberedRoot:
    """The root that this host saw last at one place, of any store there.

    Args:
        backend: The place.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept: tuple[int, bytes] | None = None

    @property
    def _cache(self) -> IndexCache:
        # Not the cache of the store: its name has the store's id, which is not known yet.
        name = digest_of(os.fsencode(self._backend.identity)).hex()[:32]
        return open_cache(name, self._backend.uri)

    def look(self, *, look_ahead: bool) -> tuple[StoreConfig, Root] | None:
        """Return the record of the store and the root seen last, if that root still stands.

        Args:
            look_ahead: Return the newest root instead.
        """
        try:
            note = decoder(_Note).decode(self._cache.note(_NOTE) or b"")
            if look_ahead:
                root, newer = root_and_next(self._backend, note.seq)
            else:
                root, newer = read_root(self._backend, note.seq), None
        except UnavailableError:
            raise
        except (msgspec.DecodeError, FileNotFoundError, DamagedError, BackendError):
            return None
        if root.commit != note.commit:
            return None
        self._kept = (note.seq, note.commit)
        if newer is not None:
            root = newest_root(self._backend, newer, stands=True)
        return note.config, root

    def keep(self, config: StoreConfig, root: Root) -> None:
        """Note the newest root, for later processes of this host."""
        if self._backend.costly_requests and self._kept != (root.seq, root.commit):
            self._kept = (root.seq, root.commit)
            self._cache.keep_notes({_NOTE: encode(_Note(config, root.seq, root.commit))})
