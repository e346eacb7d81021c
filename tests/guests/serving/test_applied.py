"""Forwards that overlap in one thread, move between threads, or come within callbacks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import casnap.runtime.backoff
from casnap import StateDict, Store
from casnap.errors import CasnapError
from casnap.serving import AppliedVersion, Follower, FollowerOptions
from casnap.serving.gate import Gate
from tests.support.faults import in_child, start, wait
from tests.support.ranks import Worlds
from tests.support.warm import run_python

Served = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casnap.runtime.backoff, "_FIRST", 0.02)
    monkeypatch.setattr(casnap.runtime.backoff, "_LONGEST", 0.05)


def take(store: Store, value: int, **options: object) -> None:
    store.take({"model": StateDict(w=torch.full((9000,), float(value)))}, f"{value}", **options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of one version."""
    store = Store(tmp_path / "store")
    take(store, 0)
    return store


@pytest.fixture
def served() -> Served:
    """Return weights to serve."""
    return {"w": torch.zeros(9000)}


def held(served: Served) -> str:
    """Return the name of the version that the weights are; of a mix, all names."""
    return " ".join(f"{value:g}" for value in served["w"].unique().tolist())


# --- coroutines ---------------------------------------------------------------------------------


@asynccontextmanager
async def as_a_thread_does(follower: Follower) -> AsyncIterator[AppliedVersion]:
    with follower.applied() as version:
        yield version


@pytest.mark.parametrize("enter", [Follower.async_applied, as_a_thread_does])
def test_coroutines_that_overlap(store: Store, served: Served, enter: Callable) -> None:
    async def serve(follower: Follower, times: int) -> None:
        for _ in range(times):
            async with enter(follower) as version:
                for _ in range(3):
                    assert held(served) == version.name
                    await asyncio.sleep(0.002)

    async def main(follower: Follower) -> None:
        for value in range(1, 4):
            await asyncio.to_thread(take, store, value)
            await asyncio.gather(*(serve(follower, times) for times in (5, 6, 7)))

    with Follower(store.uri, served, interval=0.001) as follower:
        asyncio.run(main(follower))
        follower.update()
        assert held(served) == follower.version.name == "3"


def test_coroutines_of_which_one_is_always_in_come_to_versions(
    store: Store, served: Served
) -> None:
    async def serve(follower: Follower) -> None:
        while follower.version.name != "1":
            async with follower.async_applied():
                await asyncio.sleep(0.003)
                async with follower.async_applied() as version:
                    assert held(served) == version.name

    async def main(follower: Follower) -> None:
        others = [asyncio.create_task(serve(follower)) for _ in range(3)]
        async with follower.async_applied():
            await asyncio.to_thread(take, store, 1)
            with pytest.raises(CasnapError, match="outside of applied"):
                follower.update()
            # What a forward waits for is within it.
            await asyncio.create_task(nested(follower))
            await asyncio.to_thread(held_in, follower, served)
        await asyncio.gather(*others)

    async def nested(follower: Follower) -> None:
        async with follower.async_applied() as version:
            assert version.name == "0"

    with Follower(store.uri, served, interval=0.001) as follower:
        asyncio.run(main(follower))
    assert held(served) == "1"


def held_in(follower: Follower, served: Served) -> None:
    with follower.applied() as version:
        assert held(served) == version.name


def test_a_coroutine_that_is_cancelled_while_it_waits(store: Store, served: Served) -> None:
    in_callback, ends = threading.Event(), threading.Event()

    def on_version(version: AppliedVersion) -> None:
        in_callback.set()
        ends.wait()

    async def main(follower: Follower) -> None:
        update = asyncio.create_task(asyncio.to_thread(follower.update))
        await asyncio.to_thread(in_callback.wait)

        async def forward() -> str:
            async with follower.async_applied() as version:
                return version.name

        waiting, cancelled = asyncio.create_task(forward()), asyncio.create_task(forward())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        ends.set()
        assert await update
        assert await waiting == "1"
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    follower = Follower(store.uri, served, on_version=on_version, interval=None)
    take(store, 1)
    asyncio.run(main(follower))
    take(store, 2)
    assert follower.update()


# --- generators and pools -----------------------------------------------------------------------


def stream(follower: Follower, served: Served) -> Iterator[str]:
    with follower.applied():
        while True:
            yield held(served)


