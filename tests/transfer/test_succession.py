"""Nodes that continue one another's run at one mirror."""

from __future__ import annotations

import logging
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from casnap import Retention, Snapshot, Store
from casnap.errors import MirrorError
from tests.support.cli_calls import document, invoke
from tests.support.copies import mirrored, names
from tests.support.faults import (
    WRITING_CALLS,
    app_state,
    assert_holds,
    backend_faults,
    in_child,
    memory_folder,
    start,
    take,
    wait,
)
from tests.support.faulty import Fault, FaultyBackend
from tests.support.faulty.backend import Call
from tests.support.sweep import sweep

LAST_TWO, LAST_SIX = Retention(keep_last=2), Retention(keep_last=6)


def begin(folder: Path, node: str, **options: Any) -> Store:
    return mirrored(folder / node, folder / "there", **options)


def train(store: Store, steps: range, shift: int = 0) -> None:
    for step in steps:
        store.take(app_state(step + shift), f"step_{step}", retention=LAST_TWO)
        store.wait_mirrored(60)


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def newest(store: Store) -> Snapshot:
    latest = store.latest()
    assert latest is not None
    return latest


def test_a_rollback_replaces_the_old_branch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(begin(tmp_path, "one", retention=LAST_SIX), range(11))
    there = Store(tmp_path / "there").make()
    assert names(there) == [f"step_{n}" for n in range(5, 11)]
    two = begin(tmp_path, "two", retention=LAST_SIX)
    assert newest(two).name == "step_10"
    assert_holds(two["step_7"], 7)
    train(two, range(8, 9), shift=100)
    assert names(there) == ["step_5", "step_6", "step_7", "step_8"]
    assert_holds(newest(begin(tmp_path, "three")), 108)
    train(two, range(9, 14), shift=100)
    assert names(there) == [f"step_{n}" for n in range(8, 14)]
    for step in range(8, 14):
        assert_holds(there[f"step_{step}"], step + 100)
    assert len(names(two)) <= 3
    said = [r for r in caplog.records if "continues the run" in r.message]
    assert len(said) == 1
    assert "step_8, step_9, step_10 of another branch" in said[0].message
    # The markers of what is gone went too.
    assert not (tmp_path / "there/step_5").exists()


def test_the_retention_counts_all_lives(tmp_path: Path) -> None:
    for life in range(4):
        node = begin(tmp_path, f"node{life}", retention=LAST_SIX)
        if life:
            assert newest(node).name == f"step_{4 * life - 1}"
        train(node, range(4 * life, 4 * life + 4))
    assert names(Store(tmp_path / "there")) == [f"step_{n}" for n in range(10, 16)]


def test_a_node_that_lives_on_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "casnap")
    one = begin(tmp_path, "one", retention=LAST_TWO)
    train(one, range(3))
    two = begin(tmp_path, "two", retention=LAST_SIX)
    assert newest(two).name == "step_2"
    # It mirrors what the other one has not seen, before it hears of it.
    train(one, range(3, 5))
    train(two, range(3, 4), shift=100)
    there = Store(tmp_path / "there").make()
    assert names(there) == ["step_3"]
    for step in range(5, 15):
        one.take(app_state(step), f"step_{step}", retention=LAST_TWO)
        with pytest.raises(MirrorError, match=f"never gets .*{two.id}"):
            one.wait_mirrored(60)
    assert one.mirror is not None
    assert two.id in str(one.mirror.status().error)
    assert document("mirror", tmp_path / "one")["succeeded"] == names(one)
    shown = invoke("mirror", tmp_path / "one").stdout
    assert "of runs that another store continues there stay here alone: step_13, step_14" in shown
    assert two.id in shown
    one.take(app_state(15), "step_15", retention=LAST_TWO)
    assert len(names(one)) <= 3
    assert len(caplog.records) == 1
    # To go on with the run, its disk begins anew, or it resumes from the other one.
    assert names(there) == ["step_3"]
    assert_holds(newest(one), 103)
    for folder in ("one", "empty"):
        again = begin(tmp_path, folder, retention=LAST_SIX)
        assert newest(again).path.startswith(str(tmp_path / "there"))
        step = 20 if folder == "one" else 30
        train(again, range(step, step + 1))
    assert names(there) == ["step_3", "step_20", "step_30"]


