"""Remote backends pass the suite that the package ships, on servers that run on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from casnap import Store
from casnap.backends import Backend, backend_at
from casnap.errors import StoreError
from casnap.storage.commit_log.put_if_absent_probe import honours_put_if_absent
from casnap.testing.backend_suite import BrokenBackendSuite, Opener, SharedBackendSuite, pattern
from tests.support import ceph
from tests.support.faulty import FaultyProxy, HttpFault, after, answer, break_off, cut, hang_up
from tests.support.object_stores import IMPATIENT
from tests.support.servers import Bucket, Server, azure_connection
from tests.support.unavailable import unavailable

PUTS = ("PUT", "POST")
CUTS = (cut(0), cut(1000), cut(1 << 20), cut(1000, reset=True))


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
    def proxy(self, bucket: Bucket) -> Iterator[FaultyProxy]:
        with FaultyProxy(bucket.server.endpoint) as proxy:
            yield proxy

    @pytest.fixture
    def proxied(self, bucket: Bucket, proxy: FaultyProxy) -> Backend:
        """Return the same backend, reached by way of a proxy."""
        options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": IMPATIENT}
        return opened(f"{bucket.uri}/some/prefix", options, exclusive=self.exclusive)

    @pytest.fixture
    def broken(self, bucket: Bucket) -> Backend:
        """Return one whose bucket does not exist."""
        uri = f"{bucket.uri}-not-here/prefix"
        return opened(uri, bucket.storage_options, exclusive=self.exclusive)


class LostOnTheWay:
    """What a backend does while its line to the server breaks; for :class:`OnServer`."""

    many = 2500

    def test_a_lost_answer(self, backend: Backend, proxied: Backend, proxy: FaultyProxy) -> None:
        """One put wins and returns True; the others return False."""
        with proxy.during(HttpFault(after(hang_up()), PUTS)) as (fault,):
            assert proxied.put_if_absent("roots/0/1", b"mine") is True
        assert fault.struck == 1
        backend.write("roots/0/2", b"another's")
        with proxy.during(HttpFault(after(hang_up()), PUTS)):
            assert proxied.put_if_absent("roots/0/2", b"mine") is False
        assert backend.read("roots/0/1") == b"mine"
        assert backend.read("roots/0/2") == b"another's"

    def test_a_conflict_that_is_none(
        self, backend: Backend, proxied: Backend, proxy: FaultyProxy
    ) -> None:
        """409 and 412 say nothing: only the object itself does, or its absence."""
        for n, status in enumerate((409, 412)):
            key, refusal = f"roots/0/{n}", answer(status, "ConditionalRequestConflict")
            with proxy.during(HttpFault(refusal, PUTS, times=2)) as (fault,):
                assert proxied.put_if_absent(key, b"mine") is True
            assert fault.struck == 2
            assert backend.read(key) == b"mine"

    def test_an_object_that_is_sent_in_part(
        self, backend: Backend, proxied: Backend, proxy: FaultyProxy
    ) -> None:
        """It is absent, or whole."""
        content = pattern(3 << 20)
        faults = HttpFault(break_off(2 << 20), PUTS, times=None)
        for write in (proxied.write, proxied.put_if_absent):
            key = f"packs/ab/{write.__name__}"
            with proxy.during(faults), unavailable("unreachable"):
                write(key, content)
            assert key not in backend.sizes("packs")
            write(key, content)
            assert backend.read(key) == content
        assert len(proxy.log) < 50

    def test_an_answer_that_ends_early(
        self, backend: Backend, proxied: Backend, proxy: FaultyProxy
    ) -> None:
        content = pattern(3 << 20)
        backend.write("packs/ab/x", content)
        faults = [HttpFault(act, "GET", "*packs*x*", skip=n) for n, act in enumerate(CUTS)]
        with proxy.during(*faults):
            assert proxied.read("packs/ab/x") == content
            target = bytearray(1 << 20)
            assert proxied.read_into("packs/ab/x", [(1 << 20, memoryview(target))]) == [1 << 20]
        assert target == content[1 << 20 : 2 << 20]

    def test_many_objects(self, bucket: Bucket) -> None:
        """More than one page of a listing, and more than one batch of deletes."""
        # On a busy machine an emulator is silent for long.
        options = {**bucket.storage_options, "casnap": {"silence": 240.0, "deadline": 500.0}}
        backend = opened(f"{bucket.uri}/some/prefix", options)
        keys = [f"packs/{n % 7:02x}/{n:05d}" for n in range(self.many)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: backend.write(key, b"x"), keys))
        assert backend.sizes("packs") == dict.fromkeys(keys, 1)
        assert sorted(backend.names("packs")) == [f"{n:02x}" for n in range(7)]
        before = backend.requests.get("delete", 0)
        assert backend.delete_all(keys) == {}
        assert backend.requests["delete"] - before <= 50
        assert backend.sizes("packs") == {}


def only(*names: str) -> Callable[[type[OnServer]], type[OnServer]]:
    """Leave only some tests of a suite."""

    def left(suite: type[OnServer]) -> type[OnServer]:
        for name in dir(suite):
            if name.startswith("test_") and name not in names:
                setattr(suite, name, None)
        return suite

    return left


@only("test_what_is_written_is_read", "test_names_are_those_of_one_level", "test_a_lost_answer")
class TestShortly(OnServer, LostOnTheWay):
    """What `make test` runs."""

    kind = "seaweedfs"


@pytest.mark.servers
class TestSeaweedFS(OnServer, LostOnTheWay):
    kind = "seaweedfs"


@pytest.mark.servers
class TestMoto(OnServer, LostOnTheWay):
    kind = "moto"


@pytest.mark.servers
class TestRclone(OnServer, LostOnTheWay):
    """It ignores If-None-Match, so only one process may write at a time."""

    kind = "rclone"
    exclusive = True

    test_processes_that_put_one_key = None


@pytest.mark.servers
class TestGcs(OnServer, LostOnTheWay):
    """The emulator ignores ifGenerationMatch, which a proxy of the tests enforces before it."""

    kind = "gcs"
    many = 1100  # the emulator takes long

    @pytest.fixture
    def broken(self, request: pytest.FixtureRequest, bucket: Bucket) -> Backend:
        """Return one whose bucket does not exist."""
        if "delete_all" in request.node.name:
            pytest.skip("the emulator says of a batch only that each object is missing")
        return opened(f"{bucket.uri}-not-here/prefix", bucket.storage_options)


@pytest.mark.servers
class TestCeph(OnServer, LostOnTheWay):
    """The gateway of a cluster of one monitor and one OSD.

    It honours put-if-absent, but not in a bucket that keeps versions.
    """

    kind = "ceph"

    @pytest.fixture
    def bucket(self, server_of: Callable[[str], Server]) -> Iterator[Bucket]:
        if missing := [name for name in ceph.PROGRAMS if shutil.which(name) is None]:
            pytest.skip(f"Ceph is not installed: no {', '.join(missing)}")
        with server_of(self.kind).bucket() as bucket:
            yield bucket

    def test_writers_are_kept_apart(self, backend: Backend) -> None:
        assert backend.can_put_if_absent
        assert honours_put_if_absent(backend)

    def test_a_bucket_that_keeps_versions_is_refused(self, bucket: Bucket) -> None:
        bucket.server.client().put_bucket_versioning(
            Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
        )
        store = Store(f"{bucket.uri}/run", storage_options=bucket.storage_options)
        with pytest.raises(StoreError, match=r"does not honour put-if-absent.*versioning is"):
            store.make()


@pytest.mark.servers
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, to adlfs
class TestAzure(OnServer, LostOnTheWay):
    """A place that casnap reaches by fsspec alone, whose server honours put-if-absent."""

    kind = "azurite"
    # Its client makes attempts of its own, and waits long between them.
    test_an_object_that_is_sent_in_part = None
    test_an_answer_that_ends_early = None
    test_many_objects = None

    @pytest.fixture
    def bucket(self, server_of: Callable[[str], Server]) -> Iterator[Bucket]:
        pytest.importorskip("adlfs")
        if shutil.which("npm") is None:
            pytest.skip("Azurite, which stands in for Azure, is installed by npm")
        with server_of(self.kind).bucket() as bucket:
            yield bucket

    @pytest.fixture
    def proxied(self, bucket: Bucket, proxy: FaultyProxy) -> Backend:
        options = {"connection_string": azure_connection(proxy.url), "casnap": IMPATIENT}
        return opened(f"{bucket.uri}/some/prefix", options)

    def test_writers_are_kept_apart(self, backend: Backend) -> None:
        assert backend.can_put_if_absent
        assert honours_put_if_absent(backend)
