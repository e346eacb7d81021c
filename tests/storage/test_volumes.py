"""File systems that are not like a disk of one's own: they fail, give files to others, lack links.

Another user's store, too: what can be read of it, and what the system says where nothing can.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import casnap.files.exporting
import casnap.files.to_safetensors
import casnap.maintenance.check
import casnap.serving.pull
import casnap.transfer.copy  # noqa: F401 - before any fork: another user may not read the sources
from casnap import Snapshot, StateDict, Store
from casnap.cli import cli
from casnap.errors import (
    BackendError,
    CasnapError,
    NotAStoreError,
    SnapshotNotFoundError,
    StorageFullError,
    StoreError,
)
from tests.support.faults import files, in_child
from tests.support.mounts import NOBODY, as_nobody, needs_root
from tests.support.volumes import volume

SQUASHED = 4242
STATE = {"s": StateDict(x=torch.arange(100_000))}


def run(*arguments: object) -> str:
    """Run the command, which must succeed."""
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def give(folder: Path, user: int) -> None:
    """Give a folder and all in it to another user."""
    needs_root()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)


def failure(*arguments: object) -> str:
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 1, done.output
    return done.output


# --- what cannot be looked at is not "nothing" -------------------------------------------------


def looks(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the looks at a store and at a snapshot of it."""
    return {
        "latest": lambda: Store(folder).latest(),
        "latest of a view": lambda: Store(folder / "run").latest(),
        "latest of what must be there": lambda: Store(folder, create=False).latest(),
        "contains": lambda: "run/step_1" in Store(folder),
        "snapshot": lambda: Snapshot(folder / "run/step_1"),
        "take": lambda: Snapshot.take(folder / "run/step_2", STATE),
        "check": lambda: Store(folder).check(),
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "EIO") for name in ("store", "casnap-store", "casnap.json", "roots")),
        ("store", "ESTALE"),
        ("casnap-store", "ETIMEDOUT"),
        ("casnap.json", "ENOTCONN"),
        ("roots", "EACCES"),
    ],
)
def test_a_place_that_cannot_be_looked_at(tmp_path: Path, name: str, code: str) -> None:
    """It was taken for no store: the loop of a training then began the run anew."""
    number = getattr(errno, code)
    with volume(tmp_path / "volume") as disk:
        folder = disk.path / "store"
        Store(folder).take(STATE, "run/step_1")
        before = files(disk.below)
        disk.fail(name, number)
        for what, look in looks(folder).items():
            with pytest.raises(CasnapError) as caught:
                look()
            assert not isinstance(caught.value, NotAStoreError | SnapshotNotFoundError), what
            is_damaged = (name, code) == ("casnap.json", "EIO") and "damaged" in str(caught.value)
            assert is_damaged or os.strerror(number) in str(caught.value), what
        assert os.strerror(number) in failure("show", folder / "run/step_1")
        disk.heal()
        assert files(disk.below) == before
        assert Store(folder).latest("run") is not None


def test_a_store_above_a_link_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """A link below a store is a name of it, if it has such names: it was passed over for that."""
    with volume(tmp_path / "volume") as disk:
        Store(disk.path / "store").take(STATE, "run/step_1")
        Store(tmp_path / "other").make()
        (disk.path / "store/run").rename(disk.path / "store/moved")
        (disk.path / "store/run").symlink_to(tmp_path / "other")
        assert Store(disk.path / "store/run").latest() is not None
        disk.fail("index", errno.EIO)
        disk.fail("roots", errno.EIO)
        with pytest.raises(BackendError, match=os.strerror(errno.EIO)):
            Store(disk.path / "store/run").latest()


def test_a_take_that_cannot_be_announced(tmp_path: Path) -> None:
    with volume(tmp_path / "volume") as disk:
        store = Store(disk.path / "store").make()
        disk.fail("tmp", errno.EIO)
        with pytest.raises(BackendError, match=os.strerror(errno.EIO)):
            store.take(STATE, "step_1")


