"""Programs that start Python in processes of their own, where none of them imports torch again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any

from tests.support.ranks import PRELOADED
from tests.support.warm import run_and_end, run_python

_CODE = """
import subprocess, sys
from tests.support.scripts import ForkedPython, become

subprocess.Popen = ForkedPython
become(sys.argv[1:], {})
"""


def run_program(
    *command: object, modules: Iterable[str] = (), timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run ``python command``; each Python that it starts is a fork, too.

    Args:
        command: What Python runs.
        modules: What is imported before, once a run.
        timeout: Seconds until this gives up.
    """
    return run_python(_CODE, *command, modules=(*PRELOADED, *modules), timeout=timeout)


class ForkedPython(subprocess.Popen[Any]):
    """A process that runs Python: a fork of this one, in all else what ``Popen`` starts."""

    def _execute_child(self, args: Sequence[object], *more: Any) -> None:
        """Fork. ``Popen`` passes much, in an order of its own: variables, pipes' ends, session."""
        if args[0] != sys.executable:  # git
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        environment, files, is_new_session = more[5], more[9:15], more[20]
        sys.stdout.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            if is_new_session:
                os.setsid()
            for number, file in enumerate((files[0], files[3], files[5])):
                if file != -1:
                    os.dup2(file, number)
            program = partial(become, [str(arg) for arg in args[1:]], environment or {})
            # In a thread: a call of casnap that starts the process is no call that it is within.
            run_and_end(partial(_in_thread, program))
        self._close_pipe_fds(*files)  # type: ignore[attr-defined]


def _in_thread(work: Callable[[], None]) -> None:
    """Do some work in a thread. It is no executor's: a fork of that waits for itself as it ends."""
    done = Future[None]()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as e:  # noqa: BLE001 - as it is raised here
            done.set_exception(e)

    Thread(target=run, daemon=True).start()
    done.result()


def become(command: list[str], environment: Mapping[str, str]) -> None:
    """Run a script, or ``-m`` a module, as the program of this process."""
    os.environ.update(environment)
    command = command[command[0] == "-u" :]  # as torchrun starts its workers
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")
