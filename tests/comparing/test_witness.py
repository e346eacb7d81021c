"""Witnesses: a run that resumes meets what it was, and nothing takes a witness for a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from casnap import NewStore, Retention, RNGState, StateDict, Store, WitnessReport
from casnap.errors import (
    CasnapError,
    DamagedError,
    InvalidNameError,
    SnapshotExistsError,
    UnsupportedTypeError,
    WitnessError,
)
from casnap.extending import JoinedTake, LiveState, TakeOptions
from casnap.format.digest import Digest, digest_of
from casnap.integrations.witnesses import Witnesses
from casnap.storage import Changes, Table
from tests.support.cli_calls import invoke
from tests.support.copies import mirrored
from tests.support.damaged import damage_everywhere
from tests.support.ports import free_port
from tests.support.ranks import Worlds

CHUNK = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()


class Run:
    """A small training, and its app state."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Dropout())
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.progress = StateDict(step=0)

    @property
    def app_state(self) -> dict[str, Any]:
        return {**vars(self), "rng": RNGState()}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optim.zero_grad()
            self.model(torch.randn(4, 300)).square().mean().backward()
            self.optim.step()
            self.progress["step"] += 1


def small(step: int) -> dict[str, StateDict]:
    return {"s": StateDict(x=torch.full((1000,), float(step)), step=step)}


def test_a_resumed_run_meets_what_it_was(store: Store, tmp_path: Path) -> None:
    run = Run()
    run.steps(2)
    snapshot = store.take(run.app_state, "run/step_2")
    for step in (3, 4):
        run.steps(1)
        report = store.witness(run.app_state, f"run/step_{step}")
        assert report.stored
    resumed = Run()
    snapshot.restore(resumed.app_state)
    for step in (3, 4):
        resumed.steps(1)
        report = store.witness(resumed.app_state, f"run/step_{step}")
        assert (report.stored, report.equal, report.count) == (False, True, 0)
        assert str(report) == f"run/step_{step}: equal, bit for bit"


