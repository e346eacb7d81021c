"""How soon new weights reach those who serve them: ``python -m tools.serving --gb 2``.

A trainer on a disk mirrors each step to a real S3 server; 1 % of its bf16 weights move a step.
Three followers pull from there. Trainer and followers reach the server by links of their own, each
of 100 MB/s and 20 ms there and back. All run on this machine, and share its cores; processor time
is that of one process each. Beside it: what rclone copies, and what chunks whose cuts depend on the
content find new.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import s3fs
import torch
from blake3 import blake3

from casnap import MirrorOptions, Retention, StateDict, Store
from tests.support.servers import Bucket, shared

_RATE, _DELAY = 100e6, 0.010
_PIECE = 64 << 10
_INTERVAL = 0.5
# Chunks whose cuts depend on the content: 64 KiB in the mean, and bounds.
_CUT_BITS, _LEAST_CHUNK, _MOST_CHUNK = 16, 8 << 10, 128 << 10
_SAMPLE_BYTES = 64 << 20


class Link:
    """A server behind a line of a bounded rate, and a delay each way.

    Attributes:
        sent: The bytes that went to the server.
        received: Those that came from it.
        requests: How many requests were made.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._server = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._free_at = [0.0, 0.0]
        self.sent = self.received = self.requests = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Begin to count anew."""
        self.sent = self.received = self.requests = 0

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            for pair, direction in (((client, server), 0), ((server, client), 1)):
                threading.Thread(target=self._pump, args=(*pair, direction), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: int) -> None:
        target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        was_idle_at = 0.0
        while piece := self._receive(source):
            now = time.monotonic()
            with self._lock:
                start = max(now, self._free_at[direction])
                self._free_at[direction] = start + len(piece) / _RATE
                if direction:
                    self.received += len(piece)
                else:
                    self.sent += len(piece)
                    self.requests += piece.count(b" HTTP/1.1\r\n")
            # What follows at once is on its way already.
            delay = start - now + (_DELAY if now - was_idle_at > _DELAY else 0.0)
            if delay > 0.0005:
                time.sleep(delay)
            try:
                target.sendall(piece)
            except OSError:
                break
            was_idle_at = time.monotonic()
        for end in (source, target):
            end.close()

    @staticmethod
    def _receive(source: socket.socket) -> bytes:
        try:
            return source.recv(_PIECE)
        except OSError:
            return b""


class Follower:
    """``casnap pull --follow`` on a host of its own."""

    def __init__(self, bucket: Bucket, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.link = Link(bucket.server.endpoint)
        self.switched: dict[str, tuple[float, dict[str, Any]]] = {}
        command = [
            sys.executable,
            "-m",
            "casnap",
            "pull",
            f"{bucket.uri}/run",
            str(folder / "live"),
        ]
        follow = [
            "--follow",
            "--interval",
            f"{_INTERVAL}s",
            "--json",
            "--endpoint-url",
            self.link.url,
        ]
        environment = {
            **os.environ,
            **bucket.environment,
            "CASNAP_CACHE_DIR": str(folder / "cache"),
        }
        self._process = subprocess.Popen(
            [*command, *follow, *options], stdout=subprocess.PIPE, env=environment
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "switched":
                self.switched[event["name"]] = time.monotonic(), event

    def wait(self, name: str) -> float:
        """Return when a version became visible."""
        deadline = time.monotonic() + 300
        while name not in self.switched:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not visible")
            time.sleep(0.005)
        return self.switched[name][0]

    @property
    def seconds(self) -> float:
        """The processor time that it has used."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


