"""Snapshots whose folders were deleted: `Store(follow_folders=True)` and `prune`."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from casnap import Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend, MemoryBackend
from casnap.errors import StoreError
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
    verdicts = store.prune_missing_folders(dry_run=dry_run).verdicts
    return {v.name.rpartition("/")[2]: "; ".join(v.reasons) for v in verdicts}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store of four snapshots of one run, whose markers this host has seen."""
    store = Store(tmp_path / "store", follow_folders=True).make()
    for step in range(4):
        take(store, step)
    return tmp_path / "store"


# --- following ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["run", "", "a/b"])
def test_a_trainer_that_deletes_folders(tmp_path: Path, run: str) -> None:
    path = tmp_path / "store"
    store = Store(path, follow_folders=True).make()
    for step in range(6):
        take(store, step, run)
        if step >= 2:
            shutil.rmtree(path / run / f"step_{step - 2}")
    # The last one is noticed by the next take.
    assert names(path) == ["step_3", "step_4", "step_5"]
    take(store, 6, run)
    assert names(path) == ["step_4", "step_5", "step_6"]
    store.gc(grace=0)
    assert store.check(data=True).ok


def test_the_command_says_why_it_forgets_none(tmp_path: Path) -> None:
    """Where no take and no earlier call saw the markers that are gone."""
    store = Store(tmp_path / "store").make()
    for step in range(3):
        take(store, step, "run")
    shutil.rmtree(tmp_path / "store/run/step_0")
    said = invoke("prune", tmp_path / "store", "--missing-folders", "--yes").stdout
    assert "0 snapshots forgotten, 3 kept\nwhat had lost its folder before" in said
    assert "`casnap rm` deletes it" in said
    shutil.rmtree(tmp_path / "store/run/step_1")
    said = invoke("prune", tmp_path / "store", "--missing-folders", "--yes").stdout
    assert "1 snapshot forgotten, 2 kept" in said


def test_a_take_looks_only_at_its_own_run(path: Path) -> None:
    store = Store(path, follow_folders=True).make()
    shutil.rmtree(path / "run/step_0")
    take(store, 0, "other")
    assert len(names(path)) == 5
    pending = store.async_take(
        {"s": StateDict(x=1)}, "run/step_9", retention=Retention(keep_last=9)
    )
    pending.wait()
    assert "step_0" not in [s.name.rpartition("/")[2] for s in store.snapshots("run")]


def test_only_a_store_that_follows_does(path: Path) -> None:
    shutil.rmtree(path / "run/step_0")
    take(Store(path), 9)
    Snapshot.take(path / "run/step_10", {"s": StateDict(x=1)})
    assert len(names(path)) == 6
    take(pickle.loads(pickle.dumps(Store(path, follow_folders=True))), 11)
    assert "step_0" not in names(path)


def test_a_view_of_a_folder(path: Path) -> None:
    view = Store(path / "run", follow_folders=True).make()
    shutil.rmtree(path / "run/step_0")
    view.take({"s": StateDict(x=1)}, "step_9")
    shutil.rmtree(path / "run/step_1")
    assert [v.name for v in view.prune_missing_folders().forgotten] == ["step_1"]
    assert names(view) == ["step_2", "step_3", "step_9"]


def test_without_a_missing_folder_nothing_is_committed(path: Path) -> None:
    store = Store(path, follow_folders=True).make()
    seq = store.objects.newest().seq
    take(store, 9)
    assert store.objects.newest().seq == seq + 1
    store.prune_missing_folders()
    assert store.objects.newest().seq == seq + 1
    for step in (0, 1, 2):
        shutil.rmtree(path / f"run/step_{step}")
    store.prune_missing_folders()
    assert store.objects.newest().seq == seq + 2


def test_a_take_stands_if_following_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path / "store"))
    store = Store(backend, follow_folders=True).make()
    for step in range(3):
        take(store, step)
    shutil.rmtree(tmp_path / "store/run/step_0")
    # The second root is the one that forgets.
    fault = Fault(fail(), "put_if_absent", "roots/*", skip=1)
    with backend.during(fault), caplog.at_level(logging.WARNING):
        take(store, 3)
    assert "committed, but its run was not pruned" in caplog.text
    assert len(names(tmp_path / "store")) == 4
    take(store, 4)
    assert "step_0" not in names(tmp_path / "store")


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
    store = Store(path, mirror=faulty, follow_folders=True)
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
    mirror.prune_missing_folders()
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
    for place in ("memory://follow", MemoryBackend("follow")):
        with pytest.raises(StoreError, match="not in a folder of this machine"):
            Store(place, follow_folders=True).make()
    with pytest.raises(StoreError, match="not in a folder of this machine"):
        Store("memory://other").make().prune_missing_folders()
    with pytest.raises(ValueError, match="needs markers"):
        Store(tmp_path / "store", follow_folders=True, markers=False).make()
    assert not (tmp_path / "store").exists()
    store = Store(tmp_path / "store", markers=False).make()
    for step in range(2):
        take(store, step)
        (tmp_path / f"store/run/step_{step}").mkdir(parents=True)
    assert set(reasons(store, dry_run=False).values()) == {"this host saw no marker of it"}
    shutil.rmtree(tmp_path / "store/run/step_0")
    assert set(reasons(store, dry_run=False).values()) == {"this host saw no marker of it"}


