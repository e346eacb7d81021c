"""Python processes that need not import torch: they are forked from one that has, once a session.

::

    done = run_python(code, store.uri)      # as subprocess.run([sys.executable, "-c", code, uri])

A new interpreter takes two seconds of processor time to import torch. These take none, run as
``__main__`` and end as interpreters do: threads are waited for and exit handlers are called.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import NamedTuple

_LARGEST = 1 << 20


class _Call(NamedTuple):
    code: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


def run_python(
    code: str, *arguments: object, timeout: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own.

    Args:
        code: The code.
        arguments: ``sys.argv[1:]``.
        timeout: Seconds until this gives up.

    Returns:
        The exit status (below 0: the signal that killed it) and all that it wrote.
    """
    call = _Call(code, tuple(map(str, arguments)), dict(os.environ), str(Path.cwd()))
    with ExitStack() as stack:
        out, err = (stack.enter_context(TemporaryFile()) for _ in range(2))
        ended, tells = os.pipe()
        stack.callback(os.close, ended)
        try:
            files = [out.fileno(), err.fileno(), tells]
            socket.send_fds(_server(os.getpid()), [pickle.dumps(tuple(call))], files)
        finally:
            os.close(tells)
        if not select.select([ended], [], [], timeout)[0]:
            raise TimeoutError(f"no end within {timeout} s of {code}")
        status = int(os.read(ended, 100) or b"-1")
        texts = [os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) for f in (out, err)]
    said, complained = (text.decode() for text in texts)
    return subprocess.CompletedProcess(["python", *call.arguments], status, said, complained)


@cache
def _server(_process: int) -> socket.socket:
    """Start the process that has imported torch; return the line to it, whose end ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())]
    with theirs:
        server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve(line: socket.socket) -> _Call:
    """Fork for each call; return in the forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(line, _LARGEST, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    line.close()
    out, err, tells = files
    child = os.fork()
    if child:
        os.close(out)
        os.close(err)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(tells, b"%d" % status)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in files:
        os.close(file)
    return _Call(*pickle.loads(message))


def _become(call: _Call) -> None:
    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.folder)
    sys.argv[:] = ["-c", *call.arguments]


if __name__ == "__main__":
    gc.disable()
    import pytest  # noqa: F401 - for code that a test module has

    import casnap.restore.restore
    import casnap.take.take  # noqa: F401

    # A fork that looked for garbage in what is imported would copy all of it; each does as it ends.
    gc.freeze()
    gc.enable()
    _call = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(_call)
    _this, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    exec(compile(_call.code, "<string>", "exec"), vars(sys.modules["__main__"]))
