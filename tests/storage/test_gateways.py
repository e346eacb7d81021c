"""Servers that honour put-if-absent, and one that does not; what their buckets' rules say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from casnap import StateDict, Store
from casnap.backends import backend_at
from casnap.errors import StoreError
from casnap.storage.commit_log.put_if_absent_probe import honours_put_if_absent
from tests.support.cli_calls import document, failure, invoke
from tests.support.servers import Bucket, Server

pytestmark = pytest.mark.servers

TINY = {"s": StateDict(x=1)}


@pytest.fixture
def bucket_of(
    server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Bucket]]:
    """Return a bucket of a kind of server; the environment tells the command how to reach it."""
    kept = []

    def bucket_of(kind: str) -> Bucket:
        made = server_of(kind).bucket()
        kept.append(made)
        bucket = made.__enter__()
        if not bucket.server.is_gcs:
            for name, value in bucket.environment.items():
                monkeypatch.setenv(name, value)
        return bucket

    yield bucket_of
    for made in kept:
        made.__exit__(None, None, None)


@pytest.mark.parametrize("kind", ["seaweedfs", "moto", "rclone", "gcs"])
def test_who_honours_put_if_absent(bucket_of: Callable[[str], Bucket], kind: str) -> None:
    bucket = bucket_of(kind)
    backend = backend_at(f"{bucket.uri}/run1", bucket.storage_options)
    assert honours_put_if_absent(backend) is bucket.server.honours_if_absent
    assert backend.names("tmp") == []
    # Two puts, then four at once, the readings of those that lost, of the winners, the cleaning up,
    # the list above, and two that may be tried again.
    assert sum(backend.requests.values()) <= 15 + 2


def test_a_gateway_that_overwrites(bucket_of: Callable[[str], Bucket]) -> None:
    bucket = bucket_of("rclone")
    uri, options = f"{bucket.uri}/run1", bucket.storage_options
    with pytest.raises(StoreError, match="exclusive=True"):
        Store(uri, storage_options=options).make()
    assert "pass --exclusive" in failure("init", uri)
    assert backend_at(uri, options).sizes("") == {}
    assert document("init", uri, "--exclusive")["created"] is True
    store = Store(uri, storage_options=options)
    with pytest.raises(StoreError, match="exclusive=True"):
        store.take(TINY, "a")
    alone = Store(uri, storage_options=options, exclusive=True)
    for name in ("a", "b", "c"):
        alone.take(TINY, name)
    assert [s.name for s in store.snapshots()] == ["a", "b", "c"]
    assert "pass --exclusive" in failure("rm", f"{uri}/a", "--yes")
    document("rm", f"{uri}/a", "--yes", "--exclusive")
    assert "pass --exclusive" in failure("gc", uri, "--grace", 0)
    document("gc", uri, "--grace", 0, "--exclusive")
    assert document("check", uri, "--data")["ok"]


def test_a_rule_that_expires_roots(
    bucket_of: Callable[[str], Bucket], caplog: pytest.LogCaptureFixture
) -> None:
    bucket = bucket_of("moto")
    rule = {
        "ID": "old",
        "Status": "Enabled",
        "Filter": {"Prefix": "run"},
        "Expiration": {"Days": 9},
    }
    s3 = bucket.server.client()
    s3.put_bucket_lifecycle_configuration(
        Bucket=bucket.name, LifecycleConfiguration={"Rules": [rule]}
    )
    s3.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    with caplog.at_level(logging.WARNING):
        store = Store(f"{bucket.uri}/run1", storage_options=bucket.storage_options).make()
    assert "'old' deletes objects" in caplog.text
    assert "old versions" in caplog.text
    caplog.clear()
    Store(f"{bucket.uri}/run1", storage_options=bucket.storage_options).take(TINY, "a")
    assert caplog.text == ""
    assert len(store.check().warnings) == 2
    assert invoke("check", f"{bucket.uri}/run1").stdout.count("warning: ") == 2
    store.delete("a")
    assert len(store.gc(grace=0).warnings) == 2
    assert store.gc(grace=0).warnings == []


def test_a_bucket_without_rules(
    bucket_of: Callable[[str], Bucket], caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("seaweedfs", "moto"):
        bucket = bucket_of(kind)
        store = Store(f"{bucket.uri}/run1", storage_options=bucket.storage_options).make()
        assert store.check().warnings == []
    assert caplog.text == ""
