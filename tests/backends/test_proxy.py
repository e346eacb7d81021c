"""The proxy that stands before a server: what it passes on, and how it fails."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.faults import start
from tests.support.faulty import (
    FaultyProxy,
    HttpAct,
    HttpFault,
    after,
    answer,
    break_off,
    change,
    cut,
    delay,
    hang_up,
    stall,
)

CONTENT = bytes(range(256)) * 400


class _Handler(BaseHTTPRequestHandler):
    """A server that keeps what it is given."""

    protocol_version = "HTTP/1.1"
    kept: dict[str, bytes]

    def do_PUT(self) -> None:
        nbytes = int(self.headers["Content-Length"])
        content = self.rfile.read(nbytes)
        if len(content) < nbytes:
            self.kept["torn"] = content
            return
        self.kept[self.path] = content
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        content = self.kept[self.path]
        if self.path.endswith("chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            parts = [content[:1000], content[1000:], b""]
            content = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        else:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def kept() -> dict[str, bytes]:
    return {"/a": CONTENT, "/chunked": CONTENT}


@pytest.fixture
def proxy(kept: dict[str, bytes]) -> Iterator[FaultyProxy]:
    handler = type("Handler", (_Handler,), {"kept": kept})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            with FaultyProxy(f"http://127.0.0.1:{server.server_address[1]}") as proxy:
                yield proxy
        finally:
            server.shutdown()


def ask(proxy: FaultyProxy, method: str = "GET", path: str = "/a", **more: object) -> bytes:
    line = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=30)
    try:
        line.request(method, path, **more)  # type: ignore[arg-type]
        found = line.getresponse()
        return b"%d " % found.status + found.read()
    finally:
        line.close()


def test_all_is_passed_on(proxy: FaultyProxy, kept: dict[str, bytes]) -> None:
    line = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=30)
    for path in ("/a", "/chunked"):
        line.request("GET", path)
        assert line.getresponse().read() == CONTENT
    line.request("PUT", "/b", CONTENT, {"Expect": "100-continue"})
    assert line.getresponse().read() == b""
    line.close()
    assert kept["/b"] == CONTENT
    assert proxy.requests == {"GET": 2, "PUT": 1}


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (hang_up(), ConnectionResetError),
        (hang_up(reset=False), http.client.RemoteDisconnected),
        (after(hang_up()), ConnectionResetError),
        (cut(100), http.client.IncompleteRead),
        (cut(100, reset=True), (ConnectionResetError, http.client.IncompleteRead)),
    ],
)
def test_connections_that_break(
    proxy: FaultyProxy, act: HttpAct, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    with proxy.during(HttpFault(act, "GET")) as (fault,):
        with pytest.raises(error):
            ask(proxy)
        assert ask(proxy) == b"200 " + CONTENT
    assert fault.struck == 1


def test_a_lost_answer_and_a_request_that_breaks_off(
    proxy: FaultyProxy, kept: dict[str, bytes]
) -> None:
    faults = HttpFault(after(hang_up()), "PUT", "/lost"), HttpFault(break_off(100), "PUT", "/torn")
    with proxy.during(*faults):
        for path in ("/lost", "/torn"):
            with pytest.raises(ConnectionResetError):
                ask(proxy, "PUT", path, body=CONTENT)
    assert kept["/lost"] == CONTENT
    assert "/torn" not in kept


def test_answers_that_are_false(proxy: FaultyProxy, kept: dict[str, bytes]) -> None:
    faults = [
        HttpFault(answer(503, "SlowDown"), "PUT", skip=1, times=2),
        HttpFault(answer(409, "Conflict"), header="if-none-match: [*]"),
        HttpFault(change(lambda content: content[:7]), "GET", "/chunked"),
    ]
    with proxy.during(*faults):
        answers = [ask(proxy, "PUT", "/b", body=b"b") for _ in range(4)]
        assert [a[:3] for a in answers] == [b"200", b"503", b"503", b"200"]
        assert b"<Code>SlowDown</Code>" in answers[1]
        assert ask(proxy, "PUT", "/c", body=b"c", headers={"If-None-Match": "*"})[:3] == b"409"
        assert ask(proxy, path="/chunked") == b"200 " + CONTENT[:7]
    assert "/c" not in kept


def test_time_that_passes(proxy: FaultyProxy) -> None:
    port = int(proxy.url.rpartition(":")[2])
    with proxy.during(HttpFault(delay(0.01), times=None), HttpFault(stall(600, 10), "GET")):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
            got = b""
            while not got.endswith(CONTENT[:10]):
                got += line.recv(1000)
            line.settimeout(0.1)
            with pytest.raises(TimeoutError):
                line.recv(1)
        assert ask(proxy) == b"200 " + CONTENT


def test_connections_are_refused(proxy: FaultyProxy) -> None:
    with proxy.down():
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                ask(proxy)
    assert ask(proxy) == b"200 " + CONTENT


def test_a_fork_keeps_no_connection_open(proxy: FaultyProxy) -> None:
    """Else no connection would end while a child of the test lives."""

    line = socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])))
    with line, proxy.during(HttpFault(hang_up(reset=False), skip=1)):
        line.sendall(b"PUT /b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert line.recv(1000)
        child = start(lambda: time.sleep(600))
        try:
            line.sendall(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
            line.settimeout(60)
            assert line.recv(1) == b""
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ask(proxy) == b"200 " + CONTENT
