"""Engines reload what a follower pulls: against stubs of the interfaces that they document."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from casnap.errors import CasnapError
from casnap.integrations.engines import OnVersion, reload_sglang, reload_vllm
from casnap.runtime.typing import override
from tests.support.served import store_at, take, weights


class Server(ThreadingHTTPServer):
    """A stub of SGLang's server: it loads a folder, or refuses it as that does."""

    requests: list[dict[str, Any]]
    headers: list[str | None]
    answers: list[tuple[int, bytes]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/update_weights_from_disk"
        server.headers.append(self.headers["Authorization"])
        status, answer = 200, b'{"success": true, "message": "Succeeded"}'
        if server.answers:
            status, answer = server.answers.pop(0)
        else:
            assert load_file(Path(asked["model_path"]) / "model.safetensors")
        server.requests.append(asked)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def sglang() -> Iterator[tuple[Server, str]]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests, server.headers, server.answers = [], [], []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


class Engine:
    """A stub of ``vllm.LLM``: its workers load the folder that ``reload_weights`` is given."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.calls: list[str] = []
        self.is_busy = False

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        assert (method, args, timeout) == ("reload_weights", (), 9)
        assert kwargs is not None
        self.weights = load_file(Path(kwargs["weights_path"]) / "model.safetensors")
        self.calls.append("reload")
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return not self.is_busy


def follow(path: Path, on_version: OnVersion, until: str, count: int = 1) -> list[str]:
    """Follow until an event has come so often; return all events."""
    seen = []
    for event in store_at(path / "store").follow(
        path / "live", interval=0.01, on_version=on_version
    ):
        seen.append(event.event)
        if seen.count(until) == count:
            return seen
    raise AssertionError


def test_sglang_loads_each_version(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    with sglang() as (server, url):
        callback = reload_sglang(url, abort_all_requests=True, headers={"Authorization": "x"})
        for step in range(2):
            take(store, step)
            follow(tmp_path, callback, "called")
        folders = [Path(asked.pop("model_path")) for asked in server.requests]
        assert [folder.name.split("@")[0] for folder in folders] == ["step_0", "step_1"]
        assert server.requests == [
            {"abort_all_requests": True, "weight_version": folder.name} for folder in folders
        ]
        assert server.headers == ["x", "x"]
        assert not any(folder.is_symlink() for folder in folders)


def test_what_sglang_refuses_is_tried_again(tmp_path: Path) -> None:
    take(store_at(tmp_path / "store"), 0)
    with sglang() as (server, url):
        server.answers = [
            (400, b'{"success": false, "message": "no such folder"}'),
            (200, b'{"success": false, "message": "busy"}'),
            (200, b"hello"),
        ]
        callback = reload_sglang(url, timeout=30)
        for expected in ("did not load .*no such folder", "did not load .*busy", "hello"):
            with pytest.raises(CasnapError, match=expected):
                callback(tmp_path, [])
        server.answers = [(500, b"?")]
        assert follow(tmp_path, callback, "called") == ["switched", "call_failed", "called"]
    with pytest.raises(CasnapError, match="cannot be reached"):
        callback(tmp_path, [])
    with pytest.raises(ValueError, match="like http://localhost:30000"):
        reload_sglang("file:///etc/passwd")


def test_vllm_loads_each_version(tmp_path: Path) -> None:
    store, engine = store_at(tmp_path / "store"), Engine()
    callback = reload_vllm(engine, timeout=9)
    for step in range(2):
        take(store, step)
        follow(tmp_path, callback, "called")
        assert engine.weights["bias"].equal(weights(step)["bias"])
    assert engine.calls == ["reload", "reset"] * 2
    engine.is_busy = True
    with pytest.raises(CasnapError, match="kept its cache of prefixes"):
        callback((tmp_path / "live").resolve(), [])
