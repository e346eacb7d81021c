"""A server that is away for a while: takes and restores live through it; its time counts alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from casnap import Snapshot, Store
from tests.support.faults import CHUNK, app_state, assert_holds, take
from tests.support.faulty import FaultyProxy, HttpFault, stall
from tests.support.servers import Bucket, deaf_port
from tests.support.unavailable import unavailable

pytestmark = pytest.mark.servers

QUICK: Mapping[str, Any] = {
    "deadline": 100.0,
    "silence": 0.2,
    "first_contact": 1.0,
    "first_delay": 0.01,
    "longest_delay": 0.1,
}
"""A fiftieth of the usual patience between two attempts, so that an outage is short."""


@contextmanager
def _away(proxy: FaultyProxy, kind: str, seconds: float) -> Iterator[None]:
    """Have the server refuse connections, or hang, for a while that goes on within the block."""
    with ExitStack() as outage:
        outage.enter_context(
            proxy.down() if kind == "refuses" else proxy.during(HttpFault(stall(600.0), times=None))
        )
        back = threading.Timer(seconds, outage.pop_all().close)
        back.start()
        yield
    back.join()


def _take(store: Store, uri: str, options: Mapping[str, Any]) -> None:
    take(store, 1)
    assert_holds(store["step_1"], 1)


def _direct_take(store: Store, uri: str, options: Mapping[str, Any]) -> None:
    """Open the store anew, as a take by a URI does."""
    Snapshot.take(f"{uri}/step_1", app_state(1), storage_options=options)
    assert_holds(store["step_1"], 1)


def _restore(store: Store, uri: str, options: Mapping[str, Any]) -> None:
    assert_holds(store["step_0"], 0)


@pytest.mark.parametrize("work", [_take, _direct_take, _restore])
@pytest.mark.parametrize("kind", ["refuses", "hangs"])
@pytest.mark.parametrize(
    ("patience", "seconds"), [(QUICK, 4.0), pytest.param({}, 60.0, marks=pytest.mark.slow)]
)
def test_an_outage(
    bucket: Bucket,
    work: Callable[[Store, str, Mapping[str, Any]], None],
    kind: str,
    patience: Mapping[str, Any],
    seconds: float,
) -> None:
    uri = f"{bucket.uri}/run"
    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": patience}
        store = Store(uri, storage_options=options, chunk_size=CHUNK)
        take(store, 0)
        with _away(proxy, kind, seconds):
            work(store, uri, options)


def test_a_server_that_never_answered_is_given_up_early(bucket: Bucket) -> None:
    """Also one that takes connections, and is silent, as after each attempt."""
    options = {**bucket.storage_options, "casnap": QUICK}
    with (
        deaf_port(drops=False) as url,
        unavailable("unreachable", match=r"attempts? in \d\.\d s"),
    ):
        Store(f"{bucket.uri}/run", storage_options={**options, "endpoint_url": url}).make()


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
