"""Signals that end a command with ``--follow``, and with it the shell command of ``--exec``."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The seconds between SIGTERM and SIGKILL.
_GRACE = 5.0


class EndingSignals:
    """Makes the signals that end a program raise KeyboardInterrupt.

    A signal that the program was started to ignore, as by ``nohup``, stays ignored. Only the main
    thread receives signals: in another thread, this class does nothing.

    Args:
        once: Whether only the first signal raises, so that no later one interrupts the cleanup.
    """

    def __init__(self, *, once: bool = False) -> None:
        self._once = once
        self._is_held = self._came = self._has_raised = False
        is_main = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS if is_main else ():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._is_held:
            self._raise()

    def _raise(self) -> None:
        if not (self._once and self._has_raised):
            self._has_raised = True
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[Callable[[], bool]]:
        """Hold signals back for a ``with`` block; if one came, raise KeyboardInterrupt at its end.

        Yields:
            A function that returns whether a signal has come.
        """
        self._is_held, self._came = True, False
        try:
            yield lambda: self._came
        finally:
            self._is_held = False
            if self._came:
                self._raise()


def run_command(
    command: str, text: str, about: Mapping[str, str], signals: EndingSignals, output: Any = None
) -> None:
    """Run a command in a shell, and wait until it ends.

    The command gets a session of its own, so a terminal sends Ctrl-C to casnap alone. casnap then
    ends the command and its children, except children that have begun another session.

    Args:
        command: The command.
        text: Its standard input.
        about: Further variables of its environment.
        signals: The signals that end the command.
        output: Its standard output, as ``stdout`` of ``subprocess.Popen``.

    Raises:
        subprocess.CalledProcessError: The command failed.
        KeyboardInterrupt: A signal came; the command was ended.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        # Use a file, not a pipe: a child that lives on could keep a pipe open and read nothing from
        # it.
        with tempfile.TemporaryFile() as file, signals.held():
            file.write(text.encode())
            file.seek(0)
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=file,
                stdout=output,
                env={**os.environ, **about},
                start_new_session=True,
            )
        process.wait()
    except BaseException:
        if process is not None:
            _end(process)
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group by SIGTERM, then by SIGKILL.

    SIGKILL follows after a few seconds, or at once if another signal comes.
    """
    group = process.pid
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(group, signal.SIGTERM)
            until = time.monotonic() + _GRACE
            while time.monotonic() < until:
                process.poll()
                os.killpg(group, 0)  # raises if no process of the group is left
                time.sleep(0.02)
        finally:
            os.killpg(group, signal.SIGKILL)
    process.wait()
