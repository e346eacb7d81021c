"""Who gets to see what is taken: stores that others put above it, modes, and links."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import casnap.storage.opening.location
from casnap import Snapshot, StateDict, Store
from casnap.errors import BackendError, CasnapError, SnapshotNotFoundError, StoreError
from casnap.integrations.trainers import Save
from casnap.take.capture import LiveState
from casnap.take.options import TakeOptions
from tests.support.faults import files, in_child
from tests.support.mounts import NOBODY, as_nobody, let_others_in, needs_root

STATE = {"s": StateDict(x=torch.arange(100_000))}
NOBODY_KNOWS = 54321


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store of ours that a group shares."""
    needs_root()
    # It is said once for a place, and these places have names that were used before.
    casnap.storage.opening.location._warn.cache_clear()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, -1, NOBODY)
    folder.chmod(0o2775)
    Store(folder).take(STATE, "run/step")
    return folder


def planted(folder: Path, shared: Path, mode: int, owner: int) -> Path:
    """Make the store that another user puts elsewhere, as a copy of ours."""
    folder.mkdir()
    shutil.copytree(shared / "casnap-store", folder / "casnap-store")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, NOBODY)
    (folder / "casnap-store").chmod(mode)
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_store_of_another_user_in_a_folder_of_everybody(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    place = planted(tmp_path / "scratch", shared, mode, NOBODY)
    before = files(place)
    snapshot = Snapshot.take(place / "me/run/step", STATE)
    assert snapshot.store.uri == str(place / "me/run")
    assert before <= files(place)
    assert all(key in before or key.startswith("me/") for key in files(place))
    assert f"{place} is a store of another user" in caplog.text
    assert "skips it" in caplog.text
    assert Snapshot(place / "me/run/step").commit_id == snapshot.commit_id


@pytest.mark.parametrize(
    ("mode", "owner", "why"), [(0o2775, 0, "may write to"), (0o755, NOBODY, "of another user")]
)
def test_a_store_that_is_not_ours_alone(
    tmp_path: Path, shared: Path, mode: int, owner: int, why: str
) -> None:
    """It is read by any path, and written to where it is named."""
    place = planted(tmp_path / "project", shared, mode, owner)
    before = files(place)
    assert torch.equal(Snapshot(place / "run/step").read_object("s/x"), STATE["s"]["x"])
    view = Store(place / "run")
    assert [s.name for s in view.snapshots()] == ["step"]
    for use in (
        lambda: Snapshot.take(place / "run/step_2", STATE),
        lambda: Snapshot.async_take(place / "run/step_2", STATE),
        lambda: view.take(STATE, "step_2"),
        lambda: view.async_take(STATE, "step_2"),
        lambda: view.delete("step"),
        lambda: view.tag("step", "best"),
        lambda: view.gc(grace=0),
        lambda: Store(place / "run").make(),
        lambda: Store(tmp_path / "shared").copy("run/step", to=place / "run", rename="a"),
        lambda: pickle.loads(pickle.dumps(view)).take(STATE, "step_2"),
    ):
        with pytest.raises(StoreError, match=rf"{why}.*Store\('{place}'\).*`chown -R` its cas"):
            use()
    assert files(place) == before
    Snapshot.take("run/step_2", STATE, store=place)
    assert Snapshot("run/step_2", store=place).store.uri == str(place)


@pytest.mark.parametrize("given", ["group", "owner"])
def test_a_store_of_which_only_the_folder_was_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """By chgrp or chown, without -R."""
    place = tmp_path / "given"
    Store(place).take(STATE, "run/step")
    needs_root()
    for folder in (place, place / "casnap-store"):
        os.chown(folder, NOBODY if given == "owner" else -1, NOBODY)
        folder.chmod(0o2775)

    def work() -> None:
        with pytest.raises(BackendError, match=r"may this user have it.*do the same with -R"):
            Store(place).take({"s": StateDict(x=torch.ones(3))}, "run/step_2")

    as_nobody(tmp_path, monkeypatch, work)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755])
