"""A repair beside takes and collectors without grace: files that go meanwhile do no harm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from casnap import Store
from casnap.backends import LocalBackend
from casnap.format.records import pack_key
from tests.support.damaged import change, flip, record_of, repair
from tests.support.faults import CHUNK, assert_store, content, elsewhere, memory_folder, take
from tests.support.faulty import Call, Fault, FaultyBackend
from tests.support.sweep import sweep


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with segments to merge and a damaged chunk; do not change it."""
    path = tmp_path_factory.mktemp("damaged") / "store"
    store = Store(path, chunk_size=CHUNK)
    for step in range(4):
        take(store, step)
    place = record_of(path, content(3)["weight"][: CHUNK // 4])[1]
    change(path / "casnap-store" / pack_key(place.pack), flip(place.offset + 11))
    return path


def churn(path: Path) -> None:
    """Rewrite all segments and delete the old ones."""
    store = Store(path)
    store.delete("step_0")
    take(store, 0)
    store.gc(grace=0, repack=0, recode_after=None)


@pytest.mark.sweep
@pytest.mark.parametrize("calls", ["read", "size", "read_into", "write", "put_if_absent"])
def test_repair_beside_a_collector_without_grace(damaged: Path, calls: str) -> None:
    for number in sweep(2 if calls != "read" else 1):
        with memory_folder() as folder:
            path = shutil.copytree(damaged, folder / "store")
            backend = FaultyBackend(LocalBackend(path))

            def act(call: Call, path: Path = path) -> object:
                elsewhere(churn)(path)
                return call.go()

            fault = Fault(act, calls, "index/*" if calls == "read" else "*", skip=number)
            store = Store(backend)
            with backend.during(fault):
                store.repair()
            if not fault.struck:
                return
            assert {d.kind for d in repair(path).remaining} <= {"lost"}
            Store(path).delete("step_3")
            assert_store(path, {0, 1, 2})
            assert Store(path).check(data=True).ok
