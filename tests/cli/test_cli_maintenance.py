"""The commands that maintain a store: what they report, and what they refuse."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.errors import BackendError, DamagedError
from casnap.storage.collecting.gc import GcOptions
from tests.support.cli_calls import document, failure, invoke, process
from tests.support.damaged import (
    copied_store,  # noqa: F401 - a fixture
    damage_everywhere,
    forget_cache,
    forget_copies,
    newest,
    pristine_store,  # noqa: F401 - a fixture
)
from tests.support.faults import CHUNK, backend_faults, files, take
from tests.support.forger import Forger
from tests.support.json_keys import listed_keys
from tests.support.written import configure

# --- what is damaged --------------------------------------------------------------------------


def test_from_damage_to_a_store_that_is_collected_again(store: Path, cache_dir: Path) -> None:
    """The next step that each command advises works."""
    damage_everywhere(store, Store(store)._view.row_of("b").manifest.digest)
    forget_cache(cache_dir)
    before = files(store)
    for command in (["show", store / "b"], ["du", store]):
        assert f"`casnap check {store}` says what is hurt" in failure(*command)
    message = failure("gc", store, "--grace", 0)
    assert "Nothing was deleted" in message
    assert "same bytes" not in message
    assert files(store) == before
    assert f"`casnap repair {store}` saves" in invoke("check", store, status=1).stdout
    assert "`casnap rm`" in invoke("repair", store, "--yes", status=1).stdout
    message = invoke("check", store, status=1).stdout
    assert "saves what can be saved" not in message
    assert f"`casnap repair {store} --from STORE`" in message
    assert "`casnap rm` of the hurt snapshots" in message
    assert "`casnap rm` of the snapshots" in failure("gc", store, "--grace", 0)
    invoke("rm", store / "b", "--yes")
    assert "2 snapshots marked" in invoke("gc", store, "--grace", 0).stdout
    assert "no damage found" in invoke("check", store).stdout


def test_nothing_repairs_what_was_written_wrongly(tmp_path: Path) -> None:
    forger = Forger(tmp_path / "store")
    forger.publish({"s": forger.tree(["/x", ["t", [4000, b"", b"\1" * 32], "float32", [9]]])})
    output = invoke("check", tmp_path / "store", status=1).stdout
    assert "casnap repair" not in output
    assert "`casnap rm` of the hurt snapshots" in output


def test_a_table_that_is_lost(store: Path, cache_dir: Path) -> None:
    """How many snapshots there are is not known, and none can be deleted."""
    table = Store(store)._view.repository.newest().table
    assert table is not None
    damage_everywhere(store, table.digest)
    forget_cache(cache_dir)
    invoke("repair", store, "--yes", status=1)
    output = invoke("check", store, status=1).stdout
    assert "0 snapshots" not in output
    assert "casnap rm" not in output
    assert "--from STORE" in output


def test_paths_that_are_known_to_be_hurt_are_kept(store: Path) -> None:
    opened = Store(store)
    with (
        backend_faults(0, _damage, ["names"]),
        pytest.raises(DamagedError, match="Nothing was deleted") as caught,
    ):
        opened.gc(grace=0)
    assert caught.value.paths == ("s/x",)


def _damage() -> None:
    raise DamagedError("on purpose", ("s/x",))


def test_a_folder_in_place_of_a_file(store: Path) -> None:
    file = newest(store)
    file.unlink()
    file.mkdir()
    assert f"{file} is a folder, not a file" in invoke("check", store, status=1).stdout
    forget_copies(store)
    for command in ("check", "gc"):
        assert failure(command, store) == f"casnap: {file} is a folder, not a file\n"


@pytest.mark.parametrize("in_its_place", [None, Path.mkdir])
def test_a_store_that_lost_its_record(
    store: Path, in_its_place: Callable[[Path], None] | None
) -> None:
    (store / "casnap-store/casnap.json").unlink()
    if in_its_place is not None:
        in_its_place(store / "casnap-store/casnap.json")
    before = files(store)
    for command in ("ls", "gc", "check", "init"):
        for path in (store, store / "run/c"):
            message = failure(command, path)
            assert f"{store} is a damaged store" in message
            assert f"`casnap repair {store}` makes it anew (--yes in a script)" in message
    with pytest.raises(DamagedError, match=r"casnap\.json is missing"):
        Snapshot.take(store / "run/d", {"s": StateDict(x=1)})
    assert f"`casnap repair {store}` makes it anew" in failure("repair", "--yes", store / "run")
    assert files(store) == before


# --- which store ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["gc"], ["check"], ["repair", "--yes"]])
def test_a_path_that_is_not_there_is_not_the_store_above(store: Path, command: list[str]) -> None:
    before = files(store)
    message = failure(*command, store / "none")
    assert f"{store / 'none'} does not exist" in message
    assert message.rstrip().endswith(f"name {store}")
    assert files(store) == before
    assert str(store) in invoke(*command, store / "run").stdout.splitlines()[0]


def test_gc_says_that_it_is_for_the_whole_store(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"lies in {store}; gc is for the whole store\n"
    assert invoke("gc", store / "run", "--dry-run").stderr == f"{store / 'run'} {said}"
    assert invoke("gc", store, "--dry-run").stderr == ""
    monkeypatch.chdir(store / "run")
    result = invoke("gc")
    assert result.stdout.startswith(f"{store}: 3 snapshots marked, ")
    assert result.stderr == f"the current folder {said}"


# --- usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["check", "--data", "--sample", "5%"], "give one of them"),
        (["check", "--seed", "3"], "give both"),
        (["gc", "--repack", "1.5"], "is not a share; write it like 5% or 0.05"),
        (["check", "--sample", "0%"], "write it like 5% or 0.05"),
        (["repair", "--yes", "--from", "absent"], "'absent' does not exist"),
        (["repair", "--yes", "--from", "file:///absent"], "does not exist"),
        (["prune", "--keep-last", "1", "--yes", "--grace", "24h"], "--grace is for"),
        (["check", "--endpoint-url", "http://127.0.0.1:1"], "like s3://bucket/run1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_changes_nothing(store: Path, command: list[str], problem: str) -> None:
    before = files(store)
    verb, *options = command
    assert problem in failure(verb, store, *options, status=2).replace("\n", " ")
    assert files(store) == before


def test_an_endpoint_is_a_url() -> None:
    message = failure("ls", "s3://bucket/run1", "--endpoint-url", "localhost:9000", status=2)
    assert "a URL, like http://localhost:9000" in message


@pytest.mark.parametrize("share", ["50%", "0.5", "0.50", "050%"])
def test_shares_are_written_in_two_ways(store: Path, share: str) -> None:
    invoke("gc", store, "--repack", share, "--dry-run")
    assert document("check", store, "--sample", share)["sample"] == 0.5


def test_numbers_that_are_none_are_printed(tmp_path: Path) -> None:
    metadata = {"a": math.nan, "b": -math.inf, "c": [math.inf, 1.5]}
    Store(tmp_path).take({"s": StateDict(x=1)}, "one", metadata=metadata)
    assert "  a=nan b=-inf c=[inf, 1.5]  " in invoke("ls", tmp_path).stdout
    assert document("ls", tmp_path)["snapshots"][0]["metadata"]["c"] == [None, 1.5]


def test_an_interrupt_while_it_is_imported(tmp_path: Path) -> None:
    code = f"import os, signal\nos.kill(os.getpid(), {int(signal.SIGINT)})\n"
    (tmp_path / "click.py").write_text(code)
    here = Path(__file__).resolve().parents[2]
    done = process(
        "check", tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{here}"}
    )
    assert (done.returncode, done.stderr.strip()) == (130, "casnap: interrupted")


# --- prune --gc -------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a store of four snapshots that share a part."""
    store = Store(tmp_path / "runs", create=NewStore(chunk_size=CHUNK))
    for step in range(4):
        take(store, step)
    return tmp_path / "runs"


