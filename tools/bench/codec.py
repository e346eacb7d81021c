"""Compressed chunks of 1 MiB: how small, and how fast on one core, beside zstd without planes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import zstandard

from casnap.format.codec import Codec, compress, decompress
from tools.bench.measure import Times, seconds
from tools.bench.settings import Settings
from tools.bench.table import Row, timed

_CHUNK = 1 << 20
_TIMES = 32
_CODE, _READ = "casnap, compress", "casnap, decompress"
_PEER_CODE, _PEER_READ = "zstd level 1, compress", "zstd level 1, decompress"


def _weights(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(_CHUNK // dtype.itemsize) * 0.02).to(dtype)


_CONTENTS: dict[str, Callable[[], torch.Tensor]] = {
    "normal weights, bf16": lambda: _weights(torch.bfloat16),
    "normal weights, fp32": lambda: _weights(torch.float32),
    "their squares, fp32": lambda: _weights(torch.float32).square(),
}
WORKLOADS = tuple(_CONTENTS)


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one kind of content."""
    raw = _CONTENTS[workload]().view(torch.uint8).numpy().tobytes()
    stored = compress(raw) or raw
    frame = zstandard.ZstdCompressor(level=1).compress(raw)
    calls: dict[str, Callable[[], object]] = {
        _CODE: lambda: compress(raw),
        _PEER_CODE: lambda: zstandard.ZstdCompressor(level=1).compress(raw),
        _READ: lambda: decompress(Codec.PLANES, memoryview(stored), len(raw)),
        _PEER_READ: lambda: zstandard.ZstdDecompressor().decompress(frame),
    }
    times: Times = defaultdict(list)
    for _ in range(settings.repeat * _TIMES):
        for name, call in calls.items():
            times[name].append(seconds(call))
    title = f"{workload}: {len(stored) / len(raw):.2f} of raw, zstd {len(frame) / len(raw):.2f}"
    rows: list[Row] = []
    for name, peer in ((_CODE, _PEER_CODE), (_READ, _PEER_READ)):
        ratios = [t / p for t, p in zip(times[name], times[peer], strict=True)]
        rows.append(timed(title, name, times[name], len(raw)))
        rows.append(timed(title, peer, times[peer], len(raw)).at_most(ratios, "× its time"))
    return [row.to_json() for row in rows]
