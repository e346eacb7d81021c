"""File systems as clusters have them, mounted as several hosts would: one context manager for each.

Each gives the folders where one file system is mounted, one for each host. What a package or the
kernel lacks skips the test. All servers listen on loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.mounts import bindfs, disk_image, fuse_mounted, mounted, needs_root, tmpfs
from tests.support.ports import free_port

Mounts: TypeAlias = AbstractContextManager[list[Path]]
_MANY = 60
_MIB = 1 << 20


@contextmanager
def _image(kind: str, nbytes: int, folder: Path) -> Iterator[list[Path]]:
    with disk_image(folder / "a", kind, nbytes) as place:
        yield [place]


@contextmanager
def _memory(folder: Path) -> Iterator[list[Path]]:
    with tmpfs(folder / "a", "1G") as place:
        yield [place]


@contextmanager
def overlay(folder: Path) -> Iterator[list[Path]]:
    """Mount an overlay whose upper layer is a disk of its own."""
    with disk_image(folder / "disk", "ext4", 512 * _MIB) as disk:
        for name in ("lower", "upper", "work"):
            (disk / name).mkdir()
        options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        with mounted(folder / "a", "-t", "overlay", "-o", options, "overlay"):
            yield [folder / "a"]


@contextmanager
def _bindfs(caches: str, hosts: str, folder: Path, *options: str) -> Iterator[list[Path]]:
    """Mount a folder for each host, whose client keeps attributes, names and absent names."""
    (folder / "below").mkdir()
    names = ("attr_timeout", "entry_timeout", "negative_timeout")
    pairs = zip(names, caches.split(","), strict=True)
    timeouts = ",".join("=".join(pair) for pair in pairs)
    with ExitStack() as stack:
        yield [
            stack.enter_context(bindfs(folder / "below", folder / host, timeouts, *options))
            for host in hosts
        ]


@contextmanager
def _of_one_user(folder: Path) -> Iterator[list[Path]]:
    with _bindfs("1,1,0", "ab", folder, "--force-user=nobody", "--force-group=nogroup") as places:
        yield places


@contextmanager
def mergerfs(folder: Path) -> Iterator[list[Path]]:
    """Mount two folders as one, twice."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    branches = f"{folder}/one:{folder}/two"
    with ExitStack() as stack:
        for host in "ab":
            options = ("-o", "category.create=mfs,inodecalc=path-hash", branches)
            stack.enter_context(fuse_mounted(folder / host, "mergerfs", *options))
        yield [folder / "a", folder / "b"]


