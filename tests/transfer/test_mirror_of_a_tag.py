"""A mirror that follows a tag: it gets what that is published on, and nothing else."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import MirrorOptions, NewStore, Retention, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import InvalidNameError, MirrorError, SnapshotNotFoundError
from casnap.mirror import mirror
from casnap.mirror.notes import is_unmirrored
from casnap.serving import Follower, FollowerOptions
from casnap.storage import Tags
from tests.support.cli_calls import document, failure, invoke, process
from tests.support.copies import await_failure, mirrored, names
from tests.support.faults import (
    CHUNK,
    WRITING_CALLS,
    app_state,
    assert_holds,
    backend_faults,
    faults,
    in_child,
    memory_folder,
    start,
    take,
    wait,
)
from tests.support.faulty import Fault, FaultyBackend, Gate, fail
from tests.support.servers import Bucket
from tests.support.sweep import sweep
from tests.support.warm import run_python

DEAD = Fault(fail(), times=None)
LAST = Retention(keep_last=1)


def following(folder: Path, there: Any = None, **options: Any) -> Store:
    """Return a store whose mirror follows a tag."""
    options = {"tag": "stable", **options}
    return mirrored(folder / "here", there or folder / "there", **options)


def at_mirror(folder: Path) -> Store:
    return Store(folder / "there", create=False)


def send(store: Store, name: str) -> None:
    """Publish a snapshot, and wait until the mirror has it."""
    store.publish("stable", name)
    store.wait_mirrored(60)


def lacking(store: Store) -> int:
    assert store.mirror is not None
    return store.mirror.status().snapshots


def assert_follows(store: Store, copy: Store, name: str) -> None:
    """Check that the tag is at both on the same snapshot, and on no other."""
    for side in (store, copy):
        assert side.tagged("stable").name == name
        assert [s.name for s in side.snapshots() if "stable" in s.tags] == [name]
    assert copy.tag_moves("stable", 1)[0].commit == store.tag_moves("stable", 1)[0].commit
    assert lacking(store) == 0


# --- what it gets ---------------------------------------------------------------------------------


def test_it_gets_what_is_published(tmp_path: Path) -> None:
    store = following(tmp_path, retention=LAST)
    store.wait_mirrored(60)
    for step in range(6):
        take(store, step, retention=Retention(keep_last=2))
        if step % 2:
            send(store, f"step_{step}")
    copy = at_mirror(tmp_path)
    assert_follows(store, copy, "step_5")
    assert_holds(copy["step_5"], 5)
    assert [move.name for move in copy.tag_moves("stable")] == ["step_5", "step_3", "step_1"]
    # What had the tag there before went with the next copy.
    assert names(copy) == ["step_3", "step_5"]
    assert not any(is_unmirrored(store._view.row_of(name)) for name in names(store))
    # Another tag, and one that is only given, are not its business.
    store.publish("other", "step_4")
    store.tag("step_4", "best")
    take(store, 6, retention=LAST)
    store.wait_mirrored(60)
    assert names(copy) == ["step_3", "step_5"]
    # Nothing but tags keeps snapshots here.
    assert names(store) == ["step_4", "step_5", "step_6"]


class _Trainer:
    """Moves 1 % of its weights a step, by one up or down."""

    def __init__(self) -> None:
        self._dice = torch.Generator().manual_seed(0)
        self.weights = (torch.randn(1 << 20, generator=self._dice) * 0.02).bfloat16()

    def take(self, store: Store, step: int) -> str:
        bits = self.weights.view(torch.int16)
        chosen = torch.randint(len(bits), (len(bits) // 100,), generator=self._dice)
        ups = torch.randint(0, 2, chosen.shape, generator=self._dice, dtype=torch.int16)
        bits[chosen] += ups * 2 - 1
        name = f"step_{step}"
        store.take({"model": StateDict(w=self.weights)}, name, retention=Retention(keep_last=2))
        return name


def test_twenty_steps_are_sent_as_one_difference(tmp_path: Path) -> None:
    sent: dict[str, list[int]] = {}
    for kind, tag in (("all", None), ("published", "stable")):
        trainer, folder = _Trainer(), tmp_path / kind
        store = Store(folder / "here", mirror=MirrorOptions(folder / "there", tag=tag))
        for step in range(22):
            name = trainer.take(store, step)
            if step in (0, 1, 21):
                store.publish("stable", name)
            store.wait_mirrored(60)
        copies = at_mirror(folder).snapshots()
        sent[kind] = [s.stats.new_bytes for s in copies]
        assert torch.equal(copies[-1].read_object("model/w"), trainer.weights)
    first, one, twenty = sent["published"]
    assert (first, one) == (sent["all"][0], sent["all"][1])
    assert one < first / 20
    # 8.9 times the bytes of one step, by calculation; all of them are 20 times.
    assert one < twenty < 10.5 * one < sum(sent["all"][2:]) / 1.8


def test_a_follower_of_the_mirror(tmp_path: Path) -> None:
    store = following(tmp_path)
    for step in (0, 1):
        store.take({"model": StateDict(w=torch.full((3000,), float(step)))}, f"step_{step}")
    send(store, "step_0")
    copy, weights = at_mirror(tmp_path), {"w": torch.zeros(3000)}
    with Follower(
        str(tmp_path / "there"), weights, options=FollowerOptions(tag="stable"), interval=0.01
    ):
        for step in (1, 0):
            send(store, f"step_{step}")
            (follower,) = copy.wait_served("stable", timeout=60)
            assert follower.serving is not None
            assert follower.serving.name == f"step_{step}"
            assert weights["w"][0] == step


def test_back_to_what_it_has_and_to_what_it_lacks(tmp_path: Path) -> None:
    store = following(tmp_path)
    for step in range(4):
        take(store, step)
    for step in (3, 1, 3):
        send(store, f"step_{step}")
        assert_follows(store, at_mirror(tmp_path), f"step_{step}")
    copy = at_mirror(tmp_path)
    # They are in the order of the run, though the older one came later.
    assert names(copy) == ["step_1", "step_3"]
    assert copy.latest().name == "step_3"  # type: ignore[union-attr]
    # What was deleted there is copied again.
    send(store, "step_1")
    copy.delete("step_3")
    send(store, "step_3")
    assert_follows(store, copy, "step_3")


def test_a_tag_that_was_moved_there_by_hand(tmp_path: Path) -> None:
    """To publish the same snapshot again here moves it back, whoever does it."""
    store, plain = following(tmp_path), Store(tmp_path / "here")
    for step in (0, 1):
        take(store, step)
        send(store, f"step_{step}")
    copy, (move,) = at_mirror(tmp_path), store.tag_moves("stable", 1)
    for publisher in (store, plain):
        copy.publish("stable", "step_0")
        assert publisher.publish("stable", "step_1") == move
        assert publisher.publish("stable", "step_1") == move
        store.wait_mirrored(60)
        assert_follows(store, copy, "step_1")
    copy.untag("step_1", "stable")
    process("tag", tmp_path / "here/step_1", "stable", "--move")
    store.wait_mirrored(60)
    assert_follows(store, copy, "step_1")
    # If it is there, nothing is committed there.
    before = copy._view.repository.newest()
    send(store, "step_1")
    assert copy._view.repository.newest() == before
    assert store.tag_moves("stable", 1) == [move]


def test_a_name_that_is_taken_and_published_anew(tmp_path: Path) -> None:
    """The tag does not hold the copy of what had that name before."""
    store = following(tmp_path)
    for step in range(3):
        store.take(app_state(step), "policy", overwrite=True)
        send(store, "policy")
        assert_follows(store, at_mirror(tmp_path), "policy")
        assert_holds(at_mirror(tmp_path)["policy"], step)
        store.untag("policy", "stable")


def test_what_is_published_while_it_fails(tmp_path: Path, there: FaultyBackend) -> None:
    """The last publish counts. What it is on is kept here, those between are left out."""
    store = following(tmp_path, there)
    store.wait_mirrored(60)
    with there.during(DEAD):
        for step in range(4):
            take(store, step, retention=LAST)
            if step < 3:
                store.publish("stable", f"step_{step}")
        await_failure(store)
        assert names(store) == ["step_2", "step_3"]
        assert lacking(store) == 1
        shown = process("prune", tmp_path / "here", "--keep-last", "1", "--gc", "-y").stdout
        assert "tagged" in shown, shown
        state = document("mirror", tmp_path / "here")
        assert state["tag"] == "stable"
        assert [s["name"] for s in state["snapshots"]] == ["step_2"]
        listed = document("ls", tmp_path / "here")["snapshots"]
        assert [(s["name"], s["unmirrored"]) for s in listed] == [
            ("step_2", True),
            ("step_3", False),
        ]
        assert document("show", tmp_path / "here/step_2")["unmirrored"]
        with pytest.raises(MirrorError, match=r"lacks step_2 after 0\.2 s.*on purpose"):
            store.wait_mirrored(0.2)
    store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), "step_2")
    assert names(at_mirror(tmp_path)) == ["step_2"]
    assert not document("ls", tmp_path / "here")["snapshots"][0]["unmirrored"]
    said = invoke("mirror", tmp_path / "here").stdout
    assert said == f"{there.uri} has all (it follows the tag stable)\n"


def test_who_waits_goes_on_with_what_is_published_later(
    tmp_path: Path, there: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = following(tmp_path, there)
    for step in (0, 1):
        take(store, step)
    store.wait_mirrored(60)
    gate = Gate()
    with there.during(Fault(gate, "write", "packs/*")):
        store.publish("stable", "step_0")
        assert gate.reached.wait(60)
        # While step_0 is being copied.
        store.publish("stable", "step_1")
        gate.open()
        store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), "step_1")
    watcher = store.mirror
    assert watcher is not None
    wake = watcher.wake

    def publish_meanwhile() -> None:
        monkeypatch.setattr(watcher, "wake", wake)
        store.publish("stable", "step_1")

    with there.during(DEAD):
        store.publish("stable", "step_0")
        monkeypatch.setattr(watcher, "wake", publish_meanwhile)
        # That is there already, but the tag is to come back to it.
        with pytest.raises(MirrorError, match="lacks step_1 after"):
            store.wait_mirrored(0.2)
    store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), "step_1")


def test_what_is_withdrawn_here_stays_there(tmp_path: Path) -> None:
    store = following(tmp_path)
    for step in (0, 1):
        take(store, step)
        send(store, f"step_{step}")
    store.untag("step_1", "stable")
    store.delete("step_0")
    store.wait_mirrored(60)
    copy = at_mirror(tmp_path)
    assert lacking(store) == 0
    assert names(copy) == ["step_0", "step_1"]
    assert copy.tagged("stable").name == "step_1"
    with pytest.raises(SnapshotNotFoundError):
        store.tagged("stable")


def test_what_is_deleted_before_it_is_sent(tmp_path: Path, there: FaultyBackend) -> None:
    store = following(tmp_path, there)
    store.wait_mirrored(60)
    with there.during(DEAD):
        take(store, 0)
        store.publish("stable", "step_0")
        store.delete("step_0")
    store.wait_mirrored(60)
    assert lacking(store) == 0
    assert names(at_mirror(tmp_path)) == []


def test_a_rewind_is_followed(tmp_path: Path) -> None:
    """Copies of what the run went back from get out of the way; no others are sent."""
    store = following(tmp_path)
    for step in range(4):
        take(store, step)
    for step in (0, 2):
        send(store, f"step_{step}")
    store.rewind("step_0")
    store.wait_mirrored(60)
    copy = at_mirror(tmp_path)
    (aside,) = [name for name in names(copy) if name != "step_0"]
    assert aside.endswith("/step_2")
    assert copy.latest().name == "step_0"  # type: ignore[union-attr]
    assert_follows(store, copy, aside)
    assert not any(is_unmirrored(s.row) for s in store.snapshots())
    send(store, "step_0")
    assert_follows(store, copy, "step_0")


# --- who publishes --------------------------------------------------------------------------------


def test_processes_that_know_nothing_of_the_mirror(tmp_path: Path) -> None:
    store = following(tmp_path)
    take(store, 0)
    take(store, 1)
    store.wait_mirrored(60)
    process("tag", tmp_path / "here/step_0", "stable", "--move")
    assert document("mirror", tmp_path / "here")["tag"] == "stable"
    store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), "step_0")
    Store(tmp_path / "here").publish("stable", "step_1")
    store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), "step_1")


def test_two_processes_publish(tmp_path: Path) -> None:
    def work(first: int) -> None:
        store = following(tmp_path)
        for step in range(first, first + 4):
            take(store, step)
            store.publish("stable", f"step_{step}")
        store.wait_mirrored(120)

    assert [wait(pid) for pid in [start(lambda n=4 * n: work(n)) for n in range(2)]] == [0, 0]  # type: ignore[misc]
    store = following(tmp_path)
    store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), store.tagged("stable").name)


FAST = """
import os, sys
os.environ["CASNAP_CACHE_DIR"] = f"{sys.argv[1]}/cache"
from casnap import MirrorOptions, Store
store = Store(f"{sys.argv[1]}/here", mirror=MirrorOptions(f"{sys.argv[1]}/there", tag="stable"))
store.publish("stable", "step_1")
store.wait_mirrored(60)
"""


def test_a_slow_host_never_moves_the_tag_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts have a pass. The slow one has copied; the fast one publishes what is later."""
    slow = following(tmp_path)
    take(slow, 0)
    take(slow, 1)
    slow.wait_mirrored(60)
    said: list[str] = []
    ended = threading.Event()

    class Overtaken(Tags):
        def publish(self, *args: Any) -> Any:
            if not said:
                # Another host has no cache in common with this one, and no lock.
                said.append(run_python(FAST, tmp_path).stderr)
            try:
                return super().publish(*args)
            finally:
                ended.set()

    monkeypatch.setattr("casnap.mirror.mirror.Tags", Overtaken)
    slow.publish("stable", "step_0")
    assert ended.wait(60)
    slow.wait_mirrored(60)
    assert said == [""]
    assert_follows(slow, at_mirror(tmp_path), "step_1")


