"""Objects in this process's memory: ``memory://name``, for tests and try-outs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from casnap.backends.base import MAX_WHOLE_BYTES, Backend, Target
from casnap.format.records import check_length
from casnap.runtime.fork import new_lock
from casnap.runtime.typing import override

_stores: dict[str, dict[str, bytes]] = {}
_lock = new_lock()
# Part of the identity. A forked child has the same number, since it inherits the objects.
_process = os.urandom(16).hex()


class MemoryBackend(Backend):
    """Objects in a dict of this process. They are gone when the process ends."""

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        with _lock:
            self._objects = _stores.setdefault(name, {})

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Refuse to be pickled: another process would get a copy of the objects."""
        raise TypeError(f"{self.uri} lives in the memory of this process; no other can open it")

    @override
    @property
    def identity(self) -> str:
        """The name of the place, and a number that stands for this process."""
        return f"{self.uri} {_process}"

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        self._objects[key] = bytes(content)

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        with _lock:
            if key in self._objects:
                return False
            self._objects[key] = content
            return True

    @override
    def sync(self, *keys: str) -> None:
        """Do nothing: memory needs no sync."""

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        content = self._content(key)
        check_length(f"{self.uri}/{key}", len(content), most)
        return content

    def _content(self, key: str) -> bytes:
        try:
            return self._objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        content, lengths = self._content(key), []
        for offset, target in targets:
            part = content[offset : offset + len(target)]
            target[: len(part)] = part
            lengths.append(len(part))
        return lengths

    @override
    def size(self, key: str) -> int:
        return len(self._content(key))

    @override
    def names(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        with _lock:
            keys = list(self._objects)
        return list({k[len(prefix) :].split("/")[0] for k in keys if k.startswith(prefix)})

    @override
    def copy(self, key: str, to: str) -> None:
        self._objects[to] = self._content(key)

    @override
    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        prefix = f"{folder}/" if folder else ""
        with _lock:
            objects = list(self._objects.items())
        return {key: len(content) for key, content in objects if key.startswith(prefix)}
