"""Remote places that cannot be used: one clear error each, soon, and nothing half made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from casnap import Snapshot, StateDict, Store
from casnap.backends import backend_at
from casnap.errors import (
    InvalidNameError,
    NotAStoreError,
    Reason,
    SnapshotNotFoundError,
    StoreError,
)
from tests.support.cli_calls import document, failure, invoke
from tests.support.faulty import FaultyProxy, HttpFault, answer
from tests.support.servers import NOBODY, READER, Bucket
from tests.support.unavailable import unavailable

pytestmark = pytest.mark.servers

TINY = {"s": StateDict(x=1)}
FEW = 4
"""Requests that a refused call may make: it looks, and perhaps probes, but tries nothing again."""


@pytest.fixture
def options(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return how the bucket is reached; for the command, the environment says the same."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket.storage_options


@pytest.fixture
def proxy(options: dict[str, Any]) -> Iterator[FaultyProxy]:
    with FaultyProxy(options["endpoint_url"]) as proxy:
        yield proxy


def keys(bucket: Bucket) -> set[str]:
    """Return the keys of all objects in a bucket."""
    options = {"use_listings_cache": False, "skip_instance_cache": True}
    files = fsspec.filesystem("s3", **bucket.storage_options, **options)
    root = bucket.uri.removeprefix("s3://")
    return {path.removeprefix(f"{root}/") for path in files.find(root)}


def assert_refused(
    reason: Reason, problem: str, uri: str, options: dict[str, Any], *, reads: bool = True
) -> None:
    """Check that a store, a take and a look at a snapshot end with an error, and its message."""
    uses: list[Callable[[], object]] = [
        lambda: Store(f"{uri}/run1", storage_options=options).make(),
        lambda: Snapshot.take(f"{uri}/run1/step", TINY, storage_options=options),
        lambda: Snapshot.async_take(f"{uri}/run1/step", TINY, storage_options=options),
    ]
    if reads:
        uses.append(lambda: Snapshot(f"{uri}/run1/step", storage_options=options))
        uses.append(lambda: Store(f"{uri}/run1", create=False, storage_options=options))
    for use in uses:
        with unavailable(reason) as caught:
            use()
        message = str(caught.value)
        assert problem in message
        assert len(message) < 1000
        for name in ("key", "secret", "token"):
            assert not options.get(name) or str(options[name]) not in message


def test_a_bucket_that_does_not_exist(proxy: FaultyProxy, options: dict[str, Any]) -> None:
    reached = {**options, "endpoint_url": proxy.url}
    assert_refused("no_bucket", "does not exist", "s3://casnap-no-such-bucket", reached)
    assert sum(proxy.requests.values()) <= 5 * FEW
    assert "does not exist" in failure("ls", "s3://casnap-no-such-bucket/run1")


@pytest.mark.parametrize("change", [{"secret": "wrong"}, {"key": "casnap-unknown"}])
def test_credentials_that_are_wrong(
    bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any], change: dict[str, str]
) -> None:
    reached = {**options, **change, "endpoint_url": proxy.url}
    assert_refused("credentials", "credentials", bucket.uri, reached)
    assert sum(proxy.requests.values()) <= 5 * FEW
    assert keys(bucket) == set()


def test_credentials_that_have_expired(
    bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any]
) -> None:
    proxy.faults.append(HttpFault(answer(400, "ExpiredToken"), times=None))
    reached = {**options, "endpoint_url": proxy.url}
    assert_refused("credentials", "expired", bucket.uri, reached)
    # Each call tries once more, with new ones.
    assert sum(proxy.requests.values()) <= 2 * 5 * FEW
    assert keys(bucket) == set()


@pytest.mark.parametrize("told", [{"x_amz_bucket_region": "eu-west-9"}, {}])
def test_a_bucket_of_another_region(
    bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any], told: dict[str, str]
) -> None:
    elsewhere = answer(301, "PermanentRedirect", **told)
    proxy.faults.append(HttpFault(elsewhere, times=None))
    reached = {**options, "endpoint_url": proxy.url}
    assert_refused("unreachable", "region", bucket.uri, reached)
    assert sum(proxy.requests.values()) <= 5 * FEW
    assert keys(bucket) == set()


def test_who_may_do_nothing(bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any]) -> None:
    reached = {**options, "key": NOBODY, "endpoint_url": proxy.url}
    assert_refused("denied", "does not allow this", bucket.uri, reached)
    assert sum(proxy.requests.values()) <= 5 * FEW
    assert keys(bucket) == set()


def test_who_may_only_read(
    bucket: Bucket, options: dict[str, Any], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, reader = f"{bucket.uri}/run1", {**options, "key": READER}
    assert_refused("denied", "not allow", bucket.uri, reader, reads=False)
    assert keys(bucket) == set()
    Store(uri, storage_options=options).take(TINY, "step_1")
    before = keys(bucket)
    store = Store(uri, storage_options=reader)
    assert store["step_1"].read_object("s/x") == 1
    assert store.check(data=True).ok
    writes: list[Callable[[], object]] = [
        lambda: store.take(TINY, "step_2"),
        lambda: store.async_take(TINY, "step_2").wait(),
        lambda: store.tag("step_1", "x"),
        lambda: store.delete("step_1"),
    ]
    for write in writes:
        with unavailable("denied"):
            write()
    assert keys(bucket) == before
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    assert "does not allow" in failure("rm", f"{uri}/step_1", "--yes")
    assert [s["name"] for s in document("ls", uri)["snapshots"]] == ["step_1"]


def test_who_may_not_delete(
    bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A marker that stays is a warning; a collection says what it could not delete."""
    proxy.faults.append(HttpFault(answer(403, "AccessDenied"), ("DELETE",), times=None))
    store = Store(f"{bucket.uri}/run1", storage_options={**options, "endpoint_url": proxy.url})
    store.take(TINY, "a")
    with caplog.at_level(logging.WARNING):
        store.delete("a")
    assert "'a' is deleted, but its marker file cannot be" in caplog.text
    assert store.snapshots() == []


