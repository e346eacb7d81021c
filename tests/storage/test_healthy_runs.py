"""Runs whose later snapshots have NaN: what a resume finds, and what a retention keeps."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Retention, Snapshot, StateDict, Store
from casnap.cli import run as command
from casnap.errors import SnapshotError, SnapshotExistsError
from casnap.integrations.folders import prune_missing_folders
from tests.support.ranks import Worlds


def state(number: float) -> Mapping[str, Any]:
    """Return weights, and moments with a number in them."""
    moments = torch.ones(100)
    moments[7] = number
    return {"model": StateDict(w=torch.ones(10)), "optim": StateDict(exp_avg=moments)}


def run_of(store: Store, numbers: str, **options: Any) -> None:
    """Take a snapshot for each letter: of finite numbers, with NaN, or infinite ones."""
    for step, letter in enumerate(numbers):
        number = {"f": 1.0 + step, "n": nan, "i": inf}[letter]
        store.take(state(number), f"run/{step}", **options)


def names(store: Store) -> list[str]:
    return [snapshot.name for snapshot in store.snapshots()]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", health=True)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "casnap")


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in caplog.messages if text in message]


def test_latest_passes_over_what_has_nan(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run_of(store, "ffni")
    last, healthy = store.latest("run"), store.latest("run", healthy=True)
    assert (last and last.name, healthy and healthy.name) == ("run/3", "run/1")
    assert warnings_of(caplog, "passed over") == [
        f"passed over, since they have NaN or infinite elements: {store.path_of('run/2')}, "
        f"{store.path_of('run/3')}. The last one before is {store.path_of('run/1')}"
    ]
    caplog.clear()
    run_of(store, "ffff", overwrite=True)
    healthy = store.latest(healthy=True)
    assert healthy is not None
    assert healthy.name == "run/3"
    assert not caplog.messages


def test_what_was_not_measured_counts_as_healthy(store: Store) -> None:
    Store(store.uri, health=False).take(state(nan), "run/a")
    store.take(state(nan), "run/b")
    healthy = store.latest(healthy=True)
    assert healthy is not None
    assert healthy.name == "run/a"


def test_nothing_else_is_left(store: Store) -> None:
    assert store.latest(healthy=True) is None
    run_of(store, "nn")
    with pytest.raises(SnapshotError, match=r"only snapshots are left that have NaN .*run/1: `cas"):
        store.latest("run", healthy=True)
    assert store.latest("run") is not None


def test_a_run_goes_back_and_on(store: Store) -> None:
    run_of(store, "ffn")
    healthy = store.latest("run", healthy=True)
    assert healthy is not None
    with pytest.raises(SnapshotExistsError):
        store.take(state(1.0), "run/2")
    store.rewind(healthy.name)
    store.take(state(1.0), "run/2")
    aside = next(s for s in store.snapshots() if s.name.startswith("run/rewound"))
    assert (aside.unhealthy, aside.health()["optim/exp_avg"].nan) == (1, 1)
    # What was moved aside holds nothing.
    store.prune(Retention(keep_last=1))
    assert names(store) == ["run/2"]


def test_a_mirror_passes_over_the_same(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", health=True, mirror=tmp_path / "mirror")
    run_of(store, "ffn")
    store.wait_mirrored()
    for each in (store, Store(tmp_path / "mirror")):
        healthy = each.latest("run", healthy=True)
        assert healthy is not None
        assert healthy.name == "run/1"
    for name in names(store):
        store.delete(name)
    healthy = store.latest("run", healthy=True)
    assert healthy is not None
    assert healthy.path == str(tmp_path / "mirror" / "run" / "1")


# --- the last healthy snapshot stays --------------------------------------------------------------


def test_a_retention_keeps_the_last_healthy_one(store: Store) -> None:
    run_of(store, "fffninn", retention=Retention(keep_last=2))
    assert names(store) == ["run/2", "run/5", "run/6"]
    report = store.prune(Retention(keep_last=1), dry_run=True)
    assert [v.reasons for v in report.verdicts if v.name == "run/2"] == [
        ("all later ones have NaN or infinite elements",)
    ]
    # Once the run is well again, it is as any other.
    store.take(state(1.0), "run/7", retention=Retention(keep_last=2))
    assert names(store) == ["run/6", "run/7"]


def test_it_stays_whole(store: Store) -> None:
    thin = Retention(keep_last=9, thin={"optim": 1})
    run_of(store, "ffnnn", retention=thin)
    thinned = {s.name for s in store.snapshots() if s.thinned}
    assert thinned == {"run/0", "run/2", "run/3"}
    store.thin({"optim": 1})
    assert store["run/1"].thinned == ()
    healthy = store.latest("run", healthy=True)
    assert healthy is not None
    assert healthy.name == "run/1"


def test_each_run_has_its_own(store: Store) -> None:
    run_of(store, "fn")
    for name, number in (("other/0", 1.0), ("other/1", 2.0)):
        store.take(state(number), name)
    store.prune(Retention(keep_last=1))
    assert names(store) == ["run/0", "run/1", "other/1"]


def test_a_mirror_keeps_it_too(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", health=True, mirror=tmp_path / "mirror")
    run_of(store, "ffnnn")
    store.wait_mirrored()
    mirror = Store(tmp_path / "mirror")
    mirror.prune(Retention(keep_last=1))
    assert names(mirror) == ["run/1", "run/4"]


def test_a_folder_that_is_gone_does_not_delete_it(store: Store) -> None:
    run_of(store, "ffnn")
    for step in range(3):
        (Path(store.uri) / "run" / str(step) / "casnap-snapshot.json").unlink()
        (Path(store.uri) / "run" / str(step)).rmdir()
    prune_missing_folders(store)
    assert names(store) == ["run/1", "run/3"]


# --- a resume is told -----------------------------------------------------------------------------


def test_a_restore_says_that_there_is_nan(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run_of(store, "fn")
    store["run/0"].restore(state(0.0))
    assert not warnings_of(caplog, "`casnap show")
    for _ in range(2):
        store["run/1"].restore(state(0.0))
    Snapshot(store.path_of("run/1")).load_into(torch.nn.Linear(1, 1), strict=False)
    assert warnings_of(caplog, "`casnap show") == [
        f"{store.path_of('run/1')} has NaN or infinite elements in 1 tensor: `casnap show "
        f"{store.path_of('run/1')} --health` names them. Store.latest(healthy=True) finds the "
        "last snapshot without"
    ]


def resumed_by_ranks(path: Path) -> list[str]:
    store = Store(path, health=True)
    run_of(store, "ffn")
    last = store.latest("run", healthy=True)
    assert last is not None
    last.restore(state(0.0))
    store["run/2"].restore(state(0.0))
    return [last.name]


def test_all_ranks_find_one(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(resumed_by_ranks, tmp_path / "store") == [["run/1"], ["run/1"]]


# --- the commands ---------------------------------------------------------------------------------


def test_show_and_ls(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(store, "fi")
    Store(store.uri, health=False).take(state(nan), "run/2")
    bad = store.path_of("run/1")
    assert command(["show", bad, "--health"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        ["PATH", "NAN", "INFINITE", "NORM", "LARGEST"],
        ["optim/exp_avg", "1", "9.94987", "1"],
        ["model/w", "3.16228", "1"],
    ]
    assert command(["show", bad, "--health", "--limit", "1"]) == 0
    assert "… and 1 tensor more" in capsys.readouterr().out
    assert command(["show", bad, "--health", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["unhealthy"] == 1
    assert [each["infinite_count"] for each in answer["health"]] == [1, 0]
    assert command(["show", bad, "optim", "--health"]) == 2
    assert "give no PATH" in capsys.readouterr().err
    assert command(["show", store.path_of("run/2"), "--health"]) == 0
    assert "no numbers are noted" in capsys.readouterr().out
    assert command(["show", bad]) == 0
    assert "unhealthy  1 tensor" in capsys.readouterr().out
    assert command(["ls", store.uri]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ["NaN" in line for line in lines] == [False, True, False]
