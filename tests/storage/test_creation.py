"""What makes a store, and processes that make one at once: all of them get the same store."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import CasnapError, NotAStoreError, SnapshotNotFoundError, StoreError
from casnap.view import find_view
from tests.support.cli_calls import invoke
from tests.support.faults import (
    SYSTEM_CALLS,
    files,
    in_child,
    stop,
    system_faults,
    while_stopped,
)
from tests.support.ranks import World
from tests.support.remote import RemoteDouble
from tests.support.sweep import sweep

TINY = {"s": StateDict(x=1)}
LOOKS = ["stat", "listdir", "link"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Store(folder).make(),
        lambda folder: Store._of(find_view(folder / "step", None, create=True)[0]),
    ],
    ids=["named", "unasked"],
)
def test_another_process_makes_the_store_at_any_moment(
    tmp_path: Path, make: Callable[[Path], Store]
) -> None:
    """One stops before each call in turn, and finds the store made when it goes on."""
    for k in sweep(2):
        place = tmp_path / str(k)
        place.mkdir()
        made: list[str] = []
        stopped, ended = while_stopped(
            lambda place=place: make(place),
            system_faults(k, stop, LOOKS),
            lambda place=place, made=made: made.append(Store(place).make().id),
        )
        assert ended == 0, k
        if not stopped:
            break
        assert [make(place).id] == made
    assert k > 10


def made_on_purpose(folder: Path) -> None:
    Store(folder, create=NewStore(chunk_size=1 << 16, codec="zstd")).make()


def made_unasked(folder: Path) -> None:
    Snapshot.take(folder / "step_1", TINY)


def taken_below(folder: Path) -> None:
    Snapshot.take(folder / "run/step_2", TINY)


def taken_in_view(folder: Path) -> None:
    Store(folder / "run", create=NewStore(chunk_size=1 << 17)).take(TINY, "step_2")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("begin", "finish"),
    [
        pytest.param(made_on_purpose, made_unasked, marks=pytest.mark.slow),
        (made_on_purpose, taken_in_view),
        pytest.param(made_on_purpose, taken_below, marks=pytest.mark.slow),
        (made_unasked, made_on_purpose),
        (made_unasked, taken_below),
        pytest.param(made_unasked, taken_in_view, marks=pytest.mark.slow),
    ],
)
def test_who_finishes_a_store_says_how_it_is_set(
    tmp_path: Path, begin: Callable[[Path], None], finish: Callable[[Path], None]
) -> None:
    """Its maker is killed at each call in turn. Another one goes on, with its own settings.

    From the first root on, the store is made: other tests are about a take that is killed.
    """
    half_made = 0
    for k in sweep(2):
        place = tmp_path / str(k)

        def killed(place: Path = place, k: int = k) -> None:
            with system_faults(k, names=[*SYSTEM_CALLS, *LOOKS]):
                begin(place)

        status = in_child(killed)
        was_begun = (place / "casnap-store/casnap.json").exists()
        was_made = (place / "casnap-store/roots/0/0").exists()
        is_half_made = was_begun and not was_made
        half_made += is_half_made
        finish(place)
        if was_begun:
            store = Store(place)
            assert store.chunk_size == 1 << (16 if begin is made_on_purpose else 20), k
            on_purpose = (finish if is_half_made else begin) is made_on_purpose
            assert store.settings["codec"] == ("zstd" if on_purpose else "auto"), k
            serves_below = on_purpose or is_half_made
            below = serves_below and finish in (taken_below, taken_in_view)
            assert ("run/step_2" in store) == below, k
            if finish is made_on_purpose:
                taken_below(place)
                assert ("run/step_2" in store) == serves_below, k
            assert store.check(data=True).ok, k
            store.gc(grace=0)
            assert files(place, "tmp") == set(), k
        if was_made or status == 0:
            break
    assert half_made > 0


@pytest.mark.parametrize("name", ["notes.txt", "packs/notes.txt", "tmp/notes.txt", "index/a/b"])
def test_a_folder_of_the_name_of_a_store(tmp_path: Path, name: str) -> None:
    """It is a user's: nothing is written into it."""
    theirs = tmp_path / "casnap-store" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    for use in (
        lambda: Store(tmp_path).make(),
        lambda: Store(tmp_path).take(TINY, "run/step_1"),
        lambda: Snapshot.take(tmp_path / "step_1", TINY),
    ):
        with pytest.raises(StoreError, match=r"but no casnap\.json: .* Choose another folder"):
            use()
    assert Store(tmp_path).latest() is None
    assert Snapshot.take(tmp_path / "run/step_1", TINY).path
    assert files(tmp_path / "casnap-store") == {name}


def test_a_place_where_no_folder_can_be_made() -> None:
    for make in (
        lambda: Store("/proc/x").make(),
        lambda: Snapshot.take("/proc/x/step_1", {"s": StateDict(x=1)}),
    ):
        with pytest.raises(StoreError, match="no folder can be made at /proc/x; choose another"):
            make()


@pytest.mark.parametrize("wrong", ["zstd", {"codec": "zstd"}, NewStore])
def test_what_a_new_store_is_like_has_its_own_type(tmp_path: Path, wrong: Any) -> None:
    """Its chunk size could not be changed afterwards."""
    with pytest.raises(TypeError, match="create is a bool or a NewStore"):
        Store(tmp_path / "store", create=wrong)


