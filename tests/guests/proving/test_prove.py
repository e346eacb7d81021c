"""``casnap prove`` finds faults of a resume, names their causes, and calls right ones proven."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from casnap import Store
from casnap.cli import run
from tests.support.faulty_trainings import FAULTS, TRAININGS, proof_of, write_script
from tests.support.json_keys import keys_of, listed_keys
from tests.support.scripts import run_program
from tests.support.warm import forked

LIGHT = """\
import sys, time
import torch
from casnap import RNGState, StateDict, Store

torch.manual_seed(0)
torch.set_num_threads(1)
weight = torch.ones(20)
average = StateDict(state={"0": {"exp_avg": torch.zeros(20), "step": 0}})
progress = StateDict(step=0)
state = {"model": StateDict(weight=weight), "optim": average, "progress": progress}
state["rng"] = RNGState()
store = Store(sys.argv[1])
if (last := store.latest()) is not None:
    last.restore(state)
    FAULT
for step in range(progress["step"] + 1, 9):
    moment = average["state"]["0"]
    moment["exp_avg"].lerp_(torch.randn(20) * weight, 0.1)
    moment["step"] += 1
    weight -= moment["exp_avg"] * 0.1
    progress["step"] = step
    store.take(state, f"step_{step}")
    store.take(state, "last", overwrite=True)
    time.sleep(0.05)
"""
SHARDED = """\
import sys, time
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from casnap import RNGState, StateDict, Store

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(12, 12, bias=False)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
progress = StateDict(step=0)
state = {"model": model, "progress": progress, "rng": RNGState()}
store = Store(sys.argv[1])
if (last := store.latest()) is not None:
    last.restore(state, new_ranks="keep")
for step in range(progress["step"] + 1, 10):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    torch.rand(1)
    progress["step"] = step
    store.take(state, f"step_{step}")
    time.sleep(0.1)
dist.destroy_process_group()
"""
# Python's random numbers and hashes, which the script does not use, begin anew in each process.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def prove(*arguments: str | Path, status: int = 0) -> tuple[str, str]:
    """Run ``casnap prove``; return what it prints."""
    command = [sys.executable, "-m", "casnap", "prove", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def prove_light(*arguments: str | Path, status: int = 0) -> tuple[str, str]:
    """Run ``casnap prove`` with a script of Python, whose processes need not import torch."""
    done = run_program("-m", "casnap", "prove", *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def light(path: Path, fault: str = "pass") -> Path:
    path.write_text(LIGHT.replace("FAULT", fault))
    return path


def test_a_right_resume_is_proven(tmp_path: Path) -> None:
    room, command = tmp_path / "room", (sys.executable, light(tmp_path / "train.py"), "{store}")
    text, _ = prove_light("--kills", 1, "--room", room, "--", *command)
    assert "killed after step_" in text
    assert "PROVEN: all else equal, bit for bit, after 1 kill" in text
    assert re.search(r"^generators +0/rng/python/1 +two unbroken runs differ in it", text, re.M)
    store = Store(room)
    roles = store.diff("unbroken/step_8", "killed/step_8").by_role()
    assert set(roles) <= {"generators"}  # Python's, which the script does not seed
    assert len(store.snapshots("killed")) == 9
    assert (room / "logs/killed.log").exists()


# As a Trainer of transformers: its arguments name the folder, its log begins at the resume.
FILES = """\
import json

begun = progress["step"]


class Files:
    def state_dict(self):
        step = progress["step"]
        kept = {"global_step": STEP, "log_history": [{"loss": step - begun}]}
        files = {"training_args.bin": sys.argv[1], "trainer_state.json": json.dumps(kept)}
        return {name: text.encode() for name, text in files.items()}

    def load_state_dict(self, state):
        pass


