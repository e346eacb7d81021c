"""`Store.prune`, takes that prune, and `casnap prune`."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from casnap import NewStore, Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.cli.option_types import duration, duration_or_none
from casnap.errors import FencedError, SnapshotNotFoundError
from tests.support.cli_calls import Terminal, document, failure, fill, invoke
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    elsewhere,
    faults,
    files,
    take,
)

TINY = {"s": StateDict(x=1)}

# --- Store.prune ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for step in range(6):
        take(folder / "six", step)
    fill(folder / "runs")
    return folder


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """Return a store of six snapshots."""
    return Path(shutil.copytree(made / "six", tmp_path / "store"))


def names(path: Path) -> list[str]:
    return [s.name for s in Store(path, create=False).snapshots()]


def test_what_is_no_retention_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    for use in (
        lambda bad: store.take(TINY, "x", retention=bad),
        lambda bad: store.async_take(TINY, "x", retention=bad),
        lambda bad: store.prune(bad),
        lambda bad: store.prune(bad, dry_run=True),
    ):
        with pytest.raises(TypeError, match=r"casnap\.Retention"):
            use({"keep_last": 3})
    assert store.snapshots() == []


def test_prune_forgets_all_in_one_commit(path: Path) -> None:
    store = Store(path).make()
    root = store._view.repository.newest()
    report = store.prune(Retention(keep_last=2, keep_every=3))
    assert [v.name for v in report.deleted] == ["step_1", "step_2"]
    assert {v.name: v.reasons for v in report.kept} == {
        "step_0": ("every 3",),
        "step_3": ("every 3",),
        "step_4": ("last 2",),
        "step_5": ("last 2",),
    }
    assert names(path) == ["step_0", "step_3", "step_4", "step_5"]
    assert store._view.repository.newest().seq == root.seq + 1
    assert sorted(p.parent.name for p in path.glob("*/casnap-snapshot.json")) == names(path)
    for step in (0, 3, 4, 5):
        assert_holds(store[f"step_{step}"], step)


def test_dry_run_and_nothing_to_forget_write_nothing(path: Path) -> None:
    before = files(path)
    store = Store(path).make()
    report = store.prune(Retention(keep_last=1), dry_run=True)
    assert report.dry_run
    assert len(report.deleted) == 5
    report = store.prune(Retention(keep_last=6))
    assert not report.dry_run
    assert (len(report.deleted), len(report.kept)) == (0, 6)
    assert files(path) == before


def test_prune_of_a_folder_and_of_a_view(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    for run in ("run1", "run10", "run1/sub", "other"):
        for step in range(2):
            store.take(TINY, f"{run}/step_{step}")
    report = store.prune(Retention(keep_last=1), prefix="run1/")
    assert [v.name for v in report.deleted] == ["run1/step_0", "run1/sub/step_0"]
    view = Store(tmp_path / "store/run10").make()
    assert [v.name for v in view.prune(Retention(keep_last=1)).deleted] == ["step_0"]
    assert not (tmp_path / "store/run10/step_0").exists()
    left = ["run1/step_1", "run10/step_1", "run1/sub/step_1", "other/step_0", "other/step_1"]
    assert [s.name for s in store.snapshots()] == left


def meanwhile(work: Callable[[], object]) -> Any:
    """Do something right before the next root is put, so that the put is too late."""
    return faults(LocalBackend, ["put_if_absent"], 0, elsewhere(work))


def test_what_is_tagged_in_the_meantime_is_kept(path: Path) -> None:
    with meanwhile(lambda: Store(path).tag("step_1", "best")) as calls:
        report = Store(path).prune(Retention(keep_last=1))
    assert calls.struck
    assert names(path) == ["step_1", "step_5"]
    assert {v.name: v.reasons for v in report.kept}["step_1"] == ("tagged",)


def test_what_is_replaced_or_taken_in_the_meantime_is_judged_anew(path: Path) -> None:
    def replace() -> None:
        take(Store(path), 0, overwrite=True)

    with meanwhile(replace):
        report = Store(path).prune(Retention(keep_last=1))
    assert [v.name for v in report.kept] == names(path) == ["step_0"]
    assert_holds(Store(path)["step_0"], 0)


def test_what_is_forgotten_in_the_meantime_is_no_error(path: Path) -> None:
    with meanwhile(lambda: Store(path).prune(Retention(keep_last=1))):
        report = Store(path).prune(Retention(keep_last=2))
    assert report.deleted == []
    assert names(path) == ["step_5"]


def test_a_handle_that_is_held_does_not_keep_and_delete_goes_by_commit(path: Path) -> None:
    held = Store(path)["step_0"]
    take(Store(path), 0, overwrite=True)
    with pytest.raises(SnapshotNotFoundError, match="replaced in the meantime"):
        Store(path).delete("step_0", commit_id=held.commit_id)
    assert "step_0" in names(path)
    assert (path / "step_0/casnap-snapshot.json").exists()
    Store(path).delete("step_0", commit_id=Store(path)["step_0"].commit_id)
    assert "step_0" not in names(path)
    with pytest.raises(SnapshotNotFoundError):
        Store(path).delete("step_0", commit_id=held.commit_id)


def test_what_is_replaced_while_it_is_deleted_stays(path: Path) -> None:
    with (
        meanwhile(lambda: take(Store(path), 0, overwrite=True)),
        pytest.raises(SnapshotNotFoundError, match="replaced in the meantime"),
    ):
        Store(path).delete("step_0")
    assert_holds(Store(path)["step_0"], 0)


# --- takes that prune -------------------------------------------------------------------------


def test_a_take_prunes_its_own_run_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    keep = Retention(keep_last=2)
    for name in ("top", "run/sub/1", "run/sub/2", "run/sub/3", "run2/1", "run2/2", "run2/3"):
        store.take(TINY, name)
    for step in range(4):
        store.take(TINY, f"run/step_{step}", retention=keep)
    assert [s.name for s in store.snapshots("run")] == [
        "run/sub/1",
        "run/sub/2",
        "run/sub/3",
        "run/step_2",
        "run/step_3",
    ]
    assert len(store.snapshots("run2")) == 3
    store.take(TINY, "top2", retention=Retention(keep_last=1))
    assert [s.name for s in store.snapshots() if "/" not in s.name] == ["top2"]
    assert len(store.snapshots("run2")) == 3


def test_the_snapshot_just_taken_is_kept_whatever_the_rules_say(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    for step, loss in enumerate([1.0, 3.0, 2.0]):
        options: dict[str, Any] = {"metadata": {"loss": loss}}
        store.take(TINY, f"step_{step}", retention=Retention(keep_best=("loss", 1)), **options)
        assert f"step_{step}" in store
    assert names(tmp_path / "store") == ["step_0", "step_2"]


def test_all_ways_to_take_prune_through_snapshot_too(tmp_path: Path) -> None:
    keep = Retention(keep_last=1)
    Snapshot.take(tmp_path / "run/a", TINY, retention=keep)
    Snapshot.take(tmp_path / "run/b", TINY, retention=keep)
    assert names(tmp_path / "run") == ["b"]
    Snapshot.async_take(tmp_path / "run/c", TINY, retention=keep).wait()
    assert names(tmp_path / "run") == ["c"]
    store = Store(tmp_path / "run").make()
    for step in range(5):
        pending = store.async_take(app_state(step), f"step_{step}", retention=keep)
    snapshot = pending.wait()
    assert names(tmp_path / "run") == ["step_4"]
    assert_holds(snapshot, 4)


def test_a_take_and_its_pruning_are_one_commit(path: Path) -> None:
    store = Store(path)
    before = store._view.repository.newest().seq
    take(path, 7, retention=Retention(keep_last=2))
    assert store._view.repository.newest().seq == before + 1
    assert names(path) == ["step_5", "step_7"]
    assert not (path / "step_4").exists()
    take(path, 7, overwrite=True, retention=Retention(keep_last=1))
    assert store._view.repository.newest().seq == before + 2
    assert names(path) == ["step_7"]


class Undecided(Retention):
    """Rules that cannot judge."""

    def reasons(self, *_: Any) -> dict[str, list[str]]:
        raise self.error

    error: Exception


@pytest.mark.parametrize(
    ("error", "in_background"), [(FencedError("late"), True), (ValueError("odd"), False)]
)
def test_a_retention_that_cannot_judge_leaves_the_take_done(
    path: Path, caplog: pytest.LogCaptureFixture, error: Exception, in_background: bool
) -> None:
    store, keep = Store(path), Undecided(keep_last=1)
    object.__setattr__(keep, "error", error)
    if in_background:
        snapshot = store.async_take(app_state(7), "step_7", retention=keep).wait()
    else:
        snapshot = store.take(app_state(7), "step_7", retention=keep)
    assert_holds(snapshot, 7)
    assert len(names(path)) == 7
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.name == "casnap"
    assert "step_7 is stored, but its run is not pruned" in record.getMessage()
    assert str(error) in record.getMessage()
    store.prune(Retention(keep_last=1))
    assert names(path) == ["step_7"]


# --- casnap prune -----------------------------------------------------------------------------


@pytest.fixture
def own_store(made: Path, tmp_path: Path) -> Path:
    """Return a store of two runs, of three snapshots and of one."""
    return Path(shutil.copytree(made / "runs", tmp_path / "ckpts"))


def test_prune(own_store: Path) -> None:
    Store(own_store).tag("run1/step_1", "best")
    lines = invoke("prune", own_store, "--keep-last", 1, "--yes").stdout.splitlines()
    assert lines[0].split() == ["NAME", "TIME", "KEEP", "METADATA"]
    assert "- deleted" in lines[1]
    assert "tagged" in lines[2]
    assert "#best" in lines[2]
    assert "last 1" in lines[3]
    assert lines[-2] == "1 snapshot deleted, 3 kept"
    assert lines[-1].startswith(f"`casnap gc {own_store} --grace 0` frees the bytes; no process")
    assert names(own_store) == ["run1/step_1", "run1/step_2", "run2/step_0"]


def test_prune_dry_run_as_json(own_store: Path) -> None:
    found = document("prune", own_store, "--keep-best", "loss:1", "--dry-run")
    assert found["store"] == str(own_store)
    assert found["dry_run"] is True
    assert [s["kept"] for s in found["snapshots"]] == [False, False, True, True]
    first, *_, last = found["snapshots"]
    assert first["name"] == "run1/step_0"
    assert first["commit"] == Store(own_store)["run1/step_0"].commit_id
    assert first["metadata"] == {"loss": 2.5, "step": 0}
    assert first["reasons"] == []
    assert last["reasons"] == ["best 1 by loss: none of the run has it"]
    text = invoke("prune", own_store, "--keep-last", 1, "--dry-run").stdout
    assert text.splitlines()[-1] == "2 snapshots would be deleted, 2 kept"
    assert len(names(own_store)) == 4


def test_prune_by_every_rule(own_store: Path) -> None:
    def forgotten(*arguments: object) -> list[str]:
        found = document("prune", own_store, "--dry-run", *arguments)
        return [s["name"] for s in found["snapshots"] if not s["kept"]]

    first, second, third = (f"run1/step_{n}" for n in range(3))
    assert forgotten("--keep-every", 2) == [second]
    assert forgotten("--keep-within", "7d") == []
    assert forgotten("--keep-best", "loss:1:max") == [second, third]
    assert forgotten("--keep-best", "loss:1:max", "--keep-best", "step:1:min") == [second, third]
    assert forgotten("--keep-best", "loss:1", "--keep-best", "step:1") == [second]
    assert forgotten("--keep-last", 1, "--keep-every", 5) == [second]
    assert forgotten("--keep-best", "a:b:1") == []
    assert forgotten("--prefix", "run1", "--keep-last", 1) == [first, second]
    assert forgotten("--prefix", "run2/", "--keep-last", 1) == []


def test_prune_of_a_folder(own_store: Path) -> None:
    document("prune", own_store / "run1", "--keep-last", 1, "--yes")
    assert names(own_store) == ["run1/step_2", "run2/step_0"]
    assert "run1" in failure("prune", own_store, "--prefix", "run3", "--keep-last", 1, "--yes")
    for arguments in ([own_store, "--prefix", "run1/step_2"], [own_store / "run1/step_2"]):
        message = failure("prune", *arguments, "--keep-last", 1, "--yes")
        assert "'run1/step_2' is a snapshot" in message
    assert len(names(own_store)) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give at least one of --keep-last, --keep-every"),
        (["--keep-last", 0], "--keep-last is a whole number"),
        (["--keep-last", "x"], "--keep-last"),
        (["--keep-within", "7"], "write 30s, 15m, 24h, 7d"),
        (["--keep-within", "0"], "write 30s, 15m, 24h, 7d, 2w or 1.5h"),
        (["--keep-best", "loss"], "write loss:3 or accuracy:3:max"),
        (["--keep-best", "loss:0"], "whole number"),
        (["--keep-best", "loss:1:\x1b"], "is not a rule"),
    ],
)
def test_prune_without_a_rule_that_makes_sense(
    own_store: Path, arguments: list[object], problem: str
) -> None:
    message = failure("prune", own_store, "--yes", *arguments, status=2)
    assert problem in message.replace("\n", " ")
    assert "\x1b" not in message
    assert len(names(own_store)) == 4


def test_prune_does_not_go_ahead_unasked(own_store: Path) -> None:
    assert "--yes" in failure("prune", own_store, "--keep-last", 1, status=2)
    assert len(names(own_store)) == 4


def test_prune_asks_on_a_terminal(own_store: Path) -> None:
    terminal = Terminal("prune", own_store, "--keep-last", 1)
    asked = terminal.read_until("Delete 2 snapshots?")
    assert "run1/step_0" in asked
    assert "run1/step_2" not in asked
    os.write(terminal.master, b"y\n")
    assert terminal.rest()[0] == 0
    assert len(names(own_store)) == 2


def test_prune_of_an_empty_store(tmp_path: Path) -> None:
    Store(tmp_path / "store").make()
    text = invoke("prune", tmp_path / "store", "--keep-last", 1, "--yes").stdout
    assert text == "0 snapshots deleted, 0 kept\n"


def test_durations() -> None:
    written = ("30s", "15m", "24h", "7d", "2w", "1.5h")
    for read in (duration, duration_or_none):
        assert [read(t) for t in written] == [30, 900, 86400, 604800, 1209600, 5400]
    for nothing in ("0", "0s"):
        assert duration_or_none(nothing) == 0
        with pytest.raises(click.BadParameter, match=r"2w or 1\.5h"):
            duration(nothing)
    for text in (
        "",
        "7",
        "d",
        "-1d",
        "1 d",
        "1D",
        "nan",
        "1e3s",
        "1y",
        "1.s",
        "٣d",
        "9" * 400 + "s",
    ):
        for read in (duration, duration_or_none):
            with pytest.raises(click.BadParameter, match="write 30s, 15m, 24h, 7d, 2w"):
                read(text)


def test_within_goes_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    store.take(TINY, "old")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    store.take(TINY, "new")
    assert [v.name for v in store.prune(Retention(keep_within=600)).deleted] == ["old"]


def test_a_metric_that_no_snapshot_has_is_warned_of_once_a_store(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = Retention(keep_best=[("accuracy", 1, "max"), ("loss", 1)])
    store = Store(path).make()
    for step in range(3):
        Store(path).take(
            TINY, f"a/{step}", metadata={"accuracy": step, "loss": "low"}, retention=rule
        )
    [record] = caplog.records
    assert (record.levelname, "none has 'loss' as a number" in record.getMessage()) == (
        "WARNING",
        True,
    )
    assert len(store.snapshots("a")) == 3
    other = Store(path.parent / "other").make()
    for step in range(3):
        other.take(TINY, f"a/{step}", metadata={"accuracy": step, "loss": 1.0}, retention=rule)
    assert len(caplog.records) == 1
    other.take(TINY, "b/1", retention=Retention(keep_best=("loss", 1)))
    assert len(caplog.records) == 2
