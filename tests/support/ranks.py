"""Worlds: real processes that run a function as the ranks of a ``torch.distributed`` group.

::

    results = world(4).run(work, tmp_path)          # [work(tmp_path) on rank 0, ..., on rank 3]
    outcomes = world(2).run(work, expect_errors=True)    # results and exceptions, by rank

The processes are forked as they are needed (``warm.py``), and serve all worlds of a module. A
process that dies or hangs in a test is replaced for the next.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.support.warm import Forked, forked

_GRACE = 2.0
"""Seconds for a rank to say where it hangs, or to end."""

_JOINING = 300.0
"""Seconds for all ranks to join a group: a machine may be busy, and no call is timed by that."""

_JOINED = b"joined"

PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # every optimizer imports it
    "hypothesis",
)
"""Modules that the server of ``warm.py`` imports once, so that no rank has to."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "GLOO_LOG_LEVEL": "ERROR",
}
"""Set in every rank: one thread each, and only errors are printed."""


class RankDied(Exception):  # noqa: N818 - it is an outcome as well
    """A rank ended without an answer."""


class RankHung(Exception):  # noqa: N818
    """A rank gave no answer in time and was killed."""


class RankError(Exception):
    """An error that cannot be sent between processes: its type and text."""


class RankTraceback(Exception):  # noqa: N818
    """Where an error was raised on its rank: the cause of the error that the test gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RanksFailed(Exception):  # noqa: N818
    """Some ranks raised, died or hung.

    Attributes:
        errors: The error of each rank that has one.
    """

    def __init__(self, errors: dict[int, BaseException]) -> None:
        ranks = (f"--- rank {r}: {type(e).__name__}: {e}{_cause(e)}" for r, e in errors.items())
        super().__init__("\n".join(("", *ranks)))
        self.errors = errors


def _cause(error: BaseException) -> str:
    return f"{error.__cause__}" if isinstance(error.__cause__, RankTraceback) else ""


# --- in a rank --------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The default process group that a call runs in; the same one is used again."""

    prefix: str
    port: int
    rank: int
    size: int
    seconds: float


class _Call(NamedTuple):
    group: _Group
    environment: dict[str, str]
    path: list[str]
    work: bytes
    seconds: float


def _serve(calls: Connection, log: str) -> None:
    """Answer calls until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this
    threading.Thread(target=_end_with_parent, args=(calls,), daemon=True).start()
    said = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for ours in ("casnap", "tests", "test_"):
        warnings.filterwarnings("error", module=ours)
    gc.freeze()  # so that collecting does not look through all of torch
    current: _Group | None = None
    calls.send_bytes(b"ready")
    while True:
        try:
            call: _Call = pickle.loads(calls.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the destructor of a broken group might hang
        answer = _answer(call, current, calls)
        faulthandler.cancel_dump_traceback_later()
        current = call.group
        calls.send_bytes(answer)


def _host_store(line: Connection) -> None:
    """Host what groups are made through, as the agent of torchrun does, until the pool ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line.send(store.port)
    with suppress(EOFError):
        line.recv()


def _end_with_parent(calls: Connection) -> None:
    poll = select.poll()
    poll.register(calls, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _answer(call: _Call, current: _Group | None, calls: Connection) -> bytes:
    try:
        os.environ.clear()
        os.environ.update(call.environment)
        sys.path[:] = call.path
        _join(call.group, current)
        calls.send_bytes(_JOINED)
        faulthandler.dump_traceback_later(call.seconds)
        work, args = pickle.loads(call.work)
        return pickle.dumps((True, work(*args)))
    except BaseException as e:  # noqa: BLE001 - pytest.fail is one, too
        return pickle.dumps((False, (_portable(e), traceback.format_exc())))


def _join(group: _Group, current: _Group | None) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if group == current and dist.is_initialized():
        return
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
        # Models in cycles keep groups alive, and each group has a thread that polls.
        gc.collect()
    timeout = timedelta(seconds=group.seconds)
    server = TCPStore("127.0.0.1", group.port, is_master=False, timeout=timedelta(seconds=_JOINING))
    store = PrefixStore(group.prefix, server)
    dist.init_process_group(
        "gloo", store=store, rank=group.rank, world_size=group.size, timeout=timeout
    )
    # Work may begin with the end of the group, which would cut off ranks that still connect.
    store.set(f"joined {group.rank}", "")
    joined = [f"joined {rank}" for rank in range(group.size)]
    store.wait(joined, timedelta(seconds=_JOINING))


def _forget_meshes() -> None:
    """Empty torch's caches of operators on DTensors: they keep meshes of groups that are gone."""
    import torch

    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return
    propagator = module.DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    if clear := getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None):  # since 2.10
        clear()


def _portable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return RankError(f"{type(error).__name__}: {error}")


# --- in the test ------------------------------------------------------------------------------


class _Rank:
    """A process of the pool and the line to it."""

    def __init__(self, log: Path, modules: tuple[str, ...]) -> None:
        self._log = log
        self._heard = 0
        self.process, self.calls = forked(_serve, str(log), modules=modules)

    def call(self, call: _Call) -> None:
        self._heard = self._log.stat().st_size
        self.calls.send_bytes(pickle.dumps(call))

    def said(self) -> str:
        """Return what the rank wrote to stdout and stderr in its last call."""
        return self._log.read_bytes()[self._heard :].decode(errors="replace")[-8000:]

    def answer(self) -> tuple[Any, bool] | None:
        """Return the result or error that has arrived, and whether it is an error.

        None says that the rank has joined its group, and has begun.
        """
        try:
            message = self.calls.recv_bytes()
            if message == _JOINED:
                return None
            fine, value = pickle.loads(message)
        except (EOFError, OSError):
            self.process.join(_GRACE)
            code = self.process.exitcode
            return RankDied(f"ended with {code}\n{self.said()}"), True
        if fine:
            return value, False
        error, text = value
        error.__cause__ = RankTraceback(text)
        return error, True

    def end(self) -> None:
        self.calls.close()
        self.process.kill()
        self.process.join()


