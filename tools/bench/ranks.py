"""Takes and restores by several ranks on this machine, beside one process and beside peers."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from casnap import Snapshot, StateDict
from casnap.backends.local.backend import LocalBackend
from tests.support.ranks import Pool, World
from tools.bench import peers, states
from tools.bench.limits import verified_read_seconds
from tools.bench.measure import Times, fsync_tree, remove, rotated, settle, warm
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

WORLDS = ("ranks: 2", "ranks: 4")
_TIMEOUT = 600.0
_TIMES_ONE_PROCESS = {
    2: {"declared": 1.15, "plain": 1.1, "sharded": 1.3},
    4: {"declared": 1.4, "plain": 1.1, "sharded": 1.8},
}
_TIMES_DCP_SHARDED = 1.4
_kept: dict[tuple[str, int], Any] = {}


# --- on the ranks -----------------------------------------------------------------------------


def _state(kind: str, nbytes: int) -> states.State:
    """Return this rank's state, made once: whole, or this rank's rows of the same tensors."""
    if (kind, nbytes) not in _kept:
        whole = states.build(states.FP32, nbytes)
        if kind == "sharded":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            # Sent by rank 0, or each rank takes its own piece: the tensors are equal everywhere.
            whole = {
                name: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)
                for name, t in whole.items()
            }
        _kept[kind, nbytes] = whole
    return _kept[kind, nbytes]  # type: ignore[no-any-return]


def _together(work: Callable[[], Any]) -> float:
    """Return how long something takes from a common start, on this rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class _Counted:
    """The bytes of packs that this rank writes and reads while the block runs."""

    def __enter__(self) -> _Counted:
        self.written = self.read = 0
        self._write, self._read_each = LocalBackend.write, LocalBackend._read_each
        counted = self

        def write(backend: LocalBackend, key: str, content: Any) -> None:
            counted.written += len(content) if key.startswith("packs/") else 0
            counted._write(backend, key, content)

        def read_each(backend: LocalBackend, key: str, targets: Any) -> Iterator[int]:
            for length in counted._read_each(backend, key, targets):
                counted.read += length
                yield length

        LocalBackend.write = write  # type: ignore[method-assign]
        LocalBackend._read_each = read_each  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        LocalBackend.write = self._write  # type: ignore[method-assign]
        LocalBackend._read_each = self._read_each  # type: ignore[method-assign]


def _take(path: str, kind: str, nbytes: int) -> tuple[float, int, int]:
    """Take; return seconds, and the bytes that this rank hashed and wrote."""
    state = {"model": StateDict(**_state(kind, nbytes))}
    hashed = [0]

    def progress(_what: str, done: int, _total: int) -> None:
        hashed[0] = done

    replicated = ["**"] if kind == "declared" else None
    with _Counted() as counted:
        took = _together(
            lambda: Snapshot.take(path, state, replicated=replicated, progress=progress)
        )
    return took, hashed[0], counted.written


def _restore(path: str, kind: str, nbytes: int, once: bool | None) -> tuple[float, int]:
    """Restore in place; return seconds, and the bytes that this rank read."""
    state = {"model": StateDict(**_state(kind, nbytes))}
    with _Counted() as counted:
        took = _together(lambda: Snapshot(path).restore(state, read_once=once))
    return took, counted.read


def _peer_saves(name: str, path: str, nbytes: int, kind: str) -> float:
    state, synced = _state(kind, nbytes), Path(path)

    def save() -> None:
        if name == peers.DCP:
            import torch.distributed.checkpoint as dcp

            dcp.save({"model": state}, checkpoint_id=path)
        else:
            import torchsnapshot

            app = {"model": torchsnapshot.StateDict(**state)}
            torchsnapshot.Snapshot.take(path, app, replicated=["**"])
        dist.barrier()
        if dist.get_rank() == 0:
            fsync_tree(synced)
        dist.barrier()

    return _together(save)


def _peer_loads(path: str, nbytes: int, kind: str) -> float:
    return _together(lambda: peers.dcp_load(_state(kind, nbytes), Path(path)))


# --- the figures ------------------------------------------------------------------------------


