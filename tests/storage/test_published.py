"""Published tags: one snapshot has each, a commit moves it, and the moves can be listed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from casnap import Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import InvalidNameError, SnapshotError, SnapshotNotFoundError
from casnap.storage.snapshots.changes import Changes
from casnap.storage.snapshots.published import Tags
from tests.support.cli_calls import document, failure, invoke
from tests.support.faults import elsewhere, faults, files, take
from tests.support.remote import RemoteDouble

TINY = {"s": StateDict(x=1)}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of three snapshots."""
    store = Store(tmp_path / "store")
    for step in range(3):
        take(store, step)
    return store


def holders(store: Store, tag: str) -> list[str]:
    return [s.name for s in store.snapshots() if tag in s.tags]


def test_a_published_tag_moves_in_one_commit_and_back(store: Store) -> None:
    store.publish("stable", "step_0")
    before = store._view.repository.newest().seq
    store.publish("stable", store["step_2"])
    assert store._view.repository.newest().seq == before + 1
    assert holders(store, "stable") == ["step_2"]
    assert store.tagged("stable").commit_id == store["step_2"].commit_id
    store.publish("stable", "step_0")
    assert holders(store, "stable") == ["step_0"]
    moves = store.tag_moves("stable")
    assert [(m.name, m.previous) for m in moves] == [
        ("step_0", "step_2"),
        ("step_2", "step_0"),
        ("step_0", ""),
    ]
    assert [m.commit for m in moves] == [store[m.name].commit_id for m in moves]
    assert all("@" in m.by for m in moves)
    assert [m.time for m in moves] == sorted((m.time for m in moves), reverse=True)
    assert len(store.tag_moves("stable", limit=2)) == 2
    assert store.tag_moves("other") == []


def test_what_moves_nothing_writes_nothing(store: Store) -> None:
    store.publish("stable", "step_1")
    before = files(store.uri)
    store.publish("stable", "step_1")
    assert files(store.uri) == before


def test_publishing_gathers_a_tag_that_several_have(store: Store) -> None:
    store.tag("step_0", "good", "other")
    store.tag("step_1", "good")
    with pytest.raises(SnapshotError, match=r"2 snapshots have the tag 'good'.*--move"):
        store.tagged("good")
    assert store.tagged("other").name == "step_0"
    store.publish("good", "step_2")
    assert holders(store, "good") == ["step_2"]
    assert store["step_0"].tags == ("other",)
    assert store.tag_moves("good")[0].previous == "step_1"


def test_no_other_snapshot_is_given_a_published_tag(store: Store) -> None:
    store.publish("stable", "step_0")
    store.tag("step_0", "stable")
    with pytest.raises(SnapshotError, match=r"published on 'step_0'.*Store\.publish"):
        store.tag("step_1", "new", "stable")
    assert store["step_1"].tags == ()
    store.untag("step_0", "stable")
    with pytest.raises(SnapshotNotFoundError, match="it was on 'step_0', which does not have"):
        store.tagged("stable")
    store.tag("step_1", "stable")
    assert store.tagged("stable").name == "step_1"


def test_a_deleted_snapshot_is_published_no_more(store: Store) -> None:
    store.publish("stable", "step_0")
    store.delete("step_0")
    take(store, 0)
    with pytest.raises(SnapshotNotFoundError, match="was on 'step_0'"):
        store.tagged("stable")
    store.publish("stable", "step_0")
    assert [m.name for m in store.tag_moves("stable")] == ["step_0", "step_0"]


def test_only_the_one_that_has_it_is_protected(store: Store) -> None:
    store.publish("stable", "step_0")
    store.publish("stable", "step_1")
    store.take(TINY, "step_9", retention=Retention(keep_last=1))
    assert [s.name for s in store.snapshots()] == ["step_1", "step_9"]


def test_what_cannot_be_published(store: Store) -> None:
    before = files(store.uri)
    with pytest.raises(InvalidNameError, match="white space"):
        store.publish("a b", "step_0")
    with pytest.raises(SnapshotNotFoundError, match="nearest"):
        store.publish("stable", "step_9")
    with pytest.raises(SnapshotNotFoundError, match="no snapshot has the tag 'stable'"):
        store.tagged("stable")
    assert files(store.uri) == before


def test_a_replaced_snapshot_is_not_published(store: Store) -> None:
    old = store["step_0"]
    take(store, 0, overwrite=True)
    with pytest.raises(SnapshotNotFoundError, match="replaced in the meantime"):
        store.publish("stable", old)
    assert holders(store, "stable") == []