def test_who_may_not_list(bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any]) -> None:
    proxy.faults.append(
        HttpFault(answer(403, "AccessDenied"), ("GET",), "*list-type=2*", times=None)
    )
    reached = {**options, "endpoint_url": proxy.url}
    assert_refused("denied", "does not allow this", bucket.uri, reached)
    assert keys(bucket) == set()


def test_an_endpoint_that_is_down(
    bucket: Bucket, proxy: FaultyProxy, options: dict[str, Any]
) -> None:
    reached = {**options, "endpoint_url": proxy.url}
    proxy.close()
    with unavailable("unreachable", match="attempts"):
        Store(f"{bucket.uri}/run1", storage_options=reached).make()
    told = failure("ls", f"{bucket.uri}/run1", "--endpoint-url", proxy.url)
    assert "last one failed" in told


def test_the_root_of_a_bucket(bucket: Bucket, options: dict[str, Any]) -> None:
    path = f"{bucket.uri}/step_1"
    for use in (
        lambda: Snapshot.take(path, TINY, storage_options=options),
        lambda: Snapshot.async_take(path, TINY, storage_options=options),
    ):
        with pytest.raises(StoreError, match=f"`casnap init {bucket.uri}`"):
            use()
    with pytest.raises(NotAStoreError):
        Snapshot(path, storage_options=options)
    with pytest.raises(InvalidNameError, match="names a bucket"):
        Snapshot.take(bucket.uri, TINY, storage_options=options)
    assert keys(bucket) == set()
    assert document("init", bucket.uri)["created"] is True
    assert document("init", bucket.uri)["created"] is False
    Snapshot.take(path, TINY, storage_options=options)
    assert Snapshot(path, storage_options=options).store.uri == bucket.uri


def test_a_path_that_is_an_object(bucket: Bucket, options: dict[str, Any]) -> None:
    backend_at(bucket.uri, options).mark("a/model.bin", b"x")
    backend_at(bucket.uri, options).mark("a/empty", b"")
    for name in ("model.bin", "empty"):
        uri = f"{bucket.uri}/a/{name}"
        for use in (
            lambda uri=uri: Store(uri, storage_options=options).make(),
            lambda uri=uri: Snapshot.take(f"{uri}/step", TINY, storage_options=options),
            lambda uri=uri: Snapshot(f"{uri}/step", storage_options=options),
        ):
            with pytest.raises(NotAStoreError, match="is an object"):
                use()
        assert "is an object" in failure("ls", uri)
    assert keys(bucket) == {"a/model.bin", "a/empty"}


