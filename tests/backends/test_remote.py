"""What remote backends alone do: retries, unclear answers, typed errors, ranges, forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from casnap import Store
from casnap.backends import Backend, backend_at
from casnap.errors import (
    PLACE_ERRORS,
    BackendError,
    Reason,
    StoreError,
    UnavailableError,
)
from casnap.testing.backend_suite import pattern
from tests.support.faults import assert_holds, take
from tests.support.faulty import (
    FaultyProxy,
    HttpAct,
    HttpFault,
    answer,
    hang_up,
    stall,
)
from tests.support.faulty.proxy import Answer, Exchange
from tests.support.object_stores import IMPATIENT, store_in
from tests.support.servers import NOBODY, READER, SECRET, WRITER, Bucket, deaf_port
from tests.support.unavailable import unavailable

pytestmark = pytest.mark.servers

KEY = "roots/0/7"
MIB = 1 << 20
QUICK = {**IMPATIENT, "silence": 30.0, "deadline": 120.0}
"""Tries again at once, and counts no request twice because the machine is busy."""


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultyProxy]:
    with FaultyProxy(bucket.server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def direct(bucket: Bucket) -> Backend:
    """Return a backend that no fault strikes."""
    return backend_at(f"{bucket.uri}/run", bucket.storage_options)


@pytest.fixture
def backend(bucket: Bucket, proxy: FaultyProxy) -> Backend:
    """Return one that reaches its server by the proxy."""
    options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": QUICK}
    return backend_at(f"{bucket.uri}/run", options)


# --- put if absent ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        answer(409, "ConditionalRequestConflict"),
        answer(412),
        hang_up(),
        answer(503),
        answer(503, "SlowDown"),
    ],
)
def test_nothing_was_put(
    backend: Backend, direct: Backend, proxy: FaultyProxy, act: HttpAct
) -> None:
    """Then the same bytes are put again."""
    with proxy.during(HttpFault(act, "PUT", times=2)) as (fault,):
        assert backend.put_if_absent(KEY, b"mine")
    assert fault.struck == 2
    assert direct.read(KEY) == b"mine"
    assert backend.requests == {"put": 3, "get": 2}
    assert proxy.requests == {"PUT": 3, "GET": 2}


def test_an_answer_that_stays_unclear(backend: Backend, proxy: FaultyProxy) -> None:
    """The error comes after a bounded number of requests, and nothing is deleted."""
    with (
        proxy.during(HttpFault(answer(409, "ConditionalRequestConflict"), "PUT", times=None)),
        unavailable("unreachable", match=r"put casnap-store/roots/0/7 at .* 5 attempts .*409"),
    ):
        backend.put_if_absent(KEY, b"mine")
    assert backend.requests == {"put": 5, "get": 5}


@pytest.mark.servers
def test_after_an_operation_was_given_up_the_next_ones_are_less_patient(
    bucket: Bucket, direct: Backend, proxy: FaultyProxy
) -> None:
    """So a call that fails does not spend the deadline again on each step of its cleaning up."""
    patience = {
        "attempts": 10_000,
        "deadline": 6.0,
        "first_contact": 1.0,
        "first_delay": 0.01,
        "longest_delay": 0.01,
    }
    options = {**bucket.storage_options, "endpoint_url": proxy.url, "casnap": patience}
    backend = backend_at(f"{bucket.uri}/run", options)
    direct.write(KEY, b"there")
    assert backend.read(KEY) == b"there"
    took = []
    with proxy.during(HttpFault(answer(500), times=None)):
        for _ in range(2):
            began = time.monotonic()
            with unavailable("unreachable", match="attempts in"):
                backend.read(KEY)
            took.append(time.monotonic() - began)
    # A busy machine may add to both, and makes fewer attempts.
    assert took[1] < 5.0 < took[0]
    assert backend.read(KEY) == b"there"


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("silent", ["drops", "accepts"])
def test_a_server_that_never_answers(scheme: str, silent: str) -> None:
    """Neither one that takes no connections, nor one that says nothing, is waited for for long."""
    options: dict[str, Any] = {"casnap": {"connect": 0.4, "first_contact": 1.0}}
    if scheme == "gs":
        options |= {"token": "anon", "project": "x"}
        pytest.importorskip("gcsfs")
    else:
        options |= {"key": "a", "secret": "b"}
    with deaf_port(drops=silent == "drops") as url:
        backend = backend_at(f"{scheme}://bucket/run", {**options, "endpoint_url": url})
        with unavailable("unreachable", match=r"no answer|[Tt]imeout"):
            backend.read(KEY)
    # By default 15 seconds of silence are waited for, up to ten times.
    assert backend.requests["get"] <= 3


def test_a_user_who_waits_is_told_why(
    backend: Backend,
    proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("casnap.backends.remote.retries._PATIENCE", 0.0)
    with proxy.during(HttpFault(answer(503, "SlowDown"), "PUT", times=1)):
        backend.write(KEY, b"mine")
    assert f"still trying to put casnap-store/{KEY} at s3://" in caplog.text
    assert "SlowDown" in caplog.text


def test_writers_that_a_busy_server_refuses_come_back_at_different_times(
    bucket: Bucket, direct: Backend, proxy: FaultyProxy
) -> None:
    """Else all of thousands of ranks would be refused again."""
    writers, refused = 20, 3
    asked_at: dict[str, list[float]] = {}

    def refuse(exchange: Exchange) -> Answer:
        times = asked_at.setdefault(exchange.path, [])
        times.append(time.monotonic())
        return answer(503, "SlowDown")(exchange) if len(times) <= refused else exchange.go()

    options = {**bucket.storage_options, "endpoint_url": proxy.url}
    backend = backend_at(f"{bucket.uri}/run", options)
    with proxy.during(HttpFault(refuse, "PUT", times=None)), ThreadPoolExecutor(writers) as pool:
        list(pool.map(lambda i: backend.write(f"packs/aa/{i}", b"mine"), range(writers)))
    assert len(direct.names("packs/aa")) == writers
    assert proxy.requests["PUT"] == (refused + 1) * writers
    pauses = [times[-1] - times[-2] for times in asked_at.values()]
    # At random up to 3.2 seconds.
    assert max(pauses) - min(pauses) > 0.5


def test_probes_that_were_killed_are_tidied_up_once_they_are_old(
    direct: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = "01" * 12
    direct.write(f"tmp/{probe}", b"x" * 16)
    direct.write("tmp/theirs", b"theirs")
    assert direct.tidy(0) == 0
    assert sorted(direct.names("tmp")) == [probe, "theirs"]
    later = time.time() + 3700
    monkeypatch.setattr("casnap.backends.remote.backend.time.time", lambda: later)
    assert direct.tidy(0) == 16
    assert direct.names("tmp") == ["theirs"]


def test_an_exclusive_writer_looks_first(
    backend: Backend, direct: Backend, proxy: FaultyProxy
) -> None:
    """It relies on no condition, which the server may not know."""
    backend.exclusive = True
    with proxy.during(HttpFault(answer(501), "PUT", header="if-none-match: *", times=None)):
        assert backend.put_if_absent(KEY, b"mine")
        assert backend.put_if_absent(KEY, b"other") is False
    assert direct.read(KEY) == b"mine"


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "reason", "told"),
    [
        (404, "NoSuchBucket", "no_bucket", "bucket does not exist"),
        (403, "AccessDenied", "denied", "the user needs s3:"),
        (400, "KMS.DisabledException", "denied", "kms:Decrypt"),
        (403, "InvalidPayer", "denied", "requester_pays"),
        (403, "InvalidAccessKeyId", "credentials", "does not know"),
        (403, "SignatureDoesNotMatch", "credentials", "does not know"),
        (403, "RequestTimeTooSkewed", "credentials", "clock"),
        (403, "InvalidObjectState", "archived", "archived"),
        (400, "AuthorizationHeaderMalformed", "unreachable", "region"),
        (501, "NotImplemented", None, "501"),
        (404, "Whatever", None, "404"),
    ],
)
def test_errors_say_what_they_mean(
    backend: Backend,
    proxy: FaultyProxy,
    status: int,
    code: str,
    reason: Reason | None,
    told: str,
) -> None:
    """Only a missing key is a missing object. What does not pass is not tried again."""
    with proxy.during(HttpFault(answer(status, code), times=None)):
        for call in (
            lambda: backend.read("packs/ab/x"),
            lambda: backend.size("packs/ab/x"),
            lambda: backend.write("packs/ab/x", b"x"),
            lambda: backend.put_if_absent("packs/ab/x", b"x"),
            lambda: backend.names("packs"),
            lambda: backend.delete_all(["packs/ab/x", "packs/ab/y"]),
        ):
            with unavailable(reason, told) as caught:
                call()
            assert isinstance(caught.value, PLACE_ERRORS)
            assert SECRET not in str(caught.value)
    # Botocore asks for the bucket's region. Who is refused looks at the credentials once more.
    assert len(proxy.log) <= 6 * (1 + (reason == "credentials")) + 3


def test_the_right_that_a_request_needs_is_named(backend: Backend, proxy: FaultyProxy) -> None:
    """That one, and none that a reader should not have."""
    calls: dict[str, Any] = {
        "s3:GetObject": lambda: backend.read("x"),
        "s3:PutObject": lambda: backend.write("x", b"x"),
        "s3:ListBucket on": lambda: backend.names("packs"),
        "s3:DeleteObject": lambda: backend.delete("x"),
    }
    with proxy.during(HttpFault(answer(403, "AccessDenied"), times=None)):
        for right, call in calls.items():
            with unavailable("denied", match=right) as caught:
                call()
            assert not [other for other in calls if other != right and other in str(caught.value)]


@pytest.mark.parametrize("status", [400, 404, 405])
def test_an_endpoint_that_is_no_s3(bucket: Bucket, proxy: FaultyProxy, status: int) -> None:
    def page(exchange: Exchange) -> Answer:
        return answer(status)(exchange).with_content(b"<html><body>hello<br></body></html>")

    options = {**bucket.storage_options, "endpoint_url": proxy.url}
    with (
        proxy.during(HttpFault(page, times=None)),
        pytest.raises(StoreError, match=r"seems to be no S3 server .*endpoint_url"),
    ):
        Store(f"{bucket.uri}/run", storage_options=options).make()


def test_credentials_that_expire_are_read_again(
    backend: Backend, direct: Backend, proxy: FaultyProxy
) -> None:
    direct.write("x", b"content")
    with proxy.during(HttpFault(answer(400, "ExpiredToken"))):
        assert backend.read("x") == b"content"
    assert backend.requests == {"get": 2}
    with (
        proxy.during(HttpFault(answer(400, "ExpiredToken"), times=None)),
        unavailable("credentials", match="expired"),
    ):
        backend.read("x")
    assert backend.requests == {"get": 4}


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_keys_that_are_replaced_are_read_again(
    bucket: Bucket,
    proxy: FaultyProxy,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that is open goes on with the new key of the file, once the old one is refused."""
    file = tmp_path / "credentials"

    def write(user: str) -> None:
        file.write_text(
            f"[default]\naws_access_key_id = {user}\naws_secret_access_key = {SECRET}\n"
        )

    take(store_in(bucket), 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write(READER)
    store = Store(f"{bucket.uri}/run", storage_options={"endpoint_url": proxy.url})
    assert_holds(store["step_0"], 0)
    with proxy.during(
        HttpFault(answer(403, code), times=None, header=f"authorization: *Credential={READER}/*")
    ) as (refused,):
        with unavailable("credentials", match="does not know these credentials"):
            store.snapshots()
        write(WRITER)
        assert_holds(store["step_0"], 0)
        take(store, 1)
        before = refused.struck
        assert_holds(store["step_1"], 1)
        assert refused.struck == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"secret": "wrong-secret"}, "credentials"),
        ({"key": "nobody-knows"}, "credentials"),
        ({"key": NOBODY}, "denied"),
        ({"no_such_option": 1}, None),
        ({"casnap": {"deadlin": 1}}, None),
        ({"endpoint_url": "http://user:passw0rd@127.0.0.1:1"}, "unreachable"),
        ({"endpoint_url": "http://no-such-host.invalid"}, "unreachable"),
        ({"endpoint_url": "127.0.0.1:1"}, None),
    ],
)
def test_wrong_options(bucket: Bucket, options: dict[str, Any], reason: Reason | None) -> None:
    """One clear error, without what is secret in it."""
    given = {**bucket.storage_options, "casnap": QUICK, **options}
    with unavailable(reason) as caught:
        backend_at(f"{bucket.uri}/run", given).read("x")
    error: BaseException | None = caught.value
    assert bucket.uri in str(error)
    for secret in (SECRET, "wrong-secret", "passw0rd"):
        assert secret not in str(error)


