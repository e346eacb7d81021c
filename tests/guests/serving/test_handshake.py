"""Followers note which version they have staged and serve, and who publishes waits for that."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import casnap.serving.handshake as handshake_module
from casnap import NewStore, StateDict, Store
from casnap.backends.announcement import NOTE
from casnap.errors import (
    BackendError,
    CasnapError,
    NotAStoreError,
    NotServedError,
    SnapshotNotFoundError,
    UnavailableError,
)
from casnap.format.records import CONFIG_KEY
from casnap.runtime.typing import override
from casnap.serving import Follower, FollowerOptions, Handshake, PullOptions
from tests.support.cli_calls import COMMAND, invoke
from tests.support.faults import start, wait
from tests.support.remote import RemoteDouble

BEAT = 0.05


@pytest.fixture(autouse=True)
def _short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_module, "_BEAT", BEAT)


def state_of(step: int) -> dict[str, Any]:
    return {"model": StateDict(w=torch.full((3000,), float(step)))}


def store_with(place: Any, steps: int = 2) -> Store:
    store = Store(place, create=NewStore(chunk_size=64 << 10))
    for step in range(steps):
        store.take(state_of(step), f"run/{step}")
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of two snapshots, of which ``stable`` is on the first."""
    store = store_with(tmp_path / "store")
    store.publish("stable", "run/0")
    return store


def served() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(3000)}


def follower_of(store: Store, interval: float | None = 0.01, **options: Any) -> Follower:
    how = FollowerOptions(**{"tag": "stable", **options})
    return Follower(f"{store.uri}/run", served(), options=how, interval=interval)


def notes_in(store: Store) -> list[str]:
    names = store._view.repository.backend.names("tmp")
    return [name for name in names if NOTE.fullmatch(name)]


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_publish_has_a_number(store: Store) -> None:
    first = store.tag_moves("stable")[0]
    second = store.publish("stable", "run/1")
    back = store.publish("stable", "run/0")
    assert first.root < second.root < back.root
    assert [move.root for move in store.tag_moves("stable")] == [back.root, second.root, first.root]
    # What is there already was published by then.
    assert store.publish("stable", "run/0") == back


def test_who_publishes_waits_until_it_is_served(store: Store) -> None:
    with follower_of(store):
        assert store.wait_served("stable", timeout=60)[0].serving.name == "run/0"
        move = store.publish("stable", "run/1")
        (state,) = store.wait_served("stable", move.root, timeout=60)
        serving = state.serving
        assert (serving.number, serving.name, serving.commit) == (move.root, "run/1", move.commit)
        assert list(serving.phases) == ["published", "fetched", "staged", "paused", "applied"]
        assert sorted(serving.phases.values()) == list(serving.phases.values())
        assert (state.pid, state.tag, state.folder) == (os.getpid(), "stable", "run")
        # Back again: nothing is copied, and that it serves is noted under the new number.
        back = store.publish("stable", "run/0")
        store.wait_served("stable", back.root, timeout=60)
        again = store.publish("stable", "run/1")
        store.publish("stable", "run/0")
        store.wait_served("stable", again.root, timeout=60)
    assert notes_in(store) == []


def test_who_is_behind_is_named(store: Store) -> None:
    with follower_of(store), follower_of(store, interval=None) as other:
        store.wait_served("stable", quorum=2, timeout=60)
        move = store.publish("stable", "run/1")
        first = store.tag_moves("stable")[1].root
        store.wait_served("stable", move.root, quorum=1, timeout=60)
        with pytest.raises(NotServedError, match=rf"served by 1 of 2; .* serves {first} \(run/0\)"):
            store.wait_served("stable", move.root, timeout=0.05)
        with pytest.raises(NotServedError, match="1 of the 2 that were asked for"):
            store.wait_served("stable", move.root, quorum=2, timeout=0.05)
        other.update()
        assert len(store.wait_served("stable", move.root, timeout=60)) == 2
    with pytest.raises(TimeoutError, match="none runs, or they may not write"):
        store.wait_served("stable", timeout=0)


