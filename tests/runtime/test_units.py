"""Sizes and times are written alike everywhere: in Python, on the command line, in variables."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casnap import NewStore, Retention, StateDict, Store, on_preemption
from casnap.runtime.units import bytes_of, seconds_of
from casnap.serving import PullOptions
from tests.support.cli_calls import document
from tests.support.remote import RemoteDouble

STATE = {"model": StateDict(w=torch.arange(100_000.0))}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.take(STATE, "step_1")
    return store


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(5, 5), (5e9, 5 * 10**9), ("5", 5), ("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("2k", 2000)],
)
def test_sizes(size: object, nbytes: int) -> None:
    assert bytes_of("most", size) == nbytes


@pytest.mark.parametrize(
    ("time", "seconds"),
    [(5, 5.0), (0.5, 0.5), ("30s", 30.0), ("1.5h", 5400.0), ("7d", 604800.0), ("0", 0.0),
     (timedelta(minutes=2), 120.0)],
)  # fmt: skip
def test_times(time: object, seconds: float) -> None:
    assert seconds_of("grace", time) == seconds


@pytest.mark.parametrize(
    ("size", "error"),
    [("5 apples", ValueError), ("", ValueError), ("-1", ValueError), (-1, ValueError),
     (0.5, ValueError), (float("inf"), ValueError), (float("nan"), ValueError), (True, ValueError),
     ([5], TypeError), (None, TypeError), (timedelta(1), TypeError)],
)  # fmt: skip
def test_what_is_no_size(size: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^most is a number of bytes .*'500MB' or '4GiB'; got"):
        bytes_of("most", size)


@pytest.mark.parametrize(
    ("time", "error"),
    [("soon", ValueError), ("7", ValueError), ("-7d", ValueError), (-1, ValueError),
     (float("inf"), ValueError), (float("nan"), ValueError), (10**400, ValueError),
     (True, ValueError), (timedelta(-1), ValueError), ([7], TypeError), (None, TypeError)],
)  # fmt: skip
def test_what_is_no_time(time: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^grace is a time from 0 on: .*'7d' or a timedelta; got"):
        seconds_of("grace", time)


def test_a_store_takes_sizes_and_times_in_words(store: Store, tmp_path: Path) -> None:
    assert Store(tmp_path / "a", create=NewStore(chunk_size="64KiB")).make().chunk_size == 64 << 10
    # It is a power of two, so there is one meaning.
    assert Store(tmp_path / "b", create=NewStore(chunk_size="64k")).make().chunk_size == 64 << 10
    assert store.async_take(STATE, "step_2", max_staging_bytes="1GB").wait().name == "step_2"
    assert Retention(keep_within="7d") == Retention(keep_within=timedelta(days=7))
    assert store.prune(Retention(keep_within="1.5h")).deleted == []
    store.delete("step_2")
    assert store.gc(grace="12h").waiting_packs
    assert store.configure(gc="12h")
    assert store.settings["gc"] == document("config", store.uri)["settings"]["gc"] == 43200.0
    snapshot = store["step_1"]
    weight = snapshot.read_object("model/w", memory_budget_bytes="64KiB", index=slice(0, 5))
    assert torch.equal(weight, torch.arange(5.0))
    report = snapshot.export(tmp_path / "out", path="model", max_shard_size="5GB", dry_run=True)
    assert report.files.keys() == {"model.safetensors"}
    store.pull(tmp_path / "live", options=PullOptions(max_shard_size="5GB"))
    assert store._view.repository.chunk_cache is None
    remote = Store(RemoteDouble("units"), cache_bytes="5MB").make()
    assert remote._view.repository.chunk_cache is not None
    assert remote._view.repository.chunk_cache.nbytes == 5_000_000


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ("chunk_size", lambda store, bad: Store(f"{store.uri}-2", create=NewStore(chunk_size=bad))),
        ("cache_bytes", lambda store, bad: Store(store.uri, cache_bytes=bad)),
        ("max_staging_bytes", lambda s, bad: s.async_take(STATE, "x", max_staging_bytes=bad)),
        ("max_shard_size", lambda s, bad: s["step_1"].export("/none", max_shard_size=bad)),
        ("max_shard_size", lambda _, bad: PullOptions(max_shard_size=bad)),
        (
            "memory_budget_bytes",
            lambda s, bad: s["step_1"].read_object("model/w", memory_budget_bytes=bad),
        ),
        ("keep_within", lambda _, bad: Retention(keep_within=bad)),
        ("grace", lambda s, bad: s.gc(grace=bad)),
        ("gc", lambda s, bad: s.configure(gc=bad)),
        ("timeout", lambda s, bad: s.take(STATE, "x", timeout=bad)),
        ("timeout", lambda s, bad: s.wait_mirrored(bad)),
        ("interval", lambda s, bad: next(s.follow("/none", interval=bad))),
        ("within", lambda s, bad: on_preemption(s, STATE, within=bad)),
    ],
)
@pytest.mark.parametrize(("bad", "error"), [("many", ValueError), ([1], TypeError)])
def test_each_says_what_it_takes(
    store: Store,
    option: str,
    call: Callable[[Store, Any], object],
    bad: object,
    error: type[Exception],
) -> None:
    with pytest.raises(error, match=rf"^{option}.* is a .*; got"):
        call(store, bad)
    assert [s.name for s in store.snapshots()] == ["step_1"]


def test_numbers_of_numpy(store: Store, tmp_path: Path) -> None:
    two, second = np.int64(2), np.float32(1.5)
    options: dict[str, Any] = {"threads": two, "timeout": np.int32(60), "max_pending": two}
    assert Retention(keep_last=two, keep_every=np.uint8(5)) == Retention(keep_last=2, keep_every=5)  # type: ignore[arg-type]
    assert Retention(keep_best=("loss", two)) == Retention(keep_best=("loss", 2))  # type: ignore[arg-type]
    assert Retention(thin={"optim": two}) == Retention(thin={"optim": 2})  # type: ignore[dict-item]
    assert seconds_of("grace", second) == 1.5
    assert bytes_of("most", two) == 2
    size: Any = np.int64(1 << 16)
    assert (
        Store(tmp_path / "small", create=NewStore(chunk_size=size), threads=two).make().chunk_size
        == 1 << 16
    )  # type: ignore[arg-type]
    taken = store.async_take(STATE, "step_2", metadata={"step": np.int64(2)}, **options).wait()
    assert taken.metadata.user == {"step": 2}
    assert taken.read_object("model/w", index=two) == 2.0  # type: ignore[arg-type]
    assert taken["model/w"][np.int8(-1) :] == 99_999.0
    assert store.check(sample=0.5, seed=two).seed == 2  # type: ignore[arg-type]
    store.gc(recode_after=two, repack=np.float32(0.5), dry_run=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [True, -1, 1.5, float("nan"), "3", b"3", np.int64(-1), [3]])
def test_what_counts_nothing(store: Store, number: Any) -> None:
    for use in (
        lambda: Retention(keep_last=number),
        lambda: Retention(keep_every=number),
        lambda: Retention(keep_best=("loss", number)),
        lambda: Retention(thin={"optim": number}),
        lambda: Store("never", threads=number),
        lambda: PullOptions(keep=number),
        lambda: store.take(STATE, "new", threads=number),
        lambda: store.async_take(STATE, "new", max_pending=number),
        lambda: store.gc(recode_after=number, dry_run=True),
    ):
        with pytest.raises(ValueError, match=r"a whole number from|at least one snapshot"):
            use()
    assert [s.name for s in store.snapshots()] == ["step_1"]


@pytest.mark.parametrize("size", [-1, float("nan"), "5 apples", [5]])
def test_the_bound_of_a_cache_is_checked_at_once(size: Any) -> None:
    """Not only once the store is there."""
    with pytest.raises((ValueError, TypeError), match="cache_bytes is a number of bytes"):
        Store("memory://never-made", cache_bytes=size)
