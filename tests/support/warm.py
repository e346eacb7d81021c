"""Python processes that need not import torch: they are forked from one that has, once a run.

::

    done = run_python(code, store.uri)      # as subprocess.run([sys.executable, "-c", code, uri])
    process, line = forked(work, folder)    # work(line, folder), in a process of its own

A new interpreter takes two seconds of processor time to import torch. These take none, run as
``__main__`` and end as interpreters do: threads are waited for and exit handlers are called. No
module is torn down, which takes 0.3 s where torch is one of them.

They are children of the server, a process of one thread that all workers of a run share. It is
started on first use, and ends when nobody that has used it is left.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext, suppress
from functools import cache, partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import ModuleType
from typing import NamedTuple, NoReturn

FOLDER = "CASNAP_TESTS_SERVER"
"""The variable that names the folder of the server's socket; conftest sets it for all workers."""
_LARGEST = 1 << 17
_NEEDED = (
    "pytest",
    "casnap.cli.check",
    "casnap.cli.ls",
    "casnap.latest",
    "casnap.storage.collecting.automatic",
    "casnap.maintenance.check",
    "casnap.mirror.notes",
    "casnap.pending",
    "casnap.ranks.gloo",
    "casnap.ranks.joining",
    "casnap.restore.restore",
    "casnap.take.take",
    "torch._subclasses.schema_check_mode",
)
"""What most processes would import, each for itself, since casnap imports much at first use."""


class _Call(NamedTuple):
    """What a process is to do.

    Attributes:
        work: Code, or a pickled function and its arguments.
        modules: What the server imports first, so that no process has to.
    """

    work: str | bytes
    modules: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


class Forked:
    """A process that the server forked.

    Attributes:
        pid: Its id.
        exitcode: The exit status (below 0: the signal that killed it), or None.
    """

    def __init__(self, call: _Call, *files: int) -> None:
        self.exitcode: int | None = None
        self._told, tells = os.pipe()
        try:
            message = pickle.dumps(tuple(call))
            socket.send_fds(_server(os.getpid()), [message], [*files, tells])
        finally:
            os.close(tells)
        self.pid = self._hear()
        if self.pid < 1:
            raise RuntimeError(f"the server has ended: {_log().read_text()}")

    def _hear(self) -> int:
        return int.from_bytes(os.read(self._told, 4) or b"\xff", "big", signed=True)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        if self.exitcode is None and select.select([self._told], [], [], timeout)[0]:
            self.exitcode = self._hear()
            os.close(self._told)

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):  # it has ended since, which is not told yet
                os.kill(self.pid, signal.SIGKILL)

    def __del__(self) -> None:
        if self.exitcode is None:
            os.close(self._told)


