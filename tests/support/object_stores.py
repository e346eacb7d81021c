"""Stores in buckets: how tests open them, and what they must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from casnap import NewStore, Store
from casnap.backends.base import TEMPORARY
from casnap.format.records import pack_key, segment_key
from tests.support.faults import CHUNK, assert_holds
from tests.support.servers import Bucket

IMPATIENT: Mapping[str, Any] = {
    "attempts": 5,
    "deadline": 120.0,
    "silence": 5.0,
    "first_contact": 20.0,
    "first_delay": 0.01,
    "longest_delay": 0.05,
}
"""How patient a store is that meets faults on purpose."""


def store_in(bucket: Bucket, endpoint: str | None = None, **options: Any) -> Store:
    """Open the store in a bucket.

    Args:
        bucket: The bucket.
        endpoint: Another URL of its server: that of a proxy. The store is impatient then.
        options: More arguments of ``Store``.
    """
    reached = bucket.storage_options
    if endpoint is not None:
        reached |= {"endpoint_url": endpoint, "casnap": IMPATIENT}
    exclusive = not bucket.server.honours_if_absent
    given: dict[str, Any] = {
        "create": NewStore(chunk_size=CHUNK),
        "exclusive": exclusive,
        **options,
    }
    return Store(f"{bucket.uri}/run", storage_options=reached, **given)


def assert_bucket(bucket: Bucket, steps: set[int], maybe: int | None = None) -> set[int]:
    """Check that a store holds the snapshots of exactly these steps, each whole; return them.

    Args:
        bucket: Where the store is.
        steps: What it must hold.
        maybe: A step that it may hold, whole.
    """
    store = store_in(bucket, create=False)
    found = {s.metadata.user["step"]: s for s in store.snapshots()}
    assert set(found) - {maybe} == steps - {maybe}
    for step, snapshot in found.items():
        assert_holds(snapshot, step)
    assert store.check(data=True).ok
    return set(found)


def forget_dead_takes(store: Store) -> None:
    """Delete the announcements of takes that were killed; collectors wait an hour for these."""
    backend = store._view.repository.backend
    for name in backend.names("tmp"):
        if name.startswith("take-"):
            backend.delete(f"tmp/{name}")


def assert_no_orphans_in(store: Store) -> None:
    """Check that there are just the packs and segments that the newest root names.

    A process that is killed while it probes a server leaves an object in tmp/, which goes after an
    hour.
    """
    view, backend = store._view.repository.view(), store._view.repository.backend
    assert backend.sizes("packs").keys() == set(map(pack_key, view.packs))
    assert backend.sizes("index").keys() == set(map(segment_key, view.segments))
    assert all(TEMPORARY.fullmatch(name) for name in backend.names("tmp"))
