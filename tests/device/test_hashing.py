"""Hashing on a device: after what was begun there; what crosses; and when it is not tried."""

from __future__ import annotations

import logging

import pytest
import torch

from casnap.errors import DeviceError
from casnap.format.digest import digest_of
from casnap.state.device_hash import Batch, CellRun, hasher_of
from tests.support import hashing_device, late_device


def device(index: int = 0) -> torch.device:
    return torch.device("late", index)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels for the device, of which nothing is known yet."""
    hashing_device.install(monkeypatch)


def counted(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[Batch]:
    """Return the batches from now on; an error is raised for each."""
    batches = []
    hash_batch = hashing_device.hash_batch

    def counting(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        batches.append(batch)
        if error is not None:
            raise error
        hash_batch(table, batch, call, digests)

    monkeypatch.setattr(hashing_device, "hash_batch", counting)
    return batches


def test_it_hashes_what_was_begun_before_and_only_digests_cross() -> None:
    hasher = hasher_of(device())
    assert hasher is not None
    late_device.counts.clear()
    host = torch.randn(40_000)
    x = torch.zeros(40_000, device=device())
    x.copy_(host)  # nobody has waited for it
    late_device.counts.clear()
    assert hasher.digests([CellRun(x, (80_000, 80_000))]) == [
        digest_of(host[:20_000].numpy().tobytes()),
        digest_of(host[20_000:].numpy().tobytes()),
    ]
    assert late_device.counts["to host"] == 2 * 36


def test_memory_that_was_made_for_it_stays_until_it_is_hashed() -> None:
    hasher = hasher_of(device())
    assert hasher is not None
    x = torch.arange(20_000.0)
    there = x.to(device())
    assert hasher.digests(CellRun(there + i, (80_000,)) for i in range(3)) == [
        digest_of((x + i).numpy().tobytes()) for i in range(3)
    ]


def test_a_device_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = counted(monkeypatch, None)
    hasher = hasher_of(device())
    assert hasher is not None
    assert len(batches) == 2
    assert hasher_of(device()) is hasher
    assert len(batches) == 2
    assert hasher_of(device(1)) not in (None, hasher)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASNAP_DEVICE_HASH", "off")
    assert hasher_of(device()) is None


def test_no_hasher_for_the_host_nor_for_what_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert hasher_of(torch.device("cpu")) is None
    monkeypatch.setattr(hashing_device, "runs_on", lambda _: False)
    assert hasher_of(device()) is None
    assert not caplog.records


def test_no_hasher_where_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batches = counted(monkeypatch, RuntimeError("no C compiler"))
    with caplog.at_level(logging.WARNING, "casnap"):
        assert hasher_of(device()) is None
        assert hasher_of(device()) is None
    assert len(batches) == 1
    [record] = caplog.records
    assert "late:0 does not hash" in record.message
    assert "no C compiler" in record.message


def test_without_memory_it_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        counted(patch, torch.OutOfMemoryError("none left"))
        assert hasher_of(device()) is None
    assert hasher_of(device()) is not None


def test_a_wrong_digest_is_told_once_and_then_nothing_is_hashed_on_any_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = hasher_of(device(1))
    assert other is not None
    hash_batch = hashing_device.hash_batch

    def lying(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        hash_batch(table, batch._replace(first=0), call, digests)

    monkeypatch.setattr(hashing_device, "hash_batch", lying)
    with pytest.raises(DeviceError, match="late:0 does not hash as it should"):
        hasher_of(device())
    assert hasher_of(device()) is None
    assert hasher_of(device(1)) is None
