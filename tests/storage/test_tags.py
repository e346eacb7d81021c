"""Tags: what they protect from, and what can be one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from casnap import Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import (
    InvalidNameError,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
)
from tests.support.cli_calls import Terminal, document, failure, invoke
from tests.support.faults import assert_holds, elsewhere, faults, files, take

TINY = {"s": StateDict(x=1)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of two snapshots."""
    store = Store(tmp_path / "store")
    take(store, 0)
    take(store, 1)
    return store


def test_tags_are_sorted_unique_and_added_once(store: Store) -> None:
    before = store["step_0"]
    store.tag("step_0", "b", "a", "b")
    store.tag("step_0", "c")
    assert store["step_0"].tags == ("a", "b", "c")
    assert store["step_1"].tags == ()
    kept_files = files(store.uri)
    store.tag("step_0", "c", "a")
    store.untag("step_0", "other")
    store.tag("step_0")
    store.untag("step_0")
    assert files(store.uri) == kept_files, "what changes nothing writes nothing"
    store.untag("step_0", "a", "c", "other")
    assert store["step_0"].tags == ("b",)
    after = store["step_0"]
    assert (after.commit_id, after.seq, after.time) == (before.commit_id, before.seq, before.time)
    assert before.tags == (), "a handle stays as it was opened"
    assert_holds(after, 0)
    latest = store.latest()
    assert latest is not None
    assert latest.name == "step_1"


@pytest.mark.parametrize("tag", ["a", "x" * 100, "v1.0", "größte", "a-b#c", "🏆", "a/b,c:d=e"])
def test_what_can_be_a_tag(store: Store, tag: str) -> None:
    store.tag("step_0", tag)
    assert store["step_0"].tags == (tag,)
    store.untag("step_0", tag)
    assert store["step_0"].tags == ()


@pytest.mark.parametrize(
    "tag",
    ["", "x" * 101, "a b", "a\tb", "\u2003", "\x1b[2J", "\ud800", "-a", "#a", 1, None, b"a", ["a"]],
)
def test_what_cannot_be_a_tag(store: Store, tag: Any) -> None:
    before = files(store.uri)
    with pytest.raises(InvalidNameError, match="choose another, like 'best'"):
        store.tag("step_0", "good", tag)
    assert store["step_0"].tags == ()
    assert files(store.uri) == before


def test_a_snapshot_has_at_most_a_hundred(store: Store) -> None:
    tags = [f"t{i}" for i in range(100)]
    store.tag("step_0", *tags)
    with pytest.raises(SnapshotError, match="at most 100 tags; with these it would have 101"):
        store.tag("step_0", "one-more")
    store.tag("step_0", "t5")
    assert len(store["step_0"].tags) == 100


def test_tags_of_nothing(store: Store) -> None:
    for change in (store.tag, store.untag):
        with pytest.raises(SnapshotNotFoundError, match="nearest"):
            change("step_9", "a")
        with pytest.raises(InvalidNameError):
            change("../step_0", "a")


def test_tags_through_a_view(tmp_path: Path) -> None:
    Store(tmp_path).take(TINY, "run/a")
    Store(tmp_path / "run").tag("a", "x")
    assert Snapshot(tmp_path / "run/a").tags == ("x",)


def test_a_tagged_snapshot_is_not_overwritten(store: Store) -> None:
    store.tag("step_0", "best", "v1")
    for use in (store.take, store.async_take):
        with pytest.raises(SnapshotExistsError, match=r"tagged \(best, v1\).*untag it first"):
            use(TINY, "step_0", overwrite=True)
    with pytest.raises(SnapshotExistsError, match="overwrite=True"):
        store.take(TINY, "step_0")
    assert_holds(store["step_0"], 0)
    store.untag("step_0", "best", "v1")
    take(store, 0, overwrite=True)
    assert store["step_0"].tags == ()


def test_a_tagged_snapshot_is_not_pruned_but_deleted(store: Store) -> None:
    store.tag("step_0", "best")
    store.take(TINY, "step_2", retention=Retention(keep_last=1))
    assert [s.name for s in store.snapshots()] == ["step_0", "step_2"]
    store.delete("step_0")
    assert [s.name for s in store.snapshots()] == ["step_2"]


