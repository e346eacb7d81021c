"""The reader without casnap: its command, what it refuses, and that it stays what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from casnap import NewStore, StateDict, Store
from tests.support.faults import CHUNK
from tests.support.later import LATER, forged, leaf_with
from tests.support.mutations import Parts
from tools import read_store

TOOL = Path(read_store.__file__)
NEEDED = {"blake3", "msgpack", "numpy", "zstandard"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK)).make()
    state = StateDict(
        w=torch.arange(30_000, dtype=torch.float32), half=torch.ones(3).bfloat16(), text="words"
    )
    store.take({"m": state}, "run/1", metadata={"step": 1})
    store.tag("run/1", "best")
    return store


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_command(store: Store, tmp_path: Path) -> None:
    folder, out = tmp_path / "store", tmp_path / "out"
    assert "run/1" in (listed := command(folder).stdout)
    assert "best" in listed
    lines = command(folder, "run/1").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["m", "m/half", "m/text", "m/w"]
    assert command(folder, "run/1", "m/w", out).stdout == ""
    assert np.array_equal(np.load(out), np.arange(30_000, dtype=np.float32))
    assert "holds uint16" in command(folder, "run/1", "m/half", out).stdout
    assert torch.equal(
        torch.from_numpy(np.load(out)).view(torch.bfloat16), torch.ones(3).bfloat16()
    )
    assert command(folder, "run/1", "m/text", out).returncode == 0
    assert out.read_bytes() == b"words"
    failed = command(folder, "run/1", "m/w", out, "--rank", "5")
    assert (failed.returncode, failed.stderr) == (0, "")
    failed = command(tmp_path, "run/1")
    assert failed.returncode == 1
    assert failed.stderr.startswith("DamagedError")


def test_it_is_short_and_uses_nothing_of_casnap() -> None:
    text = TOOL.read_text()
    assert len(text.splitlines()) <= 350
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    roots = {str(module).partition(".")[0] for module in modules}
    assert roots - sys.stdlib_module_names == NEEDED


def test_what_is_damaged_is_not_read(store: Store, tmp_path: Path) -> None:
    [pack] = [
        path
        for path in tmp_path.glob("store/casnap-store/packs/*/*")
        if path.read_bytes()[-40:-32] == b"CASNAPp1"
    ]
    content = bytearray(pack.read_bytes())
    content[100] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(content)
    reader = read_store.Store(tmp_path / "store")
    entries = reader.entries("run/1")
    with pytest.raises(read_store.DamagedError, match="not those of its digest"):
        reader.tensor(entries["m/w"])
    assert reader.content(entries["m/text"]) == b"words"


@pytest.mark.parametrize(
    "entry",
    [
        lambda p: ["z", p, {"of": "a later version"}],
        lambda p: ["t", p, "float32", [1000], "hologram", False, None],
        lambda p: ["t", p, "float99", [1000], "tensor", False, None],
        lambda p: ["t", p, "<f16", [250], "ndarray", False, None],
        lambda p: ["t", p, "|f4", [1000], "ndarray", False, None],
        lambda p: ["t", p, "float32", [1000], "tensor", False, None, [1]],
        lambda p: ["t", [*p, 7], "float32", [1000], "tensor", False, None],
    ],
)
def test_what_is_unknown_costs_one_entry(tmp_path: Path, entry: Any) -> None:
    reader = read_store.Store(forged(tmp_path / "store", leaf_with(entry)))
    entries = reader.entries(LATER)
    assert read_store.line_of_entry("s/x", entries["s/x"])
    with pytest.raises(read_store.UnsupportedError, match="later"):
        reader.tensor(entries["s/x"])
    assert reader.tensor(entries["s/y"]).shape == (1000,)


@pytest.mark.parametrize("record", [{}, {"format": 1}, {"digest": "blake3", "chunk_size": 7}])
def test_a_record_in_the_root_that_makes_no_sense(
    store: Store, tmp_path: Path, record: dict[str, Any]
) -> None:
    """Then casnap.json decides, for casnap too."""
    parts = Parts(tmp_path / "store")
    parts.put_root({**parts.root, "store": record})
    reader = read_store.Store(tmp_path / "store")
    assert reader.content(reader.entries("run/1")["m/text"]) == b"words"
    assert Store(tmp_path / "store")["run/1"].read_object("m/text") == "words"
