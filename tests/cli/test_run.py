"""``casnap run``: the command stays what it is, and each Python of it begins with casnap's part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_calls import COMMAND

NOT_USED = "casnap run: no Trainer of Transformers has trained, so nothing was saved by casnap\n"


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    arguments = [*COMMAND, "run", *map(str, command)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, **options)


def test_status_and_signals_are_those_of_the_command() -> None:
    done = run("--", "sh", "-c", 'echo "$1"; exit 7', "sh", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (7, "--help\n", "")
    assert run("sh", "-c", "kill -TERM $$").returncode == -15


def test_what_cannot_be_run(tmp_path: Path) -> None:
    done = run("no-such-command", "-x")
    assert done.returncode == 127
    assert done.stderr == "casnap: 'no-such-command' cannot be run: No such file or directory\n"
    (tmp_path / "script").write_text("echo")
    assert run(tmp_path / "script").returncode == 126
    done = run()
    assert done.returncode == 2
    assert "Missing argument 'COMMAND...'" in done.stderr


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            'wieghts = "all"',
            "an unknown setting, 'wieghts'; nearest: weights. The settings are: we",
        ),
        (
            '[run]\nweights = "all"',
            "an unknown setting, 'run'. The settings are: weights, witness_steps, on_m",
        ),
        ('weights = "most"', "'most' is not one of 'last', 'all', 'none'"),
        ("witness_steps = -1", "-1 is not in the range x>=0"),
        ('on_mismatch = "tell"', "'tell' is not one of 'warn', 'raise'"),
        ('weights = ["all"]', "is not one of 'last', 'all', 'none'"),
        ("weights = all", "casnap.toml' is no TOML: Invalid value (at line 1, column 11)"),
        (b"\xff", "casnap.toml' is no TOML: "),
        (None, "casnap.toml': No such file or directory"),
    ],
)
def test_wrong_settings_are_told_before_the_command_starts(
    tmp_path: Path, text: str | bytes | None, error: str
) -> None:
    file = tmp_path / "casnap.toml"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    done = run("--config", file, "--", "touch", tmp_path / "started")
    assert (done.returncode, done.stdout) == (2, "")
    assert error in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_command_that_trains_nothing_is_told_at_its_end() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)']); exit(3)"
    done = run(sys.executable, "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "1\n", NOT_USED)
    nested = run(*COMMAND, "run", sys.executable, "-c", "print(2)")
    assert (nested.returncode, nested.stdout, nested.stderr) == (0, "2\n", NOT_USED)


def test_a_file_called_as_the_process_id_stays(tmp_path: Path) -> None:
    """Below a shell, the variable has its process id still when a Trainer trains."""
    script = 'echo mine > $CASNAP_RUN; "$0" -c "import sitecustomize as s; s._tell(2)"; cat [0-9]*'
    done = run("sh", "-c", script, sys.executable, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("mine\n", "casnap run: 2\n")


def test_a_sitecustomize_of_the_user_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 5")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for command in ([sys.executable], [*COMMAND, "run", sys.executable]):
        done = run(
            *command, "-c", "import sitecustomize as s; print(mine, s.__file__)",
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.stdout == f"5 {tmp_path / 'sitecustomize.py'}\n", done.stderr


def test_a_python_without_casnap_stops_where_it_imports_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("")
    (tmp_path / "transformers/trainer.py").write_text("")
    script = (
        "import os, sys; isdir, join = os.path.isdir, os.path.join\n"
        "sys.path = [sys.argv[1]] + [p for p in sys.path if not isdir(join(p, 'casnap'))]\n"
        "import transformers.trainer"
    )
    done = run(sys.executable, "-c", script, tmp_path)
    assert done.returncode == 1
    assert done.stderr.count(f"ImportError: casnap run: {sys.executable} has no casnap") == 1
