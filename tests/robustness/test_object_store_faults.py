"""A server that fails, in each way, while a store is written, read and collected.

Committed snapshots stay whole. What is asked for is done, or an error of casnap says why not, after
a bounded number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from casnap import Store
from casnap.errors import CasnapError, StoreError, UnavailableError
from tests.support.faults import CHUNK, KEY, app_state, assert_holds, content, take
from tests.support.faulty import (
    FaultyProxy,
    HttpFault,
    after,
    answer,
    break_off,
    cut,
    delay,
    hang_up,
    stall,
)
from tests.support.object_stores import IMPATIENT, assert_bucket, store_in
from tests.support.ranks import World
from tests.support.servers import Bucket, Server

pytestmark = pytest.mark.servers

Faults = Callable[..., HttpFault]
FAULTS: dict[str, Faults] = {
    "reset": partial(HttpFault, hang_up()),
    "closed": partial(HttpFault, hang_up(reset=False)),
    "request breaks off": partial(HttpFault, break_off(100), "PUT"),
    "answer is cut": partial(HttpFault, cut(100), "GET"),
    "reset in the answer": partial(HttpFault, cut(100, reset=True), "GET"),
    "lost answer": partial(HttpFault, after(hang_up())),
    "500": partial(HttpFault, answer(500)),
    "503": partial(HttpFault, answer(503, "ServiceUnavailable")),
    "SlowDown": partial(HttpFault, answer(503, "SlowDown")),
    "409": partial(
        HttpFault, answer(409, "ConditionalRequestConflict"), "PUT", header="if-none-match: [*]"
    ),
    "silence": partial(HttpFault, stall(600)),
    "stall in the answer": partial(HttpFault, stall(600, 50), "GET"),
    "latency": partial(HttpFault, delay(0.05)),
}


def _restore(bucket: Bucket, endpoint: str) -> None:
    assert_holds(store_in(bucket, endpoint)["step_1"], 1)


def _read_object(bucket: Bucket, endpoint: str) -> None:
    found = store_in(bucket, endpoint)["step_0"].read_object(f"{KEY}/weight")
    assert torch.equal(found, content(0)["weight"])


def _take(bucket: Bucket, endpoint: str) -> None:
    take(store_in(bucket, endpoint), 3)


def _async_take(bucket: Bucket, endpoint: str) -> None:
    pending = store_in(bucket, endpoint).async_take(app_state(3), "step_3", metadata={"step": 3})
    pending.wait()


def _collect(bucket: Bucket, endpoint: str) -> None:
    store_in(bucket, endpoint).gc(grace=0)


def _copy_in(bucket: Bucket, endpoint: str) -> None:
    """Copy a snapshot into the bucket, from a store that the first call makes."""
    source = Store(f"memory://{bucket.uri[5:]}/source", chunk_size=CHUNK)
    if not source.snapshots():
        take(source, 3)
    source.copy(to=store_in(bucket, endpoint))


def _copy_out(bucket: Bucket, endpoint: str) -> None:
    """Copy all snapshots of the bucket; what an earlier call has copied stays."""
    there = Store(f"memory://{bucket.uri[5:]}/there", chunk_size=CHUNK)
    try:
        store_in(bucket, endpoint).copy(to=there)
    finally:
        for snapshot in there.snapshots():
            assert_holds(snapshot, snapshot.metadata.user["step"])
    assert {0, 1} <= {s.metadata.user["step"] for s in there.snapshots()}


OPERATIONS: dict[str, Callable[[Bucket, str], None]] = {
    "take": _take,
    "async_take": _async_take,
    "restore": _restore,
    "read_object": _read_object,
    "gc": _collect,
    "copy in": _copy_in,
    "copy out": _copy_out,
}
_WRITING_STEP_3 = ("take", "async_take", "copy in")


@pytest.fixture(scope="module")
def known_proxy(server_of: Callable[[str], Server]) -> Iterator[FaultyProxy]:
    """Return a proxy that this host has met, so that it does not probe there any more."""
    server = server_of("seaweedfs")
    with FaultyProxy(server.endpoint) as proxy, server.bucket() as bucket:
        store_in(bucket, proxy.url)
        yield proxy


@pytest.fixture
def proxy(bucket: Bucket, known_proxy: FaultyProxy) -> FaultyProxy:
    """Return a proxy before a store with two snapshots, and the garbage of a third."""
    store = store_in(bucket)
    for step in range(3):
        take(store, step)
    store.delete("step_2")
    known_proxy.log.clear()
    return known_proxy


def assert_all_is_well(bucket: Bucket, operation: str) -> None:
    """Check what is left after an operation that may have failed, and that all works again."""
    maybe = 3 if operation in _WRITING_STEP_3 else None
    assert_bucket(bucket, {0, 1}, maybe=maybe)
    store = store_in(bucket)
    take(store, 4)
    store.gc(grace=0)
    assert_bucket(bucket, {0, 1, 4}, maybe=maybe)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes(
    bucket: Bucket, proxy: FaultyProxy, fault: str, operation: str
) -> None:
    """Two requests fail: the operation succeeds all the same, by few requests more."""
    times = None if fault == "latency" else 2
    with proxy.during(FAULTS[fault](skip=2, times=times)) as (struck,):
        OPERATIONS[operation](bucket, proxy.url)
    tried = len(proxy.log)
    # A put if absent that is unclear costs a read and another put.
    extra = 0 if fault == "latency" else 3 * struck.struck
    assert tried <= 60 + extra, proxy.log
    assert_all_is_well(bucket, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "latency"])
def test_a_fault_that_stays(bucket: Bucket, proxy: FaultyProxy, fault: str, operation: str) -> None:
    """From some request on each one fails: an error says so soon, or none was needed."""
    failed = False
    with proxy.during(FAULTS[fault](skip=3, times=None)) as (struck,):
        try:
            OPERATIONS[operation](bucket, proxy.url)
        except UnavailableError:
            failed = True
    if fault not in ("409", "lost answer"):
        assert failed == (struck.struck > 0)
    assert len(proxy.log) <= 60 + 8 * IMPATIENT["attempts"], proxy.log
    assert_all_is_well(bucket, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_server_that_is_down(bucket: Bucket, proxy: FaultyProxy, operation: str) -> None:
    with proxy.down(), pytest.raises(UnavailableError):
        OPERATIONS[operation](bucket, proxy.url)
    assert_all_is_well(bucket, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("chance", [0.05, 0.3])
def test_a_line_that_fails_at_random(
    bucket: Bucket, proxy: FaultyProxy, operation: str, chance: float
) -> None:
    kinds = [name for name in FAULTS if name not in ("silence", "stall in the answer", "latency")]
    faults = [
        FAULTS[name](times=None, chance=chance / len(kinds), seed=seed)
        for seed, name in enumerate(kinds)
    ]
    for _ in range(3):
        with proxy.during(*faults):
            try:
                OPERATIONS[operation](bucket, proxy.url)
            except CasnapError:
                continue
    assert len(proxy.log) <= 3 * (60 + 8 * IMPATIENT["attempts"]), proxy.log
    assert_all_is_well(bucket, operation)


def _ranks_take(bucket: Bucket, endpoint: str, timeout: float) -> str:
    """Take on this rank; return the error that it ended with."""
    try:
        take(store_in(bucket, endpoint, create=False), 3, timeout=timeout)
    except UnavailableError:  # or one of its kinds: of a commit whose end is not known
        return UnavailableError.__name__
    except CasnapError as e:
        return type(e).__name__
    return ""


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        *((name, 2) for name in FAULTS if name != "latency"),
        *((name, None) for name in ("reset", "silence", "409", "lost answer")),
    ],
)
def test_ranks(
    bucket: Bucket,
    proxy: FaultyProxy,
    world: Callable[[int], World],
    fault: str,
    times: int | None,
) -> None:
    """All ranks end alike: the snapshot is there for all of them, or each has an error."""
    # A rank that cannot even open the store never comes, so the other one waits that long for it.
    timeout = 15.0 if times is None else 120.0
    with proxy.during(FAULTS[fault](skip=6, times=times)):
        raised = world(2).run(_ranks_take, bucket, proxy.url, timeout)
    if times is not None:
        assert raised == ["", ""]
    assert set(raised) <= {"", "UnavailableError", "RankError"}
    assert len(proxy.log) <= 2 * (60 + 8 * IMPATIENT["attempts"]), proxy.log
    if "" in raised:
        assert_bucket(bucket, {0, 1, 3})
    assert_all_is_well(bucket, "take")


@pytest.mark.parametrize("times", [2, None])
@pytest.mark.parametrize("fault", ["reset", "lost answer", "500", "409"])
@pytest.mark.usefixtures("cache_dir")
def test_making_a_store(bucket: Bucket, fault: str, times: int | None) -> None:
    """The place is probed first. What fails leaves nothing that the next attempt trips over."""
    with FaultyProxy(bucket.server.endpoint) as proxy:
        with proxy.during(FAULTS[fault](skip=1, times=times)):
            try:
                store_in(bucket, proxy.url)
            except StoreError:
                assert times is None
        assert len(proxy.log) <= 60 + 8 * IMPATIENT["attempts"], proxy.log
    take(store_in(bucket), 0)
    assert_bucket(bucket, {0})
