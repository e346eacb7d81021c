"""Bodies that are received where they belong, and the clients that stores share."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from casnap.backends import backend_at
from casnap.testing.backend_suite import pattern
from tests.support.faulty import Answer, Exchange, FaultyProxy, HttpFault
from tests.support.servers import NOBODY, SECRET, WRITER, Bucket
from tests.support.unavailable import unavailable

pytestmark = pytest.mark.servers

KEY = "packs/ab/x"
MIB = 1 << 20


class TlsFront:
    """A port that speaks TLS, and passes on what it gets to a server that does not."""

    def __init__(self, server: str, folder: Path) -> None:
        self.ca = folder / "cert.pem"
        key = folder / "key.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", self.ca]
        subprocess.run([*command.split(), *names], check=True, capture_output=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.ca, key)
        self._server = urlsplit(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        """Pass on one request after the other, each once it is there as a whole."""
        inner = socket.create_connection((self._server.hostname, self._server.port))
        with suppress(OSError), inner, self._context.wrap_socket(line, server_side=True) as outer:
            while True:
                self._pass(outer, inner)
                self._pass(inner, outer)

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = source.recv(65536)
            if not piece:
                raise ConnectionError
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        left = int(fields.get(b"content-length", 0)) - len(body)
        target.sendall(data)
        while left > 0:
            piece = source.recv(min(left, 65536))
            if not piece:
                raise ConnectionError
            left -= len(piece)
            target.sendall(piece)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def front(bucket: Bucket, tmp_path: Path) -> Iterator[TlsFront]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    front = TlsFront(bucket.server.endpoint, tmp_path)
    yield front
    front.close()


def test_bytes_are_looked_at_while_others_are_on_their_way(bucket: Bucket) -> None:
    """What is broken off is gone on with: nothing that was looked at is written to again."""
    content = pattern(3 * MIB)
    asked: list[str] = []
    first = threading.Event()

    def break_once_it_was_looked_at(exchange: Exchange) -> Answer:
        asked.append(exchange.headers["range"])
        found = exchange.go()
        if len(asked) > 1:
            return found
        begin = b"".join(found.body)[: MIB + 5]

        def parts() -> Iterator[bytes]:
            yield begin
            assert first.wait(30)

        return replace(found, body=parts(), then="close")

    looked_at: list[bytes] = []

    def look(number: int) -> None:
        looked_at.append(bytes(targets[number][1]))
        first.set()

    with FaultyProxy(bucket.server.endpoint) as proxy:
        options = {**bucket.storage_options, "endpoint_url": proxy.url}
        backend = backend_at(f"{bucket.uri}/run", options)
        backend.write(KEY, content)
        targets = [(n * MIB, memoryview(bytearray(MIB))) for n in range(3)]
        with proxy.during(HttpFault(break_once_it_was_looked_at, "GET", times=None)):
            backend.filled(KEY, targets, look)
    assert asked == [f"bytes=0-{3 * MIB - 1}", f"bytes={MIB + 5}-{3 * MIB - 1}"]
    assert b"".join(looked_at) == b"".join(bytes(view) for _, view in targets) == content


def test_over_tls(bucket: Bucket, front: TlsFront) -> None:
    """The connection is used again after it."""
    options = {
        **bucket.storage_options,
        "endpoint_url": front.url,
        "client_kwargs": {"verify": str(front.ca)},
    }
    backend = backend_at(f"{bucket.uri}/run", options)
    content = pattern(5 * MIB + 17)
    backend.write(KEY, content)
    before = front.connections
    for start, nbytes in ((0, len(content)), (MIB - 3, 3 * MIB), (4 * MIB, 2 * MIB), (7, 9)):
        target = bytearray(nbytes)
        found = min(nbytes, len(content) - start)
        assert backend.read_into(KEY, [(start, memoryview(target))]) == [found]
        assert target[:found] == content[start : start + found]
    assert backend.read(KEY) == content
    assert front.connections == before


def test_no_second_copy_of_a_body_is_made(bucket: Bucket) -> None:
    backend = backend_at(f"{bucket.uri}/run", bucket.storage_options)
    content = pattern(24 * MIB)
    backend.write(KEY, content)
    target = bytearray(len(content))
    backend.read_into(KEY, [(0, memoryview(target)[:1])])
    tracemalloc.start()
    try:
        assert backend.read_into(KEY, [(0, memoryview(target))]) == [len(content)]
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert target == content


def test_small_and_large_targets_that_overlap(bucket: Bucket) -> None:
    backend = backend_at(f"{bucket.uri}/run", bucket.storage_options)
    content = pattern(3 * MIB)
    backend.write(KEY, content)
    runs = [(5, MIB), (MIB, MIB), (MIB + 9, 70_000), (MIB + 9, 70_000), (2 * MIB + 5, 3)]
    targets = [(offset, memoryview(bytearray(nbytes))) for offset, nbytes in runs]
    assert backend.read_into(KEY, targets) == [nbytes for _, nbytes in runs]
    for offset, view in targets:
        assert view == content[offset : offset + len(view)]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return what writes a user and a secret into the file that holds the credentials."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(user: str, secret: str) -> None:
        file.write_text(
            f"[default]\naws_access_key_id = {user}\naws_secret_access_key = {secret}\n"
        )

    return write


def test_credentials_of_another_user(bucket: Bucket, written: Callable[[str, str], None]) -> None:
    """A store that is opened then is that user's, though another one is still open."""
    options = {"endpoint_url": bucket.server.endpoint}
    uri = f"{bucket.uri}/run"
    written(WRITER, SECRET)
    first = backend_at(uri, options)
    first.write(KEY, b"x")
    written(NOBODY, SECRET)
    with unavailable("denied"):
        backend_at(uri, options).read(KEY)
    assert first.read(KEY) == b"x"


def test_credentials_that_were_mended(
    bucket: Bucket, written: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that the server refuses is not shared, though another store still has it."""
    options = {"endpoint_url": bucket.server.endpoint}
    uri = f"{bucket.uri}/run"
    written(WRITER, "wrong")
    refused = backend_at(uri, options)
    with unavailable("credentials"):
        refused.write(KEY, b"x")
    written(WRITER, SECRET)
    mended = backend_at(uri, options)
    mended.write(KEY, b"x")
    assert mended.read(KEY) == b"x"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", WRITER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with unavailable("credentials"):
        backend_at(uri, options).read(KEY)
    assert mended.read(KEY) == b"x"