PRUNE = ["--keep-last", 1, "--gc", "--grace", 0]


@pytest.mark.parametrize("prefix", ["", "run"])
def test_a_dry_run_collects_what_would_be_forgotten(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "store"
    for step in range(4):
        take(Store(path / prefix if step else path, create=NewStore(chunk_size=CHUNK)), step)
    # That this root has no garbage is noted, and beside the point.
    invoke("gc", path, "--grace", 0)
    before = files(path)
    plan = document("prune", path / prefix, *PRUNE, "--dry-run")["gc"]
    assert files(path) == before
    done = document("prune", path / prefix, *PRUNE, "--yes")["gc"]
    assert plan["snapshot_count"] == done["snapshot_count"]
    assert plan["live_bytes"] == pytest.approx(done["live_bytes"], rel=0.02)
    assert plan["freed_bytes"] == pytest.approx(done["freed_bytes"], rel=0.1)
    assert done["freed_bytes"] > 100_000


def test_what_is_forgotten_is_kept_where_a_kept_snapshot_is_the_same(runs: Path) -> None:
    """A manifest that two snapshots share goes with neither alone."""
    same = {"s": StateDict(x=torch.arange(100_000))}
    store = Store(runs)
    for name in ("a/old", "a/new"):
        store.take(same, name)
    invoke("gc", runs, "--grace", 0)
    plan = document("prune", runs, "--prefix", "a", *PRUNE, "--dry-run")
    assert plan["prefix"] == "a"
    assert [s["name"] for s in plan["snapshots"] if not s["kept"]] == ["a/old"]
    assert plan["gc"]["condemned_pack_count"] == plan["gc"]["freed_bytes"] == 0


def test_only_a_dry_run_leaves_snapshots_out() -> None:
    with pytest.raises(ValueError, match="only a dry run"):
        GcOptions(deleted=frozenset({"a"}))


def test_where_gc_fails_it_is_known_what_was_deleted(runs: Path) -> None:
    def fail() -> None:
        raise BackendError("on purpose")

    with backend_faults(0, fail, ["tidy"], lasting=True):
        result = invoke("prune", runs, "--keep-last", 2, "--gc", "--yes", "--json", status=1)
        output = json.loads(result.stdout)
        assert output["error"] == "on purpose"
        assert "error" in listed_keys("prune")
        assert [s["kept"] for s in output["snapshots"]] == [False, False, True, True]
        assert result.stderr == "casnap: on purpose\n"
        result = invoke("prune", runs, "--keep-last", 1, "--gc", "--yes", status=1)
    assert "1 snapshot deleted, 1 kept" in result.stdout
    assert [s.name for s in Store(runs).snapshots()] == ["step_3"]


def test_where_writers_cannot_be_kept_apart(runs: Path) -> None:
    configure(runs, put_if_absent=False)
    before = files(runs)
    assert "pass --exclusive" in failure("prune", runs, *PRUNE, "--yes")
    assert files(runs) == before
    path = f"{runs}/step_3"
    writes = [("rm", path, "--yes"), ("tag", path, "best"), ("repair", runs, "--yes"), ("gc", runs)]
    for command in writes:
        assert "pass --exclusive" in failure(*command), command
        assert files(runs) == before
    invoke("ls", runs)
    invoke("gc", runs, "--dry-run")
    assert files(runs) == before
    invoke("tag", path, "best", "--exclusive")
    assert document("prune", runs, *PRUNE, "--yes", "--exclusive")["gc"]["deleted_pack_count"]
    invoke("rm", path, "--tagged", "--yes", "--exclusive")
