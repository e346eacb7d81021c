"""Servers of real engines on a CPU, a trainer of what they serve, and clients that ask them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from casnap import Store
from casnap.integrations.engines import OnVersion, PauseMode
from casnap.serving import PullOptions
from tests.support.tiny_llamas import Judge, prompts, take

# Longer than a block of the cache on CPUs.
PROMPTS = prompts(4, 140)
Answer = tuple[list[int], list[int]]
_GUIDE = Path(__file__).parents[2] / "docs/guides/serving.md"


def command_for_sglang(url: str) -> str:
    """Return the command of the guide by which a server of SGLang loads a folder."""
    found = re.search(r"--exec '(.*/update_weights_from_disk.*)'", _GUIDE.read_text())
    assert found is not None
    return found[1].replace("localhost:30000", url.rstrip("/"))


class Trainer:
    """Takes one version after the other, and follows.

    Args:
        path: For the store, and the folder that follows it.
        models: The versions.
        options: Of each pull.
    """

    def __init__(self, path: Path, models: list[Any], options: PullOptions) -> None:
        self._options = options
        self.models = models
        self.judge = Judge(self.models)
        self.live = path / "live"
        self.store = Store(path / "ckpts")
        self._scratch = path / "scratch"
        self.taken = 0
        self.take()
        self.store.pull(self.live, options=options)

    def take(self) -> None:
        take(self.store, self.models[self.taken], f"run/{self.taken}", self._scratch)
        self.taken += 1

    def serve(self, callback: OnVersion) -> None:
        """Have an engine load the next version."""
        self.take()
        for event in self.store.follow(
            self.live, interval=0.1, on_version=callback, options=self._options
        ):
            if event.event == "called":
                return
            assert event.event == "switched", event.error

    def of_last(self, answers: list[Answer]) -> bool:
        return all(self.taken - 1 in self.judge.versions(*each) for each in answers)

    def mixed(self, answers: list[Answer]) -> list[Answer]:
        """Return those that are of no version as a whole."""
        return [each for each in answers if not self.judge.versions(*each)]

    def check(self, answers: list[Answer], mode: PauseMode) -> None:
        """Check what was answered during reloads."""
        mixed = self.mixed(answers)
        if mode == "wait":
            assert not mixed, f"{len(mixed)} of {len(answers)}"
        else:
            assert mixed, "no request was under way"
            assert all(self.judge.goes_over(*each) for each in mixed)


class Server:
    """A server on loopback.

    Args:
        command: What starts it, but for the place.
        environ: What its environment has beside that of this process.
        log: For what it says.
    """

    def __init__(self, command: Sequence[str | Path], environ: dict[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output, stderr=subprocess.STDOUT, env=os.environ | environ,
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers."""
        while True:
            assert self._process.poll() is None, self.log.read_text()[-5000:]
            try:
                with urlopen(f"{self.url}/health"):
                    return
            except OSError:
                time.sleep(0.5)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """Kill it, with all its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def call(self, path: str, asked: dict[str, Any]) -> bytes:
        content = json.dumps(asked).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.url}{path}", content, headers)) as response:
            answer: bytes = response.read()
        return answer

    def look(self, path: str) -> dict[str, Any]:
        with urlopen(f"{self.url}{path}") as response:
            answer: dict[str, Any] = json.load(response)
        return answer


@contextmanager
def clients(ask: Callable[[list[int]], Answer]) -> Iterator[list[Answer]]:
    """Ask all prompts again and again during a block, from a thread each."""
    answers: list[Answer] = []
    ended = threading.Event()

    def client(prompt: list[int]) -> None:
        while not ended.is_set():
            answers.append(ask(prompt))

    threads = [threading.Thread(target=client, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    try:
        while len(answers) < len(PROMPTS):
            time.sleep(0.01)
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()
