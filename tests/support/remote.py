"""A remote backend in memory, which counts requests as an object store would bill them.

::

    backend = RemoteDouble("a-store")       # another one of this name sees the same objects
    Store(backend).take(state, "a")
    assert backend.requests["put"] == 4
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from casnap.backends.base import MAX_WHOLE_BYTES, Target
from casnap.backends.memory import MemoryBackend
from casnap.errors import PlaceError
from casnap.runtime.typing import override

PAGE_KEYS = BATCH_KEYS = 1000
MOST_BYTES = 48 << 20
_GAP = 64 << 10
# The keys in each folder of each store: of a million, most listings are of few.
_folders: dict[str, dict[str, set[str]]] = {}


class RemoteDouble(MemoryBackend):
    """Objects in memory behind requests that are counted.

    Args:
        name: Its name; the objects are shared with all others of this name.

    Attributes:
        log: Each request: its kind, and the key or folder.
        read_bytes: How many bytes were read.
        latency: How many seconds each read, listing and copy takes.
        most_at_once: The most of them that ran at the same time.
        trips: How often one of them began while no other one ran.
    """

    costly_requests = True
    in_flight = 16
    has_page_cache = False
    needs_probe = True
    max_chunk_bytes = 32 << 20

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.uri = f"double://{name.strip('/')}"
        self._folders = _folders.setdefault(name, {})
        self.log: list[tuple[str, str]] = []
        self.read_bytes = 0
        self.latency = 0.0
        self.most_at_once = 0
        self.trips = 0
        self._running = 0
        self._counts: Counter[str] = Counter()
        self._count_lock = threading.Lock()

    @override
    @property
    def received_bytes(self) -> int:
        return self.read_bytes

    @override
    @property
    def requests(self) -> Mapping[str, int]:
        return Counter(self._counts)

    @property
    def count(self) -> int:
        """How many requests were made."""
        return sum(self._counts.values())

    def reset(self) -> None:
        """Begin to count anew."""
        self._counts.clear()
        self.log.clear()
        self.read_bytes = 0

    def _note(self, kind: str, key: str, requests: int = 1) -> None:
        with self._count_lock:
            self._counts[kind] += requests
            self.log += [(kind, key)] * requests

    @contextmanager
    def _taking_time(self) -> Iterator[None]:
        with self._count_lock:
            self.trips += not self._running
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            if self.latency:
                time.sleep(self.latency)
            yield
        finally:
            with self._count_lock:
                self._running -= 1

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        assert len(content) <= MOST_BYTES, f"{key} has {len(content):,} bytes"
        self._note("put", key)
        super().write(key, content)
        self._keep(key)

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        self._note("put", key)
        is_new = super().put_if_absent(key, content)
        self._keep(key)
        return is_new

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        self._note("get", key)
        with self._taking_time():
            content = super().read(key, most)
        self.read_bytes += len(content)
        return content

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        ranges = sorted((offset, offset + len(target)) for offset, target in targets)
        stops = [stop for _, stop in ranges]
        gaps = sum(b[0] - stop > _GAP for stop, b in zip(stops, ranges[1:], strict=False))
        self._note("get", key, 1 + gaps)
        with self._taking_time():
            content, lengths = MemoryBackend.read(self, key), []
        for offset, target in targets:
            part = content[offset : offset + len(target)]
            target[: len(part)] = part
            lengths.append(len(part))
        self.read_bytes += sum(lengths)
        return lengths

    @override
    def size(self, key: str) -> int:
        self._note("head", key)
        return len(MemoryBackend.read(self, key))

    def _below(self, folder: str) -> list[str]:
        """Return a folder, and those below it, that hold objects."""
        prefix = f"{folder}/" if folder else ""
        folders = [f for f, keys in list(self._folders.items()) if keys]
        return [f for f in folders if f == folder or f.startswith(prefix)]

    def _keep(self, key: str) -> None:
        self._folders.setdefault(key.rpartition("/")[0], set()).add(key)

    def _drop(self, key: str) -> None:
        self._folders.get(key.rpartition("/")[0], set()).discard(key)

    @override
    def names(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        below = {f[len(prefix) :].split("/")[0] for f in self._below(folder) if f != folder}
        own = {key[len(prefix) :] for key in list(self._folders.get(folder, ()))}
        names = list(own | (below - {""}))
        self._note("list", folder, max(1, -(-len(names) // PAGE_KEYS)))
        with self._taking_time():
            return names

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        keys = [key for below in self._below(folder) for key in list(self._folders[below])]
        # One may be deleted meanwhile.
        contents = [(key, self._objects.get(key)) for key in keys]
        found = {key: len(content) for key, content in contents if content is not None}
        self._note("list", folder, max(1, -(-len(found) // PAGE_KEYS)))
        with self._taking_time():
            return found

    @override
    def copy(self, key: str, to: str) -> None:
        self._note("copy", key)
        with self._taking_time():
            MemoryBackend.write(self, to, MemoryBackend.read(self, key))
        self._keep(to)

    @override
    def delete(self, key: str) -> None:
        self._note("delete", key)
        super().delete(key)
        self._drop(key)

    @override
    def delete_all(self, keys: Iterable[str]) -> dict[str, PlaceError]:
        todo = list(keys)
        self._note("delete", f"{len(todo)} keys", -(-len(todo) // BATCH_KEYS))
        for key in todo:
            MemoryBackend.delete(self, key)
            self._drop(key)
        return {}

    @override
    def mark(self, key: str, content: bytes | None) -> None:
        self._note("put" if content is not None else "delete", key)
