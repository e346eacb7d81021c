"""Names of a package that are imported when they are asked for, as PEP 562 lets a module do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def imported_later(package: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package some of whose names are imported at first use.

    Args:
        package: Its globals, which keep what was imported.
        modules: The module of each such name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(modules[name]), name)
        return value

    return get