@pytest.mark.parametrize(("uri", "extra"), [("s3://b/x", "s3"), ("gs://b/x", "gcs")])
def test_an_extra_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, uri: str, extra: str
) -> None:
    for library in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=rf"pip install '/path/to/casnap\[{extra}\]'"):
        backend_at(uri)


def test_a_copy_that_fails_with_status_200(
    backend: Backend, direct: Backend, proxy: FaultyProxy
) -> None:
    """S3 begins its answer before it has copied. Its error is tried again, as others are."""
    direct.write("x", b"content")
    failed = answer(200, "InternalError")
    with proxy.during(HttpFault(failed, "PUT", times=2)) as (fault,):
        backend.copy("x", "y")
    assert fault.struck == 2
    assert direct.read("y") == b"content"
    assert backend.requests == {"copy": 3}


def test_objects_that_may_not_be_deleted(backend: Backend, proxy: FaultyProxy) -> None:
    """Those that failed for the moment are deleted again; the others are told."""
    keys = [f"packs/ab/{n}" for n in range(4)]
    for key in keys:
        backend.write(key, b"x")
    fails = iter(["AccessDenied", "InternalError"])

    def some(exchange: Exchange) -> Answer:
        content = "".join(
            f"<Error><Key>run/{key}</Key><Code>{code}</Code><Message>no</Message></Error>"
            for key, code in zip(keys, fails, strict=False)
        )
        whole = f"<DeleteResult>{content}</DeleteResult>".encode()
        return answer(200)(exchange).with_content(whole)

    with proxy.during(HttpFault(some, "POST")):
        refused = backend.delete_all(keys)
    assert list(refused) == [keys[0]]
    error = refused[keys[0]]
    assert isinstance(error, UnavailableError)
    assert error.reason == "denied"
    assert keys[0] in str(refused[keys[0]])
    assert backend.requests == {"put": 4, "delete": 2}


