"""Import and export of files of other formats, beside a plain copy of a file of as many bytes."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from casnap import Store
from casnap.runtime.buffers import release_memory
from tools.bench import peers, states
from tools.bench.measure import PeakMemory, fsync_tree, remove, seconds, settle, warm
from tools.bench.settings import MIB, Settings
from tools.bench.table import Row, timed

WORKLOADS = ("200 fp32 tensors", "ten adapters of one base")
_MOST_MIB = 400
_OUT = {"safetensors": "model.safetensors", "torch": "model.pt", "dcp": "model"}
_PEER = "cp and sync"


class _Turns:
    """Imports and exports of one state, each between two plain copies."""

    def __init__(self, settings: Settings) -> None:
        self.folder = settings.path(f"files-{os.urandom(4).hex()}", "x").parent
        state = states.fp32(settings.nbytes, 200)
        self.nbytes = states.nbytes_of(state.values())
        self.sources = {kind: self.folder / _OUT[kind] for kind in ("safetensors", "torch")}
        save_file(state, self.sources["safetensors"])
        torch.save(state, self.sources["torch"])
        del state
        self.store = Store(self.folder / "store")
        self.store.import_file(self.sources["safetensors"], "base")
        self.times: dict[str, list[float]] = defaultdict(list)
        self.ratios: dict[str, list[float]] = defaultdict(list)
        self.extra: dict[str, int] = {}

    def run(self) -> None:
        """Measure each import and each export once; the first run, only its memory."""
        fresh = self.folder / "fresh"
        for kind, source in self.sources.items():
            self._beside(f"import, {kind}", lambda s=source: Store(fresh).import_file(s, "x"))
            remove(fresh)
        for kind, name in _OUT.items():
            out = self.folder / f"out-{name}"
            self._beside(f"export, {kind}", lambda o=out, k=kind: self._export(o, k))
            remove(out)

    def _export(self, out: Path, kind: str) -> None:
        self.store["base"].export(out, path="model", format=kind)

    def _beside(self, name: str, work: Callable[[], object]) -> None:
        """Time a piece of work between two plain copies; the first time only look at its memory."""
        if name not in self.extra:
            release_memory()
            with PeakMemory() as peak:
                work()
            self.extra[name] = peak.extra
            return
        before = self._copy()
        settle()
        took = seconds(work)
        self.times[name].append(took)
        self.ratios[name].append((before + self._copy()) / 2 / took)

    def _copy(self) -> float:
        to = self.folder / "copied"
        for path in (*self.sources.values(), self.folder / "store"):
            warm(path)
        settle()
        took = seconds(lambda: _copied(self.sources["safetensors"], to))
        remove(to)
        self.times[_PEER].append(took)
        return took

    def rows(self, title: str) -> list[Row]:
        """Return the rows."""
        size = f"{title}, {self.nbytes / MIB:.0f} MiB"
        rows = [timed(f"plain copy: {size}", _PEER, self.times[_PEER], self.nbytes)]
        for name, ratios in self.ratios.items():
            row = timed(f"{name}: {size}", peers.CASNAP, self.times[name], self.nbytes)
            rows.append(row.at_least(ratios, " of the speed of cp", 0.7))
        for name, extra in self.extra.items():
            memory = Row(f"extra memory of {name}: {size}", peers.CASNAP, f"{extra / MIB:.0f} MiB")
            rows.append(memory.within(extra / MIB, _MOST_MIB, f"≤ {_MOST_MIB} MiB"))
        return rows


def _copied(source: Path, to: Path) -> None:
    subprocess.run(["cp", source, to], check=True)
    fsync_tree(to)


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload."""
    if workload == WORKLOADS[1]:
        return [row.to_json() for row in _adapters(settings)]
    turns = _Turns(settings)
    for _ in range(1 + settings.repeat):
        turns.run()
    return [row.to_json() for row in turns.rows(workload)]


def _adapters(settings: Settings) -> list[Row]:
    """Import ten fine-tunes of one base, each with a hundredth of its bytes as an adapter."""
    folder = settings.path("adapters", "x").parent
    folder.mkdir(exist_ok=True)
    store = Store(folder / "store")
    base = states.fp32(settings.nbytes // 8, 50)
    nbytes = states.nbytes_of(base.values())
    whole = logical = 0
    for i in range(10):
        lora = {f"lora.{n}": torch.randn(nbytes // 800 // 8) for n in range(2)}
        file = folder / f"tuned-{i}.safetensors"
        save_file({**base, **lora}, file)
        report = store.import_file(file, f"tuned-{i}")
        logical += report.logical_bytes
        whole += report.new_bytes
        remove(file)
    work = f"ten adapters of one base of {nbytes / MIB:.0f} MiB, imported"
    full = {name: tensor + 1 for name, tensor in list(base.items())[:40]}
    file = folder / "full.safetensors"
    save_file({**base, **full}, file)
    report = store.import_file(file, "full")
    return [
        Row(work, "ten files", f"{logical / MIB:.0f} MiB"),
        Row(work, peers.CASNAP, f"{whole / MIB:.0f} MiB", "", f"{whole / nbytes:.3g}× the base"),
        Row(
            "a full fine-tune whose last fifth was frozen",
            peers.CASNAP,
            f"{report.new_bytes / MIB:.0f} MiB new",
            "",
            f"{report.new_bytes / report.logical_bytes:.3g} of its bytes",
        ),
    ]
