"""Attempts of a command: started, watched, and killed with all processes that it has started."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from casnap.errors import CasnapError

_MARK = "CASNAP_PROVE"
"""The variable by which the processes of an attempt are found: torchrun's workers, too.

Its value has the mark of each attempt that a process is part of, since a command may be a proof.
"""
_ENDED = (b"Z", b"X")
"""States of processes that have ended, and for which nobody has waited."""
_LOOK = 0.02


class AttemptError(CasnapError):
    """An attempt failed by itself, or did not end in time; the message names its log."""


class Attempt:
    """A command that runs, with its output in a file.

    Args:
        command: The command and its arguments.
        environment: The environment to run it in.
        log: The file for its output; more is appended to it.

    Raises:
        CasnapError: The command cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        mark = secrets.token_hex(16)
        self._mark = mark.encode()
        self._log = log
        self._killed = False
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**environment, _MARK: f"{environment.get(_MARK, '')} {mark}"},
                    start_new_session=True,
                )
        except OSError as e:
            raise CasnapError(f"{command[0]} cannot be started: {e.strerror or e}") from e

    def watch(self, look: Callable[[], bool], timeout: float) -> bool:
        """Wait until the command ends, or until it is to be killed.

        Args:
            look: Called again and again. If it returns True, the command is killed.
            timeout: Seconds that the command may take.

        Returns:
            Whether the command was killed.

        Raises:
            AttemptError: The command failed by itself, or did not end in time. The message has
                the last line of its output.
        """
        stop = time.monotonic() + timeout
        try:
            while self._process.poll() is None:
                if look() and self._process.poll() is None:
                    return True
                if time.monotonic() > stop:
                    raise AttemptError(
                        f"a run did not end within {timeout:g} s; let it end by itself, or stop it "
                        f"by --snapshots, or give it more time by --timeout{self._last_line()}"
                    )
                time.sleep(_LOOK)
        finally:
            self.kill()
        if self._process.returncode:
            status = self._process.returncode
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise AttemptError(f"a run failed by itself ({how}){self._last_line()}")
        return False

    def kill(self) -> None:
        """Kill the command, and all that it has started, by SIGKILL."""
        while pids := self._processes():
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(_LOOK / 4)
        self._process.wait()

    def _processes(self) -> list[int]:
        """Return the ids of the attempt's processes, the command's first.

        A caller that kills them in this order kills the command before it can start others.
        """
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdigit() and self._is_part(path):
                    found.append(int(path.name))
        return sorted(found, key=lambda pid: (pid != self._process.pid, pid))

    def _is_part(self, process: Path) -> bool:
        """Whether a process has the mark, or is in the session: some have another environment."""
        if self._mark in (process / "environ").read_bytes():
            return True
        # The name of the program comes before, in brackets, and may have any letters.
        state, _, _, session = (process / "stat").read_bytes().rpartition(b")")[2].split()[:4]
        return state not in _ENDED and int(session) == self._process.pid

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = f"; its last line: {lines[-1].strip():.300}" if lines else ""
        return f"{last}; all that it has printed is in {self._log}"
