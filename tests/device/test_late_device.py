"""The device itself: each missing wait is punished."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.late_device import counts, errors, module, run_all, under_way

N = 1000


def numbers() -> torch.Tensor:
    return torch.arange(N, dtype=torch.float32)


@contextmanager
def pinned(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    runtime = module.cudart()
    runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)
    try:
        yield tensor
    finally:
        module.synchronize("late:0")
        runtime.cudaHostUnregister(tensor.data_ptr())


def test_tensors_are_ordinary_ones() -> None:
    x = numbers().to("late:1")
    assert type(x) is torch.Tensor
    assert str(x.device) == "late:1"
    assert torch.equal(x.cpu(), numbers())
    assert torch.equal((x * 2).view(10, 100).t()[3:5].cpu(), (numbers() * 2).view(10, 100).t()[3:5])
    assert (counts["to device"], counts["to host"]) == (4 * N, 4 * N + 4 * 20)


def test_a_module_is_trained() -> None:
    torch.manual_seed(1)
    here = torch.nn.Linear(8, 8)
    there = torch.nn.Linear(8, 8).to("late")
    there.load_state_dict(here.state_dict())
    x = torch.randn(4, 8)
    for model, inputs in ((here, x), (there, x.to("late"))):
        optim = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(inputs).square().mean().backward()
            optim.step()
    assert torch.equal(there.weight.cpu(), here.weight)


def test_who_reads_too_early_gets_old_bytes() -> None:
    x = numbers().to("late")
    with pinned(torch.zeros(N)) as out:
        out.copy_(x, non_blocking=True)
        assert not out.any()
        module.current_stream("late").synchronize()
        assert torch.equal(out, numbers())


def test_memory_that_is_not_pinned_is_waited_for() -> None:
    x, out = numbers().to("late"), torch.zeros(N)
    out.copy_(x, non_blocking=True)
    assert torch.equal(out, numbers())


def test_who_writes_the_source_too_early_changes_the_copy() -> None:
    x = torch.zeros(N, device="late")
    with pinned(numbers()) as source:
        x.copy_(source, non_blocking=True)
        source.zero_()
        assert not x.cpu().any()
    y = torch.zeros(N, device="late")
    source = numbers()
    y.copy_(source, non_blocking=True)  # the driver has taken its copy
    source.zero_()
    assert torch.equal(y.cpu(), numbers())


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_comes_first(waits: bool) -> None:
    x = torch.zeros(N, device="late")
    x += 1
    side = module.Stream("late")
    if waits:
        side.wait_stream(module.current_stream("late"))
    with pinned(torch.full((N,), -1.0)) as out:
        with module.stream(side):
            out.copy_(x, non_blocking=True)
        side.synchronize()
        assert bool((out == 1).all()) is waits


def test_memory_that_is_freed_gets_another_owner() -> None:
    x, side = numbers().to("late"), module.Stream("late")
    with pinned(torch.zeros(N)) as out:
        with module.stream(side):
            out.copy_(x, non_blocking=True)
        del x
        module.current_stream("late").synchronize()
        side.synchronize()
        assert not torch.equal(out, numbers())


def test_streams_and_devices_of_a_thread() -> None:
    side = module.Stream("late:1")
    with module.stream(side):
        assert module.current_device() == 1
        assert module.current_stream("late:1") is side
        assert torch.empty(1, device="late").device.index == 1
    assert module.current_stream("late:1") is module.default_stream("late:1")


def test_memory_runs_out() -> None:
    module.free_bytes = 5000
    x = torch.empty(N, device="late")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(N, device="late")
    del x
    assert torch.empty(N, device="late").nbytes == 4 * N


def test_memory_is_pinned_by_its_address_for_one_device_or_all() -> None:
    memory = ctypes.create_string_buffer(64)
    address, part = ctypes.addressof(memory), torch.frombuffer(memory, dtype=torch.uint8, offset=8)
    runtime = module.cudart()
    for flags, devices in ((0, [True, False]), (1, [True, True])):
        runtime.cudaHostRegister(address, 64, flags)
        assert [runtime.holds(part, device) for device in range(2)] == devices
        assert not runtime.holds(numbers(), 0)
        assert runtime.cudaHostUnregister(address) == 0


def test_memory_that_is_unpinned_during_a_copy() -> None:
    x = numbers().to("late")
    with pinned(torch.zeros(N)) as out:
        out.copy_(x, non_blocking=True)
        module.cudart().cudaHostUnregister(out.data_ptr())
        run_all()
    assert errors
    errors.clear()


def test_the_kernel_after_a_failed_registration_gets_its_error() -> None:
    x = numbers().to("late")
    module.cudart().free_bytes = 0
    assert module.cudart().cudaHostRegister(numbers().data_ptr(), 4, 1) != 0
    with pytest.raises(RuntimeError, match="out of memory"):
        x.add_(1)
    assert torch.equal(x.add_(1).cpu(), numbers() + 1)


def test_conjugated_and_negated_views() -> None:
    x = torch.complex(numbers(), numbers())
    y = x.to("late")
    assert torch.equal(y.conj().cpu().resolve_conj(), x.conj().resolve_conj())
    assert torch.equal(y.conj().imag.clone().cpu(), -numbers())


def test_work_that_is_under_way() -> None:
    x, side = numbers().to("late"), module.Stream("late")
    with module.stream(side):
        x.add_(1)
    assert under_way() == 1
    run_all()
    assert under_way() == 0
