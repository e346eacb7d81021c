"""Snapshots whose folders were deleted: `prune --missing-folders`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import StoreError
from casnap.integrations.folders import prune_missing_folders
from tests.support.cli_calls import document, failure, invoke
from tests.support.faulty.acts import fail
from tests.support.faulty.backend import Fault, FaultyBackend

MARKER = "casnap-snapshot.json"
Change = Callable[[Path], object]


def take(store: Store, step: int, run: str = "run") -> None:
    state = StateDict(w=torch.full((10,), float(step)))
    store.take({"s": state}, f"{run}/step_{step}".lstrip("/"), overwrite=True)


def names(path: Path | Store) -> list[str]:
    store = path if isinstance(path, Store) else Store(path, create=False)
    return [s.name.rpartition("/")[2] for s in store.snapshots()]


def reasons(store: Store, *, dry_run: bool = True) -> dict[str, str]:
    verdicts = prune_missing_folders(store, dry_run=dry_run).verdicts
    return {v.name.rpartition("/")[2]: "; ".join(v.reasons) for v in verdicts}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("made") / "store").make()
    for step in range(4):
        take(store, step)
    return Path(store.uri)


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """Return a store of four snapshots of one run."""
    return Path(shutil.copytree(made, tmp_path / "store"))


@pytest.mark.parametrize("run", ["run", "", "a/b"])
def test_a_trainer_that_deletes_folders(tmp_path: Path, run: str) -> None:
    path = tmp_path / "store"
    store = Store(path).make()
    for step in range(6):
        take(store, step, run)
        if step >= 2:
            shutil.rmtree(path / run / f"step_{step - 2}")
    assert len(names(path)) == 6
    prune_missing_folders(store)
    assert names(path) == ["step_4", "step_5"]
    store.gc(grace=0)
    assert store.check(data=True).ok


def test_without_a_missing_folder_nothing_is_committed(path: Path) -> None:
    store = Store(path).make()
    seq = store._view.repository.newest().seq
    prune_missing_folders(store)
    assert store._view.repository.newest().seq == seq
    for step in (0, 1, 2):
        shutil.rmtree(path / f"run/step_{step}")
    prune_missing_folders(store)
    assert store._view.repository.newest().seq == seq + 1


# --- never --------------------------------------------------------------------------------------


def test_a_tagged_one_stays_until_it_is_untagged(path: Path) -> None:
    store = Store(path).make()
    store.tag("run/step_1", "best")
    shutil.rmtree(path / "run/step_1")
    for _ in range(2):
        assert reasons(store, dry_run=False)["step_1"] == "tagged"
    store.untag("run/step_1", "best")
    assert reasons(store, dry_run=False)["step_1"] == ""
    assert names(path) == ["step_0", "step_2", "step_3"]


def test_one_that_the_mirror_lacks_stays_until_it_is_there(tmp_path: Path) -> None:
    path, there = tmp_path / "store", tmp_path / "mirror"
    there.mkdir()
    faulty = FaultyBackend(LocalBackend(there))
    store = Store(path, mirror=faulty)
    take(store, 0)
    take(store, 1)
    store.wait_mirrored(60)
    with faulty.during(Fault(fail(), times=None)):
        take(store, 2)
        shutil.rmtree(path / "run/step_2")
        take(store, 3)
        assert reasons(store, dry_run=False)["step_2"] == "not mirrored yet"
    assert store.mirror is not None
    store.mirror.stop()
    store = Store(path, mirror=there)
    store.wait_mirrored(60)
    assert reasons(store, dry_run=False)["step_2"] == ""
    # The copies at the mirror have markers, too.
    mirror = Store(there).make()
    prune_missing_folders(mirror)
    shutil.rmtree(there / "run/step_1")
    assert reasons(mirror, dry_run=False)["step_1"] == "copied from another store"
    assert names(mirror) == ["step_0", "step_1", "step_2", "step_3"]
    store.mirror.stop()  # type: ignore[union-attr]


def test_a_copied_one_stays(path: Path, tmp_path: Path) -> None:
    other = Store(tmp_path / "other").make()
    Store(path).copy("run", to=other)
    take(other, 9)
    assert set(reasons(other, dry_run=False).values()) == {"its folder stands"}
    for step in (2, 9, 3):
        shutil.rmtree(tmp_path / f"other/run/step_{step}")
    found = reasons(other, dry_run=False)
    assert found["step_2"] == found["step_3"] == "copied from another store"
    assert found["step_9"] == ""


def test_a_remote_store_and_one_without_markers(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not in a folder of this machine"):
        prune_missing_folders(Store("memory://other").make())
    store = Store(tmp_path / "store", markers=False).make()
    for step in range(2):
        take(store, step)
    (tmp_path / "store/run/step_0").mkdir(parents=True)
    assert reasons(store, dry_run=False)["step_1"] == "no snapshot of its run has its folder"


def forge_another_commit(marker: Path) -> None:
    marker.write_text(json.dumps({"casnap": "snapshot", "commit": "00" * 16}))


def make_a_pipe(marker: Path) -> None:
    marker.unlink()
    os.mkfifo(marker)


@pytest.mark.parametrize(
    "change",
    [forge_another_commit, make_a_pipe, lambda m: m.write_text("[" * 9999), lambda m: m.unlink()],
    ids=["another", "pipe", "garbage", "none"],
)
def test_a_marker_that_names_no_such_commit_proves_nothing(tmp_path: Path, change: Change) -> None:
    store = Store(tmp_path / "store").make()
    for step in range(2):
        take(store, step)
    change(tmp_path / "store/run/step_0" / MARKER)
    (tmp_path / "store/run/step_0").mkdir(exist_ok=True)
    shutil.rmtree(tmp_path / "store/run/step_1")
    assert reasons(store, dry_run=False)["step_1"] == "no snapshot of its run has its folder"


def test_a_folder_without_its_marker_stands(path: Path) -> None:
    (path / "run/step_0" / MARKER).unlink()
    assert reasons(Store(path), dry_run=False)["step_0"] == "its folder stands"


# --- what looks like a deletion ------------------------------------------------------------------


def restore_in_place(path: Path) -> None:
    """Restore a backup as rsync --delete does: what is there stays, and markers are deleted."""
    shutil.rmtree(path / "run")
    (path / "run").mkdir()


def restore_anew(path: Path) -> None:
    """Restore a backup in place of a store that was lost."""
    backup = path.with_name("backup")
    shutil.copytree(path, backup, ignore=shutil.ignore_patterns("run"))
    shutil.rmtree(path)
    backup.rename(path)
    (path / "run").mkdir()


@pytest.mark.parametrize(
    "restore",
    [restore_in_place, restore_anew],
    ids=lambda f: f.__name__,
)
def test_a_restored_backup_without_markers(path: Path, restore: Change) -> None:
    restore(path)
    assert "" not in reasons(Store(path), dry_run=False).values()
    assert names(path) == ["step_0", "step_1", "step_2", "step_3"]


def test_a_run_that_was_renamed(path: Path) -> None:
    (path / "run").rename(path / "old")
    assert set(reasons(Store(path), dry_run=False).values()) == {"the folder of its run is gone"}
    (path / "run").write_text("no folder")
    assert set(reasons(Store(path), dry_run=False).values()) == {"the folder of its run is gone"}


@pytest.mark.parametrize("name", ["kept", "step_1"])
def test_a_folder_that_was_renamed(path: Path, name: str) -> None:
    shutil.rmtree(path / "run/step_1")
    (path / "run/step_0").rename(path / "run" / name)
    assert reasons(Store(path))["step_0"] == "its folder was renamed"
    reasons(Store(path), dry_run=False)
    assert "step_0" in names(path)


def test_a_folder_that_was_deleted_and_taken_anew(path: Path) -> None:
    store = Store(path).make()
    shutil.rmtree(path / "run/step_0")
    take(store, 0)
    assert names(path) == ["step_1", "step_2", "step_3", "step_0"]
    assert set(reasons(store).values()) == {"its folder stands"}
    shutil.rmtree(path / "run/step_0")
    assert reasons(store, dry_run=False)["step_0"] == ""


# --- the command --------------------------------------------------------------------------------


def test_the_command(path: Path) -> None:
    shutil.rmtree(path / "run/step_0")
    plan = document("prune", path, "--missing-folders", "--dry-run")
    assert plan["dry_run"]
    assert [s["kept"] for s in plan["snapshots"]] == [False, True, True, True]
    assert plan["snapshots"][1]["reasons"] == ["its folder stands"]
    assert len(names(path)) == 4
    done = document("prune", path, "--prefix", "run", "--missing-folders", "--yes")
    assert (done["snapshots"], done["dry_run"]) == (plan["snapshots"], False)
    assert names(path) == ["step_1", "step_2", "step_3"]
    shutil.rmtree(path / "run/step_1")
    result = invoke("prune", path, "--missing-folders", "--yes", "--gc", "--grace", "0s")
    assert "1 snapshot deleted, 2 kept" in result.stdout
    text = failure("prune", path, "--missing-folders", "--keep-last", "1", "--yes", status=2)
    assert "--missing-folders takes no rules" in text
    assert "give at least one" in failure("prune", path, "--yes", status=2)