class World:
    """The first ``size`` processes of a pool."""

    def __init__(self, pool: Pool, size: int) -> None:
        self.size = size
        self._pool = pool

    def run(
        self,
        work: Callable[..., Any],
        *args: Any,
        expect_errors: bool = False,
        timeout: float = 300.0,
        group_timeout: float | None = None,
    ) -> list[Any]:
        """Run ``work(*args)`` on every rank, in a default process group of gloo.

        Args:
            work: A function that can be imported by its name: one of a module.
            args: Must be picklable; the same for every rank, which knows ``dist.get_rank()``.
            expect_errors: Return errors in place of results, rather than raise.
            timeout: Seconds, from when all ranks have joined their group, until those that have
                not answered are killed.
            group_timeout: Seconds until a collective gives up waiting; by default longer than
                any test.

        Returns:
            What each rank returned, by rank. An error's ``__cause__`` has the rank's traceback.

        Raises:
            RanksFailed: A rank raised, died or hung, and errors are not expected.
        """
        outcomes = self._pool.run(self.size, (work, args), timeout, group_timeout or _JOINING)
        errors = {rank: value for rank, (value, failed) in enumerate(outcomes) if failed}
        if errors and not expect_errors:
            raise RanksFailed(errors)
        return [value for value, _ in outcomes]

    @contextmanager
    def fresh(self) -> Iterator[World]:
        """Give a world of new processes, which end with the block."""
        with Pool(*self._pool.modules) as pool:
            yield pool.world(self.size)


Worlds = Callable[[int], World]
"""What the fixture `world` gives: a world of so many ranks."""


class Pool:
    """The processes that worlds are made of; it starts them as they are needed.

    Args:
        modules: Where the functions are that they will run: no rank has to import them.
    """

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        self._ranks: list[_Rank] = []
        self._started = self._groups = 0
        self._last: tuple[int, float, str] | None = None
        self._host: tuple[Forked, Connection] | None = None
        self._port = 0
        self._folder = TemporaryDirectory(prefix="casnap-ranks-")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()
        if self._host is not None:
            process, line = self._host
            line.close()
            process.join()
        self._folder.cleanup()

    def world(self, size: int) -> World:
        return World(self, size)

    def run(
        self, size: int, work: tuple[Any, ...], timeout: float, group_timeout: float
    ) -> list[tuple[Any, bool]]:
        packed = pickle.dumps(work)
        self._start(size)
        prefix = self._prefix(size, group_timeout)
        ranks = self._ranks[:size]
        environment = {**os.environ, **QUIET}
        try:
            for number, rank in enumerate(ranks):
                group = _Group(prefix, self._port, number, size, group_timeout)
                call = _Call(group, environment, sys.path, packed, timeout)
                rank.call(call)
            outcomes = self._collect(ranks, timeout + _GRACE)
        except BaseException:
            self._replace(ranks)
            raise
        if not any(failed for _, failed in outcomes):
            self._last = (size, group_timeout, prefix)
        return outcomes

    def _prefix(self, size: int, seconds: float) -> str:
        """Return the name of the group to use: the last call's, if that fits and ended well."""
        last, self._last = self._last, None
        if last is not None and last[:2] == (size, seconds):
            return last[2]
        self._groups += 1
        return f"group-{self._groups}"

    def _start(self, size: int) -> None:
        if self._host is None:
            self._host = forked(_host_store, modules=self.modules)
            self._port = self._host[1].recv()
        self._replace([rank for rank in self._ranks if not rank.process.is_alive()])
        new = []
        for _ in range(size - len(self._ranks)):
            self._started += 1
            log = Path(self._folder.name, f"{self._started}.log")
            log.touch()
            new.append(_Rank(log, (*PRELOADED, *self.modules)))
        self._ranks += new
        for rank in new:
            # Starting is not part of the time for a call. If it died, its answer says so.
            with suppress(EOFError, OSError):
                rank.calls.recv_bytes()

    def _replace(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            self._ranks.remove(rank)
            rank.end()

    def _collect(self, ranks: list[_Rank], seconds: float) -> list[tuple[Any, bool]]:
        outcomes: dict[_Rank, tuple[Any, bool]] = {}
        joining = set(ranks)
        deadline = time.monotonic() + _JOINING + _GRACE
        while waiting := {rank.calls: rank for rank in ranks if rank not in outcomes}:
            left = max(0.0, deadline - time.monotonic())
            answered = multiprocessing.connection.wait(list(waiting), left)
            for line in answered:
                rank = waiting[line]  # type: ignore[index]
                if (outcome := rank.answer()) is not None:
                    outcomes[rank] = outcome
            if joining and not (joining := joining - {waiting[line] for line in answered}):  # type: ignore[index]
                deadline = time.monotonic() + seconds
            if not answered:
                for rank in waiting.values():
                    outcomes[rank] = RankHung(f"gave no answer in time\n{rank.said()}"), True
                    rank.end()
        return [outcomes[rank] for rank in ranks]
