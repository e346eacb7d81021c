"""Names of :mod:`typing` that only newer versions of Python have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVar
    from typing_extensions import override as override
else:
    import typing

    T = typing.TypeVar("T")

    def override(method: T) -> T:
        """Mark a method of a base class that this class implements; the base class documents it."""
        return method

    def TypeVar(name: str, *, default: Any, **options: Any) -> typing.TypeVar:  # noqa: N802
        """Return a type variable; only type checkers know defaults."""
        return typing.TypeVar(name, **options)
