"""What ranks plan together, at scale: up to a thousand, simulated in one process without bytes.

The functions and messages are those of takes and restores; only the ranks are not there.
"""

from __future__ import annotations

import os
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from casnap.format.entries import Payload, TensorEntry
from casnap.format.grid import grid_of
from casnap.format.records import encode
from casnap.format.region import Region
from casnap.restore.shared_reads import window_for
from casnap.restore.shared_schedule import request_of, schedule_reads
from casnap.runtime.buffers import SLOT_BYTES
from casnap.runtime.threads import python_gc_paused
from casnap.take.plan import replicated_runs
from casnap.take.ranks import exchange, owners
from tools.bench.measure import PeakMemory
from tools.bench.settings import GIB, MIB, Settings
from tools.bench.table import Row, duration

_TENSORS = 1000
_BYTES = 10**12
_COLUMNS = 4096
_CHUNK = MIB
_LIMIT_SECONDS, _LIMIT_BYTES = 5, 2 * GIB


class _Cost(NamedTuple):
    """What the planning of one operation takes.

    Attributes:
        busiest: Seconds on the rank that has most to do.
        all: Seconds on all ranks together.
        memory: Bytes of Python objects on the busiest rank, at its peak.
    """

    busiest: float
    all: float
    memory: int


def measure(settings: Settings, workload: str) -> list[dict[str, Any]]:
    """Return the rows of one workload: how the cost grows with the ranks."""
    simulate = _SIMULATED[workload]
    rows = []
    for ranks in [10, 30, 100] if settings.quick else [10, 30, 100, 300, 1000]:
        cost = simulate(ranks)
        row = Row(
            workload,
            f"{ranks:,} ranks, the busiest one",
            duration(cost.busiest),
            f"all together {duration(cost.all)}",
            f"{cost.memory / MIB:.0f} MiB",
        )
        misses = max(cost.busiest / _LIMIT_SECONDS, cost.memory / _LIMIT_BYTES)
        rows.append(row.within(misses, 1, f"≤ {_LIMIT_SECONDS} s, ≤ {_LIMIT_BYTES // GIB} GiB"))
    return [row.to_json() for row in rows]


def _shapes() -> list[tuple[int, int]]:
    """Return shapes whose rows no world size divides, some twice as large as others."""
    mean = _BYTES // _TENSORS // (2 * _COLUMNS)
    return [(int(mean * (2 / 3 + 2 / 3 * i / _TENSORS)) | 1, _COLUMNS) for i in range(_TENSORS)]