class Sshd:
    """A server of SFTP on loopback, for a key of its own.

    Args:
        folder: Where it has its keys.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        for name in ("host", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(key, check=True)
        self.port = free_port()
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\n"
            f"AuthorizedKeysFile {folder}/user.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
            "Subsystem sftp internal-sftp\nPermitRootLogin yes\n"
        )

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        config = str(self._folder / "sshd_config")
        log = str(self._folder / "log")
        command = [str(shutil.which("sshd")), "-D", "-f", config, "-E", log]
        self._server = subprocess.Popen(command, start_new_session=True)
        if not _until_it_answers(self.port):
            pytest.skip(f"sshd does not start: {(self._folder / 'log').read_text()}")

    def stop(self) -> None:
        """End it, and all that serves a client: the connections are closed."""
        assert self._server is not None
        for pid in _descendants(self._server.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.kill()
        self._server.wait()

    def mount(
        self, folder: Path, served: Path, caches: str = "dir_cache=no"
    ) -> AbstractContextManager[None]:
        """Mount a folder; the client connects again by itself.

        Args:
            folder: Where to mount it.
            served: The folder.
            caches: What the client keeps.
        """
        options = (
            f"IdentityFile={self._folder}/user,UserKnownHostsFile=/dev/null,LogLevel=ERROR,"
            f"StrictHostKeyChecking=no,reconnect,ServerAliveInterval=1,{caches}"
        )
        place = f"127.0.0.1:{served}"
        return fuse_mounted(folder, "sshfs", "-p", str(self.port), "-o", options, place)


def _descendants(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return [each for child in map(int, found) for each in (*_descendants(child), child)]


@contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    """Start a server of SFTP, or skip the test."""
    needs_root()
    for command in ("sshd", "sshfs", "ssh-keygen"):
        if shutil.which(command) is None:
            pytest.skip(f"needs the command {command}")
    server = Sshd(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def _sshfs(caches: str, folder: Path) -> Iterator[list[Path]]:
    """Mount a folder twice through SFTP."""
    (folder / "served").mkdir()
    with sshd(folder) as server, ExitStack() as stack:
        for host in "ab":
            stack.enter_context(server.mount(folder / host, folder / "served", caches))
        yield [folder / "a", folder / "b"]


class GlusterVolume:
    """A volume of GlusterFS, of one brick."""

    def __init__(self, folder: Path) -> None:
        self.name = f"casnap-{os.urandom(4).hex()}"
        (folder / "brick").mkdir()
        self.brick = folder / "brick"
        _gluster("volume", "create", self.name, f"{socket.gethostname()}:{self.brick}", "force")
        _gluster("volume", "start", self.name)

    def kill_brick(self) -> None:
        told = _gluster("volume", "status", self.name, "detail")
        pid = next(line.split(":")[1] for line in told.splitlines() if line.startswith("Pid"))
        os.kill(int(pid), signal.SIGKILL)

    def restart_brick(self) -> None:
        # The daemon does nothing as long as it has not noticed that the brick is gone.
        for _ in range(_MANY):
            _gluster("volume", "start", self.name, "force")
            told = _gluster("volume", "status", self.name, "detail")
            if re.search(r"Online\s*: Y", told):
                return
            time.sleep(1)

    def mount(self, folder: Path) -> AbstractContextManager[Path]:
        return mounted(folder, "-t", "glusterfs", f"127.0.0.1:/{self.name}")

    def delete(self) -> None:
        _gluster("volume", "stop", self.name, "force")
        _gluster("volume", "delete", self.name)


def _gluster(*arguments: str) -> str:
    command = ["gluster", "--mode=script", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def gluster_volume(folder: Path) -> Iterator[GlusterVolume]:
    """Make a volume, or skip the test; start glusterd if it does not run."""
    needs_root()
    if shutil.which("glusterd") is None:
        pytest.skip("needs the command glusterd")
    started = None
    if subprocess.run(["gluster", "pool", "list"], capture_output=True, check=False).returncode:
        command = ["glusterd", "--no-daemon", "-l", str(folder / "glusterd.log")]
        started = subprocess.Popen(command, start_new_session=True)
        for _ in range(_MANY):
            if not subprocess.run(
                ["gluster", "pool", "list"], capture_output=True, check=False
            ).returncode:
                break
            time.sleep(0.5)
    try:
        volume = GlusterVolume(folder)
        try:
            yield volume
        finally:
            volume.delete()
    finally:
        if started is not None:
            started.terminate()
            started.wait()


@contextmanager
def gluster(folder: Path) -> Iterator[list[Path]]:
    """Mount a volume of GlusterFS twice."""
    with gluster_volume(folder) as volume, ExitStack() as stack:
        yield [stack.enter_context(volume.mount(folder / host)) for host in "ab"]


@contextmanager
def _server_of_nfs(folder: Path, port: int) -> Iterator[None]:
    """Start nfs-ganesha, which exports the folder ``served``; and rpcbind, if none runs."""
    (folder / "ganesha.conf").write_text(
        f"NFS_CORE_PARAM {{ NFS_Port = {port}; MNT_Port = {port + 1}; Protocols = 3;"
        " Bind_addr = 127.0.0.1; Enable_NLM = false; Enable_RQUOTA = false;"
        " mount_path_pseudo = true; }\n"
        "NFSv4 { Graceless = true; RecoveryBackend = fs; }\n"
        f"EXPORT {{ Export_Id = 1; Path = {folder}/served; Pseudo = /export; Access_Type = RW;"
        " Squash = No_Root_Squash; SecType = sys; Protocols = 3; Transports = TCP;"
        " FSAL { Name = VFS; } }\n"
    )
    config, log = str(folder / "ganesha.conf"), str(folder / "ganesha.log")
    commands = [["ganesha.nfsd", "-F", "-f", config, "-L", log, "-p", str(folder / "pid")]]
    if not _answers(111):
        commands.insert(0, ["rpcbind", "-w", "-f"])
    Path("/run/ganesha").mkdir(exist_ok=True)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for command, at in zip(commands, (111, port)[-len(commands) :], strict=True):
            servers.append(subprocess.Popen(command, start_new_session=True))
            if not _until_it_answers(at):
                pytest.skip(f"{command[0]} does not start")
        yield
    finally:
        for server in reversed(servers):
            server.kill()
            server.wait()


@contextmanager
def nfs(folder: Path) -> Iterator[list[Path]]:
    """Export a folder by nfs-ganesha, and mount it twice by a client of libnfs for FUSE."""
    needs_root()
    for command in ("ganesha.nfsd", "fuse-nfs", "rpcbind"):
        if shutil.which(command) is None:
            pytest.skip(f"needs the command {command}")
    (folder / "served").mkdir()
    port = free_port(1)
    uri = f"nfs://127.0.0.1/export?nfsport={port}&mountport={port + 1}&version=3&uid=0&gid=0"
    with _server_of_nfs(folder, port), ExitStack() as stack:
        for host in "ab":
            stack.enter_context(fuse_mounted(folder / host, "fuse-nfs", "-n", uri, "-m"))
        yield [folder / "a", folder / "b"]


@contextmanager
def juicefs(folder: Path) -> Iterator[list[Path]]:
    """Make a JuiceFS of a database and a folder of objects, and mount it twice."""
    needs_root()
    if shutil.which("juicefs") is None:
        pytest.skip("needs the command juicefs")
    place = f"sqlite3://{folder}/meta.db"
    made_of = ["--storage", "file", "--bucket", f"{folder}/objects/", place, "casnap"]
    subprocess.run(["juicefs", "format", *made_of], check=True, capture_output=True)
    with ExitStack() as stack:
        for host in "ab":
            options = ["mount", "-d", "--no-usage-report", "--cache-dir", f"{folder}/cache-{host}"]
            options += ["--log", f"{folder}/{host}.log", place]
            stack.enter_context(fuse_mounted(folder / host, "juicefs", *options))
        yield [folder / "a", folder / "b"]


def _answers(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def _until_it_answers(port: int) -> bool:
    for _ in range(_MANY):
        if _answers(port):
            return True
        time.sleep(0.1)
    return False


DISKS: dict[str, Callable[[Path], Mounts]] = {
    "xfs": partial(_image, "xfs", 512 * _MIB),
    "btrfs": partial(_image, "btrfs", 512 * _MIB),
    "overlay": overlay,
    "tmpfs": _memory,
}
"""File systems of one host."""
SHARED: dict[str, Callable[[Path], Mounts]] = {
    **{
        f"bindfs {caches}": partial(_bindfs, caches, "ab")
        for caches in ("0,0,0", "1,1,0", "5,5,0", "1,1,1", "5,5,5")
    },
    "bindfs, three hosts": partial(_bindfs, "1,1,1", "abc"),
    "bindfs, one user": _of_one_user,
    "sshfs": partial(_sshfs, "dir_cache=yes"),
    "sshfs, no listings kept": partial(_sshfs, "dir_cache=no"),
    "mergerfs": mergerfs,
    "gluster": gluster,
    "nfs": nfs,
    "juicefs": juicefs,
}
"""File systems that several hosts mount."""


def hosts_of(places: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return the names of hosts, and where each has the file system: of a disk, two of one host."""
    return list(zip("abc", places if len(places) > 1 else [*places, *places], strict=False))
