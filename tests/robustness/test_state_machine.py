"""Any order of takes, deletes, collections, crashes and lost caches, beside a model in memory."""

from __future__ import annotations

import itertools
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import casnap.storage.lookup.index_cache
from casnap import NewStore, Retention, Snapshot, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    FencedError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
)
from casnap.pending import PendingSnapshot
from casnap.take.options import unclear_commits
from tests.support.examples import FEW
from tests.support.faults import (
    CHUNK,
    KEY,
    assert_equal,
    assert_no_orphans,
    in_child,
    memory_folder,
)
from tests.support.faulty import Crash, Fault, FaultyBackend, Gate, crash
from tests.support.read_alike import assert_read_alike
from tests.support.store_model import (
    LATE,
    NAMES,
    PARTS,
    RETENTIONS,
    STABLE,
    TAKES,
    Held,
    Model,
    Parts,
    in_order,
    kept,
    may_take,
    published,
    thinned,
)


def assert_holds(snapshot: Snapshot, held: Held) -> None:
    """Restore a snapshot over nothing but zeros, and compare it with the model."""
    state = held.app_state()
    late = {} if held.thinned else state[LATE].data
    for tensor in (*state[KEY]["parts"].values(), *late.values()):
        tensor.zero_()
    snapshot.restore(state)
    expected = held.content()
    assert snapshot.thinned == ((LATE,) if held.thinned else ())
    assert held.thinned or torch.equal(state[LATE]["m"], held.moments())
    assert state[KEY]["notes"] == expected["notes"]
    assert_equal(state[KEY]["parts"], expected["parts"])


@dataclass(frozen=True)
class Death:
    """At which call of the backend a process dies, and whether the machine does, too.

    Attributes:
        call: The number of the call, from 0.
        loses: Which changes that were not synced are lost: all, none, or some.
    """

    call: int
    loses: str

    def act(self) -> Callable[..., object]:
        # Of each change it is decided by its key: the same in each repetition of an example.
        if self.loses == "some":
            return crash(losing_unsynced=lambda key: bool(zlib.crc32(key.encode()) & 1))
        return crash(losing_unsynced=self.loses == "all")


DEATHS = st.one_of(
    st.none(),
    st.none(),
    st.builds(Death, st.integers(0, 30), st.sampled_from(["none", "none", "all", "some"])),
)
REPACKS = st.sampled_from([0.0, 0.5, 1.0])


Seen = tuple[int, frozenset[str], bool]
"""What a store says of a snapshot: its number, its tags, whether it is thinned."""


@dataclass
class Pending:
    """An async take that waits at a gate, and what is known of it."""

    pending: PendingSnapshot
    backend: FaultyBackend
    gate: Gate
    name: str
    held: Held
    overwrite: bool
    collected: bool = False


@dataclass
class Handle:
    """A snapshot that a reader has opened, and whether it may be collected by now."""

    snapshot: Snapshot
    held: Held
    collected: bool = False


