"""A follower pulls each new version, and calls a callback until that succeeds."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import casnap.runtime.backoff
from casnap import StateDict, Store
from casnap.errors import CasnapError, FileFormatError, NotAStoreError
from casnap.serving import FollowEvent, PullOptions
from tests.support.cli_calls import COMMAND
from tests.support.faults import system_faults
from tests.support.served import assert_served, take, versions_of, weights
from tests.support.sweep import sweep


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casnap.runtime.backoff, "_FIRST", 0.02)
    monkeypatch.setattr(casnap.runtime.backoff, "_LONGEST", 0.05)


def follow(store: Store, live: Path, **options: Any) -> Iterator[FollowEvent]:
    return store.follow(live, interval=0.01, **options)


def test_missed_versions_are_one_step(store: Store, live: Path) -> None:
    events = follow(store, live)
    assert next(events).report.snapshot == "step_0"
    for step in range(1, 8):
        take(store, step)
    report = next(events).report
    assert (report.snapshot, sorted(report.changed)) == ("step_7", ["bias", "layers.1"])
    assert_served(live, 7)
    assert len(versions_of(live)) == 2


def test_the_callback_gets_a_whole_version(store: Store, live: Path) -> None:
    calls: list[tuple[str, list[str]]] = []

    def on_version(folder: Path, changed: list[str]) -> None:
        step = json.loads((folder / "config.json").read_text())["step"]
        assert_served(folder, step)
        assert folder == live.resolve()
        calls.append((folder.name.partition("@")[0], sorted(changed)))

    events = follow(store, live, on_version=on_version)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    take(store, 1)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    assert calls[0][0] == "step_0"
    assert len(calls[0][1]) == 9
    assert calls[1:] == [("step_1", ["bias", "layers.1"])]
    # Another process does not call again for the same version.
    events.close()
    events = follow(store, live, on_version=on_version)
    assert next(events).event == "switched"
    take(store, 2)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    assert len(calls) == 3


def test_a_callback_that_fails_is_called_again(
    store: Store, live: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, list[str]]] = []

    def on_version(folder: Path, changed: list[str]) -> None:
        calls.append((folder.name.partition("@")[0], sorted(changed)))
        if len(calls) in (2, 3, 4):
            raise ConnectionError("the engine is restarting")

    events = follow(store, live, on_version=on_version)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    take(store, 1)
    assert next(events).event == "switched"
    failure = next(events)
    assert (failure.event, failure.error) == (
        "call_failed",
        "ConnectionError: the engine is restarting",
    )
    # What it has missed is told of together.
    take(store, 2)
    seen = [next(events).event]
    while seen[-1] != "called":
        seen.append(next(events).event)
    assert seen.count("switched") == 1
    assert calls[-1] == ("step_2", ["bias", "layers.1"])
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len([w for w in warnings if "the engine is restarting" in w]) == 1
    assert any("works again" in w for w in warnings)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_tag_that_is_moved_back_after_a_call_has_failed(
    store: Store, live: Path, *, restarts: bool
) -> None:
    """The call may have loaded the version, so it is called for the version before again."""
    calls: list[tuple[str, list[str]]] = []

    def on_version(folder: Path, changed: list[str]) -> None:
        calls.append((folder.name.partition("@")[0], sorted(changed)))
        if folder.name.startswith("step_1"):
            raise ConnectionError("loaded, and then the engine did not answer")

    options: dict[str, Any] = {"options": PullOptions(tag="stable"), "on_version": on_version}
    store.publish("stable", "step_0")
    events = follow(store, live, **options)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    take(store, 1)
    store.publish("stable", "step_1")
    assert [next(events).event for _ in range(2)] == ["switched", "call_failed"]
    if restarts:
        events.close()
        events = follow(store, live, **options)
    move = store.publish("stable", "step_0")
    while next(events).event != "called":
        pass
    assert calls[-1] == ("step_0", ["bias", "layers.1"])
    assert store.wait_served("stable", move.root, timeout=60)


def test_the_version_that_an_engine_holds_stays_while_calls_fail(store: Store, live: Path) -> None:
    """Two versions that it could not load took the place of the one that it goes back to."""

    def on_version(folder: Path, changed: list[str]) -> None:
        if not folder.name.startswith("step_0@"):
            raise ValueError("not loaded")

    def called(live: Path, event: str, **options: Any) -> None:
        events = follow(store, live, on_version=on_version, **options)
        assert event in [next(events).event for _ in range(2)]
        events.close()

    called(live, "called")
    held = live.resolve()
    for step in range(1, 4):
        take(store, step)
        called(live, "call_failed")
        assert versions_of(live) == [held.name, live.resolve().name]
        assert_served(held, 0)
    # Where no call is made, the version before stays, whatever was called for once.
    before = live.resolve().name
    take(store, 4)
    store.pull(live)
    assert versions_of(live) == [before, live.resolve().name]


def test_a_store_that_is_replaced_by_its_backup(store: Store, live: Path, tmp_path: Path) -> None:
    shutil.copytree(store.uri, tmp_path / "backup")
    events = follow(Store(store.uri), live)
    next(events)
    take(store, 1)
    assert next(events).report.snapshot == "step_1"
    shutil.rmtree(store.uri)
    (tmp_path / "backup").rename(store.uri)
    while (event := next(events)).event == "failed":
        pass
    assert event.report.snapshot == "step_0"
    assert_served(live, 0)


def test_what_was_tampered_with_is_healed(store: Store, live: Path) -> None:
    calls: list[str] = []
    events = follow(store, live, on_version=lambda folder, _: calls.append(folder.name))
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    file = live.resolve() / "model.safetensors"
    with file.open("r+b") as f:
        f.seek(100_000)
        f.write(b"tampered")
    report = next(events).report
    assert report.switched
    # Who loads by these names has perhaps read what was damaged.
    assert sorted(report.changed) == sorted(weights(0))
    assert 0 < report.fetched_bytes <= 64 << 10
    assert_served(live, 0)
    # Whoever has loaded it is to load it again.
    assert next(events).event == "called"
    assert calls[1] == f"{calls[0]}.2"


def test_a_snapshot_that_comes_late_and_one_that_is_wrong(store: Store, live: Path) -> None:
    events = follow(store, live, options=PullOptions(tag="stable"))
    waiting = next(events)
    assert (waiting.event, waiting.report) == ("failed", None)
    assert "no snapshot tagged 'stable'" in waiting.error
    store.tag("step_0", "stable")
    while (event := next(events)).event == "failed":
        pass
    assert event.report.snapshot == "step_0"
    with pytest.raises(FileFormatError):
        next(follow(store, live.with_name("other"), options=PullOptions(path="progress")))
    with pytest.raises(NotAStoreError):
        next(Store(live.with_name("nowhere"), create=False).follow(live.with_name("other")))


# --- the command ------------------------------------------------------------------------------


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    return map(json.loads, process.stdout)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_command(store: Store, live: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = f'echo "$CASNAP_FOLDER $CASNAP_SNAPSHOT" >> {told}; cat >> {told}; echo >> {told}'
    command = [*COMMAND, "pull", store.uri, str(live), "--follow", "--interval", "0.02s", "--json"]
    with subprocess.Popen(
        [*command, "--exec", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        events = lines_of(process)
        first, called = next(events), next(events)
        assert (first["event"], first["name"], called["event"]) == ("switched", "step_0", "called")
        assert first["version"] == 1
        take(store, 1)
        assert [next(events)["name"] for _ in range(2)] == ["step_1"] * 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    lines = told.read_text().splitlines()
    assert lines[2] == f"{os.path.realpath(live)} step_1"
    assert sorted(json.loads(lines[3])) == ["bias", "layers.1"]
    assert_served(live, 1)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


CHILDREN = """
sleep 1000 &
echo $! >> {pids}
sh -c 'trap "" TERM; echo $$ >> {pids}; while :; do sleep 0.1; done' &
setsid sleep 1000 &
echo $! > {outside}
while [ $(wc -l < {pids}) != 2 ]; do sleep 0.01; done
touch {marker}
wait
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_children_of_the_command(
    store: Store, live: Path, tmp_path: Path, number: signal.Signals
) -> None:
    pids, outside, marker = (tmp_path / name for name in ("pids", "outside", "marker"))
    script = CHILDREN.format(pids=pids, outside=outside, marker=marker)
    command = [*COMMAND, "pull", store.uri, str(live), "--follow", "--exec", script]

    def heed() -> None:
        # The tests may run under nohup, and what a program is started to ignore, it ignores.
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        wait_until(marker.exists)
        process.send_signal(number)
        gentle, stubborn = map(int, pids.read_text().split())
        wait_until(lambda: not is_running(gentle))
        process.send_signal(number)  # do not wait for the other one
        assert process.wait(100) == 0
    wait_until(lambda: not is_running(stubborn))
    # Who makes a session of its own wants to stay.
    assert is_running(int(outside.read_text()))
    os.kill(int(outside.read_text()), signal.SIGKILL)


