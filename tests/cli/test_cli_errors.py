"""Commands: their errors, and how long they take."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from casnap import Snapshot, StateDict, Store
from casnap.cli import cli, output, run
from casnap.format.records import Row
from casnap.runtime import progress
from tests.support.cli_calls import COMMAND, document, failure, invoke, process
from tests.support.written import publish

# --- init -------------------------------------------------------------------------------------


def test_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = document("init", tmp_path / "a", "--chunk-size", "256KiB")
    store = Store(tmp_path / "a", create=False)
    assert result == {
        "store": str(tmp_path / "a"),
        "id": store.id,
        "chunk_size_bytes": 256 << 10,
        "codec": "auto",
        "created": True,
    }
    assert document("init", tmp_path / "a") == {**result, "created": False}
    assert "256 KiB" in failure("init", tmp_path / "a", "--chunk-size", "1MiB")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert "1 MiB" in invoke("init").stdout
    assert (tmp_path / "b/casnap-store/casnap.json").exists()


@pytest.mark.parametrize("size", ["1", "100000", "1GiB", "3MiB", "-1", "x", "128MiB", "9" * 30])
def test_init_refuses_other_chunk_sizes(tmp_path: Path, size: str) -> None:
    message = failure("init", tmp_path / "a", f"--chunk-size={size}", status=2)
    assert "64KiB to 64MiB" in message
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("size", ["65536", "64k", "64KiB", "64kb"])
def test_init_takes_chunk_sizes_in_words(tmp_path: Path, size: str) -> None:
    assert document("init", tmp_path / "a", f"--chunk-size={size}")["chunk_size_bytes"] == 64 << 10


def test_init_inside_a_store_makes_none(store: Path) -> None:
    assert str(store) in failure("init", store / "run1")
    assert not (store / "run1/casnap-store/casnap.json").exists()


def test_init_where_something_else_is(tmp_path: Path) -> None:
    (tmp_path / "casnap-store/packs").mkdir(parents=True)
    assert "packs" in failure("init", tmp_path)
    (tmp_path / "file").write_text("")
    assert "is a file" in failure("init", tmp_path / "file")


# --- what goes wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "du", "show", "diff", "rm"])
def test_not_a_store(tmp_path: Path, command: str) -> None:
    arguments: dict[str, list[object]] = {
        "show": [tmp_path / "none/a"],
        "diff": [tmp_path / "none/a", "b"],
        "rm": [tmp_path / "none/a", "--yes"],
    }
    message = failure(command, *arguments.get(command, [tmp_path / "none"]))
    assert message.startswith("casnap: ")
    assert "not a casnap store" in message
    assert "casnap init" in message
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["ls", "du", "init"])
def test_a_store_of_a_newer_format(own_store: Path, command: str) -> None:
    config = json.loads((own_store / "casnap-store/casnap.json").read_text())
    (own_store / "casnap-store/casnap.json").write_text(json.dumps({**config, "format": 99}))
    assert "update casnap" in failure(command, own_store)


def test_a_damaged_store(own_store: Path, cache_dir: Path) -> None:
    for pack in (own_store / "casnap-store/packs").glob("*/*"):
        pack.write_bytes(b"")
    assert re.match("casnap: .*(damaged|cut off)", failure("ls", own_store))


def test_the_store_itself_is_no_snapshot(store: Path) -> None:
    assert "needs a name" in failure("show", store)


def test_an_error_of_the_system(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied", "/a\x1b/b")

    monkeypatch.setattr("os.path.expanduser", refuse)
    assert failure("ls", own_store) == "casnap: '/a\\x1b/b': Permission denied\n"


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert process("show").returncode == 2
    for arguments in (["show"], ["ls", "--wrong"], ["nothing"]):
        assert run(arguments) == 2
        assert capsys.readouterr().out == ""


def test_errors_are_one_message_on_stderr(tmp_path: Path) -> None:
    done = process("ls", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1


def test_an_unexpected_error_is_one_message_too(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("odd \x1b[2J")

    monkeypatch.setattr(Store, "snapshots", fail)
    monkeypatch.delenv("CASNAP_TRACEBACK", raising=False)
    assert run(["ls", str(store)]) == 1
    assert "casnap: unexpected RuntimeError: odd \\x1b[2J" in capsys.readouterr().err
    monkeypatch.setenv("CASNAP_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        run(["ls", str(store)])


def test_an_interrupt_is_status_130(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "snapshots", interrupt)
    assert run(["ls", str(store)]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_closed_pipe_is_quiet(store: Path, size: str, large_store: Path) -> None:
    place = store if size == "small" else large_store
    with subprocess.Popen(
        [*COMMAND, "ls", place, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""


# --- hostile and odd texts --------------------------------------------------------------------


EVIL = "\x1b]0;owned\x07\x1b[2J\u202ename\x9b31m\x7f"


def test_hostile_names_and_metadata_do_not_reach_the_terminal(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    state = {"s": StateDict(**{EVIL: EVIL, "t": torch.ones(100)})}
    row = store.take(state, "good", metadata={EVIL: EVIL, "nan": math.nan}).row
    evil = Row(
        commit=row.commit,
        manifest=row.manifest,
        seq=row.seq,
        time=1e300,
        world_size=1,
        stats=row.stats,
        metadata={EVIL: [EVIL, {"b": b"\x1b", "inf": math.inf}]},
        tags=(EVIL,),
    )
    publish(store, {f"run{EVIL}/x": evil, "run/x": evil})
    for arguments in (
        ["ls", store.uri],
        ["ls", store.uri, "--json"],
        ["du", store.uri],
        ["show", f"{store.uri}/good"],
        ["show", f"{store.uri}/good", "s"],
        ["show", f"{store.uri}/good", f"s/{EVIL}"],
        ["show", f"{store.uri}/good", f"s/{EVIL}", "--json"],
        ["show", f"{store.uri}/good", f"s/{EVIL}x"],
        ["show", f"{store.uri}/run{EVIL}/x"],
        ["diff", f"{store.uri}/good", EVIL],
        ["ls", store.uri, f"run{EVIL}x"],
        ["check", store.uri],
        ["gc", "--dry-run", store.uri],
        ["prune", store.uri, "--keep-best", f"{EVIL}:1", "--keep-last", "1", "--dry-run"],
    ):
        result = CliRunner().invoke(cli, arguments)
        for text in (result.stdout, result.stderr):
            assert all(c.isprintable() or c == "\n" for c in text), (arguments, text)
    listed = {s["name"]: s for s in document("ls", store.uri)["snapshots"]}
    assert listed["good"]["metadata"] == {EVIL: EVIL, "nan": None}
    # No command sees a row that has no name.
    assert listed.keys() == {"good", "run/x"}
    assert listed["run/x"]["metadata"] == {EVIL: [EVIL, {"b": "1b", "inf": None}]}
    assert "\\x1b[2J" in invoke("ls", store.uri).stdout


def test_a_line_of_the_log_does_not_reach_the_terminal_raw() -> None:
    """Such as that of a follower whose pull has failed, which names tensors."""
    code = """\
