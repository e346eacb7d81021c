"""Takes on S3 that are interrupted, refused, or still pending when the process ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from casnap import Store
from tests.support.servers import READER, SECRET, WRITER, Bucket

PROGRAM = """
import os, signal, sys, threading, time
import torch
from casnap import StateDict, Store
from casnap.errors import UnavailableError

uri, endpoint, secret, writer, reader = sys.argv[1:]
def store_of(user):
    return Store(uri, storage_options=dict(key=user, secret=secret, endpoint_url=endpoint))
def state(step):
    return {"s": StateDict(x=torch.arange(3_000_000) + step)}

store = store_of(writer).make()
backend = store._view.repository.backend
put, once = backend.write, threading.Lock()

# A take that Ctrl-C interrupts while it writes.
def interrupting(key, content):
    if once.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGINT)
        # Another thread may get the signal; the main thread looks for it once a second.
        time.sleep(2)
    return put(key, content)
backend.write = interrupting
try:
    store.take(state(1), "interrupted")
except KeyboardInterrupt:
    print("interrupted:", sorted(backend.sizes("")))

# A take that is refused, and for which wait() is not called: the next one tells.
store_of(reader).async_take(state(2), "denied")

# A wait that Ctrl-C interrupts. The take goes on when the process ends.
once, waiting = threading.Lock(), threading.Event()
def late(key, content):
    waiting.wait()
    if once.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGINT)
    threading.main_thread().join()
    return put(key, content)
backend.write = late
try:
    store.async_take(state(3), "late")
except UnavailableError as e:
    print(str(e).partition(":")[0])
pending = store.async_take(state(3), "late")
try:
    waiting.set()
    pending.wait()
except KeyboardInterrupt:
    print("not done:", pending.done())
"""


@pytest.mark.servers
def test_takes_that_are_interrupted_refused_or_late(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/store"
    made = Store(uri, storage_options=bucket.storage_options).make()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, uri, bucket.server.endpoint, SECRET, WRITER, READER],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=dict(os.environ),
    )
    empty = "interrupted: ['casnap.json', 'roots/0/0']"
    told = "earlier, the snapshot 'denied' was NOT stored"
    said = f"{empty}\n{told}\nnot done: False\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    [logged] = done.stderr.splitlines()
    assert "the snapshot 'denied' was NOT stored: UnavailableError" in logged
    assert SECRET not in logged
    assert [snapshot.name for snapshot in made.snapshots()] == ["late"]
    assert torch.equal(made["late"].read_object("s/x"), torch.arange(3_000_000) + 3)
    assert made.check(data=True)
