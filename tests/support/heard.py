"""What casnap warns of on a rank, where pytest's ``caplog`` does not reach.

::

    with warnings_heard() as texts:
        store.try_take(state, "step_1")
    assert "NOT stored" in texts[0]
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """Give the list of the warnings that are logged within the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("casnap").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("casnap").removeHandler(handler)
