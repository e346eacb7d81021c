"""Holding back what a store writes, so that a test decides when a take goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from casnap import Store


class Gate:
    """Holds a store's writes back until it is opened; then some of them may fail.

    Attributes:
        open: Is set to let writes go on.
        errors: What the next writes fail with, one by one.
    """

    def __init__(self, store: Store, errors: Iterable[Exception] = ()) -> None:
        self.open, self.errors = threading.Event(), iter(errors)
        backend = store._view.repository.backend
        through = backend.write

        def write(key: str, content: Any) -> Any:
            assert self.open.wait(60)
            for error in self.errors:
                raise error
            return through(key, content)

        backend.write = write  # type: ignore[method-assign]
