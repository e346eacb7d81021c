"""Who can write to a store's folder puts links, pipes and endless files there.

Nothing that is reached through them is read, changed or waited for.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from casnap import Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.backends.local_files import safe_paths
from casnap.errors import BackendError, CasnapError, DamagedError
from casnap.format.records import CONFIG_KEY, root_key, segment_key
from casnap.integrations.folders import prune_missing_folders
from casnap.storage.commit_log.roots import COPIES
from tests.support.far import FarFolder
from tests.support.faults import in_child, untouched
from tests.support.forger import limit_memory
from tests.support.mounts import NOBODY, as_nobody, needs_root, tmpfs
from tests.support.written import publish

HUGE = 1 << 40


def state(step: int) -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(step)
    return {"s": StateDict(x=torch.randn(50_000, generator=generator), step=step)}


@pytest.fixture(params=["at once", "walked"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the kernel resolve paths, and walk them, as where it cannot."""
    if request.param == "at once":
        assert safe_paths.has_openat2()
        yield
        return
    with mock.patch("casnap.backends.local_files.safe_paths.has_openat2", return_value=False):
        yield


BOTH_WAYS = pytest.mark.usefixtures("way")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, first in (("store", 0), ("other", 10)):
        store = Store(folder / name)
        for step in range(first, first + 3):
            store.take(state(step), f"run/step_{step}")
    return folder


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


@pytest.fixture
def other(made: Path, tmp_path: Path) -> Path:
    """A store that must stay as it is."""
    return Path(shutil.copytree(made / "other", tmp_path / "other"))


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail where something waits for ever: no bound of speed."""

    def end(*_: object) -> None:
        raise AssertionError(f"it waited for {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def replace_by_link(place: Path, target: Path) -> None:
    place.rename(place.parent / f"{place.name}-before")
    place.symlink_to(target)


def every_use(path: Path) -> None:
    """Use a store in all ways; typed errors are answers."""

    def attempt(call: Callable[[], object]) -> None:
        with suppress(CasnapError):
            call()

    attempt(lambda: Store(path, create=False).check(data=True))
    attempt(lambda: Store(path, create=False)["run/step_2"].restore(state(0)))
    attempt(lambda: Store(path).take(state(5), "run/step_5", overwrite=True))
    attempt(lambda: Store(path).prune(Retention(keep_last=1)))
    attempt(lambda: Store(path).gc(grace=0))
    attempt(lambda: Store(path).repair())
    attempt(lambda: Store(path).gc(grace=0))


# --- links ------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("place", ["packs", "index", "roots", "roots/0", "tmp"])
def test_a_folder_that_is_a_link_to_another_store(path: Path, other: Path, place: str) -> None:
    """A collector deleted the live packs of the other store as orphans."""
    (path / "casnap-store/tmp").mkdir(exist_ok=True)
    (other / "casnap-store/tmp").mkdir(exist_ok=True)
    (other / "casnap-store/tmp" / ("ab" * 12)).write_bytes(b"of a writer")
    replace_by_link(path / "casnap-store" / place, other / "casnap-store" / place)
    with untouched(other):
        every_use(path)
        if place != "tmp":
            with pytest.raises(BackendError, match=r"is a link.*mount --bind"):
                Store(path).gc(grace=0)
        with pytest.raises(BackendError, match="is a link"):
            Store(path).take(state(7), "run/step_7")


@BOTH_WAYS
def test_a_folder_of_packs_that_is_a_link(path: Path, other: Path) -> None:
    for folder in sorted((other / "casnap-store/packs").iterdir()):
        shutil.rmtree(path / "casnap-store/packs" / folder.name, ignore_errors=True)
        (path / "casnap-store/packs" / folder.name).symlink_to(folder)
    with untouched(other):
        every_use(path)


@BOTH_WAYS
def test_a_pack_that_is_a_link(path: Path, tmp_path: Path) -> None:
    """Also to itself, whole, elsewhere: what lies elsewhere may go, or change."""
    for pack in (path / "casnap-store/packs").glob("*/*"):
        pack.rename(tmp_path / pack.name)
        pack.symlink_to(tmp_path / pack.name)
    report = Store(path).check()
    assert {damage.kind for damage in report.damages} == {"unreadable"}
    assert "is a link" in report.damages[0].message
    with pytest.raises((BackendError, DamagedError), match="is a link"):
        Store(path)["run/step_2"].restore(state(0))


@BOTH_WAYS
def test_copies_of_roots_that_lie_in_another_store(path: Path, other: Path) -> None:
    """Any commit removed the roots there, as older copies."""
    (path / "casnap-store/packs").mkdir(exist_ok=True)
    replace_by_link(path / "casnap-store" / COPIES, other / "casnap-store/roots/0")
    with untouched(other):
        for step in range(20, 24):
            with pytest.raises(BackendError, match="copies is a link"):
                Store(path).take(state(step), f"run/step_{step}")
        every_use(path)


@BOTH_WAYS
def test_a_marker_behind_a_linked_folder(path: Path, other: Path) -> None:
    """The folder of a snapshot, and the folder of its run, are links into another store."""
    shutil.rmtree(path / "run")
    (path / "run").symlink_to(other / "run")
    Store(path).take(state(10), "run/step_10")
    Store(path).take(state(11), "apart/step_11")
    shutil.rmtree(path / "apart/step_11")
    (path / "apart/step_11").symlink_to(other / "run/step_11")
    with untouched(other):
        Store(path).delete("run/step_10")
        Store(path).delete("apart/step_11")
        Store(path).take(state(12), "run/step_12")
        Store(path).delete("run/step_12")
        every_use(path)


@BOTH_WAYS
def test_links_that_change_meanwhile(path: Path, other: Path) -> None:
    """The folder of the packs is again and again a link to another store's, while it is used."""
    link = path / "packs-aside"
    link.symlink_to(other / "casnap-store/packs")
    over = threading.Event()
    libc = ctypes.CDLL(None)

    def swap() -> None:
        names = os.fsencode(path / "casnap-store/packs"), os.fsencode(link)
        while not over.is_set():
            exchanged = [libc.renameat2(-100, names[0], -100, names[1], 2) for _ in range(2)]
            assert exchanged == [0, 0]

    swapping = threading.Thread(target=swap)
    with untouched(other):
        swapping.start()
        try:
            for _ in range(7):
                every_use(path)
        finally:
            over.set()
            swapping.join()
    Store(path).check()