def test_a_generator_that_another_thread_ends(store: Store, served: Served) -> None:
    follower = Follower(store.uri, served, options=FollowerOptions(timeout=0.01), interval=None)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        tokens = stream(follower, served)
        assert one.submit(next, tokens).result() == "0"
        take(store, 1)
        # Whoever would wait for a forward that its own thread has begun is told so at once.
        with pytest.raises(CasnapError, match="outside of applied"):
            one.submit(follower.update).result()
        with pytest.raises(CasnapError, match=r"waited for 0\.01 s for forwards to leave"):
            other.submit(follower.update).result()
        assert other.submit(next, tokens).result() == "0"
        other.submit(tokens.close).result()
        assert one.submit(follower.update).result()
        assert held(served) == "1"
        # The threads are in no forward any more: each of the next ones is protected.
        for first, second in ((one, other), (other, one)):
            tokens = stream(follower, served)
            first.submit(next, tokens).result()
            take(store, int(held(served)) + 1)
            with pytest.raises(CasnapError, match="forwards to leave"):
                second.submit(follower.update).result()
            del tokens
            gc.collect()
            assert second.submit(follower.update).result(), "nobody has ended it"


def test_a_forward_that_waits_for_forwards_of_a_pool(store: Store, served: Served) -> None:
    """Nothing tells that these belong to it, so the version lets them go on after a while."""
    with (
        ThreadPoolExecutor(2) as pool,
        Follower(
            store.uri, served, options=FollowerOptions(timeout=0.05), interval=0.001
        ) as follower,
    ):
        with follower.applied():
            take(store, 1)
            while follower.error is None:
                for future in [pool.submit(held_in, follower, served) for _ in range(4)]:
                    future.result()
            assert "forwards to leave" in str(follower.error)
            assert held(served) == "0"
        while follower.version.name != "1" or follower.error is not None:
            held_in(follower, served)


# --- callbacks and signals ----------------------------------------------------------------------


@pytest.mark.parametrize("start", [False, True])
def test_a_callback_may_run_forwards(store: Store, served: Served, start: bool) -> None:
    seen = list[str]()

    async def forward() -> None:
        async with follower.async_applied():
            await asyncio.to_thread(held_in, follower, served)

    def warm_up(version: AppliedVersion) -> None:
        with follower.applied() as inner, follower.applied():
            assert inner is version
            assert held(served) == version.name
        asyncio.run(forward())
        with pytest.raises(CasnapError, match="neither in on_version"):
            follower.update()
        follower.stop()
        seen.append(version.name)

    with Follower(
        store.uri, served, on_version=warm_up, interval=0.001 if start else None
    ) as follower:
        take(store, 1)
        assert start or follower.update()
        while not seen:
            pass
        held_in(follower, served)
    assert seen == ["1"]


@pytest.mark.parametrize("start", [False, True])
def test_a_callback_that_fails_is_called_again(store: Store, served: Served, start: bool) -> None:
    calls = list[str]()

    def fail_twice(version: AppliedVersion) -> None:
        calls.append(version.name)
        if calls.count("1") in (1, 2):
            raise ConnectionError("the cache cannot be dropped")

    with Follower(
        store.uri, served, on_version=fail_twice, interval=0.001 if start else None
    ) as follower:
        take(store, 1)
        if not start:
            assert follower.update(), "the version was applied"
            assert isinstance(follower.error, ConnectionError)
            assert not follower.update()
            assert not follower.update()
            assert calls == ["1"] * 3
        while len(calls) < 3 or follower.error is not None:
            held_in(follower, served)
        take(store, 2)
        assert start or follower.update()
        while calls != ["1"] * 3 + ["2"]:
            pass


def test_stop_in_a_forward_that_a_version_waits_for(store: Store, served: Served) -> None:
    follower = Follower(store.uri, served, interval=0.001)

    def end(number: int, frame: FrameType | None) -> None:
        follower.stop()

    before = signal.signal(signal.SIGTERM, end)
    try:
        with follower.applied():
            take(store, 1)
            # Another thread comes to wait as soon as the version does.
            with ThreadPoolExecutor(1) as pool:
                while True:
                    forward = pool.submit(held_in, follower, served)
                    try:
                        forward.result(0.05)
                    except NotYet:
                        break
                signal.raise_signal(signal.SIGTERM)
                forward.result()
            assert held(served) == "0"
    finally:
        signal.signal(signal.SIGTERM, before)
    held_in(follower, served)
    assert held(served) == "0"
    assert follower.update(), "who asks for it still gets it"


def test_stop_in_a_handler_that_comes_within_another_call(store: Store, served: Served) -> None:
    def end(*_: object) -> None:
        follower.stop()

    with Follower(store.uri, served, interval=0.001) as follower:
        before = signal.signal(signal.SIGTERM, end)
        try:
            take(store, 1, progress=lambda *_: signal.raise_signal(signal.SIGTERM))
        finally:
            signal.signal(signal.SIGTERM, before)
    assert held(served) == follower.version.name


