"""A path is a store plus a name: found by walking up, made where that is safe, shared as it is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from casnap import Snapshot, StateDict, Store
from casnap.backends import Backend, LocalBackend, MemoryBackend
from casnap.cli import cli
from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    InvalidNameError,
    NotAStoreError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StoreError,
)
from casnap.view import find_view
from tests.support.faults import files
from tests.support.faulty import Fault, FaultyBackend, fail
from tests.support.mounts import NOBODY, as_nobody, needs_root, tmpfs

LARGE = {"s": StateDict(x=torch.arange(100_000))}


def tiny(x: int = 1) -> dict[str, StateDict]:
    return {"s": StateDict(x=x)}


def value_of(snapshot: Snapshot) -> object:
    return snapshot.read_object("s/x")


def names(store: Store, prefix: str | None = None) -> list[str]:
    return [snapshot.name for snapshot in store.snapshots(prefix)]


# --- finding ----------------------------------------------------------------------------------


def test_the_parent_becomes_a_store(tmp_path: Path) -> None:
    first = Snapshot.take(tmp_path / "run/step_1", LARGE)
    second = Snapshot.take(tmp_path / "run/step_2", LARGE)
    assert (tmp_path / "run/casnap-store/casnap.json").is_file()
    assert first.name == "step_1"
    assert first.path == str(tmp_path / "run/step_1")
    assert first.store.id == second.store.id
    assert first.stats.new_bytes > 800_000
    assert second.stats.new_bytes < 10_000
    assert names(Store(tmp_path / "run", create=False)) == ["step_1", "step_2"]


@pytest.mark.parametrize("times", [1, 2, 3, None])
def test_a_backend_that_does_not_answer_is_not_empty(tmp_path: Path, times: int | None) -> None:
    """Neither when it is opened nor later: a run that asked for its latest would begin anew."""
    Store(tmp_path / "run").take(tiny(), "a")
    for create in (True, False):
        backend = FaultyBackend(LocalBackend(str(tmp_path / "run")))
        with backend.during(Fault(fail(), times=times)):
            try:
                store = Store(backend, create=create)
                found = [store.latest() is not None, "a" in store]
            except BackendError:
                found = [True, True]
        assert found == [True, True]
        assert Store(backend, create=create).latest() is not None


@pytest.mark.parametrize("kind", [LocalBackend, MemoryBackend])
def test_a_backend_whose_store_has_lost_its_record(
    tmp_path: Path, kind: Callable[[str], Backend]
) -> None:
    """It is not taken for a place where no store was made yet."""
    backend = kind(str(tmp_path / "run"))
    Store(backend).take(tiny(), "a")
    backend.delete("casnap.json")
    for create in (True, False):
        with pytest.raises(DamagedError, match=r"it has roots, but casnap\.json is missing"):
            Store(backend, create=create)


def test_a_snapshot_knows_its_store(tmp_path: Path) -> None:
    class Mine(Store):
        """A store of the user's own kind."""

    store = Mine(tmp_path / "run")
    taken = store.take(LARGE, "step_1")
    pending = store.async_take(LARGE, "step_2")
    given = Snapshot("step_1", store=store)
    for snapshot in (taken, pending.wait(), given, store["step_1"], *store.snapshots()):
        assert snapshot.store is store
    opened = Snapshot(tmp_path / "run/step_1")
    assert type(opened.store) is Store
    assert opened.store is opened.store["step_2"].store
    assert opened.store.uri == store.uri


def test_the_nearest_store_above_is_used(tmp_path: Path) -> None:
    outer = Store(tmp_path).make()
    inner = find_view(tmp_path / "x/y/step", None, create=True)[0]
    assert inner.repository.config.store_id == outer.id
    for run in ("a/b/c", "a", "d"):
        snapshot = Snapshot.take(tmp_path / run / "step", LARGE)
        assert snapshot.store.id == outer.id
        assert snapshot.name == f"{run}/step"
    assert [s.stats.new_bytes > 100_000 for s in outer.snapshots()] == [True, False, False]
    assert [p.name for p in tmp_path.rglob("casnap.json")] == ["casnap.json"]
    assert torch.equal(Snapshot(tmp_path / "a/b/c/step").read_object("s/x"), LARGE["s"]["x"])


