"""Another store comes to the path of a store that is open.

What was begun with the first one spoils neither.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from casnap import Retention, StateDict, Store
from casnap.errors import BackendError, CasnapError, StoreError
from tests.support.faults import backend_faults, content_of, untouched
from tests.support.sweep import spread


@pytest.fixture(params=["at once", "walked"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have the kernel resolve paths, and walk them, as where it cannot."""
    if request.param == "at once":
        yield
        return
    with mock.patch("casnap.backends.local_files.safe_paths.has_openat2", return_value=False):
        yield


def state(step: int) -> dict[str, StateDict]:
    generator = torch.Generator().manual_seed(step)
    return {"s": StateDict(x=torch.randn(50_000, generator=generator), step=step)}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store of five snapshots; ``other`` is one of three. Use copies."""
    folder = tmp_path_factory.mktemp("both")
    for name, first, count in (("store", 0, 5), ("other", 10, 3)):
        store = Store(folder / name)
        for step in range(first, first + count):
            store.take(state(step), f"run/step_{step}")
    return folder


@pytest.fixture
def path(both: Path, tmp_path: Path) -> Path:
    """Return the store of five snapshots; the other one is beside it."""
    shutil.copytree(both, tmp_path, dirs_exist_ok=True)
    return tmp_path / "store"


def swap(path: Path) -> None:
    """Move the other store to the path of the first."""
    path.rename(path.with_name("first"))
    path.with_name("other").rename(path)


USES: dict[str, Callable[[Store], object]] = {
    "take": lambda store: store.take(state(7), "run/step_7"),
    "async take": lambda store: store.async_take(state(7), "run/step_7").wait(),
    "overwrite": lambda store: store.take(state(7), "run/step_10", overwrite=True),
    "delete": lambda store: store.delete("run/step_10"),
    "delete a snapshot": lambda store: store.delete("run/step_0"),
    "prune": lambda store: store.prune(Retention(keep_last=1)),
    "tag": lambda store: store["run/step_10"].tag("best"),
    "gc": lambda store: store.gc(grace=0),
    "repair": lambda store: store.repair(),
    "configure": lambda store: store.configure(codec="zstd"),
    "list": lambda store: store.snapshots(),
    "check": lambda store: store.check(),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("use", USES)
def test_before_a_use(path: Path, use: str) -> None:
    store = Store(path)
    store.take(state(6), "run/step_6")
    swap(path)
    with (
        untouched(path),
        untouched(path.with_name("first")),
        pytest.raises(StoreError, match="another store"),
    ):
        USES[use](store)
    assert Store(path).check(data=True).ok
    assert Store(path.with_name("first")).check(data=True).ok


def test_before_the_first_use(path: Path) -> None:
    store = Store(path)
    swap(path)
    with untouched(path), pytest.raises(StoreError, match="another store"):
        store.take(state(7), "run/step_7")


def test_a_store_that_is_made_anew_at_the_path(path: Path) -> None:
    """Its folder may have the same inode."""
    store = Store(path)
    store.snapshots()
    shutil.rmtree(path)
    Store(path).take(state(20), "run/step_20")
    with untouched(path), pytest.raises(StoreError, match="another store"):
        store.take(state(7), "run/step_7")


CHANGES = ["write", "put_if_absent", "delete", "keep_copy", "sync", "tidy"]


@pytest.mark.sweep
@pytest.mark.parametrize("use", ["take", "delete a snapshot", "gc", "repair"])
@pytest.mark.usefixtures("collected_by_hand")
def test_within_a_use(both: Path, path: Path, use: str) -> None:
    """Before each of its calls that change something."""

    def prepared() -> Store:
        for folder in (path, path.with_name("other"), path.with_name("first")):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(both, path.parent, dirs_exist_ok=True)
        store = Store(path)
        store.take(state(6), "run/step_6")
        Store(path).delete("run/step_1")
        if use == "repair":
            (path / "casnap-store/casnap.json").write_bytes(b"torn")
        return store

    store = prepared()
    with backend_faults(names=CHANGES) as calls:
        USES[use](store)
    assert calls.count > 3
    for k in spread(calls.count, offset=0, most=5):
        store = prepared()
        with (
            untouched_other(path),
            backend_faults(k, partial(swap, path), CHANGES),
            suppress(CasnapError),
        ):
            USES[use](store)
        assert path.with_name("first").exists()
        if use != "repair":
            assert Store(path.with_name("first")).check(data=True).ok


@contextmanager
def untouched_other(path: Path) -> Iterator[None]:
    before = content_of(path.with_name("other"))
    yield
    after = content_of(path if path.with_name("first").exists() else path.with_name("other"))
    ours = {f.relative_to(path.parent).parts[1:]: c for f, c in before.items()}
    assert {f.relative_to(path.parent).parts[1:]: c for f, c in after.items()} == ours


def test_a_record_that_is_damaged_or_touched_is_still_the_stores(path: Path) -> None:
    record = path / "casnap-store/casnap.json"
    store = Store(path)
    store.take(state(6), "run/step_6")
    record.chmod(0o664)
    store.take(state(7), "run/step_7")
    content = record.read_bytes()
    for torn in (b"", b"{}", (path.with_name("other") / "casnap-store/casnap.json").read_bytes()):
        record.write_bytes(torn)
        store.take(state(8), "run/step_8", overwrite=True)
        assert store.repair().ok
        assert record.read_bytes() == content
    record.unlink()
    assert store.repair().ok
    assert record.read_bytes() == content
    assert Store(path).check(data=True).ok


def test_a_copy_of_the_store_in_its_place_is_used(path: Path) -> None:
    """As after a restore from a backup, or where a file system is mounted again."""
    store = Store(path)
    store.take(state(6), "run/step_6")
    shutil.copytree(path, path.with_name("copy"))
    path.rename(path.with_name("first"))
    path.with_name("copy").rename(path)
    store.take(state(7), "run/step_7")
    assert [s.name for s in store.snapshots()][-1] == "run/step_7"
    assert Store(path).check(data=True).ok


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("how", ["moved", "its inner folder", "with what is above it", "deleted"])
def test_a_store_that_is_gone(path: Path, how: str) -> None:
    """All that asks the store says so, in the same words; and nothing is made at its place."""
    store, other = Store(path), Store(path.with_name("other"))
    snapshot = store["run/step_0"]
    Store(path)["run/step_0"].read_object("s/x")  # reads of the cache are no reads of the store
    if how == "moved":
        path.rename(path.with_name("first"))
    elif how == "its inner folder":
        (path / "casnap-store").rename(path / "first")
    elif how == "with what is above it":
        moved = path.parent.rename(path.parent.with_name(f"{path.parent.name}-moved"))
        path.parent.mkdir()
        shutil.copytree(moved / "other", path.with_name("other"))
    else:
        shutil.rmtree(path)
    path.with_name("out.versions").mkdir(exist_ok=True)
    (path.with_name("out.versions") / ".lock").touch()
    before = sorted(path.parent.rglob("*"))
    for use in (
        store.latest,
        store.snapshots,
        lambda: store["run/step_0"],
        lambda: "run/step_0" in store,
        lambda: snapshot.restore(state(0)),
        lambda: snapshot.read_object("s/x"),
        lambda: snapshot.export(path.with_name("out.pt"), path="s"),
        store.check,
        store.gc,
        lambda: store.gc(dry_run=True),
        store.usage,
        store.repair,
        lambda: store.diff("run/step_0", "run/step_1"),
        lambda: store.settings,
        lambda: store.configure(codec="zstd"),
        lambda: store.delete("run/step_0"),
        lambda: store.tag("run/step_0", "best"),
        lambda: store.rewind("run/step_0"),
        lambda: store.prune(Retention(keep_last=1)),
        lambda: store.copy(to=other),
        lambda: other.copy(to=store),
        lambda: store.pull(path.with_name("out"), "run"),
        lambda: next(iter(store.follow(path.with_name("out"), "run"))),
        lambda: store.take(state(9), "run/step_9"),
        lambda: store.async_take(state(9), "run/step_9").wait(),
    ):
        with pytest.raises(BackendError, match=f"^{path} is gone, or was moved, since it was open"):
            use()
    assert sorted(path.parent.rglob("*")) == before


def test_a_store_that_goes_before_a_take_announces_itself(tmp_path: Path) -> None:
    """As when its file system is unmounted: the error is typed, and says so."""
    store = Store(tmp_path / "store")
    store.take(state(0), "step_0")
    go = partial((tmp_path / "store").rename, tmp_path / "away")
    with (
        backend_faults(0, go, names=["announced"]) as calls,
        pytest.raises(BackendError, match="is gone, or was moved"),
    ):
        store.async_take(state(1), "step_1").wait()
    assert calls.struck
    assert not (tmp_path / "store").exists()
    (tmp_path / "away").rename(tmp_path / "store")
    store.take(state(1), "step_1")
