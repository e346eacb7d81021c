"""Loops of ``dcp.save`` that delete the folders of old checkpoints, as without casnap."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from casnap import Retention, Store
from casnap.integrations.dcp import CasnapWriter, install, uninstall
from casnap.integrations.folders import prune_missing_folders, rotation
from tests.support.disk import SAVES, STATE
from tests.support.faults import in_child
from tests.support.mounts import tmpfs
from tests.support.ranks import Worlds
from tests.support.volumes import volume

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is ",  # DCP says once in each call that there is no process group
    "ignore:TypedStorage is deprecated",  # of DCP's own writer, before torch 2.13
)


@pytest.fixture(autouse=True)
def _another_process() -> Iterator[None]:
    rotation._runs.clear()
    yield
    uninstall()


def state(step: int) -> dict[str, Any]:
    return {"x": torch.arange(9) + step, "step": step}


def save(folder: Path, step: int, keep: int = 2) -> None:
    """Save, and delete all but the newest checkpoints, as a trainer's loop does."""
    dcp.save(state(step), storage_writer=CasnapWriter(folder / f"step_{step}"))
    rotate(folder, keep)


def rotate(folder: Path, keep: int = 2) -> None:
    steps = sorted(folder.glob("step_*"), key=lambda path: int(path.name[5:]))
    for path in steps[:-keep]:
        shutil.rmtree(path)


def steps(folder: Path | str) -> list[int]:
    return [int(s.name.rpartition("_")[2]) for s in Store(folder, create=False).snapshots()]


def loaded(folder: Path, step: int) -> dict[str, Any]:
    from casnap.integrations.dcp import CasnapReader

    found = {"x": torch.zeros(9, dtype=torch.int64), "step": 0}
    dcp.load(found, storage_reader=CasnapReader(folder / f"step_{step}"))
    return found


def by_writer(folder: Path, step: int) -> None:
    dcp.save(state(step), storage_writer=CasnapWriter(folder / f"step_{step}"))


def by_path(folder: Path, step: int) -> None:
    install(folder)
    dcp.save(state(step), checkpoint_id=folder / f"step_{step}")


def in_background(folder: Path, step: int) -> None:
    writer = CasnapWriter(folder / f"step_{step}")
    done = dcp.async_save(state(step), storage_writer=writer)
    getattr(done, "upload_completion", done).result()


@pytest.mark.parametrize("by", [by_writer, by_path])
def test_a_loop(tmp_path: Path, by: Callable[[Path, int], None]) -> None:
    folder = tmp_path / "run"
    for step in range(8):
        by(folder, step)
        # The last folder that went was there when this save began.
        assert steps(folder) == list(range(max(0, step - 2), step + 1))
        rotate(folder)
    assert loaded(folder, 7)["step"] == 7
    assert Store(folder).check(data=True).ok


def save_parts(folder: Path, step: int, keep: int = 2) -> None:
    """Save as Accelerate does with FSDP: delete the oldest, then save a folder of two snapshots."""
    checkpoints = sorted(folder.glob("checkpoint_*"), key=lambda path: int(path.name[11:]))
    for path in checkpoints[: max(0, len(checkpoints) + 1 - keep)]:
        shutil.rmtree(path)
    for part in ("model_0", "optimizer_0"):
        path = folder / f"checkpoint_{step}" / part
        dcp.save(state(step), storage_writer=CasnapWriter(path))


def parts(folder: Path) -> list[str]:
    return [s.name.removeprefix("checkpoint_") for s in Store(folder).snapshots()]


def parts_of(*steps: int) -> list[str]:
    return [f"{step}/{part}" for step in steps for part in ("model_0", "optimizer_0")]


def test_checkpoints_of_several_snapshots(tmp_path: Path) -> None:
    folder = Store(tmp_path / "run").make()._view.repository.backend.folder
    assert folder is not None
    for step in range(5):
        save_parts(folder, step)
        assert parts(folder) == parts_of(*range(max(0, step - 1), step + 1))
    rotation._runs.clear()
    for step in range(5, 8):
        save_parts(folder, step)
    # What went before the second process saved is left to the command.
    assert parts(folder) == parts_of(3, 6, 7)
    (folder / "checkpoint_6").rename(folder / "best")
    save_parts(folder, 8)
    assert parts(folder) == parts_of(3, 6, 7, 8)
    for run in range(70):
        (folder / f"run_{run}").mkdir()
        rotation.forget_deleted(Store(folder)._view, f"run_{run}/step")
    assert parts(folder) == parts_of(3, 6, 7, 8)
    assert len(rotation._runs) == 64


