"""Where a folder holds checkpoints of another form, "there is none" says so, with the import."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from casnap import Snapshot, StateDict, Store
from casnap.errors import CasnapError, NotAStoreError, SnapshotNotFoundError
from casnap.integrations.dcp import CasnapWriter, install, uninstall
from tests.support.cli_calls import failure, invoke

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is ", "ignore:TypedStorage is deprecated"
)


def save(form: str, folder: Path) -> Path:
    """Save a checkpoint of another form; return its path."""
    if form == "torch.distributed.checkpoint":
        dcp.save({"x": torch.ones(3)}, checkpoint_id=folder / "step_1")
    elif form == "TorchSnapshot":
        (folder / "step_1").mkdir()
        (folder / "step_1/.snapshot_metadata").write_text("{}")
    elif form == "DeepSpeed":
        (folder / "step_1").mkdir()
        torch.save({}, folder / "step_1/zero_pp_rank_0_mp_rank_00_model_states.pt")
    elif form == "DeepSpeed's folder":
        (folder / "step_1/global_step1").mkdir(parents=True)
        (folder / "step_1/latest").write_text("global_step1")
        torch.save({}, folder / "step_1/global_step1/mp_rank_00_model_states.pt")
    elif form == "Accelerate":
        (folder / "step_1").mkdir()
        (folder / "step_1/random_states_0.pkl").write_bytes(b"\x80\x04N.")
        save_file({"x": torch.ones(3)}, folder / "step_1/model.safetensors")
    elif form == "torch_checkpointing":
        (folder / "step_1").mkdir()
        torch.save({"x": torch.ones(3)}, folder / "step_1/model_0.pt")
    elif form == "safetensors":
        (folder / "step_1").mkdir()
        save_file({"x": torch.ones(3)}, folder / "step_1/model.safetensors")
    else:
        torch.save({"x": torch.ones(3)}, folder / "step_1.pt")
        return folder / "step_1.pt"
    return folder / "step_1"


FORMS = [
    "torch.distributed.checkpoint",
    "TorchSnapshot",
    "torch_checkpointing",
    "safetensors",
    "torch.save",
]
NOT_IMPORTED = {
    "DeepSpeed": "DeepSpeed's own load_checkpoint loads",
    "DeepSpeed's folder": "DeepSpeed's own load_checkpoint loads",
    "Accelerate": "Accelerate's own load_state loads",
}


@pytest.mark.parametrize("form", FORMS)
def test_no_snapshot_but_a_checkpoint_of_another_form(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path).make()
    with caplog.at_level(logging.WARNING, "casnap"):
        assert store.latest() is None
        assert caplog.text == ""
        path = save(form, tmp_path)
        assert store.latest() is None
    assert f"{path.name}, a checkpoint of {form}: `casnap import {path} " in caplog.text
    with pytest.raises(SnapshotNotFoundError, match=rf"a checkpoint of {form}, .*casnap import"):
        _ = store[path.name]
    with pytest.raises(SnapshotNotFoundError, match=r"no snapshot 'step_9'$"):
        _ = store["step_9"]

    caplog.clear()
    Snapshot.take(tmp_path / "step_2", {"s": StateDict(step=2)})
    latest = store.latest()
    assert latest is not None
    assert latest.name == "step_2"
    assert caplog.text == ""


@pytest.mark.parametrize("form", NOT_IMPORTED)
def test_no_snapshot_but_a_checkpoint_that_only_its_own_library_loads(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, path, advice = Store(tmp_path).make(), save(form, tmp_path), NOT_IMPORTED[form]
    with caplog.at_level(logging.WARNING, "casnap"):
        assert store.latest() is None
    library = form.removesuffix("'s folder")
    assert f"{path.name}, a checkpoint of {library}: {advice} it" in caplog.text
    with pytest.raises(SnapshotNotFoundError, match=f"a checkpoint of {library}, which {advice}$"):
        _ = store[path.name]


@pytest.mark.parametrize("form", [*FORMS[:2], *NOT_IMPORTED])
def test_one_name_is_not_for_two_states(tmp_path: Path, form: str) -> None:
    """A take beside a checkpoint of another library: each of them would load its own."""
    path = save(form, tmp_path)
    before = sorted(path.iterdir())
    state = {"s": StateDict(x=torch.zeros(3))}
    store = Store(tmp_path)
    for take in (
        lambda: Snapshot.take(path, state),
        lambda: Snapshot.take(path, state, overwrite=True),
        lambda: store.take(state, path.name),
        lambda: store.async_take(state, path.name).wait(),
        lambda: dcp.save({"x": torch.zeros(3)}, storage_writer=CasnapWriter(path)),
    ):
        advice = NOT_IMPORTED.get(form, "`casnap import")
        with pytest.raises((CasnapError, CheckpointException), match=f"of {form[:9]}.* {advice}"):
            take()
    assert sorted(path.iterdir()) == before
    store.import_file(path, "imported") if form == FORMS[0] else None
    # It is in the way of its own name alone.
    assert store.take(state, f"{path.name}0").path


def test_the_newest_is_named_and_folders_of_casnap_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path).make()
    for step in (1, 2):
        torch.save(torch.ones(3), tmp_path / f"run-{step}.pt")
        os.utime(tmp_path / f"run-{step}.pt", (step, step))
    assert store.latest() is None
    assert "run-2.pt, a checkpoint of torch.save, and 1 more" in caplog.text
    for step in (1, 2):
        (tmp_path / f"run-{step}.pt").unlink()

    # What stands beside a snapshot for others goes with it.
    caplog.clear()
    install(store)
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "step_3")
    uninstall()
    store.delete("step_3")
    assert not (tmp_path / "step_3/.metadata").exists()
    assert store.latest() is None
    assert "holds no snapshot" not in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_no_store_but_a_checkpoint_of_another_form(tmp_path: Path, form: str) -> None:
    assert "make one with `casnap init" in failure("ls", tmp_path)
    path = save(form, tmp_path)
    message = failure("ls", tmp_path)
    assert f"{path.name}, a checkpoint of {form}: `casnap import {path} " in message
    assert "casnap init" not in message
    if path.is_dir():
        message = failure("ls", path)
        assert (
            f"a checkpoint of {form}, which `casnap import` imports" in message
            or path.name in message
        )
        assert "casnap init" not in message
    with pytest.raises(NotAStoreError, match="casnap import"):
        Store(tmp_path, create=False)
    Store(tmp_path).make()
    assert "`casnap import" in invoke("ls", tmp_path).stderr


def test_stores_right_below_are_named(tmp_path: Path) -> None:
    for run in ("run2", "run1"):
        Snapshot.take(tmp_path / run / "step_1", {"s": StateDict(step=1)})
    torch.save(torch.ones(3), tmp_path / "notes.pt")
    for command in ("ls", "check", "du"):
        message = failure(command, tmp_path)
        assert (
            f"there are stores right below: run1, run2. Name one, like {tmp_path}/run1" in message
        )
        assert "casnap init" not in message
    with pytest.raises(NotAStoreError, match="run1, run2"):
        Snapshot(tmp_path / "step_1")
