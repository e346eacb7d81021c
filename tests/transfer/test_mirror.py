"""A store with a mirror: what gets there and when, what is kept until then, and what is refused."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import shutil
import threading
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from casnap import NewStore, Retention, StateDict, Store
from casnap.errors import (
    BackendError,
    InvalidNameError,
    MirrorError,
    SnapshotExistsError,
    SnapshotNotFoundError,
)
from casnap.mirror import mirror
from casnap.transfer.snapshot_copy import SnapshotCopy
from tests.support.cli_calls import document, failure, invoke, process
from tests.support.copies import assert_copied, await_failure, mirrored, names
from tests.support.faults import CHUNK, app_state, assert_holds, take
from tests.support.faulty import Fault, FaultyBackend, fail
from tests.support.faulty.backend import Call

DEAD = Fault(fail(), times=None)
LAST = Retention(keep_last=1)


def lacking(store: Store) -> int:
    assert store.mirror is not None
    return store.mirror.status().snapshots


# --- what it copies -------------------------------------------------------------------------------


def test_it_gets_each_snapshot(tmp_path: Path) -> None:
    store = mirrored(tmp_path / "here", tmp_path / "there")
    for step in range(3):
        take(store, step)
    pending = store.async_take(app_state(3), "step_3", metadata={"step": 3})
    store.wait_mirrored(60)
    pending.wait()
    assert lacking(store) == 0
    copy = Store(tmp_path / "there").make()
    assert names(copy) == [f"step_{step}" for step in range(4)]
    assert copy.chunk_size == CHUNK
    assert all(s.tags == () for s in (*store.snapshots(), *copy.snapshots()))
    assert_copied(store, copy)
    take(store, 0, overwrite=True)
    store.tag("step_1", "best")
    store.wait_mirrored(60)
    assert copy["step_0"].commit_id == store["step_0"].commit_id
    store.delete("step_2")
    assert "step_2" in copy


def test_what_was_there_before_is_mirrored_too(tmp_path: Path) -> None:
    plain = Store(tmp_path / "here", create=NewStore(chunk_size=CHUNK, codec="zstd")).make()
    for step in range(3):
        take(plain, step)
    plain.tag("step_1", "best")
    store = mirrored(tmp_path / "here", tmp_path / "there")
    store.wait_mirrored(60)
    copy = Store(tmp_path / "there").make()
    assert names(copy) == names(plain)
    assert copy["step_1"].tags == ("best",)
    assert copy.settings["codec"] == "zstd"
    # Later takes without a mirror are not its business.
    take(plain, 3)
    store.wait_mirrored(60)
    assert names(copy) == ["step_0", "step_1", "step_2"]


def test_a_mirror_in_a_folder_of_a_store(tmp_path: Path) -> None:
    """Two runs of the same names share one store, and its chunks."""
    shared = Store(tmp_path / "shared", create=NewStore(chunk_size=CHUNK)).make()
    stores = [mirrored(tmp_path / n, f"{tmp_path}/shared/{n}") for n in "ab"]
    for store in stores:
        take(store, 1)
        store.wait_mirrored(60)
    assert names(shared) == ["a/step_1", "b/step_1"]
    assert shared["b/step_1"].stats.new_bytes < CHUNK
    assert_holds(shared["b/step_1"], 1)


def test_other_processes_have_the_same_mirror(tmp_path: Path) -> None:
    """A store that was pickled, as for a worker, has it too."""
    store = mirrored(tmp_path / "here", tmp_path / "there", retention=LAST)
    again = pickle.loads(pickle.dumps(store))
    take(again, 1)
    take(store, 2)
    for each in (store, again):
        each.wait_mirrored(60)
    assert names(Store(tmp_path / "there")) == ["step_2"]


@pytest.mark.parametrize("patience", [60.0, 0.05])
def test_it_gives_way_to_takes(
    tmp_path: Path, there: FaultyBackend, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Its copy rests while a take goes on, but not for ever."""
    monkeypatch.setattr(mirror, "_GIVE_WAY", patience)
    is_taking, may_end, sent = threading.Event(), threading.Event(), threading.Event()

    class Slow(StateDict):
        def state_dict(self) -> dict[str, Any]:
            is_taking.set()
            assert may_end.wait(60)
            return super().state_dict()

    def begins(call: Call) -> object:
        assert is_taking.wait(60)
        return call.go()

    def note(call: Call) -> object:
        sent.set()
        return call.go()

    store = mirrored(tmp_path / "here", there)
    store.wait_mirrored(60)
    with there.during(Fault(begins), Fault(note, "write", "packs/*")):
        take(store, 1)
        taking = threading.Thread(target=store.take, args=({"model": Slow(a=1)}, "step_2"))
        taking.start()
        assert sent.wait(0.5 if patience > 1 else 60) is (patience < 1)
        may_end.set()
        taking.join()
        store.wait_mirrored(60)
    assert sent.is_set()
    assert names(Store(there)) == ["step_1", "step_2"]


