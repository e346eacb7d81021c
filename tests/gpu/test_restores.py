"""Restores whose chunks a GPU verifies. They need CUDA, and the Triton of its torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import DamagedError, DeviceError
from casnap.state import device_hash
from casnap.state.device_hash import hasher_of
from tests.support.verified_there import damage_cell, hashed_on_host, transfer_that_damages

pytestmark = pytest.mark.gpu
MIB = 1 << 20
CELL = MIB


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the GPU hash, whatever other tests have made of that."""
    monkeypatch.setattr(device_hash, "_distrusted", [])
    monkeypatch.setattr(device_hash, "_hashers", {})
    assert hasher_of(device()) is not None


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run", create=NewStore(chunk_size=MIB, codec="raw"))


def rows(seed: int = 0) -> torch.Tensor:
    """Return 64 cells of 256 rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64 * 256, 1024, generator=generator)


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bits, but no NaN."""
    return torch.randint(-100, 100, shape).to(dtype)


STATES: dict[str, Callable[[], torch.Tensor]] = {
    "fp32": rows,
    "fp64": lambda: of_dtype(torch.float64, 3000, 1001),
    "bf16": lambda: of_dtype(torch.bfloat16, 3000, 4096),
    "fp16": lambda: of_dtype(torch.float16, 3001, 4098),
    "int8": lambda: of_dtype(torch.int8, 12_345_678),
    "bool": lambda: torch.randn(9_999_999) > 0,
    "complex64": lambda: torch.randn(2000, 1003, dtype=torch.complex64),
    "of odd bytes": lambda: torch.randint(256, (9001, 1001), dtype=torch.uint8),
    "rows wider than a cell": lambda: torch.randn(3, 1_500_001),
    "none": lambda: torch.randn(0, 1000),
}


@pytest.mark.parametrize("name", STATES)
def test_bit_for_bit(store: Store, name: str) -> None:
    x = STATES[name]()
    snapshot = store.take({"s": StateDict(x=x)}, "step")
    live, out = (torch.zeros_like(x, device=device()) for _ in range(2))
    with hashed_on_host() as hashed:
        snapshot.restore({"s": StateDict(x=live)})
        snapshot.read_object("s/x", out)
    assert torch.equal(live.cpu(), x)
    assert torch.equal(out.cpu(), x)
    if name not in ("none", "of odd bytes"):
        assert sum(hashed) < x.nbytes // 4


@pytest.mark.parametrize("how", ["turned", "spaced", "within a word", "cast"])
def test_what_the_host_verifies(store: Store, how: str) -> None:
    x = rows().half() if how == "within a word" else rows()
    snapshot = store.take({"s": StateDict(x=x)}, "step")
    if how == "turned":
        live = torch.zeros(1024, 64 * 256, device=device()).t()
    elif how == "spaced":
        live = torch.zeros(64 * 256, 1024, 2, device=device())[..., 1]
    elif how == "within a word":
        live = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device())[1:].view(x.shape)
    else:
        live = torch.zeros_like(x, device=device(), dtype=torch.float64)
    snapshot.restore({"s": StateDict(x=live)})
    assert torch.equal(live.cpu(), x.to(live.dtype))


def test_streams(store: Store) -> None:
    """What the caller began to write there does not come after; another stream sees all."""
    expected = rows()
    snapshot = store.take({"s": StateDict(x=expected)}, "step")
    live, other = torch.empty(expected.shape, device=device()), torch.cuda.Stream()
    with torch.cuda.stream(torch.cuda.Stream()), hashed_on_host() as hashed:
        x = torch.ones(4096, 4096, device=device())
        for _ in range(100):
            x = x @ x / 4096
        live.view(4096, 4096).copy_(x)
        snapshot.restore({"s": StateDict(x=live)})
        assert CELL not in hashed
        with torch.cuda.stream(other):
            assert torch.equal(live.cpu(), expected)


def test_two_threads_at_once(store: Store) -> None:
    taken = [rows(i) for i in range(2)]
    snapshots = [store.take({"s": StateDict(x=x)}, f"{i}") for i, x in enumerate(taken)]
    live, done = [torch.zeros_like(x, device=device()) for x in taken], [0, 0]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                live[i].zero_()
                snapshots[i].restore({"s": StateDict(x=live[i])})
                done[i] += torch.equal(live[i].cpu(), taken[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [5, 5]


def test_damage_on_the_disk(store: Store) -> None:
    expected = rows()
    snapshot = store.take({"s": StateDict(x=expected)}, "step")
    digest = damage_cell(store, expected[512:768])
    live = torch.zeros_like(expected, device=device())
    with pytest.raises(DamagedError, match="hurt: s/x; these tensors may hold unverified") as e:
        snapshot.restore({"s": StateDict(x=live)})
    assert digest.hex() in str(e.value)
    assert not device_hash._distrusted


def test_damage_of_a_transfer(store: Store) -> None:
    expected = rows()
    snapshot = store.take({"s": StateDict(x=expected)}, "step")
    live = torch.zeros_like(expected, device=device())
    with (
        transfer_that_damages(CELL),
        pytest.raises(DeviceError, match=r"cuda:\d+ .*does not hash as it should"),
    ):
        snapshot.restore({"s": StateDict(x=live)})
    snapshot.restore({"s": StateDict(x=live)})
    assert torch.equal(live.cpu(), expected)
