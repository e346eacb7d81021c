"""Answers that are late, wrong or incomplete, and what a remote backend makes of them."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from casnap import StateDict, Store
from casnap.backends import Backend, backend_at
from casnap.backends.remote.any_fsspec import FsspecClient
from casnap.backends.remote.backend import RemoteBackend
from casnap.backends.remote.client import Sink, TransientError
from casnap.backends.remote.event_loop import event_loop
from casnap.errors import BackendError, StoreError, UnavailableError
from tests.support.faulty import FaultyProxy, HttpAct, HttpFault, answer, change
from tests.support.faulty.proxy import Answer, Exchange
from tests.support.object_stores import IMPATIENT
from tests.support.remote import RemoteDouble
from tests.support.servers import Bucket
from tests.support.unavailable import unavailable

MIB = 1 << 20


def reached(bucket: Bucket, proxy: FaultyProxy) -> Backend:
    """Return a backend that reaches its server by a proxy."""
    options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": IMPATIENT}
    return backend_at(f"{bucket.uri}/run", options)


class _Expiring(FsspecClient):
    """Its first read finds the credentials expired, its second fails while new ones come."""

    clients = 0
    reads = 0

    async def connect(self) -> None:
        _Expiring.clients += 1
        if _Expiring.clients > 1:
            await asyncio.sleep(0.3)

    async def get(self, key: str, run: tuple[int, int] | None, sink: Sink) -> int | None:
        _Expiring.reads += 1
        number = _Expiring.reads
        if number == 1:
            raise UnavailableError("expired", reason="credentials")
        if number == 2:
            await asyncio.sleep(0.1)
            raise TransientError("a bad moment")
        return await super().get(key, run, sink)


def test_requests_go_on_while_credentials_are_renewed(tmp_path: Path) -> None:
    """Another request that begins meanwhile does not stop the event loop for ever."""
    uri = f"file://{tmp_path}"
    (tmp_path / "casnap-store").mkdir()
    (tmp_path / "casnap-store/x").write_bytes(bytes(5 * MIB))
    backend = RemoteBackend(uri, lambda: _Expiring(uri, {}))
    targets = [(0, memoryview(bytearray(9))), (4 * MIB, memoryview(bytearray(9)))]
    pool = ThreadPoolExecutor(1)
    try:
        assert pool.submit(backend.read_into, "x", targets).result(20) == [9, 9]
    finally:
        pool.shutdown(wait=False)
    assert _Expiring.clients == 2


def headed(old: bytes, new: bytes) -> HttpAct:
    """Change the head of an answer."""

    def act(exchange: Exchange) -> Answer:
        found = exchange.go()
        return replace(found, head=re.sub(old, new, found.head, flags=re.IGNORECASE))

    return act


@pytest.mark.parametrize(
    "act",
    [
        headed(b"content-range: bytes 5-", b"Content-Range: bytes 7-"),
        headed(b"(content-range: bytes 5-[0-9]+)/[0-9]+", rb"\1/*"),
    ],
)
def test_a_range_that_is_not_what_was_asked_for(bucket: Bucket, act: HttpAct) -> None:
    """It is asked for again, and never taken for the end of the object, or for other bytes."""
    with FaultyProxy(bucket.server.endpoint) as proxy:
        backend = reached(bucket, proxy)
        backend.write("x", b"0123456789abcdef")
        target = memoryview(bytearray(8))
        with proxy.during(HttpFault(act, "GET")) as (fault,):
            assert backend.read_into("x", [(5, target)]) == [8]
        assert fault.struck == 1
        assert bytes(target) == b"56789abc"


def test_an_answer_of_unknown_length(bucket: Bucket) -> None:
    def chunked(exchange: Exchange) -> Answer:
        found = exchange.go()
        head = re.sub(rb"(?i)content-length: \d+", b"Transfer-Encoding: chunked", found.head)
        content = found.content()
        return replace(found, head=head, body=(b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content),))

    with FaultyProxy(bucket.server.endpoint) as proxy:
        backend = reached(bucket, proxy)
        backend.write("x", b"0123456789abcdef")
        with (
            proxy.during(HttpFault(chunked, "GET", times=None)),
            unavailable("unreachable", match="how long the object is"),
        ):
            backend.read("x")


def test_another_servers_answers(bucket: Bucket) -> None:
    """A page of a portal between here and the server, with status 200, is no success."""

    def portal(exchange: Exchange) -> Answer:
        return answer(200)(exchange).with_content(b"<html><body>Please log in</body></html>")

    with FaultyProxy(bucket.server.endpoint) as proxy:
        backend = reached(bucket, proxy)
        for method, call in (
            ("PUT", lambda: backend.write("packs/ab/y", b"0")),
            ("PUT", lambda: backend.put_if_absent("roots/0/1", b"0")),
            ("GET", lambda: backend.names("packs")),
            ("GET", lambda: backend.sizes("packs")),
        ):
            with (
                proxy.during(HttpFault(portal, method, times=None)),
                pytest.raises(UnavailableError),
            ):
                call()
            with proxy.during(HttpFault(portal, method)):
                call()


def test_a_put_that_the_server_takes_for_a_conditional_one(bucket: Bucket) -> None:
    with FaultyProxy(bucket.server.endpoint) as proxy:
        backend = reached(bucket, proxy)
        with (
            proxy.during(HttpFault(answer(412, "PreconditionFailed"))),
            pytest.raises(BackendError, match="412"),
        ):
            backend.write("packs/ab/x", b"0")


@pytest.mark.parametrize("token", [b"", b"<NextContinuationToken>x</NextContinuationToken>"])
def test_a_listing_that_does_not_end(bucket: Bucket, token: bytes) -> None:
    """A server that cuts a listing off, or ignores what continues it, is no source of truth."""
    more = b"<IsTruncated>true</IsTruncated>" + token
    endless = change(lambda body: body.replace(b"<IsTruncated>false</IsTruncated>", more))
    with FaultyProxy(bucket.server.endpoint) as proxy:
        backend = reached(bucket, proxy)
        backend.write("packs/ab/x", b"0")
        for call in (backend.names, backend.sizes):
            with (
                proxy.during(HttpFault(endless, "GET", times=20)) as (fault,),
                pytest.raises(UnavailableError, match="list"),
            ):
                call("packs")
            assert fault.struck < 10


def test_objects_that_are_gone_already(bucket: Bucket) -> None:
    """Some servers say so when they are asked to delete them."""
    error = b"<Error><Key>run/packs/ab/x</Key><Code>NoSuchKey</Code></Error>"

    def gone(exchange: Exchange) -> Answer:
        if exchange.method == "DELETE":
            return answer(404, "NoSuchKey")(exchange)
        return answer(200)(exchange).with_content(b"<DeleteResult>" + error + b"</DeleteResult>")

    with FaultyProxy(bucket.server.endpoint) as proxy:
        backend = reached(bucket, proxy)
        with proxy.during(HttpFault(gone, times=None)):
            backend.delete("packs/ab/x")
            assert backend.delete_all(["packs/ab/x", "packs/ab/y"]) == {}


class _Forgetful(RemoteDouble):
    """Its lists lack one pack, and tell a wrong size of another one."""

    def sizes(self, folder: str) -> dict[str, int]:
        found = super().sizes(folder)
        if folder == "packs":
            del found[min(found)]
            found[max(found)] -= 100
        return found


def test_no_pack_is_lost_by_a_list_alone(tmp_path: Path) -> None:
    """A check and a repair look at it before they believe that it is gone or cut off."""
    backend = _Forgetful(str(tmp_path))
    store = Store(backend)
    state = {"model": StateDict(a=torch.arange(100_000.0))}
    store.take(state, "first")
    store.take({"model": StateDict(a=torch.arange(9.0))}, "second")
    assert store.check().ok
    store.repair()
    assert torch.equal(store["first"].read_object("model/a"), state["model"]["a"])
    assert store.check(data=True).ok


def test_places_told_apart_by_their_options_alone(tmp_path: Path) -> None:
    """A copy of a store on another host has a cache of its own; no secret can be read from it."""
    uri = f"file://{tmp_path}"
    identities = {
        RemoteBackend(uri, partial(FsspecClient, uri, options)).identity
        for options in ({}, {"auto_mkdir": True}, {"auto_mkdir": False}, {"auto_mkdir": True})
    }
    assert len(identities) == 3
    assert not any("mkdir" in identity for identity in identities)


def test_a_file_system_that_ignores_ranges() -> None:
    class Whole(MemoryFileSystem):
        protocol = "casnapwhole"

        def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
            return b"0123456789"

    fsspec.register_implementation("casnapwhole", Whole, clobber=True)
    backend = backend_at("casnapwhole://bucket/run")
    with pytest.raises(BackendError, match="part of a file"):
        backend.read_into("x", [(4, memoryview(bytearray(4)))])


def test_a_second_interrupt_waits_for_the_end_too() -> None:
    """Else a request could write into a buffer that the caller uses for something else by then."""
    steps: list[str] = []

    async def stubborn() -> None:
        steps.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            steps.append("cancelled")
            await asyncio.sleep(0.5)
            steps.append("ended")

    def interrupt() -> None:
        for step in ("begun", "cancelled"):
            while step not in steps:
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            event_loop.run(stubborn())
    finally:
        thread.join()
    assert steps == ["begun", "cancelled", "ended"]


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("s3://bucket/x", {"endpoint_url": "user:passw0rd@127.0.0.1:1"}),
        ("s3://bucket/x", {"endpoint_url": "http://user:passw0rd@127.0.0.1:1"}),
        ("s3://bucket/x", {"casnap": ["passw0rd"]}),
        ("s3://bucket/x", {"casnap": {"attempts": "passw0rd"}}),
        ("s3://bucket/x", ["passw0rd"]),
        ("gs://bucket/x", {"token": "passw0rd"}),
    ],
)
def test_no_secret_is_in_an_error_or_its_traceback(uri: str, options: Any) -> None:
    if "endpoint_url" in options:
        options = {**options, "casnap": {"first_contact": 0.1}}
    with pytest.raises(StoreError) as caught:
        backend_at(uri, options).read("x")
    assert "passw0rd" not in "".join(traceback.format_exception(caught.value))