def _shard(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return where a rank's rows begin and how many they are, as torch cuts them."""
    step = -(-rows // ranks)
    start = min(rank * step, rows)
    return start, min(step, rows - start)


def _seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    with python_gc_paused():
        start = perf_counter()
        result = work()
        return result, perf_counter() - start


def _memory(work: Callable[[], Any]) -> int:
    """Return the most bytes of Python objects that some work has at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- planning of sharded tensors --------------------------------------------------------------


def _holdings(tensors: list[tuple[bytes, str, TensorEntry]], rank: int, ranks: int) -> bytes:
    """Return what a rank tells the owner of some tensors."""
    holdings = owners.Holdings([], [])
    for key, path, entry in tensors:
        start, count = _shard(entry.shape[0], rank, ranks)
        boxes = (Region((start, 0), (count, _COLUMNS)),) if count else ()
        held = owners.HeldShards(key, path, entry, boxes, [b""] * len(boxes))
        holdings.sharded.append(held)
    return encode(holdings)


def _sharded(ranks: int) -> _Cost:
    by_owner: defaultdict[int, list[tuple[bytes, str, TensorEntry]]] = defaultdict(list)
    for i, shape in enumerate(_shapes()):
        path = f"model/layers.{i}.weight"
        key = owners.id_of_path(path)
        entry = TensorEntry(Payload(2 * shape[0] * shape[1]), "bfloat16", shape)
        by_owner[owners.owner_of(key, ranks)].append((key, path, entry))
    entries = {key: entry for tensors in by_owner.values() for key, _, entry in tensors}
    _, asking = _seconds(lambda: [_holdings(by_owner[owner], 0, ranks) for owner in range(ranks)])
    planning, for_one = [], []
    for tensors in by_owner.values():
        told = [_holdings(tensors, rank, ranks) for rank in range(ranks)]
        answers, took = _seconds(lambda told=told: _planned(told))
        planning.append(took)
        for_one.append(([key for key, _, _ in tensors], answers[ranks // 2]))
    most = max(by_owner.values(), key=len)
    told = [_holdings(most, rank, ranks) for rank in range(ranks)]
    memory = _memory(lambda: _planned(told))
    _, following = _seconds(lambda: [_followed(keys, answer, entries) for keys, answer in for_one])
    own = asking + following
    return _Cost(own + max(planning), ranks * own + sum(planning), memory)


def _planned(told: list[bytes]) -> list[bytes]:
    """Do what the owner of some tensors does."""
    heard = [msgspec.msgpack.decode(holdings, type=owners.Holdings) for holdings in told]
    _, plans = owners.plan_sharded(heard, _CHUNK, range(len(heard)))
    return [encode(answer) for answer in owners.answers_of(heard, plans, {})]


def _followed(keys: list[bytes], answer: bytes, entries: dict[bytes, TensorEntry]) -> None:
    """Do what a rank does with the answer of an owner, short of touching its tensors."""
    msgspec.msgpack.decode(answer, type=owners.Answer)
    for key in keys:
        grid_of(entries[key].shape, 2, _CHUNK)


def _replicated(ranks: int) -> _Cost:
    def work() -> object:
        grid_of.cache_clear()
        return replicated_runs(
            [grid_of(shape, 2, _CHUNK) for shape in _shapes()], ranks // 2, ranks
        )

    _, took = _seconds(work)
    memory = _memory(work)
    return _Cost(took, ranks * took, memory)


# --- who writes which chunk -------------------------------------------------------------------


def _digests(ranks: int) -> _Cost:
    """Let one rank decide over its share of the digests: all have as much to do."""
    turns = -(-_BYTES // (ranks * SLOT_BYTES))  # one thread of each rank asks in each
    asks = -(-_BYTES // _CHUNK // (ranks * turns))

    def decided() -> float:
        decider = exchange.Decider(0, ranks)
        return sum(
            _seconds(lambda asked=asked: decider.decide([0] * ranks, asked))[1]
            for asked in (_questions(ranks, asks) for _ in range(turns))
        )

    took = decided()
    return _Cost(took, ranks * took, _memory(decided))


def _questions(ranks: int, asks: int) -> list[memoryview]:
    """Return what all ranks ask one of them in a round, about so many chunks in all."""
    questions = [bytearray() for _ in range(ranks)]
    for i in range(asks):
        questions[i % ranks] += exchange.OFFER.pack(os.urandom(32), _CHUNK)
    return [memoryview(question) for question in questions]


# --- who reads what ---------------------------------------------------------------------------


def _wanted(unit: int, first: int, stop: int) -> bytes:
    """Return what a rank says that wants some bytes of the store, in packs of 48 MiB."""
    per_pack = 48 * MIB // unit
    units: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in range(first // unit, -(-stop // unit)):
        units[number // per_pack].append((number % per_pack, unit))
    return request_of([(pack.to_bytes(16, "big"), runs) for pack, runs in units.items()])


def _dealt(ranks: int, said: list[tuple[list[int], bytes]], share: int) -> _Cost:
    def work() -> bytes:
        return encode(schedule_reads(said, ranks, share, window_for(ranks)))

    # Of so many objects, tracing each would take minutes.
    with PeakMemory() as memory:
        _, took = _seconds(work)
    return _Cost(took, took, memory.extra)


def _share(ranks: int) -> int:
    return max(window_for(ranks) // ranks, _CHUNK)


def _reads_of_shards(ranks: int) -> _Cost:
    unit = min(_share(ranks), 16 * MIB)
    cuts = [i * _BYTES // ranks for i in range(ranks + 1)]
    said = [([i], _wanted(unit, cuts[i], cuts[i + 1])) for i in range(ranks)]
    return _dealt(ranks, said, _share(ranks))


def _reads_of_replicas(ranks: int) -> _Cost:
    unit = min(_share(ranks), 16 * MIB)
    return _dealt(ranks, [(list(range(ranks)), _wanted(unit, 0, _BYTES // 10))], _share(ranks))


_SIMULATED: dict[str, Callable[[int], _Cost]] = {
    "plan of a take, 1,000 tensors of 1 TB, sharded unevenly": _sharded,
    "plan of a take, 1,000 tensors of 1 TB, declared as replicated": _replicated,
    "who writes which new chunk of 1 TB, sharded": _digests,
    "who reads what of 1 TB, each rank its shards": _reads_of_shards,
    "who reads what, all read the same 0.1 TB": _reads_of_replicas,
}
WORKLOADS = tuple(_SIMULATED)