def test_a_store_of_another_user_right_above_a_snapshot(
    tmp_path: Path, shared: Path, mode: int
) -> None:
    """To name a folder is not to name the store that others made of it."""
    place = planted(tmp_path / "scratch", shared, mode, NOBODY)
    (tmp_path / "link").symlink_to(place)
    before = files(place)
    for path in (place / "step", tmp_path / "link/step"):
        with pytest.raises(StoreError, match="of another user"):
            Snapshot.take(path, STATE)
        with pytest.raises(SnapshotNotFoundError, match="nearest: run/step"):
            Snapshot(path)
    assert files(place) == before
    assert Snapshot.take("step", STATE, store=place).store.uri == str(place)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755])
def test_a_store_of_another_user_in_the_folder_that_a_trainer_saves_to(
    tmp_path: Path, shared: Path, mode: int
) -> None:
    """It gets neither the names right in that folder nor those with slashes."""
    place = planted(tmp_path / "scratch", shared, mode, NOBODY)
    before = files(place)
    for name in ("step_5", "step_5/model"):
        with pytest.raises(StoreError, match="of another user"):
            Save(place / name, TakeOptions(), root=place)
    assert files(place) == before


def test_the_folder_that_a_trainer_saves_to_is_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store that would serve all below is made there unasked."""
    monkeypatch.setenv("HOME", str(tmp_path))
    save = Save(tmp_path / "step_5/model", TakeOptions(), root=tmp_path)
    assert save.take(lambda: LiveState(STATE)).store.uri == str(tmp_path / "step_5")


@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_a_store_of_another_user_above_a_link_to_ours(
    tmp_path: Path, shared: Path, mode: int
) -> None:
    """It has snapshots of the names below the link; still it does not get those that are taken."""
    place = planted(tmp_path / "scratch", shared, mode, NOBODY)
    ours = Store(tmp_path / "ours").make()
    (place / "run").symlink_to(tmp_path / "ours")
    before = files(place)
    if mode & 0o002:
        assert Snapshot.take(place / "run/step", STATE).store.uri == ours.uri
    else:
        with pytest.raises(StoreError, match="of another user"):
            Snapshot.take(place / "run/step", STATE)
    assert files(place) == before


def test_a_link_in_place_of_the_folder_of_a_store(tmp_path: Path, shared: Path) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    (place / "casnap-store").symlink_to(shared / "casnap-store")
    for use in (
        lambda: Snapshot.take(place / "me/step", STATE),
        lambda: Snapshot.take(place / "step", STATE),
        lambda: Store(place).snapshots(),
    ):
        with pytest.raises(StoreError):
            use()
    place.chmod(0o1777)
    assert Snapshot.take(place / "me/step", STATE).store.uri == str(place / "me")


@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("owner", [NOBODY, 0])
def test_what_we_made_in_a_folder_of_everybody_is_ours(
    tmp_path: Path, mode: int, owner: int
) -> None:
    needs_root()
    place = tmp_path / "scratch"
    place.mkdir()
    os.chown(place, owner, owner)
    place.chmod(mode)
    for i in range(2):
        assert Snapshot.take(place / f"step_{i}", STATE).store.uri == str(place)


def test_roots_that_lead_elsewhere(tmp_path: Path, shared: Path) -> None:
    (shared / "casnap-store/roots").rename(tmp_path / "elsewhere")
    (shared / "casnap-store/roots").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendError, match="roots is a link"):
        Snapshot.take("run/step_2", STATE, store=shared)


def test_a_store_of_root_is_found_by_walking_up(tmp_path: Path, shared: Path) -> None:
    shared.chmod(0o755)
    (shared / "casnap-store").chmod(0o755)
    assert Snapshot.take(shared / "run/step_2", STATE).store.uri == str(shared)


def test_roots_in_a_temp_folder_stop_no_take(tmp_path: Path, shared: Path) -> None:
    """A user who may write to a store of ours can move its roots to a place open to all."""
    place = tmp_path / "temp"
    (place / "casnap-store").mkdir(parents=True)
    (shared / "casnap-store/roots").rename(place / "casnap-store/roots")
    os.chown(place, NOBODY, NOBODY)
    place.chmod(0o1777)
    assert Snapshot.take(place / "me/step", STATE).store.uri == str(place / "me")
    assert torch.equal(Snapshot(place / "me/step").read_object("s/x"), STATE["s"]["x"])
    for use in (lambda: Store(place), lambda: Snapshot.take(place / "step", STATE)):
        with pytest.raises(CasnapError, match="damaged store"):
            use()


def test_roots_of_others_are_no_damaged_store_of_ours(tmp_path: Path, shared: Path) -> None:
    place = planted(tmp_path / "theirs", shared, 0o755, NOBODY)
    (place / "casnap-store/casnap.json").unlink()
    assert Snapshot.take(place / "me/step", STATE).store.uri == str(place / "me")


# --- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["disk/run2", "ckpts/run1", "disk/with/another/store/run"])
def test_a_run_that_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Below a store a link is a name like any other, whatever it leads to."""
    store = Store(tmp_path / "ckpts").make()
    Store(tmp_path / "disk/with/another/store").make()
    (tmp_path / target).mkdir(parents=True)
    (tmp_path / "ckpts/run2").symlink_to(tmp_path / target)
    monkeypatch.chdir(tmp_path)
    taken = Snapshot.take("ckpts/run2/x", STATE)
    deeper = Snapshot.take("ckpts/run2/deep/y", STATE)
    assert [s.name for s in store.snapshots()] == ["run2/x", "run2/deep/y"]
    for snapshot in (taken, deeper, store["run2/x"], Store("ckpts/run2")["deep/y"]):
        assert Snapshot(snapshot.path).commit_id == snapshot.commit_id
    assert Snapshot("ckpts/run2/x").commit_id == store["run2/x"].commit_id
    assert Store("ckpts/run2").uri == f"{store.uri}/run2"
    assert Snapshot.take("ckpts/run2/../z", STATE).path == str((tmp_path / target).parent / "z")