# --- what is kept until then ----------------------------------------------------------------------


def test_a_pickled_store_is_freed_at_once_with_its_mirror(tmp_path: Path) -> None:
    """No cycle keeps open what a worker that reads has opened."""
    store = mirrored(tmp_path / "here", tmp_path / "there")
    again = pickle.loads(pickle.dumps(store))
    gc.collect()
    gc.disable()
    try:
        opened = [ref(again._view.repository), ref(again.mirror)]
        del again
        assert [each() for each in opened] == [None, None]
    finally:
        gc.enable()


def test_what_is_not_mirrored_is_kept(tmp_path: Path, there: FaultyBackend) -> None:
    """By the retention of takes, by other processes, and whatever the mirror does."""
    store = mirrored(tmp_path / "here", there)
    store.wait_mirrored(60)
    with there.during(DEAD):
        for step in range(3):
            take(store, step, retention=LAST)
        assert names(store) == ["step_0", "step_1", "step_2"]
        told = process(
            "prune", tmp_path / "here", "--keep-last", "1", "--gc", "--grace", "1s", "-y"
        )
        assert told.stdout.count("not mirrored yet") == 3, told
        assert "(not mirrored yet)" in invoke("ls", tmp_path / "here").stdout
        listed = document("ls", tmp_path / "here")["snapshots"]
        assert [(s["unmirrored"], s["tags"]) for s in listed] == [(True, [])] * 3
    store.wait_mirrored(60)
    assert names(store) == ["step_0", "step_1", "step_2"]
    take(store, 3, retention=LAST)
    assert names(store)[-1] == "step_3"
    assert not {"step_0", "step_1", "step_2"} & set(names(store))
    store.wait_mirrored(60)
    assert names(Store(tmp_path / "there")) == [f"step_{step}" for step in range(4)]


def test_the_command_shows_how_far_it_lags(tmp_path: Path, there: FaultyBackend) -> None:
    here = tmp_path / "here"
    Store(here, create=NewStore(chunk_size=CHUNK)).make()
    assert "has no mirror" in failure("mirror", here)
    store = mirrored(here, there)
    take(store, 0)
    store.wait_mirrored(60)
    state = document("mirror", here)
    assert (state["mirror"], state["snapshots"], state["error"]) == (there.uri, [], None)
    assert invoke("mirror", here).stdout == f"{there.uri} has all\n"
    with there.during(DEAD):
        for step in (1, 2):
            take(store, step)
        await_failure(store)
        state = document("mirror", here)
        assert [s["name"] for s in state["snapshots"]] == ["step_1", "step_2"]
        assert state["lacking_bytes"] == sum(s["new_bytes"] for s in state["snapshots"]) > 0
        assert state["process_id"] == os.getpid()
        assert state["failing_since_time"] is not None
        assert store.mirror is not None
        assert state["error"] == store.mirror.status().error
        said = invoke("mirror", here).stdout
        assert f"{there.uri} lacks 2 snapshots, about " in said
        assert f": {state['error']}" in said
    store.wait_mirrored(60)
    assert document("mirror", here)["snapshots"] == []


def test_the_command_names_what_is_refused(tmp_path: Path) -> None:
    take(Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK)), 0)
    store = mirrored(tmp_path / "here", tmp_path / "there")
    take(store, 0)
    with pytest.raises(MirrorError, match="holds another snapshot"):
        store.wait_mirrored(60)
    (snapshot,) = document("mirror", tmp_path / "here")["snapshots"]
    assert "holds another snapshot 'step_0'" in snapshot["refused"]
    assert "holds another snapshot 'step_0'" in invoke("mirror", tmp_path / "here").stdout
    assert store.mirror is not None