def test_a_store_inside_another_is_the_nearest(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "run/step", tiny(1))
    outer = Store(tmp_path).make()
    Snapshot.take(tmp_path / "run/step_2", tiny(2))
    Snapshot.take(tmp_path / "other/step", tiny(3))
    assert names(outer) == ["other/step"]
    assert names(Store(tmp_path / "run")) == ["step", "step_2"]
    with pytest.raises(InvalidNameError, match="is a store itself"):
        Snapshot.take(tmp_path / "run", tiny())
    with pytest.raises(InvalidNameError, match="is a store itself"):
        Snapshot(tmp_path / "run")


def test_a_file_is_no_place_for_a_snapshot(tmp_path: Path) -> None:
    run, other = Store(tmp_path / "run"), Store(tmp_path / "other")
    run.take(tiny(), "a/b")
    other.take(tiny(), "notes.txt")
    notes = tmp_path / "run/notes.txt"
    notes.write_text("mine")
    (tmp_path / "run/link").symlink_to(notes)
    for name in ("notes.txt", "notes.txt/step", "link"):
        with pytest.raises(SnapshotExistsError, match=r"(notes\.txt|link) is a file, which casnap"):
            run.take(tiny(), name, overwrite=True)
    with pytest.raises(SnapshotExistsError, match=r"notes\.txt is a file"):
        Snapshot.take(notes, tiny())
    with pytest.raises(SnapshotExistsError, match=r"notes\.txt is a file"):
        other.copy("notes.txt", to=run)
    assert names(run) == ["a/b"]
    assert notes.read_text() == "mine"


def test_a_mount_ends_the_walk(tmp_path: Path) -> None:
    outer = Store(tmp_path).make()
    with tmpfs(tmp_path / "disk", "20m") as disk:
        with pytest.raises(NotAStoreError):
            Snapshot(disk / "run/step")
        Snapshot.take(disk / "run/step", tiny(1))
        Snapshot.take(disk / "step", tiny(2))
        assert (disk / "run/casnap-store/casnap.json").is_file()
        assert (disk / "casnap-store/casnap.json").is_file()
        assert names(Store(disk)) == ["step"]
        assert value_of(Snapshot(disk / "run/step")) == 1
    assert names(outer) == []


@pytest.mark.parametrize(
    "path",
    [
        "run/step",
        "./run/step",
        "run/step/",
        "run//step",
        "run/../run/step",
        "{}/run/step",
        "{}/run/step//",
        "{}/other/../run/./step",
        "file://{}/run/step",
        "link/step",
        "{}/link/step",
        "run/back/run/step",
    ],
)
def test_ways_to_write_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "run/back").symlink_to("..")
    full = path.format(tmp_path)
    assert Snapshot.take(full, tiny()).path == str(tmp_path / "run/step")
    assert value_of(Snapshot(full)) == 1
    assert value_of(Snapshot(tmp_path / "run/step")) == 1
    assert (tmp_path / "run/casnap-store/casnap.json").is_file()