def fail_on_one_rank(path: str) -> tuple[list[str], str]:
    served, alone = {"w": torch.zeros(9000)}, dist.new_group([0])
    calls, group = list[str](), dist.new_group()

    def on_version(version: AppliedVersion) -> None:
        calls.append(version.name)
        dist.barrier(group)
        if dist.get_rank() == 1 and len(calls) < 2:
            raise ConnectionError("the cache cannot be dropped")

    with Follower(path, served, on_version=on_version, interval=None) as follower:
        if dist.get_rank() == 0:
            take(Store(path), 1, pg=alone)
        dist.barrier()
        assert follower.update()
        fails = torch.ones(())
        while fails:
            with follower.applied() as version:
                assert held(served) == version.name == "1"
                fails.fill_(follower.error is not None)
                dist.all_reduce(fails)
        return calls, str(follower.error)


def test_a_callback_that_fails_on_one_rank_is_called_again_on_all(
    store: Store, world: Worlds
) -> None:
    results = world(2).run(fail_on_one_rank, store.uri, timeout=60)
    assert results == [(["1", "1"], "None")] * 2


# --- forks --------------------------------------------------------------------------------------


def test_a_forked_child_follows_too(store: Store, served: Served) -> None:
    with Follower(store.uri, served, interval=0.01) as follower:
        reader, writer = os.pipe()

        def follow() -> None:
            signal.alarm(60)
            os.read(reader, 1)
            name = ""
            while name != "1":
                with follower.applied() as version:
                    name = version.name
                    assert held(served) == name
            follower.stop()

        pid = start(follow)
        take(store, 1)
        os.write(writer, b".")
        assert wait(pid) == 0
        os.close(reader)
        os.close(writer)


def test_a_child_that_is_forked_while_a_version_is_applied(store: Store, served: Served) -> None:
    ends: list[int] = []

    def enter() -> None:
        signal.alarm(60)
        with follower.applied() as version:
            assert held(served) == version.name == "1"

    follower = Follower(
        store.uri, served, on_version=lambda _: ends.append(in_child(enter)), interval=None
    )
    take(store, 1)
    assert follower.update()
    assert ends == [0]


def interrupted(block: Callable[[], AbstractContextManager[object]], number: int) -> bool:
    """Run an empty block; raise an interrupt at a beginning or end of a call, counted from 0.

    Returns:
        Whether there were so many.
    """
    left = number

    def note(frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        # Where the interpreter looks for signals.
        if event in ("call", "c_return") and called is not sys.setprofile:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(note)
        with block():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("way", ["shared", "alone"])
def test_an_interrupt_anywhere_leaves_nobody_in(way: str) -> None:
    gate = Gate()

    def others_get_in() -> None:
        with gate.alone(5):
            pass
        with gate.shared():
            pass

    with ThreadPoolExecutor(1) as pool:
        for number in count():
            was_interrupted = interrupted(getattr(gate, way), number)
            gc.collect()
            pool.submit(others_get_in).result(60)
            if not was_interrupted:
                break
    assert number > 10


def test_no_coroutine_function_is_called_for_a_version(
    store: Store, served: Served, tmp_path: Path
) -> None:
    async def on_version(*_: object) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="coroutine"):
        Follower(store.uri, served, on_version=on_version, interval=None)
    with pytest.raises(TypeError, match="coroutine"):
        store.follow(tmp_path / "live", on_version=on_version)
    follower = Follower(store.uri, served, on_version=lambda v: on_version(v), interval=None)
    take(store, 1)
    assert follower.update()
    assert isinstance(follower.error, TypeError)
    events = store.follow(tmp_path / "live", on_version=lambda *about: on_version(*about))
    switched, failed = next(events), next(events)
    assert (switched.event, failed.event) == ("switched", "call_failed")
    assert "coroutine" in str(failed.error)


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_the_thread_goes_on_whatever_a_callback_raises(
    store: Store, served: Served, error: type[BaseException]
) -> None:
    called: list[str] = []

    def on_version(version: AppliedVersion) -> None:
        called.append(version.name)
        if len(called) == 1:
            raise error

    with Follower(store.uri, served, interval=0.01, on_version=on_version) as follower:
        for value in (1, 2):
            take(store, value)
            deadline = time.monotonic() + 60
            # A second version would take the place of the first one before its second call.
            while called[-1:] != [f"{value}"] or len(called) < 2:
                assert time.monotonic() < deadline
                with follower.applied():
                    time.sleep(0.001)
    assert called[:2] == ["1", "1"]


EXIT = """
import atexit, sys, threading
import torch
from casnap import StateDict, Store
from casnap.serving import Follower

store = Store(sys.argv[1])
served = {"w": torch.zeros(9000)}
atexit.register(Follower(store.uri, served, interval=None).stop)
kept = Follower(store.uri, served, interval=None)
began = threading.Event()

def on_version(version):
    began.set()
    for _ in range(100):
        torch.rand(1 << 18).sum()
    print(version.name)

running = Follower(store.uri, served, interval=0.01, on_version=on_version)
store.take({"model": StateDict(w=torch.ones(9000))}, "1")
assert began.wait(60)
"""


def test_the_exit_of_the_process_waits_for_its_followers(store: Store) -> None:
    done = run_python(EXIT, store.uri)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)