import logging, sys
from casnap.cli import main

sys.argv[1:] = ["--version"]
try:
    main()
finally:
    logging.getLogger("casnap").warning("odd %s", "\\x1b[2J")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "odd \\x1b[2J\n"


def test_output_that_is_not_utf8(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "store/日", {"s": StateDict(x=1)})
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = process("ls", tmp_path / "store", env=environment)
    assert done.returncode == 0
    assert "\\u65e5" in done.stdout


def test_sizes_and_times() -> None:
    assert [output.size(n) for n in (0, 999, 1000, 999_949, 999_950, 1.5e9, 2e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "1.5 GB",
        "2000.0 TB",
    ]
    assert [output.moment(t) for t in (math.inf, math.nan, 1e300)] == ["?"] * 3
    assert output.safe("a\ud800\n\x1b é→") == "a\\ud800\\n\\x1b é→"


def test_tables_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_width", lambda: 10)
    output.table(("A", "B"), [("x", "y" * 20), ("x", "y")], numbers=set())
    assert capsys.readouterr().out.splitlines()[1:] == ["x  yyyyyy…", "x  y"]


# --- progress ---------------------------------------------------------------------------------


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_appears_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0)
    monkeypatch.setenv("TERM", "xterm")
    terminal = TerminalText()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.progress_bars(lambda: {"put": 2, "get": 1000}) as report:
        assert report is not None
        report("counting", 0, 2)
        time.sleep(0.15)  # a bar is drawn ten times a second
        report("counting", 1, 2)
    assert "counting:  50%" in terminal.getvalue()
    assert "1,000 get, 2 put" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with output.progress_bars() as report:
        assert report is None


