"""A check of a part, of a store that others change meanwhile, and as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from casnap import NewStore, StateDict, Store
from casnap.errors import SnapshotNotFoundError
from casnap.format.records import pack_key
from casnap.storage.collecting.gc import GcOptions, collect
from tests.support.cli_calls import document, failure, invoke
from tests.support.damaged import (
    FROZEN,
    KEY,
    WEIGHT,
    change,
    check,
    content,
    flip,
    forget_copies,
    make,
    newest,
    record_of,
)
from tests.support.faults import CHUNK, backend_faults, elsewhere, faults


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make(tmp_path / "store")
    return tmp_path / "store"


def test_a_sample(store: Path) -> None:
    report = check(store, sample=0.5, seed=1)
    assert 0 < report.read_bytes < report.stored_bytes
    assert check(store, sample=0.5, seed=1).read_bytes == report.read_bytes
    assert len({check(store, sample=0.5, seed=seed).read_bytes for seed in range(5)}) > 1


@pytest.mark.parametrize("sample", [0, -0.5, 1.5, float("nan")])
def test_no_such_sample(store: Path, sample: float) -> None:
    with pytest.raises(ValueError, match="sample is a share"):
        check(store, sample=sample)


@pytest.mark.usefixtures("collected_by_hand")
def test_a_collector_meanwhile(store: Path) -> None:
    """Files that a collector deletes during the check are no damage."""

    def collect_all() -> None:
        other = Store(store, create=False)
        other.delete("a")
        other.delete("b")
        assert collect(other._view.repository, GcOptions(grace=0)).deleted_packs

    with backend_faults(0, collect_all, ["size"]) as calls:
        report = check(store, data=True)
    assert calls.struck
    assert report.ok
    assert report.snapshots == 1


def test_a_take_meanwhile(store: Path) -> None:
    """A take that merges the segments which the check is about to read."""

    @elsewhere
    def take() -> None:
        for step in range(8):
            Store(store).take({KEY: StateDict(content(step))}, f"more/{step}")
        collect(Store(store)._view.repository, GcOptions(grace=0))

    from casnap.backends import LocalBackend

    with faults(LocalBackend, ["read"], 4, take) as calls:
        report = check(store)
    assert calls.struck
    assert report.ok


# --- the command ------------------------------------------------------------------------------


def test_command(store: Path) -> None:
    printed = invoke("check", store).stdout
    assert "no damage found" in printed
    assert "--data reads every byte" in printed
    assert "were read and verified" in invoke("check", store, "--data").stdout
    assert "(--seed 7)" in invoke("check", store, "--sample", "50%", "--seed", "7").stdout
    found = document("check", store, "--sample", "0.5")
    assert found["ok"]
    assert found["sample"] == 0.5
    assert found["seed"] is not None


@pytest.mark.parametrize("share", ["0", "101%", "x", "-1", "nan"])
def test_a_share_that_is_none(store: Path, share: str) -> None:
    assert "write it like 5%" in failure("check", store, "--sample", share, status=2)


def test_command_on_damage(store: Path) -> None:
    digest, place = record_of(store, FROZEN)
    change(store / "casnap-store" / pack_key(place.pack), flip(place.offset))
    invoke("check", store)
    result = invoke("check", store, "--data", status=1)
    assert digest.hex() in result.stdout
    assert f"hurts run/c {KEY}/frozen" in result.stdout
    assert f"`casnap repair {store}` saves what can be saved (--yes in a script)" in result.stdout
    found = json.loads(invoke("check", store, "--data", "--json", status=1).stdout)
    assert not found["ok"]
    assert [d["digest"] for d in found["damages"]] == [digest.hex()]
    assert {"name": "b", "entry": f"{KEY}/frozen"} in found["hurts"]


def test_one_snapshot_alone(store: Path) -> None:
    """Only what it needs is read: damage of another snapshot is not seen."""
    said = invoke("check", store / "run/c", "--data").stdout
    assert "1 snapshot, " in said
    assert "no damage found" in said
    whole, alone = document("check", store, "--data"), document("check", store / "b", "--data")
    assert (whole["name"], alone["name"]) == (None, "b")
    assert 0 < alone["read_bytes"] == alone["stored_bytes"] < whole["read_bytes"]
    digest, place = record_of(store, WEIGHT)
    change(store / "casnap-store" / pack_key(place.pack), flip(place.offset))
    assert document("check", store / "a", "--data")["ok"]
    hurt = json.loads(invoke("check", store / "b", "--data", "--json", status=1).stdout)
    assert hurt["hurts"] == [{"name": "b", "entry": f"{KEY}/weight"}]
    assert [each["digest"] for each in hurt["damages"]] == [digest.hex()]
    (damage,) = Store(store).check(name="b", data=True).damages
    assert damage.digest == digest.hex()
    with pytest.raises(SnapshotNotFoundError, match="nearest"):
        Store(store).check(name="run/cc")
    assert "nearest: run/c" in failure("check", store / "run/cc")
    assert "check is for the whole store" in invoke("check", store / "run").stderr


def test_much_damage_is_little_output(tmp_path: Path) -> None:
    store = Store(tmp_path, create=NewStore(chunk_size=CHUNK)).make()
    state = {f"x{i}": torch.full((100,), i, dtype=torch.int32) for i in range(200)}
    store.take({"s": StateDict(state)}, "one")
    _, place = record_of(tmp_path, state["x7"])
    change(
        tmp_path / "casnap-store" / pack_key(place.pack), lambda raw: bytes(80_000) + raw[80_000:]
    )
    printed = invoke("check", tmp_path, "--data", status=1).stdout
    assert "178 damages more (--json)" in printed
    assert len(printed.splitlines()) < 60
    assert len(store.check(data=True).damages) == 198


def test_whose_a_left_over_is(tmp_path: Path) -> None:
    """Takes merge segments of the index, and leave the old ones."""
    store = Store(tmp_path / "s").make()
    while not store.check().orphans:
        count = len(store.snapshots())
        store.take({"s": StateDict(step=count)}, f"step_{count}")
    report = store.check()
    assert report.orphans == report.orphan_segments
    said = invoke("check", tmp_path / "s").stdout
    assert f"of these, {report.orphans} objects of the index: takes that merge" in said


def test_a_newest_root_that_was_lost(store: Path) -> None:
    """The store stands one snapshot earlier; the marker of that snapshot tells it."""
    lost = Store(store)["run/c"].commit_id
    assert check(store).warnings == []
    newest(store).unlink()
    forget_copies(store)
    names = [s.name for s in Store(store).snapshots()]
    assert names == ["a", "b"]
    (warning,) = check(store).warnings
    assert f"the marker in run/c names the commit {lost}, which no snapshot" in warning
    assert f"warning: {warning}" in invoke("check", store).stdout
    # No repair can bring it back, and it says so.
    repaired = Store(store).repair(dry_run=True)
    assert repaired.found == []
    assert repaired.warnings == [warning]
    said = invoke("repair", store, "--yes").stdout
    assert f"no damage found\nwarning: {warning}" in said
    (store / "run/c/casnap-snapshot.json").unlink()
    assert "warning" not in invoke("repair", store, "--yes").stdout
