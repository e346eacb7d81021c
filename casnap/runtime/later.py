"""Names and modules that are imported at their first use, since not every program needs them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def imported_later(package: dict[str, Any]) -> tuple[Callable[[str], Any], list[str]]:
    """Return a ``__getattr__`` (PEP 562) for a module, which imports names at their first use.

    The names stand once, in the imports of the module: each ``from ... import X as X`` passes ``X``
    on, as type checkers read it. Those ``if TYPE_CHECKING:`` are never run, so here the text of the
    module tells where each name comes from.

    Args:
        package: The globals of the module that calls this. They keep what is imported.

    Returns:
        The function, and all names that the module passes on.

    Raises:
        ImportError: There is compiled code alone.
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
