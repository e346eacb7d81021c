"""Holding back what a store writes, so that a test decides when a take goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from casnap import Store


class Gate:
    """Holds a store's writes back until it is opened, or makes them fail."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, store: Store, error: Exception | None = None
    ) -> None:
        self.open = threading.Event()
        backend = store.objects.backend
        through = backend.write

        def write(key: str, content: Any) -> Any:
            assert self.open.wait(60)
            if error is not None:
                raise error
            return through(key, content)

        monkeypatch.setattr(backend, "write", write)
