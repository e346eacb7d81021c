"""A state on an accelerator of which little is new: how long a save takes, and what crosses."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from casnap import Snapshot, StateDict, Store
from casnap.state.device_hash import CellRun, DeviceHasher, hasher_of
from casnap.take import staging
from tools.bench import states
from tools.bench.measure import Times, rotated, seconds
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

STAYS = "what is known stays on an accelerator"
FROZEN = "a frozen base with adapters, on an accelerator"
WORKLOADS = (STAYS, FROZEN)
_SWITCH = "CASNAP_DEVICE_HASH"
_TAKE, _ASYNC, _SOME = (
    "take, nothing changed",
    "async_take blocks, nothing changed",
    "async_take blocks, 1 % of the tensors changed",
)
_NEW = "async_take blocks, all new"
_RESTORE = "restore of what the page cache has"
_WARM_UP = 2
_CHUNK = 1 << 20
# What the base, in bf16, and its adapters have beside the size of a workload.
_BASE, _ADAPTERS, _LEAST_ADAPTERS = 13 / 4, 1 / 43, 1 << 16


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; one that says so where nothing hashes there."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return [Row(workload, "there is none here", "").to_json()]
    device = torch.device(device.type, 0)
    hasher = hasher_of(device)
    if hasher is None:
        return [Row(workload, f"{device.type} does not hash", "").to_json()]
    rows = _stays(settings, device, hasher) if workload == STAYS else _frozen(settings, device)
    return [row.to_json() for row in rows]


def _hashing(settings: Settings, state: states.State, hasher: DeviceHasher) -> Row:
    """Return how fast the device hashes the state, in chunks of 1 MiB."""
    runs = []
    for tensor in state.values():
        whole, rest = divmod(tensor.nbytes, _CHUNK)
        runs.append(CellRun(tensor, [_CHUNK] * whole + [rest] * (rest > 0)))
    hasher.digests(runs)
    samples = [seconds(lambda: hasher.digests(runs)) for _ in range(settings.repeat)]
    [device] = {tensor.device.type for tensor in state.values()}
    return timed(STAYS, f"hashing ({device})", samples, states.nbytes_of(state.values()))


class _Saves:
    """Saves of a state on a device, into a store of their own.

    Args:
        settings: Where to write.
        state: The state.
    """

    def __init__(self, settings: Settings, state: states.State) -> None:
        self.folder = settings.path("stays")
        self._state = state
        self._numbers = count()
        [device] = {tensor.device for tensor in state.values()}
        self.synchronize: Callable[[], None] = getattr(torch, device.type).synchronize

    def _path(self) -> str:
        return str(self.folder / "run" / f"step_{next(self._numbers)}")

    def take(self) -> float:
        """Take a snapshot; return for how long that takes."""
        self.synchronize()
        app_state = {"s": StateDict(**self._state)}
        return seconds(lambda: Snapshot.take(self._path(), app_state))

    def async_take(self) -> float:
        """Take one in the background; return for how long the call blocks."""
        self.synchronize()
        app_state, pending = {"s": StateDict(**self._state)}, []
        took = seconds(lambda: pending.append(Snapshot.async_take(self._path(), app_state)))
        pending[0].wait()
        return took

    def restore(self) -> float:
        """Restore the last snapshot into the state; return for how long that takes."""
        [last] = Store(self.folder / "run").snapshots()[-1:]
        self.synchronize()
        return seconds(lambda: last.restore({"s": StateDict(**self._state)}))

    def forget(self) -> None:
        """Free what only earlier saves need."""
        store = Store(self.folder / "run")
        for snapshot in store.snapshots()[:-1]:
            store.delete(snapshot.name)
        store.gc(grace=0)
        store.gc(grace=0)

    def clear(self) -> None:
        """Delete all."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _switched(mode: str) -> Iterator[None]:
    """Have devices hash, or not."""
    before = os.environ.pop(_SWITCH, None)
    try:
        os.environ[_SWITCH] = mode
        yield
    finally:
        os.environ.pop(_SWITCH)
        if before is not None:
            os.environ[_SWITCH] = before


@contextmanager
def crossing() -> Iterator[list[int]]:
    """Give a list that gets the bytes of each copy of casnap's from a device to the host."""
    copied, begin, cpu = list[int](), staging.begin_copy, torch.Tensor.cpu

    def begin_copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None] | None:
        copied.append(source.nbytes)
        return begin(target, source)

    def to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.device.type != "cpu":
            copied.append(tensor.nbytes)
        return cpu(tensor, *args, **kwargs)

    staging.begin_copy, torch.Tensor.cpu = begin_copy, to_host  # type: ignore[method-assign, assignment]
    try:
        yield copied
    finally:
        staging.begin_copy, torch.Tensor.cpu = begin, cpu  # type: ignore[method-assign]