# --- crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "operation"), [(Tags, "publish"), (mirror, "mark_mirrored"), (mirror, "attach_mirror")]
)
def test_a_killed_process_loses_no_publish(tmp_path: Path, of: Any, operation: str) -> None:
    """Before the tag is moved there, before that is noted here, and before the mirror is known."""
    taken = Store(tmp_path / "here", create=NewStore(chunk_size=CHUNK))
    take(taken, 0)
    taken.publish("stable", "step_0")

    def work() -> None:
        with faults(of, [operation], 0):
            following(tmp_path).wait_mirrored(60)

    assert in_child(work) == -signal.SIGKILL
    take(taken, 1, retention=LAST)
    assert names(taken) == ["step_0", "step_1"]
    store = following(tmp_path)
    store.wait_mirrored(60)
    assert_follows(store, at_mirror(tmp_path), "step_0")
    assert [move.name for move in at_mirror(tmp_path).tag_moves("stable")] == ["step_0"]


@pytest.mark.sweep
def test_it_is_killed_at_any_call() -> None:
    """After each call that writes, on either side."""
    with memory_folder() as base:
        first = following(base)
        take(first, 0)
        send(first, "step_0")
        for strike_at in sweep():
            with memory_folder() as folder:
                for side in ("here", "there"):
                    shutil.copytree(base / side, folder / side)

                def work(folder: Path = folder, strike_at: int = strike_at) -> None:
                    store = following(folder)
                    with backend_faults(strike_at, names=WRITING_CALLS, after=True):
                        take(store, 1)
                        send(store, "step_1")

                status = in_child(work)
                assert status in (0, -signal.SIGKILL)
                copy = at_mirror(folder)
                held = copy.tagged("stable")
                assert_holds(held, int(held.name.removeprefix("step_")))
                store = following(folder)
                store.wait_mirrored(60)
                assert_follows(store, copy, store.tagged("stable").name)
                assert set(names(copy)) <= set(names(store))
                for side in ("here", "there"):
                    assert Store(folder / side).check(data=True).ok
                if status == 0:
                    assert held.name == "step_1"
                    print(f"killed at {strike_at} calls")
                    return


