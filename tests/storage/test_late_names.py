"""File systems whose clients cache: what another host has put is there, and not seen at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import casnap.backends.late_names
from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import DamagedError
from tests.support.faults import in_child
from tests.support.faulty import Fault, FaultyBackend, before, fail, stale
from tests.support.mounts import bindfs

LOOKS = ("read", "size")
SIZE = 100_000


def state(value: float) -> dict[str, StateDict]:
    return {"s": StateDict(x=torch.full((SIZE,), value))}


def value_of(store: Store, name: str) -> float:
    out = state(-1.0)
    store[name].restore(out)
    first = out["s"]["x"][0].item()
    assert torch.equal(out["s"]["x"], torch.full((SIZE,), first))
    return float(first)


def client(folder: Path, name_lag: float = 60.0) -> FaultyBackend:
    """Return a store's place as a host sees it that may see names late."""
    backend = FaultyBackend(LocalBackend(folder))
    backend.name_lag = name_lag
    return backend


def unseen(key: str, times: int | None = 3) -> Fault:
    """Return that a client takes an object for absent at first."""
    return Fault(fail(FileNotFoundError), LOOKS, key, times=times)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with two snapshots: its newest root is number 2."""
    store = Store(tmp_path / "store")
    for step in (1, 2):
        store.take(state(step), f"step_{step}")
    return tmp_path / "store"


# --- a client that answers late ------------------------------------------------------------------


def test_a_root_that_is_listed_and_not_there_yet(folder: Path) -> None:
    backend = client(folder)
    with backend.during(unseen("roots/0/2")) as (late,):
        assert value_of(Store(backend), "step_2") == 2
    assert late.struck == 3


def test_a_number_that_is_taken_by_a_root_not_seen_yet(folder: Path) -> None:
    """Only the put is decided at the server: listings and looks of the writer are older."""
    backend = client(folder)
    store = Store(backend)

    def take_theirs() -> None:
        assert in_child(lambda: Store(folder).take(state(3), "theirs")) == 0

    first = Fault(before(take_theirs), "put_if_absent", "roots/0/3")
    listing = Fault(stale(), "names", "roots/0", times=None)
    with backend.during(first, listing, unseen("roots/0/3")) as (_, _, late):
        store.take(state(4), "ours")
    assert late.struck == 3
    for host in (store, Store(folder)):
        assert {name: value_of(host, name) for name in ("theirs", "ours")} == {
            "theirs": 3,
            "ours": 4,
        }


def test_an_absent_root_is_not_asked_for_by_name(folder: Path) -> None:
    """A client would keep that it is absent, and hide the root that another host then puts."""
    backend = client(folder)
    store = Store(backend)
    store.latest()
    store.take(state(3), "step_3")
    store.latest()
    asked = {key for name, key in backend.log if name in LOOKS}
    assert "roots/0/3" in asked
    assert "roots/0/4" not in asked


@pytest.mark.parametrize("lag", [0.0, 0.05])
def test_a_root_that_is_lost(folder: Path, lag: float) -> None:
    """It is damage once a client would see it; on a disk, at the first look."""
    backend = client(folder, lag)
    with (
        backend.during(unseen("roots/0/2", None)) as (late,),
        pytest.raises(DamagedError, match="roots/0/2 is listed, but not there"),
    ):
        Store(backend).latest()
    assert (late.struck == 1) == (lag == 0)


def test_a_line_says_what_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(casnap.backends.late_names, "_TOLD_AFTER", 0.0)
    backend = client(folder)
    with backend.during(unseen("roots/0/2", 8)), caplog.at_level(logging.WARNING, "casnap"):
        Store(backend).latest()
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"waiting for {folder}/casnap-store/roots/0/2, which must be there")


# --- two mounts of one folder, each with caches of its own ---------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[str], list[Path]]]:
    """Return what mounts a new folder twice, with some caches, and returns the two places."""
    with ExitStack() as mounts:

        def mount(caches: str) -> list[Path]:
            (tmp_path / "below").mkdir()
            names = ("attr_timeout", "entry_timeout", "negative_timeout")
            options = ",".join(map("=".join, zip(names, caches.split(","), strict=True)))
            return [
                mounts.enter_context(bindfs(tmp_path / "below", tmp_path / host, options))
                for host in ("a", "b")
            ]

        yield mount


@pytest.mark.parametrize("caches", ["0,0,0", "30,30,0", "30,30,30"])
def test_two_hosts_take_in_turn(hosts: Callable[[str], list[Path]], caches: str) -> None:
    """What a host has looked for in vain is put by the other one a moment later."""
    stores = [Store(place / "store") for place in hosts(caches)]
    for step in range(3):
        for host, store in enumerate(stores):
            store.take(state(2 * step + host), f"{host}/{step}")
            assert [value_of(s, f"{host}/{step}") for s in stores] == [2 * step + host] * 2
        stores[step % 2].delete(f"0/{step}")
        stores[step % 2].gc(grace=0)
    assert all(store.check(data=True).ok for store in stores)