def test_two_that_publish_at_once_leave_one(store: Store) -> None:
    other = Store(store.uri)
    with faults(
        LocalBackend, ["put_if_absent"], 0, elsewhere(lambda: other.publish("stable", "step_1"))
    ):
        store.publish("stable", "step_0")
    assert holders(store, "stable") == ["step_0"]
    assert [m.name for m in store.tag_moves("stable")] == ["step_0", "step_1"]


def test_a_tag_is_one_for_all_views(tmp_path: Path) -> None:
    Store(tmp_path).take(TINY, "a/1")
    Store(tmp_path).take(TINY, "b/1")
    Store(tmp_path / "a").publish("stable", "1")
    assert Store(tmp_path / "a").tagged("stable").name == "1"
    assert Store(tmp_path).tagged("stable").name == "a/1"
    with pytest.raises(SnapshotNotFoundError, match="is on 'a/1', which is not below 'b'"):
        Store(tmp_path / "b").tagged("stable")
    Store(tmp_path / "b").publish("stable", "1")
    assert Store(tmp_path).tagged("stable").name == "b/1"


def test_a_store_has_at_most_a_hundred(store: Store) -> None:
    for number in range(100):
        store.publish(f"t{number}", f"step_{number % 2}")
    with pytest.raises(SnapshotError, match="100 published tags, and takes no more"):
        store.publish("more", "step_2")
    store.publish("t5", "step_2")
    assert "published" not in store.settings


@pytest.mark.parametrize("setting", [7, {"stable": 7}, {"stable": {"name": "step_1"}}])
def test_a_setting_that_makes_no_sense_counts_as_none(store: Store, setting: object) -> None:
    store.tag("step_0", "stable")
    Changes(store._view.repository).edit_settings(
        lambda settings: {**settings, Tags.SETTING: setting}
    )
    assert store.tagged("stable").name == "step_0"
    assert store.tag_moves("stable") == []
    store.publish("stable", "step_1")
    assert store.tagged("stable").name == "step_1"


def test_moves_that_lead_in_circles_end(store: Store) -> None:
    store.publish("stable", "step_0")
    (move,) = store.tag_moves("stable")
    forged = {**msgspec.structs.asdict(move), "root": 10**6}
    Changes(store._view.repository).edit_settings(
        lambda settings: {**settings, Tags.SETTING: {"stable": forged}}
    )
    assert store.tag_moves("stable") == []


def test_a_look_with_nothing_new_is_two_requests_at_most(tmp_path: Path) -> None:
    writer = Store(RemoteDouble(str(tmp_path)))
    for step in range(40):
        take(writer, step)
    writer.publish("stable", "step_7")
    backend = RemoteDouble(str(tmp_path))
    follower = Store(backend)
    assert follower.tagged("stable").name == "step_7"
    for _ in range(3):
        backend.reset()
        assert follower.tagged("stable").name == "step_7"
        assert backend.count <= 2, backend.log
    writer.publish("stable", "step_9")
    backend.reset()
    assert follower.tagged("stable").name == "step_9"
    assert backend.count <= 6, backend.log


# --- the command ------------------------------------------------------------------------------


def test_tag_moves_and_lists_its_moves(store: Store) -> None:
    first, second = f"{store.uri}/step_0", f"{store.uri}/step_1"
    assert invoke("tag", first, "stable", "--move").stdout == f"{first}  #stable\n"
    assert document("tag", second, "stable", "--move")["tags"] == ["stable"]
    assert Snapshot(first).tags == ()
    newest, oldest = invoke("tag", store.uri, "stable", "--history").stdout.splitlines()
    assert "step_1 from step_0  by " in newest
    assert "step_0  by " in oldest
    (move, _) = document("tag", store.uri, "stable", "--history")["moves"]
    assert (move["name"], move["previous"]) == ("step_1", "step_0")
    assert move["commit"] == store["step_1"].commit_id


def test_tag_refuses_what_cannot_be_moved(store: Store) -> None:
    path = f"{store.uri}/step_0"
    assert "do not go together" in failure("tag", path, "a", "--move", "--remove", status=2)
    assert "name the tags to move" in failure("tag", path, "--move", status=2)
    assert "name the one tag" in failure("tag", store.uri, "a", "b", "--history", status=2)
    assert "was never moved" in failure("tag", store.uri, "a", "--history")
