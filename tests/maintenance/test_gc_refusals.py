"""A collector that meets damage, a lost answer or bad input frees nothing that is needed."""

from __future__ import annotations

import contextlib
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    CasnapError,
    DamagedError,
)
from casnap.format.records import pack_key, segment_key
from casnap.storage.reading.repository import Repository
from tests.support.damaged import drop_from_index
from tests.support.faults import CHUNK, assert_store, elsewhere, take
from tests.support.faulty import Fault, FaultyBackend, flip, lose_answer
from tests.support.garbage import assert_tidy, places_of

pytestmark = pytest.mark.usefixtures("collected_by_hand")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [-1, math.nan, math.inf, True, timedelta(days=-1), "1"])
def test_durations_that_make_no_sense(path: Path, grace: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="grace"):
        Store(path).gc(grace=grace)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, True])
def test_shares_that_make_no_sense(path: Path, share: Any) -> None:
    with pytest.raises(ValueError, match="repack"):
        Store(path).gc(repack=share)


# --- damage -----------------------------------------------------------------------------------


def test_a_pack_stays_whose_rest_cannot_be_copied(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    weights = torch.randn(40 * CHUNK // 4)
    store.take({"m": StateDict(w=weights)}, "whole")
    part = store.take({"m": StateDict(w=weights[: 4 * CHUNK // 4].clone())}, "part")
    store.delete("whole")
    place = places_of(store, part)[0]
    file = path / "casnap-store" / pack_key(place.pack)
    content = bytearray(file.read_bytes())
    content[place.offset] ^= 1
    file.write_bytes(content)
    for _ in range(3):
        report = Store(path).gc(grace=0)
        assert file.exists()
    assert report.repacked_packs == 0
    # The damage is repaired by hand.
    content[place.offset] ^= 1
    file.write_bytes(content)
    assert Store(path).gc(grace=0).repacked_packs > 0
    assert not file.exists()
    state = {"m": StateDict(w=torch.zeros(4 * CHUNK // 4))}
    Store(path)["part"].restore(state)
    assert torch.equal(state["m"]["w"], weights[: 4 * CHUNK // 4])
    assert_tidy(path)


def test_a_lost_answer_and_a_bad_read_do_not_undo_a_root(path: Path) -> None:
    backend = FaultyBackend(LocalBackend(path))
    store = Store(backend, chunk_size=CHUNK)
    for step in range(4):
        take(store, step)
    for step in range(3):
        store.delete(f"step_{step}")
    store.gc()
    fence_root = f"roots/0/{store._view.repository.newest().seq + 1}"
    lost = Fault(lose_answer(), ["put_if_absent"], keys=fence_root)
    hidden = Fault(flip(), ["read"], keys=fence_root)
    with backend.during(lost, hidden), contextlib.suppress(CasnapError):
        store.gc(grace=0)
    view = Repository(LocalBackend(path)).view()
    assert all((path / "casnap-store" / segment_key(ident)).exists() for ident in view.segments)
    assert_store(path, {3})
    Store(path).gc(grace=0)
    assert_tidy(path)
    assert_store(path, {3})


def test_takes_that_go_on_do_not_keep_it_from_saying_what_is_damaged(path: Path) -> None:
    """Each marking sees a newer root, but the lost node stays lost."""
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    segment = store._view.repository.newest().segments[0]
    [(_, place), *_] = store._view.repository.index.segment(segment).records
    drop_from_index(store, place.pack)
    markings = []

    @elsewhere
    def go_on(what: str, done: int, _total: int) -> None:
        if (what, done) == ("reading the index", 0):
            markings.append(what)
            store.take({"s": StateDict(x=len(markings))}, f"other/{len(markings)}")

    with pytest.raises(DamagedError):
        Store(path).gc(progress=go_on)
    assert len(markings) < 3


def test_an_old_root_that_cannot_be_read_costs_patience_alone(path: Path) -> None:
    store = Store(path, chunk_size=CHUNK)
    take(store, 0)
    take(store, 1)
    store.delete("step_1")
    store.gc()
    condemning = newest_root(path)
    take(store, 2)
    condemning.write_bytes(condemning.read_bytes()[:-1] + b"?")
    older = path / "casnap-store/roots/0/1"
    older.unlink()
    older.mkdir()
    Store(path).gc()
    assert Store(path).gc(grace=0).deleted_packs > 0
    assert_tidy(path)
    assert_store(path, {0, 2})


def newest_root(path: Path) -> Path:
    return max((path / "casnap-store/roots" / "0").iterdir(), key=lambda p: int(p.name))