def publish_on_ranks(folder: str) -> None:
    store = following(Path(folder))
    store.async_take(app_state(1), "step_1", metadata={"step": 1}).wait()
    if dist.get_rank() == 1:
        store.publish("stable", "step_1")
    dist.barrier()
    store.wait_mirrored(120)
    assert lacking(store) == 0
    dist.barrier()


def test_another_rank_publishes(world: Callable[[int], Any], tmp_path: Path) -> None:
    world(2).run(publish_on_ranks, str(tmp_path))
    copy = at_mirror(tmp_path)
    assert_holds(copy.tagged("stable"), 1)


def wait_for_a_forgotten_mirror(folder: str, place: str) -> None:
    if dist.get_rank() == 0:
        following(Path(folder)).wait_mirrored(120)
    dist.barrier()
    store = following(Path(folder))
    store.async_take(app_state(1), "step_1", metadata={"step": 1}).wait()
    if dist.get_rank() == 0:
        assert store.mirror is not None
        store.mirror.stop()
        store.configure(mirror="none")
        if place:
            following(Path(folder), Path(folder) / place).wait_mirrored(120)
        store.publish("stable", "step_1")
    dist.barrier()
    if dist.get_rank() == 1:
        match = "forget it first" if place else "has forgotten its mirror"
        for timeout in (None, 60):
            with pytest.raises(MirrorError, match=match):
                store.wait_mirrored(timeout)
    dist.barrier()