def test_tagged_while_it_is_overwritten(store: Store) -> None:
    with (
        faults(LocalBackend, ["put_if_absent"], 0, lambda: Store(store.uri).tag("step_0", "x")),
        pytest.raises(SnapshotExistsError, match="untag it first"),
    ):
        take(store, 0, overwrite=True)
    assert store["step_0"].tags == ("x",)


def test_two_that_tag_at_once_both_do(store: Store) -> None:
    with faults(LocalBackend, ["put_if_absent"], 0, lambda: Store(store.uri).tag("step_0", "x")):
        store.tag("step_0", "y")
    assert store["step_0"].tags == ("x", "y")


def test_a_snapshot_that_replaces_another_does_not_get_its_tags(store: Store) -> None:
    def replace() -> None:
        take(Store(store.uri), 0, overwrite=True)

    with (
        faults(LocalBackend, ["put_if_absent"], 0, elsewhere(replace)),
        pytest.raises(SnapshotNotFoundError, match="replaced in the meantime"),
    ):
        store.tag("step_0", "best")
    assert store["step_0"].tags == ()


# --- the command ------------------------------------------------------------------------------


def test_tag(store: Store) -> None:
    path = f"{store.uri}/step_0"
    assert invoke("tag", path, "best", "v1").stdout == f"{path}  #best #v1\n"
    assert invoke("tag", path).stdout == "best\nv1\n"
    assert document("tag", path, "v2") == {
        "store": store.uri,
        "name": "step_0",
        "path": path,
        "commit": store["step_0"].commit_id,
        "tags": ["best", "v1", "v2"],
    }
    assert "#best #v1 #v2" in invoke("ls", store.uri).stdout
    assert document("tag", path, "--remove", "v1")["tags"] == ["best", "v2"]
    assert invoke("tag", path, "--remove", "best", "v2").stdout == f"{path}  has no tags\n"
    assert invoke("tag", path).stdout == ""
    assert document("tag", path)["tags"] == []


def test_tag_refuses(store: Store) -> None:
    path = f"{store.uri}/step_0"
    assert "name the tags" in failure("tag", path, "--remove", status=2)
    assert "white space" in failure("tag", path, "a b")
    assert "begins with '#'" in failure("tag", path, "#a")
    assert "No such option" in failure("tag", path, "-a", status=2)
    assert "no snapshot 'step_9'" in failure("tag", f"{store.uri}/step_9", "a")
    assert failure("tag", status=2)
    assert "has no tag best, so none was removed; it has no tags" in failure(
        "tag", path, "--remove", "best"
    )
    store.tag("step_0", "best", "v1")
    said = failure("tag", path, "--remove", "v1", "bset", "--json")
    assert "has no tag bset, so none was removed; its tags are best, v1" in said
    assert store["step_0"].tags == ("best", "v1")


def test_rm_refuses_what_has_a_tag(store: Store) -> None:
    store.tag("step_1", "best", "v1")
    tagged = f"{store.uri}/step_1"
    said = failure("rm", f"{store.uri}/step_0", tagged, "--yes")
    assert f"{tagged} has a tag, best, v1, which protects it, so nothing was deleted" in said
    assert "--tagged" in said
    assert {"step_0", "step_1"} <= {s.name for s in store.snapshots()}
    (deleted,) = document("rm", tagged, "--tagged", "--yes")["deleted"]
    assert deleted["tags"] == ["best", "v1"]
    assert "step_1" not in store


def test_rm_shows_tags_and_does_not_delete_what_replaced_what_it_showed(store: Store) -> None:
    store.tag("step_0", "best")
    terminal = Terminal("rm", "--tagged", f"{store.uri}/step_0")
    assert "#best" in terminal.read_until("Delete 1 snapshot?")
    store.untag("step_0", "best")
    take(store, 0, overwrite=True)
    os.write(terminal.master, b"y\n")
    status, said = terminal.rest()
    assert status == 1
    assert "replaced in the meantime" in said
    assert_holds(store["step_0"], 0)
    store.tag("step_0", "again")
    document("rm", f"{store.uri}/step_0", "--tagged", "--yes")
    assert "step_0" not in store
