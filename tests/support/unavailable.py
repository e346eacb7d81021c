"""Errors of places that are unavailable, by their reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from casnap.errors import Reason, StoreError, UnavailableError

EXHAUSTED = partial(UnavailableError, reason="exhausted")
UNREACHABLE = partial(UnavailableError, reason="unreachable")


def unavailable(reason: Reason | None, match: str | None = None) -> Any:
    """Return a ``with`` block that has to raise an UnavailableError for a reason.

    Without a reason, it has to raise another StoreError.
    """

    def check(error: StoreError) -> bool:
        return getattr(error, "reason", None) == reason

    return pytest.raises(StoreError, match=match, check=check)
