"""docs/json.md lists the keys that each command prints with ``--json``, and what they mean."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, StateDict, Store
from casnap.cli import COMMANDS
from casnap.serving import Follower
from tests.support.cached import Reader, far_store
from tests.support.cli_calls import COMMAND, document, fill, invoke
from tests.support.forger import STATE, Forger, chunks, tensor
from tests.support.json_keys import keys_of, listed_keys
from tests.support.later import LATER, forged, leaf_with


def failed(*arguments: object) -> Any:
    """Return the document of a command that ends with status 1."""
    return json.loads(invoke(*arguments, "--json", status=1).stdout)


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(raw))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return documents of each command, which together have all keys."""
    tmp = tmp_path_factory.mktemp("json")
    store = fill(tmp / "ckpts")
    one = store / "run1/step_1"
    later = forged(tmp / "later", leaf_with(lambda payload: ["z", payload]))
    Store(tmp / "keys").take({"s": StateDict(best={(1, "a"): 0.5})}, "step_0")
    Store(tmp / "measured", health=True).take({"s": StateDict(x=torch.ones(9))}, "step_0")
    torch.save({"model": {"w": torch.ones(3)}, "step": 4}, tmp / "old.pt")
    # Tensors that were cast to more and fewer bits; two that were exchanged; one that nobody has.
    half = tmp / "half.pt"
    rounded, whole = torch.randn(100).to(torch.bfloat16), torch.randn(100)
    Store(store).take(
        {"model": StateDict(w=rounded, v=whole, q=whole + 1, k=whole + 2)}, "half/step_0"
    )
    exchanged = {"q": whole + 2, "k": whole + 1}
    torch.save(
        {"w": rounded.float(), "v": whole.bfloat16(), "other": torch.ones(7), **exchanged}, half
    )
    result: dict[str, list[dict[str, Any]]] = {
        "init": [document("init", tmp / "new")],
        "ls": [document("ls", store)],
        "show": [
            document("show", one),
            document("show", one, "model/weight"),
            document("show", one, "progress"),
            document("show", one, "progress/step"),
            document("show", later / LATER, "s/x"),
            document("show", tmp / "keys/step_0", "s/best"),
            document("show", tmp / "measured/step_0", "--health"),
        ],
        "diff": [
            document("diff", store / "run1/step_2", store / "run2/step_0"),
            document("diff", store / "run1/step_0", "step_1", "--elements"),
            document("diff", store / "run1/step_0", "step_1", "--stats"),
        ],
        "average": [
            document("average", store, "run1/step_0", "run1/step_1", "--into", "mean/step_0"),
        ],
        "who": [
            document("who", half, "--store", store, status=1),
            document("who", "--store", store),
        ],
        "du": [document("du", store)],
        "report": [document("report", store, "--keep-last", 1)],
        "cp": [document("cp", store / "run1", tmp / "copy"), followed(store, tmp / "followed")],
        "import": [
            document("import", tmp / "old.pt", tmp / "new/old", "--dry-run"),
            document("import", tmp / "old.pt", tmp / "new/old"),
        ],
        "export": [document("export", f"{one}/model", tmp / "out.safetensors")],
        "pull": [
            document("pull", store / "run1", tmp / "live"),
            document("pull", store / "run1", tmp / "live", "--verify"),
        ],
        "tag": [
            document("tag", one, "best", "--move"),
            document("tag", store, "best", "--history"),
        ],
        "config": [document("config", store)],
        "thin": [document("thin", store, "progress", "--keep-last", 1, "--dry-run")],
        "prune": [document("prune", store, "--keep-last", 1, "--gc", "--yes")],
        "rm": [document("rm", store / "run2/step_0", "--dry-run")],
        "gc": [document("gc", store)],
        "doctor": [document("doctor", tmp)],
        "rewind": [document("rewind", two_steps(tmp / "rewound") / "step_0")],
    }
    served = {name: torch.zeros(shape) for name, shape in {"weight": 98304, "bias": 4}.items()}
    with Follower(f"{store}/run1", served, interval=None):
        listed = document("followers", store)
        while not any(each["serving"] for each in listed["followers"]):
            time.sleep(0.01)
            listed = document("followers", store)
        result["report"].append(document("report", store))
    result["followers"] = [listed]
    mirrored = Store(tmp / "mirrored", mirror=tmp / "mirror")
    mirrored.take({"s": StateDict(x=1)}, "step_1")
    mirrored.wait_mirrored(60)
    assert mirrored.mirror is not None
    mirrored.mirror.stop()
    mirrored.take({"s": StateDict(x=2)}, "step_2")
    result["mirror"] = [document("mirror", tmp / "mirrored")]
    result["report"].append(document("report", tmp / "mirrored"))
    Reader(far_store(tmp / "far", 0)).restore()
    result["cache"] = [document("cache")]
    for pack in (tmp / "copy").glob("**/packs/*/*"):
        flip(pack)
    Store(tmp / "copy").take({"s": StateDict(x=1)}, "later")
    flip(next((tmp / "copy").glob("**/roots/0/1")))
    result["check"] = [
        failed("check", place, "--data") for place in (tmp / "copy", later_store(tmp / "unknown"))
    ]
    result["repair"] = [failed("repair", tmp / "copy", "--yes")]
    return result


