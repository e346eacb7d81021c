"""States on a device whose work takes effect only when somebody waits for it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import RNGState, Snapshot, StateDict, Store, release_memory
from casnap.errors import CasnapError
from casnap.take import staging
from tests.support.blocks import LEAST, small_blocks
from tests.support.late_device import counts, module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROWS = 3000
TARGET, SOURCE, PAGEABLE = "to host", "to device", "pageable"


@pytest.fixture(autouse=True, params=["late", "prompt"])
def default_streams(request: pytest.FixtureRequest, late: None) -> None:
    """Have the default streams late, as all others are, or as fast as can be."""
    module.is_prompt = request.param == "prompt"


def host_state() -> dict[str, torch.Tensor]:
    """Return tensors of the host: large, turned, small, empty, in halves, in several dtypes."""
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(ROWS, 500, generator=generator)
    return {
        "big": big,
        "turned": torch.randn(400, 300, generator=generator).t(),
        "every_other": torch.randn(300, 400, generator=generator)[:, ::2],
        "half": torch.randn(700, 900, generator=generator).bfloat16(),
        "counts": torch.arange(100_000),
        "complex": torch.randn(200, 100, dtype=torch.complex64, generator=generator),
        "flags": torch.randn(70_000, generator=generator) > 0,
        "small": torch.arange(7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(0.5),
    }


def to_device(tensors: dict[str, torch.Tensor], device: str = "late") -> dict[str, torch.Tensor]:
    """Return the same on a device, with the same strides."""
    there = {}
    for name, tensor in tensors.items():
        copy = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
        there[name] = copy.copy_(tensor)
    return there


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(tensors[name].cpu(), tensor), name


def taken(path: Path, tensors: dict[str, torch.Tensor], how: str = "take") -> Snapshot:
    app_state = {"s": StateDict(**tensors)}
    if how == "async_take":
        return Snapshot.async_take(path, app_state).wait()
    return Snapshot.take(path, app_state)


@pytest.mark.parametrize("how", ["take", "async_take"])
@pytest.mark.parametrize("device", ["late:0", "late:1"])
def test_take_and_restore_in_place(tmp_path: Path, how: str, device: str) -> None:
    live = to_device(host_state(), device)
    snapshot = taken(tmp_path / "run" / "step", live, how)
    assert_same({k: snapshot.read_object(f"s/{k}") for k in live}, host_state())
    for tensor in live.values():
        tensor.zero_()
    before = dict(live)
    snapshot.restore({"s": StateDict(**live)})
    assert_same(live, host_state())
    assert all(live[name] is before[name] for name in live)


def test_the_same_state_of_two_devices_and_the_host_is_stored_once(tmp_path: Path) -> None:
    mixed = {
        f"{d}{k}": v for d in range(2) for k, v in to_device(host_state(), f"late:{d}").items()
    }
    mixed |= {f"host{k}": v for k, v in host_state().items()}
    first = taken(tmp_path / "run" / "first", host_state())
    again = taken(tmp_path / "run" / "again", mixed)
    assert first.stats.new_bytes > 9_000_000
    assert again.stats.new_bytes < 100_000
    target = {name: torch.zeros_like(tensor, device="late:1") for name, tensor in mixed.items()}
    again.restore({"s": StateDict(**target)})
    assert_same(target, {f"{d}{k}": v for d in (0, 1, "host") for k, v in host_state().items()})


def test_the_random_state_of_a_device(tmp_path: Path) -> None:
    before = [module.get_rng_state(i) for i in range(2)]
    snapshot = Snapshot.take(tmp_path / "run" / "step", {"rng": RNGState()})
    module.manual_seed_all(99)
    snapshot.restore({"rng": RNGState()})
    assert all(torch.equal(module.get_rng_state(i), before[i]) for i in range(2))


# --- reads ------------------------------------------------------------------------------------


def test_read_object_into_a_tensor(tmp_path: Path) -> None:
    state = host_state()
    snapshot = taken(tmp_path / "run" / "step", state)
    for name, tensor in state.items():
        out = torch.zeros_like(tensor, device="late:1")
        assert snapshot.read_object(f"s/{name}", out) is out
        assert torch.equal(out.cpu(), tensor)
    rows = torch.zeros(10, 500, device="late")
    snapshot.read_object("s/big", rows, index=slice(20, 30))
    assert torch.equal(rows.cpu(), state["big"][20:30])


# --- what crosses -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_each_byte_crosses_once(tmp_path: Path, how: str) -> None:
    live = to_device(host_state())
    nbytes = sum(tensor.nbytes for tensor in live.values())
    module.synchronize("late")
    counts.clear()
    snapshot = taken(tmp_path / "run" / "step", live, how)
    assert counts[TARGET] == nbytes
    counts.clear()
    snapshot.restore({"s": StateDict(**live)})
    assert (counts[SOURCE], counts[TARGET]) == (nbytes, 0)


@pytest.mark.parametrize("cores", [2, 64])
def test_an_async_take_stages_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    with small_blocks() as pool:
        numbers = torch.arange(3 * LEAST * pool.slot_bytes // 8)
        x = numbers.to("late")
        pending = Snapshot.async_take(
            tmp_path / "run" / "step", {"s": StateDict(x=x)}, max_staging_bytes=1
        )
        x.zero_()
        snapshot = pending.wait()
        assert counts[TARGET] == x.nbytes
        assert pool._made == LEAST
    assert torch.equal(snapshot.read_object("s/x"), numbers)


def test_copies_of_async_takes_are_pinned_from_the_second_on(tmp_path: Path) -> None:
    """The device copies straight to them; to pin fresh memory would block the first take."""
    release_memory()
    with small_blocks(4 << 20) as pool:
        x = torch.arange(pool.slot_bytes * 3 // 2 // 8, device="late")
        module.synchronize("late")
        for number in range(3):
            counts.clear()
            pending = Snapshot.async_take(
                tmp_path / "run" / f"{number}", {"s": StateDict(x=x, n=number)}
            )
            assert counts[TARGET] == x.nbytes
            assert counts[PAGEABLE] == 0
            pending.wait()
            slots = [nbytes for nbytes, _ in module.cudart().registered.values()]
            assert slots.count(pool.slot_bytes) == (0 if number == 0 else 2)
            x += 1
        release_memory()
        assert not module.cudart().registered


def test_slots_are_bounded(tmp_path: Path) -> None:
    """However large a state is, it is staged in four slots, all of them pinned, for each device."""
    for device in ("late:0", "late:1"):
        x = torch.ones(20_000, 500, device=device)
        module.synchronize(device)
        counts.clear()
        taken(tmp_path / "run" / device, {"x": x})
        assert counts[PAGEABLE] == 0
    slots = [nbytes for nbytes, _ in module.cudart().registered.values()]
    assert slots.count(staging._pinned_pool.slot_bytes) <= 4


# --- errors -----------------------------------------------------------------------------------


@contextmanager
def failing_copies() -> Iterator[None]:
    """Have each copy to the host fail when it takes effect, as after an error of a kernel."""
    real = module.Stream.enqueue

    def enqueue(self: Any, work: Callable[[], object]) -> None:
        def fail() -> None:
            raise RuntimeError("late: an illegal memory access was encountered")

        real(self, fail if self is not module.default_stream(self.device) else work)

    module.Stream.enqueue = enqueue
    try:
        yield
    finally:
        module.Stream.enqueue = real


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_a_copy_that_fails_ends_the_take_and_nothing_else(tmp_path: Path, how: str) -> None:
    live = to_device(host_state())
    module.synchronize("late")
    for number in range(6):
        with failing_copies(), pytest.raises((CasnapError, RuntimeError), match="illegal memory"):
            taken(tmp_path / "run" / f"failed_{number}", live, how)
    snapshot = taken(tmp_path / "run" / "step", live, how)
    assert [s.name for s in Store(tmp_path / "run").snapshots()] == ["step"]
    assert_same({k: snapshot.read_object(f"s/{k}") for k in live}, host_state())


def test_a_device_without_memory_for_a_contiguous_copy(tmp_path: Path) -> None:
    live = to_device(host_state())
    gc.collect()  # tensors of other tests, in tracebacks, would give their memory back meanwhile
    module.free_bytes = 1000
    with pytest.raises(torch.OutOfMemoryError):
        taken(tmp_path / "run" / "failed", live)
    module.free_bytes = None
    snapshot = taken(tmp_path / "run" / "step", live)
    assert_same({k: snapshot.read_object(f"s/{k}") for k in live}, host_state())
