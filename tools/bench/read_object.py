"""read_object: one tensor of 10 MB out of a store of 10 GB, from a warm page cache."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.bench import peers, states
from tools.bench.fresh import call
from tools.bench.measure import remove, seconds, settle, warm
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

_TENSOR = 10_000_000
_PER_TAKE = 200
_LIMIT = 0.010

Read = Callable[[Path, str], object]


def open_and_read(path: Path, name: str) -> object:
    """Open a snapshot anew and read one tensor."""
    from casnap import Snapshot

    return Snapshot(str(path)).read_object(f"0/model/{name}")


def _torch_read(path: Path, name: str) -> object:
    return torch.load(path, mmap=True, weights_only=True)[name].clone()


def _safetensors_read(path: Path, name: str) -> object:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as source:
        return source.get_tensor(name).clone()


def torchsnapshot_read(path: Path, name: str) -> object:
    """Open a snapshot of TorchSnapshot anew and read one tensor."""
    import torchsnapshot

    return torchsnapshot.Snapshot(str(path)).read_object(f"0/model/{name}")


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows; ``workload`` names the only one."""
    takes = 1 if settings.quick else 5
    tensors = 100 if settings.quick else _PER_TAKE
    state = states.fp32(_TENSOR * tensors, tensors)
    store = settings.path("read", "store", "take")
    for take in range(takes):
        peers.casnap_take(state, store.with_name(f"take_{take}"))
        if take < takes - 1:
            states.step(state.values())
    names = list(state)
    path = store.with_name(f"take_{takes // 2}")
    rows = _ours(settings, workload, path, names)
    rows += _theirs(settings, workload, state)
    remove(settings.path("read"))
    return [row.to_json() for row in rows]


def _ours(settings: Settings, work: str, path: Path, names: list[str]) -> list[Row]:
    settle()
    warm(path.parent)
    count = 4 * settings.repeat
    here = [seconds(open_and_read, path, n) for n in _spread(names, count)]
    return opened_rows(settings, work, path, names, here, _LIMIT)


def opened_rows(
    settings: Settings,
    work: str,
    path: Path,
    names: list[str],
    here: list[float],
    limit: float,
    *,
    limit_loading: bool = False,
) -> list[Row]:
    """Return the rows of opening again (``here``), and of opening in fresh processes.

    With ``limit_loading``, the limit also holds where the loading of modules is included.
    """
    fresh = [
        [
            call(first_read, settings, path=str(path), name=name, loaded=loaded)
            for name in _spread(names, 1 if settings.quick else 3)
        ]
        for loaded in (True, False)
    ]
    who = f"{peers.CASNAP}, newly opened"
    target = f"≤ {limit * 1e3:g} ms"
    loading = timed(work, f"{who}, first by its process, loading of modules included", fresh[1])
    return [
        timed(work, who, here).within(statistics.median(here), limit, target),
        timed(work, f"{who}, first by its process", fresh[0]).within(
            statistics.median(fresh[0]), limit, target
        ),
        loading.within(statistics.median(fresh[1]), limit, target) if limit_loading else loading,
    ]


def first_read(settings: Settings, path: str, name: str, loaded: bool) -> float:
    """Return the seconds of opening and reading a store that this process has never seen.

    Args:
        settings: Where another small store may lie.
        path: The snapshot.
        name: The tensor.
        loaded: Read from another store first, so that all modules are loaded.
    """
    import casnap  # noqa: F401 - the import is not what is measured

    if loaded:
        other = settings.path(f"other-{os.getpid()}", "small")
        peers.casnap_take({name: torch.zeros(1024)}, other)
        open_and_read(other, name)
        remove(other.parent)
    return seconds(open_and_read, Path(path), name)


def _theirs(settings: Settings, work: str, state: states.State) -> list[Row]:
    reads: dict[str, Read] = {
        peers.TORCH: _torch_read,
        peers.SAFETENSORS: _safetensors_read,
        peers.TORCHSNAPSHOT: torchsnapshot_read,
    }
    savers = peers.savers()
    size = states.nbytes_of(state.values()) / 1e9
    rows = []
    for name, read in reads.items():
        if name not in savers:
            continue
        path = settings.path("read", "peer")
        savers[name](state, path)
        warm(path)
        chosen = _spread(list(state), 2 * settings.repeat)
        samples = [seconds(read, path, n) for n in chosen]
        rows.append(timed(work, f"{name}, newly opened, from {size:.0f} GB", samples))
        remove(path)
    return rows


SCATTERED = ("100 scattered tensors of 64 KiB", "100 scattered tensors of 4 MiB")
_SIZES = dict(zip(SCATTERED, (64 << 10, 4 << 20), strict=True))


def measure_scattered(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of reading 100 of 500 tensors at once, from a warm page cache."""
    nbytes = _SIZES[workload]
    state = states.fp32(500 * nbytes, 500)
    taken, file = settings.path("scattered", "store", "take"), settings.path("scattered", "file")
    peers.casnap_take(state, taken)
    peers.savers()[peers.SAFETENSORS](state, file)
    names = _spread(list(state), 100)
    del state
    warm(taken.parent)
    warm(file)
    reads: dict[str, Callable[[list[str]], object]] = {
        f"{peers.CASNAP}, read_objects, verified": partial(_read_objects, taken),
        f"{peers.CASNAP}, read_objects of an open snapshot": partial(_read_open, _opened(taken)),
        _SAFE_OPEN: partial(_get, file),
    }
    rows = []
    count = 8 if nbytes < 1 << 20 else 1
    # Beside other work only processor time says much.
    for clock, what in ((time.perf_counter, ""), (time.process_time, ", processor time")):
        samples = _in_turns(reads, names, clock, 1 + count * settings.repeat)
        total = None if what else len(names) * nbytes
        rows += [timed(workload, who + what, samples[who], total) for who in reads]
        for at, who in zip((-3, -2), reads, strict=False):
            ratios = [a / b for a, b in zip(samples[who], samples[_SAFE_OPEN], strict=True)]
            rows[at] = rows[at].at_most(ratios, "× the time of safe_open", 2)
    remove(settings.path("scattered"))
    return [row.to_json() for row in rows]


_SAFE_OPEN = "safe_open, get_tensor and clone, unverified"


def _in_turns(
    reads: dict[str, Callable[[list[str]], object]],
    names: list[str],
    clock: Callable[[], float],
    count: int,
) -> dict[str, list[float]]:
    """Return the seconds of each read but the first, in turns."""
    samples: dict[str, list[float]] = {who: [] for who in reads}
    for _ in range(count):
        for who, read in reads.items():
            start = clock()
            read(names)
            samples[who].append(clock() - start)
    return {who: each[1:] for who, each in samples.items()}


def _opened(path: Path) -> Any:
    from casnap import Snapshot

    return Snapshot(str(path))


def _read_open(snapshot: Any, names: list[str]) -> object:
    return snapshot.read_objects([f"0/model/{name}" for name in names])


def _read_objects(path: Path, names: list[str]) -> object:
    return _read_open(_opened(path), names)


def _get(path: Path, names: list[str]) -> object:
    """Read by safe_open, which only maps the file: the copy reads it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as source:
        return {name: source.get_tensor(name).clone() for name in names}


def _spread(names: list[str], count: int) -> list[str]:
    """Return ``count`` names, as far apart as they go."""
    return [names[i * len(names) // count % len(names)] for i in range(count)]