def run_python(
    code: str, *arguments: object, modules: Iterable[str] = (), timeout: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own.

    Args:
        code: The code.
        arguments: ``sys.argv[1:]``.
        modules: What is imported before, once a run.
        timeout: Seconds until this gives up.

    Returns:
        The exit status (below 0: the signal that killed it) and all that it wrote.
    """
    with ExitStack() as stack:
        out, err = (stack.enter_context(TemporaryFile()) for _ in range(2))
        words = tuple(map(str, arguments))
        process = Forked(_call(code, modules, words), out.fileno(), err.fileno())
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"no end within {timeout} s of {code}")
        texts = [os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) for f in (out, err)]
    said, complained = (text.decode() for text in texts)
    return subprocess.CompletedProcess(["python", *words], process.exitcode, said, complained)


def forked(
    work: Callable[..., None], *args: object, modules: Iterable[str] = ()
) -> tuple[Forked, Connection]:
    """Run ``work(line, *args)`` in a process of its own; return that, and our end of the line."""
    ours, theirs = Pipe()
    with theirs:
        call = _call(pickle.dumps((work, args)), modules)
        return Forked(call, theirs.fileno()), ours


def _call(work: str | bytes, modules: Iterable[str], arguments: tuple[str, ...] = ()) -> _Call:
    return _Call(work, (*_NEEDED, *modules), arguments, dict(os.environ), str(Path.cwd()))


# --- the line to the server ---------------------------------------------------------------------


@cache
def _server(_process: int) -> socket.socket:
    """Return this process's line to the server of the run, which is started if there is none."""
    if FOLDER not in os.environ:
        made = TemporaryDirectory(prefix="casnap-server-")
        atexit.register(made.cleanup)
        os.environ[FOLDER] = made.name
    folder = Path(os.environ[FOLDER])
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(line.close)
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            line.connect(str(folder / "socket"))
        except OSError:
            _start(folder)
            line.connect(str(folder / "socket"))
    return line


def _start(folder: Path) -> None:
    """Start the server: it listens when its first word arrives, before it imports anything.

    It stands in a folder that stays: that of a test may be gone when the server imports more.
    """
    listens, tells = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.support.warm", str(folder / "socket"), str(tells)]
    with _log().open("w") as log:
        server = subprocess.Popen(
            command, env=environment, pass_fds=[tells], stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True, cwd=folder,
        )  # fmt: skip
    server.returncode = 0  # it outlives this process, and nobody asks how it ends
    os.close(tells)
    word = os.read(listens, 1)
    os.close(listens)
    if not word:
        raise RuntimeError(f"the server does not start: {_log().read_text()}")


def _log() -> Path:
    return Path(os.environ[FOLDER], "log")


# --- the server ---------------------------------------------------------------------------------


class _Server:
    """Forks a process for each call, and tells how it ends."""

    def __init__(self, path: str, tells: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Path(path).unlink(missing_ok=True)
        self._listener.bind(path)
        self._listener.listen(100)
        os.write(tells, b".")
        os.close(tells)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._lines: dict[int, socket.socket] = {}
        # By a file that can be read when a process has ended: its id, and whom to tell.
        self._processes: dict[int, tuple[int, int]] = {}

    def serve(self) -> tuple[_Call, list[int]]:
        """Serve until all have hung up; return in each forked process."""
        while True:
            for file, _ in self._poll.poll():
                if file == self._listener.fileno():
                    line, _ = self._listener.accept()
                    self._lines[line.fileno()] = line
                    self._poll.register(line, select.POLLIN)
                elif file in self._processes:
                    self._reap(file)
                elif (call := self._answer(file)) is not None:
                    return call

    def _reap(self, file: int) -> None:
        self._poll.unregister(file)
        pid, tells = self._processes.pop(file)
        os.close(file)
        _tell(tells, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(tells)

    def _answer(self, file: int) -> tuple[_Call, list[int]] | None:
        line = self._lines[file]
        message, files, _, _ = socket.recv_fds(line, _LARGEST, 3)
        if not message:
            self._poll.unregister(file)
            self._lines.pop(file).close()
            if not self._lines and not self._poll.poll(0):
                os._exit(0)
            return None
        call = _Call(*pickle.loads(message))
        _import(call.modules)
        pid = os.fork()
        if pid == 0:
            self._close()
            return call, files
        *others, tells = files
        for other in others:
            os.close(other)
        _tell(tells, pid)
        ends = os.pidfd_open(pid)
        self._poll.register(ends, select.POLLIN)
        self._processes[ends] = pid, tells
        return None

    def _close(self) -> None:
        """Close what the forked process has nothing to do with."""
        self._listener.close()
        for line in self._lines.values():
            line.close()
        for file, (_, tells) in self._processes.items():
            os.close(file)
            os.close(tells)


def _tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # who asked is gone
        os.write(pipe, number.to_bytes(4, "big", signed=True))


def _import(modules: tuple[str, ...]) -> None:
    if all(name in sys.modules for name in modules):
        return
    gc.disable()
    for name in modules:
        with suppress(BaseException) if name.startswith("tests.") else nullcontext():
            importlib.import_module(name)  # a module of tests may say that it is to be skipped
    # A fork that looked for garbage in what is imported would copy all of it; each does as it ends.
    gc.freeze()
    gc.enable()


def _become(call: _Call, files: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(files.pop())
    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.folder)
    sys.argv[:] = ["-c", *call.arguments]


def run_and_end(work: Callable[[], object]) -> NoReturn:
    """Call what a program does, and end as its interpreter would, but tear no module down."""
    status: object = 1
    try:
        work()
        status = None
    except SystemExit as e:
        status = e.code
    except BaseException:  # noqa: BLE001 - all that it may raise is shown
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else status is not None)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call, files = _Server(sys.argv[1], int(sys.argv[2])).serve()
    _become(call, files)
    if isinstance(call.work, bytes):
        work, args = pickle.loads(call.work)
        run_and_end(partial(work, Connection(files[0]), *args))
    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    program = sys.modules["__main__"] = ModuleType("__main__")
    run_and_end(partial(exec, compile(call.work, "<string>", "exec"), vars(program)))


if __name__ == "__main__":
    _main()
