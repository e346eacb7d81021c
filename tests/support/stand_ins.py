"""Modules in place of trainers that are not installed: so casnap's own side can be looked at."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from casnap.integrations import versions

TRAINERS = (
    "accelerate",
    "deepspeed",
    "lightning",
    "megatron",
    "pytorch_lightning",
    "torch_checkpointing",
    "torchtitan",
    "transformers",
)


class _Any(type):
    """A class whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name, cls.__module__)


def _named(name: str, module: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _Any(name, (), {"__module__": module, "__init__": lambda self, *_: None})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(name, self.__name__)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, missing: Sequence[str]) -> None:
        self._missing = missing

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = name.partition(".")[0] in self._missing
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def trainers_stood_in() -> Iterator[list[ModuleType]]:
    """Import the integrations of all trainers; a trainer that is not installed is stood in for.

    Afterwards these integrations count as not imported.
    """
    # What pytorch_lightning brings along, by a name of its own.
    names = (*TRAINERS, "lightning_fabric")
    missing = [name for name in names if find_spec(name) is None]
    finder, checks = _Finder(missing), (versions.check_version, versions.check_methods)
    versions.check_version = lambda *_: None
    versions.check_methods = lambda *_: None
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(f"casnap.integrations.{name}") for name in TRAINERS]
    finally:
        versions.check_version, versions.check_methods = checks
        sys.meta_path.remove(finder)
        for name in [*sys.modules]:
            if name.removeprefix("casnap.integrations.").partition(".")[0] in missing:
                del sys.modules[name]