# --- ranges -----------------------------------------------------------------------------------


def _read(backend: Backend, content: bytes, runs: Sequence[tuple[int, int]]) -> None:
    targets = [(offset, memoryview(bytearray(nbytes))) for offset, nbytes in runs]
    lengths = backend.read_into("packs/ab/x", targets)
    for (offset, target), n in zip(targets, lengths, strict=True):
        assert n == max(0, min(len(target), len(content) - offset))
        assert target[:n] == content[offset : offset + n]


def test_near_runs_are_one_request(backend: Backend, direct: Backend) -> None:
    content = pattern(20 * MIB + 5)
    direct.write("packs/ab/x", content)
    for runs, expected in [
        ([(0, 10), (10, 10), (5, 20), (500_000, 1), (3, 1)], 1),
        ([(0, 10), (4 * MIB, 10)], 2),
        ([(0, 20 * MIB)], 2),
        ([(MIB, 16 * MIB), (5 * MIB, 10), (20 * MIB, 100)], 2),
        ([(0, 0), (30 * MIB, 0)], 0),
        ([(20 * MIB, 4096), (30 * MIB, 4096), (0, 1)], 3),
        ([(30 * MIB, 10), (40 * MIB, 10)], 2),
    ]:
        before = backend.requests.get("get", 0)
        _read(backend, content, runs)
        assert backend.requests.get("get", 0) - before == expected


