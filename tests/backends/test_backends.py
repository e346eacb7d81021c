"""Every backend passes the suite that the package ships, bare and behind a faultless wrapper."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import casnap.backends.local_files.durability
from casnap.backends import Backend, LocalBackend, MemoryBackend
from casnap.backends.local_files.system_errors import translated
from casnap.errors import BackendError, StorageFullError
from casnap.testing.backend_suite import (
    BackendSuite,
    BrokenBackendSuite,
    Opener,
    SharedBackendSuite,
)
from tests.support.faults import files, in_child, system_faults


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    return disk_path


class TestMemory(BackendSuite):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return MemoryBackend(str(tmp_path))


class TestLocal(SharedBackendSuite, BrokenBackendSuite):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return partial(LocalBackend, tmp_path)

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Backend:
        """Return one whose folders are files."""
        (tmp_path / "a").touch()
        (tmp_path / "casnap-store").mkdir()
        (tmp_path / "casnap-store/a").touch()
        (tmp_path / "casnap-store/tmp").touch()
        return LocalBackend(tmp_path)


# --- what only files do -----------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this process", "another process"])
def test_a_file_being_written_is_not_tidied_away(local: LocalBackend, elsewhere: bool) -> None:
    """Its lock says that its writer lives, however long it stands still."""
    at_work, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        at_work.set()
        assert go_on.wait(300)

    def tidy() -> None:
        assert LocalBackend(local.folder).tidy(0) == 0

    with system_faults(0, stand_still, ["fsync"]):
        writer = threading.Thread(target=local.write, args=("packs/ab/x", b"content"))
        writer.start()
        assert at_work.wait(300)
        if elsewhere:
            assert in_child(tidy) == 0
        else:
            tidy()
        assert len(local.names("tmp")) == 1
        go_on.set()
        writer.join()
    assert local.read("packs/ab/x") == b"content"
    assert local.names("tmp") == []


def test_what_is_left_is_tidied_away_by_age(local: LocalBackend) -> None:
    """Only what has a temporary file's name, and only when it is old enough."""
    local.write("packs/ab/x", b"content")
    left = local.folder / "casnap-store/tmp" / ("0" * 24)
    foreign = local.folder / "casnap-store/tmp" / "somebody's"
    left.write_bytes(b"12345")
    foreign.write_bytes(b"12345")
    assert local.tidy(60) == 0
    os.utime(left, (0, 0))
    os.utime(foreign, (0, 0))
    assert local.tidy(60) == 5
    assert files(local.folder) == {"casnap-store/packs/ab/x", "casnap-store/tmp/somebody's"}


def test_another_thread_that_syncs_in_between(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has synced the folder before the name was in it, so the writer's sync does so again."""
    seen: list[set[str]] = []
    real = casnap.backends.local_files.durability.sync_folder

    def sync_folder(folder: str, **options: object) -> None:
        if folder == str(local.folder / "casnap-store/packs/ab"):
            seen.append({path.name for path in Path(folder).iterdir()})
        real(folder, **options)

    monkeypatch.setattr(casnap.backends.local_files.durability, "sync_folder", sync_folder)
    with system_faults(0, local.sync, ["fsync"]):
        local.write("packs/ab/x", b"content")
    local.sync()
    assert seen == [set(), {"x"}]


def test_a_full_disk_is_said_to_whoever_writes() -> None:
    with (
        pytest.raises(StorageFullError, match=r"whole\. Free some space, then try again"),
        translated("roots/0/1"),
    ):
        raise OSError(errno.ENOSPC, "full")


def test_a_key_that_exists_is_not_overwritten(local: LocalBackend) -> None:
    local.write("packs/ab/x", b"first")
    with pytest.raises(BackendError, match="packs/ab/x exists already"):
        local.write("packs/ab/x", b"second")
    with pytest.raises(BackendError, match="packs/ab/x"):
        local.copy("packs/ab/x", "packs/ab/x")
    assert local.read("packs/ab/x") == b"first"


def test_markers_are_files(local: LocalBackend) -> None:
    local.mark("run/step_1/marker", b"here")
    assert (local.folder / "run/step_1/marker").read_bytes() == b"here"
    (local.folder / "run/mine").touch()
    local.unmark(["run/step_1/marker"], lambda *_: True)
    assert files(local.folder) == {"run/mine"}
    assert not (local.folder / "run/step_1").exists()


def test_a_marker_that_another_removed(local: LocalBackend) -> None:
    """Folders that a marker needed and that are gone do not keep others from being durable."""
    local.mark("run/step_1/marker", b"here")
    LocalBackend(local.folder).unmark(["run/step_1/marker"], lambda *_: True)
    local.sync()
    assert local.put_if_absent("roots/0/0", b"root")


@pytest.mark.slow
def test_a_suite_that_fails_says_what_it_compared(tmp_path: Path) -> None:
    """For those who write a backend: pytest rewrites the asserts of the suite as it does theirs."""
    module = tmp_path / "test_mine.py"
    module.write_text(
        "import pytest\n"
        "from casnap.backends import MemoryBackend\n"
        "from casnap.testing.backend_suite import BackendSuite\n"
        "class Mine(MemoryBackend):\n"
        "    def size(self, key):\n"
        "        return super().size(key) and 7\n"
        "class TestMine(BackendSuite):\n"
        "    @pytest.fixture\n"
        "    def backend(self, tmp_path):\n"
        "        return Mine(str(tmp_path))\n"
    )
    arguments = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path, module]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-k", "what_is_written_is_read and 4095"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 1, done.stdout
    assert "assert 7 == 4095" in done.stdout
