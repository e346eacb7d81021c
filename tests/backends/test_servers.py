"""Remote backends pass the suite that the package ships, on servers that run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from casnap.backends import Backend, backend_at
from casnap.testing.backend_suite import BrokenBackendSuite, Opener, SharedBackendSuite
from tests.support.servers import Bucket, Server


def opened(uri: str, storage_options: Mapping[str, Any], *, exclusive: bool = False) -> Backend:
    backend = backend_at(uri, storage_options)
    backend.exclusive = exclusive
    return backend


class OnServer(SharedBackendSuite, BrokenBackendSuite):
    kind: str
    exclusive = False

    @pytest.fixture
    def bucket(self, server_of: Callable[[str], Server]) -> Iterator[Bucket]:
        with server_of(self.kind).bucket() as bucket:
            yield bucket

    @pytest.fixture
    def opener(self, bucket: Bucket) -> Opener:
        uri = f"{bucket.uri}/some/prefix"
        return partial(opened, uri, bucket.storage_options, exclusive=self.exclusive)

    @pytest.fixture
    def broken(self, bucket: Bucket) -> Backend:
        """Return one whose bucket does not exist."""
        uri = f"{bucket.uri}-not-here/prefix"
        return opened(uri, bucket.storage_options, exclusive=self.exclusive)


class TestSeaweedFS(OnServer):
    kind = "seaweedfs"


@pytest.mark.servers
class TestMoto(OnServer):
    kind = "moto"


@pytest.mark.servers
class TestRclone(OnServer):
    """It ignores If-None-Match, so only one thread may write at a time."""

    kind = "rclone"
    exclusive = True

    test_threads_that_put_one_key = None
    test_processes_that_put_one_key = None
