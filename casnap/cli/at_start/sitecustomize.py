"""Each Python below ``casnap run`` runs this at its start, since ``PYTHONPATH`` has this folder.

Once a program imports the Trainer of Transformers, casnap is installed into the Trainer. Until then
nothing of casnap is imported. If this file hides another ``sitecustomize``, that one is run too.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_TRAINER = "transformers.trainer"
_GUEST = "casnap.integrations.transformers"
_VARIABLE = "CASNAP_RUN"
"""The environment variable by which the processes of ``casnap run`` learn if one has trained.

It holds the process id of the command. If the command is a Python process, that process replaces
the id by the path of a new file. The first Trainer that trains deletes the file.
"""
_SETTINGS = "CASNAP_RUN_SETTINGS"
"""The environment variable with the settings of ``casnap run``, as JSON; unset without any."""
_HERE = str(Path(__file__).parent)


class _Finder:
    """Finds two modules as usual, and calls a function once one of them is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        call = {_TRAINER: _import_guest, _GUEST: _install}.get(name)
        spec = PathFinder.find_spec(name, path, target) if call is not None else None
        if call is not None and spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                call(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _import_guest(_: ModuleType) -> None:
    try:
        # If the program imports it first, it imports the Trainer, and is ready only after that.
        import_module(_GUEST)
    except ModuleNotFoundError as e:
        if e.name != "casnap":
            raise
        raise ImportError(
            f"casnap run: {sys.executable} has no casnap: install it there, beside transformers"
        ) from e


def _install(guest: ModuleType) -> None:
    import json

    guest.install(_tell, **json.loads(os.environ.get(_SETTINGS, "{}")))


def _tell(text: str) -> None:
    sys.stderr.write(f"casnap run: {text}\n")
    file = Path(os.environ.get(_VARIABLE, ""))
    # If the command is no Python, such as a shell, the variable still holds the process id.
    if file.is_absolute():
        file.unlink(missing_ok=True)


def _watch() -> None:
    """At the end of the command, print a message if no Trainer has trained."""
    descriptor, file = tempfile.mkstemp(prefix="casnap-run-")
    os.close(descriptor)
    process, os.environ[_VARIABLE] = os.environ[_VARIABLE], file

    def say() -> None:
        with suppress(FileNotFoundError):
            if str(os.getpid()) == process:
                Path(file).unlink()
                _tell("no Trainer of Transformers has trained, so nothing was saved by casnap")

    atexit.register(say)


def _run_hidden() -> None:
    spec = PathFinder.find_spec(
        __name__, [p for p in sys.path if Path(p).absolute() != Path(_HERE)]
    )
    if spec is not None and spec.loader is not None:
        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder())
if os.environ.get(_VARIABLE) == str(os.getpid()):
    _watch()
_run_hidden()