def test_it_may_be_overwritten_or_deleted(tmp_path: Path, there: FaultyBackend) -> None:
    store = mirrored(tmp_path / "here", there)
    take(store, 0)
    store.wait_mirrored(60)
    first = store["step_0"].commit_id
    with there.during(DEAD):
        for _ in range(20):
            last = take(store, 0, overwrite=True)
        take(store, 1)
        store.delete("step_1")
        assert set(last.row.notes) <= {"follows", "unmirrored"}
    store.wait_mirrored(60)
    copy = Store(tmp_path / "there").make()
    assert first != copy["step_0"].commit_id == last.commit_id
    assert names(copy) == ["step_0"]


def test_it_is_overwritten_often_while_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit that the mirror gets in the end is its own, however many followed meanwhile."""
    begun, may_end = threading.Event(), threading.Event()
    finish = SnapshotCopy._finish

    def slowly(self: SnapshotCopy, *args: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return finish(self, *args)

    store = mirrored(tmp_path / "here", tmp_path / "there")
    store.take(app_state(0), "last")
    store.wait_mirrored(60)
    monkeypatch.setattr(SnapshotCopy, "_finish", slowly)
    store.take(app_state(1), "last", overwrite=True)
    assert begun.wait(60)
    for step in range(2, 24):
        store.take(app_state(step), "last", overwrite=True)
    may_end.set()
    store.wait_mirrored(60)
    assert_holds(Store(tmp_path / "there")["last"], 23)


def test_tags_of_its_own(tmp_path: Path, there: FaultyBackend) -> None:
    store = mirrored(tmp_path / "here", there)
    with there.during(DEAD):
        take(store, 1)
        with pytest.raises(InvalidNameError, match="begins with '#'"):
            store.tag("step_1", "#unmirrored")
        store.untag("step_1", "#unmirrored")
        store.tag("step_1", "best")
        store.untag("step_1", "best")
        assert lacking(store) == 1
        store.tag("step_1", *(f"t{n}" for n in range(100)))
        assert store["step_1"].tags == tuple(sorted(f"t{n}" for n in range(100)))
        with pytest.raises(SnapshotExistsError, match="t0"):
            take(store, 1, overwrite=True)
    store.wait_mirrored(60)
    assert len(Store(tmp_path / "there")["step_1"].tags) == 100
    assert store._view.row_of("step_1").notes == {}


def test_each_side_has_its_own_retention(tmp_path: Path) -> None:
    last_two = Retention(keep_last=2)
    store = mirrored(tmp_path / "here", tmp_path / "there", retention=last_two)
    for step in range(4):
        take(store, step)
    store.wait_mirrored(60)
    copy = Store(tmp_path / "there").make()
    assert names(copy) == ["step_2", "step_3"]
    assert names(store) == [f"step_{n}" for n in range(4)]
    store.prune(LAST)
    store.tag("step_3", "x")
    take(store, 4)
    store.wait_mirrored(60)
    # One that was pruned there is not copied again, one that was pruned here stays there.
    assert names(copy) == ["step_3", "step_4"]
    assert names(store) == ["step_3", "step_4"]


def test_a_snapshot_that_is_mirrored_late_is_no_newer(tmp_path: Path) -> None:
    """Neither for the retention of the mirror, nor for who resumes from it."""
    take(Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK)), 1)
    Store(tmp_path / "there").tag("step_1", "x")
    store = mirrored(tmp_path / "here", tmp_path / "there", retention=LAST)
    for step in (1, 2, 3):
        take(store, step)
    with pytest.raises(MirrorError, match="step_1"):
        store.wait_mirrored()
    copy = Store(tmp_path / "there").make()
    copy.delete("step_1")
    store.wait_mirrored(60)
    assert names(copy) == ["step_1", "step_3"]
    latest = copy.latest()
    assert latest is not None
    assert latest.name == "step_3"
    take(store, 4)
    store.wait_mirrored(60)
    assert names(copy) == ["step_4"]


# --- a mirror that fails --------------------------------------------------------------------------


def test_a_mirror_that_fails_never_fails_takes(
    tmp_path: Path, there: FaultyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "casnap")
    with there.during(DEAD):
        store = mirrored(tmp_path / "here", there)
        for step in range(3):
            take(store, step)
        await_failure(store)
        assert store.mirror is not None
        with pytest.raises(MirrorError, match=r"step_0, step_1, step_2 after 0.5 s.*on purpose"):
            store.wait_mirrored(0.5)
        status = store.mirror.status()
        assert (status.snapshots, status.refused) == (3, {})
        assert status.nbytes > 3 * CHUNK
        assert "on purpose" in str(status.error)
        assert status.since is not None
        assert sum("is tried again" in r.message for r in caplog.records) == 1
    store.wait_mirrored(60)
    status = store.mirror.status()
    assert (status.snapshots, status.error, status.since) == (0, None, None)
    assert_copied(store, tmp_path / "there")


def test_the_random_numbers_of_the_user_stay(tmp_path: Path, there: FaultyBackend) -> None:
    """What is tried again waits a random time; a seeded run must not notice."""
    before = random.getstate()
    store = mirrored(tmp_path / "here", there)
    with there.during(DEAD):
        take(store, 1)
        await_failure(store)
    store.wait_mirrored(60)
    assert random.getstate() == before


def test_wait_mirrored_without_a_mirror(tmp_path: Path) -> None:
    store = Store(tmp_path / "here").make()
    assert store.mirror is None
    with pytest.raises(MirrorError, match="without mirror="):
        store.wait_mirrored()


def test_a_damaged_snapshot_does_not_hold_up_others(tmp_path: Path, there: FaultyBackend) -> None:
    store = mirrored(tmp_path / "here", there)
    store.wait_mirrored(60)
    with there.during(DEAD):
        take(store, 1)
        for pack in (tmp_path / "here/casnap-store/packs").rglob("?" * 32):
            pack.write_bytes(bytes(pack.stat().st_size))
        store.take({"s": StateDict(x=[b"y" * CHUNK])}, "whole")
    with pytest.raises(MirrorError, match="step_1"):
        store.wait_mirrored(60)
    assert names(Store(tmp_path / "there")) == ["whole"]
    assert store.mirror is not None
    assert set(store.mirror.status().refused) == {"step_1"}


# --- two stores, one mirror -----------------------------------------------------------------------


def test_two_stores_never_overwrite_one_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (mirrored(tmp_path / n, tmp_path / "there") for n in ("one", "two"))
    take(one, 1)
    one.wait_mirrored(60)
    two.take(app_state(5), "step_1", metadata={"step": 5})
    take(two, 2)
    with pytest.raises(MirrorError, match="never gets step_1, step_2") as caught:
        two.wait_mirrored()
    for part in (one.id, two.id, str(tmp_path / "two"), "//node1"):
        assert part in str(caught.value)
    # Nor by overwriting what is its own here.
    two.take(app_state(6), "step_1", metadata={"step": 6}, overwrite=True)
    with pytest.raises(MirrorError, match="step_1"):
        two.wait_mirrored()
    copy = Store(tmp_path / "there").make()
    assert names(copy) == ["step_1"]
    assert_holds(copy["step_1"], 1)
    # It is said once. The training goes on, and what waits for nothing is pruned.
    for step in range(3, 9):
        take(two, step, retention=LAST)
        with pytest.raises(MirrorError):
            two.wait_mirrored(60)
    take(two, 9, retention=LAST)
    assert len(names(two)) <= 2
    assert [r.levelname for r in caplog.records if "do not follow it" in r.message] == ["ERROR"]
    take(one, 2)
    one.wait_mirrored(60)
    assert names(copy) == ["step_1", "step_2"]


def test_what_is_taken_anew_replaces_its_own_copy(tmp_path: Path) -> None:
    """Also what was deleted or pruned here, or overwritten by a store without the mirror."""
    store = mirrored(tmp_path / "here", tmp_path / "there")
    copy = Store(tmp_path / "there").make()
    for step in (1, 2, 3):
        take(store, step)
    store.wait_mirrored(60)
    store.delete("step_1")
    store.prune(LAST)
    Store(tmp_path / "here").take(app_state(7), "step_3", overwrite=True)
    for step in (1, 2, 3):
        store.take(app_state(step + 10), f"step_{step}", overwrite=step == 3)
    store.wait_mirrored(60)
    for step in (1, 2, 3):
        assert_holds(copy[f"step_{step}"], step + 10)


def test_copies_of_a_store_do_not_replace_each_others(tmp_path: Path) -> None:
    """Though they have one id, and number their roots alike."""
    here = mirrored(tmp_path / "here", tmp_path / "there")
    take(here, 1)
    here.wait_mirrored(60)
    assert here.mirror is not None
    here.mirror.stop()
    shutil.copytree(tmp_path / "here", tmp_path / "twin")
    twin = mirrored(tmp_path / "twin", tmp_path / "there")
    here = mirrored(tmp_path / "here", tmp_path / "there")
    here.take(app_state(2), "step_2")
    here.wait_mirrored(60)
    twin.take(app_state(22), "step_2")
    with pytest.raises(MirrorError, match="step_2"):
        twin.wait_mirrored()
    copy = Store(tmp_path / "there").make()
    assert_holds(copy["step_1"], 1)
    assert_holds(copy["step_2"], 2)
    # But the twin may go on from where the other one is.
    again = mirrored(tmp_path / "twin", tmp_path / "there")
    assert again.latest().path == copy["step_2"].path  # type: ignore[union-attr]
    again.take(app_state(3), "step_3")
    again.wait_mirrored(60)
    assert names(copy) == ["step_1", "step_2", "step_3"]
    here.take(app_state(33), "step_3")
    with pytest.raises(MirrorError, match="never gets step_3"):
        here.wait_mirrored(60)


def test_retention_at_the_mirror_leaves_what_others_put_there(tmp_path: Path) -> None:
    other = mirrored(tmp_path / "other", tmp_path / "there")
    other.take(app_state(1), "run/step_1")
    other.wait_mirrored(60)
    take(Store(tmp_path / "there"), 2)
    store = mirrored(tmp_path / "here", tmp_path / "there", retention=LAST)
    take(store, 3)
    take(store, 4)
    store.wait_mirrored(60)
    assert names(Store(tmp_path / "there")) == ["run/step_1", "step_2", "step_4"]


def test_what_is_copied_into_a_store_is_mirrored(tmp_path: Path, there: FaultyBackend) -> None:
    source = Store(tmp_path / "source", create=NewStore(chunk_size=CHUNK)).make()
    take(source, 1)
    store = mirrored(tmp_path / "here", there)
    with there.during(DEAD):
        source.copy(to=store)
        store.prune(Retention(keep_last=1))
        assert not source.copy(to=store).copied
        assert store.mirror is not None
        assert store.mirror.status().snapshots == 1
    store.wait_mirrored(60)
    assert_holds(Store(tmp_path / "there")["step_1"], 1)
    assert store._view.row_of("step_1").notes == {}


# --- reading --------------------------------------------------------------------------------------


def test_a_fresh_machine_resumes_from_the_mirror(tmp_path: Path) -> None:
    first = mirrored(tmp_path / "first", tmp_path / "there")
    assert first.latest() is None
    for step in range(3):
        take(first, step)
    first.wait_mirrored(60)
    second = mirrored(tmp_path / "second", tmp_path / "there")
    newest = second.latest()
    assert newest is not None
    assert newest.path == str(tmp_path / "there/step_2")
    assert_holds(newest, 2)
    assert_holds(second["step_1"], 1)
    assert "step_1" not in second
    assert names(second) == []
    with pytest.raises(SnapshotNotFoundError, match="there holds no snapshot"):
        second["step_9"]
    take(second, 3)
    assert second.latest().path == str(tmp_path / "second/step_3")  # type: ignore[union-attr]
    second.wait_mirrored(60)
    # The other one learns of it, by the time that the takes noted.
    assert first.latest().name == "step_3"  # type: ignore[union-attr]
    assert first.latest(prefix="run") is None


def test_latest_while_the_mirror_fails(tmp_path: Path, there: FaultyBackend) -> None:
    with there.during(DEAD):
        store = mirrored(tmp_path / "here", there)
        # None would begin the run anew.
        with pytest.raises(BackendError, match="on purpose"):
            store.latest()
        take(store, 1)
        assert store.latest().name == "step_1"  # type: ignore[union-attr]
