"""Names of :mod:`typing` that older versions of Python lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVar
    from typing_extensions import override as override
else:
    import typing

    T = typing.TypeVar("T")

    def override(method: T) -> T:
        """Mark a method that overrides a method of a base class, whose docstring applies."""
        return method

    def TypeVar(name: str, *, default: Any, **options: Any) -> typing.TypeVar:  # noqa: N802
        """Return a type variable without its default, which only type checkers need."""
        return typing.TypeVar(name, **options)
