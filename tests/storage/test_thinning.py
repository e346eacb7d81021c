"""Thinning: older snapshots lose what only a resume needs, and keep the rest, bit for bit."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from casnap import (
    MirrorOptions,
    NewStore,
    Retention,
    RNGState,
    Snapshot,
    StateDict,
    Store,
)
from casnap.backends import LocalBackend
from casnap.errors import (
    DamagedError,
    EntryNotFoundError,
    MismatchError,
    SnapshotError,
    SnapshotNotFoundError,
)
from casnap.format.digest import Digest
from casnap.format.records import NodeRef
from casnap.integrations.trainers import check_whole, load_own
from casnap.storage.snapshots.changes import Changes
from tests.support.cli_calls import document, failure, invoke
from tests.support.faults import elsewhere, faults, files
from tests.support.remote import RemoteDouble

CHUNK = 64 << 10
THIN = {"optim/**": 2}


def weights(seed: int, size: int = CHUNK) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def state(step: int) -> dict[str, Any]:
    """Return a state whose optimizer moves by a few elements a step."""
    moments = weights(0)
    moments[: 100 * (step + 1)] += step + 1
    return {
        "model": StateDict(w=weights(1000 + step, CHUNK // 4)),
        "optim": StateDict(m=moments),
        "progress": StateDict(step=step),
    }


def fill(store: Store, count: int, run: str = "run", **options: Any) -> Store:
    for step in range(count):
        store.take(state(step), f"{run}/{step:03}", metadata={"step": step}, **options)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))


def assert_weights(snapshot: Snapshot) -> None:
    step = snapshot.metadata.user["step"]
    live = {"model": StateDict(w=torch.zeros(CHUNK // 4)), "progress": StateDict(step=-1)}
    snapshot.restore(live)
    assert torch.equal(live["model"]["w"], state(step)["model"]["w"])
    assert live["progress"]["step"] == step


def assert_whole(snapshot: Snapshot) -> None:
    assert_weights(snapshot)
    step = snapshot.metadata.user["step"]
    assert torch.equal(snapshot.read_object("optim/m"), state(step)["optim"]["m"])
    assert snapshot.thinned == ()


def thinned(store: Store) -> list[str]:
    return [s.name for s in store.snapshots() if s.thinned]


# --- what is thinned ----------------------------------------------------------------------------


def test_takes_thin_by_their_retention(store: Store) -> None:
    fill(store, 5, retention=Retention(thin=THIN))
    assert thinned(store) == ["run/000", "run/001", "run/002"]
    for snapshot in store.snapshots():
        (assert_weights if snapshot.thinned else assert_whole)(snapshot)
    assert store["run/000"].thinned == ("optim",)


def test_a_retention_prunes_and_thins(store: Store) -> None:
    retention = Retention(keep_last=3, thin={"optim/**": 1})
    fill(store, 5, retention=retention)
    assert [s.name for s in store.snapshots()] == ["run/002", "run/003", "run/004"]
    assert thinned(store) == ["run/002", "run/003"]
    report = store.prune(Retention(keep_last=2, thin={"*o*": 1}))
    assert [v.name for v in report.deleted] == ["run/002"]
    assert report.thinned == {"run/003": ("model", "progress")} or report.thinned == {}


def test_a_prune_that_thins_is_one_commit(store: Store) -> None:
    """A dry run tells of it. If the thinning fails, nothing was pruned."""
    rules = Retention(keep_last=3, thin={"optim/**": 1})
    fill(store, 5)
    root = store._view.repository.newest()
    row = store._view.row_of("run/002")
    broken = msgspec.structs.replace(row, manifest=NodeRef(bytes(32), None))
    Changes(store._view.repository).commit(lambda *_: {"run/002": broken})
    with pytest.raises(DamagedError):
        store.prune(rules)
    assert len(store.snapshots()) == 5
    Changes(store._view.repository).commit(lambda *_: {"run/002": row})
    would, report = store.prune(rules, dry_run=True), store.prune(rules)
    assert store._view.repository.newest().seq == root.seq + 3
    assert [v.name for v in report.deleted] == ["run/000", "run/001"]
    assert not (Path(store.uri) / "run/001").exists()
    assert report.thinned == {"run/002": ("optim",), "run/003": ("optim",)}
    assert (would.thinned, would.verdicts) == (report.thinned, report.verdicts)


def test_what_stays_of_a_row(store: Store) -> None:
    fill(store, 3)
    before = store["run/000"]
    assert store.thin(THIN) == {"run/000": ("optim",)}
    after = store["run/000"]
    assert (after.commit_id, after.seq, after.time) == (before.commit_id, before.seq, before.time)
    assert after.metadata.user == before.metadata.user
    assert after.tags == ()
    assert [s.name for s in store.snapshots()] == ["run/000", "run/001", "run/002"]


def test_each_run_and_pattern_by_itself(store: Store) -> None:
    fill(store, 3, "a")
    fill(store, 2, "b")
    assert store.thin({"optim/**": 2, "prog*": 1}, dry_run=True) == {
        "a/000": ("optim", "progress"),
        "a/001": ("progress",),
        "b/000": ("progress",),
    }
    assert thinned(store) == []
    store.thin({"prog*": 1}, prefix="b")
    store.thin(THIN)
    assert {s.name: s.thinned for s in store.snapshots() if s.thinned} == {
        "a/000": ("optim",),
        "b/000": ("progress",),
    }
    view = Store(f"{store.uri}/a")
    assert view.thin({"progress": 2}) == {"000": ("progress",)}
    assert view["000"].thinned == ("optim", "progress")


def test_a_pattern_that_matches_no_key_is_an_error(store: Store) -> None:
    fill(store, 3)
    for dry_run in (True, False):
        with pytest.raises(EntryNotFoundError, match=r"'optimizer/\*\*' matches; nearest: optim"):
            store.thin({"optim/**": 1, "optimizer/**": 1}, dry_run=dry_run)
    assert thinned(store) == []
    with pytest.raises(EntryNotFoundError):
        store.prune(Retention(keep_last=1, thin={"optimizer": 1}))
    assert len(store.snapshots()) == 3
    assert failure("thin", store.uri, "optimizer", "--keep-last", 1, "--yes")
    store.thin(THIN)
    store.delete("run/001")
    store.delete("run/002")
    # It is gone, but it was there.
    assert store.thin(THIN) == {}
    assert Store(store.uri + "/empty").thin({"x": 1}) == {}


def test_takes_warn_once_of_a_pattern_that_matches_no_key(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 5, retention=Retention(thin={"optim/**": 3, "optimizer/**": 1}))
    (message,) = caplog.messages
    assert "run/001" in message
    assert "no snapshot has a key that 'optimizer/**' matches; nearest: optim" in message
    assert thinned(store) == ["run/000", "run/001"]
    caplog.clear()
    fill(store, 4, "other", retention=Retention(thin={"opt*": 1}))
    assert caplog.messages == []


def test_what_belongs_to_ranks_goes_too(store: Store) -> None:
    for step in range(2):
        store.take({"model": StateDict(x=step), "rng": RNGState()}, f"{step}")
    assert store["0"].contents.manifest.ranks["0"]
    store.thin({"rng": 1})
    assert store["0"].contents.manifest.ranks == {"0": {}}
    assert store["0"].thinned == ("rng",)
    state = {"model": StateDict(x=-1)}
    store["0"].restore(state)
    assert state["model"]["x"] == 0


def test_tagged_snapshots_stay_whole(store: Store) -> None:
    fill(store, 3)
    store.tag("run/000", "best")
    assert store.thin(THIN) == {}
    store.untag("run/000", "best")
    assert store.thin(THIN) == {"run/000": ("optim",)}


def test_a_snapshot_is_not_thinned_to_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 2)
    assert store.thin({"*": 1}) == {}
    assert "would leave nothing of it; delete it instead" in caplog.text
    assert_whole(store["run/000"])


def test_thinning_again_writes_nothing(store: Store) -> None:
    fill(store, 4)
    # Only the last one has this key.
    store.take({**state(4), "ema": StateDict(x=1)}, "run/004")
    store.thin({"optim/**": 2, "ema*": 1})
    before = files(store.uri)
    store.thin({"optim/**": 2, "ema*": 1})
    assert files(store.uri) == before


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"optim/**": 0},
        {"optim/**": True},
        {"optim/**": "2"},
        {"optim/m": 1},
        {"/**": 1},
        {"": 1},
        {7: 1},
        {"x" * 91: 1},
        {"a\n": 1},
        ["optim/**"],
        3,
    ],
)
def test_what_is_no_rule(store: Store, rules: Any) -> None:
    fill(store, 2)
    with pytest.raises(ValueError, match="thin says of whole keys"):
        store.thin(rules)
    with pytest.raises(ValueError, match="thin says of whole keys"):
        Retention(thin=rules)
    assert thinned(store) == []


# --- what a thinned snapshot answers ----------------------------------------------------------


def test_a_restore_names_what_was_thinned(store: Store) -> None:
    fill(store, 3)
    store.thin(THIN)
    live = state(7)
    kept = live["optim"]["m"].clone()
    with pytest.raises(MismatchError, match=r"thinned, and has lost optim.*Store\.latest\(\)"):
        store["run/000"].restore(live)
    assert torch.equal(live["optim"]["m"], kept)
    assert live["progress"]["step"] == 7
    with pytest.raises(EntryNotFoundError, match="thinned, and has lost optim"):
        store["run/000"].read_object("optim/m")
    with pytest.raises(EntryNotFoundError, match="no entry 'modle/w'; nearest"):
        store["run/000"].read_object("modle/w")


def test_a_trainer_does_not_begin_anew_from_one(store: Store) -> None:
    fill(store, 3)
    store.thin(THIN)
    with pytest.raises(EntryNotFoundError, match="thinned"):
        load_own(store["run/000"], "optim", StateDict())
    check_whole(store["run/000"], "model")
    check_whole(store["run/002"], "optim")


def test_latest_passes_over_thinned_ones(store: Store) -> None:
    fill(store, 4)
    store.thin(THIN)
    store.delete("run/003")
    newest = store.latest()
    assert newest is not None
    assert newest.name == "run/002"
    store.delete("run/002")
    with pytest.raises(SnapshotError, match=r"only thinned snapshots are left.*run/001"):
        store.latest()
    newest = store.latest(thinned=True)
    assert newest is not None
    assert newest.name == "run/001"
    assert Store(f"{store.uri}-new").latest() is None


def test_it_can_be_compared_measured_exported_and_checked(store: Store, tmp_path: Path) -> None:
    fill(store, 3)
    store.thin(THIN)
    changes = store.diff("run/000", "run/001")
    assert {c.path for c in changes.of("added")} == {"optim", "optim/m"}
    usage = {u.name: u.stored_bytes for u in store.usage()}
    assert usage["run/000"] < usage["run/001"] - 200_000
    store["run/000"].export(tmp_path / "out.safetensors", path="model")
    store["run/000"].export(tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt").keys() == {"model", "progress"}
    assert store.check(data=True).ok
    assert store.check(name="run/000").ok


def test_takes_go_on_and_share_what_was_lost(store: Store) -> None:
    """A chunk that a thinned snapshot had is stored anew once it is collected."""
    fill(store, 3)
    store.thin({"optim/**": 1})
    store.delete("run/002")
    for _ in range(2):
        store.gc(grace=0)
    store.take(state(0), "run/again", metadata={"step": 0})
    assert_whole(store["run/again"])
    assert store.check(data=True).ok


# --- garbage ------------------------------------------------------------------------------------


def disk_bytes(store: Store) -> int:
    return sum(f.stat().st_size for f in Path(store.uri).rglob("*") if f.is_file())


def test_the_bytes_are_freed(store: Store) -> None:
    for step in range(6):
        lone = {
            "model": StateDict(w=weights(step)),
            "optim": StateDict(m=weights(99 - step, 2 * CHUNK)),
        }
        store.take(lone, f"{step}")
    before = disk_bytes(store)
    store.thin({"optim": 1})
    store.gc(grace=0)
    store.gc(grace=0)
    freed = before - disk_bytes(store)
    assert freed >= 0.95 * 5 * 8 * CHUNK
    assert store.check(data=True).ok


def test_a_lost_chunk_that_is_a_base_of_a_kept_delta(store: Store) -> None:
    fill(store, 9)
    store.tag("run/003", "keep")
    assert store.gc(grace=0, recode_after=1).recoded_chunks > 0
    assert set(store.thin({"optim/**": 1})) == {f"run/{i:03}" for i in (0, 1, 2, 4, 5, 6, 7)}
    for _ in range(3):
        store.gc(grace=0, recode_after=1)
    assert store.check(data=True).ok
    for name in ("run/003", "run/008"):
        assert_whole(store[name])


def test_a_reader_that_opened_it_before(store: Store) -> None:
    fill(store, 3)
    before = store["run/000"]
    store.thin(THIN)
    assert torch.equal(before.read_object("optim/m"), state(0)["optim"]["m"])
    other = Store(store.uri)
    for _ in range(2):
        other.gc(grace=0, repack=1.0)
    with pytest.raises(SnapshotNotFoundError, match="was thinned, and what it lost was collected"):
        before.read_object("optim/m")
    assert torch.equal(before.read_object("model/w"), state(0)["model"]["w"])


# --- copies and mirrors -------------------------------------------------------------------------


def test_a_copy_says_that_it_is_thinned(store: Store, tmp_path: Path) -> None:
    fill(store, 3)
    store.tag("run/001", "x")
    store.copy(to=tmp_path / "whole")
    store.untag("run/001", "x")
    store.thin({"optim/**": 1})
    store.copy(to=tmp_path / "copy")
    copy = Store(tmp_path / "copy")
    assert thinned(copy) == ["run/000", "run/001"]
    assert copy["run/000"].row.is_thinned
    assert copy.check(data=True).ok
    assert_weights(copy["run/000"])
    # It is the same snapshot, so a store that has it whole keeps that.
    report = store.copy(to=tmp_path / "whole")
    assert len(report.present) == 3
    assert_whole(Store(tmp_path / "whole")["run/000"])


def test_a_mirror_keeps_what_its_own_retention_says(tmp_path: Path) -> None:
    retention = Retention(thin={"optim/**": 3})
    store = Store(tmp_path / "here", mirror=MirrorOptions(tmp_path / "there", retention=retention))
    fill(store, 4)
    store.wait_mirrored(60)
    assert len(store.thin({"optim/**": 1})) == 3
    fill(store, 1, "later")
    store.wait_mirrored(60)
    there = Store(tmp_path / "there")
    assert thinned(there) == ["run/000"]
    assert [s.name for s in there.snapshots("run")] == [f"run/{i:03}" for i in range(4)]
    assert_whole(there["run/002"])
    assert_weights(there["run/000"])
    newest = store.latest("run")
    assert newest is not None
    assert newest.name == "run/003"


def test_what_the_mirror_lacks_stays_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "here", mirror=tmp_path / "there")
    assert store.mirror is not None
    store.mirror.stop()
    fill(store, 3)
    assert store.thin({"optim/**": 1}) == {}


# --- others at the same time, and crashes ------------------------------------------------------


def test_an_overwrite_meanwhile_is_not_thinned(store: Store) -> None:
    fill(store, 3)

    def overwrite() -> None:
        other = Store(store.uri)
        other.take(state(0), "run/000", metadata={"step": 0}, overwrite=True)

    with faults(LocalBackend, ["put_if_absent"], 0, elsewhere(overwrite)):
        store.thin({"optim/**": 1})
    assert thinned(store) == ["run/001", "run/002"]
    assert_whole(store["run/000"])


# --- costs, and the format ----------------------------------------------------------------------


def requests_to_thin(tmp_path: Path, count: int) -> tuple[int, int]:
    """Return how many requests it takes to thin a run, and to look at it again."""
    name = str(tmp_path / str(count))
    fill(Store(RemoteDouble(name), create=NewStore(chunk_size=CHUNK)), count)
    backend = RemoteDouble(name)
    store = Store(backend, create=False)
    backend.reset()
    assert len(store.thin(THIN)) == count - 2
    thinning = backend.count
    backend.reset()
    store.thin(THIN)
    return thinning, backend.count


def test_it_costs_no_more_requests_for_more_snapshots(tmp_path: Path) -> None:
    few, again = requests_to_thin(tmp_path, 4)
    many, again_many = requests_to_thin(tmp_path, 24)
    assert many <= few + 4
    assert max(again, again_many) <= 2


def test_only_a_thinned_manifest_names_what_it_lost(store: Store) -> None:
    fill(store, 3)
    store.thin(THIN)

    def node(name: str) -> dict[str, Any]:
        decode = partial(msgspec.msgpack.decode, type=dict[str, Any])
        return decode(store._view.repository.node(Digest(store[name].row.manifest.digest)))

    assert node("run/001").keys() == {"global", "ranks", "environment"}
    assert node("run/000")["thinned"] == ["optim"]
    assert node("run/000")["global"].keys() == {"model", "progress"}


def test_the_first_snapshot_of_a_run_comes_while_it_is_looked_for(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is of one look: before it, or after it."""
    store.make()
    reader = Store(tmp_path / "store")
    look = reader._view.rows

    def and_then_it_comes(prefix: str | None = None) -> Any:
        found = look(prefix)
        if not found:
            # Another thread is as good as another process.
            taker = threading.Thread(target=fill, args=(store, 1))
            taker.start()
            taker.join()
        return found

    monkeypatch.setattr(reader._view, "rows", and_then_it_comes)
    assert reader.latest("run") is None
    newest = reader.latest("run")
    assert newest is not None
    assert newest.name == "run/000"


