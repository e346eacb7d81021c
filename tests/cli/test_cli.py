"""What each command does and prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import casnap
from casnap import Snapshot, StateDict, Store
from casnap.cli import COMMANDS, cli
from tests.support.cli_calls import (
    CHUNK,
    Terminal,
    document,
    failure,
    invoke,
)

# --- the group --------------------------------------------------------------------------------


def test_help_has_one_line_a_command_and_examples() -> None:
    text = invoke("--help").stdout
    for name in COMMANDS:
        assert re.search(rf"^  {name}  +[A-Z].*\.$", text, re.MULTILINE), name
    assert "casnap show /ckpts/run1/step_100 0/model/layer.weight" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    text = invoke(name, "--help").stdout
    assert "--json" in text or name == "run"  # which becomes another command
    assert len(text.splitlines()) > 6
    assert max(map(len, text.splitlines())) <= 100


def test_h_is_help_everywhere() -> None:
    assert invoke("-h").stdout == invoke("--help").stdout
    for name in COMMANDS:
        assert invoke(name, "-h").stdout == invoke(name, "--help").stdout


def test_a_misspelled_command_names_the_nearest() -> None:
    assert "No such command 'sl'; nearest: ls" in failure("sl", status=2)
    assert "nearest: prune" in failure("prnue", status=2)


@pytest.mark.parametrize(("words", "expected"), [("ls che", "file,che"), ("mir", "plain,mirror")])
def test_shells_complete_commands_and_paths(words: str, expected: str) -> None:
    env = {
        "_CASNAP_COMPLETE": "bash_complete",
        "COMP_WORDS": f"casnap {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    assert CliRunner().invoke(cli, prog_name="casnap", env=env).stdout.strip() == expected


def test_version() -> None:
    assert invoke("--version").stdout == f"casnap {casnap.__version__}\n"


# --- ls ---------------------------------------------------------------------------------------


def test_ls(store: Path) -> None:
    header, *rows = invoke("ls", store).stdout.splitlines()
    assert header.split() == ["NAME", "METADATA", "TIME", "NEW", "LOGICAL", "ENTRIES"]
    assert [row.split()[0] for row in rows] == [
        "run1/step_0",
        "run1/step_1",
        "run1/step_2",
        "run2/step_0",
    ]
    assert rows[1].split("  ")[1].strip() == "step=1 loss=1.25"
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:?\d\d +\d+\.\d kB", rows[0])


def test_ls_on_a_narrow_terminal_cuts_long_metadata_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    metadata = {"loss": 0.25, "step": 100, "comment": "x" * 60}
    store.take({"s": StateDict(x=1)}, "run1/step_100", metadata=metadata)
    store.tag("run1/step_100", "best")

    def shown(*options: str) -> list[str]:
        _, output = Terminal("ls", store.uri, *options, columns=80).rest()
        return re.sub(r"\x1b\[[0-9;]*m|\r", "", output).splitlines()

    header, row = shown()
    assert [len(line) <= 80 for line in (header, row)] == [True, True]
    assert header.split()[:3] == ["NAME", "METADATA", "TIME"]
    assert "#best step=100 loss=" in row
    assert re.search(r"…  \d{4}-\d\d-\d\d", row)
    assert "x" * 60 in shown("--wide")[1]
    assert shown("--wide")[1].split()[-1] == str(store["run1/step_100"].stats.entries)


def test_ls_of_a_trainers_run_shows_its_best_on_a_narrow_terminal(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    log = {"eval_loss": 1.25, "eval_runtime": 12.3456, "grad_norm": 0.7654321, "loss": 1.234567}
    metadata = {**log, "step": 12500, "epoch": 12.5, "best_metric": 1.2345678}
    store.take({"s": StateDict(x=1)}, "checkpoint-12500", metadata=metadata)
    _, output = Terminal("ls", store.uri, columns=80).rest()
    row = re.sub(r"\x1b\[[0-9;]*m|\r", "", output).splitlines()[1]
    assert " step=12500 epoch=12.5 loss=1.23457 best_metric=1.23457 eval_" in row
    assert len(row) <= 80


def test_ls_begins_with_what_a_run_is_asked(tmp_path: Path) -> None:
    """As a trainer gives them: the speed of the evaluation comes before the loss."""
    store = Store(tmp_path / "store")
    metadata = {"eval_runtime": 2.5, "eval_samples_per_second": 3.0, "lr": 1e-3, "loss": 0.5}
    store.take({"s": StateDict(x=1)}, "a", metadata={**metadata, "epoch": 1.5, "step": 7})
    row = invoke("ls", store.uri).stdout.splitlines()[1]
    assert "  step=7 epoch=1.5 loss=0.5 lr=0.001 …  " in row
    row = invoke("ls", store.uri, "--wide").stdout.splitlines()[1]
    said = "step=7 epoch=1.5 loss=0.5 lr=0.001 eval_runtime=2.5 eval_samples_per_second=3"
    assert said in row


def test_ls_of_a_prefix(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*arguments: object) -> list[str]:
        return [s["name"] for s in document("ls", *arguments)["snapshots"]]

    assert names(store, "run2") == ["run2/step_0"]
    assert names(store / "run2") == ["run2/step_0"]
    assert names(store, "run1/step_1") == ["run1/step_1"]
    monkeypatch.chdir(store)
    assert names() == names(store)
    assert names("run2") == ["run2/step_0"]
    monkeypatch.chdir(store / "run2")
    assert names() == ["run2/step_0"]


def test_ls_of_a_wrong_prefix_names_the_nearest(store: Path) -> None:
    message = failure("ls", store, "rum1")
    assert message.startswith("casnap: ")
    assert "no snapshot below 'rum1'" in message
    assert "run1" in message
    assert "run1" in failure("ls", store / "rum1")


def test_ls_of_an_empty_store(tmp_path: Path) -> None:
    Store(tmp_path / "new").make()
    result = invoke("ls", tmp_path / "new")
    assert result.stdout == ""
    assert "no snapshot yet" in result.stderr
    assert document("ls", tmp_path / "new")["snapshots"] == []


# --- show -------------------------------------------------------------------------------------


def test_show_a_snapshot(store: Path) -> None:
    text = invoke("show", store / "run1/step_1").stdout
    assert f"{store}/run1/step_1" in text
    assert "step=1 loss=1.25" in text
    assert re.search(r"^model +3 +393\.2 kB$", text, re.MULTILINE)
    assert re.search(r"^0/rng ", text, re.MULTILINE)


def test_show_how_much_of_a_snapshot_was_new(tmp_path: Path) -> None:
    """An optimizer that does not step shows here."""
    state = StateDict(w=torch.rand(1000), step=0)
    store = Store(tmp_path / "store")
    for step in (0, 0, 1):
        state["step"] = step
        store.take({"s": state}, f"run/{len(store.snapshots())}")
    lines = [
        next(line for line in text.splitlines() if line.startswith("new "))
        for text in (invoke("show", tmp_path / f"store/run/{i}").stdout for i in range(3))
    ]
    assert re.fullmatch(r"new +4\.\d kB of 4\.0 kB", lines[0])
    assert re.fullmatch(r"new +nothing: the store had all of it", lines[1])
    assert re.fullmatch(r"new +\d+ B of 4\.0 kB", lines[2])


def test_show_a_snapshot_json(store: Path) -> None:
    result = document("show", store / "run1/step_1")
    keys = {key["entry"]: key for key in result["keys"]}
    assert set(keys) == {"model", "progress", "0/rng"}
    assert (keys["model"]["rank"], keys["0/rng"]["rank"]) == (None, 0)
    assert sum(key["entry_count"] for key in result["keys"]) == result["entry_count"]
    assert sum(key["logical_bytes"] for key in result["keys"]) == result["logical_bytes"]


@pytest.mark.parametrize("path", ["0/model/weight", "model/weight"])
def test_show_a_tensor(store: Path, path: str) -> None:
    text = invoke("show", store / "run1/step_1", path).stdout
    assert re.search(r"^dtype +float32$", text, re.MULTILINE)
    assert re.search(r"^shape +\[98304\]$", text, re.MULTILINE)
    assert re.search(r"^chunks +6$", text, re.MULTILINE)
    assert re.search(r"^shared +327,680 \(327\.7 kB\)", text, re.MULTILINE)
    assert document("show", store / "run1/step_1", path) == {
        "store": str(store),
        "name": "run1/step_1",
        "path": f"{store}/run1/step_1",
        "commit": Snapshot(store / "run1/step_1").commit_id,
        "entry": path,
        "rank": None,
        "type": "tensor",
        "kind": "tensor",
        "logical_bytes": 6 * CHUNK,
        "dtype": "float32",
        "shape": [98304],
        "requires_grad": False,
        "quantization": None,
        "chunk_count": 6,
        "shared_bytes": 5 * CHUNK,
    }


def test_show_whose_an_entry_is(store: Path) -> None:
    assert document("show", store / "run1/step_1", "model/weight")["rank"] is None
    assert "scope" not in invoke("show", store / "run1/step_1", "model/weight").stdout
    assert document("show", store / "run1/step_1", "rng/torch")["rank"] == 0
    text = invoke("show", store / "run1/step_1", "rng/torch").stdout
    assert re.search(r"^scope +rank 0's own$", text, re.MULTILINE)


def test_what_is_shared_with_later_snapshots_does_not_count(store: Path) -> None:
    assert document("show", store / "run1/step_0", "model/weight")["shared_bytes"] == 0
    assert document("show", store / "run2/step_0", "model/weight")["shared_bytes"] == 6 * CHUNK


def test_show_a_small_tensor(store: Path) -> None:
    assert "none: kept in the tree" in invoke("show", store / "run1/step_0", "model/bias").stdout
    assert document("show", store / "run1/step_0", "model/bias")["chunk_count"] == 0


@pytest.mark.parametrize(
    ("path", "kind", "value"),
    [
        ("step", "int", 1),
        ("name", "str", "é" * 50),
        ("many/0", "float", 1.5),
        ("many/1", "none", None),
        ("many/2", "bool", True),
        ("data", "bytes", b"\0\1"),
        ("odd/a%2Fb", "int", 1),
    ],
)
def test_show_a_value(store: Path, path: str, kind: str, value: object) -> None:
    result = document("show", store / "run1/step_1", f"0/progress/{path}")
    assert (result["type"], result["kind"]) == ("value", kind)
    assert result["value"] == (value.hex() if isinstance(value, bytes) else value)
    assert repr(value) in invoke("show", store / "run1/step_1", f"progress/{path}").stdout


def test_show_a_value_that_needs_torch_or_is_long(tmp_path: Path) -> None:
    state = {"s": StateDict(dtype=torch.float16, long="x" * 5000, packed=list(range(500)))}
    path = tmp_path / "store/a"
    Snapshot.take(path, state)
    assert document("show", path, "s/dtype")["value"] == "float16"
    assert "value" not in document("show", path, "s/long")
    assert document("show", path, "s/packed")["type"] in ("value", "container")


def test_show_a_container(store: Path) -> None:
    text = invoke("show", store / "run1/step_1", "progress").stdout
    assert re.search(r"^elements +5$", text, re.MULTILINE)
    assert re.search(r"^progress/many +list of 3 +4 ", text, re.MULTILINE)
    result = document("show", store / "run1/step_1", "0/progress/many")
    assert (result["type"], result["kind"], result["element_count"]) == ("container", "list", 3)
    assert [child["entry"] for child in result["children"]] == [
        "0/progress/many/0",
        "0/progress/many/1",
        "0/progress/many/2",
    ]


def test_show_the_keys_that_paths_do_not_show(tmp_path: Path) -> None:
    """The hash in a path leads to its key, and so the key to its path."""
    keys = {(1, "x"): 1, ((None,),): 2, 0.5: 3, b"by": 4, torch.int8: 5, True: 6, "%k": 7, 9: 8}
    path = tmp_path / "store/a"
    # So many keys do not fit into the entry.
    snapshot = Snapshot.take(path, {"s": StateDict(d={**keys, 1 << 70: 9, **dict.fromkeys("abc")})})
    children = document("show", path, "s/d")["children"]
    paths = {child["key"]: child["entry"] for child in children if "key" in child}
    words = ["(1, 'x')", "((None,),)", "0.5", "b'by'", "torch.int8", "True", str(1 << 70)]
    assert sorted(paths) == sorted(words)
    for key, value in zip(words, (1, 2, 3, 4, 5, 6, 9), strict=True):
        assert snapshot.read_object(paths[key]) == value
        text = invoke("show", path, "s/d").stdout
        assert re.search(rf"^{paths[key]} +{re.escape(key)} +int ", text, re.MULTILINE)
    assert "KEY" not in invoke("show", path, "s").stdout


def test_children_of_a_long_list_are_in_order_and_limited(tmp_path: Path) -> None:
    path = tmp_path / "store/a"
    Snapshot.take(path, {"s": StateDict(items=[torch.zeros(1)] * 12)})
    text = invoke("show", path, "s/items", "--limit", 11).stdout
    assert text.index("s/items/9") < text.index("s/items/10")
    assert "s/items/11" not in text
    assert "1 element more" in text
    assert len(document("show", path, "s/items")["children"]) == 12


def test_a_name_that_begins_another_name_is_one_child(tmp_path: Path) -> None:
    path = tmp_path / "store/a"
    Snapshot.take(path, {"s": StateDict(**{"a": {"x": 1}, "a.b": {"y": 1}, "a-": 2})})
    result = document("show", path, "s")["children"]
    assert {c["entry"]: (c["what"], c["entry_count"]) for c in result} == {
        "s/a": ("dict of 1", 2),
        "s/a.b": ("dict of 1", 2),
        "s/a-": ("int", 1),
    }


def test_wrong_paths_name_the_nearest(store: Path) -> None:
    assert "model/weight" in failure("show", store / "run1/step_1", "0/model/wieght")
    assert "model/weight" in failure("show", store / "run1/step_1", "7/model/weight")
    assert "run1/step_1" in failure("show", store / "run1/stp_1")


# --- diff -------------------------------------------------------------------------------------


def test_diff(store: Path) -> None:
    summary, header, *rows = invoke(
        "diff", store / "run1/step_0", store / "run1/step_1"
    ).stdout.splitlines()
    assert summary.startswith("2 changed, 0 added, 0 removed; 65.5 kB")
    assert header.split() == ["PATH", "ROLE", "TYPE", "CHANGED", "OF", "DIFFERENCE"]
    assert rows[0].split() == [
        "~",
        "model/weight",
        "weights",
        "float32",
        "[98304]",
        "65.5",
        "kB",
        "393.2",
        "kB",
    ]
    assert rows[1].split()[:3] == ["~", "progress/step", "counters"]
    assert rows[1].endswith("0 → 1")


def test_diff_of_elements(store: Path) -> None:
    arguments = "diff", store / "run1/step_0", "step_1", "--elements"
    text = invoke(*arguments).stdout
    assert re.search(r"of 98,304 differ, by up to \d", text)
    (weight,) = (c for c in document(*arguments)["changes"] if c["entry"] == "model/weight")
    assert weight["role"] == "weights"
    assert weight["elements"]["total_count"] == 98_304
    assert 0 < weight["elements"]["differing_count"] < 98_304
    assert weight["elements"]["largest"] > 0


def test_diff_json(store: Path) -> None:
    result = document("diff", store / "run1/step_2", store / "run2/step_0")
    assert (result["a"]["name"], result["b"]["name"]) == ("run1/step_2", "run2/step_0")
    changes = {change["entry"]: change for change in result["changes"]}
    assert changes["model/extra"]["change"] == "added"
    assert changes["model/extra"]["old"] is None
    assert changes["model/extra"]["new"]["shape"] == [100]
    assert changes["model/bias"]["change"] == "removed"
    assert changes["model/bias"]["new"] is None
    assert "model/weight" not in changes
    assert result["added_count"] + result["removed_count"] + result["changed_count"] == len(changes)


@pytest.mark.parametrize("second", ["step_1", "run1/step_1"])
def test_the_second_snapshot_may_be_a_bare_name(store: Path, second: str) -> None:
    result = document("diff", store / "run1/step_0", second)
    assert result["b"]["name"] == "run1/step_1"


def test_paths_are_relative_to_the_current_folder(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store / "run1")
    assert document("diff", "step_0", "../run2/step_0")["b"]["name"] == "run2/step_0"
    assert document("show", "step_0")["name"] == "run1/step_0"


def test_diff_of_what_is_equal(store: Path) -> None:
    assert invoke("diff", store / "run1/step_0", "step_0").stdout == "no difference\n"
    assert document("diff", store / "run1/step_0", "step_0")["changes"] == []


def test_diff_is_limited(store: Path) -> None:
    text = invoke("diff", store / "run1/step_0", "step_1", "--limit", 1).stdout
    assert "model/weight" in text
    assert "1 entry more" in text
    result = document("diff", store / "run1/step_0", "step_1", "--limit", 1)
    assert len(result["changes"]) == 1
    assert result["changed_count"] == 2


def test_a_wrong_second_snapshot_names_the_nearest(store: Path) -> None:
    assert "run1/step_1" in failure("diff", store / "run1/step_0", "stp_1")
    assert "run1/step_1" in failure("diff", store / "run1/step_0", store / "run1/stp_1")


# --- du ---------------------------------------------------------------------------------------


def test_du(store: Path) -> None:
    header, *rows, total = invoke("du", store).stdout.splitlines()
    assert header.split() == ["NAME", "LOGICAL", "STORED", "UNIQUE"]
    assert [row.split()[0] for row in rows][-1] == "run2/step_0"
    assert total.startswith("4 snapshots of ")
    assert re.search(rf"{store} takes up [0-9.]* [kM]B$", total)


def test_du_json(store: Path) -> None:
    result = document("du", store)
    assert result["logical_bytes"] == sum(s["logical_bytes"] for s in result["snapshots"])
    first, _, third, other = result["snapshots"]
    assert CHUNK < first["unique_bytes"] < 2 * CHUNK
    assert third["unique_bytes"] < CHUNK  # its new chunk is in the other run too
    assert other["stored_bytes"] > 6 * CHUNK
    assert result["stored_bytes"] > 8 * CHUNK


def test_du_of_a_prefix_counts_what_others_share(store: Path) -> None:
    whole = {s["name"]: s for s in document("du", store)["snapshots"]}
    (part,) = document("du", store, "run2")["snapshots"]
    assert part == whole["run2/step_0"]
    (part,) = document("du", store / "run2")["snapshots"]
    assert part == whole["run2/step_0"]


def test_du_of_an_empty_store(tmp_path: Path) -> None:
    Store(tmp_path / "new").make()
    assert invoke("du", tmp_path / "new").stdout.startswith("0 snapshots of 0 B")


# --- rm ---------------------------------------------------------------------------------------


def test_rm(own_store: Path) -> None:
    snapshot = Store(own_store)["run1/step_0"]
    result = document("rm", own_store / "run1/step_0", "--yes")
    assert not result["dry_run"]
    assert [each["commit"] for each in result["deleted"]] == [snapshot.commit_id]
    assert "run1/step_0" not in Store(own_store)
    text = invoke("rm", own_store / "run1/step_1", own_store / "run2/step_0", "-y").stdout
    *deleted, last = text.splitlines()
    assert len(deleted) == 2
    by_hand = f"`casnap gc {own_store} --grace 0` frees the bytes"
    assert last == f"{by_hand}; no process does so by itself here"
    assert [s.name for s in Store(own_store).snapshots()] == ["run1/step_2"]


def test_rm_deletes_all_or_nothing_of_what_it_was_given(own_store: Path) -> None:
    message = failure("rm", own_store / "run1/step_0", own_store / "run1/step_9", "--yes")
    assert "run1/step_9" in message
    assert len(Store(own_store).snapshots()) == 4


def test_rm_of_a_name_that_is_none_names_the_nearest(own_store: Path) -> None:
    assert "nearest: run1/step_1" in failure("rm", own_store / "run1/stp_1", "--yes")
    assert "nearest: run1/step_1" in failure("rm", own_store / "rum1/step_1", "--yes")


def test_rm_dry_run(own_store: Path) -> None:
    one = own_store / "run1/step_0"
    output = invoke("rm", one, "--dry-run").stdout
    assert output.startswith(f"would be deleted {one}  ")
    assert "gc" not in output
    assert document("rm", one, "--dry-run")["dry_run"]
    assert len(Store(own_store).snapshots()) == 4


def test_rm_of_one_name_twice(own_store: Path) -> None:
    invoke("rm", own_store / "run1/step_0", f"{own_store}/run1/../run1/step_0", "--yes")
    assert len(Store(own_store).snapshots()) == 3


def test_rm_does_not_go_ahead_unasked(own_store: Path) -> None:
    assert "--yes" in failure("rm", own_store / "run1/step_0", status=2)
    assert failure("rm", status=2)
    assert len(Store(own_store).snapshots()) == 4


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 3), ("", 1, 4)])
def test_rm_asks_on_a_terminal(own_store: Path, answer: str, status: int, left: int) -> None:
    terminal = Terminal("rm", own_store / "run1/step_0")
    request = terminal.read_until("Delete 1 snapshot?")
    assert str(own_store / "run1/step_0") in request
    os.write(terminal.master, f"{answer}\n".encode())
    ended, said = terminal.rest()
    assert ended == status
    assert ("casnap: nothing was done" in said) == (answer != "y")
    assert len(Store(own_store).snapshots()) == left


def test_bash_completes_as_the_guide_shows() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/operating.md").read_text()
    (lines,) = re.findall(r"```sh\n(eval .*?)```", guide, re.DOTALL)
    request = """
complete_line() {
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _casnap_completion casnap
  echo "${COMPREPLY[*]}"
}
complete_line casnap re
complete_line casnap prune --keep-l
complete_line casnap export store/name --format ""
"""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", lines + request],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "report rewind repair",
        "--keep-last",
        "safetensors torch dcp",
    ]
