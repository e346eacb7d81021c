"""Attempts of a command: started, watched, and killed with all processes that it has started."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeAlias

from casnap.errors import CasnapError

_MARK = "CASNAP_PROVE"
"""The environment variable by which an attempt's processes are found, even torchrun's workers.

Its value has the id of each attempt that the process is part of: the command of an attempt may
itself be ``casnap prove``.
"""
_ENDED = (b"Z", b"X")
"""States, in ``/proc``, of processes that have ended and were not waited for."""
_LOOK = 0.02
_TAIL_BYTES = 1 << 16
Held: TypeAlias = Callable[[], AbstractContextManager[Callable[[], bool]]]
"""Returns a context that holds signals back until its end, and yields whether one has come."""


class AttemptError(CasnapError):
    """An attempt failed by itself, or did not end in time; the message names its log."""


class Attempt:
    """A command that runs, with its output in a file.

    Args:
        command: The command and its arguments.
        environment: The environment to run it in.
        log: The file for its output; more is appended to it.
        held: Entered from the start of the command until all that it has started is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        held: Held,
    ) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._held = held
        self._mark = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, look: Callable[[], bool], timeout: float) -> bool:
        """Start the command; wait until it ends, or until it is to be killed.

        When this returns or raises, no process of the command is left.

        Args:
            look: Called again and again. If it returns True, the command is killed.
            timeout: Seconds that the command may take.

        Returns:
            Whether the command was killed.

        Raises:
            AttemptError: The command failed by itself, did not end in time, or has a process that
                cannot be killed. The message has the last line of its output.
            CasnapError: The command cannot be started.
        """
        stop = time.monotonic() + timeout
        with self._held() as is_interrupted:
            try:
                process = self._start()
                while process.poll() is None and not is_interrupted():
                    if look() and process.poll() is None:
                        return True
                    if time.monotonic() > stop:
                        raise AttemptError(
                            f"a run did not end within {timeout:g} s; let it end by itself, or "
                            "stop it by --snapshots, or give it more time by --timeout"
                            f"{self._last_line()}"
                        )
                    time.sleep(_LOOK)
            finally:
                self._kill()
        if process.returncode:
            status = process.returncode
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise AttemptError(f"a run failed by itself ({how}){self._last_line()}")
        return False

    def _start(self) -> subprocess.Popen[bytes]:
        marks = f"{self._environment.get(_MARK, '')} {self._mark}"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**self._environment, _MARK: marks},
                    start_new_session=True,
                )
            except OSError as e:
                raise CasnapError(f"{self._command[0]} cannot be started: {e.strerror or e}") from e
        return self._process

    def _kill(self) -> None:
        """Kill the command, and all that it has started, by SIGKILL."""
        process = self._process
        if process is None:
            return
        others = set[int]()
        while pids := [pid for pid in self._processes(process.pid) if pid not in others]:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                except PermissionError:
                    others.add(pid)
            process.poll()
            time.sleep(_LOOK / 4)
        if process.pid not in others:
            process.wait()
        if others:
            raise AttemptError(
                f"process {min(others)} of the command runs as another user, so it cannot be "
                f"killed, and still runs; a proof starts all as one user{self._last_line()}"
            )

    def _processes(self, first: int) -> list[int]:
        """Return the ids of the attempt's processes, the command's own first.

        A caller that kills them in this order kills the command before it can start others.
        """
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                if path.name.isdigit() and self._is_part(path, first):
                    found.append(int(path.name))
        return sorted(found, key=lambda pid: (pid != first, pid))

    def _is_part(self, process: Path, session: int) -> bool:
        """Whether a process is part of the attempt, by its session or the mark in its environment.

        Processes of the attempt may have begun other sessions. This user cannot read the
        environment of another user's process; such a process does not count.
        """
        # The name of the program comes before, in brackets, and may have any letters.
        state, _, _, found = (process / "stat").read_bytes().rpartition(b")")[2].split()[:4]
        if state in _ENDED:
            return False
        return int(found) == session or self._mark.encode() in (process / "environ").read_bytes()

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        last = f"; its last line: {lines[-1].strip():.300}" if lines else ""
        return f"{last}; all that it has printed is in {self._log}"