def test_no_store_is_looked_for_above(bucket: Bucket, options: dict[str, Any]) -> None:
    store = Store(f"{bucket.uri}/ckpts", storage_options=options)
    store.take(TINY, "run1/step_1")
    nested = f"{bucket.uri}/ckpts/run1/step_1"
    with pytest.raises(NotAStoreError, match="two slashes"):
        Snapshot(nested, storage_options=options)
    assert "two slashes" in failure("show", nested)
    named = f"{bucket.uri}/ckpts//run1/step_1"
    assert Snapshot(named, storage_options=options).name == "run1/step_1"
    assert Snapshot("run1/step_1", store=store).commit_id == document("show", named)["commit"]
    view = Store(f"{bucket.uri}/ckpts//run1", storage_options=options)
    assert [s.name for s in view.snapshots()] == ["step_1"]
    Snapshot.take("run1/step_2", TINY, storage_options=options, store=f"{bucket.uri}/ckpts")
    assert len(view.snapshots()) == 2
    with pytest.raises(SnapshotNotFoundError, match="run1/step_2"):
        Snapshot(f"{bucket.uri}/ckpts//run1/step_3", storage_options=options)


@pytest.mark.parametrize("name", ["a b", "é名", "100%25", "a?b=c", "a#b", "a+b&c", "a?versionId=x"])
def test_odd_names(bucket: Bucket, options: dict[str, Any], name: str) -> None:
    uri = f"{bucket.uri}/in {name}/x"
    Snapshot.take(f"{uri}/{name}", TINY, storage_options=options)
    assert Snapshot(f"{uri}/{name}", storage_options=options).read_object("s/x") == 1
    assert f"in {name}/x/{name}/casnap-snapshot.json" in keys(bucket)
    assert [s["name"] for s in document("ls", uri)["snapshots"]] == [name]


def test_the_commands(bucket: Bucket, options: dict[str, Any], monkeypatch: Any) -> None:
    """Each command works on a store at a URI, reached by its own options."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    at = ("--endpoint-url", options["endpoint_url"])
    uri = f"{bucket.uri}/run1"
    made = document("init", uri, *at)
    assert made["created"]
    assert made["requests"]["put"] > 0
    store = Store(uri, storage_options=options)
    for step in range(3):
        state = {"s": StateDict(step=step, same=list(range(2000)))}
        store.take(state, f"step_{step}")
    listed = document("ls", uri, *at)
    assert [s["name"] for s in listed["snapshots"]] == ["step_0", "step_1", "step_2"]
    assert listed["requests"]["get"] > 0
    assert document("show", f"{uri}/step_1/", *at)["requests"]["get"] > 0
    assert document("diff", f"{uri}/step_0", "step_1", *at)["changed_count"] == 1
    assert document("diff", f"{uri}/step_0", f"{uri}/step_2", *at)["requests"]["get"] > 0
    assert document("du", uri, *at)["requests"]["get"] > 0
    assert " requests: " in invoke("du", uri, *at).stdout
    assert document("tag", f"{uri}/step_0", "best", *at)["requests"]["put"] > 0
    assert document("rm", f"{uri}/step_1", "--yes", *at)["requests"]["delete"] > 0
    pruned = document("prune", uri, "--keep-last", 1, "--yes", *at)
    assert [s["kept"] for s in pruned["snapshots"]] == [True, True]
    assert document("gc", uri, "--grace", 0, *at)["requests"]["delete"] > 0
    assert document("check", uri, "--data", *at)["requests"]["list"] > 0
    assert document("repair", uri, "--yes", *at)["ok"]


def test_a_snapshot_is_no_store(bucket: Bucket, options: dict[str, Any]) -> None:
    Store(f"{bucket.uri}/run1", storage_options=options).take(TINY, "step_1")
    before = keys(bucket)
    with pytest.raises(NotAStoreError, match="step_1 is a snapshot of a store further up"):
        Store(f"{bucket.uri}/run1/step_1", storage_options=options).make()
    with pytest.raises(NotAStoreError, match="step_1 is a snapshot of a store further up"):
        Snapshot.take(f"{bucket.uri}/run1/step_1/again", TINY, storage_options=options)
    assert keys(bucket) == before
