"""``casnap demo --quick`` trains, is killed, resumes, and leaves a store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from casnap import Store
from casnap.cli import run
from casnap.demo.plan import next_run
from casnap.demo.processes import Outcome, differences
from tests.support.json_keys import keys_of, listed_keys
from tests.support.warm import run_python

SNAPSHOTS = ["base", *(f"step_{step:04d}" for step in range(1, 13))]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "casnap.cli", "demo", "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


FORKING = """
import json, os, subprocess, sys, traceback
from types import SimpleNamespace

import torch._dynamo  # as the first optimizer of each training would
from casnap.cli import run
from casnap.demo import plan, processes, training

started = []

def forked(command, **options):
    def train():
        # One of them tells the parent that the command runs.
        os.closerange(3, 1 << 10)
        status = 1
        try:
            training.main(plan.Plan(**json.loads(command[-1])))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)

    started.append(command)
    # The first one is started as all are without this test.
    fork = {"preexec_fn": train} if len(started) > 1 else {}
    return subprocess.Popen(command, **options, **fork)

processes.subprocess = SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE)
status = run(["demo", "--quick", sys.argv[1]])
assert len(started) == 3, started
sys.exit(status)
"""
"""A demo of which all trainings but one need not import torch."""


def assert_tells_the_end(text: str) -> None:
    assert "SIGKILL" in text
    assert "is restored in" in text
    assert "12 of 12 losses are equal bit for bit" in text
    assert "Verdict: EQUAL" in text


def assert_compares_with_torch_save(text: str) -> None:
    header = next(line for line in text.splitlines() if "logical" in line)
    assert header.split() == [
        "snapshot",
        "trained",
        "loss",
        "logical",
        "new",
        "casnap",
        "|",
        "torch.save",
    ]
    for phase in ("base", "adapters", "all", "in all"):
        assert any(line.strip().startswith(phase) and " : 1" in line for line in text.splitlines())


def assert_shows_commands_and_a_read(folder: Path, text: str) -> None:
    for command in ("init", "ls", "du", "diff"):
        assert f"$ casnap {command} {folder}" in text
    assert "torch.float32 (192, 64) 49,152 bytes in" in text
    assert "casnap show" in text


def assert_plain(text: str) -> None:
    assert "\x1b" not in text
    assert "\r" not in text


def assert_whole(folder: Path) -> None:
    store = Store(str(folder), create=False)
    names = [snapshot.name for snapshot in store.snapshots("run1")]
    assert [name.removeprefix("run1/") for name in names] == SNAPSHOTS
    assert store["run1/step_0012"].metadata.user["step"] == 12
    assert not list(folder.glob(".demo-*"))


def test_demo(tmp_path: Path) -> None:
    """All of a demo in one test, since it takes long."""
    folder = tmp_path / "store"
    done = run_python(FORKING, folder, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert_tells_the_end(done.stdout)
    assert_compares_with_torch_save(done.stdout)
    assert_shows_commands_and_a_read(folder, done.stdout)
    assert_plain(done.stdout)
    assert_whole(folder)
    assert next_run(folder) == 2
    assert next_run(folder / "nothing yet") == 1


@pytest.mark.slow
def test_a_second_demo_is_another_run_of_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    assert run_demo(str(folder)).returncode == 0
    done = run_demo("--json", "--steps", "8", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["run"] == "run2"
    assert told["equal"] is True
    assert keys_of(told) == listed_keys("demo")
    assert told["differences"] == []
    assert len(told["losses"]) == 8
    assert told["resumed_from"].startswith("run2/")
    store = Store(str(folder), create=False)
    assert len(store.snapshots("run1")) == len(SNAPSHOTS)
    assert len(store.snapshots("run2")) == 9


def test_refuses_a_folder_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("thesis.tex").write_text("…")
    assert run(["demo", str(tmp_path)]) == 1
    assert "something other than a casnap store" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_refuses_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.touch()
    assert run(["demo", str(path)]) == 1
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["killed", "resumed", "curve", "digest", "lost"])
def test_one_bit_of_difference_is_seen(where: str) -> None:
    losses = [2.5, 2.25, 2.125]
    off = 2.25 + 2**-51

    def told(digest: str, curve: list[float]) -> dict[str, object]:
        return {"event": "done", "losses": curve, "digest": digest}

    whole = Outcome(losses=dict(enumerate(losses, 1)), last=told("a", losses))
    killed = Outcome(losses={1: 2.5, 2: 2.25}, taken=1)
    resumed = Outcome(
        losses={2: 2.25, 3: 2.125},
        last=told("a", losses),
        restored={"name": "run1/step_0001", "step": 1},
    )
    assert differences(killed, resumed, whole) == []
    match where:
        case "killed":
            killed.losses[2] = off
        case "resumed":
            resumed.losses[2] = off
        case "curve":
            resumed.last = told("a", [2.5, off, 2.125])
        case "digest":
            resumed.last = told("b", losses)
        case "lost":
            killed.taken = 2
    assert len(differences(killed, resumed, whole)) == 1
