"""Engines reload what a follower pulls: against stubs of the interfaces that they document.

``test_vllm.py`` and ``test_sglang_real.py`` try the real ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from casnap.errors import CasnapError
from casnap.integrations import engines
from casnap.integrations.engines import (
    OnVersion,
    PauseMode,
    reload_sglang,
    reload_vllm,
    reload_vllm_async,
    reload_vllm_server,
)
from casnap.runtime.typing import override
from casnap.serving import PullOptions
from casnap.serving.patches import Patch
from casnap.serving.version import Version
from tests.support.engine_servers import command_for_sglang
from tests.support.hosts import two_hosts, yard_of
from tests.support.served import store_at, take, versions_of, weights


class Server(ThreadingHTTPServer):
    """A stub of SGLang's server: it loads a folder, or refuses it as that does."""

    requests: list[dict[str, Any]]
    headers: list[str | None]
    answers: list[tuple[int, bytes]]
    seconds: float  # until it answers
    paused: list[bool]  # at each request
    is_paused: bool


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in ("/pause_generation", "/continue_generation"):
            assert asked == ({"mode": "abort"} if self.path == "/pause_generation" else {})
            server.is_paused = self.path == "/pause_generation"
            self._answer(200, b'{"status": "ok"}')
            return
        assert self.path == "/update_weights_from_disk"
        server.paused.append(server.is_paused)
        server.headers.append(self.headers["Authorization"])
        status, answer = 200, b'{"success": true, "message": "Succeeded"}'
        if self.headers.get_content_type() != "application/json":
            status, answer = 400, b'{"object": "error", "message": "2 validation errors"}'
        elif server.answers:
            status, answer = server.answers.pop(0)
        else:
            assert load_file(Path(asked["model_path"]) / "model.safetensors")
        server.requests.append(asked)
        time.sleep(server.seconds)
        self._answer(status, answer)

    def _answer(self, status: int, answer: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def sglang() -> Iterator[tuple[Server, str]]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.requests, server.headers, server.answers, server.seconds = [], [], [], 0
        server.paused, server.is_paused = [], False
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
        self.named = "default"
        self.is_paused = False

    @property
    def llm_engine(self) -> Engine:
        return self

    def reset_encoder_cache(self) -> None:
        self.calls.append("reset encoder")

    def update_weight_version(self, new_version: str) -> None:
        self.calls.append(new_version)
        self.named = new_version

    def get_weight_version(self) -> str:
        return self.named

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
        self._engine.is_paused = True

    async def resume_generation(self) -> None:
        self._engine.calls.append("resume")
        self._engine.is_paused = False

    async def is_paused(self) -> bool:
        return self._engine.is_paused

    async def collective_rpc(self, *args: Any, **options: Any) -> list[None]:
        return self._engine.collective_rpc(*args, **options)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self._engine.reset_prefix_cache(reset_running_requests, reset_connector)

    async def update_weight_version(self, new_version: str) -> None:
        self._engine.update_weight_version(new_version)

    async def get_weight_version(self) -> str:
        return self._engine.get_weight_version()


class VllmHandler(BaseHTTPRequestHandler):
    """A server of vLLM with an engine: a call that is in `failing` answers with an error."""

    engine: Engine
    failing: set[str]

    def do_GET(self) -> None:
        answers = {
            "/v1/models": {"data": [{"id": "m", "root": self.engine.model_config.model}]},
            "/weight_info": {"weight_version": self.engine.named},
            "/is_paused": {"is_paused": self.engine.is_paused},
        }
        self._answer(200, answers[self.path])

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, _, query = self.path.partition("?")
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            "/pause": lambda: self._note(f"pause {query.removeprefix('mode=')}"),
            "/collective_rpc": lambda: {"results": self.engine.collective_rpc(**asked)},
            "/reset_prefix_cache": lambda: {"success": self.engine.reset_prefix_cache()},
            "/update_weight_version": lambda: self._name(asked["new_version"]),
            "/resume": lambda: self._note("resume"),
        }
        if path in self.failing:
            self._answer(404 if path == "/pause" else 500, {"error": "failed"})
            return
        try:
            self._answer(200, calls[path]())
        except (OSError, RuntimeError) as e:
            self._answer(500, {"error": {"message": str(e)}})

    def _note(self, call: str) -> dict[str, Any]:
        self.engine.calls.append(call)
        self.engine.is_paused = call != "resume"
        return {}

    def _name(self, version: str) -> dict[str, Any]:
        self.engine.update_weight_version(version)
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
def callbacks(
    engine: Engine, mode: PauseMode = "wait", *, patches: bool = False, timeout: float = 60
) -> Iterator[dict[str, OnVersion]]:
    """Give a callback for each way to reach an engine."""
    with vllm_server(engine) as url, loop_of_a_thread() as loop:
        an_async = AsyncEngine(engine)
        options: dict[str, Any] = {"patches": patches, "timeout": timeout}
        yield {
            "here": reload_vllm(engine, **options),
            "async": reload_vllm_async(an_async, mode=mode, loop=loop, **options),
            "server": reload_vllm_server(url, mode=mode, **options),
        }