@pytest.mark.parametrize("place", ["", "elsewhere"])
def test_another_rank_waits_for_a_mirror_that_was_forgotten(
    world: Callable[[int], Any], tmp_path: Path, place: str
) -> None:
    world(2).run(wait_for_a_forgotten_mirror, str(tmp_path), place)


# --- which mirror it is ---------------------------------------------------------------------------


def test_it_is_another_promise_than_that_of_all_snapshots(
    tmp_path: Path, there: FaultyBackend
) -> None:
    store = following(tmp_path, there)
    take(store, 0)
    take(store, 1)
    send(store, "step_1")
    assert store.mirror is not None
    store.mirror.stop()
    for options in ({}, {"tag": "best"}):
        with pytest.raises(MirrorError, match="gets what the tag 'stable' is published on, and"):
            mirrored(tmp_path / "here", there, **options)
    # It is said also while the mirror is away.
    with there.during(DEAD), pytest.raises(MirrorError, match="asks for one that gets all"):
        mirrored(tmp_path / "here", there)
    assert not any(is_unmirrored(s.row) for s in store.snapshots())
    invoke("config", tmp_path / "here", "mirror=none")
    every = mirrored(tmp_path / "here", there)
    every.wait_mirrored(60)
    assert names(at_mirror(tmp_path)) == ["step_0", "step_1"]
    assert every.mirror is not None
    every.mirror.stop()
    with pytest.raises(MirrorError, match="gets all snapshots, and this Store asks for one"):
        following(tmp_path, there)