def test_a_link_to_a_store_leads_to_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "disk/store").make()
    (tmp_path / "link").symlink_to(tmp_path / "disk/store")
    (tmp_path / "run").symlink_to(tmp_path / "disk/store/run")
    for i, way in enumerate(("link", "run")):
        snapshot = Snapshot.take(tmp_path / way / str(i), STATE)
        assert snapshot.store.uri == store.uri
        assert Snapshot(snapshot.path).commit_id == snapshot.commit_id
    assert [s.name for s in store.snapshots()] == ["0", "run/1"]


# --- a home of no user -------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["CASNAP_CACHE_DIR", "XDG_CACHE_HOME", None])
def test_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str | None
) -> None:
    """Neither HOME nor an entry of the user, as in many containers."""
    needs_root()
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, NOBODY_KNOWS, NOBODY_KNOWS)
    let_others_in(tmp_path)
    for name in ("HOME", "CASNAP_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    if cache:
        monkeypatch.setenv(cache, str(own / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(own))

    def work() -> None:
        os.setgid(NOBODY_KNOWS)
        os.setuid(NOBODY_KNOWS)
        Snapshot.take(own / "ckpts/run/step", STATE)
        assert torch.equal(Snapshot(own / "ckpts/run/step").read_object("s/x"), STATE["s"]["x"])

    assert in_child(work) == 0
    assert list(own.rglob("*/data.mdb"))


# --- letters that the file system lacks ---------------------------------------------------------

_UNWRITABLE = """
import os, sys
from casnap import Retention, StateDict, Store
assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
store = Store(sys.argv[1]).make()
first = store.take({"s": StateDict(x=1)}, "gr\\u00f6\\u00dfe/1")
second = {"s": StateDict(x=2)}
store.async_take(second, "gr\\u00f6\\u00dfe/2", retention=Retention(keep_last=1)).wait()
assert [s.name for s in store.snapshots()] == ["gr\\u00f6\\u00dfe/2"]
store.delete("gr\\u00f6\\u00dfe/2")
assert store.snapshots() == []
"""


@pytest.mark.slow
def test_a_marker_whose_name_cannot_be_written(tmp_path: Path) -> None:
    """Nothing that fails after the commit makes a take, or a deletion, fail."""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", _UNWRITABLE, str(tmp_path / "store")]
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert done.stderr.count(b"is committed, but its marker file cannot be written") == 2


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """Return a folder like /tmp."""
    needs_root()
    casnap.storage.opening.location._warn.cache_clear()
    folder = tmp_path / "everybodys"
    folder.mkdir()
    folder.chmod(0o1777)
    (tmp_path / "victim").mkdir()
    return folder


def link(at: Path, to: Path, owner: int) -> Path:
    at.symlink_to(to)
    os.lchown(at, owner, owner)
    return at


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_nothing_is_made_through_a_link_of_another_user(
    tmp_path: Path, everybodys: Path, mode: int
) -> None:
    everybodys.chmod(mode)
    theirs = link(everybodys / "ckpts", tmp_path / "victim", NOBODY)
    through = link(tmp_path / "ours", theirs, os.geteuid())
    source = Store(tmp_path / "source")
    source.take(STATE, "a")
    before = files(tmp_path)
    for way in (theirs, through, theirs / "below", everybodys / "x/../ckpts", theirs / "../run"):
        for use in (
            Store(way).make,
            lambda way=way: Snapshot.take(way / "step", STATE),
            lambda way=way: Snapshot.async_take(way / "step", STATE),
            lambda way=way: Snapshot.take("step", STATE, store=way),
            lambda way=way: source.copy(to=way),
            lambda way=way: Store(tmp_path / "source", mirror=way).wait_mirrored(20),
            lambda way=way: Store(way, mirror=tmp_path / "mirror"),
        ):
            with pytest.raises(CasnapError, match=rf"{theirs} is a link of another user.* name /"):
                use()
        assert Store(way).latest() is None
    assert files(tmp_path) == before
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_store_behind_a_link_of_another_user_is_read(tmp_path: Path, everybodys: Path) -> None:
    """But not pruned: the link may lead to any store of this user's."""
    Store(tmp_path / "victim").take(STATE, "a")
    theirs = link(everybodys / "ckpts", tmp_path / "victim", NOBODY)
    assert torch.equal(Snapshot(theirs / "a").read_object("s/x"), STATE["s"]["x"])
    store = Store(theirs)
    assert store["a"].name == "a"
    for use in (
        lambda: store.take(STATE, "b"),
        lambda: store.delete("a"),
        store.gc,
        lambda: Snapshot.take(theirs / "b", STATE),
    ):
        with pytest.raises(StoreError, match=f"is a link of another user.* name {tmp_path}/victim"):
            use()
    Store(tmp_path / "victim").take(STATE, "b")
    assert [s.name for s in store.snapshots()] == ["a", "b"]


def test_links_that_are_followed_as_ever(tmp_path: Path, everybodys: Path) -> None:
    """Our own, root's, those of the folder's owner, and all where not every user may write."""
    closed = tmp_path / "closed"
    closed.mkdir()
    of_another = tmp_path / "of-another"
    of_another.mkdir()
    os.chown(of_another, NOBODY, NOBODY)
    of_another.chmod(0o1777)
    for number, (folder, owner) in enumerate(
        [(everybodys, os.geteuid()), (closed, NOBODY), (of_another, NOBODY), (of_another, 0)]
    ):
        place = link(folder / f"{number}", tmp_path / "victim", owner)
        Snapshot.take(place / f"step_{number}", STATE)
    assert len(Store(tmp_path / "victim").snapshots()) == 4
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CasnapError):
        Store(tmp_path / "loop/x").make()
