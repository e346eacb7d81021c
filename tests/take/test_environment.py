"""Snapshots note what they were taken with, and a restore says what has changed since."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import casnap
from casnap import Snapshot, StateDict, Store
from casnap.cli import cli
from casnap.errors import DamagedError
from casnap.extending import Region, Target, join, load_together, name_trainer
from casnap.format.names import STORE_FOLDER
from tests.support.forger import STATE, Forger
from tests.support.ranks import Worlds
from tests.support.warm import run_python


def state() -> dict[str, Any]:
    return {"model": StateDict(w=torch.arange(1000.0)), "optim": StateDict(m=torch.ones(3))}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").make()


def test_versions_and_settings_of_torch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.take(state(), "run/1")
    assert first.environment["python"] == platform.python_version()
    assert first.environment["torch"] == torch.__version__
    assert first.environment["casnap"] == casnap.__version__
    assert first.environment["threads"] == str(torch.get_num_threads())
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    default, matmul = torch.get_default_dtype(), torch.backends.cuda.matmul
    try:
        matmul.allow_tf32 = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = store.take(state(), "run/2")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(default)
        matmul.allow_tf32 = False
    changed = dict(second.environment.items() - first.environment.items())
    assert changed == {
        "cudnn_benchmark": "on",
        "tf32_matmul": "on",
        "deterministic": "warn",
        "dtype": "float64",
        "autocast": "cpu bfloat16",
    }
    assert Store(store.uri)["run/2"].environment == second.environment


def test_a_restore_says_what_has_changed(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "casnap")
    snapshot = store.take(state(), "run/1")
    assert snapshot.restore(state()).environment == []
    assert "since the take" not in caplog.text
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    report = snapshot.restore(state())
    assert report.environment == ["cudnn_deterministic off → on"]
    assert not report, "a change is no misfit"
    assert f"{snapshot.path}: since the take: cudnn_deterministic off → on" in caplog.text


def training() -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optim": optim, "progress": StateDict(step=1)}


def test_a_resume_warns_of_what_changes_numbers(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of nothing else: neither where only weights are read, nor where nothing is computed."""
    caplog.set_level(logging.INFO, "casnap")
    snapshot = store.take(training(), "run/1")
    snapshot.restore(training())
    assert not caplog.records
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert snapshot.restore(training()).environment == ["autocast off → cpu bfloat16"]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    snapshot.restore({"model": training()["model"]})
    snapshot.restore(training())
    text = f"{snapshot.path}: since the take: cudnn_deterministic off → on"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", f"{snapshot.path}: since the take: autocast off → cpu bfloat16"),
        ("INFO", text),
        ("WARNING", f"{text}. So the training may compute other numbers than before"),
    ]


def test_a_trainer_that_loads_weights_alone_is_not_warned(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "casnap")
    app_state = training()
    snapshot = store.take(app_state, "run/1")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    weight = app_state["model"].weight.detach()
    target = Target(("model", "weight"), (3, 3), [(Region.whole((3, 3)), weight)])
    with join(None, None, "a load") as comm:
        load_together(snapshot, comm, [target])
        load_together(snapshot, comm, [target], [("optim",)])
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_trainer_that_is_imported_later_is_no_change(store: Store) -> None:
    """As DeepSpeed is: after the first restore."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("casnap.state.run_environment._trainers", {"engine": "1.0"})
        snapshot = store.take(state(), "run/1")
        patch.setattr("casnap.state.run_environment._trainers", {})
        assert snapshot.restore(state()).environment == []
        name_trainer("engine", "1.1")
        assert snapshot.restore(state()).environment == ["engine 1.0 → 1.1"]


def test_an_equal_state_shares_all_but_the_manifest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, same = store.take(state(), "run/1"), store.take(state(), "run/2")
    assert same.row.manifest.digest == first.row.manifest.digest
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    other = store.take(state(), "run/3")
    assert other.environment != first.environment
    assert other.contents.manifest.shared == first.contents.manifest.shared
    assert not store.diff("run/1", "run/3")


def test_it_is_left_out_if_asked(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", environment=False)
    snapshot = store.take(state(), "run/1")
    assert snapshot.environment == {}
    assert Snapshot.take("run/2", state(), store=store).environment == {}
    assert store.whole().async_take(state(), "run/3").wait().environment == {}
    assert snapshot.restore(state()).environment == []
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    Store(store.uri).import_file(tmp_path / "w.pt", "imported")
    assert store["imported"].environment == {}, "an import is no training"


def test_copies_and_thinned_snapshots_keep_it(store: Store, tmp_path: Path) -> None:
    noted = store.take(state(), "run/1").environment
    store.take(state(), "run/2")
    store.thin({"optim": 1})
    assert store["run/1"].thinned == ("optim",)
    assert store["run/1"].environment == noted
    copy = Store(tmp_path / "copy")
    store.copy("run/1", to=copy)
    assert copy["run/1"].environment == noted


def test_a_trainer_names_itself(store: Store) -> None:
    name_trainer("some-trainer", "1.2")
    assert store.take(state(), "run/1").environment["some-trainer"] == "1.2"


def test_show(store: Store) -> None:
    snapshot = store.take(state(), "run/1")
    shown = CliRunner().invoke(cli, ["show", snapshot.path, "--environment"])
    assert [line.split() for line in shown.stdout.splitlines()] == [
        [key, *text.split()] for key, text in snapshot.environment.items()
    ]
    shown = CliRunner().invoke(cli, ["show", snapshot.path, "--json"])
    assert json.loads(shown.stdout)["environment"] == snapshot.environment
    shown = CliRunner().invoke(cli, ["show", snapshot.path, "model", "--environment"])
    assert shown.exit_code == 2
    assert "give no PATH" in shown.stderr
    Store(store.uri, environment=False).take(state(), "run/2")
    shown = CliRunner().invoke(cli, ["show", store.path_of("run/2"), "--environment"])
    assert "not noted" in shown.stdout


def test_no_take_fails_for_it(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a later torch, which has other settings."""
    snapshot = store.take(state(), "run/1")
    monkeypatch.delattr(torch, "get_num_threads")
    assert store.take(state(), "run/2").environment == {}
    assert "not noted" in caplog.text
    snapshot.restore(state())


