"""Two hosts on one machine, with two ranks each, and a line between them that can be cut.

::

    with two_hosts(folder, __name__) as hosts:
        hosts.start(work, folder)       # work(folder) on ranks 0 and 1 of host 0, 2 and 3 of host 1
        hosts.kill(1)
        outcomes = hosts.outcomes()

A host is a set of namespaces: it has its own network, mounts, /dev/shm, processes, host name, boot
id and cache folder. Both see the same disks, so a folder on one is what a file system is that all
hosts mount.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import pytest

from tests.support.mounts import needs_root
from tests.support.ranks import PRELOADED, QUIET
from tests.support.warm import Forked, forked
from tests.support.yard import Yard

RANKS_EACH = 2
# Of sched.h, mount.h and prctl.h: a new namespace of each kind, and others.
_MOUNTS, _NAMES, _IPC, _PROCESSES, _NETWORK = 0x20000, 1 << 26, 1 << 27, 1 << 29, 1 << 30
_PRIVATE, _BIND, _DEATH_SIGNAL = 1 << 18 | 1 << 14, 1 << 12, 1


class Hosts:
    """Two hosts that are up, and the line between them.

    Args:
        folder: A folder that both see.
        module: Where the functions are that they will run.
    """

    def __init__(self, folder: Path, module: str) -> None:
        self._folder = folder
        self._modules = (*PRELOADED, module)
        self._yard = yard_of(folder)
        # Of each host: the line to its first process, the process that keeps that one, its id, and
        # its network, which stays while it is open: a dead host takes no card from the other one.
        self._lines: list[Connection] = []
        self._keepers: list[Forked] = []
        self._inits: list[int] = []
        self._networks: list[BinaryIO] = []

    def begin(self) -> None:
        """Begin both hosts, and join them.

        Raises:
            OSError: This machine refuses some of it.
        """
        (self._folder / "cache").mkdir()
        for number in (0, 1):
            keeper, line = forked(_keep_host, number, str(self._folder), modules=self._modules)
            self._keepers.append(keeper)
            self._lines.append(line)
        for line in self._lines:
            answer = line.recv()
            if isinstance(answer, OSError):
                raise answer
            self._inits.append(answer)
            self._networks.append(Path(f"/proc/{answer}/ns/net").open("rb"))  # noqa: SIM115
        ends = [f"line netns {pid} " for pid in self._inits]
        _run(f"ip link add {ends[0]} type veth peer name {ends[1]}")
        for number in (0, 1):
            self._ip(number, f"address add 10.0.0.{number + 1}/24 dev line")
            self._ip(number, "link set lo up")
            self._ip(number, "link set line up")

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        """Begin ``work(*args)`` on all four ranks, in a default process group of gloo."""
        for line in self._lines:
            line.send_bytes(pickle.dumps((work, args)))

    def wait(self, word: str) -> None:
        """Wait until a rank leaves a word in the yard of the hosts, or fails."""
        if self._yard.wait(word, "failed") == "failed":
            pytest.fail(self._yard.text("failed"))

    def tell(self, word: str) -> None:
        """Leave a word in the yard of the hosts."""
        self._yard.leave(word)

    def cut(self, end: int) -> None:
        """Cut the line, next to one of the hosts: nothing arrives, and neither host is told."""
        self._ip(end, "link set line down")

    def mend(self, end: int) -> None:
        """Join what was cut."""
        self._ip(end, "link set line up")

    def kill(self, number: int) -> None:
        """Kill all processes of a host."""
        os.kill(self._inits[number], signal.SIGKILL)
        self._keepers[number].join()

    def outcomes(self) -> list[Any]:
        """Return what each rank returned, once all have; None for those of a killed host."""
        for keeper in self._keepers:
            keeper.join()
        if error := self._yard.text("failed"):
            pytest.fail(error)
        files = [self._yard.folder / f"rank-{rank}" for rank in range(2 * RANKS_EACH)]
        return [pickle.loads(f.read_bytes()) if f.exists() else None for f in files]

    def end(self) -> None:
        """Kill what is left of both."""
        for pid, keeper in zip(self._inits, self._keepers, strict=False):
            if keeper.is_alive():
                os.kill(pid, signal.SIGKILL)
        for keeper, line in zip(self._keepers, self._lines, strict=True):
            line.close()
            keeper.join()
        for network in self._networks:
            network.close()

    def _ip(self, number: int, command: str) -> None:
        _run(f"nsenter -t {self._inits[number]} -n ip {command}")


@contextmanager
def two_hosts(folder: Path, module: str) -> Iterator[Hosts]:
    """Give two hosts, which end with the block; skip the test where that cannot be."""
    needs_root()
    folder.mkdir(exist_ok=True)
    hosts = Hosts(folder, module)
    try:
        try:
            hosts.begin()
        except OSError as e:
            pytest.skip(f"no hosts here: {e}")
        yield hosts
    finally:
        hosts.end()


def yard_of(folder: Path | str) -> Yard:
    """Return where ranks and the test leave words for each other."""
    return Yard(Path(folder) / "outcomes")


def _run(command: str) -> None:
    ran = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(f"{command}: {ran.stderr.strip()}")


# --- in the processes of a host -----------------------------------------------------------------


def _keep_host(line: Connection, number: int, folder: str) -> None:
    """Begin a host, and end with it: this process sees its first one from outside."""
    try:
        _call("prctl", _DEATH_SIGNAL, signal.SIGKILL)
        _call("unshare", _MOUNTS | _NAMES | _IPC | _PROCESSES | _NETWORK)
        pid = os.fork()
    except OSError as e:
        line.send(e)
        return
    if pid == 0:
        _be_host(line, number, folder)
    line.send(pid)
    os.waitpid(pid, 0)


def _be_host(line: Connection, number: int, folder: str) -> None:
    """Run the ranks of a host as its first process: all others end with this one."""
    try:
        _call("prctl", _DEATH_SIGNAL, signal.SIGKILL)
        _call("mount", None, b"/", None, _PRIVATE, None)
        _call("mount", b"proc", b"/proc", b"proc", 0, None)
        cache = f"{folder}/cache"
        for place in ("/dev/shm", cache):
            _call("mount", b"tmpfs", place.encode(), b"tmpfs", 0, b"size=256m")
        boot = Path(cache, "boot_id")
        boot.write_text(f"{uuid4()}\n")
        _call("mount", bytes(boot), b"/proc/sys/kernel/random/boot_id", None, _BIND, None)
        said = os.open(f"{folder}/host-{number}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        name = f"host-{number}"
        _call("sethostname", name.encode(), len(name))
        os.environ.update(QUIET, CASNAP_CACHE_DIR=cache)
        os.environ.update(MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", NODE_RANK=str(number))
        os.environ.update(GLOO_SOCKET_IFNAME="line", WORLD_SIZE=str(2 * RANKS_EACH))
        work, args = pickle.loads(line.recv_bytes())
        ranks = []
        for local in range(RANKS_EACH):
            if (pid := os.fork()) == 0:
                _be_rank(number * RANKS_EACH + local, local, folder, work, args)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
    except EOFError:
        pass  # the test ends without any work
    except BaseException:  # noqa: BLE001 - the test raises it
        yard_of(folder).leave("failed", traceback.format_exc())
    finally:
        os._exit(0)


def _be_rank(
    rank: int, local: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    yard = yard_of(folder)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(RANKS_EACH))
        dist.init_process_group("gloo")
        outcome = pickle.dumps(work(*args))
        (yard.folder / f"part-{rank}").write_bytes(outcome)
        (yard.folder / f"part-{rank}").rename(yard.folder / f"rank-{rank}")
    except BaseException:  # noqa: BLE001 - the test raises it
        yard.leave("failed", f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)  # the destructor of a broken group might hang


def _call(function: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args):
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
