"""Restores that keep what tensors on a device hold: what crosses, and what they trust."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import casnap.state
from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import DeviceError, WitnessError
from casnap.state import device_hash
from casnap.state.device_hash import Batch
from tests.support import hashing_device, late_device

ROWS, CELL = 600, 64_000
"""Of 1,000 float32 numbers: 38 cells of 16 rows, the last one of eight."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels for the device, of which nothing is known yet."""
    monkeypatch.setattr(device_hash, "_distrusted", [])
    monkeypatch.setattr(device_hash, "_hashers", {})
    monkeypatch.setattr(casnap.state, "device_kernels", hashing_device, raising=False)


def expected() -> torch.Tensor:
    return torch.arange(1000.0 * ROWS).reshape(ROWS, 1000)


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    store = Store(tmp_path / "run", create=NewStore(chunk_size=CELL + 1536))
    return store.take({"s": StateDict(x=expected())}, "step")


def restored(snapshot: Snapshot, live: torch.Tensor) -> int:
    state = StateDict(x=live)
    kept = snapshot.restore({"s": state}, reuse=True).kept_bytes
    assert state["x"] is live
    assert torch.equal(live.cpu(), expected())
    return kept


def test_only_digests_and_one_cell_cross_and_what_differs(snapshot: Snapshot) -> None:
    live = expected().to("late")
    assert restored(snapshot, live) == live.nbytes  # proves the device, too
    for rows, cells in ((0, 0), (1, 1), (17, 2)):
        live[:rows] = 7
        late_device.run_all()
        late_device.counts.clear()
        kept = snapshot.restore({"s": StateDict(x=live)}, reuse=True).kept_bytes
        assert kept == live.nbytes - cells * CELL
        # A table of three numbers a cell goes there; a word more than a digest comes back.
        assert late_device.counts["to device"] == 38 * 24 + cells * CELL
        assert late_device.counts["to host"] in (38 * 36 + CELL, 38 * 36 + CELL // 2)
        assert torch.equal(live.cpu(), expected())


@pytest.mark.parametrize("how", ["turned", "spaced", "within a word", "of two devices"])
def test_of_any_layout(snapshot: Snapshot, how: str) -> None:
    """What begins within a word is not hashed by a device, so it is read."""
    if how == "turned":
        live = expected().t().contiguous().to("late").t()
    elif how == "spaced":
        live = torch.zeros(ROWS, 1000, 2, device="late")[..., 1]
        live.copy_(expected())
    elif how == "within a word":
        taken = torch.arange(200_000, dtype=torch.int32).to(torch.int16)
        snapshot = snapshot.store.take({"s": StateDict(x=taken)}, "odd")
        live = torch.zeros(200_001, dtype=torch.int16, device="late")[1:]
        live.copy_(taken)
        report = snapshot.restore({"s": StateDict(x=live)}, reuse=True)
        assert torch.equal(live.cpu(), taken)
        assert report.kept_bytes == 0
        return
    else:
        here, there = expected().to("late:0"), expected().to("late:1")
        there[0] = 0
        snapshot = snapshot.store.take({"s": StateDict(x=expected(), y=expected())}, "two")
        report = snapshot.restore({"s": StateDict(x=here, y=there)}, reuse=True)
        assert torch.equal(there.cpu(), expected())
        assert report.kept_bytes == 2 * here.nbytes - CELL
        return
    live[20] = 0
    assert restored(snapshot, live) == live.nbytes - CELL


def test_where_no_device_hashes_all_is_read(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = expected().to("late")
    monkeypatch.setenv("CASNAP_DEVICE_HASH", "off")
    assert restored(snapshot, live) == 0


def test_without_memory_for_the_digests_all_is_read(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = expected().to("late")
    assert restored(snapshot, live) == live.nbytes

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(hashing_device, "hash_batch", full)
    hasher = device_hash.hasher_of(live.device)
    assert hasher is not None
    monkeypatch.setattr(hasher, "_hash_batch", full)
    assert restored(snapshot, live) == 0


def test_where_the_kernels_fail_all_is_read(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = expected().to("late")
    assert restored(snapshot, live) == live.nbytes

    def failing(*_: object) -> None:
        raise RuntimeError("too many resources requested")

    hasher = device_hash.hasher_of(live.device)
    assert hasher is not None
    monkeypatch.setattr(hasher, "_hash_batch", failing)
    for _ in range(2):
        assert restored(snapshot, live) == 0
    [record] = caplog.records
    assert "does not hash, so what it holds is copied" in record.message


def test_a_device_that_says_that_it_holds_what_it_does_not(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hashed something else, of the right tags: one cell of those kept is looked at."""
    live = expected().to("late")
    hasher = device_hash.hasher_of(live.device)
    assert hasher is not None
    true = expected().to("late")

    def elsewhere(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        moved = table.clone()
        moved[0] += true.data_ptr() - live.data_ptr()
        hashing_device.hash_batch(moved, batch, call, digests)
        late_device.run_all()

    live.zero_()
    monkeypatch.setattr(hasher, "_hash_batch", elsewhere)
    with pytest.raises(DeviceError, match=r"late:0 does not hash as it should: .* a chunk of s/x "):
        snapshot.restore({"s": StateDict(x=live)}, reuse=True)
    assert restored(snapshot, live) == 0  # no device hashes any more


def test_a_comparison_reads_only_what_differs(snapshot: Snapshot) -> None:
    live = expected().to("late")
    assert snapshot.compare({"s": StateDict(x=live)}).equal
    live[20] = 0
    late_device.run_all()
    late_device.counts.clear()
    (change,) = snapshot.compare({"s": StateDict(x=live)}).changes
    assert change.elements is not None
    assert (change.elements.differing, change.elements.largest) == (1000, 20_999.0)
    assert late_device.counts["to host"] < 38 * 36 + 2 * CELL + 1
    assert torch.equal(live[20].cpu(), torch.zeros(1000))


def test_a_witness_is_hashed_where_the_state_lies(snapshot: Snapshot) -> None:
    live = expected().to("late")
    assert snapshot.store.witness({"s": StateDict(x=live)}, "step").stored
    late_device.run_all()
    late_device.counts.clear()
    assert snapshot.store.witness({"s": StateDict(x=live)}, "step").equal
    # A word more than a digest for each cell comes back, and one cell, which is looked at.
    assert late_device.counts["to host"] in (38 * 36 + CELL, 38 * 36 + CELL // 2)
    live[20, 5] += 1
    with pytest.raises(WitnessError, match="weights: s/x"):
        snapshot.store.witness({"s": StateDict(x=live)}, "step")
    host = StateDict(x=expected())
    assert snapshot.store.witness({"s": host}, "step").equal, "wherever it lies"