@pytest.mark.parametrize("closed", ["", "casnap-store", "casnap-store/casnap.json"])
def test_what_another_user_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    Store(tmp_path / "store").take(STATE, "run/step_1")

    def work() -> None:
        for what, look in looks(tmp_path / "store").items():
            with pytest.raises(CasnapError, match="Permission denied") as caught:
                look()
            assert not isinstance(caught.value, NotAStoreError | SnapshotNotFoundError), what
        assert "Permission denied" in failure("ls", tmp_path / "store/run")

    needs_root()
    (tmp_path / "store" / closed).chmod(0o600 if closed.endswith("json") else 0o700)
    as_nobody(tmp_path, monkeypatch, work)


def test_a_closed_store_where_every_user_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can have put it there, so it must not stop the users of all folders below."""
    place = tmp_path / "scratch"
    place.mkdir()
    Store(place).take(STATE, "run/step_1")
    give(place, 1)
    (place / "casnap-store").chmod(0o700)
    place.chmod(0o1777)

    def work() -> None:
        assert Snapshot.take(place / "me/step_1", STATE).store.uri == str(place / "me")
        assert "casnap skips it" in caplog.text
        with pytest.raises(CasnapError, match="Permission denied"):
            Snapshot.take(place / "step_1", STATE)

    as_nobody(tmp_path, monkeypatch, work)


# --- another user's store ----------------------------------------------------------------------


def test_all_of_another_users_store_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Python, and by the command, which has no other way to name a snapshot than its path."""
    needs_root()
    store, own = tmp_path / "store", tmp_path / "of-nobody"
    Store(store).take({"model": StateDict(x=torch.arange(100_000.0))}, "run/step_1")

    def work() -> None:
        other = Store(store / "run")
        latest = other.latest()
        assert latest is not None
        latest.restore({"model": StateDict(x=torch.zeros(100_000))})
        assert Store(store).check().ok
        assert "step_1" in run("ls", store / "run")
        assert "model" in run("show", store / "run/step_1")
        run("du", store / "run")
        run("check", store / "run/step_1")
        run("diff", store / "run/step_1", store / "run/step_1")
        run("export", store / "run/step_1", own / "x.safetensors")
        run("cp", store / "run/step_1", own / "copy")
        run("cp", store / "run", own / "copies")
        run("pull", store / "run/step_1", own / "live")
        assert [s.name for s in Store(own / "copy").snapshots()] == ["run/step_1"]
        with pytest.raises(StoreError, match=rf"uid 1.*Store\('{store}'\)"):
            other.take(STATE, "step_2")

    give(store, 1)
    as_nobody(tmp_path, monkeypatch, work)


def test_a_store_that_somebody_put_above_a_folder_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where every user may write. Nobody is to go on from weights that somebody put there."""
    needs_root()
    place = tmp_path / "scratch"
    Store(place).take({"s": StateDict(x=torch.zeros(3))}, "me/run/step_9")
    Store(place).take(STATE, "them/step_1")
    give(place, 1)
    place.chmod(0o1777)
    give(place / "me", NOBODY)

    def work() -> None:
        with pytest.raises(NotAStoreError):
            Snapshot(place / "me/run/step_9")
        assert Store(place / "me/run").latest() is None
        assert "casnap skips it" in caplog.text
        assert Snapshot.take(place / "me/run/step_1", STATE).store.uri == str(place / "me/run")
        assert Snapshot(place / "them/step_1").store.uri == str(place)
        assert "it is read, since the path leads to it" in caplog.text
        assert "them" in run("show", place / "them/step_1")

    as_nobody(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("modes", [True, False])
def test_a_volume_that_gives_all_files_to_one_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, modes: bool
) -> None:
    """As access points of EFS, exports with all_squash, and CIFS, which has no modes either."""
    with volume(tmp_path / "volume", owner=SQUASHED, modes=modes) as disk:
        for step in range(3):
            snapshot = Snapshot.take(disk.path / f"ckpts/step_{step}", STATE)
        assert snapshot.store.uri == str(disk.path / "ckpts")
        Store(disk.path / "all").make()
        for step in range(2):
            snapshot = Snapshot.take(disk.path / f"all/run/step_{step}", STATE)
            assert snapshot.store.uri == str(disk.path / "all")
        view = Store(disk.path / "all/run")
        view.take({"s": StateDict(x=torch.ones(3))}, "step_2")
        assert torch.equal(
            Snapshot(disk.path / "all/run/step_1").read_object("s/x"), STATE["s"]["x"]
        )
        view.delete("step_0")
        view.gc(grace=0)
        assert view.check(data=True).ok
        run("cp", disk.path / "ckpts/step_0", disk.path / "all/run/copied")
        assert {s.name for s in view.snapshots()} == {"step_1", "step_2", "copied"}
        left = [n for n in files(disk.below) if "/tmp/" in n or n.endswith("/tmp")]
        assert left == []
    assert not caplog.text


def test_a_making_that_was_cut_off_on_such_a_volume(tmp_path: Path) -> None:
    with volume(tmp_path / "volume", owner=SQUASHED) as disk:
        (disk.path / "ckpts/casnap-store/tmp").mkdir(parents=True)
        assert Snapshot.take(disk.path / "ckpts/step_0", STATE).store.uri == str(
            disk.path / "ckpts"
        )


def test_a_store_of_another_user_is_not_ours_for_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to it can make files there, and these are of their own."""
    needs_root()
    store = Store(tmp_path / "store").make()
    store.take(STATE, "run/step_1")
    give(tmp_path / "store", 1)
    for path in (tmp_path / "store").rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (tmp_path / "store").chmod(0o755)
    before = files(tmp_path / "store")

    def work() -> None:
        with pytest.raises(StoreError, match="of another user"):
            Snapshot.take(tmp_path / "store/run/step_2", STATE)

    as_nobody(tmp_path, monkeypatch, work)
    assert files(tmp_path / "store") == before


