"""A store in a sticky folder: users delete only their own files, and the work goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from casnap import NewStore, Store
from casnap.cli import cli
from tests.support.faults import CHUNK, assert_store, files, in_child, take
from tests.support.mounts import NOBODY, let_others_in, needs_root

OTHER = 54321


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    needs_root()
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o3777)
    for user in (NOBODY, OTHER):
        (tmp_path / str(user)).mkdir()
        os.chown(tmp_path / str(user), user, user)
    let_others_in(tmp_path)
    return folder


@pytest.fixture
def as_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(user: int, work: Callable[[], object]) -> None:
        monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / str(user)))

        def as_them() -> None:
            os.setgid(user)
            os.setuid(user)
            work()

        assert in_child(as_them) == 0

    return run


def test_what_is_of_others_stays_and_is_told(
    sticky: Path, as_user: Callable[[int, Callable[[], object]], None]
) -> None:
    def make() -> None:
        store = Store(sticky, create=NewStore(chunk_size=CHUNK))
        for step in range(3):
            take(store, step)

    def replace() -> None:
        store = Store(sticky)
        take(store, 3)
        take(store, 4)
        for step in (1, 3):
            store.delete(f"step_{step}")
        before = files(sticky, "packs")
        report = store.gc(grace=0, repack=0)
        assert report.deleted_packs > 0
        assert report.freed_bytes > 0
        assert report.refused
        assert report.refused.keys() <= files(sticky, "packs") | files(sticky, "index")
        assert all("Operation not permitted" in why for why in report.refused.values())
        assert len(before - files(sticky, "packs")) == report.deleted_packs
        again = store.gc(grace=0, repack=0)
        assert again.refused.keys() == report.refused.keys()
        assert (again.deleted_packs, again.freed_bytes, again.fence) == (0, 0, None)
        done = CliRunner().invoke(cli, ["gc", str(sticky), "--grace", "0"])
        assert done.exit_code == 0, done.output
        assert f"{len(report.refused)} files could not be deleted" in done.output
        assert "Operation not permitted" in done.output
        assert_store(sticky, {0, 2, 4})

    def collect() -> None:
        report = Store(sticky).gc(grace=0, repack=0)
        assert report.deleted_packs > 0
        assert report.refused == {}
        assert_store(sticky, {0, 2, 4})

    as_user(NOBODY, make)
    # What one user is writing just now, or left half-written.
    left = sticky / "casnap-store/tmp" / ("a" * 24)
    left.write_bytes(b"half")
    left.chmod(0o600)
    os.chown(left, NOBODY, NOBODY)
    os.utime(left, (0, 0))
    as_user(OTHER, replace)
    assert left.exists()
    as_user(NOBODY, collect)
    assert not left.exists()
