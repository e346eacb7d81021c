"""A name that is a path into the store is the name there; no other path is a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from casnap import Snapshot, Store
from casnap.errors import InvalidNameError
from tests.support.copies import names
from tests.support.faults import app_state


@pytest.mark.parametrize("run", ["", "/run1"])
def test_every_call_takes_a_path_into_the_store(tmp_path: Path, run: str) -> None:
    Store(tmp_path / "store").make()
    root = f"{tmp_path}/store{run}"
    store = Store(root)
    path = f"{root}/a/step_5"
    snapshot = store.take(app_state(5), path)
    assert (snapshot.name, snapshot.path) == ("a/step_5", path)
    assert store.async_take(app_state(6), f"{root}/a/step_6").wait().name == "a/step_6"
    assert names(store) == ["a/step_5", "a/step_6"]
    assert store[path].commit_id == store["a/step_5"].commit_id == Snapshot(path).commit_id
    assert path in store
    store.tag(path, "best")
    store.publish("stable", path)
    assert store[path].tags == ("best", "stable")
    store.untag(path, "best", "stable")
    last = store.latest(f"{root}/a")
    assert last is not None
    assert last.name == "a/step_6"
    assert [s.name for s in store.snapshots(root)] == names(store)
    assert store.copy(path, to=tmp_path / "copy").copied == ["a/step_5"]
    assert store._pull_source(path).name == store._view.full_name("a/step_5")
    assert store.check(name=path).ok
    assert store.rewind(path).name == "a/step_5"
    assert Snapshot.take(f"{root}/a/step_7", app_state(7), store=store).name == "a/step_7"
    assert Snapshot(f"{root}/a/step_7", store=root).name == "a/step_7"
    store.delete(path)
    assert path not in store


def test_a_link_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "link").symlink_to("store")
    store.take(app_state(1), f"{tmp_path}/link/step_1")
    monkeypatch.chdir(tmp_path)
    Store("store").take(app_state(2), "store/step_2")
    assert names(store) == ["step_1", "step_2"]


def test_a_name_may_begin_like_the_path_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is taken off once, however deep the call: ``a/a/step`` is ``a/step`` in ``a``."""
    monkeypatch.chdir(tmp_path)
    store = Store("a")
    store.take(app_state(1), "step")
    inner = store.take(app_state(2), "a/a/step")
    assert (inner.name, names(store)) == ("a/step", ["step", "a/step"])
    assert store["a/a/step"].commit_id == inner.commit_id
    assert store.async_take(app_state(3), "a/a/later").wait().name == "a/later"
    store.publish("stable", inner)
    assert inner.name == store.tagged("stable").name
    for opened in (Snapshot("a/a/step", store="a"), Snapshot("a/a/step", store=store)):
        assert (opened.name, opened.commit_id) == ("a/step", inner.commit_id)
    store.untag("a/a/step", "stable")
    store.delete("a/a/step")
    assert names(store) == ["step", "a/later"]


def test_a_copy_keeps_names_that_begin_like_the_path_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Store("source")
    for step, name in enumerate(("step", "run1/step")):
        source.take(app_state(step), name)
    assert source.copy(to="run1").copied == ["step", "run1/step"]
    assert names(Store("run1")) == ["step", "run1/step"]
    # A new name is one that a user gives.
    source.copy("step", to="run1", rename=f"{tmp_path}/run1/other")
    source.copy("step", to="run1", rename="run1/run1/more")
    assert names(Store("run1"))[2:] == ["other", "run1/more"]


@pytest.mark.parametrize("name", ["/step_5", "/elsewhere/step_5", "s3://bucket/run1/step_5"])
def test_another_path_is_an_error(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "store")
    for call in (
        lambda: store.take(app_state(5), name),
        lambda: store.async_take(app_state(5), name),
        lambda: Snapshot.take(name, app_state(5), store=store),
        lambda: store[name],
        lambda: store.latest(name),
        lambda: store.rewind(name),
    ):
        with pytest.raises(InvalidNameError, match="is a path, and not one in"):
            call()
    assert not (tmp_path / "store").exists() or names(store) == []
