"""`casnap doctor` says what a place can do, alone and with its other half, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import casnap
from casnap import DoctorReport, DoctorRow, StateDict, Store
from casnap.backends import backend_at
from casnap.diagnosis import speed_probes
from casnap.diagnosis.report import clock_row
from casnap.errors import BackendError
from tests.support.cli_calls import COMMAND, failure, invoke, process
from tests.support.mounts import bindfs
from tests.support.servers import Bucket
from tests.support.volumes import volume


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process measure the speed with small packs."""
    monkeypatch.setattr(speed_probes, "_MOST", 1 << 20)


def rows(report: DoctorReport) -> dict[str, DoctorRow]:
    return {row.name: row for row in report.rows}


def test_a_disk_can_hold_a_store_and_nothing_is_left_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.take({"s": StateDict(x=1)}, "step_1")
    before = sorted(tmp_path.rglob("*"))
    report = casnap.doctor(tmp_path)
    assert report.ok
    assert report.other_host is None
    found = rows(report)
    for name in ("hard links", "put-if-absent", "locks", "inodes", "own changes", "clocks"):
        assert found[name].verdict == "good", found[name]
    assert "B/s" in found["write speed"].finding
    assert "B/s" in found["read speed"].finding
    # Nobody is looked for on a disk of this host.
    assert "other hosts" not in found
    assert sorted(tmp_path.rglob("*")) == before
    assert store.check(data=True).ok


def test_the_command_fits_a_terminal(tmp_path: Path) -> None:
    printed = process("doctor", tmp_path)
    assert printed.returncode == 0
    lines = printed.stdout.splitlines()
    assert lines[0].startswith("file system")
    assert f"{tmp_path} can hold a store" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_without_hard_links_no_store_is_safe(tmp_path: Path) -> None:
    with volume(tmp_path / "drive", links=False) as drive:
        printed = invoke("doctor", drive.path, "--wait", "0", "--json", status=1)
        found = json.loads(printed.stdout)
        assert found["verdict"] == "bad"
        bad = {row["name"] for row in found["rows"] if row["verdict"] == "bad"}
        assert "hard links" in bad
        assert all(row["advice"] for row in found["rows"] if row["verdict"] != "good")
        assert list(drive.below.iterdir()) == []


def test_a_place_that_is_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="absent is no folder; name one that is there"):
        casnap.doctor(tmp_path / "absent")
    assert "is no folder" in failure("doctor", tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def halves(first: Path, second: Path) -> list[DoctorReport]:
    """Return what two processes say that try two places at once."""
    other = subprocess.Popen(
        [*COMMAND, "doctor", str(second), "--wait", "60s", "--json"], stdout=subprocess.PIPE
    )
    with other:
        mine = casnap.doctor(first, wait=60)
        assert other.stdout is not None
        theirs = json.loads(other.stdout.read())
    assert other.returncode == 0
    found = [DoctorRow(**row) for row in theirs["rows"]]
    return [mine, DoctorReport(theirs["place"], found, theirs["other_host"], theirs["seconds"])]


@pytest.mark.usefixtures("little")
def test_two_processes_find_each_other_and_race(tmp_path: Path) -> None:
    for report in halves(tmp_path, tmp_path):
        assert report.other_host
        found = rows(report)
        for name in ("data of others", "locks of others", "names of others", "between hosts"):
            assert found[name].verdict == "good", found[name]
        for name in ("attributes", "deleted names", "absent names", "listings"):
            assert "are not cached" in found[name].finding
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_what_clients_cache_is_measured(tmp_path: Path) -> None:
    """Two mounts of one folder, whose clients cache, stand for two hosts."""
    below = tmp_path / "below"
    below.mkdir()
    caches = "attr_timeout=1,entry_timeout=1,negative_timeout=1"
    with (
        bindfs(below, tmp_path / "a", caches) as a,
        bindfs(below, tmp_path / "b", caches) as b,
        ThreadPoolExecutor(2) as threads,
    ):
        for report in threads.map(lambda place: casnap.doctor(place, wait=60), (a, b)):
            found = rows(report)
            assert report.verdict == "fair"
            for name in ("attributes", "deleted names", "absent names"):
                assert found[name].verdict == "fair", found[name]
                assert "are cached for" in found[name].finding
            assert found["between hosts"].verdict == "good"
            assert "by another name" in found["own changes"].finding
    assert list(below.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_who_waits_alone_says_so_and_leaves_nothing_if_interrupted(tmp_path: Path) -> None:
    found = rows(casnap.doctor(tmp_path, wait=0.1))
    assert found["other hosts"].verdict == "unknown"
    assert "on two hosts at once" in found["other hosts"].advice
    waiting = subprocess.Popen(
        [*COMMAND, "doctor", str(tmp_path), "--wait", "10m"], stderr=subprocess.PIPE, text=True
    )
    with waiting:
        while not list(tmp_path.glob(".casnap-doctor/casnap-store/half-*/hello")):
            time.sleep(0.01)
        waiting.send_signal(signal.SIGINT)
        assert waiting.communicate()[1].strip() == "casnap: interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_what_a_killed_one_left_goes_with_a_later_one(tmp_path: Path) -> None:
    waiting = subprocess.Popen([*COMMAND, "doctor", str(tmp_path), "--wait", "10m"])
    with waiting:
        while not list(tmp_path.glob(".casnap-doctor/casnap-store/half-*/hello")):
            time.sleep(0.01)
        waiting.kill()
    casnap.doctor(tmp_path)
    assert list(tmp_path.glob(".casnap-doctor/casnap-store/half-*")), "it may live"
    for path in tmp_path.glob(".casnap-doctor/casnap-store/**/*"):
        os.utime(path, (0, 0))
    casnap.doctor(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("little")
def test_a_bucket_is_tried_by_requests(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/run1"
    report = casnap.doctor(uri, wait=0, storage_options=bucket.storage_options)
    found = rows(report)
    assert report.place == uri
    assert list(found) == [
        "put-if-absent",
        "rules of the bucket",
        "requests",
        "clocks",
        "encryption",
        "write speed",
        "read speed",
    ]
    assert found["put-if-absent"].verdict == "good"
    assert found["clocks"].finding == "that of the server agrees with that of this host"
    left = backend_at(f"{uri}/.casnap-doctor", bucket.storage_options)
    assert left.sizes("") == {}


def test_what_a_slow_place_leaves_no_time_for_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casnap.diagnosis.doctor._ALL", 0.0)
    report = casnap.doctor(tmp_path)
    assert {row.verdict for row in report.rows} == {"unknown"}
    assert {row.finding for row in report.rows} == {"no time was left for it"}
    assert all(row.advice for row in report.rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("apart", "verdict"), [(1, "good"), (-30, "good"), (90, "fair")])
def test_clocks_that_are_apart_are_told(apart: float, verdict: str) -> None:
    now = time.time()
    row = clock_row("the server", now + apart, now)
    assert row.verdict == verdict
    assert ("ahead" in row.finding) == (apart == 90)
    assert ("30 s behind" in row.finding) == (apart == -30)


class _Blind(MemoryFileSystem):
    """An object store that puts over what is there, whatever it is asked."""

    protocol = "casnapblind"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, "overwrite", **kwargs)


def test_a_server_without_put_if_absent_can_hold_none() -> None:
    fsspec.register_implementation("casnapblind", _Blind, clobber=True)
    report = casnap.doctor("casnapblind://bucket/run1", wait=0)
    assert not report.ok
    assert rows(report)["put-if-absent"].verdict == "bad"
    assert "put-if-absent" in report.summary
