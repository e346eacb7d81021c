"""What a host found about put-if-absent holds for the state that the bucket was in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from casnap import Store
from casnap.errors import StoreError
from tests.support.cli_calls import failure
from tests.support.faults import take
from tests.support.forgetful import ForgetfulProxy
from tests.support.object_stores import store_in
from tests.support.servers import Bucket

pytestmark = pytest.mark.servers


@pytest.fixture
def proxy(bucket: Bucket, cache_dir: Path) -> Iterator[ForgetfulProxy]:
    with ForgetfulProxy(bucket.server) as proxy:
        yield proxy


def _names(bucket: Bucket) -> set[str]:
    return {snapshot.name for snapshot in store_in(bucket, create=False).snapshots()}


def _takes(store: Store, first: int) -> tuple[set[str], set[str]]:
    """Take five times; return what was reported as taken, and the errors."""
    taken, errors = set(), set()
    for step in range(first, first + 5):
        try:
            taken.add(take(store, step).name)
        except StoreError as e:
            errors.add(str(e))
    return taken, errors


@pytest.mark.parametrize("opened", ["before", "after"])
def test_no_commit_is_lost_once_versioning_is_switched_on(
    bucket: Bucket, proxy: ForgetfulProxy, opened: str
) -> None:
    """Three writers of a host that has found the server sound: none overwrites another's commit."""
    take(store_in(bucket, proxy.url), 0)
    stores = [store_in(bucket, proxy.url) for _ in range(3)] if opened == "before" else []
    proxy.keeps_versions = True
    stores = stores or [store_in(bucket, proxy.url) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(_takes, stores, (100, 200, 300)))
    assert _names(bucket) == {"step_0"}.union(*(taken for taken, _ in told)) == {"step_0"}
    [error] = set[str]().union(*(errors for _, errors in told))
    assert "does not honour put-if-absent" in error
    assert "versioning is enabled" in error
    for write in (lambda: stores[0].tag("step_0", "best"), lambda: stores[0].gc(grace=0)):
        with pytest.raises(StoreError, match="put-if-absent"):
            write()
    assert store_in(bucket, create=False).check(data=True).ok


def test_the_verdict_is_told(
    bucket: Bucket, proxy: ForgetfulProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(bucket, proxy.url)
    take(store, 0)
    assert store_in(bucket, proxy.url).check().warnings == []
    proxy.keeps_versions = True
    [*_, warning] = store_in(bucket, proxy.url).check().warnings
    assert "this host has not found that the server honours put-if-absent" in warning
    for name, value in {**bucket.environment, "AWS_ENDPOINT_URL": proxy.url}.items():
        monkeypatch.setenv(name, value)
    for uri in (f"{bucket.uri}/run", f"{bucket.uri}/new"):
        assert "does not honour put-if-absent" in failure("init", uri)


def test_a_sound_server_is_probed_once_in_each_state(bucket: Bucket, cache_dir: Path) -> None:
    """It goes on to be written to. A take in a state that is known makes no request more."""
    store = store_in(bucket)
    take(store, 0)
    usual = take(store, 1).requests
    client = bucket.server.client()
    switch = {"VersioningConfiguration": {"Status": "Enabled"}}
    client.put_bucket_versioning(Bucket=bucket.name, **switch)
    probed = take(store, 2).requests
    assert 0 < probed["put"] - usual["put"] <= 6
    assert take(store, 3).requests == usual
    again = store_in(bucket)
    assert take(again, 4).requests["put"] == usual["put"]
    again.gc(grace=0)
    assert _names(bucket) == {f"step_{n}" for n in range(5)}
