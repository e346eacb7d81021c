"""Objects in this process's memory: ``memory://name``, for tests and try-outs."""

from __future__ import annotations

import os
import threading

from casnap.backends.base import Backend

_stores: dict[str, dict[str, bytes]] = {}
_lock = threading.Lock()
# Of this process, and of its forks, which have inherited what it holds.
_process = os.urandom(16).hex()


class MemoryBackend(Backend):
    """Objects in a dict that lives as long as the process."""

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        with _lock:
            self._objects = _stores.setdefault(name, {})

    @property
    def identity(self) -> str:
        """The name, in this process."""
        return f"{self.uri} {_process}"

    def write(self, key: str, content: memoryview | bytes) -> None:
        """Keep a copy."""
        self._objects[key] = bytes(content)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Keep the content unless the key is taken."""
        with _lock:
            if key in self._objects:
                return False
            self._objects[key] = content
            return True

    def sync(self, *keys: str) -> None:
        """Do nothing: memory is as durable as it gets."""

    def read(self, key: str) -> bytes:
        """Return a whole object."""
        try:
            return self._objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None

    def read_into(self, key: str, offset: int, target: memoryview, *, bulk: bool = False) -> int:
        """Copy a run of an object."""
        part = self.read(key)[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def size(self, key: str) -> int:
        """Return an object's length."""
        return len(self.read(key))

    def names(self, folder: str) -> list[str]:
        """Return the names right below a folder."""
        prefix = f"{folder}/" if folder else ""
        with _lock:
            keys = list(self._objects)
        return list({k[len(prefix) :].split("/")[0] for k in keys if k.startswith(prefix)})

    def copy(self, key: str, to: str) -> None:
        """Keep an object under another key too."""
        self._objects[to] = self.read(key)

    def delete(self, key: str) -> None:
        """Forget an object."""
        self._objects.pop(key, None)