def test_from_all_snapshots_to_a_tag(tmp_path: Path, there: FaultyBackend) -> None:
    """What the mirror lacks is then no longer kept for it."""
    every = mirrored(tmp_path / "here", there)
    every.wait_mirrored(60)
    with there.during(DEAD):
        for step in range(3):
            take(every, step)
        assert every.mirror is not None
        every.mirror.stop()
        every.configure(mirror="none")
    store = following(tmp_path, there)
    assert lacking(store) == 0
    send(store, "step_1")
    assert names(at_mirror(tmp_path)) == ["step_1"]
    store.prune(LAST)
    assert names(store) == ["step_1", "step_2"]


def test_a_process_whose_mirror_was_forgotten(tmp_path: Path) -> None:
    """It drops no note of a mirror that gets all snapshots."""
    store = following(tmp_path)
    take(store, 0)
    store.wait_mirrored(60)
    store.configure(mirror="none")
    store.publish("stable", "step_0")
    with pytest.raises(MirrorError, match="has forgotten its mirror"):
        store.wait_mirrored(60)
    assert store.mirror is not None
    every = mirrored(tmp_path / "here", tmp_path / "elsewhere")
    every.wait_mirrored(60)
    assert every.mirror is not None
    every.mirror.stop()
    take(every, 1)
    store.publish("stable", "step_1")
    with pytest.raises(MirrorError, match=r"is the store \w+, which was at \S+elsewhere;"):
        store.wait_mirrored(60)
    assert is_unmirrored(store["step_1"].row)


@pytest.mark.parametrize("tag", ["stable", "best", None])
def test_a_process_whose_store_has_another_mirror(tmp_path: Path, tag: str | None) -> None:
    """It neither says that this one has what was published, nor that its own has it."""
    store = following(tmp_path)
    take(store, 0)
    store.publish("stable", "step_0")
    store.publish("best", "step_0")
    store.wait_mirrored(60)
    store.configure(mirror="none")
    other = mirrored(tmp_path / "here", tmp_path / "elsewhere", tag=tag)
    other.wait_mirrored(60)
    assert other.mirror is not None
    other.mirror.stop()
    take(other, 1)
    store.publish("stable", "step_1")
    store.publish("best", "step_1")
    with pytest.raises(MirrorError, match="forget it first"):
        store.wait_mirrored(60)
    with pytest.raises(MirrorError, match="forget it first"):
        store.wait_mirrored(60)
    assert names(at_mirror(tmp_path)) == ["step_0"]
    again = mirrored(tmp_path / "here", tmp_path / "elsewhere", tag=tag)
    again.wait_mirrored(60)
    copy = Store(tmp_path / "elsewhere", create=False)
    assert names(copy) == ["step_0", "step_1"]
    assert tag is None or copy.tagged(tag).name == "step_1"


