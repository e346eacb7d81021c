"""A folder that counts as a remote place, for the processes of a world: each call is noted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import TypeVar

from casnap.backends.base import MAX_WHOLE_BYTES, Backend, Target
from casnap.backends.local.backend import LocalBackend
from casnap.runtime.typing import override
from tests.support.remote import PAGE_KEYS

L = TypeVar("L", bound=Sized)


class FarFolder(LocalBackend):
    """A folder that says that it is remote.

    Attributes:
        log: Each request of this process: its kind, and the key or folder.
    """

    costly_requests = True
    in_flight = 4
    has_page_cache = syncs_folders = False
    needs_probe = True
    keeps_copies = False

    def __init__(self, folder: Path | str) -> None:
        super().__init__(Path(folder))
        self.log: list[tuple[str, str]] = []
        self._noting = threading.Lock()

    @override
    def belong(self, check: Callable[[Backend], None]) -> None:
        """Do nothing: a remote place does not come to hold another store all at once."""

    def _note(self, kind: str, key: str) -> None:
        with self._noting:
            self.log.append((kind, key))

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        self._note("put", key)
        super().write(key, content)

    @override
    def put_if_absent(self, key: str, content: bytes) -> bool:
        self._note("put", key)
        return super().put_if_absent(key, content)

    @override
    def read(self, key: str, most: int = MAX_WHOLE_BYTES) -> bytes:
        self._note("get", key)
        return super().read(key, most)

    @override
    def read_into(self, key: str, targets: Sequence[Target]) -> list[int]:
        self._note("get", key)
        return super().read_into(key, targets)

    @override
    def size(self, key: str) -> int:
        self._note("head", key)
        return super().size(key)

    @override
    def names(self, folder: str) -> list[str]:
        return self._listed(folder, super().names(folder))

    @override
    def sizes(self, folder: str) -> dict[str, int]:
        return self._listed(folder, LocalBackend(self.folder).sizes(folder))

    def _listed(self, folder: str, found: L) -> L:
        for _ in range(max(1, -(-len(found) // PAGE_KEYS))):
            self._note("list", folder)
        return found