class _Ranks:
    """One world size and its figures."""

    def __init__(self, settings: Settings, world: World, alone: World) -> None:
        self.settings = settings
        self.nbytes = settings.nbytes // 2
        self.world = world
        self.alone = alone
        self.times: Times = defaultdict(list)
        self.ratios: Times = defaultdict(list)
        self.written: dict[str, int] = {}
        self.uneven: Times = defaultdict(list)
        self.read: dict[str, int] = {}
        # Warm memory for what bounds a restore: its bytes, and those of trees and footers.
        self.memory = bytearray(b"\1") * (self.nbytes + self.nbytes // 8 + 16 * MIB)
        self._folders = 0

    def _folder(self) -> Path:
        self._folders += 1
        folder = self.settings.path("ranks", f"{self.world.size}-{self._folders}")
        folder.mkdir()
        settle()
        return folder

    def _run(self, world: World, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        return world.run(work, *arguments, timeout=_TIMEOUT)

    def take(self, kind: str, world: World | None = None, *, count: bool = True) -> float:
        """Take into a new store, then again with nothing changed; return the first one's time."""
        folder = self._folder()
        world = world or self.world
        first = self._run(world, _take, str(folder / "a"), kind, self.nbytes)
        took = max(t for t, _, _ in first)
        again = self._run(world, _take, str(folder / "b"), kind, self.nbytes)
        if count:
            self.times[kind].append(took)
            self.times[f"{kind} again"].append(max(t for t, _, _ in again))
            self.written[kind] = sum(written for _, _, written in first)
            for what, amounts in (("hashed", [h for _, h, _ in first]),
                                  ("written", [w for _, _, w in first])):  # fmt: skip
                mean = statistics.mean(amounts)
                self.uneven[f"{kind} {what}"].append(max(amounts) / mean - 1 if mean else 0)
        remove(folder)
        return took

    def compare(self, kind: str) -> None:
        """Take by all ranks between two takes by one process."""
        before = self.take("plain", self.alone, count=False)
        took = self.take(kind)
        after = self.take("plain", self.alone, count=False)
        self.times["alone"] += [before, after]
        self.ratios[kind].append(took / ((before + after) / 2))

    def peer(self, name: str, kind: str = "declared") -> None:
        folder = self._folder()
        path = str(folder / "a")
        saved = self._run(self.world, _peer_saves, name, path, self.nbytes, kind)
        self.times[f"{name} {kind}"].append(max(saved))
        if name == peers.DCP:
            loaded = self._run(self.world, _peer_loads, path, self.nbytes, kind)
            self.times[f"dcp.load {kind}"].append(max(loaded))
        remove(folder)

    def restore(self, kind: str) -> None:
        folder = self._folder()
        self._run(self.world, _take, str(folder / "a"), kind, self.nbytes)
        packs = folder / "casnap-store/packs"
        warm(packs)  # a take may write around the page cache
        self.times[f"{kind} limit"].append(verified_read_seconds(packs, memoryview(self.memory)))
        for once in (False, None):
            name = f"{kind} {'default' if once is None else 'alone'}"
            got = self._run(self.world, _restore, str(folder / "a"), kind, self.nbytes, once)
            self.times[name].append(max(t for t, _ in got))
            self.read[name] = sum(n for _, n in got)
        remove(folder)


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one world size."""
    size = int(workload.rpartition(" ")[2])
    names = [peers.DCP, *([peers.TORCHSNAPSHOT] if peers.installed("torchsnapshot") else [])]
    # The one process is another one, so the ranks stay connected, as in a training.
    with Pool() as pool, Pool() as apart:
        figures = _Ranks(settings, pool.world(size), apart.world(1))
        # The buffers of each process are made at its first take.
        for kind in ("declared", "sharded"):
            figures.take(kind, count=False)
        for turn in range(settings.repeat):
            for kind in rotated(["declared", "plain", "sharded"], turn):
                figures.compare(kind)
            for name in rotated(names, turn):
                figures.peer(name)
            figures.peer(peers.DCP, "sharded")
            figures.restore("declared")
            figures.restore("sharded")
    remove(settings.path("ranks"))
    return [row.to_json() for row in _rows(figures, size, names)]


_KINDS = {
    "declared": "replicated=['**']",
    "plain": "equal, undeclared",
    "sharded": "DTensor, Shard(0)",
}


def _rows(figures: _Ranks, size: int, names: list[str]) -> list[Row]:
    times, nbytes = figures.times, figures.nbytes
    work = f"first take by {size} ranks, {nbytes / MIB:.0f} MiB"
    rows = [timed(work, f"{peers.CASNAP}, one process", times["alone"], nbytes)]
    for kind, title in _KINDS.items():
        row = timed(work, f"{peers.CASNAP}, {title}", times[kind], nbytes)
        bound = _TIMES_ONE_PROCESS[size][kind]
        rows.append(row.at_most(figures.ratios[kind], "× one process", bound))
    rows += [
        timed(work, f"{name}, {said}synced", times[f"{name} {kind}"], nbytes).at_least(
            [a / b for a, b in zip(times[f"{name} {kind}"], times[kind], strict=True)],
            "× as fast",
            bound,
        )
        for name, kind, said, bound in (
            *((name, "declared", "", 1.0) for name in names),
            (peers.DCP, "sharded", "DTensor, Shard(0), ", _TIMES_DCP_SHARDED),
        )
    ]
    again = f"take by {size} ranks with nothing changed, {nbytes / MIB:.0f} MiB"
    rows += [timed(again, f"{peers.CASNAP}, {t}", times[f"{k} again"]) for k, t in _KINDS.items()]
    spread = f"bytes of a first take by {size} ranks"
    for kind, title in _KINDS.items():
        written = figures.written[kind] / nbytes
        rows.append(
            Row(spread, f"written, {title}", f"{written:.4f}× the state").within(
                written, 1.01, "≤ 1.01"
            )
        )
        for what in ("hashed", "written"):
            worst = statistics.median(figures.uneven[f"{kind} {what}"])
            text = f"most {what} by a rank, {title}"
            rows.append(Row(spread, text, f"{worst:+.1%} of mean").within(worst, 0.05, "≤ +5 %"))
    back = f"restore by {size} ranks, warm, {nbytes / MIB:.0f} MiB"
    for kind in ("declared", "sharded"):
        for how, said in (("alone", "each rank for itself"), ("default", "by default")):
            name = f"{kind} {how}"
            row = timed(back, f"{peers.CASNAP}, {_KINDS[kind]}, {said}", times[name], nbytes)
            read = figures.read[name] / nbytes
            # Few ranks are faster if each reads for itself.
            most = 1.02 if (size, name) == (4, "declared default") else None
            rows.append(row.at_most([read], " bytes read per byte", most))
        for beside, title, unit, least in (
            ("dcp.load {}", "dcp.load, {}", "× as fast", 1.0),
            ("{} limit", "reads and BLAKE3 of each byte once, {}", " of its speed", 0.9),
        ):
            took = times[beside.format(kind)]
            ratios = [a / b for a, b in zip(took, times[f"{kind} default"], strict=True)]
            bound = least if (kind, least) != ("declared", 0.9) else None
            row = timed(back, title.format(kind), took, nbytes)
            rows.append(row.at_least(ratios, unit, bound))
    return rows
