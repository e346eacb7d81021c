"""Copies that are killed, cut off, or passed by collectors, at each call of either side.

Nothing that is committed is lost on either side, what is copied is equal to the bit, and a repeat
goes on where the copy stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from casnap import NewStore, Store
from casnap.backends import MemoryBackend
from casnap.errors import CasnapError, SnapshotNotFoundError, UnavailableError
from tests.support.copies import assert_copied, copy_in_parts, filled
from tests.support.faults import (
    CHUNK,
    WRITING_CALLS,
    backend_faults,
    memory_folder,
    stop,
    take,
    while_stopped,
)
from tests.support.faulty import Fault, FaultyBackend, fail, lose_answer
from tests.support.sweep import sweep

pytestmark = pytest.mark.sweep

Report = Callable[[str, object], None]
ALL = {"step_0", "step_1", "step_2"}
# The first snapshot takes three parts, each other one two.
PART = 2 * CHUNK


@pytest.fixture(scope="module")
def stores() -> Iterator[tuple[Path, Path]]:
    """Return a store of three snapshots, and one of another snapshot; each case works on copies."""
    with memory_folder() as folder:
        filled(folder / "source")
        take(Store(folder / "destination", create=NewStore(chunk_size=CHUNK)), 8)
        yield folder / "source", folder / "destination"


def fresh(stores: tuple[Path, Path]) -> tuple[Path, Path]:
    copies = []
    for place in stores:
        copy = place.parent / f"{place.name}-copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place, copy)
        copies.append(copy)
    return copies[0], copies[1]


Collect = Callable[[Path, Path, float], None]


def collect_destination(_source: Path, destination: Path, repack: float) -> None:
    Store(destination).gc(grace=0, repack=repack, recode_after=None)


def collect_both(source: Path, destination: Path, repack: float) -> None:
    for place in (source, destination):
        Store(place).gc(grace=0, repack=repack, recode_after=None)


def delete_at_source(source: Path, _destination: Path, repack: float) -> None:
    """Delete a snapshot that is copied now, or soon, or was."""
    store = Store(source).make()
    with suppress(SnapshotNotFoundError):
        store.delete("step_1")
    store.gc(grace=0, repack=repack, recode_after=None)


def delete_at_destination(_source: Path, destination: Path, repack: float) -> None:
    """Delete what was copied: the next snapshot shares its subtrees, and must not rely on it."""
    store = Store(destination).make()
    for snapshot in store.snapshots():
        if snapshot.name in ALL:
            store.delete(snapshot.name)
    store.gc(grace=0, repack=repack, recode_after=None)


MEANWHILE = [
    pytest.param(collect_destination, marks=pytest.mark.slow),
    collect_both,
    pytest.param(delete_at_source, marks=pytest.mark.slow),
    delete_at_destination,
]


def assert_survives(source: Path, destination: Path, meanwhile: Collect) -> None:
    names = {s.name for s in Store(source).snapshots()}
    assert names >= ALL - ({"step_1"} if meanwhile is delete_at_source else set())
    copy_in_parts(source, destination, PART)
    assert_copied(source, destination)
    assert Store(destination)["step_8"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_collected_while_it_stands_still(
    stores: tuple[Path, Path], meanwhile: Collect, record_property: Report
) -> None:
    """Without grace, at either side, by another process, after any call that writes."""
    for k in sweep(3):
        source, destination = fresh(stores)
        stopped, status = while_stopped(
            partial(copy_in_parts, source, destination, PART),
            backend_faults(k, stop, names=WRITING_CALLS, after=True),
            partial(meanwhile, source, destination, 1.0),
        )
        assert status == 0
        assert_survives(source, destination, meanwhile)
        if not stopped:
            record_property("cases", k)
            print(f"{meanwhile.__name__}: {k} collections")
            return


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("act", [fail(UnavailableError), lose_answer()], ids=["cut", "lost"])
def test_a_link_that_is_cut(
    tmp_path: Path, side: str, act: Callable[[object], object], record_property: Report
) -> None:
    """From some call on nothing works. Later a repeat sends the rest alone."""
    filled(MemoryBackend(f"{tmp_path}/source"))
    whole = copy_in_parts(MemoryBackend(f"{tmp_path}/source"), f"memory:/{tmp_path}/whole", PART)
    sent = []
    for k in sweep(2):
        source = FaultyBackend(MemoryBackend(f"{tmp_path}/source"))
        destination = FaultyBackend(MemoryBackend(f"{tmp_path}/{k}"))
        Store(destination, create=NewStore(chunk_size=CHUNK)).make()
        broken = source if side == "source" else destination
        calls = ("write", "put_if_absent") if side == "destination" else ("read_into", "read")
        with broken.during(Fault(act, calls, skip=k, times=None)) as (fault,):
            try:
                copy_in_parts(source, destination, PART)
            except CasnapError:
                assert fault.struck
        before = {s.name for s in Store(destination).snapshots()}
        report = copy_in_parts(source, destination, PART)
        assert {*report.copied, *report.present} == ALL
        assert set(report.present) >= before
        sent.append(report.sent_bytes)
        assert_copied(source, destination)
        if not fault.struck:
            break
    # The later it was cut, the less remains; at the end nothing.
    assert sent[-1] == 0
    assert all(a >= b - CHUNK for a, b in pairwise(sent))
    assert max(sent) <= whole.sent_bytes + CHUNK
    record_property("cases", len(sent))
