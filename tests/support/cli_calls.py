"""Calling the command, and stores for it to look at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from casnap import NewStore, RNGState, StateDict, Stateful, Store
from casnap.cli import cli

CHUNK = 64 << 10
COMMAND = [sys.executable, "-m", "casnap.cli"]


def fill(folder: Path) -> Path:
    """Make a store of three snapshots of one run and one of another."""
    store = Store(folder, create=NewStore(chunk_size=CHUNK))
    weight = torch.arange(6 * CHUNK // 4, dtype=torch.float32)
    for step in range(3):
        weight[0] += 1
        state: dict[str, Stateful] = {
            "model": StateDict(weight=weight, bias=torch.zeros(4, dtype=torch.bfloat16)),
            "progress": StateDict(
                step=step, name="é" * 50, many=[1.5, None, True], data=b"\0\1", odd={"a/b": 1}
            ),
            "rng": RNGState(),
        }
        store.take(state, f"run1/step_{step}", metadata={"loss": 2.5 / (step + 1), "step": step})
    store.take({"model": StateDict(weight=weight, extra=torch.ones(100))}, "run2/step_0")
    return folder


def invoke(*arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    if status == 0 and result.exception is not None:
        raise result.exception
    return result


def document(*arguments: object, status: int = 0) -> Any:
    """Return the JSON document of a command, without the version that begins it."""
    result = invoke(*arguments, "--json", status=status)
    assert result.stdout.isascii()
    found = json.loads(result.stdout)
    assert next(iter(found)) == "version"
    assert found.pop("version") == 1
    return found


def failure(*arguments: object, status: int = 1) -> str:
    """Return the message of a command that fails."""
    result = invoke(*arguments, status=status)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
        **options,
    )


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *arguments: object, columns: int = 0) -> None:
        self.master, slave = pty.openpty()
        if columns:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)

    def read_until(self, text: str) -> str:
        seen = ""
        while text not in seen:
            assert select.select([self.master], [], [], 300)[0], seen
            seen += os.read(self.master, 4096).decode()
        return seen

    def rest(self) -> tuple[int, str]:
        """Return its exit status and what else it prints."""
        seen = b""
        try:
            while chunk := os.read(self.master, 4096):
                seen += chunk
        except OSError:  # Linux says EIO where the other end is closed
            pass
        os.close(self.master)
        return self.process.wait(300), seen.decode()
