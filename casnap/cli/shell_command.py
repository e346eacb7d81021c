"""How signals end a command that follows, and with it the command of ``--exec``."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Between SIGTERM and SIGKILL, in seconds.
_GRACE = 5.0


class EndingSignals:
    """Has the signals that end a program raise KeyboardInterrupt, but not while they are held.

    What the program was started to ignore, as by ``nohup``, it goes on to ignore.
    """

    def __init__(self) -> None:
        self._is_held = self._came = False
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._is_held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have a signal that comes in this block count at its end."""
        self._is_held, self._came = True, False
        try:
            yield
        finally:
            self._is_held = False
            if self._came:
                raise KeyboardInterrupt


def run_command(
    command: str, text: str, about: Mapping[str, str], signals: EndingSignals, output: Any = None
) -> None:
    """Run a command in a shell, and wait until it ends.

    It gets a session of its own. So a terminal sends Ctrl-C to casnap alone, which ends the command
    and all children that it has then, but those that have begun another session.

    Args:
        command: The command.
        text: Its standard input.
        about: Further variables of its environment.
        signals: What ends it.
        output: Its standard output, as of ``subprocess.Popen``.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        # No pipe: a child that goes on may keep it open, and read nothing.
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
    """End a process and its group; if another signal comes, at once."""
    group = process.pid
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(group, signal.SIGTERM)
            until = time.monotonic() + _GRACE
            while time.monotonic() < until:
                process.poll()
                os.killpg(group, 0)  # is anybody left?
                time.sleep(0.02)
        finally:
            os.killpg(group, signal.SIGKILL)
    process.wait()
