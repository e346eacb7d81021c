"""Processes that take, delete, collect and read at one store, killed and stopped at random."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import memory_folder
from tests.support.journal import Event, Expected
from tests.support.servers import Bucket
from tests.support.soaking import EACH, run_soak

SEED = int(os.environ.get("CASNAP_SOAK_SEED", random.SystemRandom().randrange(10**6)))
SECONDS = float(os.environ.get("CASNAP_SOAK_SECONDS", "300"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at what is left of a soak with a cache that none of its processes had."""
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "last"))


def soak(folder: Path, seconds: float, kill_every: float, **roles: Any) -> Counter[str]:
    print(f"CASNAP_SOAK_SEED={SEED}")
    counts = run_soak(
        folder, seconds, seed=SEED, kill_every=kill_every, tell=lambda line: print(line), **roles
    )
    print(counts)
    return counts


@pytest.mark.usefixtures("cache")
def test_a_short_soak() -> None:
    with memory_folder() as folder:
        counts = soak(folder, 3, 0.2, takers=2, collectors=1)
    assert {*EACH} <= counts.keys(), counts


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 300)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kill_every", [0.1, 1.0, 10.0])
def test_a_long_soak(kill_every: float) -> None:
    with memory_folder() as folder:
        counts = soak(folder, SECONDS / 3, kill_every)
    assert counts["take"] > SECONDS / 3
    assert counts["collect"] > SECONDS / 30


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 300)
@pytest.mark.usefixtures("cache")
def test_a_soak_on_a_disk(disk_path: Path) -> None:
    counts = soak(disk_path, SECONDS / 3, 0.5, collectors=3, deleters=2)
    assert counts["take"] > 0
    assert counts["collect"] > 0


@pytest.mark.servers
@pytest.mark.usefixtures("cache")
def test_a_short_soak_of_a_bucket(bucket: Bucket) -> None:
    with memory_folder() as folder:
        counts = soak(folder, 20, 2, takers=2, collectors=1, bucket=bucket)
    assert {*EACH} <= counts.keys(), counts


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 3 + 300)
@pytest.mark.usefixtures("cache")
def test_a_long_soak_of_a_bucket(bucket: Bucket) -> None:
    with memory_folder() as folder:
        counts = soak(folder, SECONDS, 2, takers=2, collectors=1, bucket=bucket)
    assert counts["take"] > 0
    assert counts["collect"] > 0


# --- the soak itself ---------------------------------------------------------------------------


def event(do: str, end: str, step: int = 1, name: str = "t0/a", **more: object) -> Event:
    return {"who": f"{do}-0", "do": do, "end": end, "name": name, "step": step, **more}


TAKEN = [event("take", "begun"), event("take", "done")]
TAG = [event("tag", "begun"), event("tag", "done")]
PRUNE = event("prune", "begun", prefix="t0")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        pytest.param(TAKEN, {}, id="lost"),
        pytest.param(TAKEN, {"t0/a": 2}, id="another"),
        pytest.param([], {"t0/a": 1}, id="no-take-made-it"),
        pytest.param([*TAKEN, event("delete", "done")], {"t0/a": 1}, id="came-back"),
        pytest.param([TAKEN[0], event("take", "FencedError")], {"t0/a": 1}, id="failed"),
        pytest.param([*TAKEN, event("take", "begun", 2), event("take", "done", 2)],
                     {"t0/a": 1}, id="not-replaced"),
        pytest.param([*TAKEN, PRUNE, event("prune", "done", gone=[("t0/b", 3)])], {},
                     id="not-what-was-pruned"),
        pytest.param([*TAKEN, *TAG, PRUNE, event("prune", "done", gone=[("t0/a", 1)])], {},
                     id="tagged-but-pruned"),
        pytest.param([*TAKEN, *TAG, PRUNE], {}, id="tagged-but-pruned-in-doubt"),
        pytest.param([*TAKEN, event("restore", "SnapshotNotFoundError")], {"t0/a": 1},
                     id="not-found-by-a-reader"),
    ],
)  # fmt: skip
def test_a_soak_notices(events: list[Event], found: dict[str, int]) -> None:
    assert Expected(events).problems_with(found)
