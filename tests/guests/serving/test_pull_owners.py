"""What another user has planted in the folder of a pull is not served, and misleads no pull."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from casnap import Store
from casnap.errors import CasnapError, FileFormatError
from casnap.serving import verify
from casnap.serving.version import CHUNKS, RECORD, VersionRecord
from tests.support.faults import content_of, in_child
from tests.support.mounts import NOBODY, as_nobody, needs_root
from tests.support.served import assert_served, inodes, take, versions_of
from tests.support.volumes import volume

SQUASHED = 4242
WEIGHTS = "model.safetensors"


def give(folder: Path, user: int) -> None:
    """Give a folder and all in it to another user."""
    needs_root()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


def versions_at(live: Path) -> Path:
    return live.with_name(f"{live.name}.versions")


def forge(version: Path) -> None:
    """Change the weights of a version, with a record that fits."""
    info = (version / WEIGHTS).stat()
    with (version / WEIGHTS).open("r+b") as file:
        file.seek(100_000)
        file.write(b"planted!")
    os.utime(version / WEIGHTS, ns=(info.st_atime_ns, info.st_mtime_ns))


# --- whose it is --------------------------------------------------------------------------------


def test_versions_of_another_user(store: Store, live: Path) -> None:
    store.pull(live)
    forge(live.resolve())
    assert not store.pull(live).switched, "the record fits"
    give(versions_at(live), NOBODY)
    before = content_of(versions_at(live))
    for pull in (lambda: store.pull(live), lambda: next(store.follow(live))):
        with pytest.raises(FileFormatError, match=rf"versions belongs to .*uid {NOBODY}.*Remove"):
            pull()
    assert content_of(versions_at(live)) == before
    shutil.rmtree(versions_at(live))
    store.pull(live)
    assert_served(live, 0)


@pytest.mark.parametrize("part", ["folder", "record", "file"])
def test_a_version_of_another_user_among_ours(store: Store, live: Path, part: str) -> None:
    """It was put there while others could write."""
    store.pull(live)
    planted = live.resolve()
    forge(planted)
    give({"folder": planted, "record": planted / RECORD, "file": planted / WEIGHTS}[part], NOBODY)
    report = store.pull(live)
    assert report.switched
    assert live.resolve() != planted
    assert_served(live, 0)
    take(store, 1)
    planted.rename(planted.with_name(f"step_1@{store['step_1'].commit_id}"))
    store.pull(live)
    assert_served(live, 1)


def test_a_link_of_another_user(store: Store, live: Path) -> None:
    needs_root()
    store.pull(live)
    os.chown(live, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(FileFormatError, match=rf"live belongs to .*uid {NOBODY}"):
        store.pull(live)


def test_a_note_of_another_user_leaves_no_callback_out(store: Store, live: Path) -> None:
    called: list[str] = []

    def follow() -> None:
        events = store.follow(live, on_version=lambda path, _: called.append(path.name))
        next(events)
        next(events)

    follow()
    give(versions_at(live) / ".called.json", NOBODY)
    follow()
    assert len(called) == 2
    assert (versions_at(live) / ".called.json").stat().st_uid == os.geteuid()


@pytest.mark.parametrize("mode", [0o775, 0o2775, 0o777])
def test_versions_that_others_could_write_to(store: Store, live: Path, mode: int) -> None:
    """A group of a pod gets the right to write with each mount. It is taken back; nothing more."""
    store.pull(live)
    before = inodes(live)
    for path in (versions_at(live), *versions_at(live).rglob("*")):
        path.chmod(mode if path.is_dir() else mode & 0o666)
    assert not store.pull(live).switched
    assert inodes(live) == before
    assert_closed(live)
    assert stat.S_IMODE(versions_at(live).stat().st_mode) == mode & ~0o022


def assert_closed(live: Path) -> None:
    for path in (versions_at(live), *versions_at(live).rglob("*")):
        assert not path.lstat().st_mode & 0o022, path


def test_no_umask_opens_what_a_pull_makes(store: Store, live: Path) -> None:
    before = os.umask(0)
    try:
        events = store.follow(live, interval=0, on_version=lambda *_: None)
        assert [next(events).event for _ in range(2)] == ["switched", "called"]
        events.close()
    finally:
        os.umask(before)
    assert_closed(live)


def test_versions_that_others_may_write_to_and_we_cannot_close(
    store: Store, live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    store.pull(live)
    versions_at(live).chmod(0o777)
    tmp_path.chmod(0o1777)

    def work() -> None:
        with pytest.raises(FileFormatError, match="may be written to by other users"):
            Store(store.uri).pull(live)

    as_nobody(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("modes", [True, False])
def test_a_volume_that_gives_all_files_to_one_user(
    store: Store, tmp_path: Path, modes: bool
) -> None:
    with volume(tmp_path / "volume", owner=SQUASHED, modes=modes) as disk:
        live = disk.path / "live"
        assert store.pull(live).switched
        assert not store.pull(live).switched
        take(store, 1)
        report = Store(store.uri).pull(live)
        assert 0 < report.fetched_bytes < 200_000, "the version before was used"
        events = store.follow(live, interval=0, on_version=lambda *_: None)
        assert [next(events).event for _ in range(2)] == ["switched", "called"]
        events.close()
        assert_served(live, 1)
        assert len(versions_of(live)) == 2
        if modes:
            assert_closed(live)


# --- what stands there --------------------------------------------------------------------------

KINDS = ["link", "dangling link", "fifo", "folder", "file", "socket", "hard link"]


@contextmanager
def planted(path: Path, kind: str, elsewhere: Path) -> Iterator[None]:
    """Put something in place of a file or folder, and check that nothing elsewhere changes."""
    elsewhere.mkdir(exist_ok=True)
    for name in ("letter", ".mine.partial"):
        (elsewhere / name).write_text("dear all")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "link":
        path.symlink_to(elsewhere / "letter")
    elif kind == "dangling link":
        path.symlink_to(elsewhere / "new")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "inner").touch()
    elif kind == "file":
        path.write_bytes(b"{}")
    elif kind == "hard link":
        path.hardlink_to(elsewhere / "letter")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            folder = os.open(path.parent, os.O_RDONLY)
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
    before = [(p, p.lstat().st_mtime_ns) for p in sorted(elsewhere.iterdir())]
    yield
    assert [(p, p.lstat().st_mtime_ns) for p in sorted(elsewhere.iterdir())] == before
    assert set(content_of(elsewhere).values()) == {b"dear all"}


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "folder"])
def test_in_place_of_the_folder_of_versions(
    store: Store, live: Path, tmp_path: Path, kind: str
) -> None:
    with planted(versions_at(live), kind, tmp_path / "elsewhere"):
        for pull in (lambda: store.pull(live), lambda: next(store.follow(live))):
            with pytest.raises(FileFormatError, match="is no folder, and no pull made it; remove"):
                pull()


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "file"])
def test_in_place_of_the_lock(store: Store, live: Path, tmp_path: Path, kind: str) -> None:
    store.pull(live)
    with planted(versions_at(live) / ".lock", kind, tmp_path / "elsewhere"):
        for pull in (lambda: store.pull(live), lambda: next(store.follow(live))):
            with pytest.raises(FileFormatError, match=r"\.lock .*no pull made it; remove it"):
                pull()
    assert_served(live, 0)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".called.json", ".called.json.partial", ".x.partial"])
def test_in_place_of_a_note(store: Store, live: Path, tmp_path: Path, kind: str, name: str) -> None:
    """The note was written through a link."""
    called: list[str] = []
    store.pull(live)
    events = store.follow(live, on_version=lambda path, _: called.append(path.name))
    assert next(events).event == "switched"
    with planted(versions_at(live) / name, kind, tmp_path / "elsewhere"):
        assert next(events).event == "called"
        events.close()
        store.pull(live)
    assert len(called) == 1
    assert set(versions_of(live)) == {live.resolve().name}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["", RECORD, CHUNKS, WEIGHTS])
def test_in_place_of_what_a_version_has(
    store: Store, live: Path, tmp_path: Path, kind: str, name: str
) -> None:
    """It is made anew. A pull waited for ever for a pipe in place of the digests."""
    store.pull(live)
    with planted(live.resolve() / name, kind, tmp_path / "elsewhere"):
        if name:
            done: list[object] = []
            try:
                done += verify(live)
            except FileFormatError:
                assert name == RECORD
            assert done or name == RECORD
        take(store, 1)
        store.pull(live)
        assert_served(live, 1)
        # Again, by its name.
        store.pull(live, "step_0")
        assert_served(live, 0)
        for step in (2, 3):
            take(store, step)
            store.pull(live)
        assert len(versions_of(live)) == 2


def test_a_record_that_names_files_elsewhere(store: Store, live: Path, tmp_path: Path) -> None:
    """What is damaged gets another time, so that a later pull makes it anew."""
    store.pull(live)
    (tmp_path / "letter").write_text("dear all")
    before = (tmp_path / "letter").stat().st_mtime_ns
    path = live.resolve() / RECORD
    for name in ("../../letter", str(tmp_path / "letter"), ".."):
        record = msgspec.json.decode(path.read_bytes(), type=VersionRecord)
        record.files[name] = record.files[WEIGHTS]
        record.digest = record.own_digest()
        path.write_bytes(record.encode())
        with pytest.raises(FileFormatError, match="nothing to compare"):
            verify(live)
        assert (tmp_path / "letter").stat().st_mtime_ns == before
        store.pull(live)
        assert_served(live, 0)
        path = live.resolve() / RECORD


def test_a_name_of_ours_that_cannot_be_linked(store: Store, live: Path, tmp_path: Path) -> None:
    place = planted(live.with_name(".live.casnap-link"), "folder", tmp_path / "elsewhere")
    with place, pytest.raises(CasnapError, match=r"casnap-link is a folder"):
        store.pull(live)


def test_a_pull_of_a_child_frees_nothing_of_its_parent(store: Store, live: Path) -> None:
    events = store.follow(live, interval=0)
    next(events)
    assert in_child(events.close) == 0
    take(store, 1)
    assert next(events).event == "switched"
    assert_served(live, 1)