state["files"] = Files()
"""


@pytest.mark.parametrize(("step", "is_proven"), [("step", True), ("step - begun", False)])
def test_the_records_of_a_trainer_are_not_compared(
    tmp_path: Path, step: str, is_proven: bool
) -> None:
    """But what it resumes from is."""
    script, files = light(tmp_path / "train.py"), FILES.replace("STEP", step)
    script.write_text(script.read_text().replace("for step in", f"{files}for step in", 1))
    options = ("--kills", 1, "--seed", 2, "--room", tmp_path / "room")
    text, _ = prove_light(*options, sys.executable, script, "{store}", status=not is_proven)
    assert re.search("^values +files/training_args.bin +the arguments of the Trainer", text, re.M)
    how = "its log alone" if is_proven else "changed"
    assert re.search(f"^values +files/trainer_state.json +{how}", text, re.M)


def test_a_wrong_resume_is_named(tmp_path: Path) -> None:
    """It forgets the moments, so what it stores from its first step on is other."""
    fault = 'average["state"]["0"] = {"exp_avg": weight * 0, "step": 0}'
    command = (sys.executable, light(tmp_path / "train.py", fault), "{store}")
    options = ("--json", "--kills", 1, "--room", tmp_path / "room")
    printed, said = prove_light(*options, *command, status=1)
    document = json.loads(printed)
    assert keys_of(document) == listed_keys("prove")
    assert "killed after" in said
    assert not document["proven"]
    assert document["deterministic"]
    assert document["causes"][0]["role"] == "moments"
    _, again, killed = document["runs"]
    assert not set(again["paths"]) & {"model/weight", "optim/state/0/exp_avg"}
    after = int(killed["kills"][0].removeprefix("step_"))
    assert killed["differing_names"] == [*(f"step_{n}" for n in range(after + 1, 9)), "last"]


@pytest.mark.slow
def test_a_run_that_ends_after_a_kill_is_not_proven(tmp_path: Path) -> None:
    """Also if each run is ended after some snapshots: what the killed run has is equal."""
    command = (sys.executable, light(tmp_path / "train.py", "sys.exit()"), "{store}")
    options = ("--json", "--kills", 1, "--snapshots", 4, "--room", tmp_path / "room")
    document = json.loads(prove_light(*options, *command, status=1)[0])
    killed = document["runs"][2]
    assert killed["differing_names"] == []
    assert killed["lacking_names"][-1] == "step_3"
    assert [cause["role"] for cause in document["causes"]] == ["run"]


@pytest.mark.slow
def test_a_run_that_fails_after_a_kill_is_not_proven(tmp_path: Path) -> None:
    """What differs before is named first: it may be why."""
    for fault, roles in (("", ["run"]), ("weight.zero_(); ", ["loader", "weights", "run"])):
        fault += "sys.exit('no more') if progress['step'] > 3 else None"
        command = (sys.executable, light(tmp_path / "train.py", fault), "{store}")
        options = ("--json", "--kills", 4, "--room", tmp_path / f"room{len(roles)}")
        document = json.loads(prove_light(*options, *command, status=1)[0])
        assert not document["proven"]
        assert [cause["role"] for cause in document["causes"]] == roles
        assert "its last line: no more" in document["causes"][-1]["text"]


@pytest.mark.slow
def test_a_run_that_begins_again_is_not_proven(tmp_path: Path) -> None:
    """What it takes anew under names that are there is equal."""
    script = light(tmp_path / "train.py")
    text = script.read_text().replace("(last := store.latest())", "(last := None)")
    script.write_text(text.replace('f"step_{step}")', 'f"step_{step}", overwrite=True)'))
    options = ("--kills", 1, "--room", tmp_path / "room")
    text, _ = prove_light(*options, sys.executable, script, "{store}", status=1)
    assert "killed 9 snapshots equal: 9 snapshots" in re.sub(" +", " ", text)
    assert "it did not resume" in text


@pytest.mark.slow
def test_a_resume_on_more_ranks(tmp_path: Path) -> None:
    """What ranks keep for themselves differs then: that is said, and shows nothing."""
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    command, resume = ([sys.executable, *ranks, n, str(script), "{store}"] for n in "23")
    options = ("--kills", 1, "--room", tmp_path / "room", "--resume-with", shlex.join(resume))
    text, _ = prove(*options, *command)
    assert re.search(r"^generators +2/rng +one rank's own", text, re.MULTILINE)
    assert "PROVEN: all else equal" in text
    worlds = {s.metadata.world_size for s in Store(tmp_path / "room").snapshots("killed")}
    assert worlds == {2, 3}


@pytest.mark.slow
def test_runs_without_a_common_name_are_not_proven(tmp_path: Path) -> None:
    script = light(tmp_path / "train.py")
    script.write_text(script.read_text().replace('f"step_{step}"', 'f"step_{time.time_ns()}"'))
    options = ("--kills", 1, "--snapshots", 4, "--room", tmp_path / "room")
    text, _ = prove_light(*options, sys.executable, script, "{store}", status=1)
    assert text.count("no snapshots to compare") == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["true"], "has {store}"),
        (["true", "{store}"], "took 0 snapshots below"),
        (["sh", "-c", "echo wrong; exit 3", "{store}"], "exit status 3); its last line: wrong"),
        (["no-such-command", "{store}"], "cannot be started"),
        (["--resume-with", "no-such-command {store}", "true", "{store}"], "cannot be started"),
        (["--timeout", "1s", "sh", "-c", "sleep 99", "{store}"], "did not end within 1 s"),
    ],
)
def test_commands_that_prove_nothing(tmp_path: Path, command: list[str], message: str) -> None:
    _, error = prove_light("--room", tmp_path / "room", *command, status=1)
    assert message in error
    assert "Traceback" not in error


def test_a_room_that_is_not_new_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    _, error = prove_light("--room", tmp_path, "true", "{store}", status=1)
    assert "is not new" in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_room_in_a_store_is_refused(tmp_path: Path) -> None:
    """Its snapshots would be in that store, and its logs among them."""
    store = Store(tmp_path / "mine").make()
    room = tmp_path / "mine/room"
    _, error = prove_light("--room", room, "true", "{store}", status=1)
    assert f"lies in a store, {store.uri}" in error
    assert not room.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_proof_that_is_interrupted_leaves_nothing(tmp_path: Path, number: int) -> None:
    """Neither a process, though all ignore the signal, nor a folder; nor if signals come again."""
    worker = f"trap '' INT TERM; echo $$ > {tmp_path}/pid; while true; do sleep 1000; done"
    command = ("sh", "-c", f"setsid sh -c '{worker}' & {worker}", "{store}")
    interrupt(tmp_path, command, number)
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
    assert not [p for p in Path("/proc").iterdir() if str(tmp_path) in command_of(p)]


@pytest.mark.slow
def test_a_proof_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """As when the command is a proof itself."""
    worker = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    inner = ("-m", "casnap", "prove", "--room", f"{tmp_path}/inner", "--", "sh", "-c", worker)
    script = tmp_path / "proof.sh"
    script.write_text(shlex.join([sys.executable, *inner, "{store}"]))
    interrupt(tmp_path, ("sh", str(script), "{store}"), signal.SIGTERM)
    assert is_over((tmp_path / "pid").read_text())


def interrupt(folder: Path, command: tuple[str, ...], number: int) -> None:
    """Prove a command in a temporary folder; send signals once it has written ``folder/pid``."""
    process, _ = forked(prove_in, folder, command)
    while not (folder / "pid").exists():
        assert process.is_alive()
        time.sleep(0.01)
    for _ in range(3):
        os.kill(process.pid, number)
        time.sleep(0.001)
    process.join(60)
    assert process.exitcode == 130


def is_over(pid: str) -> bool:
    """Whether a process has ended; nobody may have waited for it, in a container."""
    status = Path(f"/proc/{pid.strip()}/stat")
    return not status.exists() or ") Z " in status.read_text()


def prove_in(line: Connection, folder: Path, command: tuple[str, ...]) -> None:
    tempfile.tempdir = str(folder)
    sys.exit(run(["prove", *command]))


def command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_no_process_outlives_an_attempt(tmp_path: Path) -> None:
    """Also one in a session of its own, as torchrun starts its workers, or without environment."""
    pid = tmp_path / "pid"
    worker = f"echo $$ > {pid}; exec sleep 1000"
    command = ["sh", "-c", f"setsid sh -c '{worker}' & exec env -i sleep 1000", "{store}"]
    prove_light("--timeout", "3s", "--room", tmp_path / "room", *command, status=1)
    assert is_over(pid.read_text())


# --- the long form ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_named(tmp_path: Path, name: str) -> None:
    """With the default number of kills, wherever these fall."""
    if name == "less precise products" and not has_less_precise_products():
        pytest.skip("this processor multiplies in float32 alone")
    (cause, *_) = causes(tmp_path, name)
    assert FAULTS[name].is_named_by(cause)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_right_training_raises_no_alarm(tmp_path: Path, name: str) -> None:
    assert causes(tmp_path, name) == []


def causes(folder: Path, name: str) -> list[dict[str, str]]:
    """Prove a training, by the name of its fault or of itself; return the causes."""
    fault = FAULTS.get(name)
    script = write_script(folder / "train.py", fault, name)
    is_light = name != "slices" and (fault is None or fault.is_alike_in_forks)
    started = prove_light if is_light else prove
    options = ("--json", "--room", folder / "room", *proof_of(script, fault, name))
    printed, _ = started(*options, status=int(fault is not None))
    found: list[dict[str, str]] = json.loads(printed)["causes"]
    return found


def has_less_precise_products() -> bool:
    """Whether the processor has products in bfloat16, which stand in for TF32."""
    a, before = torch.randn(64, 64), torch.get_float32_matmul_precision()
    exact = a @ a
    torch.set_float32_matmul_precision("medium")
    try:
        return not torch.equal(a @ a, exact)
    finally:
        torch.set_float32_matmul_precision(before)
