"""Names and modules that are imported at their first use, since not every program needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def imported_later(package: dict[str, Any], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` (PEP 562) for a package, which imports names at their first use.

    Args:
        package: The globals of the package, which keep the imported names.
        modules: The name → the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(modules[name]), name)
        return value

    return get


class ModuleLater(ModuleType):
    """A module that is imported at the first use of one of its names.

    Signatures name classes by such a module. So ``typing.get_type_hints`` finds these classes; it
    would not find a name that only type checkers import.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # Tools that inspect any object ask for such names, and must not import the module.
            raise AttributeError(name)
        module = import_module(self.__name__)
        try:
            return getattr(module, name)
        except AttributeError:
            return import_module(f"{self.__name__}.{name}")
