"""Names and modules that are imported at their first use, since not every program needs them."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def imported_later(package: dict[str, Any]) -> tuple[Callable[[str], Any], list[str]]:
    """Return a ``__getattr__`` (PEP 562) for a module, which imports names at their first use.

    The names are written once: in the imports that the module makes ``if TYPE_CHECKING:``. These
    are for readers and type checkers, and are never run. Here their code tells which module has
    each name.

    Args:
        package: The globals of the module that calls this, below these imports. They keep what is
            imported.

    Returns:
        The function, and the names.
    """
    modules: dict[str, str] = {}
    module, is_imported = "", False
    for each in dis.get_instructions(sys._getframe(1).f_code):
        if each.opname == "IMPORT_NAME":
            module = each.argval
        elif each.opname == "STORE_NAME" and is_imported and each.argval not in package:
            modules[each.argval] = module
        is_imported = each.opname == "IMPORT_FROM"

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
