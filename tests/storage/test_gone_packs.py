"""No take relies on a pack that is gone, cut off or damaged without saying so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from casnap import StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    DamagedError,
    PlaceError,
    UnavailableError,
)
from casnap.format.records import PackId, id_from_name, pack_key
from tests.support.damaged import change, flip, record_of
from tests.support.faults import CHUNK, assert_holds, content, files, in_child, take
from tests.support.faulty import Call, Fault, FaultyBackend
from tests.support.unavailable import EXHAUSTED
from tests.support.written import change_of, commit, put_next_root

FROZEN = content(0)["frozen"][: CHUNK // 4]
ALONE = FROZEN * 7 + 1
"""A chunk of all steps, and one of none."""


@pytest.fixture
def path(tmp_path: Path, cache_dir: Path) -> Path:
    """Return a store of two steps, whose index is cached."""
    for step in range(2):
        take(tmp_path / "store", step)
    return tmp_path / "store"


def whole_elsewhere(path: Path, step: int) -> None:
    """Check that a process that has cached nothing restores a step."""

    def work() -> None:
        os.environ["CASNAP_CACHE_DIR"] = str(path.parent / "no cache")
        assert_holds(Store(path)[f"step_{step}"], step)

    assert in_child(work) == 0


def pack_of(path: Path, raw: torch.Tensor = FROZEN) -> Path:
    return path / "casnap-store" / pack_key(record_of(path, raw)[1].pack)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


HARM = {"gone": Path.unlink, "cut off": cut, "empty": lambda file: os.truncate(file, 0)}


@pytest.mark.parametrize("harm", HARM)
def test_a_pack_that_is_harmed_before_a_take(
    path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    HARM[harm](pack_of(path))
    opened = Store(path)
    snapshot = take(opened, 2)
    assert snapshot.stats.new_bytes > FROZEN.nbytes
    assert "gone or cut off" in caplog.text
    whole_elsewhere(path, 2)
    # What was stored anew is relied on from then on.
    assert take(path, 3).stats.new_bytes < snapshot.stats.new_bytes
    whole_elsewhere(path, 3)


@pytest.mark.parametrize("harm", HARM)
def test_all_packs_are_harmed_before_a_take(path: Path, harm: str) -> None:
    """Those of nodes too: what the snapshot needs is all there is."""
    for key in files(path, "packs"):
        HARM[harm](path / "casnap-store" / key)
    # The table is what no take stores anew as a whole; it is cached here.
    take(path, 1, overwrite=True)
    whole_elsewhere(path, 1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO])
def test_a_pack_that_cannot_be_looked_at_is_not_taken_for_gone(path: Path, number: int) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    before = files(path)
    with mock.patch("casnap.backends.local.backend.stat_at", refuse), pytest.raises(PLACE_ERRORS):
        LocalBackend(path).size("casnap.json")

    def act(_call: Call) -> object:
        raise UnavailableError("too many open files", reason="exhausted")

    with pytest.raises(UnavailableError, match="too many"):
        take(Store(FaultyBackend(LocalBackend(path), Fault(act, "size", times=None))), 2)
    assert files(path) == before


# --- what one process has found damaged -------------------------------------------------------


def find_out(path: Path) -> None:
    with pytest.raises(DamagedError):
        assert_holds(Store(path)["step_0"], 0)


def harm(path: Path) -> tuple[Path, bytes]:
    """Damage a chunk; return the pack, and what it held."""
    place = record_of(path, FROZEN)[1]
    pack = path / "casnap-store" / pack_key(place.pack)
    whole = pack.read_bytes()
    change(pack, flip(place.offset + 11))
    return pack, whole


def places(path: Path) -> int:
    repository = Store(path)._view.repository
    return len(repository.index.find_all(repository.view(), record_of(path, FROZEN)[0]))


def test_what_a_process_found_damaged_it_stores_anew(path: Path) -> None:
    harm(path)
    take(path, 2)
    assert places(path) == 1
    find_out(path)
    take(path, 3)
    whole_elsewhere(path, 3)
    # It is known where it is whole, so it is stored anew only once.
    take(path, 4)
    assert places(path) == 2
    whole_elsewhere(path, 4)


@pytest.mark.parametrize("error", [EXHAUSTED, BackendError])
def test_what_cannot_be_read_is_no_damage(path: Path, error: Callable[[str], PlaceError]) -> None:
    def act(_call: Call) -> object:
        raise error("too many open files")

    key = str(pack_of(path).relative_to(path / "casnap-store"))
    backend = FaultyBackend(LocalBackend(path), Fault(act, "read_into", key, times=None))
    with pytest.raises(PLACE_ERRORS, match="too many open files"):
        Store(backend)["step_0"].restore({"state": StateDict(content(1))})
    take(path, 2)
    assert places(path) == 1


# --- a reader beside commits ------------------------------------------------------------------


def test_damage_is_told_though_commits_come_with_every_look(path: Path) -> None:
    pack, _ = harm(path)
    writer, most = Store(path), 60

    def act(call: Call) -> object:
        writer.tag("step_1", f"tag{fault.struck}")
        return call.go()

    fault = Fault(act, "read_into", str(pack.relative_to(path / "casnap-store")), times=most)
    snapshot = Store(FaultyBackend(LocalBackend(path), fault))["step_0"]
    with pytest.raises(DamagedError, match="differ"):
        snapshot.restore({"state": StateDict(content(1))})
    assert 0 < fault.struck < most


def test_what_moves_with_every_look_is_read(path: Path) -> None:
    """Each look comes too late: what it finds was copied elsewhere, and deleted, meanwhile."""
    moves, store = 15, Store(path)
    store.take({"s": StateDict(alone=ALONE)}, "alone")
    digest = record_of(path, ALONE)[0]

    def move(pack: bytes) -> None:
        with change_of(store) as session:
            raw = memoryview(bytearray(ALONE.numpy().tobytes()))
            session.new_packs.copy(digest, raw, is_node=False)
            root = commit(session)
        assert put_next_root(
            store._view.repository.backend, root, condemned={PackId(pack): root.seq}
        )
        assert store.gc(grace=0).deleted_packs

    def act(call: Call) -> object:
        pack = id_from_name(call.key.rpartition("/")[2])
        view = store._view.repository.view()
        if pack in {p.pack for p in store._view.repository.index.find_all(view, digest)}:
            looks.append(pack)
            if len(looks) <= moves:
                move(pack)
        return call.go()

    looks: list[bytes] = []
    fault = Fault(act, "read_into", "packs/*", times=None)
    snapshot = Store(FaultyBackend(LocalBackend(path), fault))["alone"]
    assert torch.equal(snapshot.read_object("s/alone"), ALONE)
    assert len(looks) == moves + 1