def save_on_ranks(path: str, how: Callable[[Path, int], None]) -> list[int]:
    folder = Path(path)
    for step in range(5):
        how(folder, step)
        if dist.get_rank() == 0:
            rotate(folder)
        dist.barrier()
    return steps(folder)


@pytest.mark.parametrize("how", [by_writer, in_background])
def test_two_ranks(tmp_path: Path, world: Worlds, how: Callable[[Path, int], None]) -> None:
    assert world(2).run(save_on_ranks, str(tmp_path / "run"), how) == [[2, 3, 4]] * 2


def test_a_disk_of_little_more_than_three_states(tmp_path: Path) -> None:
    """What a save forgets makes room for it: two are kept, and one is saved."""
    with tmpfs(tmp_path / "run", str(3 * STATE + STATE // 2)) as folder:

        def train() -> None:
            os.environ["CASNAP_GC"] = "auto"
            for step in range(SAVES):
                weights = {"w": torch.full((STATE // 4,), step) + torch.randn(STATE // 4)}
                dcp.save(weights, storage_writer=CasnapWriter(folder / f"step_{step}"))
                rotate(folder)

        assert in_child(train) == 0
        assert steps(folder) == [7, 8, 9]
        assert Store(folder).check(data=True).ok


def test_what_stays(tmp_path: Path) -> None:
    """Tagged ones, those that were not taken through DCP, and all without a folder of their own."""
    folder = tmp_path / "run"
    store = Store(folder)
    save(folder, 0)
    store.tag("step_0", "kept")
    store.take({"x": torch.nn.Linear(2, 2)}, "step_1")
    Store(folder, markers=False).take({"x": torch.nn.Linear(2, 2)}, "step_2")
    shutil.rmtree(folder / "step_0")
    shutil.rmtree(folder / "step_1")
    for step in range(3, 7):
        save(folder, step)
    assert steps(folder) == [0, 1, 2, 4, 5, 6]
    store.untag("step_0", "kept")
    save(folder, 7)
    assert steps(folder) == [1, 2, 5, 6, 7]


def test_folders_of_others_within(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logs, a notebook's copies: they stay, and what is casnap's goes without a word."""
    folder, opened = tmp_path / "run", []
    for step in range(6):
        where = folder / f"step_{step}"
        dcp.save(state(step), storage_writer=CasnapWriter(where, retention=Retention(keep_last=2)))
        for number in range(4):
            (where / f"logs{number}").mkdir()
            (where / f"logs{number}/out").write_text("kept")
        os.mkfifo(where / "pipe")
        (where / "link").symlink_to(folder / "nowhere")
        opened.append(len(list(Path("/proc/self/fd").iterdir())))
    assert steps(folder) == [4, 5]
    assert opened[-1] == opened[3]
    assert not [r for r in caplog.records if r.name == "casnap"]
    theirs = {"logs0", "logs1", "logs2", "logs3", "pipe", "link"}
    for step in range(4):
        assert {path.name for path in (folder / f"step_{step}").iterdir()} == theirs
        assert (folder / f"step_{step}/logs3/out").read_text() == "kept"
    (folder / "step_5/.metadata").unlink()
    (folder / "step_5/.metadata").mkdir()
    assert loaded(folder, 5)["step"] == 5


def test_what_was_saved_anew(tmp_path: Path) -> None:
    """A folder that is back when the next save begins was not deleted."""
    folder = tmp_path / "run"
    for step in (0, 1):
        save(folder, step)
    shutil.rmtree(folder / "step_0")
    Store(folder).delete("step_0")
    Store(folder).take({"x": torch.nn.Linear(2, 2)}, "step_0")
    shutil.rmtree(folder / "step_0")
    save(folder, 2)
    assert steps(folder) == [1, 0, 2]  # that commit was not saved through DCP


def test_a_folder_that_was_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in range(3):
        save(folder, step, keep=9)
    (folder / "step_0").rename(folder / "best")
    shutil.rmtree(folder / "step_1")
    save(folder, 3, keep=9)
    assert steps(folder) == [0, 2, 3]
    shutil.rmtree(folder / "best")
    save(folder, 4, keep=9)
    assert steps(folder) == [2, 3, 4]


def test_a_file_system_whose_inodes_change(tmp_path: Path) -> None:
    """A folder that was renamed there has another inode, and its snapshot was forgotten."""
    store = Store(tmp_path / "store").make()

    def save_named(step: int) -> None:
        writer = CasnapWriter(store)
        dcp.save(state(step), checkpoint_id=f"run/step_{step}", storage_writer=writer)

    with volume(tmp_path / "volume", inodes=False) as disk:
        (tmp_path / "store/run").mkdir()
        subprocess.run(["mount", "--bind", disk.path, tmp_path / "store/run"], check=True)
        run = tmp_path / "store/run"
        try:
            for step in range(4):
                save_named(step)
            (run / "step_0").rename(run / "best")
            # Nor does Python delete folders whose inodes change.
            shutil.rmtree(disk.below / "step_1")
            for step in (4, 5):
                save_named(step)
                assert steps(store.uri) == [0, *range(2, step + 1)]
            shutil.rmtree(disk.below / "best")
            save_named(6)
            assert steps(store.uri) == [2, 3, 4, 5, 6]
        finally:
            subprocess.run(["umount", run], check=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_renamed_folder_that_cannot_be_looked_at(tmp_path: Path, code: int) -> None:
    """It was taken for one without a marker, so its snapshot was forgotten."""
    with volume(tmp_path / "volume") as disk:
        folder = disk.path / "run"
        for step in range(3):
            save(folder, step, keep=9)
        (folder / "step_0").rename(folder / "best")
        disk.fail("best", code)
        save(folder, 3, keep=9)
        disk.heal()
        assert steps(folder) == [0, 1, 2, 3]


def test_a_new_folder_with_the_inode_of_a_deleted_one(tmp_path: Path) -> None:
    """A file system may use numbers again."""
    folder = tmp_path / "run"
    for step in range(3):
        save(folder, step, keep=9)
    (folder / "step_0").rename(folder / "step_3")
    for path in (folder / "step_3").iterdir():
        path.unlink()
    save(folder, 3, keep=9)
    assert steps(folder) == [1, 2, 3]


@pytest.mark.parametrize("there", [True, False])
def test_the_folder_of_a_run_that_was_moved_away(tmp_path: Path, there: bool) -> None:
    store = Store(tmp_path / "store").make()
    run = tmp_path / "store/run"
    for step in range(3):
        save(run, step)
    run.rename(tmp_path / "elsewhere")
    if there:
        run.mkdir()
    save(run, 3)
    save(run, 4)
    assert steps(run) == [0, 1, 2, 3, 4]
    shutil.rmtree(run / "step_3")
    save(run, 5)
    assert steps(run) == [0, 1, 2, 4, 5]
    assert store.check().ok


def test_a_disk_that_was_unmounted(tmp_path: Path) -> None:
    """The folders of a run may lie on another one than the store."""
    store = Store(tmp_path / "store").make()

    def save_named(step: int) -> None:
        writer = CasnapWriter(store)
        dcp.save(state(step), checkpoint_id=f"run/step_{step}", storage_writer=writer)

    with tmpfs(tmp_path / "store/run", "1m"):
        for step in range(3):
            save_named(step)
    for step in range(3, 5):
        save_named(step)
    assert steps(tmp_path / "store") == [0, 1, 2, 3, 4]


def test_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was deleted while no process knew it waits for the command."""
    folder = tmp_path / "run"
    for step in range(4):
        save(folder, step)
    assert steps(folder) == [1, 2, 3]
    rotation._runs.clear()
    for step in range(4, 8):
        save(folder, step)
    assert [r.getMessage() for r in caplog.records if r.name == "casnap"] == [
        f"{folder}: folders of snapshots (1) were deleted before this process began to save; "
        f"`casnap prune {folder} --missing-folders` deletes these"
    ]
    assert steps(folder) == [1, 5, 6, 7]
    prune_missing_folders(Store(folder))
    assert steps(folder) == [6, 7]


def test_a_backup_without_markers(tmp_path: Path) -> None:
    """It holds what the loop had deleted before, and no folder: nothing was seen to go."""
    folder = tmp_path / "run"
    for step in range(3):
        save(folder, step)
    shutil.copytree(folder / "casnap-store", tmp_path / "backup/casnap-store")
    rotation._runs.clear()
    for step in range(3, 6):
        save(tmp_path / "backup", step)
    rotation._runs.clear()
    save(tmp_path / "backup", 6)
    assert steps(tmp_path / "backup") == [0, 1, 2, 3, 4, 5, 6]


def test_an_error_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    for step in range(3):
        save(folder, step)

    def fail(_: object) -> None:
        raise PermissionError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(rotation.os, "scandir", fail)
        by_writer(folder, 3)
    assert steps(folder) == [0, 1, 2, 3]
    rotate(folder)
    save(folder, 4)
    assert steps(folder) == [2, 3, 4]