# --- what is no file --------------------------------------------------------------------------


def pipe(place: Path) -> None:
    place.unlink(missing_ok=True)
    os.mkfifo(place)


def listening(place: Path) -> None:
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(place.parent, os.O_PATH)
        server.bind(f"/proc/self/fd/{folder}/{place.name}")
        os.close(folder)


def zeros(place: Path) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to("/dev/zero")


def sparse(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(HUGE)


def in_its_place(path: Path, put: Callable[[Path], None]) -> dict[str, Callable[[], None]]:
    newest = Store(path)._view.repository.newest()

    def packs() -> None:
        for pack in list((path / "casnap-store/packs").glob("*/*")):
            put(pack)

    return {
        "newest root": lambda: put(path / "casnap-store" / root_key(newest.seq)),
        "next root": lambda: put(path / "casnap-store" / root_key(newest.seq + 1)),
        "copy of a root": lambda: put(path / "casnap-store" / COPIES / str(newest.seq + 1)),
        "record": lambda: put(path / "casnap-store" / CONFIG_KEY),
        "segment": lambda: put(path / "casnap-store" / segment_key(newest.segments[0].id)),
        "packs": packs,
        "left over pack": lambda: put(
            path / "casnap-store/packs/ab" / ("00" * 5 + "01" * 10 + "ab")
        ),
        "temporary": lambda: put(path / "casnap-store/tmp" / ("ab" * 12)),
        "marker": lambda: put(path / "run/step_2/casnap-snapshot.json"),
    }


HARMLESS = ("left over pack", "temporary", "marker")
PLACES = (
    "newest root",
    "next root",
    "copy of a root",
    "record",
    "segment",
    "packs",
    *HARMLESS,
)


@BOTH_WAYS
@pytest.mark.sampled
@pytest.mark.parametrize("put", [pipe, listening, zeros, sparse])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_or_endless(path: Path, place: str, put: Callable[[Path], None]) -> None:
    """Nothing waits for it, nor takes memory for it."""
    (path / "casnap-store/packs/ab").mkdir(exist_ok=True)
    (path / "casnap-store/tmp").mkdir(exist_ok=True)
    (path / "casnap-store" / COPIES).mkdir(exist_ok=True)
    in_its_place(path, put)[place]()

    def work() -> None:
        limit_memory()
        with within(60):
            every_use(path)
            with suppress(CasnapError):
                is_whole = Store(path).check(data=True).ok
                assert is_whole or place not in HARMLESS

    assert in_child(work) == 0


def test_a_remote_object_that_is_too_long(tmp_path: Path) -> None:
    """As a local one: its length is looked at before its bytes are read."""
    Store(FarFolder(tmp_path / "store")).take(state(0), "a")
    root = Store(tmp_path / "store")._view.repository.newest()
    sparse(tmp_path / "store" / "casnap-store" / root_key(root.seq + 1))
    with pytest.raises(DamagedError, match="1,099,511,627,776 bytes"):
        Store(FarFolder(tmp_path / "store")).latest()


# --- names ------------------------------------------------------------------------------------

BAD_NAMES = [
    "../../x",
    "/x",
    "a//b",
    "casnap-store/packs/ab",
    "..",
    "a/../../x",
    "x\x1b[2J",
    "a" * 300,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_row_whose_name_cannot_be_one(path: Path, tmp_path: Path, name: str) -> None:
    """A mirror wrote outside of its folder. No command sees the row; the good ones are copied."""
    store = Store(path)
    publish(store, {name: store["run/step_1"].row})
    good = [f"run/step_{step}" for step in range(3)]
    outside = set(tmp_path.rglob("*"))
    assert [s.name for s in Store(path).snapshots()] == good
    assert sorted(Store(path).copy(to=tmp_path / "copied").copied) == good
    mirrored = Store(path, mirror=tmp_path / "mirror")
    mirrored.wait_mirrored(60)
    assert [s.name for s in Store(tmp_path / "mirror").snapshots()] == good
    new = set(tmp_path.rglob("*")) - outside
    ours = {path, tmp_path / "copied", tmp_path / "mirror", tmp_path / "casnap-cache"}
    assert [p for p in new if not ours & {p, *p.parents}] == []
    assert {p.name for p in path.iterdir()} == {"casnap-store", "run"}


def test_a_row_that_is_passed_over_is_repaired(path: Path) -> None:
    store = Store(path)
    publish(store, {"../../x": store["run/step_1"].row})
    (damage,) = Store(path).check().damages
    assert damage.kind == "malformed"
    assert "'../../x'" in damage.message
    assert Store(path).repair().remaining == []
    assert Store(path).check().damages == []
    assert len(Store(path).snapshots()) == 3


@BOTH_WAYS
def test_no_key_climbs_out(path: Path) -> None:
    backend = LocalBackend(path)
    for call in (backend.read, backend.delete, backend.size, backend.names, backend.sizes):
        with pytest.raises(BackendError, match="not in the store"):
            call("packs/../../other/casnap-store/casnap.json")


# --- markers ----------------------------------------------------------------------------------


def marker(path: Path, name: str) -> Path:
    return path / name / "casnap-snapshot.json"


@pytest.mark.parametrize("how", ["delete", "prune", "retention"])
def test_a_name_that_is_taken_anew_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Who deleted the name is slow between its commit and the marker. A durable one was lost."""
    slow = Store(path)
    real = LocalBackend.unmark

    def unmark(backend: LocalBackend, *arguments: object) -> object:
        monkeypatch.setattr(LocalBackend, "unmark", real)
        assert in_child(lambda: Store(path).take(state(9), "run/step_0")) == 0
        return real(backend, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalBackend, "unmark", unmark)
    if how == "delete":
        slow.delete("run/step_0")
    elif how == "prune":
        slow.prune(Retention(keep_last=2))
    else:
        slow.take(state(3), "run/step_3", retention=Retention(keep_last=3))
    assert marker(path, "run/step_0").exists()
    Store(path).take(state(4), "run/step_4")
    assert Store(path)["run/step_0"].read_object("s/step") == 9


@pytest.mark.parametrize("meanwhile", ["deleted", "overwritten", "taken anew", "nothing"])
def test_a_marker_that_comes_late_names_no_dead_commit(path: Path, meanwhile: str) -> None:
    """Who takes is slow between its commit and its marker."""
    real = LocalBackend.mark

    def work() -> None:
        store = Store(path)
        if meanwhile == "overwritten":
            store.take(state(9), "run/step_3", overwrite=True)
        elif meanwhile != "nothing":
            store.delete("run/step_3")
            if meanwhile == "taken anew":
                store.take(state(9), "run/step_3")

    def mark(backend: LocalBackend, key: str, content: bytes) -> None:
        with mock.patch.object(LocalBackend, "mark", real):
            assert in_child(work) == 0
        patch.stop()
        real(backend, key, content)

    patch = mock.patch.object(LocalBackend, "mark", mark)
    patch.start()
    Store(path).take(state(3), "run/step_3")
    if meanwhile == "deleted":
        assert not (path / "run/step_3").exists()
    else:
        commit = json.loads(marker(path, "run/step_3").read_bytes())["commit"]
        assert commit == Store(path)["run/step_3"].commit_id
        assert len(list((path / "run/step_3").iterdir())) == 1
    assert Store(path).check().warnings == []


def test_folders_that_a_user_made_stay(path: Path) -> None:
    """Those that casnap made go with the last snapshot in them."""
    (path / "kept/logs").mkdir(parents=True)
    store = Store(path)
    for name in ("kept/logs/step_1", "made/deep/step_1", "made/deep/step_2", "kept/own/step_1"):
        store.take(state(1), name)
    for snapshot in store.snapshots():
        store.delete(snapshot.name)
    assert sorted(p.relative_to(path).as_posix() for p in path.glob("[!c]*/**")) == [
        "kept",
        "kept/logs",
    ]


def test_a_snapshot_that_is_called_as_the_first_roots(tmp_path: Path) -> None:
    """Its folder passed for the roots of a damaged store, for all paths below."""
    Store(tmp_path / "store").take(state(0), "x/roots/0")
    Store(tmp_path / "store").take(state(0), "x/y/roots/0/0")
    for name in ("x/a", "x/y/a"):
        Snapshot.take(tmp_path / "store" / name, state(1))
        assert Snapshot(tmp_path / "store" / name).read_object("s/step") == 1
    assert Snapshot(tmp_path / "store/x/roots/0").read_object("s/step") == 0


# --- what fresh eyes found ---------------------------------------------------------------------


FOLDERS = ("packs", "packs/ab", "index", "tmp")


def test_folders_that_nobody_can_list(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deeper than a path can be, or of another user, in each folder of the store."""
    inner = path / "casnap-store"
    Store(path).delete("run/step_0")
    for name in FOLDERS:
        (inner / name).mkdir(exist_ok=True)
        (inner / name / "closed").mkdir(0o700)
        folder = os.open(inner / name, os.O_PATH)
        for _ in range(200):
            os.mkdir("d" * 50, dir_fd=folder)
            below = os.open("d" * 50, os.O_PATH, dir_fd=folder)
            os.close(folder)
            folder = below
        os.close(folder)

    def work() -> None:
        assert Store(path).check().ok
        assert Store(path).gc(grace=0).deleted_packs

    work()
    if os.geteuid() == 0:
        Store(path).delete("run/step_1")
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", path], check=True)
        for name in FOLDERS:
            os.chown(inner / name / "closed", 0, 0)
        as_nobody(tmp_path, monkeypatch, work)


def test_a_marker_of_lists_of_lists(path: Path) -> None:
    marker(path, "run/step_0").write_bytes(b'{"a":' + b"[" * 8000 + b"]" * 8000 + b"}")
    Store(path).prune(Retention(keep_last=1))
    assert marker(path, "run/step_0").exists()
    assert not marker(path, "run/step_1").exists()
    assert prune_missing_folders(Store(path)).deleted == []


def test_a_umask_that_takes_every_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_root()
    (tmp_path / "shared").mkdir()
    os.chown(tmp_path / "shared", NOBODY, NOBODY)
    (tmp_path / "shared").chmod(0o2775)

    def work() -> None:
        Store(tmp_path / "shared").take(state(0), "a")
        before = os.umask(0o777)
        Store(tmp_path / "shared").take(state(1), "b")
        Store(tmp_path / "shared").take(state(1), "in/b")
        os.umask(before)
        Store(tmp_path / "shared").take(state(2), "c")
        for folder in (tmp_path / "shared/casnap-store").rglob("*"):
            assert folder.stat().st_mode & 0o777 in (0o775, 0o664), (
                folder,
                oct(folder.stat().st_mode),
            )

    as_nobody(tmp_path, monkeypatch, work)


def test_a_marker_on_another_disk(path: Path) -> None:
    Store(path).delete("run/step_0")
    with tmpfs(path / "mounted", "1m"):
        Store(path).take(state(3), "mounted/step_3")
        Store(path).delete("mounted/step_3")
        assert not marker(path, "mounted/step_3").exists()


def test_what_is_no_marker_at_the_second_look_stays(path: Path) -> None:
    place = marker(path, "run/step_0")

    def is_stale(_key: str, _content: bytes) -> bool:
        place.unlink()
        place.mkdir()
        (place / "precious").touch()
        return True

    errors = LocalBackend(path).unmark(["run/step_0/casnap-snapshot.json"], is_stale)
    assert "is a folder" in str(errors["run/step_0/casnap-snapshot.json"])
    assert [p.name for p in place.parent.rglob("*")] == [place.name, "precious"]


def test_a_path_that_is_not_unicode(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    Store(folder).take(state(0), "a")
    assert Store(folder)["a"].read_object("s/step") == 0
