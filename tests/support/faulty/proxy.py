"""A proxy that fails on demand, between the client of an object store and the server.

It has real sockets, so that the client's own time-outs, retries and parsers are tested. As with
:class:`~tests.support.faulty.FaultyBackend`, each fault has an act, which gets the request (an
:class:`Exchange`) and returns the :class:`Answer` that the client gets. ``http_acts.py`` has the
usual ones; ``before``, ``after``, ``delay``, ``repeat`` and ``Gate`` work here too::

    with FaultyProxy("http://127.0.0.1:8333") as proxy:
        store = casnap.Store(uri, storage_options={"endpoint_url": proxy.url, ...})
        # The next root is put, but the answer is lost.
        with proxy.during(HttpFault(after(hang_up()), "PUT", "*/roots/*")) as (fault,):
            store.take(state, "step_1")
        assert fault.struck == 1
        assert proxy.requests["PUT"] < 10

It speaks HTTP/1.1 without TLS, holds each message in memory, and passes it on byte for byte.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from io import BufferedReader
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.support.faulty.backend import Fault

_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Answer:
    """What the client gets.

    Attributes:
        head: The status line and the headers, with the empty line that ends them.
        body: The bytes that follow, in parts, as they are on the wire.
        then: What happens to the connection after that.
    """

    head: bytes
    body: Iterable[bytes] = ()
    then: Literal["go on", "close", "reset"] = "go on"

    @property
    def status(self) -> int:
        """The status code; 0 if nothing is answered."""
        return int(self.head.split(b" ", 2)[1]) if self.head else 0

    def content(self) -> bytes:
        """Return what the body holds."""
        body = b"".join(self.body)
        if "chunked" not in _headers(self.head).get("transfer-encoding", ""):
            return body
        parts, rest = [], body
        while nbytes := int((line := rest.split(b"\r\n", 1)[0]).split(b";")[0], 16):
            begin = len(line) + 2
            parts.append(rest[begin : begin + nbytes])
            rest = rest[begin + nbytes + 2 :]
        return b"".join(parts)

    def with_content(self, content: bytes) -> Answer:
        """Return this answer with other content."""
        lines = self.head[:-4].split(b"\r\n")
        framing = (b"content-length:", b"transfer-encoding:")
        kept = [line for line in lines if not line.lower().startswith(framing)]
        kept.append(b"Content-Length: %d" % len(content))
        return replace(self, head=b"\r\n".join(kept) + b"\r\n\r\n", body=(content,))


@dataclass(frozen=True)
class Exchange:
    """One request, on its way to the server.

    Attributes:
        proxy: The proxy.
        method: ``"GET"``, ``"PUT"``, …
        path: The path with the query, as the client sent it.
        headers: The headers; names in lower case.
        body: Returns the body of the request, as it is on the wire.
        go: Asks the server, and returns its answer; with another body instead, if one is given.
    """

    proxy: FaultyProxy
    method: str
    path: str
    headers: Mapping[str, str]
    body: Callable[[], bytes]
    go: Callable[..., Answer]

    def __str__(self) -> str:
        """Name it, for messages."""
        return f"{self.method} {self.path}"


@dataclass
class HttpFault(Fault):
    """An act, and the requests that it strikes at.

    ``calls`` are methods of HTTP, ``keys`` is a pattern for the path with its query.

    Args:
        header: A pattern for a header that the request must have: ``"if-none-match: *"``. The name
            is in lower case.
    """

    header: str = ""

    def strikes_at(self, exchange: Exchange) -> bool:
        """Count a request; return whether the fault strikes at it."""
        if self.header:
            lines = (f"{name}: {value}" for name, value in exchange.headers.items())
            if not any(fnmatchcase(line, self.header) for line in lines):
                return False
        return self.strikes(exchange.method, (exchange.path,))


class FaultyProxy:
    """A server of HTTP on loopback that passes requests on, except for faults.

    If several faults strike at one request, the first one's act goes around the others'.

    Args:
        endpoint: The URL of the server, ``http://host:port``.
        faults: What goes wrong.

    Attributes:
        url: The URL for the client.
        faults: What goes wrong from here on; may be changed at any time.
        log: Method and path of each request, in order.
    """

    def __init__(self, endpoint: str, *faults: HttpFault) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{endpoint} is not http://host:port")
        self._server = (parts.hostname, parts.port or 80)
        self.faults: list[HttpFault] = list(faults)
        self.log: list[tuple[str, str]] = []
        self.ended = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_down = False
        # It holds the port while there is no listener.
        self._holder = _bound(0)
        self._port = self._holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._listen()
        _open.add(self)

    def __enter__(self) -> FaultyProxy:
        """Return the proxy."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the proxy."""
        self.close()

    @property
    def requests(self) -> Counter[str]:
        """How many requests came so far, by method."""
        return Counter(method for method, _ in self.log)

    @contextmanager
    def during(self, *faults: HttpFault) -> Iterator[tuple[HttpFault, ...]]:
        """Have more faults within a ``with`` block."""
        self.faults += faults
        try:
            yield faults
        finally:
            self.faults = [fault for fault in self.faults if fault not in faults]

    @contextmanager
    def down(self) -> Iterator[None]:
        """Refuse connections within a ``with`` block, and break those that there are."""
        self._is_down = True
        self._hang_up_on_all()
        try:
            yield
        finally:
            self._is_down = False
            self._listen()

    def close(self) -> None:
        """Break all connections, and wait for the threads."""
        self.ended.set()
        self._hang_up_on_all()
        for thread in self._threads:
            thread.join()
        self._holder.close()

    # --- connections ---

    def _listen(self) -> None:
        listener = _bound(self._port)
        listener.listen(128)
        self._start(self._accept, listener)

    def _start(self, work: Callable[[socket.socket], None], given: socket.socket) -> None:
        """Work with a socket on a thread of its own; close it then."""

        def run() -> None:
            with given, suppress(OSError):
                work(given)
            with self._lock:
                self._sockets.discard(given)

        thread = threading.Thread(target=run, name="casnap proxy", daemon=True)
        with self._lock:
            self._sockets.add(given)
            self._threads = [t for t in self._threads if t.is_alive() or t.ident is None]
            self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._serve, client)

    def _hang_up_on_all(self) -> None:
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            with suppress(OSError):
                # This wakes the thread that waits for it.
                each.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        """Answer the requests of one connection."""
        with client.makefile("rb") as reader, _Upstream(self._server) as server:
            while head := _read_head(reader):
                if self._is_down:
                    return
                request = _Request(head, client, reader)
                exchange = Exchange(
                    self,
                    request.method,
                    request.path,
                    request.headers,
                    request.body,
                    partial(server.ask, request),
                )
                answer = self._answer(exchange)
                if answer.then == "reset" and not answer.head:
                    _reset(client)
                    return
                request.body()
                client.sendall(answer.head)
                for part in answer.body:
                    client.sendall(part)
                if answer.then == "reset":
                    _reset(client)
                if answer.then != "go on" or request.headers.get("connection") == "close":
                    return

    def _answer(self, exchange: Exchange) -> Answer:
        self.log.append((exchange.method, exchange.path))
        acts = [fault.act for fault in list(self.faults) if fault.strikes_at(exchange)]
        for act in reversed(acts):
            exchange = replace(exchange, go=partial(_through, act, exchange))
        answer: object = exchange.go()
        if not isinstance(answer, Answer):
            raise TypeError(f"an act answered {exchange} with {answer!r}, which is not an Answer")
        return answer

    def _forget(self) -> None:
        """Close the sockets that a fork has copied: a connection ends when none has it open."""
        for each in (*self._sockets, self._holder):
            # A thread may have closed one just before the fork.
            with suppress(OSError):
                os.close(each.detach())