WAYS = ["here", "async", "server"]


def follow(
    path: Path, on_version: OnVersion, until: str, count: int = 1, *, in_place: bool = False
) -> list[str]:
    """Follow until an event has come so often; return all events."""
    seen, options = [], PullOptions(in_place=in_place)
    for event in store_at(path / "store").follow(
        path / "live", interval=0.01, on_version=on_version, options=options
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
            {"flush_cache": True, "weight_version": folder.name} for folder in folders
        ]
        # Requests are aborted in the pause: else prefixes of the old weights could stay.
        assert server.paused == [True, True]
        server.answers = [(400, b'{"success": false}')]
        with pytest.raises(CasnapError, match="answers 400"):
            callback(folders[-1], [])
        assert not server.is_paused
        assert server.headers == ["x"] * 3
        assert not any(folder.is_symlink() for folder in folders)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_sglang_loads_by_the_command_of_the_guide(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    # It would add a field to the request.
    take(store, 0, 'step", "load_format": "dummy')
    folder = store.pull(tmp_path / "live").folder
    with sglang() as (server, url):
        command = command_for_sglang(url)
        subprocess.run(
            ["sh", "-c", command], env=os.environ | {"CASNAP_FOLDER": folder}, check=True
        )
    assert server.requests == [{"model_path": folder}]


def test_engines_load_a_folder_that_is_changed_in_place(tmp_path: Path) -> None:
    """It has one name for all versions, so engines are told that of the version."""
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    engine = Engine(tmp_path)
    with sglang() as (server, url):
        for step in range(3):
            take(store, step)
            for reload in (reload_sglang(url), reload_vllm(engine)):
                follow(tmp_path, reload, "called", in_place=True)
                (live.with_name("live.versions") / ".called.json").unlink()
            name = f"step_{step}@{store[f'step_{step}'].commit_id}"
            asked = server.requests[-1]
            assert (asked["model_path"], asked["weight_version"]) == (str(live), name)
            assert engine.named == name
            assert all(engine.weights[n].equal(tensor) for n, tensor in weights(step).items())
    assert len(server.requests) == 3


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_in_place_stays_until_an_engine_has_loaded_it(tmp_path: Path, way: str) -> None:
    """An engine loads it once it comes to that, also if nobody waits any more."""
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    take(store, 0)
    linked = Path(store.pull(tmp_path / "linked").folder)
    store.pull(live, options=PullOptions(in_place=True))
    engine = SlowEngine(linked)
    with callbacks(engine, timeout=0.1) as ways:
        ways[way](live, [])
        assert engine.weights["bias"].equal(weights(0)["bias"])
        with pytest.raises(CasnapError, match=r"timed out|took more than 0\.1 s"):
            ways[way](linked, [])


class SlowEngine(Engine):
    """A stub of ``vllm.LLM`` that loads slowly, and gives up when it is told to."""

    @override
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        if timeout is not None:
            raise TimeoutError("timed out")
        time.sleep(0.5)
        return super().collective_rpc(method, timeout, args, kwargs)


def test_a_folder_in_place_stays_until_sglang_has_loaded_it(tmp_path: Path) -> None:
    """SGLang loads it once the requests that run have ended, also if nobody waits any more."""
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    take(store, 0)
    linked = Path(store.pull(tmp_path / "linked").folder)
    store.pull(live, options=PullOptions(in_place=True))
    with sglang() as (server, url):
        server.seconds = 1
        callback = reload_sglang(url, timeout=0.1)
        callback(live, [])
        with pytest.raises(CasnapError, match=r"cannot be reached: .*timed out"):
            callback(linked, [])
    assert [asked["model_path"] for asked in server.requests] == [str(live), str(linked)]


def ask_a_host_that_goes(path: str) -> str:
    """Load a folder in place into a server of the other host, which says nothing; return why."""
    yard, rank, address = yard_of(path), dist.get_rank(), ("10.0.0.2", 30000)
    live = Path(path, "live")
    if rank == 2:
        with socket.create_server(address) as server:
            yard.leave("listening")
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                yard.leave("reached")
                yard.wait("ended")
    elif rank == 0:
        engines._MOST_SILENCE = 4
        yard.wait("listening")
        try:
            reload_sglang(f"http://{address[0]}:{address[1]}", timeout=0.1)(live, [])
        except CasnapError as e:
            return str(e)
        finally:
            yard.leave("ended")
    return ""


@pytest.mark.slow
def test_a_host_that_is_gone_is_not_waited_for(disk_path: Path) -> None:
    """It does not say so: nothing arrives any more. A call without a timeout waited for ever."""
    (disk_path / "live").mkdir()
    (disk_path / "live.versions").mkdir()
    (disk_path / "live.versions/.lock").touch()
    with two_hosts(disk_path, __name__) as hosts:
        hosts.start(ask_a_host_that_goes, str(disk_path))
        hosts.wait("reached")
        hosts.cut(1)
        hosts.wait("ended")
        hosts.mend(1)
        assert "cannot be reached: " in hosts.outcomes()[0]


@pytest.mark.parametrize("way", WAYS)
def test_patches_need_the_version_before(tmp_path: Path, way: str) -> None:
    engine = Engine(tmp_path)
    take(store_at(tmp_path / "store"), 0)
    with callbacks(engine, patches=True) as ways:
        seen = follow(tmp_path, ways[way], "call_failed", in_place=True)
        with pytest.raises(CasnapError, match=r"written over it in .*live: leave out patches=True"):
            ways[way](tmp_path / "live", [])
    assert (seen, engine.calls) == (["switched", "call_failed"], [])


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
            resets = ["reset encoder", "reset"] if way == "here" else ["reset"]
            before, after = [f"pause {mode}"], [name, "resume"]
            if way == "here":  # which has no pause, so it does what vLLM does in one
                before, after = resets, [name]
            assert engine.calls == [*before, "reload", *resets, *after]
            engine.calls.clear()
        engine.is_busy = True
        take(store, 2)
        folder = Path(store.pull(tmp_path / "live").folder)
        with pytest.raises(CasnapError, match="kept its cache of prefixes"):
            ways[way](folder, [])
        if way == "here":
            # Nothing else would have dropped the prefixes, so it has not loaded anything.
            assert engine.calls == ["reset encoder", "reset"]
            assert engine.named == name
            return
        # It answers with the new weights, and says so. The pause has dropped the prefixes.
        assert engine.calls[-1] == "resume"
        assert engine.weights["bias"].equal(weights(2)["bias"])
        assert engine.named == folder.name


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_load_of_one_folder_counts(
    tmp_path: Path, way: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder of the version before is that of the new one, there is no way back."""
    store, live = store_at(tmp_path / "store"), tmp_path / "live"
    for step in range(2):
        take(store, step)
        store.pull(live, options=PullOptions(in_place=in_place))
    engine, real, loads = Engine(live), Engine.collective_rpc, list[str]()

    def collective_rpc(engine: Engine, method: str, *args: Any, **options: Any) -> list[None]:
        loads.append(method)
        if len(loads) == 1:
            raise RuntimeError("once")
        return real(engine, method, *args, **options)

    monkeypatch.setattr(Engine, "collective_rpc", collective_rpc)
    with callbacks(engine) as ways:
        ways[way](live.resolve(), [])
    assert engine.weights["bias"].equal(weights(1)["bias"])
    assert engine.named == f"step_1@{store['step_1'].commit_id}"
    assert (len(loads), engine.calls.count("reset")) == (2, 2 if way == "here" else 1)


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


class Worker:
    """What the backend in a worker of vLLM does, by its own account."""

    def __init__(self, folder: Path) -> None:
        self.is_updating, self.fails = False, False
        self.prepared: dict[str, Any] = {}
        self.load(folder)

    def load(self, folder: Path) -> None:
        version = Version.at(folder)
        assert version is not None
        self.content, self.weights = version.content, load_file(folder / "model.safetensors")
        self.how = "whole"

    def finish(self) -> None:
        if not self.is_updating:
            raise RuntimeError("finish without start")
        self.is_updating = False

    def update(self, info: dict[str, Any]) -> None:
        assert self.is_updating
        if self.fails:
            self.is_updating, self.content = False, ""
            self.weights["bias"].fill_(-1)
            raise RuntimeError("worker fails")
        if info["content"] == self.content:
            self.how = "there"
        elif info.get("base") == self.content:
            assert self.prepared == info
            asked = (Path(info["patches"]), info["digest"], info["base"], info["content"])
            for name, patch in Patch.read(*asked).items():
                flat = self.weights[name].view(-1).view(torch.int16).numpy()
                assert (flat[patch.indices] == patch.before.view("i2")).all()
                flat[patch.indices] = patch.values.view("i2")
            whole = load_file(Path(info["folder"]) / "model.safetensors")
            self.weights |= {name: whole[name] for name in info["whole"]}
            self.content, self.how = info["content"], "patches"
        else:
            self.load(Path(info["folder"]))


class PatchedEngine(Engine):
    """A stub of ``vllm.LLM`` with the backend ``casnap``, and two workers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.workers = [Worker(folder), Worker(folder)]

    @override
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        assert kwargs is not None
        self.calls.append(method.partition("_")[0])
        errors = []
        for worker in self.workers:
            try:
                if method == "start_weight_update":
                    assert not worker.is_updating
                    worker.is_updating = True
                elif method == "update_weights":
                    worker.update(kwargs["update_info"])
                elif method == "finish_weight_update":
                    worker.finish()
                else:
                    assert method == "init_weight_transfer_engine"
                    worker.prepared = kwargs["init_info"]["update"]
            except RuntimeError as e:
                errors.append(e)
        if errors:
            raise errors[0]
        return [None for _ in self.workers]

    def assert_all(self, step: int, how: str) -> None:
        for worker in self.workers:
            for name, tensor in weights(step).items():
                assert worker.weights[name].equal(tensor), name
            assert worker.how == how


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_vllm_takes_patches(tmp_path: Path, way: str, mode: PauseMode) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    engine = PatchedEngine(Path(store.pull(tmp_path / "live").folder))
    with callbacks(engine, mode, patches=True) as ways:
        for step in range(1, 4):
            take(store, step)
            follow(tmp_path, ways[way], "called")
            engine.assert_all(step, "patches")
            name = (tmp_path / "live").resolve().name
            resets = ["reset encoder", "reset"] if way == "here" else ["reset"]
            before = resets if way == "here" else [f"pause {mode}"]
            after = [name] if way == "here" else [name, "resume"]
            steps = ["init", *before, "start", "update", "finish", *resets, *after]
            assert engine.calls == steps
            engine.calls.clear()
        # It is called again, as after a crash of the follower.
        ways[way]((tmp_path / "live").resolve(), [])
        engine.assert_all(3, "there")
        assert not any(".patches" in name for name in versions_of(tmp_path / "live"))
    # Another follower asks the engine what it has.
    with callbacks(engine, mode, patches=True) as ways:
        take(store, 4)
        follow(tmp_path, ways[way], "called")
        engine.assert_all(4, "patches")
        # One that was started again has what it was started with.
        engine.workers = [Worker(tmp_path / "live"), Worker(tmp_path / "live")]
        engine.workers[0].content = "what nobody knows"
        take(store, 5)
        follow(tmp_path, ways[way], "called")
        assert [worker.how for worker in engine.workers] == ["whole", "patches"]


@pytest.mark.parametrize("way", WAYS)
def test_all_workers_have_one_version_whatever_fails(tmp_path: Path, way: str) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    first = Path(store.pull(tmp_path / "live").folder)
    engine = PatchedEngine(first)
    take(store, 1)
    second = Path(store.pull(tmp_path / "live").folder)

    class Once(Worker):
        @override
        def update(self, info: dict[str, Any]) -> None:
            self.fails = info["content"] == content_of(second)
            super().update(info)

    engine.workers[1] = Once(first)
    with callbacks(engine, patches=True) as ways:
        with pytest.raises(CasnapError, match=f"(?s)and still has {first}.*worker fails"):
            ways[way](second, [])
        engine.assert_all(0, "whole")
        assert way == "here" or engine.calls[-1] == "resume"
        # Not even the version before can be loaded.
        engine.workers[1] = Worker(first)
        engine.workers[1].fails = True
        with pytest.raises(CasnapError, match="stays paused until one can be loaded"):
            ways[way](second, [])
        assert engine.calls[-1] != "resume"
    # Another follower finds the engine paused, and fails before it has loaded anything.
    with callbacks(engine, patches=True) as ways:
        engine.workers[1].is_updating = True
        with pytest.raises(CasnapError, match="stays paused until one can be loaded"):
            ways[way](second, [])
        assert engine.is_paused == (way != "here")
        engine.workers[0].is_updating = engine.workers[1].is_updating = False
        engine.workers[1].fails = False
        ways[way](second, [])
        assert way == "here" or engine.calls[-1] == "resume"
        for worker in engine.workers:
            assert worker.weights["bias"].equal(weights(1)["bias"])


def test_a_damaged_version_is_made_anew(tmp_path: Path) -> None:
    """A byte has changed, and the times of the file have not."""
    store = store_at(tmp_path / "store")
    take(store, 0)
    engine = PatchedEngine(Path(store.pull(tmp_path / "live").folder))
    take(store, 1)
    folder = Path(store.pull(tmp_path / "live").folder)
    version, file = Version.at(folder), folder / "model.safetensors"
    assert version is not None
    times = file.stat()
    with file.open("r+b") as f:
        f.seek(version.record.tensors["bias"].start)
        f.write(b"damaged")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    callback = reload_vllm(engine, patches=True)
    assert follow(tmp_path, callback, "called") == ["switched", "call_failed", "switched", "called"]
    # What the engine has loaded is the oldest by now, and stays until it was called.
    engine.assert_all(1, "patches")


@pytest.mark.parametrize("way", ["async", "server"])
def test_who_is_interrupted_in_the_pause_leaves_no_paused_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store = store_at(tmp_path / "store")
    take(store, 0)
    engine = PatchedEngine(Path(store.pull(tmp_path / "live").folder))
    take(store, 1)
    second = Path(store.pull(tmp_path / "live").folder)
    kind = {"async": engines._VllmAsync, "server": engines._VllmServer}[way]
    real, times = kind.call, 0

    def call(self: Any, method: str, **options: Any) -> None:
        nonlocal times
        real(self, method, **options)
        times += method == "update_weights"
        if method == "update_weights" and times == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, "call", call)
    with callbacks(engine, patches=True) as ways:
        with pytest.raises(KeyboardInterrupt):
            ways[way](second, [])
        assert not engine.is_paused
        engine.assert_all(0, "whole")


def content_of(folder: Path) -> str:
    version = Version.at(folder)
    assert version is not None
    return version.content


def test_an_engine_without_the_backend_is_not_paused(tmp_path: Path) -> None:
    class Plain(Engine):
        @override
        def collective_rpc(self, method: str, *_: Any, **options: Any) -> list[None]:
            assert method == "init_weight_transfer_engine"
            raise RuntimeError("Weight transfer not configured")

    engine = Plain(tmp_path)
    with callbacks(engine, patches=True) as ways:
        for callback in ways.values():
            with pytest.raises(CasnapError, match=r"does not take patches .*not configured"):
                callback(tmp_path, [])
    assert engine.calls == []


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

    @property
    def llm_engine(self) -> Any:
        return Engine()

    def reset_prefix_cache(self, **options: Any) -> bool:
        return True


class Counting(Lazy):
    """An engine that answers how many workers it has."""

    @override
    def collective_rpc(self, *args: Any, **options: Any) -> Any:
        return 1


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
    with pytest.raises(TypeError, match="an int, so perhaps nothing was loaded"):
        reload_vllm(Counting())(tmp_path, [])
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
