"""Three hosts and a bucket: one trains and is killed, one resumes, one reads a tensor.

The hosts are processes with folders and caches of their own; all that they share is the bucket.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from casnap import MirrorOptions, Store
from tests.support.faulty import FaultyProxy
from tests.support.servers import Bucket

SCRIPT = """
import hashlib, os, sys
import torch
from casnap import MirrorOptions, NewStore, RNGState, StateDict, Store

def parts():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    progress = StateDict(step=0)
    return model, optim, progress, {
        "model": model, "optim": optim, "progress": progress, "rng": RNGState()
    }

def train(until, store, every=2):
    model, optim, progress, state = parts()
    last = None if store is None else store.latest()
    if last is not None:
        last.restore(state)
        print("resumed", last.path, flush=True)
    while progress["step"] < until:
        optim.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optim.step()
        progress["step"] += 1
        if store is not None and progress["step"] % every == 0:
            store.take(state, f"step_{progress['step']:04}")
            if progress["step"] == 6:
                store.wait_mirrored(120)
                print("mirrored", flush=True)
    words = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    words += b"".join(
        torch.as_tensor(v).numpy().tobytes()
        for s in optim.state_dict()["state"].values() for v in s.values()
    )
    print("weights", hashlib.sha256(words).hexdigest(), flush=True)

verb, folder = sys.argv[1:3]
mirror = dict(mirror=MirrorOptions(
    os.environ["BUCKET"], storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
), create=NewStore(chunk_size=1 << 16))
if verb == "alone":
    train(20, None)
if verb == "train":
    train(10**9, Store(folder, **mirror))
if verb == "read":
    reach = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    store = Store(os.environ["BUCKET"], create=False, storage_options=reach, cache_bytes=1 << 30)
    weight = store["step_0020"].read_object("model/0.weight")
    print("read", hashlib.sha256(weight.numpy().tobytes()).hexdigest(), flush=True)
if verb == "resume":
    store = Store(folder, **mirror)
    train(20, store)
    store.wait_mirrored(120)
"""


class Host:
    """A machine of its own, as far as casnap can tell."""

    def __init__(self, folder: Path, bucket: Bucket, endpoint: str | None = None) -> None:
        self.store = folder / "store"
        (folder / "cache").mkdir(parents=True)
        self._environment = {
            **os.environ,
            **bucket.environment,
            **({} if endpoint is None else {"AWS_ENDPOINT_URL": endpoint}),
            "BUCKET": f"{bucket.uri}/run",
            "CASNAP_CACHE_DIR": str(folder / "cache"),
            "HOME": str(folder),
        }

    def start(self, verb: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, verb, str(self.store)],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, verb: str) -> list[list[str]]:
        """Return the words of each line that it prints."""
        process = self.start(verb)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        return [line.split() for line in said.splitlines()]


@pytest.mark.servers
def test_three_hosts(bucket: Bucket, tmp_path: Path) -> None:
    first, second, alone = (Host(tmp_path / n, bucket) for n in ("first", "second", "alone"))
    process = first.start("train")
    assert process.stdout is not None
    assert process.stdout.readline() == "mirrored\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    process.stdout.close()

    resumed, weights = second.run("resume")
    there = Store(f"{bucket.uri}/run", storage_options=bucket.storage_options)
    assert resumed[1].startswith(f"{there.uri}/step_")
    assert int(resumed[1][-4:]) >= 6
    # As if nothing had happened, bit for bit.
    assert [weights] == alone.run("alone")
    assert there["step_0020"].world_size == 1
    assert there.check(data=True).ok

    # The third host reads a tensor in two processes. The second one asks for none of its bytes.
    with FaultyProxy(bucket.server.endpoint) as proxy:
        third = Host(tmp_path / "third", bucket, proxy.url)
        reads, packs = [], []
        for _ in range(2):
            proxy.log.clear()
            reads.append(third.run("read"))
            packs.append(sum("/packs/" in str(request) for request in proxy.log))
    assert reads[0] == reads[1]
    assert packs[0] > packs[1] == 0

    # The first host comes back: it brings what only it has, and hides nothing of the second one.
    late = Store(
        first.store,
        mirror=MirrorOptions(f"{bucket.uri}/run", storage_options=bucket.storage_options),
    )
    assert late.mirror is not None
    late.mirror.stop()
    assert late["step_0006"].commit_id == there["step_0006"].commit_id