@pytest.mark.parametrize("noted", [{"torch": 5, "later": ["x"]}, {}])
def test_values_of_a_later_version_are_ignored(tmp_path: Path, noted: dict[str, Any]) -> None:
    assert Store(forged(tmp_path, noted))["evil"].environment == {}


def test_a_malformed_environment_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="the manifest of"):
        _ = Store(forged(tmp_path, "text"))["evil"].environment


def forged(folder: Path, noted: Any) -> Path:
    forger = Forger(folder)
    tree = forger.tree(STATE)
    forger.publish({}, {"global": {"s": tree}, "ranks": {"0": {}}, "environment": noted})
    return folder


# --- the process --------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from casnap import StateDict, Store

store, state = Store(sys.argv[1]), {"s": StateDict(x=1)}
before = store.latest()
print(before and before.restore(state).environment)
store.take(state, sys.argv[2])
"""


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_of_the_script_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "work" / "src" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    git(tmp_path / "work", "init", "-q")
    git(tmp_path / "work", "add", ".")
    git(tmp_path / "work", "commit", "-qm", "first")
    commit = git(tmp_path / "work", "rev-parse", "HEAD")
    store = tmp_path / "store"
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name in ("clean", "changed"):
        done = run_python(RUN, script, store, f"run/{name}")
        assert done.returncode == 0, done.stderr
        script.write_text(f"{SCRIPT}# changed\n")
        (script.parent / "untracked").touch()
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    short = commit[:10]
    assert f"commit {short} → {short}-dirty" in done.stdout
    assert "CUBLAS_WORKSPACE_CONFIG :4096:8 → :16:8" in done.stdout
    clean, changed = (Store(store)[f"run/{name}"].environment for name in ("clean", "changed"))
    assert (clean["commit"], changed["commit"]) == (commit, f"{commit}-dirty")
    assert clean["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    files = [path for path in (store / STORE_FOLDER).rglob("*") if path.is_file()]
    assert not any(b"hunter2" in path.read_bytes() for path in files)


RUN = """
import runpy, sys
import __main__

sys.argv[:] = sys.argv[1:]
__main__.__file__ = sys.argv[0]
runpy.run_path(sys.argv[0])
"""


# --- ranks --------------------------------------------------------------------------------------


def take_and_restore(path: Path) -> list[str]:
    snapshot = Snapshot.take(path / "store" / "step", {"s": StateDict(x=dist.get_rank())})
    assert snapshot.environment["torch"] == torch.__version__
    assert snapshot.restore({"s": StateDict(x=0)}).environment == []
    single = Snapshot(path / "store" / "single")
    return single.restore({"s": StateDict(x=0)}).environment


def test_rank_0_notes_its_own(world: Worlds, tmp_path: Path) -> None:
    single = Store(tmp_path / "store").take({"s": StateDict(x=1)}, "single")
    for changes in world(2).run(take_and_restore, tmp_path):
        assert changes[-1] == "1 → 2 ranks"
    report = Store(tmp_path / "store")["step"].restore({"s": StateDict(x=1)})
    assert report.environment[-1] == "2 → 1 ranks"
    assert single.restore({"s": StateDict(x=1)}).environment == []
