"""Digests of cells in a device's memory: which cells, in which order, and a device that lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from casnap.errors import DeviceError
from casnap.format.digest import digest_of
from casnap.state import device_hash
from casnap.state.device_hash import Batch, CellRun, DeviceHasher, HashBatch
from tests.support import hashing_device

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_hash, "_distrusted", [])
    monkeypatch.setattr(device_hash, "_hashers", {})


def memory(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def expected(run: CellRun) -> list[bytes]:
    data, digests, start = run.memory.view(torch.uint8).numpy().tobytes(), [], 0
    for size in run.sizes:
        digests.append(digest_of(data[start : start + size]))
        start += size
    return digests


def hashed(runs: list[CellRun], hash_batch: HashBatch = hashing_device.hash_batch) -> list[bytes]:
    return list(DeviceHasher(HERE, hash_batch).digests(runs))


def test_digests_come_in_the_order_of_the_cells() -> None:
    """Also where cells at multiples of 16 bytes, which go first, stand between others."""
    whole = memory(300_000)
    runs = [
        CellRun(whole[4:], (70_000, 1_028, 66_001)),
        CellRun(whole, (65_536, 65_540, 4, 1)),
        CellRun(whole[:0], ()),
        CellRun(memory(80_000).view(torch.float32), (80_000,)),
    ]
    assert hashed(runs) == [digest for run in runs for digest in expected(run)]
    assert hashed([]) == []


@pytest.mark.parametrize(
    ("start", "sizes", "is_hashable"),
    [
        (0, (65_536, 65_536), True),
        (4, (65_536, 70_001), True),
        (2, (65_536,), False),
        (0, (65_537, 65_536), False),
        (0, (65_536, 0), False),
        (0, (), True),
    ],
)
def test_which_cells_a_device_can_hash(
    start: int, sizes: tuple[int, ...], is_hashable: bool
) -> None:
    assert CellRun(memory(1 << 18)[start:], sizes).is_hashable is is_hashable


# --- a device that lies -----------------------------------------------------------------------


def idle(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
    """Write nothing."""


def forgetful(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
    """Leave the last cell out."""
    hashing_device.hash_batch(table, batch._replace(cells=batch.cells - 1), call, digests)


def turned(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
    """Write what is of one cell where that of another belongs."""
    hashing_device.hash_batch(table, batch, call, digests)
    digests.copy_(digests.flip(1))


def stale() -> HashBatch:
    """Return a device that has, from the second call on, what it computed in the first."""
    first: list[torch.Tensor] = []

    def hash_batch(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        if not first:
            hashing_device.hash_batch(table, batch, call, digests)
            first.append(digests.clone())
        digests.copy_(first[0])

    return hash_batch


@pytest.mark.parametrize("make", [lambda: idle, lambda: forgetful, lambda: turned, stale])
def test_digests_of_another_call_or_cell_are_an_error(make: Callable[[], HashBatch]) -> None:
    hasher = DeviceHasher(HERE, make())
    runs = [CellRun(memory(200_000), (65_536, 65_536, 65_536))]
    if make is stale:
        hasher.digests(runs)
    with pytest.raises(DeviceError, match=r"cpu does not hash as it should: [123] of 3 digests"):
        hasher.digests(runs)
    assert device_hash.hasher_of(torch.device("cuda", 0)) is None


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_wrong_digests_do_not_pass_the_proof(wrong: int) -> None:
    """Of any of the cells: each is hashed in another way."""

    def hash_batch(table: torch.Tensor, batch: Batch, call: int, digests: torch.Tensor) -> None:
        hashing_device.hash_batch(table, batch, call, digests)
        if batch.first <= wrong < batch.first + batch.cells:
            digests[5, wrong] ^= 1 << 9

    DeviceHasher(HERE, hashing_device.hash_batch).prove()
    with pytest.raises(DeviceError, match="cpu does not hash as it should: of a random megabyte"):
        DeviceHasher(HERE, hash_batch).prove()
