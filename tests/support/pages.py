"""Pages of documentation whose examples run.

The examples of a page run in order, in one empty working folder:

- ```` ```python ```` blocks share one namespace.
- ```` ```console ```` blocks: each line ``$ command`` runs in bash and must exit with 0. Lines that
  follow it are its expected output, white space aside; ``...`` stands for anything. A command
  without expected output may print what it likes. A ``\\`` at the end continues a command.
- Anything else (```` ```sh ````, ```` ```text ````) is only shown.

``<!-- invisible-code-block: python ... -->`` runs unseen. It may silence warnings, or check what
the page says; but what it defines is dropped, and it may not change a file: a reader can run a page
from top to bottom. ``<!-- skip: next -->`` leaves a block out.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from tests.support.warm import run_python

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Commands of casnap alone, nothing of bash, are forked from a process that has imported torch.
_PLAIN = re.compile(r"casnap [\w./:= -]+(#.*)?")
_COMMAND = "import sys; from casnap.cli import run; sys.exit(run(sys.argv[1:]))"


def commands_of(block: str) -> list[tuple[str, str]]:
    """Cut a console block into commands, each with the output that is expected of it."""
    commands: list[tuple[str, str]] = []
    for line in block.splitlines():
        if commands and commands[-1][0].endswith("\\") and not commands[-1][1]:
            commands[-1] = (f"{commands[-1][0]}\n{line.removeprefix('> ')}", "")
        elif line.startswith("$ "):
            commands.append((line.removeprefix("$ "), ""))
        elif commands:
            command, want = commands[-1]
            commands[-1] = (command, f"{want}{line}\n")
        else:
            raise ValueError(f"a console block starts with '$ ', not with {line!r}")
    return commands


def run_console(example: Example) -> str | None:
    """Run the commands of a block; return what went wrong, as Sybil wants it, or None."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    for command, want in commands_of(str(example.parsed)):
        with mock.patch.dict(os.environ, environment):
            done = _done(command)
        if done.returncode:
            return f"$ {command}\nexited with {done.returncode}:\n{done.stdout}{done.stderr or ''}"
        if want.strip() and not doctest.OutputChecker().check_output(want, done.stdout, FLAGS):
            return f"$ {command}\nwas to print:\n{want}\nand printed:\n{done.stdout}"
    return None


def _done(command: str) -> subprocess.CompletedProcess[str]:
    if _PLAIN.fullmatch(command):
        return run_python(_COMMAND, *shlex.split(command, comments=True)[1:])
    return subprocess.run(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=FLAGS),
        CodeBlockParser(language="console", evaluator=run_console),
        SkipParser(),
    ]
)


def run_examples(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the examples of a page in a folder, which is made."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    with _ended_by_sigterm():
        for example in SYBIL.parse(page).examples():
            if example.document.text[example.start :].startswith("<!--"):
                _run_hidden(example)
            else:
                example.evaluate()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have a SIGTERM from outside end this process, as it does at any other time.

    An example that handles one would take it for its own, and do other than its page says.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_hidden(example: Example) -> None:
    """Run a block that a reader does not see, so that nothing of what he sees can rest on it."""
    names, files = dict(example.namespace), _files()
    example.evaluate()
    example.namespace.clear()
    example.namespace.update(names)
    assert _files() == files, f"{example.path}:{example.line}: a hidden block changes files"


def _files() -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in Path.cwd().rglob("*")}
