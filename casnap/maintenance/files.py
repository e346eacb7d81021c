"""The files that a store has, whether its newest root names them or not."""

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
    """The packs and segments that were there when it was made.

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
                # Only what bears a name of ours is ever deleted.
                if ident is not None and pack_key(ident) == f"packs/{folder}/{name}":
                    self.packs.add(ident)
        names = map(id_from_name, backend.names("index"))
        self.segments = {ident for ident in names if ident is not None}
        self.time_of = cache(self._time_of)

    def unnamed(self, view: View) -> dict[str, bytes]:
        """Return what the root of a view does not name: the keys, and the ids that they have."""
        packs = {pack_key(ident): ident for ident in view.packs.lacking(map(PackId, self.packs))}
        return packs | {segment_key(i): i for i in self.segments - view.segments.keys()}

    def size_of(self, keys: Iterable[str]) -> int:
        """Return the bytes of some files; those that are gone take none."""
        return sum(map(self._size, keys))

    def _size(self, key: str) -> int:
        try:
            return self._backend.size(key)
        except FileNotFoundError:
            return 0

    def delete(
        self, files: dict[str, bytes], progress: Progress
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Delete some files, several at a time.

        Returns:
            The bytes of each that is gone; and why each that is not may not be deleted, which is
            so of the files of others in a sticky folder.
        """
        todo = list(files)
        sizes: dict[str, int] = {}
        refused: dict[str, str] = {}
        lock = threading.Lock()

        def work() -> None:
            for key in source:
                size = self._size(key)
                why = _refusal(self._backend, key)
                with lock:
                    if why is None:
                        sizes[key] = size
                    else:
                        refused[key] = why
                    progress("deleting", len(sizes) + len(refused), len(todo))

        with Crew() as crew:
            source = Shared(todo, crew)
            crew.run(work, min(_DELETERS, len(todo)))
        # To try again what was refused is for the next collection.
        self.packs.difference_update(files.values())
        self.segments.difference_update(files.values())
        return sizes, refused

    def _time_of(self, seq: int) -> float | None:
        try:
            return read_root(self._backend, seq).time
        except (FileNotFoundError, DamagedError, BackendError):
            return None

    def age_of(self, seq: int, newest: Root) -> float:
        """Return how long ago a root was put, in seconds, by its clock and ours.

        Args:
            seq: Its number. If it cannot be read, which is history and harms nothing, the next
                one counts: that it seems younger costs patience alone.
            newest: The newest root.
        """
        for number in range(seq, newest.seq):
            put_at = self.time_of(number)
            if put_at is not None:
                return time.time() - put_at
        return time.time() - newest.time


def _refusal(backend: Backend, key: str) -> str | None:
    """Delete a file, or return why that is not allowed."""
    try:
        backend.delete(key)
    except BackendError as e:
        if not isinstance(e.__cause__, PermissionError):
            raise
        return str(e)
    return None