def test_a_pending_take_stays_where_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pending = Snapshot.async_take("run/step", LARGE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pending.wait().path == pending.path == str(tmp_path / "run/step")
    assert files(tmp_path / "elsewhere") == set()


def test_memory() -> None:
    with pytest.raises(NotAStoreError):
        Store("memory://of-this-test/a", create=False).make()
    Snapshot.take("memory://of-this-test/a/step_1", tiny(1))
    store = Store("memory://of-this-test/a").make()
    store.take(tiny(2), "run/step_2")
    assert names(store) == ["step_1", "run/step_2"]
    assert value_of(Snapshot("memory://of-this-test/a/step_1")) == 1
    assert value_of(Snapshot("run/step_2", store="memory://of-this-test/a")) == 2
    store.take(tiny(3), "step_1", overwrite=True)
    store.delete("run/step_2")
    assert [value_of(s) for s in store.snapshots()] == [3]
    assert names(Store("memory://of-this-test/b")) == []
    with pytest.raises(InvalidNameError, match="add a name"):
        Snapshot.take("memory://of-this-test", tiny())


def test_stores_beside_each_other_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names with slashes: once, and not where the user has named the stores."""
    for step in range(3):
        Store(tmp_path / f"named/step_{step}").take(tiny(), "model")
        Snapshot.take(tmp_path / f"ckpts/step_{step}/model", tiny())
        Snapshot.take(tmp_path / f"ckpts/step_{step}/optim", tiny())
    ckpts = tmp_path / "ckpts"
    text = f"{ckpts}/step_0 and {ckpts}/step_1 are two stores, and share no chunks"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith(text)
    assert f"`casnap init {ckpts}` before the first take" in said[0]


# --- views ------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Store:
    store = Store(tmp_path / "ckpts").make()
    for i, name in enumerate(["a/1", "b/1", "a/2", "ab/1", "top", "b/c/1"]):
        store.take(tiny(i), name)
    return store


def test_a_view_of_what_lies_below(runs: Store) -> None:
    view = Store(f"{runs.uri}/b").make()
    assert (view.id, view.prefix, view.uri) == (runs.id, "b", f"{runs.uri}/b")
    assert names(view) == ["1", "c/1"]
    assert names(view, "c") == ["c/1"]
    assert value_of(view["1"]) == 1
    assert view["1"].path == f"{runs.uri}/b/1"
    assert "1" in view
    assert "a/1" not in view
    assert names(Store(f"{runs.uri}/b/c")) == ["1"]
    taken = view.take(tiny(7), "d/2")
    assert (taken.name, taken.path) == ("d/2", f"{runs.uri}/b/d/2")
    assert value_of(runs["b/d/2"]) == 7
    view.delete("1")
    assert names(runs) == ["a/1", "a/2", "ab/1", "top", "b/c/1", "b/d/2"]
    with pytest.raises(SnapshotNotFoundError):
        view.delete("top")
    with pytest.raises(InvalidNameError):
        view.take(tiny(), "../x")
    new = Store(f"{runs.uri}/new/run", create=False)
    assert (new.latest(), names(new)) == (None, [])


def test_latest_and_snapshots_of_a_prefix(runs: Store) -> None:
    def latest(prefix: str | None = None) -> str | None:
        found = runs.latest(prefix)
        return found.name if found else None

    assert latest() == "b/c/1"
    assert latest("a") == latest("a/") == latest("a/") == "a/2"
    assert latest("b") == latest("b/c") == "b/c/1"
    assert latest("c") is latest("a/1") is None
    assert names(runs, "a") == ["a/1", "a/2"]
    runs.take(tiny(9), "a/1", overwrite=True)
    assert latest() == latest("a") == "a/1"
    assert names(runs, "a") == ["a/2", "a/1"]
    assert len(names(runs)) == 6
    assert value_of(runs["a/1"]) == 9
    runs.delete("a/1")
    assert latest("a") == "a/2"


def test_a_link_to_a_snapshot_says_how_to_tag(
    runs: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """As programs put one that moves on; a link to a run, which is above the name, likewise."""
    place = Path(runs.uri)
    (place / "latest").symlink_to("a/2")
    (place / "current").symlink_to("b")
    said = (
        f"{place}/latest is a link, and links in a store are not followed: name {place}/a/2, which "
        f"it leads to. For a name that moves on, tag a snapshot: `casnap tag {place}/NAME latest "
        "--move`, and ask for Store.tagged('latest')"
    )
    name = f"{place}/latest"
    for ask in (
        lambda: Snapshot(name).read_object("s/x"),
        lambda: runs["latest"],
        lambda: runs.delete("latest"),
        lambda: runs.copy("latest", to=place.parent / "copy"),
        lambda: runs.pull(place.parent / "served", "latest"),
    ):
        with pytest.raises(SnapshotNotFoundError) as error:
            ask()
        assert said in str(error.value)
    for arguments in (("show", name), ("ls", name), ("cp", name, place.parent / "copy")):
        result = CliRunner().invoke(cli, list(map(str, arguments)))
        assert result.exit_code == 1
        assert said in result.stderr
    with pytest.raises(SnapshotNotFoundError, match=f"current is a link.* name {place}/b, which"):
        runs["current/1"]
    assert "is a link" not in caplog.text
    assert Store(f"{place}/current").latest() is None
    assert f"holds no snapshot below 'current'. {place}/current is a link" in caplog.text
    runs.publish("latest", "a/2")
    assert value_of(runs.tagged("latest")) == 2


# --- markers ----------------------------------------------------------------------------------


def marker(store: Store, name: str) -> Path:
    return Path(store._view.repository.backend.uri, name, "casnap-snapshot.json")


def test_markers_come_and_go(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    for name in ("step_1", "deep/er/step_2", "deep/step_3"):
        snapshot = store.take(tiny(), name)
        content = json.loads(marker(store, name).read_text())
        assert content.pop("note").startswith("Only a marker")
        assert content == {
            "casnap": "snapshot",
            "name": name,
            "commit": snapshot.commit_id,
            "store": store.uri,
        }
    assert [p.name for p in (tmp_path / "store").glob("step_*")] == ["step_1"]
    again = store.take(tiny(2), "step_1", overwrite=True)
    assert json.loads(marker(store, "step_1").read_text())["commit"] == again.commit_id
    store.delete("deep/er/step_2")
    assert sorted(p.name for p in (tmp_path / "store/deep").iterdir()) == ["step_3"]
    store.delete("deep/step_3")
    assert not (tmp_path / "store/deep").exists()
    (tmp_path / "store/step_1/mine.txt").write_text("mine")
    store.delete("step_1")
    assert (tmp_path / "store/step_1/mine.txt").read_text() == "mine"
    assert not marker(store, "step_1").exists()


def test_markers_are_never_truth(tmp_path: Path) -> None:
    store = Store(tmp_path / "store").make()
    store.take(tiny(1), "run/step_1")
    shutil.copytree(tmp_path / "store/run/step_1", tmp_path / "store/run/step_2")
    shutil.rmtree(tmp_path / "store/run/step_1")
    assert names(store) == ["run/step_1"]
    assert value_of(Snapshot(tmp_path / "store/run/step_1")) == 1
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "store/run/step_2")
    store.take(tiny(2), "run/step_2")
    store.delete("run/step_1")
    assert names(store) == ["run/step_2"]


def test_a_marker_that_cannot_be_written_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "store").make()
    (tmp_path / "store/step/casnap-snapshot.json").mkdir(parents=True)
    store.take(tiny(), "step")
    assert "marker" in caplog.text
    assert value_of(store["step"]) == 1
    caplog.clear()
    store.delete("step")
    assert "marker" in caplog.text
    assert names(store) == []
    assert (tmp_path / "store/step/casnap-snapshot.json").is_dir()


# --- making -----------------------------------------------------------------------------------


@pytest.fixture
def crowded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return what is HOME and what is the temp folder from now on."""
    home, temp = tmp_path / "home", tmp_path / "temp"
    home.mkdir()
    temp.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    return home, temp


def test_where_no_store_is_made_unasked(crowded: tuple[Path, Path]) -> None:
    (crowded[0] / "link").symlink_to(crowded[0])
    for folder in (*crowded, crowded[0] / "link", crowded[0] / "x/..", "/", "/tmp", "/dev/shm"):
        for take in (Snapshot.take, Snapshot.async_take):
            with pytest.raises(StoreError, match="casnap init"):
                take(Path(folder, "casnap-test-step"), tiny())
        assert not Path(folder, "casnap.json").exists()
    for folder in crowded:
        Snapshot.take(folder / "ckpts/step", tiny())
        assert (folder / "ckpts/casnap-store/casnap.json").is_file()


def test_where_a_store_is_made_when_asked(crowded: tuple[Path, Path]) -> None:
    home, temp = crowded
    Store(home).make()
    assert CliRunner().invoke(cli, ["init", str(temp)]).exit_code == 0
    for folder in crowded:
        assert Snapshot.take(folder / "step", tiny()).store.uri == str(folder)
        assert Snapshot.take(folder / "run/step", tiny()).store.uri == str(folder)


def test_a_folder_of_torchsnapshot(tmp_path: Path) -> None:
    (tmp_path / "run/step").mkdir(parents=True)
    (tmp_path / "run/step/.snapshot_metadata").write_text("version: 0.1.0")
    for use in (
        lambda: Snapshot.take(tmp_path / "run/step", tiny()),
        lambda: Snapshot.take(tmp_path / "run/step", tiny(), overwrite=True),
        lambda: Snapshot.async_take(tmp_path / "run/step", tiny()),
        lambda: Snapshot(tmp_path / "run/step"),
    ):
        with pytest.raises(StoreError, match=r"TorchSnapshot.*another path"):
            use()
    assert files(tmp_path) == {"run/step/.snapshot_metadata"}
    Snapshot.take(tmp_path / "run/step_2", tiny())


def test_the_store_itself_is_no_snapshot(tmp_path: Path) -> None:
    Store(tmp_path / "store").make()
    (tmp_path / "link").symlink_to("store")
    for path in ("store", "store/", "link", "store/../store"):
        for use in (lambda p: Snapshot.take(p, tiny()), Snapshot):
            with pytest.raises(InvalidNameError, match="needs a name"):
                use(f"{tmp_path}/{path}")


def test_a_creation_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    whole = Store(tmp_path / "store").make()
    finish: list[Callable[[], object]] = [
        lambda: Store(tmp_path / "store"),
        lambda: Snapshot.take(tmp_path / "store/step", tiny()),
        lambda: CliRunner().invoke(cli, ["init", str(tmp_path / "store")]),
    ]
    for go_on in finish:
        for folder in ("roots", "packs", "index", "tmp"):
            shutil.rmtree(tmp_path / "store/casnap-store" / folder, ignore_errors=True)
        with pytest.raises(NotAStoreError, match="no root"):
            Store(tmp_path / "store", create=False).snapshots()
        with pytest.raises(NotAStoreError, match="no root"):
            Snapshot(tmp_path / "store/step")
        go_on()
        again = Store(tmp_path / "store", create=False)
        assert again.id == whole.id
        assert len(names(again)) <= 1


@pytest.mark.parametrize("left", ["packs", "index", "packs index"])
def test_a_store_that_lost_its_roots_is_not_made_empty(tmp_path: Path, left: str) -> None:
    Snapshot.take(tmp_path / "store/step", LARGE)
    for folder in {"roots", "packs", "index"} - set(left.split()):
        shutil.rmtree(tmp_path / "store/casnap-store" / folder)
    before = files(tmp_path)
    for use in (
        lambda: Store(tmp_path / "store").snapshots(),
        lambda: Store(tmp_path / "store").take(tiny(), "new"),
        lambda: Snapshot.take(tmp_path / "store/new", tiny()),
        lambda: Snapshot.async_take(tmp_path / "store/new", tiny()),
        lambda: Snapshot(tmp_path / "store/step"),
    ):
        with pytest.raises(CasnapError, match="no root"):
            use()
    assert files(tmp_path) == before


# --- others -----------------------------------------------------------------------------------


def test_a_link_to_a_file_of_ours_is_no_store_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Store(tmp_path / "ours").make()
    Store(tmp_path / "planted").make()
    (tmp_path / "planted/casnap-store/casnap.json").unlink()
    (tmp_path / "planted/casnap-store/casnap.json").symlink_to(
        tmp_path / "ours/casnap-store/casnap.json"
    )
    needs_root()
    os.lchown(tmp_path / "planted/casnap-store/casnap.json", NOBODY, NOBODY)
    with pytest.raises(StoreError, match=f"uid {NOBODY}"):
        Snapshot.take(tmp_path / "planted/step", tiny())


def paths_below(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if not p.is_symlink()]


@pytest.mark.parametrize("mode", [0o775, 0o700, 0o2770, 0o755])
@pytest.mark.parametrize("umask", [0o077, 0o022, 0o000])
@pytest.mark.usefixtures("collected_by_hand")
def test_modes_and_group_follow_the_folder_of_the_store(
    tmp_path: Path, mode: int, umask: int
) -> None:
    """If no other user may write to the folder, the umask counts too."""
    folder = tmp_path / "store"
    folder.mkdir()
    group = NOBODY if os.geteuid() == 0 else folder.stat().st_gid
    os.chown(folder, -1, group)
    folder.chmod(mode)
    before = os.umask(umask)
    try:
        store = Store(folder).make()
        store.take(LARGE, "run/step")
        store.take(tiny(), "run/step", overwrite=True)
    finally:
        os.umask(before)
    assert len(paths_below(folder)) > 10
    given = mode if mode & 0o2022 else mode & ~umask
    for path in paths_below(folder):
        found = path.stat()
        expected = given if path.is_dir() else given & 0o666
        assert oct(stat.S_IMODE(found.st_mode)) == oct(expected), path
        assert found.st_gid == group, path


def test_two_users_of_one_group_share_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    folder = tmp_path / "store"
    folder.mkdir()
    os.chown(folder, -1, NOBODY)
    folder.chmod(0o2775)
    before = os.umask(0o077)
    try:
        Store(folder).take(tiny(1), "run/step_1")
    finally:
        os.umask(before)

    def work() -> None:
        os.umask(0o077)
        store = Store(folder).make()
        assert value_of(store["run/step_1"]) == 1
        store.take(tiny(2), "run/step_2")
        store.take(tiny(3), "run/step_1", overwrite=True)

    as_nobody(tmp_path, monkeypatch, work)
    store = Store(folder).make()
    assert {s.name: value_of(s) for s in store.snapshots()} == {"run/step_1": 3, "run/step_2": 2}
    marked = json.loads(marker(store, "run/step_1").read_text())
    assert marked["commit"] == store["run/step_1"].commit_id
    store.delete("run/step_2")
    store.take(tiny(4), "run/step_1", overwrite=True)
    assert names(store) == ["run/step_1"]


# --- stores that were made unasked -------------------------------------------------------------


def test_a_store_that_a_path_has_made_captures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take right in a project's folder made every later store below a view of that one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    Snapshot.take("ckpt", tiny(1))
    assert {p.name for p in tmp_path.iterdir()} - {"casnap-cache"} == {
        "casnap-store",
        "ckpt",
        "train.py",
    }
    Store("ckpts").take(tiny(2), "step_1")
    Snapshot.take("runs/a/step_1", tiny(3))
    assert names(Store(".")) == ["ckpt"]
    assert names(Store("ckpts")) == ["step_1"]
    assert names(Store("runs/a")) == ["step_1"]
    shutil.rmtree("ckpts")
    assert Store("ckpts").latest() is None
    # What is right in the folder is found, also by the command.
    assert value_of(Snapshot("ckpt")) == 1
    done = CliRunner().invoke(cli, ["show", "ckpt"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("how", ["init", "a deeper name"])
def test_a_store_that_is_to_serve_all_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Snapshot.take("all/ckpt", tiny(1))
    if how == "init":
        assert CliRunner().invoke(cli, ["init", "all"]).exit_code == 0
    else:
        Store("all").take(tiny(2), "run/step_0")
    Snapshot.take("all/run/step_1", tiny(3))
    assert "run/step_1" in names(Store("all"))
    assert not (tmp_path / "all/run/casnap-store").exists()


def test_no_store_is_made_in_the_folder_of_a_snapshot(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "ckpts/step_1", tiny(1))
    for use in (
        lambda: Snapshot.take(tmp_path / "ckpts/step_1/x", tiny()),
        lambda: Store(tmp_path / "ckpts/step_1/x").take(tiny(), "y"),
    ):
        with pytest.raises(CasnapError, match="is a snapshot"):
            use()
    assert names(Store(tmp_path / "ckpts")) == ["step_1"]


def test_the_folder_of_a_snapshot_that_is_copied_alone(tmp_path: Path) -> None:
    """It holds a marker only; the error says where the bytes were, and how to copy them."""
    Snapshot.take(tmp_path / "ckpts/step_1", tiny(1))
    shutil.copytree(tmp_path / "ckpts/step_1", tmp_path / "there/step_1")
    for use in (
        lambda: Snapshot(tmp_path / "there/step_1"),
        lambda: Store(tmp_path / "there/step_1", create=False),
    ):
        with pytest.raises(NotAStoreError, match=rf"only a marker.*{tmp_path}/ckpts.*casnap cp"):
            use()
    assert "only a marker" in CliRunner().invoke(cli, ["ls", str(tmp_path / "there/step_1")]).output


def test_a_path_that_has_no_text_of_its_own(tmp_path: Path) -> None:
    class Place:
        def __fspath__(self) -> str:
            return str(tmp_path / "store")

    Store(Place()).make()
    assert (tmp_path / "store/casnap-store").is_dir()


def test_commands_in_messages_are_for_a_shell(tmp_path: Path) -> None:
    """Who copies them gets one word for each path, whatever its name."""
    folder = tmp_path / "my store; echo 'bad'"
    word = shlex.quote(str(folder))
    folder.mkdir()
    with pytest.raises(NotAStoreError) as caught:
        Store(folder, create=False).snapshots()
    assert f"`casnap init {word}`" in str(caught.value)
    torch.save({"w": torch.ones(2)}, folder / "a b.pt")
    with pytest.raises(CasnapError) as caught_file:
        Snapshot(folder / "a b.pt").restore({})
    words = shlex.split(re.search("`(casnap import .*)`", str(caught_file.value))[1])
    assert words == ["casnap", "import", str(folder / "a b.pt"), "STORE/NAME"]