# --- the command ------------------------------------------------------------------------------


def test_thin(store: Store) -> None:
    fill(store, 3)
    path = store.uri
    said = invoke("thin", path, "optim/**", "--keep-last", 2, "--dry-run").stdout
    assert said == "run/000  optim\n1 snapshot would be thinned\n"
    assert thinned(store) == []
    assert "--yes" in failure("thin", path, "optim/**", "--keep-last", 2, status=2)
    answer = document("thin", path, "optim/**", "--keep-last", 2, "--prefix", "run", "--yes")
    assert answer["snapshots"] == [
        {
            "store": path,
            "name": "run/000",
            "path": f"{path}/run/000",
            "commit": store["run/000"].commit_id,
            "lost_keys": ["optim"],
        }
    ]
    assert "thinned" in invoke("ls", path).stdout.splitlines()[1]
    assert [s["thinned"] for s in document("ls", path)["snapshots"]] == [True, False, False]
    assert document("show", f"{path}/run/000")["thinned_keys"] == ["optim"]
    assert "thinned   optim" in invoke("show", f"{path}/run/000").stdout
    assert "0 snapshots thinned" in invoke("thin", path, "optim", "--keep-last", 9).stdout


def test_thin_refuses(store: Store) -> None:
    fill(store, 2)
    assert "whole keys" in failure("thin", store.uri, "optim/m", "--keep-last", 1, status=2)
    assert "--keep-last" in failure("thin", store.uri, "optim", status=2)
    assert failure("thin", store.uri, "optim", "--keep-last", 0, status=2)
