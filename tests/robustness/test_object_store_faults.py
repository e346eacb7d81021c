"""A server that fails, in each way, while a store is written, read and collected.

Committed snapshots stay whole. What is asked for is done, or an error of casnap says why not, after
a bounded number of requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casnap import NewStore, Snapshot, Store
from casnap.errors import CasnapError, StoreError, UnavailableError
from tests.support.faults import CHUNK, app_state, assert_holds, take
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
from tests.support.unavailable import unavailable
from tests.support.verbs import LITTERED, VERBS, whole

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


def copy_in(store: Store, case: Path) -> None:
    if not (case / "source").exists():
        take(case / "source", 9)
    Store(case / "source").copy(to=store)


def copy_out(store: Store, case: Path) -> None:
    """Copy all snapshots of the bucket; what an earlier call has copied stays."""
    try:
        store.copy(to=Store(case / "there", create=NewStore(chunk_size=CHUNK)))
    finally:
        there = whole(case / "there")
    assert LITTERED.items() <= there.items()


OPERATIONS: dict[str, Callable[[Store, Path], object]] = {
    verb: VERBS[verb].do for verb in ("take", "async-take", "restore", "read_object", "gc")
} | {"copy in": copy_in, "copy out": copy_out}
_WRITING_STEP_9 = ("take", "async-take", "copy in")


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
    for step in (2, *LITTERED.values()):
        take(store, step)
    store.delete("step_2")
    known_proxy.log.clear()
    return known_proxy


def assert_all_is_well(bucket: Bucket, operation: str) -> None:
    """Check what is left after an operation that may have failed, and that all works again."""
    maybe = 9 if operation in _WRITING_STEP_9 else None
    assert_bucket(bucket, {3, 4}, maybe=maybe)
    store = store_in(bucket)
    take(store, 20)
    store.gc(grace=0)
    assert_bucket(bucket, {3, 4, 20}, maybe=maybe)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, fault: str, operation: str
) -> None:
    """Two requests fail: the operation succeeds all the same, by few requests more."""
    times = None if fault == "latency" else 2
    with proxy.during(FAULTS[fault](skip=2, times=times)) as (struck,):
        OPERATIONS[operation](store_in(bucket, proxy.url), tmp_path)
    tried = len(proxy.log)
    # A put if absent that is unclear costs a read and another put.
    extra = 0 if fault == "latency" else 3 * struck.struck
    assert tried <= 60 + extra, proxy.log
    assert_all_is_well(bucket, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "latency"])
def test_a_fault_that_stays(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, fault: str, operation: str
) -> None:
    """From some request on each one fails: an error says so soon, or none was needed."""
    failed = False
    with proxy.during(FAULTS[fault](skip=3, times=None)) as (struck,):
        try:
            OPERATIONS[operation](store_in(bucket, proxy.url), tmp_path)
        except UnavailableError:
            failed = True
    if fault not in ("409", "lost answer"):
        assert failed == (struck.struck > 0)
    assert len(proxy.log) <= 60 + 8 * IMPATIENT["attempts"], proxy.log
    assert_all_is_well(bucket, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_server_that_is_down(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, operation: str
) -> None:
    with proxy.down(), pytest.raises(UnavailableError):
        OPERATIONS[operation](store_in(bucket, proxy.url), tmp_path)
    assert_all_is_well(bucket, operation)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("chance", [0.05, 0.3])
def test_a_line_that_fails_at_random(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, operation: str, chance: float
) -> None:
    kinds = [name for name in FAULTS if name not in ("silence", "stall in the answer", "latency")]
    faults = [
        FAULTS[name](times=None, chance=chance / len(kinds), seed=seed)
        for seed, name in enumerate(kinds)
    ]
    for _ in range(3):
        with proxy.during(*faults):
            try:
                OPERATIONS[operation](store_in(bucket, proxy.url), tmp_path)
            except CasnapError:
                continue
    assert len(proxy.log) <= 3 * (60 + 8 * IMPATIENT["attempts"]), proxy.log
    assert_all_is_well(bucket, operation)


def _ranks_take(bucket: Bucket, endpoint: str, timeout: float) -> str:
    """Take on this rank; return the error that it ended with."""
    try:
        take(store_in(bucket, endpoint, create=False), 9, timeout=timeout)
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
        assert_bucket(bucket, {3, 4, 9})
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


# --- a server that is away for a while: its time counts alone -------------------------------------

QUICK: Mapping[str, Any] = {
    "deadline": 100.0,
    "silence": 0.2,
    "first_contact": 1.0,
    "first_delay": 0.01,
    "longest_delay": 0.1,
}
"""A fiftieth of the usual patience between two attempts, so that an outage is short."""


@contextmanager
def away(proxy: FaultyProxy, kind: str, seconds: float) -> Iterator[None]:
    """Have the server refuse connections, or hang, for a while that goes on within the block."""
    with ExitStack() as outage:
        outage.enter_context(
            proxy.down() if kind == "refuses" else proxy.during(HttpFault(stall(600.0), times=None))
        )
        back = threading.Timer(seconds, outage.pop_all().close)
        back.start()
        yield
    back.join()


def direct_take(store: Store, uri: str, options: Mapping[str, Any]) -> None:
    """Open the store anew, as a take by a URI does."""
    Snapshot.take(f"{uri}/step_9", app_state(9), storage_options=options)
    assert_holds(store["step_9"], 9)


@pytest.mark.parametrize("work", ["take", "direct_take", "restore"])
@pytest.mark.parametrize("kind", ["refuses", "hangs"])
@pytest.mark.parametrize(
    ("patience", "seconds"), [(QUICK, 4.0), pytest.param({}, 60.0, marks=pytest.mark.slow)]
)
def test_an_outage(
    bucket: Bucket,
    tmp_path: Path,
    work: str,
    kind: str,
    patience: Mapping[str, Any],
    seconds: float,
) -> None:
    uri = f"{bucket.uri}/run"
    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": patience}
        store = Store(uri, storage_options=options, create=NewStore(chunk_size=CHUNK))
        take(store, 3)
        with away(proxy, kind, seconds):
            if work == "direct_take":
                direct_take(store, uri, options)
            else:
                VERBS[work].do(store, tmp_path)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_tls_where_the_server_speaks_none(bucket: Bucket, scheme: str) -> None:
    """It is told at the first attempt, by default: no later one would do better."""
    options: dict[str, Any] = {"endpoint_url": bucket.server.endpoint.replace("http:", "https:")}
    if scheme == "gs":
        pytest.importorskip("gcsfs")
        options |= {"token": "anon", "project": "x"}
    else:
        options |= {"key": "a", "secret": "b"}
    with unavailable("unreachable", match=r"1 attempt in .* TLS handshake .* http://"):
        Store(f"{scheme}://{bucket.name}/run", storage_options=options).make()