def test_short_work_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalText()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.progress_bars() as report:
        assert report is not None
        report("copying", 1, 2)
    assert terminal.getvalue() == ""


# --- what it costs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 1,000 snapshots, made by one commit."""
    store = Store(tmp_path_factory.mktemp("large") / "store")
    row = store.take({"s": StateDict(x=1)}, "run0/step_0", metadata={"loss": 2.5, "step": 0}).row
    publish(store, {f"run{i % 4}/step_{i}": row for i in range(1, 1000)})
    return Path(store.uri)


def test_no_command_imports_torch_or_what_it_does_not_need(store: Path, tmp_path: Path) -> None:
    code = """\
import json, sys
from casnap.cli import run
for arguments in json.loads(sys.argv[1]):
    status = run(arguments)
    others = {"numpy", "rich", "zstandard", "tempfile", "hashlib"}
    needs_more = arguments[0] in ("doctor", "export", "pull")
    found = {"torch"}.union(() if needs_more else others) & set(sys.modules)
    assert status == 0 and not found, (arguments, status, found)
print("\\nnone did")
"""
    calls = [
        ["ls", f"{store}"],
        ["ls", f"{store}", "--json"],
        ["show", f"{store}/run1/step_1"],
        ["show", f"{store}/run1/step_1", "model/weight"],
        ["diff", f"{store}/run1/step_1", "step_2"],
        ["du", f"{store}"],
        ["--help"],
        ["doctor", f"{tmp_path}"],
        ["export", f"{store}/run1/step_1/model", f"{tmp_path}/out.safetensors"],
        ["pull", f"{store}/run1", f"{tmp_path}/live", "--path", "model"],
    ]
    command = [sys.executable, "-c", code, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("\nnone did\n"), done.stderr


def test_ls_of_1000_snapshots_takes_little_longer_than_its_imports(
    store: Path, large_store: Path
) -> None:
    """Counted, since a time changes with the load: 90 modules, and 101 calls for each snapshot.

    That is 0.2 s on an idle machine, of which what casnap stands on takes 0.07 s to import.
    """
    code = """\
import itertools, sys, threading
from casnap.cli import run

calls = itertools.count()

def note(frame, event, argument):
    if event in ("call", "c_call"):
        next(calls)

for store in sys.argv[1:]:
    before = next(calls)
    threading.setprofile(note)
    sys.setprofile(note)
    status = run(["ls", store])
    sys.setprofile(None)
    threading.setprofile(None)
    assert status == 0
    print("counted", next(calls) - before)
print("modules", len([name for name in sys.modules if name.startswith("casnap")]))
"""
    command = [sys.executable, "-c", code, str(store), str(large_store)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    few, many = (int(found) for found in re.findall(r"^counted (\d+)$", done.stdout, re.M))
    assert (many - few) / 1000 < 130
    assert int(done.stdout.split()[-1]) < 96
    assert len(re.findall(r"step_\d+", done.stdout)) == 1004
