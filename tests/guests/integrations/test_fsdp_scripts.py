"""The scripts of the guides that start and resume with FSDP, below torchrun, on CPUs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from casnap import Store
from tests.support.accelerate_fsdp import has_fsdp2
from tests.support.bitwise import assert_same
from tests.support.ports import free_port

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[3]


class Script(NamedTuple):
    """A script of a guide.

    Attributes:
        guide: The guide.
        name: The name of the script.
        store: Where it saves.
        killed_after: The checkpoint after which it is killed.
        last: The names of the snapshots that it leaves.
        on_cpus: What a run on CPUs writes otherwise.
    """

    guide: str
    name: str
    store: str
    killed_after: str
    last: list[str]
    on_cpus: tuple[str, str] = ("", "")


SCRIPTS = [
    Script(
        "transformers.md",
        "fsdp_trainer.py",
        "out",
        "checkpoint-4",
        ["checkpoint-10", "checkpoint-12"],
        ("fsdp=True,", "fsdp=True, use_cpu=True, report_to=[],"),
    ),
    Script(
        "accelerate.md",
        "fsdp_accelerate.py",
        "run1/checkpoints",
        "checkpoint_1",
        ["checkpoint_4", "checkpoint_5"],
    ),
]


def start(script: Script, folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start a script of a guide below torchrun."""
    guide = (ROOT / "docs/guides" / script.guide).read_text()
    (text,) = re.findall(rf"```py\n(# {script.name}\n.*?)```", guide, re.DOTALL)
    assert f"torchrun --nproc-per-node {ranks} {script.name}" in guide
    assert script.on_cpus[0] in text
    folder.mkdir(exist_ok=True)
    (folder / script.name).write_text(text.replace(*script.on_cpus, 1))
    torchrun = ["torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--master-port", str(free_port())]
    command = [sys.executable, "-m", *torchrun, "-m", "tests.support.fsdp_on_cpus", script.name]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def run(script: Script, folder: Path, ranks: int) -> None:
    assert start(script, folder, ranks).wait() == 0, (folder / "log").read_text()


def kill(script: Script, folder: Path, ranks: int) -> None:
    """Run a script, and kill all its processes once a checkpoint is there."""
    process = start(script, folder, ranks)
    while not (folder / script.store / script.killed_after / "casnap-snapshot.json").exists():
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.005)
    # Each rank has a session of its own. torchrun goes first: it would end the others otherwise.
    pids = [process.pid, *children_of(process.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_the_script_of_the_guide_starts_and_resumes(script: Script, tmp_path: Path) -> None:
    """Killed and started again, it ends with the same bits; and it goes on with three ranks."""
    if not has_fsdp2():
        pytest.skip("this Accelerate has no FSDP2")
    whole, killed, more = (tmp_path / name for name in ("whole", "killed", "more"))
    run(script, whole, 2)
    kill(script, killed, 2)
    run(script, killed, 2)
    kill(script, more, 2)
    run(script, more, 3)
    ends = [
        [*Store(folder / script.store, create=False).snapshots()]
        for folder in (whole, killed, more)
    ]
    for snapshots in ends:
        assert [snapshot.name for snapshot in snapshots] == script.last
    for key in ("model", "optimizer"):
        one, other = (dict(s[-1].get_state_dict_for_key(key)) for s in ends[:2])
        assert_same(one, other)
    assert ends[2][-1].world_size == 3