def test_objects_are_bounded(backend: Backend) -> None:
    with pytest.raises(BackendError, match=r"51\.4 MB"):
        backend.write("packs/ab/x", bytes(49 * MIB))
    assert backend.requests == {}


# --- processes and threads --------------------------------------------------------------------


def _script(work: str, bucket: Bucket, endpoint: str | None = None) -> subprocess.Popen[str]:
    options = {**bucket.storage_options, "endpoint_url": endpoint or bucket.server.endpoint}
    begin = f"""
import os, sys, threading, time
from casnap.backends import backend_at
backend = backend_at({bucket.uri + "/run"!r}, {options!r})
"""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", begin + work],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "work",
    [
        "",
        "del backend",
        "threading.Thread(target=lambda: (time.sleep(0.5), backend.read('x'))).start()",
        # At the end of the process its connections are not closed twice, nor by a child.
        "pid = os.fork()\nif pid: assert os.waitpid(pid, 0)[1] == 0\nbackend.read('x')",
        "pid = os.fork()\nif pid: assert os.waitpid(pid, 0)[1] == 0; backend.read('x')",
    ],
    ids=["at once", "collected", "a thread is left", "a child reads", "a child does not"],
)
def test_a_process_that_ends(bucket: Bucket, work: str) -> None:
    """It ends without a warning, and its connections serve it to the end."""
    process = _script(f"backend.write('x', b'content')\n{work}\n", bucket)
    output = process.communicate()
    assert (process.returncode, *output) == (0, "", "")


def test_a_forked_child_connects_anew(backend: Backend) -> None:
    """While other threads of the parent are in the middle of requests, too."""
    backend.write("x", b"content")
    end = threading.Event()

    def read() -> None:
        while not end.is_set():
            assert backend.read("x") == b"content"

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                good = backend.read("x") == b"content" and backend.put_if_absent(KEY, b"same")
                os._exit(0 if good else 1)
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert backend.read("x") == b"content"


@pytest.mark.parametrize("call", ["read('x')", "write('x', bytes(20 << 20))", "names('')"])
def test_an_interrupt_ends_a_request(bucket: Bucket, proxy: FaultyProxy, call: str) -> None:
    """A server that says nothing for minutes does not keep the user."""
    begun = threading.Event()

    def silent(exchange: Exchange) -> Answer:
        begun.set()
        return stall(600)(exchange)

    with proxy.during(HttpFault(silent, times=None)):
        process = _script(f"backend.{call}", bucket, proxy.url)
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        error = process.communicate()[1]
    assert "KeyboardInterrupt" in error
    assert process.returncode != 0
