"""``make demo`` kills a training and resumes it bit for bit, and says so if it does not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from casnap import Store
from tests.support.scripts import run_program

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
# Each try is killed only if its steps last longer than a look of the proof, also on a busy machine.
SMALL = ("--steps", "12", "--every", "2", "--width", "32", "--layers", "1", "--batch", "160")


def demo(
    folder: Path, *options: str, examples: Path = EXAMPLES
) -> subprocess.CompletedProcess[str]:
    return run_program(examples / "kill_and_resume.py", folder, *options)


@pytest.mark.timeout(500)
def test_a_demo(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    done = demo(folder, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"^PROVEN: equal, bit for bit, after [12] kill", done.stdout, re.MULTILINE)
    resumed = re.search(r"^resumed from step_(\d+)$", done.stdout, re.MULTILINE)
    assert resumed is not None
    assert 2 <= int(resumed[1]) < 12
    for command in ("prove", "diff", "pull", "gc", "ls", "du", "check"):
        assert f"\n$ casnap {command} " in done.stdout
    assert "no damage found" in done.stdout

    store = Store(folder / "1", create=False)
    for run in ("unbroken", "again", "killed", "tuned"):
        names = [snapshot.name for snapshot in store.snapshots(run)]
        assert names == [f"{run}/step_{step:04d}" for step in (8, 10, 12)]
    assert store["again/step_0012"].stats.new_bytes == 0
    tuned = store["tuned/step_0012"]
    assert tuned.stats.new_bytes < tuned.stats.logical_bytes
    frozen = "model/blocks.0.up.weight"
    assert tuned[frozen].read().equal(store["killed/step_0012"][frozen].read())


@pytest.mark.slow
def test_a_second_demo_in_the_same_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for number in (1, 2):
        # In interpreters of their own, as `make demo` runs it.
        command = [sys.executable, EXAMPLES / "kill_and_resume.py", folder, *SMALL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "PROVEN: equal" in done.stdout
        assert Store(folder / str(number), create=False).latest("tuned") is not None


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "batches", "rng"])
def test_a_training_that_forgets_a_part_of_its_state(tmp_path: Path, part: str) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(EXAMPLES, examples)
    script = examples / "train.py"
    text = script.read_text()
    line = re.search(rf'^        "{part}": .*,\n', text, re.MULTILINE)
    assert line is not None
    script.write_text(text.replace(line[0], ""))
    done = demo(tmp_path / "store", *SMALL, examples=examples)
    assert done.returncode == 1, done.stdout
    assert "NOT PROVEN" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_serving_while_all_of_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "serve.py", tmp_path / "demo", "--seconds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "demo/log").read_text()
    assert re.search(r"answers by the weights of ([2-9]|\d\d+) steps", done.stdout)
    assert done.stdout.endswith("each by the weights of one step\n")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("…")
    done = demo(tmp_path)
    assert done.returncode == 1
    assert "something other than demos" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    done = demo(tmp_path / "thesis.tex")
    assert done.returncode == 1
    assert "is not a folder" in done.stderr
