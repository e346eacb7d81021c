"""Serve the newest weights of a training while all of it is killed again and again.

    python serve.py FOLDER [--seconds 20] [--bucket s3://my-bucket/run1]

A trainer takes a snapshot each step. `casnap pull --follow` keeps a folder at the newest one, and
tells a toy HTTP server to load each version. Clients ask the server again and again. Trainer,
follower and server are killed by SIGKILL at random moments, and started again. Each answer must be
what the trainer itself got for that step: no answer may come of the weights of two steps.

With --bucket, the trainer mirrors its store to a bucket, and the follower pulls from there.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from casnap import MirrorOptions, Retention, Store


def new_model() -> nn.Module:
    """Return a model, small enough to take a snapshot every moment."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 1))


def answer(model: nn.Module) -> float:
    """Return what a model says; a change of any weight changes it."""
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 256)).item()


# --- the trainer ------------------------------------------------------------------------------


def train(folder: str, bucket: str | None) -> None:
    """Take a snapshot each step, for ever; a killed training resumes."""
    model = new_model()
    there = bucket and MirrorOptions(bucket, retention=Retention(keep_last=5))
    store = Store(folder, mirror=there)
    last = store.latest()
    if last is not None:
        last.restore({"model": model})
    keep = Retention(keep_last=5)
    step = 0 if last is None else last.metadata.user["step"]
    while True:
        step += 1
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.01 * torch.randn_like(weight)
        metadata = {"step": step, "answer": answer(model)}
        store.take({"model": model}, f"step_{step:06}", metadata=metadata, retention=keep)
        time.sleep(0.05)


# --- the server -------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers with the weights of one version at a time."""

    def load(self, folder: Path) -> None:
        """Load a version; requests that are being answered keep the old one."""
        model, weights = new_model(), {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file)
        model.load_state_dict(weights)
        about = json.loads((folder / "casnap-version.json").read_text())["metadata"]
        self.current = model, about  # one assignment: a request sees both of one version


class Handler(BaseHTTPRequestHandler):
    """GET answers; POST /reload loads the folder that is its body."""

    def do_GET(self) -> None:
        """Answer with the newest weights."""
        model, about = self.server.current
        self.reply({"step": about["step"], "answer": answer(model), "expected": about["answer"]})

    def do_POST(self) -> None:
        """Load another version."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.load(Path(body.decode()))
        self.reply({})

    def reply(self, document: object) -> None:
        """Send a document."""
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def serve(live: str, port: str) -> None:
    """Load the current version, and serve it."""
    server = Server(("127.0.0.1", int(port)), Handler)
    # The link is followed once: all files are of one version.
    server.load(Path(live).resolve())
    server.serve_forever()


# Tells the server of a new version: what the follower runs after each switch. It imports no torch.
RELOAD = """
import os, sys, urllib.request
url = f"http://127.0.0.1:{sys.argv[1]}/reload"
urllib.request.urlopen(url, os.environ["CASNAP_FOLDER"].encode(), timeout=30).close()
"""


# --- all together -----------------------------------------------------------------------------


class Client(threading.Thread):
    """Asks the server a hundred times a second, and counts its answers."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.url = f"http://127.0.0.1:{port}"
        self.steps, self.wrong, self.refused = [], [], 0

    def run(self) -> None:
        """Ask."""
        while True:
            try:
                with urllib.request.urlopen(self.url, timeout=30) as response:
                    reply = json.load(response)
            except (OSError, HTTPException, ValueError):
                self.refused += 1  # the server is being started, or was killed within the answer
                time.sleep(0.05)
                continue
            self.steps.append(reply["step"])
            if reply["answer"] != reply["expected"]:
                self.wrong.append(reply)
            time.sleep(0.01)


class Processes:
    """The processes of the demo.

    Args:
        commands: Their commands, by name.
        log: Where their output goes.
    """

    def __init__(self, commands: dict[str, list[str]], log: Path) -> None:
        self.commands, self.log = commands, log
        self.kills = dict.fromkeys(commands, 0)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start one."""
        with self.log.open("a") as log:
            self._running[name] = subprocess.Popen(self.commands[name], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """Kill one."""
        self._running[name].send_signal(signal.SIGKILL)
        self._running[name].wait()
        self.kills[name] += 1

    def wait_for(self, what: str, is_so: Callable[[], object]) -> None:
        """Wait until something is so; end if it takes too long."""
        deadline = time.monotonic() + 120
        while not is_so():
            if time.monotonic() > deadline:
                sys.exit(f"{what} does not come; see {self.log}")
            time.sleep(0.1)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


def demo(folder: Path, seconds: float, bucket: str | None) -> None:
    """Run a trainer, a follower, a server and clients; kill one of the first three at a time."""
    run, live, port = folder / "run", folder / "live", random.randint(20_000, 30_000)
    source = bucket or str(run)
    script = [sys.executable, str(Path(__file__).resolve())]
    pull = [sys.executable, "-m", "casnap", "pull", source, str(live), "--follow"]
    reload = [sys.executable, "-c", RELOAD, str(port)]
    options = ["--interval", "0.2s", "--max-shard-size", "300KB"]
    commands = {
        "trainer": [*script, "--train", str(run), *([bucket] if bucket else [])],
        "follower": [*pull, *options, "--exec", shlex.join(reload)],
        "server": [*script, "--serve", str(live), str(port)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    clients = [Client(port) for _ in range(2)]
    with Processes(commands, folder / "log") as processes:
        processes.start("trainer")
        processes.wait_for("a snapshot", lambda: Store(source).latest())
        processes.start("follower")
        processes.wait_for("a version", live.exists)
        processes.start("server")
        for client in clients:
            client.start()
        processes.wait_for("an answer", lambda: all(client.steps for client in clients))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(random.uniform(0.5, 2.5))
            if random.random() < 0.5:  # on a slow machine, nothing else would ever get through
                step = clients[0].steps[-1]
                processes.wait_for("a newer step", lambda: clients[0].steps[-1] > step)  # noqa: B023
            name = random.choice(list(commands))
            processes.kill(name)
            processes.start(name)
        # Without kills, newer weights get through.
        last = Store(source).latest().metadata.user["step"]
        processes.wait_for("a newer step", lambda: clients[0].steps[-1] >= last)
    wrong = [reply for client in clients for reply in client.wrong]
    answers = sum(len(client.steps) for client in clients)
    steps = {step for client in clients for step in client.steps}
    print("killed:", ", ".join(f"the {name} {n} times" for name, n in processes.kills.items()))
    print(f"{answers:,} answers by the weights of {len(steps)} steps, up to step {max(steps)}")
    if wrong:
        sys.exit(f"{len(wrong)} answers came of the weights of no step: {wrong[:3]}")
    print("each by the weights of one step")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description="Serve the newest weights of a training.")
    parser.add_argument("folder", nargs="?", type=Path, help="where all goes")
    parser.add_argument("--seconds", type=float, default=20, help="for how long to kill [20]")
    parser.add_argument("--bucket", help="a URI that the trainer mirrors to")
    for part in ("train", "serve"):
        parser.add_argument(f"--{part}", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train[0], args.train[1] if len(args.train) > 1 else None)
    elif args.serve:
        serve(*args.serve)
    elif args.folder is None:
        parser.error("name a folder")
    else:
        demo(args.folder, args.seconds, args.bucket)


if __name__ == "__main__":
    main()