def test_what_differs_is_told_by_role(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.steps(2)
    snapshot = store.take(run.app_state, "run/step_2")
    run.steps(1)
    store.witness(run.app_state, "run/step_3")
    resumed = Run()
    snapshot.restore(resumed.app_state)
    resumed.optim = torch.optim.AdamW(resumed.model.parameters(), lr=0.5)
    resumed.steps(1)
    with pytest.raises(WitnessError, match=r"run/step_3: \d+ paths differ") as caught:
        store.witness(resumed.app_state, "run/step_3")
    report = caught.value.report
    assert list(report.differing) == ["scheduler", "moments", "weights"]
    assert report.differing["scheduler"] == ["optim/param_groups/0/lr"]
    assert "model/0.weight" in report.differing["weights"]
    assert f"casnap rm {store.path_of('run/witness/step_3')}" in str(caught.value)
    caplog.clear()
    warned = store.witness(resumed.app_state, "run/step_3", on_mismatch="warn")
    assert warned == report
    assert str(report) in caplog.text
    del resumed.app_state["rng"]
    missing = {key: value for key, value in run.app_state.items() if key != "progress"}
    report = store.witness(missing, "run/step_3", on_mismatch="warn")
    assert report.differing == {"counters": ["progress/step"], "values": ["progress"]}
    # The advice helps.
    assert invoke("rm", store.path_of("run/witness/step_3"), "--yes").exit_code == 0
    assert store.witness(resumed.app_state, "run/step_3").stored


def test_it_says_what_has_changed_since(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.witness(small(1), "run/1")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(WitnessError, match="Since then: cudnn_benchmark off → on"):
        store.witness(small(2), "run/1")
    assert store.witness(small(1), "run/1").environment == []


def test_a_trainer_names_it_by_the_snapshot_and_the_steps_since(store: Store) -> None:
    def witness(snapshot: str, steps: int, value: int) -> WitnessReport:
        take = JoinedTake(store.path_of(snapshot), TakeOptions())
        return take.witness(lambda: LiveState(small(value)), steps, on_mismatch="warn")

    for step in (2, 4):
        store.take(small(step), f"run/step_{step}")
    report = witness("run/step_2", 1, 3)
    assert (report.name, report.stored) == ("run/step_2+1", True)
    assert witness("run/step_2", 1, 3).not_compared == ""
    assert witness("run/step_2", 1, 4).count
    assert witness("run/step_4", 1, 5).stored
    # It belongs to its snapshot, also if that is not the last one: a run anew meets none.
    store.take(small(9), "run/step_2", overwrite=True)
    assert witness("run/step_2", 1, 4).stored
    assert not witness("run/step_4", 1, 5).stored
    assert witness("run/step_3", 1, 5).not_compared == "the snapshot that it follows is gone"
    assert "run/witness/step_3+1" not in store


def test_a_training_goes_on_if_the_server_is_away(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"key": "a", "secret": "b", "casnap": {"attempts": 1}}
    options["endpoint_url"] = f"http://127.0.0.1:{free_port()}"
    witnesses = Witnesses(2, "raise", storage_options=options)
    witnesses.follow("s3://bucket/run/step_1")
    witnesses.take(lambda: LiveState(small(1)))
    assert "no witness of step 1 after s3://bucket/run/step_1: " in caplog.text
    assert not witnesses.are_due


def test_a_trainer_makes_no_store_for_it(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the disk of its store was unmounted, the folder below stays as it is."""
    snapshot = store.take(small(1), "run/step_1")
    witnesses = Witnesses(2, "raise")
    witnesses.follow(snapshot.path)
    Path(store.uri).rename(tmp_path / "aside")
    witnesses.take(lambda: LiveState(small(2)))
    assert f"no witness of step 1 after {snapshot.path}: " in caplog.text
    assert "is not a casnap store" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["aside"]


def test_nothing_takes_it_for_a_snapshot(store: Store) -> None:
    for step in range(1, 5):
        store.take(small(step), f"run/step_{step}", retention=Retention(keep_last=2))
        store.witness(small(step), f"run/step_{step}")
    names = ["run/step_3", "run/step_4"]
    assert [s.name for s in store.snapshots()] == names
    assert [s.name for s in store.snapshots("run/witness")] == []
    for latest in (store.latest(), store.latest("run")):
        assert latest is not None
        assert latest.name == names[-1]
    assert store.latest("run/witness") is None
    assert [usage.name for usage in store.usage()] == names
    judged = store.prune(Retention(keep_last=1), dry_run=True).verdicts
    assert [(v.name, v.kept) for v in judged] == [("run/step_3", False), ("run/step_4", True)]
    for command in ("ls", "du"):
        assert "witness" not in invoke(command, store.uri).stdout
    folder = Path(store.uri, "run")
    assert sorted(path.name for path in folder.iterdir()) == ["step_3", "step_4"], "no marker"
    assert store.rewind("run/step_3").name == "run/step_3"


def test_a_take_does_not_read_the_rows_of_all_witnesses(store: Store) -> None:
    """The name of a new snapshot is checked, and thousands of witnesses may follow it."""
    store.take(small(1), "run/step_1")
    store.witness(small(2), "run/step_2")
    repository = store._view.repository
    table = repository.table(repository.newest())
    row, nodes, read = table.get("run/witness/step_2"), dict[Digest, bytes](), list[Digest]()

    def put(node: bytes) -> Digest:
        nodes[digest_of(node)] = node
        return digest_of(node)

    def load(digest: Digest) -> bytes:
        read.append(digest)
        return nodes[digest]

    rows = {"run/step_1": table.get("run/step_1")}
    rows |= {f"run/witness/step_{step}": row for step in range(300)}
    top = Table(None, load, list).edit(rows, put)
    many = Table(top, load, list)
    many.check_free("run/step_2", overwrite=False, uri="")
    assert len(read) < 20 < len(nodes)
    assert list(many.items_below("run/")) == [("run/step_1", rows["run/step_1"])]


def test_no_snapshot_takes_the_place_of_the_folder_of_witnesses(store: Store) -> None:
    """Else the run could get no witness any more."""
    store.take(small(1), "run/step_1")
    store.witness(small(2), "run/step_2")
    with pytest.raises(SnapshotExistsError, match="is the folder of the witness 'run/witness/st"):
        store.take(small(3), "run/witness")
    assert store.witness(small(3), "run/step_3").stored


def test_it_holds_no_chunk_of_the_state(store: Store) -> None:
    state = {"s": StateDict({f"{i}": torch.randn(1 << 15) for i in range(64)})}
    before = _bytes_in(store)
    store.witness(state, "run/1")
    added = _bytes_in(store) - before
    assert added < 20_000
    state["s"]["0"] += 1
    store.witness(state, "run/2")
    assert _bytes_in(store) - before - added < added, "the paths are shared"
    assert store.check(data=True).ok


def _bytes_in(store: Store) -> int:
    return sum(path.stat().st_size for path in Path(store.uri).rglob("packs/*/*"))


# --- how long it stays ----------------------------------------------------------------------------


def has(store: Store, *steps: int) -> list[int]:
    return [step for step in steps if f"run/witness/{step}" in store]


def test_it_goes_with_the_snapshot_before_it(store: Store) -> None:
    store.witness(small(0), "run/0")
    for step in (10, 20, 30, 40):
        store.take(small(step), f"run/{step}")
        store.witness(small(step + 1), f"run/{step + 1}")
    store.take(small(1), "other/1")
    store.delete("other/1")
    assert has(store, 0, 11, 21, 31, 41) == [0, 11, 21, 31, 41]
    store.delete("run/20")
    assert has(store, 0, 11, 21, 31, 41) == [11, 31, 41], "what was before all snapshots goes, too"
    store.prune(Retention(keep_last=2))
    assert has(store, 11, 31, 41) == [31, 41]
    store.take(small(0), "run/30", overwrite=True)
    assert has(store, 31, 41) == [41]
    store.gc(grace=0)
    assert store.check(data=True).ok
    assert store.witness(small(41), "run/41").equal
    for step in (30, 40):
        store.delete(f"run/{step}")
    assert has(store, 41) == []
    store.gc(grace=0)
    store.gc(grace=0)
    assert store.gc(grace=0).live_bytes < 5000


def test_a_run_that_went_back_may_go_another_way(store: Store) -> None:
    for step in (10, 20):
        store.take(small(step), f"run/{step}")
        store.witness(small(step + 1), f"run/{step + 1}")
    store.rewind("run/20")
    assert has(store, 11, 21) == [11]
    store.rewind("run/10")
    assert has(store, 11, 21) == []
    assert store.witness(small(7), "run/11").stored


def test_it_comes_after_a_take_that_is_pending(store: Store) -> None:
    store.take(small(0), "run/0")
    pending = store.async_take(small(1), "run/1")
    store.witness(small(2), "run/2")
    assert pending.done()
    store.delete("run/0")
    assert has(store, 2) == [2]
    store.delete("run/1")
    assert has(store, 2) == []


# --- other stores ---------------------------------------------------------------------------------


def test_a_mirror_gets_it_and_a_new_node_meets_it(tmp_path: Path) -> None:
    store = mirrored(tmp_path / "here", tmp_path / "there")
    for step in (1, 2, 3):
        store.take(small(step), f"run/step_{step}")
        store.witness(small(step + 10), f"run/step_{step + 10}")
    store.wait_mirrored(60)
    there = Store(tmp_path / "there")
    assert [s.name for s in there.snapshots()] == [f"run/step_{step}" for step in (1, 2, 3)]
    assert there.witness(small(13), "run/step_13").equal
    node = mirrored(tmp_path / "node", tmp_path / "there")
    latest = node.latest("run")
    assert latest is not None
    assert latest.name == "run/step_3"
    assert node.witness(small(13), "run/step_13").equal
    with pytest.raises(WitnessError):
        node.witness(small(14), "run/step_13")
    # The mirror's own rules.
    there.prune(Retention(keep_last=1))
    assert not there.witness(small(13), "run/step_13").stored
    assert there.witness(small(11), "run/step_11").stored
    # What is stored anew replaces the mirror's.
    store.delete("run/witness/step_13")
    there.delete("run/witness/step_13")
    store.witness(small(5), "run/step_13")
    store.wait_mirrored(60)
    assert there.witness(small(5), "run/step_13").equal


def test_a_copy_of_a_run_has_it(store: Store, tmp_path: Path) -> None:
    store.take(small(1), "run/1")
    store.witness(small(2), "run/2")
    copy = Store(tmp_path / "copy", create=NewStore(chunk_size=CHUNK))
    store.copy("run/1", to=copy)
    assert "run/witness/2" not in copy
    store.copy("run", to=copy, rename="again")
    assert [s.name for s in copy.snapshots()] == ["run/1", "again/1"]
    assert copy.witness(small(2), "again/2").equal
    store.copy("run", to=copy, rename="again")
    assert copy.check(data=True).ok


# --- what is refused ------------------------------------------------------------------------------


def test_bad_input(store: Store) -> None:
    take: Any = store.witness
    with pytest.raises(ValueError, match="'raise' or 'warn'; got 'log'"):
        take(small(1), "run/1", on_mismatch="log")
    with pytest.raises(UnsupportedTypeError, match=r"store.witness\(app_state, name\)"):
        take("run/1", small(1))
    with pytest.raises(InvalidNameError):
        take(small(1), "../1")
    with pytest.raises(UnsupportedTypeError):
        take({"s": StateDict(x=lambda: 1)}, "run/1")
    assert not list(store.snapshots())
    store.take(small(1), "run/witness/1")
    with pytest.raises(SnapshotExistsError, match="is a snapshot, and its name is that of the wit"):
        take(small(1), "run/1")
    assert store["run/witness/1"].read_object("s/step") == 1


def test_a_damaged_witness_is_damage(store: Store) -> None:
    run = Run()
    store.witness(run.app_state, "run/1")
    contents = store["run/witness/1"].contents
    (chunk,) = contents.chunks("witness/paths", contents.entry("witness/paths")[1])
    damage_everywhere(Path(store.uri), chunk[0])
    # An equal state is told by the tree alone.
    assert store.witness(run.app_state, "run/1").equal
    run.progress["step"] += 1
    with pytest.raises(DamagedError):
        store.witness(run.app_state, "run/1")
    hurts = {str(hurt) for damage in store.check(data=True).damages for hurt in damage.hurts}
    assert len(hurts) == 1
    assert "run/witness/1" in hurts.pop()


def renoted(store: Store, name: str, note: Any) -> None:
    """Give the row of a witness another note, or none."""
    row = store[name].row
    Changes(store._view.repository).edit_row(
        name, row.commit.hex(), lambda row: row.with_notes({"witness": note})
    )


@pytest.mark.parametrize("note", [None, ["of a later version"]])
def test_who_does_not_know_the_note_resumes_from_a_snapshot(store: Store, note: Any) -> None:
    """Then it is a snapshot that was moved aside."""
    for step in (1, 2, 3):
        store.take(small(step), f"run/step_{step}")
    store.witness(small(4), "run/step_4")
    renoted(store, "run/witness/step_4", note)
    assert "run/witness/step_4" in [s.name for s in store.snapshots()]
    latest = store.latest("run")
    assert latest is not None
    assert latest.name == "run/step_3"
    report = store.prune(Retention(keep_last=3))
    assert [verdict.name for verdict in report.deleted] == ["run/witness/step_4"]
    assert store.check(data=True).ok


def test_a_snapshot_with_the_note_of_a_witness_is_damaged(store: Store) -> None:
    store.take(small(1), "run/witness/1")
    renoted(store, "run/witness/1", "")
    with pytest.raises(DamagedError, match="is no witness"):
        store.witness(small(1), "run/1")


# --- ranks ----------------------------------------------------------------------------------------


def of_rank(value: float = 0.0, own: int = 0) -> dict[str, Any]:
    values = torch.arange(90_000.0).view(300, 300)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = DTensor.from_local(values, mesh, [Replicate()], run_check=False)
    sharded = whole.redistribute(mesh, [Shard(0)])
    if dist.get_rank() == dist.get_world_size() - 1:
        sharded.to_local()[-1, -1] += value
    mine = dist.get_rank() * (1 + own)
    return {"s": StateDict(x=sharded, own=mine, same=torch.ones(100)), "rng": RNGState()}


def witnessed_by_ranks(path: Path) -> list[Any]:
    store = Store(path / "store")
    torch.manual_seed(dist.get_rank())
    results: list[Any] = [store.witness(of_rank(), "run/1").stored]
    results.append(store.witness(of_rank(), "run/1").equal)
    for state in (of_rank(value=1), of_rank(own=1)):
        with pytest.raises(WitnessError) as caught:
            store.witness(state, "run/1")
        results.append(caught.value.report.differing)
    return results


def test_ranks_share_the_work_and_raise_together(world: Worlds, tmp_path: Path) -> None:
    for results in world(2).run(witnessed_by_ranks, tmp_path):
        assert results == [True, True, {"weights": ["s/x"]}, {"values": ["1/s/own"]}]
    store = Store(tmp_path / "store")
    whole = {"s": StateDict(x=torch.ones(3)), "rng": RNGState()}
    report = store.witness(whole, "run/1")
    assert (report.equal, report.not_compared) == (True, "2 ranks had it, and this is 1")


def failing_on_one_rank(path: Path) -> list[str]:
    store = Store(path / "store")
    unfit = StateDict(x=(lambda: 1) if dist.get_rank() else 1)
    errors = []
    for state in ({"s": unfit}, of_rank()):
        with pytest.raises(CasnapError) as caught:
            store.witness(state, "run/1")
        errors.append(str(caught.value))
    return [*errors, str(store.witness(of_rank(), "run/2"))]


def test_an_error_of_one_rank_is_raised_by_all(world: Worlds, tmp_path: Path) -> None:
    Store(tmp_path / "store").take(small(1), "run/witness/1")  # only rank 0 looks for it
    for unfit, taken, stored in world(2).run(failing_on_one_rank, tmp_path):
        assert "s/x" in unfit
        assert "its name is that of the witness" in taken
        assert stored == "run/2: the witness is stored"