def test_what_stands_where_a_store_would(tmp_path: Path) -> None:
    for number, put in enumerate(
        (
            lambda place: place.write_text("mine"),
            lambda place: place.symlink_to(tmp_path),
            lambda place: place.symlink_to("nowhere"),
            os.mkfifo,
            lambda place: place.mkdir() or (place / "casnap.json").write_text("mine"),
            lambda place: place.mkdir() or (place / "casnap.json").mkdir(),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        put(folder / "casnap-store")
        before = sorted(folder.rglob("*"))
        with pytest.raises(CasnapError, match=r"casnap-store"):
            Snapshot.take(folder / "step_1", TINY)
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("place", ["folder", "memory", "bucket"])
def test_reading_makes_nothing(tmp_path: Path, place: str) -> None:
    """A run that looks for its last snapshot under a mistyped path leaves nothing there."""
    double = RemoteDouble(str(tmp_path))
    uri = {"folder": tmp_path / "typo/ckpts", "memory": f"memory:/{tmp_path}", "bucket": double}
    store = Store(uri[place])
    assert store.latest() is None
    assert store.snapshots() == []
    assert "step_1" not in store
    with pytest.raises(SnapshotNotFoundError, match=r"not a store yet; the first take"):
        store["step_1"]
    for use in (store.gc, store.check, lambda: store.delete("step_1"), lambda: store.id):
        with pytest.raises(CasnapError, match=r"not a (casnap )?store"):
            use()
    assert str(tmp_path) in repr(store)
    for refused in (
        lambda: store.configure(codec="none"),
        lambda: Store(uri[place]).copy(to=store, storage_options={"key": "k"}),
    ):
        with pytest.raises((ValueError, NotAStoreError)):
            refused()
    with pytest.raises(NotAStoreError):
        Store(uri[place], create=False)
    assert files(tmp_path) == set()
    assert double.names("") == []
    assert store.take(TINY, "step_1").path
    assert [s.name for s in store.snapshots()] == ["step_1"]
    assert store.latest() is not None


def test_a_path_below_a_store_that_is_not_made_yet(tmp_path: Path) -> None:
    """Where a path leads depends on the disk alone. ``store=`` and ``make()`` are the ways."""
    store = Store(tmp_path)
    assert Snapshot.take(tmp_path / "a/step_1", TINY).store.uri == str(tmp_path / "a")
    assert Snapshot.take("b/step_1", TINY, store=store).store.uri == str(tmp_path)
    assert Snapshot.take(tmp_path / "c/step_1", TINY).store.uri == str(tmp_path)
    Store(tmp_path / "d").make()
    assert Snapshot.take(tmp_path / "d/run/step_1", TINY).store.uri == str(tmp_path)


def test_below_a_store_of_its_folder_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever takes or looks deeper learns what serves what, and how to widen it."""
    place = tmp_path / "ckpts"  # a second store beside it would be warned of
    Snapshot.take(place / "step_1", TINY)
    widen = rf"The store {place} serves only names right in its folder.*casnap init {place}"
    for use in (
        lambda: Snapshot(place / "run/step_1"),
        lambda: Snapshot(place / "run/deep/step_1"),
        lambda: Store(place / "run", create=False),
        lambda: Store(place / "run/deep").id,
    ):
        with pytest.raises(NotAStoreError, match=widen):
            use()
    assert caplog.text == ""
    for path in ("run/step_1", "run/step_2", "run/deep/step_1"):
        caplog.clear()
        Snapshot.take(place / path, TINY)
        assert ("is a store of its own now" in caplog.text) == (path != "run/step_2"), path
    assert f"The store {place / 'run'} serves only names" in caplog.text
    caplog.clear()
    Store(place / "named/run").take(TINY, "step_1")  # it is what the user has asked for
    assert caplog.text == ""
    assert invoke("init", place).stdout
    assert Snapshot.take(place / "other/step_1", TINY).store.uri == str(place)
    assert caplog.text == ""


def test_a_remote_store_that_is_not_made_yet_is_asked_once(tmp_path: Path) -> None:
    double = RemoteDouble(str(tmp_path))
    store = Store(double)
    once = double.count
    assert (store.prefix, repr(store)) == ("", f"Store({double.uri!r})")
    assert sum(store.requests.values()) == double.count == once
    assert store.latest() is None
    assert double.count == 2 * once
    assert store.mirror is None


def test_what_is_written_first_makes_the_store(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "w.pt")
    source = Store(tmp_path / "source", create=NewStore(chunk_size=1 << 16))
    source.take(TINY, "step_1")
    for number, write in enumerate(
        (
            lambda store: store.async_take(TINY, "step_1").wait(),
            lambda store: store.import_file(tmp_path / "w.pt", "w"),
            lambda store: source.copy(to=store),
            lambda store: store.configure(codec="zstd"),
            lambda store: store.make(),
        )
    ):
        store = Store(tmp_path / str(number), create=NewStore(chunk_size=1 << 16))
        assert not (tmp_path / str(number)).exists()
        write(store)
        assert Store(tmp_path / str(number), create=False).chunk_size == 1 << 16


def test_a_store_that_another_one_makes_meanwhile(tmp_path: Path) -> None:
    first, second, below = (Store(tmp_path / p) for p in ("run", "run", "run/part"))
    sent = pickle.loads(pickle.dumps(second))
    first.take(TINY, "part/step_1")
    assert second.latest().name == sent.latest().name == "part/step_1"  # type: ignore[union-attr]
    assert below.latest().name == "step_1"  # type: ignore[union-attr]
    assert below.uri == str(tmp_path / "run/part")
    assert second.id == first.id == below.id


def take_where_none_is(folder: str) -> list[str]:
    store = Store(folder)
    assert store.latest() is None
    dist.barrier()
    store.take(TINY, "step_1")
    return [snapshot.name for snapshot in store.snapshots()]


def test_ranks_make_one_store(world: Callable[[int], World], tmp_path: Path) -> None:
    assert world(3).run(take_where_none_is, str(tmp_path / "run")) == [["step_1"]] * 3