def _through(act: Callable[[Any], Any], exchange: Exchange, *body: bytes) -> Any:
    if body:
        exchange = replace(exchange, go=lambda *others: exchange.go(*(others or body)))
    return act(exchange)


_open: weakref.WeakSet[FaultyProxy] = weakref.WeakSet()


def _forget_all() -> None:
    for proxy in list(_open):
        proxy._forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _reset(client: socket.socket) -> None:
    """Have the end of this connection be a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


# --- messages ---------------------------------------------------------------------------------


class _Request:
    """A request whose body is read when it is wanted."""

    def __init__(self, head: bytes, client: socket.socket, reader: BufferedReader) -> None:
        self.head = head
        self.method, self.path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        self.headers = _headers(head)
        self._client, self._reader = client, reader
        self._body: bytes | None = None

    def body(self) -> bytes:
        if self._body is None:
            if self.headers.get("expect", "").lower() == "100-continue":
                self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._body = _read_body(self._reader, self.headers)
        return self._body


class _Upstream:
    """The connection to the server that belongs to one of a client."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._reader: BufferedReader | None = None

    def __enter__(self) -> _Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._reader is not None and self._socket is not None:
            self._reader.close()
            self._socket.close()
        self._socket = self._reader = None

    def ask(self, request: _Request, body: bytes | None = None) -> Answer:
        """Send a request, and read the answer.

        Args:
            request: The request.
            body: What is sent in place of its body. If that is short, the connection breaks then.
        """
        content = request.body()
        given = content if body is None else body
        # What is readable before a request was sent is the end.
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self._close()
        if self._socket is None or self._reader is None:
            self._socket = socket.create_connection(self._address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._reader = self._socket.makefile("rb")
        with suppress(OSError):  # a server may refuse before it has read all
            self._socket.sendall(request.head)
            self._socket.sendall(given)
            if len(given) < len(content):
                self._socket.shutdown(socket.SHUT_WR)
        answer = self._read(request.method, self._reader)
        if answer.then == "close" or len(given) < len(content):
            self._close()
        return answer

    def _read(self, method: str, reader: BufferedReader) -> Answer:
        while (head := _read_head(reader)) and head.split(b" ", 2)[1].startswith(b"1"):
            pass  # such as "100 Continue", which the client has had
        if not head:
            return Answer(b"", (), "reset")
        headers = _headers(head)
        framed = "content-length" in headers or "transfer-encoding" in headers
        empty = method == "HEAD" or head.split(b" ", 2)[1] in (b"204", b"304")
        body = b"" if empty else _read_body(reader, headers) if framed else reader.read()
        closes = headers.get("connection", "").lower() == "close" or not (framed or empty)
        return Answer(head, (body,), "close" if closes else "go on")


def _read_head(reader: BufferedReader) -> bytes:
    """Read up to the empty line; return nothing if the connection ended."""
    lines = []
    while line := reader.readline():
        lines.append(line)
        if line in (b"\r\n", b"\n"):
            return b"".join(lines)
    return b""


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _read_body(reader: BufferedReader, headers: Mapping[str, str]) -> bytes:
    """Return a body as it is on the wire."""
    if "chunked" not in headers.get("transfer-encoding", "").lower():
        nbytes = int(headers.get("content-length", 0))
        body = reader.read(nbytes)
        if len(body) < nbytes:
            raise ConnectionError("the connection ended within a body")
        return body
    parts = []
    while True:
        line = reader.readline()
        if not line:
            raise ConnectionError("the connection ended within a body")
        nbytes = int(line.split(b";")[0], 16)
        parts.append(line)
        if nbytes == 0:
            return b"".join((*parts, _read_head(reader)))
        parts.append(reader.read(nbytes + 2))