def _stays(settings: Settings, device: torch.device, hasher: DeviceHasher) -> list[Row]:
    state = {k: v.to(device) for k, v in states.fp32(settings.nbytes, 200).items()}
    rows = [_hashing(settings, state, hasher)]
    saves, seeds = _Saves(settings, state), count()

    def some() -> float:
        states.step(states.some(state, 0.01, next(seeds)))
        return saves.async_take()

    contenders = {_TAKE: saves.take, _ASYNC: saves.async_take, _SOME: some}
    saves.take()
    times: dict[str, Times] = {"on": defaultdict(list), "off": defaultdict(list)}
    for turn in range(settings.repeat + _WARM_UP):
        for mode in rotated(list(times), turn):
            for name, save in contenders.items():
                with _switched(mode):
                    took = save()
                # The second async take of a process pins the memory of the first.
                if turn >= _WARM_UP:
                    times[mode][name].append(took)
    for mode in ("off", "on"):
        # As in dense training: one after the other.
        for turn in range(settings.repeat + _WARM_UP + 1):
            states.step(state.values())
            with _switched(mode):
                took = saves.async_take()
            saves.forget()
            if turn > _WARM_UP:
                times[mode][_NEW].append(took)
    _time_restores(settings, saves, times)
    saves.clear()
    for name, samples in times["on"].items():
        before = times["off"][name]
        ratios = [own / other for own, other in zip(samples, before, strict=True)]
        bound = {_NEW: 1.1, _RESTORE: 0.9}.get(name)
        without = "the host verifies" if name == _RESTORE else "all is copied"
        rows += [
            timed(STAYS, f"{name}; {without} ({device.type})", before, settings.nbytes),
            timed(STAYS, f"{name} ({device.type})", samples, settings.nbytes).at_most(
                ratios, f"× {without}", bound
            ),
        ]
    return rows


def _time_restores(settings: Settings, saves: _Saves, times: dict[str, Times]) -> None:
    """Note for how long restores take that the device verifies, and others."""
    saves.take()
    for turn in range(settings.repeat + _WARM_UP):
        for mode in rotated(list(times), turn):
            with _switched(mode):
                took = saves.restore()
            if turn >= _WARM_UP:
                times[mode][_RESTORE].append(took)


def _frozen(settings: Settings, device: torch.device) -> list[Row]:
    base, width = int(settings.nbytes * _BASE) // 2, 1 << 16
    adapters = max(_LEAST_ADAPTERS, int(settings.nbytes * _ADAPTERS) // 4)
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 20, generator=generator).to(device)
    state: states.State = {}
    for i in range(100):
        # No two chunks are alike.
        rows = max(1, base // 100 // width)
        repeated = block[: 1 << 16].repeat(rows) * torch.arange(1, rows + 1).to(
            device
        ).repeat_interleave(1 << 16)
        state[f"base.{i}"] = (repeated + i).to(torch.bfloat16)
    for i in range(100):
        tensor = torch.randn(adapters // 100 + 1, generator=generator)
        state[f"adapter.{i}"] = tensor.to(device)
    adapted = [tensor for name, tensor in state.items() if name.startswith("adapter")]
    saves, nbytes = _Saves(settings, state), states.nbytes_of(state.values())
    saves.take()
    rows_of: list[Row] = []
    for name, save in (("take", saves.take), ("async_take blocks", saves.async_take)):
        samples, crossed = list[float](), list[int]()
        for turn in range(settings.repeat + _WARM_UP):
            states.step(adapted)
            with crossing() as copied:
                took = save()
            if turn >= _WARM_UP:
                samples.append(took)
                crossed.append(sum(copied))
        row = timed(FROZEN, f"{name} ({device.type})", samples)
        rows_of.append(row)
        bytes_row = Row(
            FROZEN,
            f"{name}: over PCIe, of {nbytes / 1e9:.3g} GB",
            f"{max(crossed) / 1e9:.3g} GB",
        )
        share = [each / states.nbytes_of(adapted) for each in crossed]
        rows_of.append(bytes_row.at_most(share, "× the adapters", 1.2))
    saves.clear()
    return rows_of
