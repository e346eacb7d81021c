"""Names and modules that are imported when they are asked for: not every program needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def imported_later(package: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` (PEP 562) of a package that imports some names at first use.

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


class ModuleLater(ModuleType):
    """A module that is imported when one of its names is asked for.

    Signatures name classes by it, so that ``typing.get_type_hints`` finds what it would not find
    among names that only type checkers import.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Whoever looks at an object, whatever it is, asks for such a name.
            raise AttributeError(name)
        module = import_module(self.__name__)
        try:
            return getattr(module, name)
        except AttributeError:
            return import_module(f"{self.__name__}.{name}")
