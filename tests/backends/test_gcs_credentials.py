"""Without credentials, Google's library waits for a server of its cloud: not for long here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from casnap.backends import backend_at
from tests.support.servers import deaf_port
from tests.support.unavailable import unavailable

pytest.importorskip("gcsfs")

from casnap.backends.remote import gcs, gcs_credentials
from casnap.backends.remote.gcs_credentials import token_to_use
from casnap.backends.remote.retries import Retries


class _Answer(BaseHTTPRequestHandler):
    """Says that it is a metadata server, if its server does, and refuses all that it is asked."""

    def do_GET(self) -> None:
        is_metadata = getattr(self.server, "is_metadata", False)
        self.send_response(200 if is_metadata else 401)
        self.send_header("Content-Length", "0")
        if is_metadata:
            self.send_header("Metadata-Flavor", "Google")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "NO_GCE_CHECK", "GCE_METADATA_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gcs_credentials, "_PATIENCE", 0.3)


def address(server: ThreadingHTTPServer) -> str:
    return f"127.0.0.1:{server.server_address[1]}"


def test_no_metadata_server(monkeypatch: pytest.MonkeyPatch, server: ThreadingHTTPServer) -> None:
    """Nothing takes the connection, or what answers is another server."""
    with deaf_port(drops=True) as url:
        monkeypatch.setenv("GCE_METADATA_IP", url.removeprefix("http://"))
        assert token_to_use(None) == "anon"
    monkeypatch.setenv("GCE_METADATA_IP", address(server))
    assert token_to_use(None) == "anon"


def test_gcsfs_is_left_to_it_where_there_may_be_credentials(
    monkeypatch: pytest.MonkeyPatch, server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    assert token_to_use("anon") == "anon"
    monkeypatch.setenv("GCE_METADATA_IP", address(server))
    server.is_metadata = True  # type: ignore[attr-defined]
    assert token_to_use(None) is None
    server.is_metadata = False  # type: ignore[attr-defined]
    (tmp_path / "application_default_credentials.json").touch()
    assert token_to_use(None) is None


def test_the_error_says_that_none_were_found(
    monkeypatch: pytest.MonkeyPatch, server: ThreadingHTTPServer
) -> None:
    monkeypatch.setenv("GCE_METADATA_IP", address(server))
    options = {"endpoint_url": f"http://{address(server)}", "project": "x"}
    with unavailable("credentials", match="no credentials were found"):
        backend_at("gs://bucket/run", options).read("x")


def test_a_batch_of_deletes_where_there_is_no_bucket() -> None:
    """Its objects do not count as deleted; a missing object does."""
    options = {"endpoint_url": "http://127.0.0.1:1", "token": "anon", "project": "x"}
    client = gcs.GcsClient("gs://bucket/run", options, Retries())
    parts = (
        "HTTP/1.1 204 No Content\r\n\r\n",
        'HTTP/1.1 404 Not Found\r\n\r\n{"error": {"message": "No such object: bucket/run/b"}}',
        'HTTP/1.1 404 Not Found\r\n\r\n{"error": {"message": "The bucket does not exist."}}',
    )
    told = "".join(f"--x\r\nContent-ID: <response-{i}>\r\n\r\n{p}\r\n" for i, p in enumerate(parts))
    errors = client._deleted(["a", "b", "c"], f"{told}--x--")
    assert {key: error.reason for key, error in errors.items()} == {"c": "no_bucket"}
