"""What casnap says of its requests, on the command line and in the docs, is what a proxy sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from casnap import NewStore, Store
from tests.support.cli_calls import document, invoke
from tests.support.faults import CHUNK, take
from tests.support.faulty import FaultyProxy
from tests.support.servers import Bucket

pytestmark = pytest.mark.servers


@pytest.fixture
def proxy(
    bucket: Bucket, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyProxy]:
    """Return a proxy before a server that this host has not met, for the clients of this test."""
    with FaultyProxy(bucket.server.endpoint) as proxy:
        for name, value in {**bucket.environment, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


def test_what_the_docs_say_of_making_a_store(bucket: Bucket, proxy: FaultyProxy) -> None:
    store = Store(f"{bucket.uri}/run1", create=NewStore(chunk_size=CHUNK)).make()
    probes = sum("/run1/casnap-store/tmp/" in path for _, path in proxy.log)
    assert len(proxy.log) == sum(store.requests.values()) <= 30
    proxy.log.clear()
    Store(f"{bucket.uri}/run2", create=NewStore(chunk_size=CHUNK)).make()
    assert len(proxy.log) <= 30 - probes
    take(store, 0)
    proxy.log.clear()
    take(Store(f"{bucket.uri}/run1"), 0, overwrite=True)
    # As in another process, which looks at the packs once.
    assert set(proxy.requests) == {"PUT", "GET"}
    assert len(proxy.log) <= 8


def test_cp(bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    """To a store that it makes, to one that is there, and to a new name in one."""
    local = tmp_path / "local"
    take(local, 0)
    for target in ("run", "run", "run/best"):
        source = local / "step_0" if target.endswith("best") else local
        proxy.log.clear()
        output = invoke("cp", source, f"{bucket.uri}/{target}").stdout
        assert f"{len(proxy.log)} requests: " in output
    proxy.log.clear()
    answer = document("cp", f"{bucket.uri}/run/best", tmp_path / "back")["requests"]
    assert sum(answer.values()) == len(proxy.log)
