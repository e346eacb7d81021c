"""A run goes back to an earlier snapshot: the later ones get out of its way, and stay a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from casnap import Retention, Snapshot, StateDict, Store
from casnap.backends import LocalBackend
from casnap.errors import SnapshotError, SnapshotExistsError, SnapshotNotFoundError
from casnap.serving import PullOptions
from tests.support.cli_calls import document, invoke
from tests.support.copies import mirrored, names
from tests.support.faults import (
    app_state,
    assert_holds,
    elsewhere,
    faults,
)
from tests.support.faulty import Fault, FaultyBackend, before
from tests.support.ranks import World


def fill(store: Store, *steps: int, run: str = "", **options: Any) -> Store:
    """Take these steps, under their names."""
    for step in steps:
        store.take(app_state(step), f"{run}step_{step}", metadata={"step": step}, **options)
    return store


def newest(store: Store, prefix: str | None = None) -> str:
    latest = store.latest(prefix)
    assert latest is not None
    return latest.name


def aside(store: Store) -> list[str]:
    """Return the names of what was moved aside, without the number."""
    return [n.partition("/")[2] for n in names(store) if n.startswith("rewound-")]


def folders(path: Path) -> set[str]:
    return {p.parent.name for p in path.glob("*/casnap-snapshot.json")}


def test_a_run_that_goes_back(tmp_path: Path) -> None:
    store = fill(Store(tmp_path), 1, 2, 3, 4)
    snapshot = store.rewind("step_2")
    assert_holds(snapshot, 2)
    assert newest(store) == newest(Store(tmp_path)) == "step_2"
    assert [n for n in names(store) if "/" not in n] == ["step_1", "step_2"]
    assert aside(store) == ["step_3", "step_4"]
    # So scripts that look at folders resume from there, too.
    assert folders(tmp_path) == {"step_1", "step_2"}
    fill(store, 3)
    assert newest(store) == "step_3"
    # What was left is as it was.
    [left] = [s for s in store.snapshots() if s.name.endswith("/step_4")]
    assert_holds(left, 4)
    assert left.metadata.user == {"step": 4}
    assert Snapshot(tmp_path / left.name).commit_id == left.commit_id
    assert store.check(data=True).ok


def test_it_is_one_commit(tmp_path: Path) -> None:
    store = fill(Store(tmp_path), 1, 2, 3)
    root = store._view.repository.newest().seq
    assert store.rewind("step_3").name == "step_3"  # nothing is later
    assert store._view.repository.newest().seq == root
    store.rewind("step_1")
    assert store._view.repository.newest().seq == root + 1
    assert all(n.startswith(f"rewound-{root + 1}/") for n in names(store)[1:])


def test_going_back_twice_and_forth(tmp_path: Path) -> None:
    """What was left can be gone on from after all: what came instead is left then."""
    store = fill(Store(tmp_path), 1, 2, 3)
    store.rewind("step_2")
    fill(store, 3, 4)
    store.rewind("step_1")
    assert [n for n in names(store) if "/" not in n] == ["step_1"]
    assert sorted(aside(store)) == ["step_2", "step_3", "step_3", "step_4"]
    fill(store, 2)
    first = next(s for s in store.snapshots() if s.name.endswith("/step_3"))
    back = store.rewind(first.name)
    assert (back.name, back.commit_id) == ("step_3", first.commit_id)
    assert [n for n in names(store) if "/" not in n] == ["step_1", "step_3"]
    assert newest(store) == "step_3"
    assert "step_3" in folders(tmp_path)
    assert store.check().ok


def test_a_name_that_is_overwritten_again_and_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        fill(store, step)
        store.take(app_state(step), "last", overwrite=True)
    store.rewind("step_1")
    assert "last" not in store
    assert newest(store) == "step_1"


def test_other_runs_and_views_stay(tmp_path: Path) -> None:
    whole = Store(tmp_path)
    for step in (1, 2, 3):
        fill(whole, step, run="a/")
        fill(whole, step, run="b/")
        fill(whole, step, run="a/deeper/")
    view = Store(tmp_path / "a")
    assert view.rewind("step_1").name == "step_1"
    assert aside(view) == ["step_2", "step_3"]
    assert newest(whole, "b") == "b/step_3"
    assert names(Store(tmp_path / "b")) == ["step_1", "step_2", "step_3"]
    assert newest(whole, "a") == "a/deeper/step_3"
    assert names(Store(tmp_path / "a/deeper")) == ["step_1", "step_2", "step_3"]


def test_only_what_was_left_is_left(tmp_path: Path) -> None:
    """That is no empty store: a run would begin anew without a word."""
    store = fill(Store(tmp_path), 1, 2)
    store.rewind("step_1")
    store.delete("step_1")
    with pytest.raises(
        SnapshotError, match=r"went back from; the last one is .*/step_2\. .*rewind"
    ):
        store.latest()
    [name] = names(store)
    store.rewind(name)
    assert newest(store) == "step_2"


def test_a_thinned_snapshot_is_refused(tmp_path: Path) -> None:
    """A resume would pass over it without a word, and go on from another one."""
    store = Store(tmp_path)
    state = {"model": StateDict(x=1), "optim": StateDict(x=2)}
    for step in range(1, 6):
        store.take(state, f"run/step_{step}")
    store.tag("run/step_2", "kept")
    store.thin({"optim": 2})
    before = names(store)
    with pytest.raises(SnapshotError, match=r"/run/step_3 is thinned.* before it is .*/run/step_2"):
        store.rewind("run/step_3")
    with pytest.raises(SnapshotError, match=r"/step_1 is thinned.* no snapshot before it in its r"):
        Store(tmp_path / "run").rewind("step_1")
    assert names(store) == before
    assert newest(store) == "run/step_5"
    # What was moved aside, and thinned there, does not come back either.
    store.rewind("run/step_2")
    store.untag("run/step_2", "kept")
    store.delete("run/step_2")
    with pytest.raises(SnapshotError, match=r"went back from; the last one is .*/step_5"):
        store.latest()
    aside = [s.name for s in store.snapshots() if s.name.endswith("/step_4")]
    store.thin({"optim": 1})
    with pytest.raises(SnapshotError, match="is thinned"):
        store.rewind(*aside)
    with pytest.raises(SnapshotError, match=r"only thinned .* is .*/step_5.*open it by its name"):
        store.latest()


def test_names_that_are_not_there_or_taken(tmp_path: Path) -> None:
    store = fill(Store(tmp_path), 1, 2)
    with pytest.raises(SnapshotNotFoundError, match="step_9"):
        store.rewind("step_9")
    with pytest.raises(SnapshotNotFoundError):
        Store(tmp_path / "elsewhere" / "run").rewind("step_1")
    store.rewind("step_1")
    [moved] = [n for n in names(store) if "/" in n]
    fill(store, 2)
    store.tag("step_2", "kept")
    store.rewind(moved)
    assert sum(n.endswith("step_2") for n in names(store)) == 2
    # A name that cannot be given back: what is there is no later snapshot of the run.
    store = fill(Store(tmp_path / "other"), 1, 2)
    store.rewind("step_1")
    [moved] = [n for n in names(store) if "/" in n]
    store.take(app_state(3), "step_2/best")
    with pytest.raises(SnapshotExistsError, match=rf"restore \S+/{moved}, .* under new names"):
        store.rewind(moved)
    assert moved in names(store)


# --- retention ----------------------------------------------------------------------------------


def test_a_retention_lets_them_go_first(tmp_path: Path) -> None:
    """They count as the oldest: the run never loses what it can go back to because of them."""
    store = fill(Store(tmp_path), 1, 2, 3, 4)
    store.rewind("step_2")
    keep = Retention(keep_last=3)
    fill(store, 3, retention=keep)
    assert [n for n in names(store) if "/" not in n] == ["step_1", "step_2", "step_3"]
    assert aside(store) == []


def test_they_stay_while_there_is_room(tmp_path: Path) -> None:
    store = fill(Store(tmp_path), 1, 2, 3, 4)
    store.rewind("step_1")
    keep = Retention(keep_last=3)
    fill(store, 2, retention=keep)
    assert aside(store) == ["step_4"]
    report = store.prune(Retention(keep_last=2), dry_run=True)
    assert [v.name.partition("/")[2] for v in report.deleted] == ["step_4"]


def test_they_are_no_milestones_of_the_run(tmp_path: Path) -> None:
    """A better loss of a branch that was given up does not push out the best ones of the run."""
    store = Store(tmp_path)
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.2)):
        store.take(app_state(step), f"step_{step}", metadata={"step": step, "loss": loss})
    store.tag("step_30", "kept")
    store.rewind("step_10")
    store.take(app_state(20), "step_20", metadata={"step": 20, "loss": 0.4})
    store.prune(Retention(keep_best=("loss", 2), keep_every=10))
    assert [n for n in names(store) if "/" not in n] == ["step_10", "step_20"]
    assert aside(store) == ["step_30"]
    assert [s.name for s in store.snapshots() if "kept" in s.tags] == names(store)[1:2]


def test_thinning_passes_them_over_as_the_oldest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    state = {"model": StateDict(x=1), "optim": StateDict(x=2)}
    for step in (1, 2, 3):
        store.take(state, f"step_{step}")
    store.rewind("step_1")
    store.take(state, "step_2")
    thinned = store.thin({"optim": 2})
    assert [name.partition("/")[2] for name in thinned] == ["step_2", "step_3"]


# --- tags, followers, copies, mirrors -----------------------------------------------------------


def test_a_published_tag_stays_where_it_is(tmp_path: Path) -> None:
    store = fill(Store(tmp_path), 1, 2, 3)
    store.publish("stable", "step_3")
    commit = store["step_3"].commit_id
    store.rewind("step_1")
    assert store.tagged("stable").commit_id == commit
    with pytest.raises(SnapshotError, match="published"):
        store.tag("step_1", "stable")
    store.publish("stable", "step_1")
    assert store.tagged("stable").name == "step_1"
    assert sum("stable" in s.tags for s in store.snapshots()) == 1


def test_a_served_folder_goes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for step in (1, 2, 3):
        store.take({"model": StateDict(w=torch.full((8,), step))}, f"step_{step}")
    store.tag("step_3", "good")
    served = tmp_path / "served"
    assert store.pull(served).snapshot == "step_3"
    store.rewind("step_1")
    assert store.pull(served).snapshot == "step_1"
    assert store.pull(served, options=PullOptions(tag="good")).snapshot.endswith("/step_3")


def test_a_copy_knows_it(tmp_path: Path) -> None:
    """A backup is not resumed from what the run went back from, nor holds that twice."""
    store = fill(Store(tmp_path / "here"), 1, 2, 3)
    there = Store(tmp_path / "there")
    store.copy(to=there)
    there.tag("step_3", "mine")
    store.rewind("step_1")
    store.copy(to=there)
    assert newest(there) == "step_1"
    assert names(there) == names(store)
    [tagged] = [s for s in there.snapshots() if s.tags]
    assert tagged.tags == ("mine",)
    assert folders(tmp_path / "there") == {"step_1"}
    fill(store, 2)
    store.copy(to=there)
    assert newest(there) == "step_2"
    [moved] = [n for n in names(store) if n.endswith("/step_3")]
    store.rewind(moved)
    store.copy(to=there)
    assert newest(there) == newest(store) == "step_3"
    assert names(there) == names(store)


def test_a_mirror_follows(tmp_path: Path) -> None:
    """So a node with an empty disk goes on from there, too."""
    store = fill(mirrored(tmp_path / "here", tmp_path / "there"), 1, 2, 3)
    store.wait_mirrored(60)
    store.rewind("step_1")
    assert newest(store) == "step_1"
    store.wait_mirrored(60)
    there = Store(tmp_path / "there").make()
    assert names(there) == names(store)
    assert newest(there) == "step_1"
    assert newest(mirrored(tmp_path / "other", tmp_path / "there")) == "step_1"
    fill(store, 2, 3)
    store.wait_mirrored(60)
    assert names(there) == names(store)
    [moved, *_] = [n for n in names(store) if n.endswith("/step_3")]
    store.rewind(moved)
    store.wait_mirrored(60)
    assert names(there) == names(store)
    assert newest(there) == newest(store) == "step_3"
    assert there.check(data=True).ok


def test_a_mirror_that_was_not_told_yet(tmp_path: Path) -> None:
    """What is there is known here to be left: it is not newer."""
    store = fill(mirrored(tmp_path / "here", tmp_path / "there"), 1, 2, 3)
    store.wait_mirrored(60)
    assert store.mirror is not None
    store.mirror.stop()
    store.rewind("step_1")
    assert newest(store) == "step_1"
    again = mirrored(tmp_path / "here", tmp_path / "there")
    again.wait_mirrored(60)
    assert newest(Store(tmp_path / "there")) == "step_1"


# --- processes ----------------------------------------------------------------------------------


def test_a_pending_take_counts(tmp_path: Path) -> None:
    backend = FaultyBackend(fill(Store(tmp_path), 1, 2)._view.repository.backend)
    store = Store(backend)
    reached, opened = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert opened.wait(60)

    backend.faults.append(Fault(before(hold), "put_if_absent", "roots/*"))
    pending = store.async_take(app_state(3), "step_3")
    assert reached.wait(60)
    rewound: list[str] = []
    thread = threading.Thread(target=lambda: rewound.append(store.rewind("step_1").name))
    thread.start()
    opened.set()
    thread.join()
    pending.wait()
    assert rewound == ["step_1"]
    assert newest(store) == "step_1"
    assert aside(store) == ["step_2", "step_3"]


def test_another_process_commits_meanwhile(tmp_path: Path) -> None:
    """Each try to commit looks at the newest table: what came in between is left as well."""
    store, other = fill(Store(tmp_path), 1, 2), Store(tmp_path)
    with faults(LocalBackend, ["put_if_absent"], 0, elsewhere(partial(fill, other, 3))):
        store.rewind("step_1")
    assert aside(store) == ["step_2", "step_3"]
    assert newest(other) == "step_1"


def rank_that_goes_back(path: str) -> list[int]:
    store = Store(path)
    live = {"s": StateDict(step=0, x=torch.zeros(1000))}
    for step in range(1, 4):
        live["s"]["step"] = step
        store.take(live, f"step_{step}")
    store.rewind("step_1").restore(live)
    seen = [live["s"]["step"]]
    live["s"]["step"] = 20
    store.take(live, "step_2")
    latest = store.latest()
    assert latest is not None
    latest.restore(live)
    dist.barrier()
    return [*seen, live["s"]["step"]]


def test_all_ranks_may_call_it(tmp_path: Path, world: Callable[[int], World]) -> None:
    for seen in world(3).run(rank_that_goes_back, str(tmp_path / "run")):
        assert seen == [1, 20]
    store = Store(tmp_path / "run")
    assert len({n.partition("/")[0] for n in names(store) if "/" in n}) == 1
    assert aside(store) == ["step_2", "step_3"]


# --- the command --------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    store = fill(Store(tmp_path), 1, 2, 3)
    root = store._view.repository.newest().seq + 1
    lines = invoke("rewind", tmp_path / "step_1").output.splitlines()
    assert lines == [
        f"step_2 is rewound-{root}/step_2 now",
        f"step_3 is rewound-{root}/step_3 now",
        f"{store.uri}/step_1 is what its run goes on from; 2 later snapshots moved aside",
    ]
    listed = document("ls", tmp_path)["snapshots"]
    assert [s["rewound"] for s in listed] == [False, True, True]
    answer = document("rewind", tmp_path / f"rewound-{root}" / "step_2")
    assert answer["name"] == "step_2"
    assert answer["moved"] == []


@pytest.mark.parametrize(
    ("taken", "run"), [("rewound-4/step_2", ""), ("rewound-4/step_2/x", "/run"), ("rewound-4", "")]
)
def test_what_has_the_name_of_a_folder_of_rewound_snapshots_is_kept(
    tmp_path: Path, taken: str, run: str
) -> None:
    Store(tmp_path / "store").make()
    store = Store(f"{tmp_path}/store{run}")
    for name, value in (("step_1", 1), (taken, 100), ("step_2", 2)):
        store.take(app_state(value), name)
    before = {s.commit_id for s in store.snapshots()}
    assert store._view.repository.newest().seq + 1 == 4
    store.rewind("step_1")
    assert {s.commit_id for s in store.snapshots()} == before
    assert "rewound-5/step_2" in store
