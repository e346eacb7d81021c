"""``~`` is the home folder in every path that an argument gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from casnap import Snapshot, StateDict, Store
from casnap.integrations.dcp import CasnapReader, CasnapWriter, install, uninstall
from casnap.integrations.trainers import snapshot_at
from tests.support.cli_calls import document, failure, invoke

TINY = {"s": StateDict(x=1)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder; the working folder is another one, which is to stay empty."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_in_python(home: Path) -> None:
    store = Store("~/ckpts")
    assert store.uri == str(home / "ckpts")
    store.take(TINY, "step_1")
    Snapshot.take("~/ckpts/step_2", TINY)
    Snapshot.take("step_3", TINY, store="~/ckpts")
    assert [s.name for s in Store(Path("~/ckpts"), create=False).snapshots()] == [
        "step_1",
        "step_2",
        "step_3",
    ]
    assert Snapshot("~/ckpts/step_1").path == str(home / "ckpts/step_1")
    store.copy("step_1", to="~/copies")
    mirrored = Store("~/mirrored", mirror="~/mirror")
    mirrored.take(TINY, "step_1")
    mirrored.wait_mirrored(60)
    assert "step_1" in Store(home / "copies")
    assert "step_1" in Store(home / "mirror")
    save_file({"w": torch.ones(3)}, home / "w.safetensors")
    store.import_file("~/w.safetensors", "imported")
    store["imported"].export("~/out.safetensors", path="model")
    assert (home / "out.safetensors").is_file()
    assert store.repair(sources=["~/copies"]).skipped == []
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_in_dcp(home: Path) -> None:
    state = {"w": torch.ones(3)}
    dcp.save(state, storage_writer=CasnapWriter("~/ckpts/step_1"))
    dcp.load(state, storage_reader=CasnapReader("~/ckpts/step_1"))
    install("~/ckpts")
    try:
        dcp.save(state, checkpoint_id="~/ckpts/step_2")
    finally:
        uninstall()
    found = snapshot_at("~/ckpts/step_2")
    assert found is not None
    assert found.path == str(home / "ckpts/step_2")
    assert list(Path.cwd().iterdir()) == []


def test_in_commands(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("init", "~/ckpts")
    save_file({"w": torch.ones(3)}, home / "w.safetensors")
    invoke("import", "~/w.safetensors", "~/ckpts/step_1")
    assert document("ls", "~/ckpts")["store"] == str(home / "ckpts")
    invoke("export", "~/ckpts/step_1/model", "~/out.safetensors")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    invoke("report", "~/ckpts", "--output=~/report.html")
    invoke("cp", "~/ckpts", "~/copies")
    invoke("cp", "~/ckpts/step_1", "~/other/step_1")
    invoke("diff", "~/ckpts/step_1", "~/other/step_1")
    invoke("check", "~/ckpts/step_1")
    invoke("repair", "~/ckpts", "--yes", "--from", "~/copies")
    (home / "ckpts/casnap-store/casnap.json").unlink()
    invoke("repair", "~/ckpts", "--yes")
    assert str(home / "typo") in failure("ls", "~/typo")
    made = {path.name for path in home.iterdir()} - {".cache"}
    assert made == {"ckpts", "copies", "other", "out.safetensors", "report.html", "w.safetensors"}
    assert list(Path.cwd().iterdir()) == []


def test_a_folder_of_that_name_is_written_with_a_dot(home: Path) -> None:
    Store("./~").take(TINY, "step_1")
    assert (Path.cwd() / "~" / "casnap-store").is_dir()
    assert Store(f"file://{Path.cwd()}/~", create=False).latest() is not None
