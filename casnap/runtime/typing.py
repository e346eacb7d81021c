"""Names of :mod:`typing` that only newer versions of Python have."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import override as override
else:

    def override(method: T) -> T:
        """Mark a method of a base class that this class implements; the base class documents it."""
        return method
