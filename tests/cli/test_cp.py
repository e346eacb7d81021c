"""``casnap cp``: what it copies where, what it prints, and what it refuses."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from casnap import NewStore, Store
from tests.support.cli_calls import CHUNK, document, failure, fill, invoke


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("cp") / "source")


def names(place: object) -> list[str]:
    return [s.name for s in Store(str(place), create=False).snapshots()]


def test_whole_stores_prefixes_and_snapshots(source: Path, tmp_path: Path) -> None:
    invoke("cp", source, tmp_path / "all")
    assert names(tmp_path / "all") == names(source)
    invoke("cp", source / "run1", tmp_path / "run")
    assert names(tmp_path / "run") == ["run1/step_0", "run1/step_1", "run1/step_2"]
    invoke("cp", source / "run1", tmp_path / "run" / "again")
    assert names(tmp_path / "run")[3:] == ["again/step_0", "again/step_1", "again/step_2"]
    invoke("cp", source / "run1/step_2", tmp_path / "one")
    assert names(tmp_path / "one") == ["run1/step_2"]
    invoke("cp", source / "run1/step_2", tmp_path / "one" / "best")
    assert names(tmp_path / "one") == ["run1/step_2", "best"]
    invoke("cp", source, tmp_path / "one" / "every")
    assert len(names(tmp_path / "one" / "every")) == 4


def test_what_it_prints(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "copy"
    output = invoke("cp", source / "run1", there, "--dry-run").stdout
    assert "would be copied run1/step_0\n" in output
    assert f"{there}: 3 snapshots would be copied\n" in output
    assert not there.exists()
    output = invoke("cp", source / "run1", there).stdout
    assert "copied run1/step_2\n" in output
    assert f"{there}: 3 snapshots copied\n" in output
    output = invoke("cp", source, there).stdout
    assert "1 snapshot copied, 3 there already\n" in output
    assert output.endswith("there already\n")


def test_json(source: Path, tmp_path: Path) -> None:
    there = tmp_path / "copy"
    result = document("cp", source, there)
    assert (result["source"], result["destination"]) == (str(source), str(there))
    assert result["copied"] == names(source)
    assert result["sent_bytes"] > 6 * CHUNK
    assert result["present"] == result["gone"] == []
    again = document("cp", source, there)
    assert (again["copied"], again["present"]) == ([], names(source))
    assert again["sent_bytes"] == again["sent_chunk_count"] == 0


def test_what_is_refused(source: Path, tmp_path: Path) -> None:
    message = failure("cp", tmp_path / "nothing", tmp_path / "copy")
    assert "is not a casnap store" in message
    assert "nor any below it" in failure("cp", source / "run7", tmp_path / "copy")
    assert "is the store that is copied from" in failure("cp", source, source / "copy")
    assert "on a server" in failure(
        "cp", source, tmp_path / "copy", "--endpoint-url", "http://x", status=2
    )
    assert not (tmp_path / "copy").exists()
    Store(tmp_path / "large", create=NewStore(chunk_size=2 * CHUNK)).make()
    assert "--chunk-size 64K" in failure("cp", source, tmp_path / "large")


def test_a_destination_of_the_same_name_is_a_snapshot_as_in_a_take(
    source: Path, tmp_path: Path
) -> None:
    """Otherwise the copy of a snapshot would become a store of the snapshot's name."""
    invoke("cp", source / "run1/step_1", tmp_path / "one/step_1")
    assert names(tmp_path / "one") == ["step_1"]
    invoke("cp", source / "run1", tmp_path / "all/run1")
    assert names(tmp_path / "all/run1")[0] == "run1/step_0"


def test_it_says_that_a_store_is_made(source: Path, tmp_path: Path) -> None:
    """Not what was meant, perhaps: the copy has the name that it had."""
    there = tmp_path / "backup/foo"
    output = invoke("cp", source / "run1/step_2", there, "--dry-run").stdout
    assert f"{there} would become a new store; to copy it into {tmp_path}/backup by an" in output
    assert not there.exists()
    output = invoke("cp", source / "run1/step_2", there).stdout
    assert f"{there} is a new store" in output
    assert "copied run1/step_2\n" in output
    assert "new store" not in invoke("cp", source / "run1/step_1", there).stdout
    assert document("cp", source, there)["made_store"] is False
    assert document("cp", source, tmp_path / "other")["made_store"] is True


def test_into_a_store_whose_making_was_cut_off(source: Path, tmp_path: Path) -> None:
    """It is finished, as a take does, and not refused for ever."""
    there = tmp_path / "there"
    whole = Store(there, create=NewStore(chunk_size=CHUNK)).make()
    for path in (there / "casnap-store").iterdir():
        if path.name != "casnap.json":
            shutil.rmtree(path)
    invoke("cp", source, there)
    assert names(there) == names(source)
    assert Store(there).id == whole.id


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_what_follows(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    def heed() -> None:
        # The tests may run under nohup, and what a program is started to ignore, it ignores.
        signal.signal(number, signal.SIG_DFL)

    command = [sys.executable, "-m", "casnap.cli", "cp", str(source), str(tmp_path / "there")]
    with subprocess.Popen(
        [*command, "--follow"], stdout=subprocess.PIPE, text=True, preexec_fn=heed
    ) as following:
        assert following.stdout is not None
        for line in following.stdout:
            if line.startswith(f"copied {names(source)[-1]}"):
                break
        following.send_signal(number)
        assert following.stdout.read() == "4 snapshots copied\n"
    assert following.returncode == 0
