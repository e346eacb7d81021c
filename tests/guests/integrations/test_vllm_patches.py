"""vLLM with the backend ``casnap`` takes patches, while it answers: the real one, on a CPU."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from casnap import Store
from casnap.integrations.engines import OnVersion, PauseMode, reload_vllm_server
from casnap.runtime.typing import override
from casnap.serving import PullOptions
from tests.support.engine_servers import PROMPTS, Trainer, clients
from tests.support.pages import run_examples
from tests.support.tiny_llamas import llama, take
from tests.support.vllm_engines import VllmServer

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1800)]

GUIDE = Path(__file__).parents[3] / "docs/guides/vllm.md"
BACKEND = ["--weight-transfer-config", '{"backend": "casnap"}']


def versions(count: int) -> list[Any]:
    """Return models of which each differs from the one before in a few elements."""
    models = [llama(0)]
    for step in range(1, count):
        model = copy.deepcopy(models[-1])
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                flat = parameter.view(-1)
                chosen = torch.randperm(len(flat), generator=generator)[: len(flat) // 20 + 1]
                flat[chosen] += 2 * torch.randn(len(chosen), generator=generator)
        models.append(model)
    return models


class Served:
    """A trainer, and a server that takes its versions."""

    def __init__(self, path: Path) -> None:
        self.trainer = Trainer(path, versions(24), PullOptions(patches=True))
        self.server = VllmServer(self.trainer.live.resolve(), path / "log", *BACKEND)
        self._read = 0

    def said(self) -> list[str]:
        """Return how the server came to its versions since the last call."""
        lines = self.server.log.read_text().splitlines()
        new, self._read = lines[self._read :], len(lines)
        return [line.partition("casnap: ")[2] for line in new if "casnap: " in line]

    def assert_by(self, how: str) -> None:
        name = self.trainer.live.resolve().name
        said = self.said()
        assert said[-1].startswith(f"{name} {how}, after"), said
        assert self.server.look("/weight_info") == {"weight_version": name}
        assert self.trainer.of_last([self.server.ask(prompt) for prompt in PROMPTS])

    def checksums(self) -> Any:
        return json.loads(self.server.call("/weight_checker", {"action": "checksum"}))

    def load_whole(self) -> None:
        folder = str(self.trainer.live.resolve())
        asked = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.server.call("/collective_rpc", asked)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert "casnap" in entry_points(group="vllm.general_plugins").names, "install casnap anew"
    served = Served(tmp_path_factory.mktemp("served"))
    try:
        served.server.wait()
        yield served
    finally:
        served.server.stop()


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_server_that_answers_meanwhile(served: Served, mode: PauseMode) -> None:
    trainer, server = served.trainer, served.server
    callback = reload_vllm_server(server.url, mode=mode, patches=True)
    with clients(server.ask) as answers:
        trainer.serve(callback)
        # On a busy machine no request may be under way just then.
        for _ in range(4):
            # Of those that are there now: on a busy machine more come than are judged meanwhile.
            if mode == "wait" or trainer.mixed(list(answers)):
                break
            trainer.serve(callback)
    trainer.check(answers, mode)
    served.assert_by("is there by patches")
    patched = served.checksums()
    served.load_whole()
    assert served.checksums() == patched


def test_the_store_is_not_needed_in_the_pause(served: Served) -> None:
    trainer, server = served.trainer, served.server
    callback = reload_vllm_server(server.url, patches=True)
    place = trainer.live.with_name("ckpts")

    def on_version(folder: Path, changed: list[str]) -> None:
        place.rename(place.with_name("away"))
        try:
            callback(folder, changed)
        finally:
            place.with_name("away").rename(place)

    trainer.serve(on_version)
    served.assert_by("is there by patches")


def test_no_patch_is_written_to_a_wrong_base(served: Served, tmp_path: Path) -> None:
    trainer, server = served.trainer, served.server
    callback = reload_vllm_server(server.url, patches=True)
    other = Store(tmp_path / "other")
    take(other, llama(100), "run/0", tmp_path)
    folder = other.pull(tmp_path / "live").folder
    served.said()
    # Somebody has it load something else.
    server.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
    trainer.serve(callback)
    served.assert_by("was loaded whole")
    trainer.serve(callback)
    served.assert_by("is there by patches")
    # Somebody writes to its weights, and nothing says so.
    server.call("/weight_checker", {"action": "reset"})
    trainer.serve(callback)
    said = served.said()
    assert any("somebody has changed" in line for line in said), said
    assert "was loaded whole" in said[-1]
    assert trainer.of_last([server.ask(prompt) for prompt in PROMPTS])


def test_a_version_is_withdrawn_while_it_is_staged(served: Served) -> None:
    trainer, server = served.trainer, served.server
    callback = reload_vllm_server(server.url, patches=True)
    trainer.take()
    before, after = f"run/{trainer.taken - 2}", f"run/{trainer.taken - 1}"
    trainer.store.publish("stable", after)
    called: list[str] = []

    def on_version(folder: Path, changed: list[str]) -> None:
        if not called:
            trainer.store.publish("stable", before)
        callback(folder, changed)
        called.append(folder.name)

    options = PullOptions(tag="stable")
    for event in trainer.store.follow(
        trainer.live, interval=0.1, on_version=on_version, options=options
    ):
        assert event.event in ("switched", "called"), event.error
        if len(called) == 2:
            break
    assert [name.partition("@")[0] for name in called] == [after[4:], before[4:]]
    answers = [server.ask(prompt) for prompt in PROMPTS]
    assert all(trainer.taken - 2 in trainer.judge.versions(*answer) for answer in answers)
    assert "is there by patches" in served.said()[-1]


def test_two_publish_at_once(served: Served, tmp_path: Path) -> None:
    trainer, server = served.trainer, served.server
    callback = reload_vllm_server(server.url, patches=True)
    first, begin = trainer.taken, threading.Barrier(2)
    last = f"run/{first + 4}"

    def publish(models: list[int], scratch: Path) -> None:
        store = Store(trainer.live.with_name("ckpts"))
        begin.wait()
        for number in models:
            take(store, trainer.models[number], f"run/{number}", scratch)
            store.publish("stable", f"run/{number}")

    publishers = [
        threading.Thread(target=publish, args=([first + n, first + n + 2], tmp_path / f"{n}"))
        for n in range(2)
    ]

    def publish_the_last() -> None:
        for publisher in publishers:
            publisher.start()
        for publisher in publishers:
            publisher.join()
        trainer.taken = first + 4
        trainer.take()
        trainer.store.publish("stable", last)

    publishing = threading.Thread(target=publish_the_last)
    numbers: list[int] = []
    options = PullOptions(tag="stable", patches=True)
    with clients(server.ask) as answers:
        publishing.start()
        for event in trainer.store.follow(
            trainer.live, interval=0.1, on_version=callback, options=options
        ):
            assert event.event in ("switched", "called"), event.error
            if event.event == "called" and event.report:
                numbers.append(event.report.number)
                if event.report.snapshot == last:
                    break
        publishing.join()
    trainer.check(answers, "wait")
    served.assert_by("is there by patches")
    # No engine goes back, whoever publishes.
    assert numbers == sorted(set(numbers)), numbers
    assert len(numbers) > 1


class Between(BaseHTTPRequestHandler):
    """Between a callback and a server: it kills the server when that is to take patches."""

    server_of_vllm: VllmServer
    kills: threading.Event

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        if b'"update_weights"' in asked and self.kills.is_set():
            self.server_of_vllm.kill()
            self.kills.clear()
        self._pass_on(asked)

    def _pass_on(self, asked: bytes | None) -> None:
        url = f"{self.server_of_vllm.url}{self.path}"
        try:
            with urlopen(Request(url, asked, {"Content-Type": "application/json"})) as response:
                status, answer = 200, response.read()
        except HTTPError as e:
            status, answer = e.code, e.read()
        except OSError:
            status, answer = 502, b"{}"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    @override
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def between(server: VllmServer) -> Iterator[tuple[str, type[Between]]]:
    fields = {"server_of_vllm": server, "kills": threading.Event()}
    handler = type("H", (Between,), fields)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}", handler
        finally:
            proxy.shutdown()
            thread.join()


def test_an_engine_is_killed_in_the_pause_beside_another_one(
    served: Served, tmp_path: Path
) -> None:
    trainer, server = served.trainer, served.server
    second = VllmServer(trainer.live.resolve(), tmp_path / "log", *BACKEND)
    try:
        second.wait()
        with between(second) as (url, handler):
            callbacks: list[OnVersion] = [
                reload_vllm_server(server.url, patches=True),
                reload_vllm_server(url, patches=True),
            ]
            handler.kills.set()

            def on_version(folder: Path, changed: list[str]) -> None:
                for callback in callbacks:
                    callback(folder, changed)

            with clients(server.ask) as answers:
                trainer.take()
                for event in trainer.store.follow(
                    trainer.live, interval=0.1, on_version=on_version
                ):
                    if event.event == "call_failed":
                        assert "answers 502" in str(event.error)
                        break
            trainer.check(answers, "wait")
            served.assert_by("is there by patches")
            # It is started again, with what is current.
            second = VllmServer(trainer.live.resolve(), tmp_path / "log", *BACKEND)
            second.wait()
            handler.server_of_vllm = second
            assert trainer.of_last([second.ask(prompt) for prompt in PROMPTS])
            trainer.serve(on_version)
        served.assert_by("is there by patches")
        assert trainer.of_last([second.ask(prompt) for prompt in PROMPTS])
        assert "is there by patches" in second.log.read_text()
    finally:
        second.stop()


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    try:
        run_examples(GUIDE, work, monkeypatch)
    finally:
        for log in work.glob("*.log"):
            print(log.read_text()[-2000:])