# --- what the system says, and what to do about it ----------------------------------------------


def test_a_file_system_without_hard_links(tmp_path: Path) -> None:
    with volume(tmp_path / "volume", links=False) as disk:
        for make in (
            Store(disk.path / "a").make,
            lambda: Snapshot.take(disk.path / "b/step", STATE),
        ):
            with pytest.raises(
                BackendError, match=r"has no hard links .*another disk or in a bucket"
            ):
                make()
        # What was copied there as a folder is read.
        Store(tmp_path / "c").take(STATE, "step")
        subprocess.run(["cp", "-r", tmp_path / "c", disk.path / "c"], check=True)
        assert Store(disk.path / "c").check(data=True).ok


def test_a_bound_on_the_size_of_files(tmp_path: Path) -> None:
    """``ulimit -f`` is no full disk: nothing is freed, and no free space is told."""
    store = Store(tmp_path / "store").make()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        with pytest.raises(BackendError, match="ulimit -f") as caught:
            store.take(STATE, "step_1")
        assert not isinstance(caught.value, StorageFullError)
        assert "are free" not in str(caught.value)

    assert in_child(work) == 0
    assert store.latest() is None


def test_a_read_only_file_system(tmp_path: Path) -> None:
    needs_root()
    store = tmp_path / "store"
    Store(store).take(STATE, "run/step_1")
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "--bind", "-o", "ro", store, folder], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(mount.stderr)
    try:
        assert torch.equal(Snapshot(folder / "run/step_1").read_object("s/x"), STATE["s"]["x"])
        with pytest.raises(BackendError, match="mounted read-only") as caught:
            Store(folder).take({"s": StateDict(x=torch.ones(9))}, "run/step_2")
        assert "chown" not in str(caught.value)
    finally:
        subprocess.run(["umount", folder], check=True)


_NO_MEMORY = """
import resource, sys, torch
from casnap import StateDict, Store
from casnap.errors import UnavailableError
import casnap.take.take
store = Store(sys.argv[1]).make()
state = {"s": StateDict(x=torch.ones(5))}
torch.ones(1000) @ torch.ones(1000)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + (40 << 20), resource.RLIM_INFINITY))
try:
    store.take(state, "step")
except UnavailableError as e:
    assert e.reason == "exhausted", e
    print(e)
snapshot = store.try_take(state, "step")
"""


def test_no_memory_for_the_buffers_of_a_take(tmp_path: Path) -> None:
    """It is the host that lacks something, not the state that is wrong."""
    command = [sys.executable, "-c", _NO_MEMORY, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no memory for a buffer" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_quota_says_nothing_of_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from casnap.backends.local import backend

    store = Store(tmp_path / "store").make()

    def refuse(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(backend, "write_at", refuse)
        with pytest.raises(StorageFullError, match="no quota left") as caught:
            store.take({"s": StateDict(x=torch.ones(200_000))}, "step")
    assert "are free" not in str(caught.value)