def test_what_an_old_disk_still_lacks_stays_there(tmp_path: Path) -> None:
    """A node comes back with its disk: what it had not mirrored is of a branch that is dead."""
    one = begin(tmp_path, "one")
    train(one, range(2))
    assert one.mirror is not None
    one.mirror.stop()
    take(one, 2)
    two = begin(tmp_path, "two")
    assert newest(two).name == "step_1"
    train(two, range(2, 4), shift=100)
    again = begin(tmp_path, "one")
    assert_holds(newest(again), 103)
    again.take(app_state(104), "step_4")
    # The run is mirrored again, so nothing is left to tell.
    again.wait_mirrored(60)
    there = Store(tmp_path / "there").make()
    assert names(there) == [f"step_{n}" for n in range(5)]
    for step, content in enumerate((0, 1, 102, 103, 104)):
        assert_holds(there[f"step_{step}"], content)


def test_of_two_successors_one_continues(tmp_path: Path) -> None:
    train(begin(tmp_path, "one"), range(2))
    two, three = begin(tmp_path, "two"), begin(tmp_path, "three")
    for node in (two, three):
        assert newest(node).name == "step_1"
    train(two, range(2, 3))
    take(three, 3)
    with pytest.raises(MirrorError, match="never gets step_3"):
        three.wait_mirrored(60)
    assert names(Store(tmp_path / "there")) == ["step_0", "step_1", "step_2"]


def test_a_snapshot_that_was_restored_by_its_path_is_followed(tmp_path: Path) -> None:
    one = begin(tmp_path, "one")
    for step in range(3):
        one.take(app_state(step), f"run/step_{step}")
    one.wait_mirrored(60)
    assert_holds(Snapshot(tmp_path / "there/run/step_1"), 1)
    two = begin(tmp_path, "two")
    two.take(app_state(102), "run/step_2")
    two.wait_mirrored(60)
    there = Store(tmp_path / "there").make()
    assert names(there) == ["run/step_0", "run/step_1", "run/step_2"]
    assert_holds(there["run/step_2"], 102)


@pytest.mark.parametrize("skip", [0, 1])
def test_the_old_node_mirrors_right_before_a_root(
    tmp_path: Path, there: FaultyBackend, skip: int
) -> None:
    """The number of the root is lost; the next one is judged on what was put meanwhile."""
    may_take, took = tmp_path / "may take", tmp_path / "took"

    def old_node() -> None:
        one = begin(tmp_path, "one")
        train(one, range(2))
        took.touch()
        await_file(may_take)
        take(one, 2)
        if skip:
            with pytest.raises(MirrorError, match="never gets step_2"):
                one.wait_mirrored(60)
        else:
            one.wait_mirrored(60)
        took.touch()

    pid = start(old_node)
    await_file(took)
    two = mirrored(tmp_path / "two", there)
    assert newest(two).name == "step_1"

    def meanwhile(call: Call) -> object:
        took.unlink()
        may_take.touch()
        await_file(took)
        return call.go()

    with there.during(Fault(meanwhile, "put_if_absent", "roots/*", skip=skip)) as (fault,):
        for step in (2, 3):
            two.take(app_state(step + 100), f"step_{step}")
            two.wait_mirrored(60)
    assert fault.struck
    copy = Store(tmp_path / "there").make()
    for step, content in enumerate((0, 1, 102, 103)):
        assert_holds(copy[f"step_{step}"], content)
    assert wait(pid) == 0


