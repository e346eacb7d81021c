"""A server that goes away: each verb ends, or says what it waits for; then the run goes on."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from casnap import NewStore, Store
from casnap.errors import PLACE_ERRORS, UnavailableError
from casnap.extending import LiveState
from casnap.integrations.witnesses import Witnesses
from tests.support.cli_calls import COMMAND
from tests.support.faults import CHUNK, app_state, assert_holds, take
from tests.support.mounts import bindfs
from tests.support.shared_mounts import gluster_volume, sshd
from tests.support.volumes import volume

pytestmark = pytest.mark.filesystems

VERBS: dict[str, Callable[[Store], Any]] = {
    "take": lambda store: take(store, 2),
    "async_take": lambda store: store.async_take(app_state(3), "step_3").wait(),
    "latest": lambda store: store.latest(),
    "restore": lambda store: assert_holds(store["step_1"], 1),
    "read_object": lambda store: store["step_1"].read_object("0/state/weight"),
    "delete": lambda store: store.delete("step_0"),
    "gc": lambda store: store.gc(grace=0),
    "check": lambda store: store.check(data=True),
    "opened anew": lambda store: Store(store.uri).latest(),
}


@pytest.fixture
def work() -> Iterator[Path]:
    """Return a folder on a disk: servers need one."""
    with TemporaryDirectory(prefix="casnap-filesystems-", dir="/var/tmp") as folder:
        yield Path(folder)


def made(place: Path) -> Store:
    store = Store(place / "store", create=NewStore(chunk_size=CHUNK))
    for step in range(2):
        take(store, step)
    return store


def held() -> tuple[set[str], set[str]]:
    """Return which files of mounts this process has open, and its threads of casnap."""
    targets = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            targets.add(str(fd.readlink()))
        except OSError:
            continue
    threads = {thread.name for thread in threading.enumerate() if "late-calls" not in thread.name}
    return {target for target in targets if "store" in target}, threads


def all_fail(store: Store, *codes: int) -> None:
    """Check that each verb ends with an error that is typed, and names the place."""
    before = held()
    for name, verb in VERBS.items():
        with pytest.raises(PLACE_ERRORS) as caught:
            verb(store)
        said = str(caught.value)
        assert str(Path(store.uri).parent) in said, (name, said)
        assert any(os.strerror(code) in said for code in codes), (name, said)
        if errno.EIO not in codes:
            assert isinstance(caught.value, UnavailableError), (name, said)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert store.try_take(app_state(4), "step_4") is None
    assert held() == before


def all_go_on(store: Store) -> None:
    for name, verb in VERBS.items():
        if name != "delete" or "step_0" in store:
            verb(store)
    assert store.check(data=True).ok
    # A client of FUSE deletes a file that is open under another name, and that a little later.
    left = [path.name for path in Path(store.uri, "casnap-store/tmp").iterdir()]
    assert all(name.startswith(".fuse_hidden") for name in left), left


@pytest.mark.parametrize("code", ["ENOTCONN", "ESTALE", "ETIMEDOUT", "EHOSTDOWN", "EIO"])
def test_a_mount_that_answers_errors(tmp_path: Path, code: str) -> None:
    number = getattr(errno, code)
    with volume(tmp_path / "volume") as disk:
        store = made(disk.path)
        disk.fail("casnap-store", number)
        all_fail(store, number)
        disk.heal()
        all_go_on(store)


def test_a_server_of_sftp_that_ends(work: Path) -> None:
    """The client connects again by itself, once the server is there."""
    (work / "served").mkdir()
    with sshd(work) as server, server.mount(work / "a", work / "served"):
        store = made(work / "a")
        server.stop()
        all_fail(store, errno.ENOTCONN, errno.EIO)
        server.start()
        _until_it_answers(work / "a")
        all_go_on(store)


def test_a_mount_that_is_gone(work: Path) -> None:
    """Nothing is written into the folder below; after a mount the same process goes on."""
    (work / "below").mkdir()
    with bindfs(work / "below", work / "a"):
        store = made(work / "a")
    for name in ("take", "latest", "restore", "gc", "check"):
        with pytest.raises(PLACE_ERRORS, match="is gone, or was moved") as caught:
            VERBS[name](store)
        assert store.uri in str(caught.value)
    assert list((work / "a").iterdir()) == []
    with bindfs(work / "below", work / "a"):
        all_go_on(store)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_mount_that_is_gone_at_a_witness(
    work: Path, caplog: pytest.LogCaptureFixture, is_killed: bool
) -> None:
    """A trainer warns, and trains on; nothing is written into the folder below."""
    (work / "below").mkdir()

    def witness(step: int) -> None:
        witnesses.take(lambda: LiveState(app_state(step)))

    with bindfs(work / "below", work / "a"):
        store = made(work / "a")
        witnesses = Witnesses(2, "raise")
        witnesses.follow(store.path_of("step_1"))
        witness(2)
        if is_killed:
            os.kill(_client_of(work / "a"), signal.SIGKILL)
            with pytest.raises(UnavailableError, match=str(work / "a")):
                store.witness(app_state(3), "step_3")
            witness(3)
    if not is_killed:
        witness(3)
    assert f"no witness of step 2 after {store.path_of('step_1')}: " in caplog.text
    assert not witnesses.are_due
    assert list((work / "a").iterdir()) == []
    with bindfs(work / "below", work / "a"):
        all_go_on(store)
        caplog.clear()
        witnesses.follow(store.path_of("step_1"))
        witness(2)
        witness(3)
        assert "step_1" not in caplog.text
        assert "witness/step_1+2" in store


def test_a_brick_that_is_killed(work: Path) -> None:
    """The mount stays; it works again once the brick does."""
    with gluster_volume(work) as served, served.mount(work / "a"):
        store = made(work / "a")
        served.kill_brick()
        time.sleep(1)
        all_fail(store, errno.ENOTCONN)
        served.restart_brick()
        _until_it_answers(work / "a")
        all_go_on(store)


def _until_it_answers(place: Path) -> None:
    for _ in range(1000):
        try:
            return os.statvfs(place) and None
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"{place} does not come back")


def test_a_client_that_stands_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, work: Path
) -> None:
    """A call of the system waits for it; a line says so, and the take then goes on."""
    (work / "below").mkdir()
    with bindfs(work / "below", work / "a"):
        store = made(work / "a")
        pid = _client_of(work / "a")
        os.kill(pid, signal.SIGSTOP)
        try:
            taking = threading.Thread(target=take, args=(store, 5))
            with caplog.at_level(logging.WARNING, "casnap"):
                taking.start()
                while not (said := [r.getMessage() for r in caplog.records]):
                    time.sleep(0.1)
            assert taking.is_alive()
        finally:
            os.kill(pid, signal.SIGCONT)
        taking.join()
        assert f"waiting for {store.uri}" in said[0]
        assert "has not answered for" in said[0]
        all_go_on(store)


def test_a_program_that_begins_while_the_client_stands_still(work: Path) -> None:
    """Its first look at the place waits; the line says so."""
    (work / "below").mkdir()
    with bindfs(work / "below", work / "a"):
        store = made(work / "a")
        pid = _client_of(work / "a")
        os.kill(pid, signal.SIGSTOP)
        listing = subprocess.Popen(
            [*COMMAND, "ls", store.uri], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with listing:
            try:
                assert listing.stderr is not None
                assert f"waiting for {store.uri}" in listing.stderr.readline()
            finally:
                os.kill(pid, signal.SIGCONT)
            assert "step_1" in listing.communicate()[0]
        assert listing.returncode == 0


def _client_of(place: Path) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"bindfs" and os.fsencode(place) in words:
                return int(process.name)
    raise AssertionError("no client")
