"""The packs and segments in a store, whether or not its newest root names them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import cache

from casnap.backends.base import Backend
from casnap.errors import BackendError, DamagedError
from casnap.format.records import PackId, Root, id_from_name, pack_key, segment_key
from casnap.runtime.progress import Progress
from casnap.runtime.threads import Crew, Shared
from casnap.storage.index import View
from casnap.storage.roots import read_root

_DELETERS = 4


def base_of(ident: bytes) -> int:
    """Return the number of the root that a pack or segment was written under."""
    return int.from_bytes(ident[:6], "big")


class StoredFiles:
    """The packs and segments that the store had when this object was created.

    Args:
        backend: Where the store lives.

    Attributes:
        packs: The ids of the packs.
        segments: The ids of the segments.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.packs: set[bytes] = set()
        for folder in backend.names("packs"):
            for name in backend.names(f"packs/{folder}"):
                ident = id_from_name(name)
                # casnap deletes only files whose names match its own grammar.
                if ident is not None and pack_key(ident) == f"packs/{folder}/{name}":
                    self.packs.add(ident)
        names = map(id_from_name, backend.names("index"))
        self.segments = {ident for ident in names if ident is not None}
        self.time_of = cache(self._time_of)

    def unnamed(self, view: View) -> dict[str, bytes]:
        """Return the keys and ids of the files that the root of a view does not name."""
        packs = {pack_key(ident): ident for ident in view.packs.lacking(map(PackId, self.packs))}
        return packs | {segment_key(i): i for i in self.segments - view.segments.keys()}

    def size_of(self, keys: Iterable[str]) -> int:
        """Return the bytes of some files; a file that is gone counts as 0."""
        return sum(self._backend.size_if_there(key) or 0 for key in keys)

    def delete(
        self, files: dict[str, bytes], progress: Progress
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Delete some files, several at a time.

        Returns:
            The bytes of each deleted file; and the reason for each file that this user may not
            delete, such as another user's file in a sticky folder.
        """
        todo = list(files)
        sizes: dict[str, int] = {}
        refused: dict[str, str] = {}
        lock = threading.Lock()

        def work() -> None:
            for key in source:
                size = self._backend.size_if_there(key) or 0
                why = _delete(self._backend, key)
                with lock:
                    if why is None:
                        sizes[key] = size
                    else:
                        refused[key] = why
                    progress("deleting", len(sizes) + len(refused), len(todo))

        with Crew() as crew:
            source = Shared(todo, crew)
            crew.run(work, min(_DELETERS, len(todo)))
        # The next collection tries the refused files again.
        self.packs.difference_update(files.values())
        self.segments.difference_update(files.values())
        return sizes, refused

    def _time_of(self, seq: int) -> float | None:
        try:
            return read_root(self._backend, seq).time
        except (FileNotFoundError, DamagedError, BackendError):
            return None

    def age_of(self, seq: int, newest: Root) -> float:
        """Return the age of a root in seconds: this host's time less the time in the root.

        Args:
            seq: Its number. If that root cannot be read, the next one counts instead. The age is
                then too low, so the collector only waits longer.
            newest: The newest root.
        """
        for number in range(seq, newest.seq):
            put_at = self.time_of(number)
            if put_at is not None:
                return time.time() - put_at
        return time.time() - newest.time


def _delete(backend: Backend, key: str) -> str | None:
    """Delete a file; return None, or why this user may not delete it."""
    try:
        backend.delete(key)
    except BackendError as e:
        if not isinstance(e.__cause__, PermissionError):
            raise
        return str(e)
    return None
