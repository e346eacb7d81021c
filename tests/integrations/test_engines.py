"""Engines reload what a follower pulls: against stubs of the interfaces that they document.

``test_vllm.py`` tries the real vLLM.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from casnap.errors import CasnapError
from casnap.integrations.engines import (
    OnVersion,
    PauseMode,
    reload_sglang,
    reload_vllm,
    reload_vllm_async,
    reload_vllm_server,
)
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
    """A stub of ``vllm.LLM``: its workers load the folder that ``reload_weights`` is given.

    A load that fails leaves no weights behind, as vLLM's does.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.weights: dict[str, Any] = {}
        self.calls: list[str] = []
        self.is_busy = False
        self.model_config = Config(str(folder))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        assert (method, args) == ("reload_weights", ())
        assert kwargs is not None
        self.calls.append("reload")
        self.weights = {}
        self.weights = load_file(Path(kwargs["weights_path"]) / "model.safetensors")
        return [None]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.calls.append("reset")
        return not self.is_busy


class Config(NamedTuple):
    model: str


class AsyncEngine:
    """A stub of ``vllm.AsyncLLM``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.model_config = engine.model_config

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self._engine.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self._engine.calls.append("resume")

    async def collective_rpc(self, *args: Any, **options: Any) -> list[None]:
        return self._engine.collective_rpc(*args, **options)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self._engine.reset_prefix_cache(reset_running_requests, reset_connector)

    async def update_weight_version(self, new_version: str) -> None:
        self._engine.calls.append(new_version)


class VllmHandler(BaseHTTPRequestHandler):
    """A server of vLLM with an engine: a call that is in `failing` answers with an error."""

    engine: Engine
    failing: set[str]

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._answer(200, {"data": [{"id": "m", "root": self.engine.model_config.model}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, _, query = self.path.partition("?")
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            "/pause": lambda: self._note(f"pause {query.removeprefix('mode=')}"),
            "/collective_rpc": lambda: {"results": self.engine.collective_rpc(**asked)},
            "/reset_prefix_cache": lambda: {"success": self.engine.reset_prefix_cache()},
            "/update_weight_version": lambda: self._note(asked["new_version"]),
            "/resume": lambda: self._note("resume"),
        }
        if path in self.failing:
            self._answer(404 if path == "/pause" else 500, {"error": "failed"})
            return
        try:
            self._answer(200, calls[path]())
        except OSError as e:
            self._answer(500, {"error": {"message": str(e)}})

    def _note(self, call: str) -> dict[str, Any]:
        self.engine.calls.append(call)
        return {}

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    @override
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def vllm_server(engine: Engine, *failing: str) -> Iterator[str]:
    handler = type("H", (VllmHandler,), {"engine": engine, "failing": set(failing)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def loop_of_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def callbacks(engine: Engine, mode: PauseMode = "wait") -> Iterator[dict[str, OnVersion]]:
    """Give a callback for each way to reach an engine."""
    with vllm_server(engine) as url, loop_of_a_thread() as loop:
        yield {
            "here": reload_vllm(engine),
            "async": reload_vllm_async(AsyncEngine(engine), mode=mode, loop=loop),
            "server": reload_vllm_server(url, mode=mode),
        }


WAYS = ["here", "async", "server"]


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
            {"abort_all_requests": True, "flush_cache": True, "weight_version": folder.name}
            for folder in folders
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
        for expected in ("answers 400: .*no such folder", "did not load .*busy", "JSON: hello"):
            with pytest.raises(CasnapError, match=expected):
                callback(tmp_path, [])
        server.answers = [(500, b"?")]
        assert follow(tmp_path, callback, "called") == ["switched", "call_failed", "called"]
    with pytest.raises(CasnapError, match="cannot be reached"):
        callback(tmp_path, [])
    with pytest.raises(ValueError, match="like http://localhost:30000"):
        reload_sglang("file:///etc/passwd")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_vllm_loads_each_version(tmp_path: Path, way: str, mode: PauseMode) -> None:
    store, engine = store_at(tmp_path / "store"), Engine(tmp_path)
    with callbacks(engine, mode) as ways:
        for step in range(2):
            take(store, step)
            follow(tmp_path, ways[way], "called")
            assert engine.weights["bias"].equal(weights(step)["bias"])
            name = (tmp_path / "live").resolve().name
            around = [f"pause {mode}"], [name, "resume"]
            before, after = ([], []) if way == "here" else around
            assert engine.calls == [*before, "reload", "reset", *after]
            engine.calls.clear()
        engine.is_busy = True
        with pytest.raises(CasnapError, match="kept its cache of prefixes"):
            ways[way]((tmp_path / "live").resolve(), [])
        assert way == "here" or engine.calls[-1] == "resume"


@pytest.mark.parametrize("way", WAYS)
def test_vllm_keeps_its_weights_if_a_folder_cannot_be_loaded(tmp_path: Path, way: str) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    first = Path(store.pull(tmp_path / "live").folder)
    engine = Engine(first)
    with callbacks(engine) as ways:
        with pytest.raises(CasnapError, match=f"(?s)did not load .*no_such, and still has {first}"):
            ways[way](tmp_path / "no_such", [])
        assert engine.weights["bias"].equal(weights(0)["bias"])
        take(store, 1)
        second = Path(store.pull(tmp_path / "live").folder)
        ways[way](second, [])
        with pytest.raises(CasnapError, match=f"and still has {second}"):
            ways[way](tmp_path / "no_such", [])
        assert engine.weights["bias"].equal(weights(1)["bias"])
        for folder in (first, second):
            (folder / "model.safetensors").unlink()
        with pytest.raises(CasnapError, match=f"Nor did it load {second} again.*restart it"):
            ways[way](first, [])
    assert way == "here" or engine.calls[-1] == "resume"


def test_a_server_of_vllm_is_resumed_whatever_fails(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    folder = Path(store.pull(tmp_path / "live").folder)
    for failing, expected in (
        ("/pause", "404.*VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", "Nor did it load"),
        ("/reset_prefix_cache", "answers 500"),
        ("/update_weight_version", "answers 500"),
    ):
        engine = Engine(folder)
        with vllm_server(engine, failing) as url:
            with pytest.raises(CasnapError, match=expected):
                reload_vllm_server(url)(folder, [])
            assert engine.calls[-1] == "resume"
    with (
        vllm_server(Engine(folder), "/update_weight_version", "/resume") as url,
        pytest.raises(CasnapError, match=r"version answers 500.*Nor could .* be resumed.*500"),
    ):
        reload_vllm_server(url)(folder, [])
    with pytest.raises(CasnapError, match="cannot be reached"):
        reload_vllm_server(url)(folder, [])


class Actor:
    """A stub of an actor of Ray, whose methods are called by `remote`."""

    class Method:
        def remote(self, *args: Any) -> object:
            return object()

        def __call__(self, *args: Any) -> object:
            raise AssertionError

    collective_rpc = reset_prefix_cache = Method()


class Lazy:
    """An engine whose calls return before they are done, unsaid."""

    model_config = Config("x")

    def collective_rpc(self, *args: Any, **options: Any) -> Any:
        return asyncio.sleep(0)

    def reset_prefix_cache(self, **options: Any) -> None:
        raise AssertionError


def test_an_engine_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="AsyncEngine there is reload_vllm_async"):
        reload_vllm(AsyncEngine(Engine()))
    with pytest.raises(TypeError, match="Actor is the handle of an engine in another process"):
        reload_vllm(Actor())
    with pytest.raises(TypeError, match="reload_vllm_server"):
        reload_vllm("http://localhost:8000")
    with pytest.raises(TypeError, match="has collective_rpc and reset_prefix_cache; got object"):
        reload_vllm(object())
    with pytest.raises(TypeError, match="a coroutine, so perhaps nothing was loaded"):
        reload_vllm(Lazy())(tmp_path, [])
    with pytest.raises(TypeError, match="Engine there is reload_vllm\\(llm"):
        reload_vllm_async(Engine())
    with pytest.raises(TypeError, match="no event loop runs here"):
        reload_vllm_async(AsyncEngine(Engine()))
    for make in (reload_vllm_async, reload_vllm_server):
        with pytest.raises(ValueError, match="mode is one of wait, keep; got 'abort'"):
            make("http://localhost", mode="abort")  # type: ignore[operator]


def test_an_asynchronous_engine_within_its_event_loop(tmp_path: Path) -> None:
    store, engine = store_at(tmp_path / "store"), Engine()
    take(store, 0)
    folder = Path(store.pull(tmp_path / "live").folder)

    async def main() -> OnVersion:
        callback = reload_vllm_async(AsyncEngine(engine))
        with pytest.raises(CasnapError, match="wait for the event loop that it is called in"):
            callback(folder, [])
        assert not engine.calls
        await asyncio.to_thread(callback, folder, [])
        assert engine.weights["bias"].equal(weights(0)["bias"])
        return callback

    callback = asyncio.run(main())
    with pytest.raises(CasnapError, match="the event loop of vLLM has ended"):
        callback(folder, [])
