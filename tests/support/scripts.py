"""Scripts that start Python in processes of their own, where none of them imports torch again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.ranks import PRELOADED
from tests.support.warm import run_and_end, run_python

_CODE = """
import runpy, subprocess, sys
from tests.support.scripts import ForkedPython

subprocess.Popen = ForkedPython
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(
    script: Path, *arguments: object, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python script arguments``; each Python that it starts is a fork, too."""
    return run_python(_CODE, script, *arguments, modules=PRELOADED, timeout=timeout)


class ForkedPython(subprocess.Popen[Any]):
    """A process that runs Python: a fork of this one, in all else what ``Popen`` starts."""

    def _execute_child(self, args: Sequence[object], *more: Any) -> None:
        """Fork. ``Popen`` passes much, in an order of its own: the environment, the pipes' ends."""
        assert args[0] == sys.executable
        environment, files = more[5], more[9:15]
        sys.stdout.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            for number, file in enumerate((files[0], files[3], files[5])):
                if file != -1:
                    os.dup2(file, number)
            run_and_end(partial(_run, [str(arg) for arg in args[1:]], environment))
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def _run(command: list[str], environment: dict[str, str] | None) -> None:
    """Run a script, or ``-m`` a module."""
    os.environ.update(environment or {})
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")