def test_what_cannot_be_waited_for(store: Store) -> None:
    with pytest.raises(SnapshotNotFoundError, match="was not published; it was never published"):
        store.wait_served("best")
    with pytest.raises(SnapshotNotFoundError, match="with the number 99; its last number is 3"):
        store.wait_served("stable", 99)
    with pytest.raises(ValueError, match="quorum"):
        store.wait_served("stable", quorum=0)


def test_other_followers_are_not_waited_for(store: Store) -> None:
    store.take(state_of(7), "other/0")
    with (
        follower_of(store, tag=None),
        Follower(f"{store.uri}/other", served(), interval=0.01),
        follower_of(store),
    ):
        until(lambda: len(store.followers()) == 3)
        assert len(store.wait_served("stable", timeout=60)) == 1
        assert [state.folder for state in store.followers("stable")] == ["run"]


def test_a_folder_serves_once_its_command_has_succeeded(store: Store, tmp_path: Path) -> None:
    """``casnap pull --follow --exec`` in another process, which is killed."""
    ready = tmp_path / "ready"
    follow = ["--follow", "--interval", "0.01s", "--tag", "stable", "--json"]
    command = [*COMMAND, "pull", f"{store.uri}/run", str(tmp_path / "live"), *follow]
    command += ["--exec", f"test -e {ready}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: [s for s in store.followers() if s.staged])
        (state,) = store.followers()
        assert (state.staged.name, state.serving, state.pid) == ("run/0", None, process.pid)
        with pytest.raises(NotServedError, match="serves none and has staged 3"):
            store.wait_served("stable", timeout=0)
        ready.touch()
        assert store.wait_served("stable", timeout=60)[0].serving.name == "run/0"
        process.terminate()
        process.wait(60)
        assert notes_in(store) == []
    finally:
        process.kill()
        process.wait()


def follow_in_child(store: Store, clock: float = 0.0) -> int:
    """Follow in another process, whose clock is so many seconds off."""

    def follow() -> None:
        real = time.time
        off = SimpleNamespace(time=lambda: real() + clock, monotonic=time.monotonic)
        handshake_module.time = off  # type: ignore[assignment]
        follower_of(store)
        signal.pause()

    return start(follow)


def test_a_dead_follower_expires(store: Store) -> None:
    pid = follow_in_child(store)
    until(store.followers)
    (dead,) = store.wait_served("stable", timeout=60)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    with follower_of(store):
        move = store.publish("stable", "run/1")
        # As long as it is not seen that it is dead, it counts as one that lags.
        (alive,) = store.wait_served("stable", move.root, timeout=60)
        assert alive.pid == os.getpid() != dead.pid
        assert [state.pid for state in store.followers()] == [alive.pid]


def test_a_long_dead_follower_serves_nothing(store: Store) -> None:
    """Its note says that it serves the version, and its clock was ahead, or behind."""
    for clock in (-7 * 86400, 7 * 86400):
        pid = follow_in_child(store, clock)
        until(lambda: [s for s in store.followers() if s.serving])
        os.kill(pid, signal.SIGKILL)
        wait(pid)
        other = Store(store.uri)
        assert [s.is_doubtful for s in other.followers()] == [True]
        with pytest.raises(NotServedError):
            other.wait_served("stable", quorum=1, timeout=0.5)
        assert notes_in(store) == []


@pytest.mark.parametrize("clock", [-86400.0, 86400.0])
def test_clocks_may_differ(store: Store, clock: float) -> None:
    pid = follow_in_child(store, clock)
    try:
        until(lambda: notes_in(store))
        # Of a process that looks for the first time.
        assert len(Store(store.uri).wait_served("stable", timeout=60)) == 1
        move = store.publish("stable", "run/1")
        assert len(store.wait_served("stable", move.root, timeout=60)) == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        wait(pid)


class Guarded(RemoteDouble):
    """A place whose notes fail.

    Attributes:
        error: What a put of a note raises; None if it does not.
        tries: How many were put.
    """

    error: Exception | None = None
    tries = 0

    @override
    def write(self, key: str, content: memoryview | bytes) -> None:
        if key.startswith("tmp/follower-"):
            self.tries += 1
            if self.error is not None:
                raise self.error
        super().write(key, content)


@pytest.fixture
def far(tmp_path: Path) -> Store:
    store = store_with(RemoteDouble(str(tmp_path)))
    store.publish("stable", "run/0")
    return store


def warnings_of(store: Store, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what a store's followers warned of: threads of other tests may still end."""
    path = store.uri.partition("://")[2]
    messages = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    return [message for message in messages if path in message]


def test_who_may_not_write_follows_all_the_same(
    far: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Guarded(str(tmp_path))
    place.error = UnavailableError("this user may not put it", reason="denied")
    tensors = served()
    with Follower(place, tensors, options=FollowerOptions(tag="stable"), interval=0.01):
        far.publish("stable", "run/1")
        until(lambda: tensors["w"][0] == 1)
        far.publish("stable", "run/0")
        until(lambda: tensors["w"][0] == 0)
    (warning,) = warnings_of(far, caplog)
    assert "this user may not note there which version is served here" in warning
    assert place.tries == 1
    with pytest.raises(NotServedError, match="they may not write there"):
        far.wait_served("stable", timeout=0)


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize(
    "error",
    [UnavailableError("no answer", reason="unreachable"), NotAStoreError("it holds no root")],
    ids=["unreachable", "no root"],
)
def test_notes_are_tried_again(
    far: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: CasnapError
) -> None:
    place = Guarded(str(tmp_path))
    place.error = error
    with Follower(place, served(), options=FollowerOptions(tag="stable"), interval=0.01):
        until(lambda: place.tries > 2)
        assert far.followers() == []
        place.error = None
        far.wait_served("stable", timeout=60)
    texts = warnings_of(far, caplog)
    assert ["fails" in texts[0], "works again" in texts[1], len(texts)] == [True, True, 2]


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casnap.runtime.backoff._FIRST", 0.02)
    monkeypatch.setattr("casnap.runtime.backoff._LONGEST", 0.02)


def test_the_requests_are_few(far: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_module, "_BEAT", 60.0)
    place, looker = RemoteDouble(str(tmp_path)), RemoteDouble(str(tmp_path))
    waiting = Store(looker)
    with Follower(
        place, served(), options=FollowerOptions(tag="stable"), interval=None
    ) as follower:
        waiting.wait_served("stable", timeout=60)
        far.publish("stable", "run/1")
        place.reset()
        follower.update()
        waiting.wait_served("stable", timeout=60)
        # At most a note for what is staged, and one for what serves.
        assert place.requests["put"] == place.requests["delete"] <= 2
        looker.reset()
        assert [waiting.followers()[0].serving.name for _ in range(3)] == ["run/1"] * 3
        assert dict(looker.requests) == {"list": 3}
    assert notes_in(waiting) == []


def test_nothing_is_noted_unasked(store: Store, tmp_path: Path) -> None:
    events = store.follow(tmp_path / "live", "run", interval=0.01, notes=False)
    next(events)
    with follower_of(store, notes=False):
        store.pull(tmp_path / "once", "run", options=PullOptions(tag="stable"))
    assert notes_in(store) == []


def test_notes_are_no_garbage_for_a_day(store: Store) -> None:
    with follower_of(store):
        until(lambda: notes_in(store))
        report = store.check()
        assert (report.temporary, report.orphans) == (0, 0)
        store.gc(grace=0)
        assert store.followers()
        copy = Store(f"{store.uri}-copy", create=NewStore(chunk_size=64 << 10))
        store.copy(to=copy)
        assert copy.followers() == []
    note = Path(store.uri, "casnap-store/tmp/follower-0123456789ab-0123456789ab")
    note.write_bytes(b"of a dead process")
    store.gc(grace=0)
    assert note.exists()
    assert store.followers() == []
    os.utime(note, (0, time.time() - 2 * 86400))
    store.gc(grace=0)
    assert not note.exists()


def test_a_store_that_is_gone_does_not_come_back(store: Store) -> None:
    with follower_of(store) as follower:
        until(lambda: notes_in(store))
        shutil.rmtree(store.uri)
        until(lambda: follower.error)
        time.sleep(4 * BEAT)
        assert not Path(store.uri, "casnap-store", "tmp").exists()
        # What was left of a note is in nobody's way.
        tmp = Path(store.uri, "casnap-store/tmp")
        tmp.mkdir(parents=True)
        (tmp / "follower-0123456789ab-0123456789ab").write_bytes(b"")
    assert store_with(Path(store.uri)).latest().name == "run/1"


def test_a_follower_of_a_store_that_was_made_anew_is_not_counted(
    far: Store, tmp_path: Path
) -> None:
    """It writes on to the same place, and its numbers are of the other store."""
    with Follower(
        RemoteDouble(str(tmp_path)), served(), options=FollowerOptions(tag="stable"), interval=60
    ):
        until(lambda: notes_in(far))
        for name in list(RemoteDouble(str(tmp_path))._objects):
            far._view.repository.backend.delete(name)
        until(lambda: notes_in(far))
        store = store_with(RemoteDouble(str(tmp_path)), steps=1)
        store.publish("stable", "run/0")
        assert store.followers() == []
        with pytest.raises(NotServedError, match="served by 0"):
            store.wait_served("stable", timeout=4 * BEAT)


def test_numbers_that_are_not_there_yet_are_not_counted(store: Store) -> None:
    """As after a store was replaced by its backup, until its follower has seen that."""
    repository = store._view.repository
    handshake = Handshake(repository, "stable")
    handshake.serving(repository.newest().seq + 1)
    until(lambda: notes_in(store))
    with pytest.raises(NotServedError, match="served by 0"):
        store.wait_served("stable", timeout=4 * BEAT)
    # Now there is such a root.
    store.take(state_of(5), "run/5")
    assert store.wait_served("stable", timeout=60)
    handshake.close()


def test_a_version_that_is_withdrawn_is_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_module, "_ROOT_LOOKS", 0.0)
    changes: list[Callable[[], object]] = [
        lambda: store.untag("run/0", "stable"),
        lambda: store.delete("run/0"),
    ]
    for change in changes:
        move = store.publish("stable", "run/0")
        timer = threading.Timer(0.2, change)
        timer.start()
        with pytest.raises(SnapshotNotFoundError, match=r"run/0, .* was deleted, or has lost"):
            store.wait_served("stable", move.root, timeout=60)
        timer.join()


def test_a_run_that_goes_back_from_what_serves(store: Store) -> None:
    """The version keeps its number, under another name."""
    move = store.publish("stable", "run/1")
    store.rewind("run/0")
    with follower_of(store):
        (state,) = store.wait_served("stable", move.root, timeout=60)
        assert (state.serving.number, state.serving.commit) == (move.root, move.commit)


def test_two_publishers(store: Store) -> None:
    numbers: list[int] = []

    def publish(name: str) -> None:
        publisher = Store(store.uri)
        for _ in range(4):
            number = publisher.publish("stable", name).root
            numbers.append(number)
            publisher.wait_served("stable", number, timeout=60)

    with follower_of(store):
        threads = [threading.Thread(target=publish, args=(f"run/{i}",)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (state,) = store.wait_served("stable", timeout=60)
    last = store.tag_moves("stable", 1)[0]
    assert (state.serving.number, state.serving.name) == (last.root, last.name)
    assert last.root == max(numbers)


class Withdrawing(RemoteDouble):
    """A place where something happens while chunks of a version are read."""

    meanwhile: Callable[[], object] | None = None

    @override
    def read_into(self, key: str, targets: Any) -> list[int]:
        if key.startswith("packs/") and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().read_into(key, targets)


@pytest.fixture(params=["back", "deleted"])
def withdraw(request: pytest.FixtureRequest, far: Store) -> Callable[[], None]:
    """Return what takes the second snapshot back."""

    def back() -> None:
        if request.param == "back":
            far.publish("stable", "run/0")
        else:
            far.untag("run/1", "stable")
            far.tag("run/0", "stable")
            far.delete("run/1")

    return back


def test_a_version_withdrawn_while_it_is_staged_never_serves(
    far: Store, tmp_path: Path, withdraw: Callable[[], None]
) -> None:
    place, tensors = Withdrawing(str(tmp_path)), served()
    calls: list[str] = []
    with Follower(
        place,
        tensors,
        options=FollowerOptions(tag="stable"),
        on_version=lambda v: calls.append(v.name),
        interval=None,
    ) as follower:
        far.publish("stable", "run/1")
        place.meanwhile = withdraw
        for _ in range(3):
            follower.update()
        assert place.meanwhile is None
        assert (follower.version.name, float(tensors["w"][0]), calls) == ("run/0", 0.0, [])


def test_a_version_withdrawn_while_it_is_pulled_is_not_switched_to(
    far: Store, tmp_path: Path, withdraw: Callable[[], None]
) -> None:
    place, live = Withdrawing(str(tmp_path)), tmp_path / "live"
    store, options = Store(place), PullOptions(tag="stable")
    store.pull(live, options=options)
    far.publish("stable", "run/1")
    place.meanwhile = withdraw
    report = store.pull(live, options=options)
    assert place.meanwhile is None
    assert (report.snapshot, report.switched) == ("run/0", False)
    assert json.loads((live / "casnap-version.json").read_text())["snapshot"] == "run/0"


def test_the_command_shows_who_serves_what(store: Store) -> None:
    assert "has 0 followers that noted" in invoke("followers", store.uri).stdout
    with follower_of(store):
        store.wait_served("stable", timeout=60)
        out = invoke("followers", store.uri, "--tag", "stable").stdout
        assert f":{os.getpid()}" in out
        assert "run #stable" in out
        assert "run/0" in out
        document = json.loads(invoke("followers", store.uri, "--json").stdout)
        (facts,) = document["followers"]
        assert facts["serving"]["published_time"] <= facts["serving"]["applied_time"]
        assert invoke("followers", store.uri, "--tag", "best").stdout.count("\n") == 1


def test_a_note_that_is_replaced_while_it_is_looked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_module, "_BEAT", 30.0)
    with follower_of(store):
        # The first note, of what is staged, has gone by then.
        until(lambda: [s for s in store.followers() if s.serving] and len(notes_in(store)) == 1)
        backend = store._view.repository.backend
        real, times = backend.names, 0

        def names(folder: str) -> list[str]:
            nonlocal times
            found, times = real(folder), times + 1
            if folder == "tmp" and times == 1:
                (note,) = [name for name in found if NOTE.fullmatch(name)]
                # Far behind it: the follower's own next note may come within a millisecond.
                number = int(note.rpartition("-")[2], 16) + 100_000
                later = f"{note.rpartition('-')[0]}-{number:012x}"
                backend.write(f"tmp/{later}", backend.read(f"tmp/{note}"))
                backend.delete(f"tmp/{note}")
            return found

        monkeypatch.setattr(backend, "names", names)
        other = SimpleNamespace(backend=backend, config=store._view.repository.config)
        assert [state.pid for state in handshake_module.FollowerWatch(other).look()] == [
            os.getpid()
        ]


def test_notes_of_anybody_are_looked_at_with_care(store: Store) -> None:
    backend = store._view.repository.backend
    about = (store._view.repository.config.store_id, "h", 1, "stable", "")
    good = handshake_module._NoteContent(*about, 0.0, time.time(), 30.0)
    fields = json.loads(handshake_module.msgspec.json.encode(good))
    contents = [b"", b"{", b"[" * 100_000, json.dumps({**fields, "pid": "x"}).encode()]
    contents += [json.dumps({**fields, "store_id": "another"}).encode()]
    contents += [json.dumps({**fields, "beat_seconds": beat}).encode() for beat in (-1, 1e300)]
    for number, content in enumerate(contents):
        backend.write(f"tmp/follower-{number:012x}-{1:012x}", content)
    assert len(store.followers()) == 2
    assert backend.size_if_there(CONFIG_KEY)


class Odd(RemoteDouble):
    """A place where a note cannot be read, and none can be deleted.

    Attributes:
        deleted: The notes that were to be deleted.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deleted: list[str] = []

    @override
    def read(self, key: str, most: int = 1 << 20) -> bytes:
        content = super().read(key, most)
        if key.endswith("-00000000bad0"):
            raise BackendError(f"{key} is a folder, not a file")
        return content

    @override
    def delete(self, key: str) -> None:
        self.deleted.append(key)
        raise BackendError("this user may not delete it")


def test_bad_notes_are_in_nobodys_way(
    far: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is read once; and what cannot be deleted is tried once."""
    backend = far._view.repository.backend
    dead = Handshake(far._view.repository, "stable")
    dead.serving(far.publish("stable", "run/0").root)
    name, content = dead.content()
    dead.close()
    notes = {
        f"tmp/{name}": content,
        f"tmp/follower-{1:012x}-00000000bad0": b"{}",
        f"tmp/follower-{2:012x}-{1:012x}": b"junk",
    }
    for key, raw in notes.items():
        backend.write(key, raw)
    place = Odd(str(tmp_path))
    waiting = Store(place)
    (state,) = waiting.followers()
    assert state.serving
    until(lambda: waiting.followers()[0].is_silent)
    with pytest.raises(NotServedError, match="is silent"):
        waiting.wait_served("stable", quorum=2, timeout=1.2)
    reads = [key for kind, key in place.log if kind == "get" and "follower" in key]
    assert (sorted(reads), place.deleted) == (sorted(notes), [f"tmp/{name}"])
    (warning,) = warnings_of(far, caplog)
    assert "its note cannot be read" in warning


def test_a_handshake_is_given_up_with_its_owner(store: Store) -> None:
    def owner() -> Iterator[None]:
        handshake = Handshake(store._view.repository, "stable")
        handshake.fetched(3, "run/0", "ab", 0.0)
        handshake.staged(3)
        handshake.serving(3)
        yield
        del handshake

    owned = owner()
    next(owned)
    store.wait_served("stable", timeout=60)
    next(owned, None)
    until(lambda: not notes_in(store))


def test_a_follower_ends_quietly_if_another_store_has_come(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    with follower_of(store, interval=None):
        store.wait_served("stable", timeout=60)
        (tmp_path / "store").rename(tmp_path / "moved")
        other = store_with(tmp_path / "store")
        other.publish("stable", "run/1")
    assert not uncaught
    assert not other.followers()
    assert other.tagged("stable").name == "run/1"


def test_a_signal_handler_may_stop_a_follower_anywhere(store: Store) -> None:
    """Also where it interrupts the thread that notes something."""
    handshake = Handshake(store._view.repository, "stable")
    calls = 0

    def close(*_: object) -> None:
        nonlocal calls
        calls += 1
        handshake.close(0)

    def note(_frame: object, event: str, called: object) -> None:
        if event in ("call", "c_return") and called is not sys.setprofile:
            sys.setprofile(None)
            close()
            sys.setprofile(note)

    sys.setprofile(note)
    try:
        handshake.fetched(3, "run/0", "ab", 0.0)
        handshake.staged(3)
        handshake.serving(3)
    finally:
        sys.setprofile(None)
    assert calls > 5
    until(lambda: not notes_in(store))


def test_a_forked_child_is_another_follower(store: Store) -> None:
    follower = follower_of(store)

    def serve() -> None:
        with follower.applied():
            signal.pause()

    with follower:
        until(lambda: [s for s in store.followers() if s.serving])
        pid = start(serve)
        try:
            until(lambda: len(store.wait_served("stable", timeout=60)) == 2)
            assert {state.pid for state in store.followers()} == {os.getpid(), pid}
        finally:
            os.kill(pid, signal.SIGKILL)
            wait(pid)
