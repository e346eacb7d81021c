"""Takes, deletes and collectors at the same time: what a take commits is kept."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from casnap import NewStore, StateDict, Store
from tests.support.examples import FEW
from tests.support.faults import (
    CHUNK,
    app_state,
    assert_holds,
    backend_faults,
    take,
)
from tests.support.garbage import assert_tidy, places_of

pytestmark = pytest.mark.usefixtures("collected_by_hand")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_take_takes_back_what_was_condemned_after_it_began(path: Path) -> None:
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    take(store, 1)
    other = Store(path)

    def collect() -> None:
        if not done:
            done.append(other.delete("step_1"))
            other.gc()

    done: list[Any] = []
    with backend_faults(0, collect, names=["put_if_absent"]):
        snapshot = store.take(app_state(1), "again", metadata={"step": 1})
    assert snapshot.stats.new_bytes < 40_000
    assert not set(store._view.repository.newest().condemned) & {
        p.pack for p in places_of(store, snapshot)
    }
    store.gc(grace=0)
    assert_holds(snapshot, 1)
    assert_tidy(path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_take_leaves_a_pack_whose_chunks_were_copied(path: Path, asynchronous: bool) -> None:
    """If takes under way rescued it, a run of takes would copy it again and again."""
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    weights = torch.randn(20 * CHUNK // 4)
    part = StateDict(w=weights[: 5 * CHUNK // 4].clone())
    store.take({"m": StateDict(w=weights)}, "whole")
    store.take({"m": part}, "part")
    store.delete("whole")
    done: list[Any] = []

    def collect() -> None:
        if not done:
            done.append(None)
            done.append(Store(path).gc())

    with backend_faults(0, collect, names=["put_if_absent"]):
        if asynchronous:
            snapshot = store.async_take({"m": part}, "again").wait()
        else:
            snapshot = store.take({"m": part}, "again")
    assert done[1].repacked_packs >= 1
    assert snapshot.stats.new_bytes < 5 * CHUNK
    assert len(store._view.repository.newest().condemned) == done[1].waiting_packs
    store.gc(grace=0)
    assert torch.equal(snapshot.read_object("m/w"), part["w"])
    assert store.check(data=True).ok
    assert_tidy(path)


COPIED = 15


def test_collectors_of_one_process_that_copy(tmp_path: Path) -> None:
    stores = [Store(tmp_path / name, create=NewStore(chunk_size=CHUNK)) for name in "abc"]
    for store in stores:
        for part in range(COPIED):
            weights = torch.randn(20 * CHUNK // 4)
            store.take({"m": StateDict(w=weights)}, f"whole_{part}")
            store.take({"m": StateDict(w=weights[: 5 * CHUNK // 4].clone())}, f"part_{part}")
            store.delete(f"whole_{part}")
    with ThreadPoolExecutor(3) as pool:
        for report in pool.map(lambda store: store.gc(grace=0), stores):
            assert report.repacked_packs >= COPIED
    for store in stores:
        assert store.check(data=True).ok


def test_what_came_and_went_while_a_collector_went_on_is_no_damage(path: Path) -> None:
    """The segment of a newer root is gone, but all of the root that was marked are there."""
    store = Store(path, create=NewStore(chunk_size=CHUNK))
    take(store, 0)
    other = Store(path)

    def come_and_go() -> None:
        other.delete("step_1")
        other.gc(grace=0, repack=0)

    due: list[tuple[str, Callable[[], object]]] = [
        ("reading the index", lambda: take(other, 1)),
        ("marking", lambda: None),
        ("reading the index", come_and_go),
    ]

    def progress(phase: str, _done: int, _total: int) -> None:
        if due and phase == due[0][0]:
            with ThreadPoolExecutor() as pool:
                pool.submit(due.pop(0)[1]).result()

    store.gc(grace=0, progress=progress)
    assert not due
    assert store.check(data=True).ok
    assert_holds(store["step_0"], 0)
    assert_tidy(path)


@settings(max_examples=FEW)
@given(st.data())
def test_marking_in_parts_marks_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from casnap.storage.collecting import whole_marks

    folder = tmp_path_factory.mktemp("parts")
    results = []
    steps = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True))
    gone = data.draw(st.sets(st.sampled_from(steps)))
    store = Store(folder / "s", create=NewStore(chunk_size=CHUNK))
    for step in steps:
        take(store, step)
    for step in gone:
        store.delete(f"step_{step}")
    root = store._view.repository.newest()
    for part in (whole_marks._PART, data.draw(st.integers(1, 50))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole_marks, "_PART", part)
            found = whole_marks.WholeMarks(store._view.repository, root, lambda *_: None)
            everything = {d for d, _, _ in found.contents_of(set(found.uses))}
            results.append(
                (
                    found.count,
                    found.nbytes,
                    found.uses,
                    found.snapshots,
                    found.needed_of(everything),
                )
            )
    assert results[0] == results[1]
