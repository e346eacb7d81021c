"""Pinned memory: what cannot be pinned, and what is given back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store, release_memory
from casnap.errors import CasnapError
from casnap.runtime import buffers
from casnap.state import devices
from tests.support.late_device import Event, counts, module, under_way

MIB = 1 << 20
RUNTIME = module.cudart()


@pytest.fixture(autouse=True)
def nothing_pinned() -> Iterator[None]:
    """Begin without pinned memory; at the end no memory that is free is pinned."""
    release_memory()
    devices._log_pageable.cache_clear()
    counts.clear()
    yield
    release_memory()
    assert not RUNTIME.registered
    assert not under_way()


def state() -> dict[str, StateDict]:
    x = torch.arange(3_000_000.0).to("late")
    return {"s": StateDict(x=x, turned=x.view(1000, 3000).t())}


def check_round_trip(path: Path) -> None:
    """Take and restore; each block is made contiguous by the thread that has pinned its slot."""
    live = state()
    snapshot = Snapshot.take(path / "run" / "step", live)
    again = Snapshot.async_take(path / "run" / "again", live).wait()
    expected = {name: tensor.cpu() for name, tensor in live["s"].items()}
    for tensor in live["s"].values():
        tensor.zero_()
    snapshot.restore(live)
    for name, tensor in expected.items():
        assert torch.equal(again.read_object(f"s/{name}"), tensor)
        assert torch.equal(live["s"][name].cpu(), tensor)


@pytest.mark.parametrize("free", [0, 8 * MIB])
def test_memory_that_cannot_be_pinned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    RUNTIME.free_bytes = free
    with caplog.at_level(logging.WARNING, "casnap"):
        check_round_trip(tmp_path)
        check_round_trip(tmp_path / "again")
    assert [r.message for r in caplog.records if "pins no more memory" in r.message] == [
        "late: the driver pins no more memory; copies from and to the host are slow"
    ]
    assert counts["pageable"] > 0
    # Once for each slot: four for takes, and those of the pool that a restore reads into.
    assert counts["refused"] <= 4 + buffers.SLOTS


def test_the_slots_of_large_chunks(tmp_path: Path) -> None:
    """A cell of more than 8 MiB has a slot that holds it; others are not that large."""
    Store(tmp_path / "small").take(state(), "step")
    assert max(nbytes for nbytes, _ in RUNTIME.registered.values()) == 8 * MIB
    live = state()
    snapshot = Store(tmp_path / "large", create=NewStore(chunk_size=16 * MIB)).take(live, "step")
    assert torch.equal(snapshot.read_object("s/turned"), live["s"]["turned"].cpu())


def test_an_interrupt_while_memory_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known to be pinned, so it is not freed before it is unpinned."""
    real = RUNTIME.cudaHostRegister

    def register(*args: int) -> None:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RUNTIME, "cudaHostRegister", register)
        with pytest.raises(KeyboardInterrupt):
            Snapshot.take(tmp_path / "run" / "failed", state())
    assert RUNTIME.registered
    check_round_trip(tmp_path)


def take(path: Path, live: dict[str, StateDict]) -> None:
    Snapshot.take(path, live)


def async_take(path: Path, live: dict[str, StateDict]) -> None:
    Snapshot.async_take(path, live).wait()


@pytest.mark.parametrize("how", [take, async_take])
@pytest.mark.parametrize("where", ["__init__", "record"])
def test_an_error_after_a_copy_has_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    how: Callable[[Path, dict[str, StateDict]], None],
) -> None:
    """The copy has ended when its slot is given back: the next owner is not written over."""

    def fail(*_: object) -> None:
        raise MemoryError

    live = state()
    module.synchronize("late")
    with monkeypatch.context() as patch:
        patch.setattr(module, "Event", type("Failing", (Event,), {where: fail}))
        with pytest.raises((MemoryError, CasnapError)):
            how(tmp_path / "run" / "failed", live)
    assert not under_way()
    check_round_trip(tmp_path)