class Trainer:
    """Takes a step after the other, and mirrors them."""

    def __init__(self, bucket: Bucket, folder: Path, nbytes: int) -> None:
        self.link = Link(bucket.server.endpoint)
        os.environ.update(bucket.environment)
        count = max(1, nbytes // (64 << 20))
        self._weights = {
            f"layers.{i}": (torch.randn(nbytes // 2 // count) * 0.02).bfloat16()
            for i in range(count)
        }
        self.nbytes = sum(weight.nbytes for weight in self._weights.values())
        self.store = Store(
            folder / "run",
            mirror=MirrorOptions(
                f"{bucket.uri}/run", storage_options={"endpoint_url": self.link.url}
            ),
        )
        self._step = 0

    def sample(self) -> np.ndarray:
        """Return a copy of some bytes of the weights."""
        first = next(iter(self._weights.values()))
        return first.view(torch.uint8)[:_SAMPLE_BYTES].numpy().copy()

    def step(self) -> tuple[str, float, float]:
        """Take the next step; return its name, how long that took, and when it returned."""
        for weight in self._weights.values():
            bits = weight.view(torch.int16)
            chosen = torch.randint(len(bits), (len(bits) // 100,))
            bits[chosen] += torch.randint(0, 2, chosen.shape, dtype=torch.int16) * 2 - 1
        name = f"step_{self._step}"
        self._step += 1
        start = time.monotonic()
        state = {"model": StateDict(self._weights)}
        self.store.take(state, name, retention=Retention(keep_last=2))
        end = time.monotonic()
        return name, end - start, end


def mb(nbytes: float) -> str:
    """Return bytes in MB."""
    return f"{nbytes / 1e6:,.2f} MB"


def measure(folder: Path, bucket: Bucket, nbytes: int, steps: int, missed: int) -> None:
    """Print all figures."""
    trainer = Trainer(bucket, folder, nbytes)

    def mirrored_step() -> tuple[str, float, float, float, float]:
        name, take, returned = trainer.step()
        began = time.process_time()
        trainer.store.wait_mirrored(600)
        return name, take, returned, time.monotonic() - returned, time.process_time() - began

    name, *_ = mirrored_step()
    print(f"a state of {mb(trainer.nbytes)}; the first copy sent {mb(trainer.link.sent)}")
    started = time.monotonic()
    followers = [Follower(bucket, folder / f"host{i}") for i in range(3)]
    seconds = max(follower.wait(name) for follower in followers) - started
    print(f"three full pulls: {seconds:.1f} s, {mb(followers[0].link.received)} each")
    rows = []
    for _ in range(steps):
        for link in (trainer.link, *(follower.link for follower in followers)):
            link.reset()
        before = [follower.seconds for follower in followers]
        name, take, returned, mirrored, mirror_used = mirrored_step()
        last = max(follower.wait(name) for follower in followers) - returned
        time.sleep(0.2)
        received = max(follower.link.received for follower in followers)
        used = max(f.seconds - b for f, b in zip(followers, before, strict=True))
        pulled = max(f.switched[name][1]["seconds"] for f in followers)
        rows.append((take, mirrored, last, trainer.link.sent, received, mirror_used, used, pulled))
    medians = map(statistics.median, zip(*rows, strict=True))
    take, mirrored, last, sent, received, mirror_used, used, pulled = medians
    print(f"a step: taken in {take:.2f} s, mirrored {mirrored:.2f} s later, visible {last:.2f} s")
    print(f"of the last to see it, the pull took {pulled:.2f} s")
    print(f"processor time: of the mirror {mirror_used:.2f} s, of a follower {used:.2f} s")
    print(f"sent {mb(sent)}, received by each {mb(received)}: {received / sent:.3f} of that")
    for follower in followers:
        follower.link.reset()
    time.sleep(10)
    looks = max(follower.link.requests for follower in followers) * _INTERVAL / 10
    print(f"nothing new: {looks:.2f} requests a look")
    followers[0].stop()
    trainer.link.reset()
    for _ in range(missed):
        name, *_ = mirrored_step()
    sent = trainer.link.sent
    for follower in followers[1:]:
        follower.stop()
    for label, host in ((f"{missed} missed versions", "host0"), ("a full pull", "host3")):
        started = time.monotonic()
        follower = Follower(bucket, folder / host)
        seconds = follower.wait(name) - started
        print(f"{label}, with the start: {seconds:.1f} s, {mb(follower.link.received)}")
        follower.stop()
    print(f"(the {missed} copies sent {mb(sent)})")
    newest = Path(folder / "host3/live/model.safetensors").resolve()
    measure_beside(folder, bucket, newest)
    known = {blake3(chunk).digest() for chunk in chunks_of(trainer.sample())}
    mirrored_step()  # else the mirror is still at it when the server ends
    chunks = list(chunks_of(trainer.sample()))
    new = sum(len(chunk) for chunk in chunks if blake3(chunk).digest() not in known)
    share = new / sum(map(len, chunks))
    print(f"chunks cut by content: {len(chunks)}, of which {share:.0%} of the bytes are new")


def measure_beside(folder: Path, bucket: Bucket, newest: Path) -> None:
    """Print what others need to bring a file of weights to a host."""
    s3fs.S3FileSystem(endpoint_url=bucket.server.endpoint).put(str(newest), f"{bucket.name}/file")
    link = Link(bucket.server.endpoint)
    started = time.monotonic()
    s3fs.S3FileSystem(endpoint_url=link.url).get(f"{bucket.name}/file", str(folder / "file"))
    seconds = time.monotonic() - started
    print(f"the file of safetensors, by s3fs: {seconds:.1f} s, {mb(link.received)}")
    rclone = Path(".venv/servers/bin/rclone")
    if rclone.exists():
        link = Link(bucket.server.endpoint)
        options = f":s3,provider=Other,env_auth,endpoint='{link.url}':{bucket.name}/by-rclone"
        for source, target in ((str(newest.parent), options), (options, str(folder / "rclone"))):
            link.reset()
            started = time.monotonic()
            subprocess.run([rclone, "copy", "--quiet", source, target], check=True)
            seconds = time.monotonic() - started
            print(f"rclone: {seconds:.1f} s, {mb(link.sent)} sent, {mb(link.received)} received")


def chunks_of(raw: np.ndarray) -> Iterator[bytes]:
    """Cut bytes where a rolling hash of the last ones says so."""
    gears = np.random.default_rng(0).integers(0, 1 << 32, 256, np.uint32)[raw]
    hashes = np.zeros(len(raw), np.uint32)
    for age in range(32):
        hashes[age:] += gears[: len(raw) - age] << np.uint32(age)
    start = 0
    for cut in np.flatnonzero(hashes >> np.uint32(32 - _CUT_BITS) == 0):
        while cut - start > _MOST_CHUNK:
            yield raw[start : start + _MOST_CHUNK].tobytes()
            start += _MOST_CHUNK
        if cut - start >= _LEAST_CHUNK:
            yield raw[start:cut].tobytes()
            start = int(cut)
    yield raw[start:].tobytes()


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--missed", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="casnap-serving-", dir=args.dir))
    os.environ["CASNAP_CACHE_DIR"] = str(folder / "cache")
    try:
        with ExitStack() as stack:
            server = stack.enter_context(shared("seaweedfs", folder))
            bucket = stack.enter_context(server.bucket())
            measure(folder, bucket, int(args.gb * 1e9), args.steps, args.missed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