def test_what_this_host_has_not_seen_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    for step in range(3):
        take(store, step)
    shutil.rmtree(tmp_path / "store/run/step_0")
    assert reasons(store)["step_0"] == "this host saw no marker of it"
    # A dry run does not count as seeing.
    shutil.rmtree(tmp_path / "store/run/step_1")
    reasons(store, dry_run=False)
    assert names(store) == ["step_0", "step_1", "step_2"]


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
def test_a_marker_that_names_no_such_commit_was_not_seen(tmp_path: Path, change: Change) -> None:
    store = Store(tmp_path / "store").make()
    for step in range(2):
        take(store, step)
    change(tmp_path / "store/run/step_0" / MARKER)
    (tmp_path / "store/run/step_0").mkdir(exist_ok=True)
    reasons(store, dry_run=False)
    shutil.rmtree(tmp_path / "store/run/step_0")
    assert reasons(store, dry_run=False)["step_0"] == "this host saw no marker of it"


def test_a_folder_without_its_marker_stands(path: Path) -> None:
    (path / "run/step_0" / MARKER).unlink()
    assert reasons(Store(path), dry_run=False)["step_0"] == "its folder stands"


# --- what looks like a deletion ------------------------------------------------------------------


def restore_in_place(path: Path) -> None:
    """Restore a backup as rsync --delete does: what is there stays, and markers are deleted."""
    shutil.rmtree(path / "run")
    (path / "run").mkdir()


def restore_in_the_same_folders(path: Path) -> None:
    for folder in list((path / "run").iterdir()):
        shutil.rmtree(folder)


def restore_anew(path: Path) -> None:
    """Restore a backup in place of a store that was lost."""
    backup = path.with_name("backup")
    shutil.copytree(path, backup, ignore=shutil.ignore_patterns("run"))
    shutil.rmtree(path)
    backup.rename(path)
    (path / "run").mkdir()


@pytest.mark.parametrize(
    "restore",
    [restore_in_place, restore_in_the_same_folders, restore_anew],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("looks", [True, False])
def test_a_restored_backup_without_markers(path: Path, restore: Change, looks: bool) -> None:
    restore(path)
    if looks:
        assert "" not in reasons(Store(path), dry_run=False).values()
    store = Store(path, follow_folders=True).make()
    for step in range(4, 8):
        take(store, step)
    shutil.rmtree(path / "run/step_4")
    reasons(store, dry_run=False)
    assert names(path) == [f"step_{step}" for step in (0, 1, 2, 3, 5, 6, 7)]


def test_a_store_that_is_open_while_a_backup_is_restored(path: Path) -> None:
    store = Store(path).make()
    reasons(store)
    run = (path / "run").rename(path.with_name("run"))
    restore_anew(path)
    (path / "run").rmdir()
    run.rename(path / "run")
    shutil.rmtree(path / "run/step_0")
    assert reasons(store, dry_run=False)["step_0"] == "this host saw no marker of it"


def test_two_hosts(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "other-host"))
        there = Store(path).make()
        shutil.rmtree(path / "run/step_0")
        assert reasons(there, dry_run=False)["step_0"] == "this host saw no marker of it"
        shutil.rmtree(path / "run/step_1")
    here = Store(path).make()
    assert reasons(here) == {
        "step_0": "",
        "step_1": "",
        "step_2": "its folder stands",
        "step_3": "its folder stands",
    }
    # Each host forgets what it saw; what is gone already does not matter.
    assert [v.name for v in there.prune_missing_folders().forgotten] == ["run/step_1"]
    assert [v.name for v in here.prune_missing_folders().forgotten] == ["run/step_0"]
    # Another host takes anew under a name that this one has seen.
    take(there, 2)
    shutil.rmtree(path / "run/step_2")
    assert reasons(here, dry_run=False)["step_2"] == "this host saw no marker of it"


def test_a_lost_cache_forgets_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(path / "run/step_0")
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "new"))
    assert reasons(Store(path), dry_run=False)["step_0"] == "this host saw no marker of it"


def test_a_run_that_was_renamed(path: Path) -> None:
    (path / "run").rename(path / "old")
    assert set(reasons(Store(path), dry_run=False).values()) == {"the folder of its run is gone"}
    (path / "run").mkdir()
    (path / "old/step_3").rename(path / "run/step_3")
    take(Store(path, follow_folders=True), 9)
    assert len(names(path)) == 5
    shutil.rmtree(path / "run")
    (path / "run").write_text("no folder")
    assert set(reasons(Store(path), dry_run=False).values()) == {"the folder of its run is gone"}


@pytest.mark.parametrize("name", ["kept", "step_1"])
def test_a_folder_that_was_renamed(path: Path, name: str) -> None:
    shutil.rmtree(path / "run/step_1")
    (path / "run/step_0").rename(path / "run" / name)
    assert reasons(Store(path))["step_0"] == "its folder was renamed"
    take(Store(path, follow_folders=True), 9)
    assert "step_0" in names(path)


def test_a_folder_that_was_deleted_and_taken_anew(path: Path) -> None:
    store = Store(path, follow_folders=True).make()
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
    assert "1 snapshot forgotten, 2 kept" in result.stdout
    text = failure("prune", path, "--missing-folders", "--keep-last", "1", "--yes", status=2)
    assert "--missing-folders takes no rules" in text
    assert "give at least one" in failure("prune", path, "--yes", status=2)