def later_store(path: Path) -> Path:
    """Make a store in which a chunk has a codec that this version does not know."""
    forger = Forger(path)
    entry = tensor([1000], chunks(4000, forger.add(bytes(4000), codec=9)))
    forger.publish({"s": forger.tree(STATE, ["/x", entry])})
    return path


def two_steps(path: Path) -> Path:
    for step in range(2):
        Store(path).take({"s": StateDict(x=step)}, f"step_{step}")
    return path


def followed(source: Path, destination: Path) -> dict[str, Any]:
    """Return what ``cp --follow`` prints when it is ended after its first copies."""
    command = [*COMMAND, "cp", str(source), str(destination), "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if (destination / "run2/step_0/casnap-snapshot.json").exists():
                process.send_signal(signal.SIGTERM)
                break
        assert process.stdout is not None
        answer: dict[str, Any] = json.loads(process.stdout.read())
    return answer


# What prove prints is seen where it runs: tests/guests/proving/test_prove.py.
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "prove"])
def test_the_page_lists_what_is_printed(
    printed: dict[str, list[dict[str, Any]]], command: str
) -> None:
    # The key error of prune is seen where a collection fails: tests/cli/test_cli_maintenance.py.
    apart = {"error"} if command == "prune" else set()
    assert listed_keys(command) - apart == keys_of(*printed.get(command, [])) - apart


def values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    yield key, value
    if isinstance(value, dict):
        for name, child in value.items():
            if name not in ("metadata", "metrics", "module_bytes", "requests"):
                yield from values(child, name)
    elif isinstance(value, list):
        for child in value:
            yield from values(child, "")


def test_names_say_what_a_value_is(printed: dict[str, list[dict[str, Any]]]) -> None:
    keys = set()
    for told in (each for documents in printed.values() for each in documents):
        for key, value in values(told):
            if key.endswith("time") and value is not None:
                assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", value), key
                keys.add(key)
            elif key.endswith(("_bytes", "_count")):
                assert isinstance(value, int), key
            elif key.endswith("s") and key != "seconds":
                assert not isinstance(value, int), key
            if isinstance(value, dict) and "path" in value:
                assert value["path"] == f"{value['store']}/{value['name']}"
    phases = {"published_time", "fetched_time", "staged_time", "paused_time", "applied_time"}
    others = {"time", "used_time", "waiting_until_time", "began_time", "noted_time"}
    assert keys == others | phases


def test_a_snapshot_is_the_same_in_all_commands(store: Path, tmp_path: Path) -> None:
    """The command may be given a folder of the store: the name is that in the whole store."""
    snapshot = Snapshot(store / "run2/step_0")
    which = {
        "store": str(store),
        "name": "run2/step_0",
        "path": f"{store}/run2/step_0",
        "commit": snapshot.commit_id,
    }
    answer = [
        *document("ls", store / "run2")["snapshots"],
        *document("du", store / "run2")["snapshots"],
        *document("prune", store / "run2", "--keep-last", 1, "--dry-run")["snapshots"],
        *document("rm", store / "run2/step_0", "--dry-run")["deleted"],
        document("show", store / "run2/step_0"),
        document("show", store / "run2/step_0", "model/weight"),
        document("diff", store / "run1/step_0", store / "run2/step_0")["b"],
        document("tag", store / "run2/step_0"),
        document("export", store / "run2/step_0", tmp_path / "out.pt", "--format", "torch"),
    ]
    for each in answer:
        assert {key: each[key] for key in which} == which
    assert [*which][:3] == ["store", "name", "path"]
    time = datetime.fromisoformat(answer[0]["time"].replace("Z", "+00:00"))
    assert abs(time.timestamp() - snapshot.time) < 1e-5
    assert time.tzinfo == timezone.utc


def test_an_import_tells_where_it_went(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    planned = document("import", tmp_path / "old.pt", tmp_path / "s/a", "--dry-run")
    answer = document("import", tmp_path / "old.pt", tmp_path / "s/a")
    where = {"store": str(tmp_path / "s"), "name": "a", "path": f"{tmp_path}/s/a"}
    assert {key: planned[key] for key in where} == {key: answer[key] for key in where} == where
    assert planned["commit"] is None
    assert answer["commit"] == Snapshot(tmp_path / "s/a").commit_id
