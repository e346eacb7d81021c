"""A state on an accelerator: what crosses to the host, how fast, and for how long it blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from casnap import Snapshot, StateDict
from tools.bench import peers, states
from tools.bench.measure import Times, remove, rotated, seconds
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

TRAINING = "training on an accelerator: what a save costs"
WORKLOADS = ("fp32 tensors on an accelerator", TRAINING)
_PINNED, _PAGEABLE = "copy to pinned memory", "copy to fresh memory"
_TAKE, _UNCHANGED, _ASYNC = (
    "casnap, take",
    "casnap, take of nothing new",
    "casnap, async_take blocks",
)
_DCP = "dcp.async_save blocks"
_NONE, _TORCH = "no save", "torch.save"
_STEPS = 200
_AGAINST = {_TAKE: _PAGEABLE, _UNCHANGED: _PINNED, _ASYNC: _DCP}


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; one that says so where there is no accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return [Row(workload, "there is none here", "").to_json()]
    state = {k: v.to(device) for k, v in states.fp32(settings.nbytes, 200).items()}
    if workload == TRAINING:
        return _training(settings, state)
    pinned = {k: v.cpu().pin_memory() for k, v in state.items()}
    times = Contest(settings, state, pinned).run(settings.repeat)
    rows = []
    for name, samples in times.items():
        row = timed(workload, f"{name} ({device.type})", samples, settings.nbytes)
        if name in _AGAINST:
            pairs = zip(samples, times[_AGAINST[name]], strict=True)
            row = row.at_most([own / other for own, other in pairs], f"× {_AGAINST[name]}")
        rows.append(row.to_json())
    return rows


def _training(settings: Settings, state: states.State) -> list[dict[str, Any]]:
    """Return how much longer some steps take with a save after the first, by who saves."""
    contest = Contest(settings, state, {})
    savers: dict[str, Callable[[], Callable[[], object] | None]] = {
        _NONE: lambda: None,
        _ASYNC: contest.contenders[_ASYNC],
        _DCP: contest.contenders[_DCP],
        _TORCH: contest.torch_save,
    }
    times: Times = defaultdict(list)
    for turn in range(settings.repeat + 1):
        for name in rotated(list(savers), turn):
            states.step(state.values())
            took = contest.seconds_of_training(savers[name])
            if turn:
                times[name].append(took)
    contest.clear()
    plain = times.pop(_NONE)
    rows = [timed(TRAINING, f"{_STEPS} steps without a save", plain)]
    for name, samples in times.items():
        lost = [own - other for own, other in zip(samples, plain, strict=True)]
        row = timed(TRAINING, name.removesuffix(" blocks"), lost)
        rows.append(
            row.at_most([o / p for o, p in zip(samples, plain, strict=True)], "× the steps")
        )
    return [row.to_json() for row in rows]


class Contest:
    """Saves of a state on a device, and plain copies of it to the host.

    Args:
        settings: Where to write.
        state: The state.
        pinned: The memory for copies.
    """

    def __init__(self, settings: Settings, state: states.State, pinned: states.State) -> None:
        self._state = state
        self._pinned = pinned
        self._folder = settings.path("device")
        self._numbers = count()
        device = next(iter(state.values())).device
        self._synchronize: Callable[[], None] = getattr(torch, device.type).synchronize
        # Each returns what waits for the rest, or None.
        self.contenders: dict[str, Callable[[], Callable[[], object] | None]] = {
            _PINNED: self._copy_to_pinned,
            _PAGEABLE: self._copy,
            _TAKE: self._take,
            _UNCHANGED: self._take,
            _ASYNC: self._begin_take,
            _DCP: self._begin_save,
        }

    def _copy_to_pinned(self) -> None:
        for name, tensor in self._state.items():
            self._pinned[name].copy_(tensor, non_blocking=True)
        self._synchronize()

    def _copy(self) -> None:
        for tensor in self._state.values():
            tensor.cpu()

    def _path(self) -> str:
        return str(self._folder / "run" / f"step_{next(self._numbers)}")

    def _take(self) -> None:
        Snapshot.take(self._path(), {"s": StateDict(**self._state)})

    def _begin_take(self) -> Callable[[], object]:
        return Snapshot.async_take(self._path(), {"s": StateDict(**self._state)}).wait

    def _begin_save(self) -> Callable[[], object]:
        result: Callable[[], object] = peers.dcp_async_save(
            self._state, self._folder / "dcp", None
        ).result
        return result

    def torch_save(self) -> None:
        """Save by ``torch.save``, durably."""
        peers.torch_save(self._state, self._folder / "torch")

    def seconds_of_training(self, save: Callable[[], Callable[[], object] | None]) -> float:
        """Return for how long steps take of which the first is followed by a save."""
        weights = next(iter(self._state.values()))
        x = torch.randn(4096, 4096, device=weights.device, dtype=torch.bfloat16)
        waits: list[Callable[[], object] | None] = []

        def train() -> None:
            for step in range(_STEPS):
                y = x
                for _ in range(50):
                    y = y @ x
                states.step(self._state.values())
                self._synchronize()  # as a loop does that logs its loss
                if step == 0:
                    waits.append(save())

        took = seconds(train)
        if waits[0] is not None:
            waits[0]()
        remove(self._folder / "dcp")
        remove(self._folder / "torch")
        return took

    def clear(self) -> None:
        """Delete what was saved."""
        remove(self._folder)

    def seconds_of(self, name: str) -> float:
        """Return for how long one of the contenders takes, or blocks."""
        if name == _TAKE:
            states.step(self._state.values())
        elif name == _UNCHANGED:
            self._take()
        self._synchronize()
        waits: list[Callable[[], object] | None] = []
        took = seconds(lambda: waits.append(self.contenders[name]()))
        if waits[0] is not None:
            waits[0]()
        remove(self._folder / "dcp")
        return took

    def run(self, repeat: int) -> Times:
        """Return the seconds of each; the first two repetitions warm up and do not count.

        The second async take of a process pins the memory of the first.
        """
        times: Times = defaultdict(list)
        for turn in range(repeat + 2):
            for name in rotated(list(self.contenders), turn):
                took = self.seconds_of(name)
                if turn > 1:
                    times[name].append(took)
        self.clear()
        return times
