"""Names and modules that are imported at their first use, since not every program needs them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def imported_later(package: dict[str, Any]) -> tuple[Callable[[str], Any], list[str]]:
    """Return a ``__getattr__`` (PEP 562) for a module. It imports each name at its first use.

    The module lists its names as imports ``from ... import X as X`` below ``if TYPE_CHECKING:``.
    Type checkers read these imports; Python does not run them. This function parses the source of
    the module to learn from which module each name comes.

    Args:
        package: The globals of the module. Each name that is imported is added to them.

    Returns:
        The ``__getattr__`` function, and the sorted list of the names.

    Raises:
        ImportError: The source of the module is missing; only its compiled code is installed.
    """
    name = package["__name__"]
    if (text := package["__loader__"].get_source(name)) is None:
        raise ImportError(f"the .py file of {name} is missing: casnap needs its sources", name=name)
    modules = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(modules[name]), name)
        return value

    return get, sorted(modules)


class ModuleLater(ModuleType):
    """A module that is imported at the first use of one of its names.

    Signatures can name a class as ``module.Class``, with a ``ModuleLater`` as the module. Then
    ``typing.get_type_hints`` finds the class. It would not find a name that is imported only for
    type checkers.
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