@pytest.mark.parametrize("tag", ["stable", None])
def test_the_mirror_is_changed_while_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str | None
) -> None:
    """What this mirror has is not noted as if the other one had it."""
    store = following(tmp_path, tag=tag)
    take(store, 0)
    store.wait_mirrored(60)
    note, other = mirror.mark_mirrored, FaultyBackend(LocalBackend(tmp_path / "elsewhere"))
    others, is_other = [], threading.Event()

    def overtaken(*args: Any, **options: Any) -> None:
        if not others:
            store.configure(mirror="none")
            others.append(mirrored(tmp_path / "here", other, tag=tag))
            # Its first try fails once it is attached. Before that, the store has no mirror, and
            # then there is nothing to wait for.
            await_failure(others[0])
            is_other.set()
        note(*args, **options)

    monkeypatch.setattr(mirror, "mark_mirrored", overtaken)
    with other.during(Fault(fail(), "write", "packs/*", times=None)):
        take(store, 1)
        store.publish("stable", "step_1")
        assert is_other.wait(60)
        with pytest.raises(MirrorError, match="forget it first"):
            store.wait_mirrored(60)
    others[0].wait_mirrored(60)
    assert names(Store(tmp_path / "elsewhere", create=False))[-1] == "step_1"


def test_a_wrong_tag(tmp_path: Path) -> None:
    with pytest.raises(InvalidNameError, match="white space"):
        following(tmp_path, tag="a b")
    assert "has no mirror" in failure("mirror", Store(tmp_path / "here").make().uri)


# --- other stores at the mirror -------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3])
def test_a_node_goes_on_from_the_mirror(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """It takes the run over. The one that lives on does not move the tag any more, nor back."""
    caplog.set_level(logging.ERROR, "casnap")
    one = following(tmp_path)
    for number in range(3):
        take(one, number)
    for number in (0, 1):
        send(one, f"step_{number}")
    two = mirrored(tmp_path / "two", tmp_path / "there", tag="stable")
    newest = two.latest()
    assert newest is not None
    assert newest.name == "step_1"
    send(one, "step_2")
    # It had not seen step_2, which is of another branch, whether it has the tag or not.
    two.take(app_state(102), f"step_{step}")
    send(two, f"step_{step}")
    copy = at_mirror(tmp_path)
    assert names(copy) == ["step_0", "step_1", f"step_{step}"]
    assert_follows(two, copy, f"step_{step}")
    assert_holds(copy[f"step_{step}"], 102)
    take(one, 4)
    for name in ("step_0", "step_4"):
        one.publish("stable", name)
        with pytest.raises(MirrorError, match=f"never gets .*{name}.*{two.id}"):
            one.wait_mirrored(60)
    assert lacking(one) == 0
    assert_follows(two, copy, f"step_{step}")
    assert len(caplog.records) == 1


def test_a_name_that_is_not_its_own_there(tmp_path: Path) -> None:
    take(Store(tmp_path / "there", create=NewStore(chunk_size=CHUNK)), 0)
    store = following(tmp_path)
    take(store, 0)
    store.publish("stable", "step_0")
    with pytest.raises(MirrorError, match="holds another snapshot 'step_0'"):
        store.wait_mirrored(60)
    assert list(store.mirror.status().refused) == ["step_0"]  # type: ignore[union-attr]
    take(store, 1)
    send(store, "step_1")
    assert_follows(store, at_mirror(tmp_path), "step_1")


@pytest.mark.servers
def test_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    how = {"storage_options": bucket.storage_options}
    store = following(tmp_path, f"{bucket.uri}/run", **how)
    for step in range(3):
        take(store, step, retention=LAST)
        if step != 1:
            store.publish("stable", f"step_{step}")
            store.wait_mirrored(120)
    copy = Store(f"{bucket.uri}/run", storage_options=bucket.storage_options)
    assert names(copy) == ["step_0", "step_2"]
    assert_follows(store, copy, "step_2")
    assert_holds(copy["step_2"], 2)
