"""Recoding, and copies that send deltas, cut off or held up at any call, lose nothing."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from casnap import StateDict, Store
from casnap.errors import StorageFullError, UnclearCommitError
from tests.support.faults import (
    backend_faults,
    disk_full,
    in_child,
    kill,
    stop,
    system_faults,
    while_stopped,
)
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

CHUNK = 64 << 10
ELEMENTS = CHUNK
COUNT = 6


def weights(step: int) -> torch.Tensor:
    """Return what a run has at a step: a few elements differ from those at the step before."""
    generator = torch.Generator().manual_seed(1)
    bits = (torch.randn(ELEMENTS, generator=generator) * 0.02).to(torch.bfloat16).view(torch.int16)
    for seed in range(step + 1):
        chosen = torch.rand(ELEMENTS, generator=generator.manual_seed(seed)) < 0.01
        bits[chosen] += 1
    return bits.view(torch.bfloat16)


def take(store: Store, step: int, name: str) -> None:
    store.take({"m": StateDict(w=weights(step), step=step)}, name)


def assert_holds(path: Path, steps: dict[str, int]) -> None:
    store = Store(path)
    for name, step in steps.items():
        state = {"m": StateDict(w=torch.zeros(ELEMENTS, dtype=torch.bfloat16), step=-1)}
        store[name].restore(state)
        assert torch.equal(state["m"]["w"].view(torch.int16), weights(step).view(torch.int16))
    assert store.check(data=True).ok


ALL = {f"run/{step}": step for step in range(COUNT)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a store of which the older snapshots are recoded, the newer ones are to be."""
    store = Store(tmp_path / "base", chunk_size=CHUNK, codec="auto").make()
    for step in range(4):
        take(store, step, f"run/{step}")
    store.gc(grace=0)
    for step in range(4, COUNT):
        take(store, step, f"run/{step}")
    return tmp_path / "base"


def fresh(base: Path) -> Path:
    copy = base.with_name("copy")
    for folder in (copy, base.with_name("there")):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, copy)
    return copy


def collect(path: Path) -> None:
    Store(path).gc(grace=0, recode_after=1)


def send(path: Path) -> None:
    there = Store(path.with_name("there"), chunk_size=CHUNK, codec="zstd").make()
    for name in ALL:
        Store(path).copy(name, to=there)


WORKS = pytest.mark.parametrize("work", [collect, send])


def end(path: Path, work: Callable[[Path], None]) -> None:
    """Do the work again, which was cut off, and collect what it left."""
    there = path.with_name("there")
    work(path)
    Store(path).gc(grace=0)
    assert_holds(path, ALL)
    if work is send:
        Store(there).gc(grace=0)
        assert_holds(there, ALL)


@pytest.mark.parametrize("faults", [backend_faults, system_faults])
@WORKS
def test_killed_at_any_call(
    base: Path, work: Callable[[Path], None], faults: Callable[..., object]
) -> None:
    for k in sweep(times=16):
        copy = fresh(base)

        def killed(k: int = k, copy: Path = copy) -> None:
            with faults(k, kill):  # type: ignore[attr-defined]
                work(copy)

        ended = in_child(killed)
        assert_holds(copy, ALL)
        end(copy, work)
        if ended == 0:
            assert k > 0
            return


@WORKS
def test_a_disk_that_is_full_from_any_call_on(base: Path, work: Callable[[Path], None]) -> None:
    names = ["write", "writev", "pwrite", "pwritev", "posix_fallocate", "fsync", "fdatasync"]
    for k in sweep(times=8):
        copy = fresh(base)
        with system_faults(k, disk_full, names, lasting=True) as calls:
            try:
                work(copy)
            except StorageFullError:
                pass
            except UnclearCommitError as e:
                # The sync of a root failed: it is there.
                assert "was put" in str(e), e  # noqa: PT017 - else there may be no error
        assert_holds(copy, ALL)
        end(copy, work)
        if not calls.struck:
            assert k > 0
            return


def meanwhile(path: Path) -> None:
    """Do what undercuts chains: delete, take anew, take what is old, collect twice, and copy."""
    store = Store(path)
    for name in ("run/0", "run/2", "run/4"):
        store.delete(name)
    store.gc(grace=0, recode_after=1)
    take(store, 2, "again/2")
    store.delete("run/1")
    store.gc(grace=0, recode_after=0, repack=1.0)
    take(store, 0, "again/0")
    there = Store(path.with_name("there"), chunk_size=CHUNK, codec="zstd").make()
    for name in ("run/3", "run/5"):
        store.copy(name, to=there)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_held_up_at_any_call_while_others_delete_take_and_collect(
    base: Path, end: signal.Signals
) -> None:
    for k in sweep(times=16):
        copy = fresh(base)
        stopped, ended = while_stopped(
            partial(collect, copy), backend_faults(k, stop), partial(meanwhile, copy), end
        )
        assert ended == (-end if stopped and end == signal.SIGKILL else 0)
        if not stopped:
            assert k > 0
            return
        assert_holds(copy.with_name("there"), {"run/3": 3, "run/5": 5})
        kept = {"run/3": 3, "run/5": 5, "again/2": 2, "again/0": 0}
        assert_holds(copy, kept)
        for repack in (0.5, 1.0):
            Store(copy).gc(grace=0, repack=repack)
            assert_holds(copy, kept)