def test_who_did_not_resume_deletes_nothing(tmp_path: Path) -> None:
    """Another experiment names the mirror of this one by mistake."""
    train(begin(tmp_path, "one"), range(3))
    two = begin(tmp_path, "two", retention=Retention(keep_last=1))
    take(two, 1)
    with pytest.raises(MirrorError, match="never gets step_1"):
        two.wait_mirrored(60)
    there = Store(tmp_path / "there").make()
    assert names(there) == ["step_0", "step_1", "step_2"]
    assert_holds(there["step_1"], 1)


def test_other_runs_and_tags_are_left_alone(tmp_path: Path) -> None:
    one = begin(tmp_path, "one")
    for run in ("a", "b"):
        for step in range(4):
            one.take(app_state(step), f"{run}/step_{step}")
    one.wait_mirrored(60)
    there = Store(tmp_path / "there").make()
    there.take(app_state(0), "a/theirs")
    there.tag("a/step_3", "best")
    two = begin(tmp_path, "two", retention=LAST_TWO)
    assert newest(two).name == "a/theirs"
    assert_holds(two["a/step_0"], 0)
    two.take(app_state(101), "a/step_1")
    two.wait_mirrored(60)
    runs = ["a/step_3", *(f"b/step_{n}" for n in range(4)), "a/theirs", "a/step_1"]
    assert names(there) == runs
    # The other run is still the first node's.
    one.take(app_state(4), "b/step_4")
    one.mirror.wait(60, None)  # type: ignore[union-attr]
    assert "b/step_4" in there


def test_a_disk_that_was_copied_goes_on_where_it_was(tmp_path: Path) -> None:
    """The number of a root at one mirror says nothing at another one."""
    one = begin(tmp_path, "one")
    train(one, range(2))
    assert one.mirror is not None
    one.mirror.stop()
    two = begin(tmp_path, "two")
    assert newest(two).name == "step_1"
    train(two, range(2, 4))
    two.mirror.stop()  # type: ignore[union-attr]
    shutil.copytree(tmp_path / "two", tmp_path / "copied")
    other = mirrored(tmp_path / "other", tmp_path / "elsewhere")
    other.take(app_state(9), "step_9")
    other.wait_mirrored(60)
    Store(tmp_path / "copied").configure(mirror="none")
    moved = mirrored(tmp_path / "copied", tmp_path / "elsewhere")
    with pytest.raises(MirrorError, match="never gets step_2, step_3"):
        moved.wait_mirrored(60)
    assert names(Store(tmp_path / "elsewhere")) == ["step_9"]


# --- killed ---------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_successor_is_killed_at_any_call() -> None:
    """After each call that writes, on either side; another one with an empty disk succeeds it."""
    with memory_folder() as base:
        train(begin(base, "one", retention=LAST_SIX), range(8))
        for strike_at in sweep(times=2):
            with memory_folder() as folder:
                shutil.copytree(base / "there", folder / "there")

                def work(folder: Path = folder, strike_at: int = strike_at) -> None:
                    two = begin(folder, "two", retention=LAST_SIX)
                    assert two["step_4"].name == "step_4"
                    with backend_faults(strike_at, names=WRITING_CALLS, after=True):
                        train(two, range(5, 7), shift=100)

                status = in_child(work)
                assert status in (0, -signal.SIGKILL)
                there = Store(folder / "there").make()
                held = names(there)
                assert there.check(data=True).ok
                last = newest(there)
                step = int(last.name.removeprefix("step_"))
                # All of the old branch, or nothing that came after the rollback.
                if step == 7:
                    assert held == [f"step_{n}" for n in range(2, 8)]
                    assert status != 0
                else:
                    assert held == [f"step_{n}" for n in range(2, step + 1)]
                    assert_holds(last, step + 100)
                three = begin(folder, "three", retention=LAST_SIX)
                assert newest(three).name == last.name
                train(three, range(step + 1, step + 3), shift=200)
                assert names(there) == [f"step_{n}" for n in range(step - 3, step + 3)]
                if status == 0:
                    print(f"killed at {strike_at} calls")
                    return
