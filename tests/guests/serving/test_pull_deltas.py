"""From a bucket that holds deltas, a pull reads the deltas alone: their bases lie in the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from casnap import Store
from casnap.backends.costs import REMOTE
from casnap.serving import PullOptions, verify
from tests.support.bucket_runs import Host, Run
from tests.support.remote import RemoteDouble
from tests.support.served import tensors_in

# Nodes, a part of the index, and reads of whole pages.
_BESIDE = 40 << 10


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_a_pull_reads_the_deltas_alone(run: Run, host: Host, live: Path) -> None:
    run.step()
    host.pull()
    for _ in range(3):
        sent = run.step()
        assert sent < 0.1 * run.nbytes
        report = host.pull()
        assert host.bucket.read_bytes <= 1.1 * sent + _BESIDE
        assert host.bucket.count <= 12
        assert report.fetched_bytes == run.nbytes
        run.assert_served(live)


def test_missed_versions_cost_their_deltas(run: Run, host: Host, live: Path) -> None:
    run.step()
    host.pull()
    sent = sum(run.step() for _ in range(6))
    host.pull()
    assert host.bucket.read_bytes <= 1.1 * sent + 2 * _BESIDE
    run.assert_served(live)


def test_small_deltas_of_many_chunks_take_few_requests(tmp_path: Path, host: Host) -> None:
    run = Run(tmp_path, layers=10)
    run.step()
    host.pull()
    for _ in range(3):
        run.step()
    host.pull()
    # Two for the deltas of each step; and those for the root, nodes and segments.
    assert host.bucket.count <= 3 * 2 + 10


def test_the_old_snapshot_is_not_needed(run: Run, host: Host, live: Path) -> None:
    run.step()
    run.step()
    host.pull()
    run.bucket.delete("run/step_0")
    run.bucket.delete("run/step_1")
    sent = run.step()
    for _ in range(2):
        run.bucket.gc(grace=0)
    host.pull()
    assert host.bucket.read_bytes <= 1.1 * sent + 2 * _BESIDE
    run.assert_served(live)


def test_a_base_that_is_damaged_in_the_folder(run: Run, host: Host, live: Path) -> None:
    """The chunk that would come of it is not the one that is wanted, so the chain is read."""
    run.step()
    host.pull()
    run.step()
    file = live.resolve() / "model.safetensors"
    info = file.stat()
    with file.open("r+b") as f:
        f.seek(3 << 20)
        f.write(b"damaged")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    host.pull()
    assert 0.05 * run.nbytes < host.bucket.read_bytes < 0.3 * run.nbytes
    run.assert_served(live)


def test_casts_are_no_bases(run: Run, host: Host, live: Path) -> None:
    options = PullOptions(dtype="float32")
    for _ in range(2):
        run.step()
        host.pull(options)
        found = tensors_in(live)
        assert all(torch.equal(found[n], w.float()) for n, w in run.weights.items())
        assert verify(live) == []
    assert host.bucket.read_bytes > 0.3 * run.nbytes


@pytest.mark.parametrize("stands", [0.0, 60.0])
def test_a_look_is_cheap_when_nothing_is_new(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands: float
) -> None:
    monkeypatch.setattr(RemoteDouble, "costs", REMOTE._replace(stands=stands))
    run.step()
    backend = RemoteDouble(str(tmp_path))
    counts: list[int] = []

    class EnoughError(Exception):
        pass

    def sleep(_: float) -> None:
        counts.append(backend.count)
        backend.reset()
        if len(counts) == 5:
            raise EnoughError

    monkeypatch.setattr("casnap.serving.following.time.sleep", sleep)
    with pytest.raises(EnoughError):
        list(Store(backend).follow(tmp_path / "live", on_version=lambda *_: None, notes=False))
    assert all(count <= (1 if stands else 2) for count in counts[1:]), counts


def test_versions_that_the_bucket_lacks_are_composed(run: Run, host: Host, live: Path) -> None:
    """What lies between two copied versions is one difference, and not the deltas of all."""
    run.step()
    host.pull()
    one = run.step()
    host.pull()
    for _ in range(5):
        run.move()
    composed = run.step()
    assert composed < 5 * one
    report = host.pull()
    assert report.received_bytes == host.bucket.read_bytes <= 1.1 * composed + _BESIDE
    run.assert_served(live)


def test_a_base_that_the_trainer_has_deleted(run: Run, host: Host, live: Path) -> None:
    """As long as its chunks are not collected, the next copy stands on it."""
    one = [run.step() for _ in range(2)][1]
    host.pull()
    run.store.delete("run/step_0")
    run.store.delete("run/step_1")
    run.move()
    assert run.step() < 3 * one
    host.pull()
    for step in (2, 3):
        run.store.delete(f"run/step_{step}")
    for _ in range(2):
        run.store.gc(grace=0)
    assert run.step() > 0.5 * run.nbytes
    host.pull()
    run.assert_served(live)


def test_a_follower_a_week_behind_receives_no_more_than_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, layers=1)
    run.step()
    host, new = Host(tmp_path, monkeypatch), Host(tmp_path, monkeypatch, "new")
    host.pull()
    for _ in range(20):
        run.step()
    assert host.pull().received_bytes <= new.pull().received_bytes + _BESIDE
    run.assert_served(tmp_path / "live")