def test_ctrl_c_at_a_terminal(store: Store, live: Path, tmp_path: Path) -> None:
    pids, marker = tmp_path / "pids", tmp_path / "marker"
    script = f"sleep 1000 & echo $! > {pids}; touch {marker}; wait"
    command = [*COMMAND, "pull", store.uri, str(live), "--follow", "--exec", script]
    terminal, inner = pty.openpty()
    # The program leads the session of this terminal.
    with subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=inner, stdout=subprocess.PIPE, stderr=inner
    ) as process:
        wait_until(marker.exists)
        os.write(terminal, b"\x03")
        wait_until(lambda: not is_running(int(pids.read_text())))
        assert process.wait(100) == 0
    os.close(inner)
    os.close(terminal)


def test_what_a_command_leaves_in_the_background_goes_on(
    store: Store, live: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 > /dev/null & echo $! >> {pids}"
    command = [*COMMAND, "pull", store.uri, str(live), "--follow", "--exec", script, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert [event["event"] for _, event in zip(range(2), lines_of(process), strict=False)][
            1
        ] == "called"
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    assert is_running(int(pids.read_text()))
    os.kill(int(pids.read_text()), signal.SIGKILL)


def test_a_child_of_the_command_that_never_reads_its_input(
    store: Store, live: Path, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    # More names than a pipe holds.
    many = {"model": StateDict({f"{number:0200}": torch.zeros(1) for number in range(500)})}
    store.take(many, "step_1")
    script = f"exec 3<&0; sleep 1000 <&3 > /dev/null & echo $! > {pid}"
    command = [*COMMAND, "pull", store.uri, str(live), "--follow", "--exec", script, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        events = lines_of(process)
        assert (next(events)["event"], next(events)["event"]) == ("switched", "called")
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_command_that_fails_is_run_again(store: Store, live: Path, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    command = [*COMMAND, "pull", store.uri, str(live), "--follow", "--interval", "0.05s"]
    with subprocess.Popen(
        [*command, "--exec", f"test -e {fixed}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert "step_0: 9 tensors" in process.stdout.readline()
        while "the command failed, and is run again" not in process.stderr.readline():
            pass
        fixed.touch()
        while "the command succeeded" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0


# --- after the switch ---------------------------------------------------------------------------


@pytest.mark.parametrize("goes", ["removed", "moved"])
def test_versions_that_go_under_a_follower(
    store: Store, live: Path, tmp_path: Path, goes: str
) -> None:
    """They are made again, and locked: nobody else may pull there meanwhile."""
    called: list[str] = []
    events = follow(store, live, on_version=lambda path, _: called.append(path.name[:6]))
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    versions = live.with_name("live.versions")
    if goes == "removed":
        shutil.rmtree(versions)
    else:
        versions.rename(tmp_path / "away")
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    assert_served(live, 0)
    with pytest.raises(CasnapError, match="only one may at a time"):
        store.pull(live)
    take(store, 1)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    assert_served(live, 1)
    assert called == ["step_0", "step_0", "step_1"]


@pytest.mark.sweep
def test_whatever_fails_each_version_is_called_for(store: Store, live: Path) -> None:
    calls: list[int] = []

    def on_version(folder: Path, changed: list[str]) -> None:
        calls.append(json.loads((folder / "config.json").read_text())["step"])

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    events = follow(store, live, options=PullOptions(keep=1), on_version=on_version)
    assert [next(events).event for _ in range(2)] == ["switched", "called"]
    names = ["rename", "fsync", "unlink", "rmdir", "symlink", "open", "link", "stat"]
    step = 0
    for number in sweep():
        for strike_at in (number, None):
            step += 1
            take(store, step)
            with system_faults(strike_at, fail, names) as struck:
                while next(events).event != "called":
                    pass
            assert calls[-1] == step
            assert_served(live, step)
            if strike_at == number and not struck.struck:
                return
        assert versions_of(live) == [live.resolve().name], "what was left is deleted by the next"
