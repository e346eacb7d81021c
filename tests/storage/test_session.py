"""The contract of a session: whatever fails, at whichever call, no snapshot is lost or half there.

A session that fails leaves no file that no root may name. One that a collector has passed moves its
packs, relies on copies, or is fenced; then it is done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    BackendError,
    DamagedError,
    FencedError,
    StorageFullError,
    UnclearCommitError,
)
from casnap.format.digest import digest_of
from casnap.runtime.threads import run_shielded
from casnap.storage.commit_log.roots import COPIES
from casnap.storage.lookup.index import Index
from casnap.storage.writing.handovers import Handover
from casnap.storage.writing.session import Session
from casnap.storage.writing.starting_over import again
from tests.support.faults import (
    BACKEND_CALLS,
    CHUNK,
    assert_given_back,
    assert_no_orphans,
    elsewhere,
    files,
    memory_folder,
)
from tests.support.faulty import (
    Act,
    Call,
    Crash,
    Fault,
    FaultyBackend,
    before,
    crash,
    fail,
    lose_answer,
)
from tests.support.sweep import spread
from tests.support.written import change_of, commit, commit_snapshot

KEPT = torch.arange(CHUNK // 4, dtype=torch.int32)
NEW = torch.arange(1 << 20, (1 << 20) + CHUNK // 2, dtype=torch.int32)


def state(**more: torch.Tensor) -> dict[str, StateDict]:
    return {"s": StateDict(kept=KEPT, **more)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store in which a chunk is needed, in a pack that is mostly not."""
    path = tmp_path_factory.mktemp("base") / "store"
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    store.take(state(rest=torch.randn(9 * CHUNK // 4)), "full")
    store.take(state(), "kept")
    return path


@pytest.fixture
def path(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "store"))


def add(store: Store) -> None:
    """Write a snapshot that relies on one chunk and has others of its own."""
    with change_of(store) as session:
        commit_snapshot(session, "new", {"s": {"kept": KEPT, "new": NEW}})


def names_in(path: Path) -> set[str]:
    """Return the names of the snapshots of a store; each must be whole."""
    found = Store(path, create=False).snapshots()
    for snapshot in found:
        assert torch.equal(snapshot.read_object("s/kept"), KEPT)
        if snapshot.name == "new":
            assert torch.equal(snapshot.read_object("s/new"), NEW)
    return {snapshot.name for snapshot in found}


def assert_goes_on(path: Path) -> None:
    """Check that another process can take and collect, and that nothing is left over then."""
    names = names_in(path)
    Store(path).take(state(), "after")
    Store(path).gc(grace=0)
    assert names_in(path) == names | {"after"}
    assert_no_orphans(path)


def calls_to_strike(base: Path, offset: int) -> list[int]:
    """Return some of the calls that :func:`add` makes, and all around its root."""
    with memory_folder() as folder:
        backend = FaultyBackend(LocalBackend(shutil.copytree(base, folder / "store")))
        store = Store(backend)
        assert len(store.snapshots()) == 2
        calls = Fault(lambda call: call.go(), BACKEND_CALLS, times=None)
        with backend.during(calls):
            add(store)
    assert calls.struck > 7
    return sorted({*spread(calls.struck, offset), *range(calls.struck - 6, calls.struck)})


# --- faults -----------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[], Act]] = {
    "it fails": fail,
    "the disk is full": lambda: fail(StorageFullError),
    "the answer is lost": lose_answer,
    "the process dies": crash,
    "the machine dies": lambda: crash(losing_unsynced=True),
}


# How a session ends. What fails after its root is put may do no harm.
ENDS: dict[str, set[type | None]] = {
    "it fails": {None, BackendError, UnclearCommitError},
    "the disk is full": {None, StorageFullError, UnclearCommitError},
    "the answer is lost": {None, BackendError, UnclearCommitError},
    "the process dies": {Crash},
    "the machine dies": {Crash},
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", FAULTS)
def test_a_fault_at_each_call(base: Path, how: str) -> None:
    ended: set[type | None] = set()
    for number in calls_to_strike(base, list(FAULTS).index(how)):
        with memory_folder() as folder:
            path = Path(shutil.copytree(base, folder / "store"))
            there = files(path)
            backend = FaultyBackend(LocalBackend(path))
            store = Store(backend)
            assert len(store.snapshots()) == 2
            struck_at, act = [], FAULTS[how]()

            def strike(call: Call, struck_at: list[str] = struck_at, act: Act = act) -> object:
                struck_at.append(call.name)
                return act(call)

            fault = Fault(strike, BACKEND_CALLS, skip=number)
            error: BaseException | None = None
            with backend.during(fault):
                try:
                    add(store)
                except (Exception, Crash) as e:  # noqa: BLE001
                    error = e
            assert fault.struck
            ended.add(None if error is None else type(error))
            is_there = "new" in names_in(path)
            if error is None:
                assert is_there
            elif not isinstance(error, Crash | UnclearCommitError):
                assert not is_there
                # What may have been put later is kept.
                may_stand = struck_at == ["put_if_absent"] and how != "the disk is full"
                assert (files(path) == there) == (not may_stand), struck_at
            assert_given_back()
            assert_goes_on(path)
    assert ended == ENDS[how]


def test_an_error_within_it(path: Path) -> None:
    there = files(path)
    for own in (True, False):

        def work(crew: Any, own: bool = own) -> None:
            with Session(Store(path)._view.repository, None if own else crew) as session:
                session.put_node(b"a node")
                chunks = session.writer()
                chunks.store([memoryview(bytes(CHUNK))] * 2)
                chunks.finish()
                raise ValueError("on purpose")

        with pytest.raises(ValueError, match="on purpose"):
            run_shielded(work)
        assert files(path) == there
        assert_given_back()


def test_nothing_to_commit(path: Path) -> None:
    there, store = files(path), Store(path)
    root = store._view.repository.newest()
    with change_of(store) as session:
        session.put_node(b"a node")
        assert session.commit(lambda table, seq: None) is None
    assert files(path) == there
    assert store._view.repository.newest() == root


def test_roots_that_come_first(path: Path) -> None:
    """The number is taken three times; no try leaves anything."""
    others = iter(range(3))

    def come_first() -> None:
        number = next(others)
        Store(path).take(state(other=torch.full((CHUNK,), float(number))), f"other/{number}")

    fault = Fault(before(elsewhere(come_first)), "put_if_absent", "roots/*", times=3)
    add(Store(FaultyBackend(LocalBackend(path), fault)))
    assert fault.struck == 3
    assert names_in(path) == {"full", "kept", "new", "other/0", "other/1", "other/2"}
    assert_no_orphans(path)


# --- fences -----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.usefixtures("unannounced")
@pytest.mark.parametrize("gone", [["full"], ["full", "kept"]], ids=" ".join)
def test_a_collector_at_each_call(base: Path, gone: list[str]) -> None:
    """What the session relies on is copied elsewhere, or goes; its own packs may go too."""
    tries: set[int] = set()
    for number in calls_to_strike(base, len(gone)):
        with memory_folder() as folder:
            path = Path(shutil.copytree(base, folder / "store"))

            def collect(path: Path = path) -> None:
                for name in gone:
                    Store(path).delete(name)
                Store(path).gc(grace=0)

            backend = FaultyBackend(LocalBackend(path))
            store = Store(backend)
            assert len(store.snapshots()) == 2
            tried: list[Store] = []

            def work(store: Store = store, tried: list[Store] = tried) -> None:
                tried.append(store)
                add(store)

            fault = Fault(before(elsewhere(collect)), BACKEND_CALLS, skip=number)
            with backend.during(fault):
                again(store._view.repository, work, "the test")
            assert fault.struck
            tries.add(len(tried))
            assert store._view.repository.announces_at_once == (len(tried) > 1)
            assert names_in(path) == {"full", "kept", "new"}.difference(gone)
            assert_goes_on(path)
    assert tries == {1, 2}


@contextmanager
def relying(store: Store) -> Iterator[tuple[Session, Callable[[], None]]]:
    """Give a session that relies on the chunk, and what has it copied, and its pack deleted."""
    with change_of(Store(store.uri)) as session:
        chunks = session.writer()
        chunks.store([memoryview(bytearray(KEPT.numpy().tobytes()))])
        chunks.finish()

        def repack() -> None:
            store.delete("full")
            assert Store(store.uri).gc(grace=0).repacked_packs

        yield session, repack


@pytest.mark.usefixtures("unannounced")
def test_copies_are_relied_on(path: Path) -> None:
    with relying(Store(path)) as (session, repack):
        repack()
        commit(session)
    assert_goes_on(path)
    assert Store(path).check(data=True).ok


@pytest.mark.usefixtures("unannounced")
def test_what_is_nowhere_any_more(path: Path) -> None:
    store = Store(path)
    with relying(store) as (session, _):
        store.delete("full")
        store.delete("kept")
        store.gc(grace=0)
        with pytest.raises(FencedError, match="grace"):
            commit(session)


@pytest.mark.usefixtures("unannounced")
def test_a_look_that_fails_forgets_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is repeated on a newer root; the pack relied on must be looked for again."""
    store, find = Store(path), Index.find
    with relying(store) as (session, _):
        for name in ("full", "kept"):
            store.delete(name)
        store.gc(grace=0)
        store.take({"s": StateDict(other=torch.randn(9 * CHUNK // 4))}, "other")

        def look(*_args: object, **_options: object) -> object:
            monkeypatch.setattr(Index, "find", find)
            store.delete("other")
            store.gc(grace=0)
            raise DamagedError("the cache broke, and the segments are gone")

        monkeypatch.setattr(Index, "find", look)
        with pytest.raises(FencedError, match="grace"):
            commit(session)


# --- ranks ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unannounced")
def test_ranks_that_rely_on_what_a_newer_root_has(path: Path) -> None:
    """Asked to move, a rank looks at a newer root than the one that rank 0 is about to follow."""
    store = Store(path)
    with relying(store) as (session, repack), change_of(store) as leader:
        first = [session.hand_over(2)]
        store.take({"s": StateDict(x=torch.randn(CHUNK))}, "scratch")
        store.delete("scratch")
        store.gc(grace=0, repack=0)
        asked = []

        def gather(seq: int) -> list[Handover]:
            if not seq:
                return first
            asked.append(seq)
            if len(asked) == 1:
                repack()
            return [session.hand_over(2, seq)]

        leader.include(gather)
        commit(leader)
        assert asked
    store.gc(grace=0)
    assert names_in(path) == {"kept"}
    assert store.check(data=True).ok


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_part_that_was_handed_over_stays_until_it_is_withdrawn(
    path: Path, withdrawn: bool
) -> None:
    there, node = files(path), b"a node of another rank"
    with change_of(Store(path)) as session:
        session.put_node(node)
        handover = session.hand_over(2)
        if withdrawn:
            session.withdraw()
    if withdrawn:
        assert files(path) == there
        return
    with change_of(Store(path)) as leader:
        leader.include(lambda _: [handover])
        commit(leader)
    assert Store(path)._view.repository.node(digest_of(node)) == node
    assert_goes_on(path)


# --- again ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obstacles", "options", "ended"),
    [
        ("", {}, "done"),
        ("ff", {"tries": 3}, "done"),
        ("ffffff", {"tries": None}, "done"),
        ("fff", {"tries": 3}, FencedError),
        ("f", {"tries": 1}, FencedError),
        ("f", {"start_over": lambda: False}, FencedError),
        ("f", {"tries": 1, "give_up": lambda e: str(e)}, "on purpose"),
        ("d", {}, StorageFullError),
        ("dfd", {"on_full": lambda e: None}, "done"),
        ("ffd", {"tries": 3, "on_full": lambda e: None}, "done"),
        ("ffdf", {"tries": 3, "on_full": lambda e: None}, FencedError),
        ("ddddd", {"on_full": lambda e: None}, StorageFullError),
    ],
)
def test_again(path: Path, obstacles: str, options: dict[str, Any], ended: Any) -> None:
    """What follows a fence (f) and a full disk (d), one after the other."""
    store, left, errors = Store(path)._view.repository, list(obstacles), {"f": FencedError}

    def work() -> str:
        if left:
            raise errors.get(left.pop(0), StorageFullError)("on purpose")
        return "done"

    if isinstance(ended, str):
        assert again(store, work, "the test", **options) == ended
    else:
        with pytest.raises(ended, match="on purpose"):
            again(store, work, "the test", **options)
    assert not left
    assert store.announces_at_once == ("f" in obstacles)


@pytest.mark.usefixtures("unannounced")
@pytest.mark.parametrize("fences", range(3))
def test_a_change_of_the_table_that_was_fenced_makes_room_too(path: Path, fences: int) -> None:
    """The copy of the newest root holds the space: once it is given up, the disk has some."""

    def collect() -> None:
        Store(path).take(state(scratch=torch.randn(CHUNK)), "scratch")
        Store(path).delete("scratch")
        Store(path).gc(grace=0)

    def put(call: Call) -> object:
        if any((path / "casnap-store" / COPIES).iterdir()):
            raise StorageFullError("on purpose")
        return call.go()

    fence = Fault(before(elsewhere(collect)), "put_if_absent", "roots/*", times=fences)
    full = Fault(put, "put_if_absent", "roots/*", skip=fences, times=None)
    store = Store(FaultyBackend(LocalBackend(path), fence, full))
    store.tag("kept", "good")
    assert (fence.struck, full.struck) == (fences, 2)
    assert store["kept"].tags == ("good",)
    assert_goes_on(path)
