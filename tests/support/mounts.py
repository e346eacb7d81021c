"""What only root can set up: small file systems, and children that run as another user."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.faults import in_child

NOBODY = 65534


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a few bytes on a folder, or skip the test."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield folder


def fill(disk: Path, leave: int = 0) -> None:
    """Fill a disk but for some bytes."""
    with (disk / "fill").open("ab", buffering=0) as f:
        with suppress(OSError):
            while True:
                f.write(bytes(4096))
        f.truncate(f.tell() - leave)


@contextmanager
def ext4(folder: Path, size: str) -> Iterator[Path]:
    """Mount one of ext4, which reserves nothing for root, from a file beside the folder."""
    with disk_image(folder, "ext4", int(size)) as place:
        yield place


@contextmanager
def disk_image(folder: Path, kind: str, nbytes: int) -> Iterator[Path]:
    """Mount a new file system of a kind from a file beside the folder, or skip the test."""
    needs_root()
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs the command mkfs.{kind}")
    image = folder.with_name(f"{folder.name}.{kind}")
    with image.open("wb") as file:
        file.truncate(nbytes)
    options = ["-q", "-m", "0", "-F"] if kind == "ext4" else ["-q"]
    subprocess.run([f"mkfs.{kind}", *options, str(image)], check=True, capture_output=True)
    with mounted(folder, "-o", "loop", str(image)):
        yield folder


@contextmanager
def bindfs(below: Path, folder: Path, options: str = "", *more: str) -> Iterator[Path]:
    """Mount a folder once more, as the client of another host would, or skip the test.

    Args:
        below: The folder.
        folder: Where to mount it, which is made.
        options: Such as ``attr_timeout=5``: for how long attributes are cached, in seconds.
        more: Options of the command itself.
    """
    given = ["-o", options] if options else []
    with fuse_mounted(folder, "bindfs", *given, *more, str(below)):
        yield folder


@contextmanager
def fuse_mounted(folder: Path, command: str, *arguments: str) -> Iterator[None]:
    """Mount a file system by a command of its own, or skip the test."""
    needs_root()
    folder.mkdir(exist_ok=True)
    if shutil.which(command) is None:
        pytest.skip(f"needs the command {command}")
    done = subprocess.run(
        [command, *arguments, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount something on a folder, or skip the test."""
    needs_root()
    folder.mkdir(exist_ok=True)
    if shutil.which("mount") is None:
        pytest.skip("needs the command mount")
    command = ["mount", *arguments, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def let_others_in(folder: Path) -> None:
    """Let other users look into a test's folder, and change nothing where they may already."""
    for place in (folder, *folder.parents[:3]):  # as many as pytest makes, at most
        place.chmod(stat.S_IMODE(place.stat().st_mode) | 0o055)


def as_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Run some work in a child of another user, who may look into the test's folder."""
    needs_root()
    own = tmp_path / "of-nobody"
    own.mkdir(exist_ok=True)
    os.chown(own, NOBODY, NOBODY)
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(own / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own / "config"))
    let_others_in(tmp_path)

    def as_another() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()

    assert in_child(as_another) == 0