class StoreMachine(RuleBasedStateMachine):
    """A store, and what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(memory_folder())
        self.path = self.folder / "store"
        self._stack.enter_context(mock.patch.dict(os.environ))
        self._caches = itertools.count()
        self._old_cache: Path | None = None
        self._use_cache()
        self.model: Model = {}
        self.taken: list[Parts] = []
        self.handles: list[Handle] = []
        self.pending: Pending | None = None
        self._numbers = itertools.count()
        self._looks = 0

    @initialize(takes=st.lists(TAKES, min_size=1, max_size=4))
    def create(self, takes: list[tuple[Any, ...]]) -> None:
        self._open()
        for take in takes:
            self.take(take, overwrite=True, death=None)

    # --- opening ---

    def _open(self) -> None:
        self.backend = FaultyBackend(LocalBackend(self.path))
        self.store = Store(self.backend, create=NewStore(chunk_size=CHUNK))

    def _reader(self) -> Store:
        return Store(self.path, create=False)

    def _use_cache(self, copy_of: Path | None = None) -> None:
        """Use another cache from here on: empty, or a copy of one."""
        self.cache = self.folder / f"cache-{next(self._caches)}"
        if copy_of is not None:
            shutil.copytree(copy_of, self.cache)
        os.environ["CASNAP_CACHE_DIR"] = str(self.cache)

    def _seen(self) -> dict[str, Seen]:
        """Return what the store says of its snapshots, in the order of their commits."""
        return {
            s.name: (s.metadata.user["number"], frozenset(s.tags), s.row.is_thinned)
            for s in self.store.snapshots()
        }

    def _would_be_seen(self, model: Model) -> dict[str, Seen]:
        return {
            name: (model[name].number, model[name].tags, model[name].thinned)
            for name in in_order(model)
        }

    def _with(self, name: str, held: Held) -> Model:
        """Return the model after a commit."""
        return {**self.model, name: replace(held, order=next(self._numbers))}

    def _do(self, work: Callable[[Store], object], after: Model, death: Death | None) -> bool:
        """Do something that makes the model ``after``, or die; return whether it came to an end."""
        if death is None:
            work(self.store)
            self.model = after
            return True
        if self.pending is not None:
            # It is in another process, as far as the store can tell, but on the same machine.
            death = replace(death, loses="none")
        try:
            with self.backend.during(Fault(death.act(), skip=death.call)):
                work(self.store)
        except Crash:
            self._recover(after, rebooted=death.loses != "none")
            return False
        self.model = after
        return True

    def _recover(self, after: Model, *, rebooted: bool) -> None:
        """Go on after a death: what was under way is done, or is not."""
        if rebooted:
            self._use_cache()
            self.handles.clear()
        self._open()
        self._choose(after)

    def _choose(self, after: Model) -> None:
        # They were known to the process that died. Here the next one is the same.
        unclear_commits.clear()
        seen = self._seen()
        assert seen in (self._would_be_seen(self.model), self._would_be_seen(after))
        if seen == self._would_be_seen(after):
            self.model = after

    def _named(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model)), label="name")

    # --- taking ---

    @rule(take=TAKES, overwrite=st.booleans(), death=DEATHS)
    def take(self, take: tuple[Any, ...], overwrite: bool, death: Death | None) -> None:
        name, held = take[0], Held(next(self._numbers), *take[1:])
        self.taken.append(held.parts)
        may = may_take(self.model, name, overwrite=overwrite)

        def work(store: Store) -> None:
            refused = nullcontext() if may else pytest.raises(SnapshotExistsError)
            with refused:
                store.take(held.app_state(), name, metadata=held.metadata, overwrite=overwrite)

        after = self._with(name, held) if may else self.model
        if self.pending is None:
            self._do(work, after, death)
        else:
            # Another take of this process would wait for the one that is pending.
            assert in_child(lambda: work(self._reader())) == 0
            self.model = after

    @rule(data=st.data(), name=st.sampled_from(NAMES), death=DEATHS)
    def take_again(self, data: st.DataObject, name: str, death: Death | None) -> None:
        """Take what was taken before, and may be condemned, collected or half written."""
        parts = data.draw(st.sampled_from(self.taken), label="parts")
        self.take((name, parts, 0, None), overwrite=True, death=death)

    @precondition(lambda self: self.pending is None)
    @rule(data=st.data(), name=st.sampled_from(NAMES), new=PARTS, at_root=st.booleans())
    def begin_async_take(self, data: st.DataObject, name: str, new: Parts, at_root: bool) -> None:
        """Begin a take that goes on when it is waited for; until then it is about to write."""
        parts = data.draw(st.just(new) | st.sampled_from(self.taken), label="parts")
        overwrite = data.draw(st.sampled_from([True, True, False]), label="overwrite")
        held, gate = Held(next(self._numbers), parts, 0, None), Gate()
        if not may_take(self.model, name, overwrite=overwrite):
            return
        where = ("put_if_absent", "roots/*") if at_root else ("write", "packs/*")
        backend = FaultyBackend(LocalBackend(self.path), Fault(gate, *where))
        store, state = Store(backend), held.app_state()
        pending = store.async_take(state, name, metadata=held.metadata, overwrite=overwrite)
        # What is changed after the call does not show.
        state[KEY]["parts"]["0"].zero_()
        assert gate.reached.wait(300)
        self.pending = Pending(pending, backend, gate, name, held, overwrite)

    @precondition(lambda self: self.pending is not None)
    @rule(grace=st.sampled_from([0, 3600]), repack=REPACKS, wait=st.booleans())
    def collect_what_it_relies_on(self, grace: float, repack: float, wait: bool) -> None:
        """Delete what shares chunks with the take that is pending, and collect."""
        assert self.pending is not None
        parts = set(self.pending.held.parts)
        for name in [n for n, held in self.model.items() if parts.intersection(held.parts)]:
            self._delete(name, None)
        self._collect(grace, repack, None)
        if wait:
            self.end_async_take(None)

    @precondition(lambda self: self.pending is None)
    @rule(
        data=st.data(),
        name=st.sampled_from(NAMES),
        at_root=st.booleans(),
        grace=st.sampled_from([0, 3600]),
        delete=st.booleans(),
    )
    def collect_during_an_async_take(
        self, data: st.DataObject, name: str, at_root: bool, grace: float, delete: bool
    ) -> None:
        self.begin_async_take(data, name, data.draw(PARTS, label="new"), at_root)
        if self.pending is not None:
            if delete:
                self.collect_what_it_relies_on(grace, 0.5, wait=False)
            else:
                self._collect(grace, 0.5, None)
            self.end_async_take(None)

    @precondition(lambda self: self.pending is not None)
    @rule(death=st.none() | st.integers(0, 12))
    def end_async_take(self, death: int | None) -> None:
        took, self.pending = self.pending, None
        assert took is not None
        if death is not None:
            took.backend.faults.append(Fault(crash(), skip=death))
        took.gate.open()
        after = self._with(took.name, took.held)
        may = may_take(self.model, took.name, overwrite=took.overwrite)
        try:
            took.pending.wait()
        except Crash:
            self._choose(after if may else self.model)
        except SnapshotExistsError:
            assert not may
        except FencedError:
            assert took.collected
        else:
            assert may
            self.model = after

    # --- what makes garbage ---

    @precondition(lambda self: self.model)
    @rule(data=st.data(), death=DEATHS)
    def delete(self, data: st.DataObject, death: Death | None) -> None:
        self._delete(self._named(data), death)

    def _delete(self, name: str, death: Death | None) -> None:
        after = {n: held for n, held in self.model.items() if n != name}
        self._do(lambda store: store.delete(name), after, death)

    @rule(retention=RETENTIONS, folder=st.sampled_from([None, "run", "run/deep"]), death=DEATHS)
    def prune(self, retention: Retention, folder: str | None, death: Death | None) -> None:
        after = kept(self.model, retention, folder)
        gone = self.model.keys() - after.keys()
        reports = []
        foreseen = self.store.prune(retention, prefix=folder, dry_run=True)
        assert {v.name for v in foreseen.deleted} == gone
        if self._do(
            lambda store: reports.append(store.prune(retention, prefix=folder)), after, death
        ):
            assert {v.name for v in reports[0].deleted} == gone

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tag=st.sampled_from(["best", "kept"]), death=DEATHS)
    def tag(self, data: st.DataObject, tag: str, death: Death | None) -> None:
        name = self._named(data)
        held = self.model[name]
        after = {**self.model, name: replace(held, tags=held.tags | {tag})}
        self._do(lambda store: store.tag(name, tag), after, death)

    @precondition(lambda self: any(held.tags for held in self.model.values()))
    @rule(data=st.data(), death=DEATHS)
    def untag(self, data: st.DataObject, death: Death | None) -> None:
        tagged = sorted(name for name, held in self.model.items() if held.tags)
        name = data.draw(st.sampled_from(tagged), label="name")
        held = self.model[name]
        after = {**self.model, name: replace(held, tags=frozenset())}
        self._do(lambda store: store.untag(name, *held.tags), after, death)

    @rule(
        count=st.integers(1, 2),
        folder=st.sampled_from([None, "run", "run/deep"]),
        death=DEATHS,
    )
    def thin(self, count: int, folder: str | None, death: Death | None) -> None:
        after = thinned(self.model, count, folder)
        self._do(lambda store: store.thin({LATE: count}, prefix=folder), after, death)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), death=DEATHS)
    def publish(self, data: st.DataObject, death: Death | None) -> None:
        name = self._named(data)
        self._do(lambda store: store.publish(STABLE, name), published(self.model, name), death)

    # --- what collects it ---

    @rule(grace=st.sampled_from([0, 3600]), repack=REPACKS, death=DEATHS)
    def collect(self, grace: float, repack: float, death: Death | None) -> None:
        self._collect(grace, repack, death)

    @rule(data=st.data(), repack=REPACKS, death=DEATHS)
    def take_what_was_just_collected(
        self, data: st.DataObject, repack: float, death: Death | None
    ) -> None:
        if self.model:
            name = self._named(data)
            parts = self.model[name].parts
            self._delete(name, None)
            self._collect(data.draw(st.sampled_from([0, 3600]), label="grace"), repack, death)
            self.take(("a", parts, 0, None), overwrite=True, death=None)

    def _collect(self, grace: float, repack: float, death: Death | None) -> None:
        if grace == 0:
            there = {held.number: held for held in self.model.values()}
            for handle in self.handles:
                now = there.get(handle.held.number)
                handle.collected |= now is None or now.thinned != handle.held.thinned
            if self.pending is not None:
                self.pending.collected = True
        ended = self._do(lambda store: store.gc(grace=grace, repack=repack), self.model, death)
        if ended and grace == 0 and self.pending is None:
            assert_no_orphans(self.path)

    @rule(death=DEATHS)
    def repair(self, death: Death | None) -> None:
        reports = []
        if self._do(lambda store: reports.append(store.repair()), self.model, death):
            assert reports[0].found == []

    # --- what is forgotten ---

    @rule(lost=st.sampled_from(["nothing", "the cache", "its files"]))
    def reopen(self, lost: str) -> None:
        if lost == "its files":
            # Under the feet of those who have it open.
            shutil.rmtree(self.cache, ignore_errors=True)
        elif lost == "the cache":
            self._use_cache()
        self._open()

    @precondition(lambda self: self.pending is None and self.cache.exists())
    @rule()
    def copy_the_cache(self) -> None:
        self._old_cache = self.folder / f"old-{next(self._caches)}"
        shutil.copytree(self.cache, self._old_cache)

    @precondition(lambda self: self._old_cache is not None)
    @rule()
    def bring_back_an_older_cache(self) -> None:
        self._use_cache(self._old_cache)
        self._open()

    # --- what reads ---

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def open_a_snapshot(self, data: st.DataObject) -> None:
        name = self._named(data)
        self.handles.append(Handle(self._reader()[name], self.model[name]))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def read_what_is_open(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.handles), label="handle")
        try:
            assert_holds(handle.snapshot, handle.held)
        except SnapshotNotFoundError:
            assert handle.collected

    @rule(data=st.booleans())
    def check(self, data: bool) -> None:
        report = self.store.check(data=data)
        assert report.damages == []
        assert report.snapshots == len(self.model)

    @invariant()
    def is_what_it_must_be(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = self._would_be_seen(self.model)
        assert list(self._seen().items()) == list(expected.items())
        latest = self.store.latest(thinned=True)
        assert (None if latest is None else latest.name) == next(reversed(expected), None)
        whole = [name for name, (_, _, is_thinned) in expected.items() if not is_thinned]
        if whole or not expected:
            latest = self.store.latest()
            assert (None if latest is None else latest.name) == (whole[-1] if whole else None)
        else:
            with pytest.raises(SnapshotError, match="only thinned snapshots are left"):
                self.store.latest()
        for name, (_, tags, _) in expected.items():
            assert STABLE not in tags or self.store.tagged(STABLE).name == name
        if self.model:
            self._looks += 1
            name = sorted(self.model)[self._looks % len(self.model)]
            assert_holds(self.store[name], self.model[name])

    # --- the end ---

    def teardown(self) -> None:
        try:
            if self.pending is not None:
                self.end_async_take(None)
            if hasattr(self, "store"):
                self._assert_all_is_well()
        finally:
            self.handles.clear()
            _close_caches(below=self.folder)
            self._stack.close()

    def _assert_all_is_well(self) -> None:
        for handle in self.handles:
            if not handle.collected:
                assert_holds(handle.snapshot, handle.held)
        self._use_cache()
        self._open()
        self._assert_all_holds()
        assert self.store.check(data=True).damages == []
        self.store.gc(grace=0)
        assert_no_orphans(self.path)
        self._assert_all_holds()
        assert_read_alike(self.path)

    def _assert_all_holds(self) -> None:
        assert self._seen() == self._would_be_seen(self.model)
        for name, held in self.model.items():
            assert_holds(self.store[name], held)


def _close_caches(below: Path) -> None:
    """Close what no store uses any more: thousands of maps would fill the address space."""
    for folder in [f for f in casnap.storage.lookup.index_cache._open if f.is_relative_to(below)]:
        casnap.storage.lookup.index_cache._open.pop(folder)._env.close()


MANY = settings.default.max_examples if settings.default else 50


@pytest.mark.usefixtures("collected_by_hand")
class TestStore(StoreMachine.TestCase):  # type: ignore[misc]
    """A few examples; many under ``HYPOTHESIS_PROFILE=soak``."""

    settings = settings(max_examples=FEW, stateful_step_count=15)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("collected_by_hand")
class TestStoreForLong(StoreMachine.TestCase):  # type: ignore[misc]
    """More examples, and longer ones."""

    settings = settings(max_examples=MANY * 6, stateful_step_count=40)
