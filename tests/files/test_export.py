"""Exporting snapshots: other libraries read what was written, bit for bit."""

from __future__ import annotations

import json
import pickle
import re
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model

from casnap import Snapshot, StateDict, Store
from casnap.errors import (
    DamagedError,
    EntryNotFoundError,
    FileFormatError,
    StorageFullError,
    UnsupportedTypeError,
)
from tests.support.bitwise import assert_same, noise
from tests.support.mounts import tmpfs
from tests.support.written import write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def training() -> dict[str, Any]:
    model = torch.nn.Linear(300, 90)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "progress": StateDict(step=3, text="é", f=(1, 2.5))}


def ordered(found: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    assert found.keys() == like.keys()
    return {name: found[name] for name in like}


def test_one_safetensors_file(store: Store, tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.uint16)
    state = {str(d): noise(d, (5, 7)) for d in dtypes}
    state |= {"a/b%": torch.randn(200, 300), "0-d": torch.tensor(1.5), "none": torch.empty(3, 0)}
    state["pairs"] = noise(torch.float4_e2m1fn_x2, (3, 4))
    snapshot = store.take({"model": StateDict(**state)}, "s", metadata={"loss": 0.5, "by": "é"})
    report = snapshot.export(tmp_path / "m.safetensors", path="model")
    assert report.tensors == len(state)
    assert report.files == {"m.safetensors": (tmp_path / "m.safetensors").stat().st_size}
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "loss": "0.5", "by": "é"}
        assert_same({name: file.get_tensor(name) for name in state}, state)
    assert list(tmp_path.glob(".*")) == []
    again = store.import_file(tmp_path / "m.safetensors", "again")
    assert again.new_bytes < 1000


def test_shards_and_their_index(store: Store, tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(1000) for i in range(5)}
    snapshot = store.take({"model": StateDict(**state)}, "s")
    report = snapshot.export(tmp_path / "out", path="model", max_shard_size=8000)
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(report.files) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 20_000}
    matches: dict[str, Any] = {}
    for name in names:
        part = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][each] == name for each in part)
        matches |= part
    assert_same(ordered(matches, state), state)
    snapshot.export(tmp_path / "one", path="model", max_shard_size=1 << 20)
    assert [f.name for f in (tmp_path / "one").iterdir()] == ["model.safetensors"]


def test_names_without_a_path(store: Store, tmp_path: Path) -> None:
    snapshot = store.take({"net": StateDict(a=torch.ones(3), b={"c": [torch.ones(2)]})}, "s")
    snapshot.export(tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors").keys() == {"net.a", "net.b.c.0"}
    snapshot.export(tmp_path / "one.safetensors", path="0/net/a")
    assert load_file(tmp_path / "one.safetensors").keys() == {"a"}
    clash = store.take({"net": StateDict(**{"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})}, "c")
    with pytest.raises(FileFormatError, match=r"net/a.b and net/a/b would both be named 'a.b'"):
        clash.export(tmp_path / "clash.safetensors", path="net")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 40)
        self.head = torch.nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights(store: Store, tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    snapshot = store.take({"model": model}, "s")
    both = snapshot.export(tmp_path / "both.safetensors", path="model")
    assert both.equal == {"head.weight": "embed.weight"}
    assert len(load_file(tmp_path / "both.safetensors")) == 2
    once = tmp_path / "once.safetensors"
    report = snapshot.export(once, path="model", tied=["head.weight"])
    assert (report.tensors, report.tied) == (1, {"head.weight": "embed.weight"})
    with safe_open(once, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    load_model(fresh, once)
    assert_same(fresh.head.weight, model.head.weight)
    assert snapshot.export(tmp_path / "m.st", path="model", tied=model).tied == report.tied
    assert (tmp_path / "m.st").read_bytes() == once.read_bytes()
    save_model(model, tmp_path / "theirs.st")
    assert load_file(tmp_path / "theirs.st").keys() == load_file(once).keys()
    snapshot.export(tmp_path / "m.pt", path="model", format="torch", tied=["head.weight"])
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    other_snapshot = store.take({"model": StateDict(a=torch.ones(99), b=torch.zeros(99))}, "other")
    for tied, said in (["a"], "no other tensor has its bytes"), (["x"], "there is no such tensor"):
        with pytest.raises(FileFormatError, match=said):
            other_snapshot.export(tmp_path / "x.safetensors", path="model", tied=tied)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_a_file_of_torch_save(store: Store, tmp_path: Path) -> None:
    state = training()
    odd = StateDict(
        array=np.arange(5000.0),
        sparse=torch.eye(200).to_sparse(),
        quantized=torch.quantize_per_tensor(torch.randn(500), 0.1, 3, torch.qint8),
        parameter=torch.nn.Parameter(torch.randn(70, 70)),
        halves={"none": torch.empty(0, 3), "0-d": torch.tensor(2), 7: OrderedDict(a=[None, b"x"])},
    )
    snapshot = store.take({**state, "odd": odd}, "s")
    report = snapshot.export(tmp_path / "all.pt", format="torch")
    assert zipfile.ZipFile(tmp_path / "all.pt").testzip() is None
    assert report.files == {"all.pt": (tmp_path / "all.pt").stat().st_size}
    result = torch.load(tmp_path / "all.pt", weights_only=False)  # it holds numpy's
    keys = ("model", "odd", "optim", "progress")
    assert_same(result, {key: snapshot.get_state_dict_for_key(key) for key in keys})
    snapshot.export(tmp_path / "optim.pt", path="optim", format="torch")
    for mmap in (True, False):
        part = torch.load(tmp_path / "optim.pt", weights_only=True, mmap=mmap)
        assert_same(part, state["optim"].state_dict())
    assert store.import_file(tmp_path / "optim.pt", "again").new_bytes < 2000


def test_a_checkpoint_of_dcp(store: Store, tmp_path: Path) -> None:
    state, target = training(), training()
    snapshot = store.take(state, "s")
    report = snapshot.export(tmp_path / "d", format="dcp", max_shard_size=100_000)
    assert len(report.files) > 2
    into = {k: v.state_dict() for k, v in target.items()}
    dcp.load(into, checkpoint_id=tmp_path / "d")
    assert_same(dict(into["model"]), dict(state["model"].state_dict()))
    assert_same(into["optim"], state["optim"].state_dict())
    assert into["progress"] == {"step": 3, "text": "é", "f": (1, 2.5)}
    assert store.import_file(tmp_path / "d", "again").new_bytes < 5000
    weights = state["model"].state_dict()
    snapshot.export(tmp_path / "m", path="model", format="dcp")
    part = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(part, checkpoint_id=tmp_path / "m")
    assert_same(part, dict(weights))
    with pytest.raises(TypeError, match="is not a dict, so DCP has no names"):
        snapshot.export(tmp_path / "x", path="progress/step", format="dcp")


def test_boxes_of_trailing_shards(store: Store, tmp_path: Path) -> None:
    """DCP's own shards along the last axis, in unaligned places, in and out again."""
    value = torch.randn(40, 5000)
    parts = [(slice(0, 2001), "__0_0.distcp"), (slice(2001, 5000), "__1_0.distcp")]
    folder = tmp_path / "d"
    dcp.save({"w": value}, checkpoint_id=folder)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    about = metadata.state_dict_metadata["w"]
    kind, info = type(about.chunks[0]), type(next(iter(metadata.storage_data.values())))
    index = type(next(iter(metadata.storage_data)))
    about.chunks, metadata.storage_data = [], {}
    for columns, name in parts:
        box = kind(torch.Size([0, columns.start]), torch.Size([40, columns.stop - columns.start]))
        about.chunks.append(box)
        with (folder / name).open("wb") as file:
            file.write(b"odd")
            torch.save(value[:, columns].clone(), file)
            metadata.storage_data[index("w", box.offsets)] = info(name, 3, file.tell() - 3)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    store.import_file(folder, "s", key="k")
    assert_same(store["s"].read_object("k/w"), value)
    snapshot = store["s"]
    snapshot.export(tmp_path / "w.safetensors", path="k")
    assert_same(load_file(tmp_path / "w.safetensors")["w"], value)
    snapshot.export(tmp_path / "w.pt", path="k", format="torch")
    assert zipfile.ZipFile(tmp_path / "w.pt").testzip() is None
    assert_same(torch.load(tmp_path / "w.pt", weights_only=True)["w"], value)


# --- what is refused --------------------------------------------------------------------------


def test_what_safetensors_cannot_hold(store: Store, tmp_path: Path) -> None:
    odd = {"sparse": torch.eye(9).to_sparse(), "array": np.ones(3), "c": torch.ones(9).cfloat()}
    odd["wide"] = torch.ones(99, dtype=torch.complex128)
    snapshot = store.take({"m": StateDict(w=torch.ones(9), step=1, **odd)}, "s")
    out = tmp_path / "m.safetensors"
    named = "cannot be exported: m/array, m/sparse, m/step, m/wide. Name a part"
    with pytest.raises(FileFormatError, match=named):
        snapshot.export(out, path="m")
    report = snapshot.export(out, path="m", tensors_only=True)
    assert report.left_out == ["m/array", "m/sparse", "m/step", "m/wide"]
    assert load_file(out).keys() == {"w", "c"}
    with pytest.raises(FileFormatError, match="there is no tensor to export"):
        snapshot.export(tmp_path / "x", path="m/step", tensors_only=True)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_what_ranks_have_of_their_own(store: Store, tmp_path: Path, kind: str) -> None:
    """Experts under the same names: those of rank 0 alone are not the model."""
    ranks = [{"m": {"gate": torch.ones(9), "expert": torch.full((9,), r)}} for r in (0.0, 1.0)]
    snapshot = write(store, "s", ranks, own=["m/expert"])
    out = tmp_path / "m"
    with pytest.raises(EntryNotFoundError, match=r"'m' for ranks 0 and 1.*say which: '0/m', '1/m'"):
        snapshot.export(out, path="m", format=kind)
    assert not out.exists()
    snapshot.export(out, path="1/m", format=kind)
    state = {"gate": torch.zeros(9), "expert": torch.zeros(9)}
    if kind == "dcp":
        dcp.load(state, checkpoint_id=out, no_dist=True)
    else:
        state = load_file(out) if kind == "safetensors" else torch.load(out, weights_only=True)
    assert_same(ordered(state, ranks[1]["m"]), ranks[1]["m"])
    report = snapshot.export(tmp_path / "all", format=kind)
    assert report.left_out == ["1/m"]


def test_names_that_safetensors_cannot_hold(store: Store, tmp_path: Path) -> None:
    pair = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    cases: list[tuple[str, torch.Tensor, str]] = [
        ("__metadata__", torch.ones(3), "no room for a tensor named"),
        ("\ud800", torch.ones(3), "are UTF-8, but one is not"),
        ("pair", pair.reshape(()), "without axes, as 'pair' is"),
    ]
    for i, (name, tensor, said) in enumerate(cases):
        snapshot = store.take({"m": StateDict(**{name: tensor})}, str(i))
        with pytest.raises(FileFormatError, match=said):
            snapshot.export(tmp_path / "out", path="m")
        assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_target_of_a_long_name(store: Store, tmp_path: Path, kind: str) -> None:
    snapshot = store.take({"m": StateDict(w=torch.ones(9))}, "s")
    snapshot.export(tmp_path / ("é" * 127), path="m", format=kind)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "é" * 127]


@pytest.mark.parametrize("chosen", [None, "safetensors", "torch"])
def test_a_format_that_is_not_written(store: Store, tmp_path: Path, chosen: Any) -> None:
    snapshot = store.take({"s": StateDict(x=torch.ones(3))}, "a")
    with pytest.raises(FileFormatError, match=r"casnap writes no \.gguf files"):
        snapshot.export(tmp_path / "x.GGUF", format=chosen)
    assert not (tmp_path / "x.GGUF").exists()


def test_the_suffix_decides_the_format(store: Store, tmp_path: Path) -> None:
    snapshot = store.take({"m": StateDict(w=torch.ones(9))}, "s")
    formats = {
        **dict.fromkeys(("a.pt", "b.pth", "c.bin", "d.ckpt", "E.PT"), "torch"),
        **dict.fromkeys(("f.safetensors", "g", "h.v1", "i.st"), "safetensors"),
        "j.dcp": "dcp",
    }
    for name, kind in formats.items():
        assert snapshot.export(tmp_path / name, path="m").format == kind
        loaded = {
            "torch": torch.load,
            "safetensors": load_file,
            "dcp": lambda folder: {"w": torch.ones(9)} if (folder / ".metadata").is_file() else {},
        }[kind](tmp_path / name)
        assert_same(loaded, {"w": torch.ones(9)})
    assert snapshot.export(tmp_path / "k", path="m", format="torch").format == "torch"
    for name, kind in (("x.pt", "safetensors"), ("x.safetensors", "torch"), ("x.ckpt", "dcp")):
        with pytest.raises(FileFormatError, match=f"is for the format .*, not {kind}; choose"):
            snapshot.export(tmp_path / name, path="m", format=kind)
        assert not (tmp_path / name).exists()


def test_targets_and_paths(store: Store, tmp_path: Path) -> None:
    snapshot = store.take({"m": StateDict(w=torch.ones(9))}, "s")
    there = tmp_path / "there"
    there.write_text("mine")
    for kind in ("safetensors", "torch", "dcp"):
        with pytest.raises(FileFormatError, match="there exists already"):
            snapshot.export(there, format=kind)
    with pytest.raises(EntryNotFoundError, match="nearest: m/w"):
        snapshot.export(tmp_path / "x", path="m/v")
    with pytest.raises(FileNotFoundError):
        snapshot.export(tmp_path / "no" / "x")
    for wrong in ({"format": "npz"}, {"format": "torch", "max_shard_size": 5}, {"tied": "w"}):
        with pytest.raises((ValueError, TypeError)):
            snapshot.export(tmp_path / "x", **wrong)  # type: ignore[arg-type]
    dry = snapshot.export(tmp_path / "x", dry_run=True)
    assert (dry.tensors, list(dry.files)) == (1, ["x"])
    assert there.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store", "there"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_targets_that_are_no_place_for_an_export(
    store: Store, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = store.take({"m": StateDict(w=torch.ones(9))}, "s")
    before = sorted((tmp_path / "store").rglob("*"))
    (tmp_path / "link").symlink_to(tmp_path / "store" / "casnap-store/packs")
    inner = tmp_path / "store/casnap-store"
    for folder in (inner, inner / "packs", tmp_path / "link"):
        with pytest.raises(FileFormatError, match=r"is inside of a store, .*beside casnap-store"):
            snapshot.export(folder / "x", format=kind)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileFormatError, match=r"is a URI.*export to a local path"):
        snapshot.export("s3://bucket/x", format=kind)
    assert sorted((tmp_path / "store").rglob("*")) == before


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_nothing_half_made(store: Store, tmp_path: Path, kind: str) -> None:
    """A file that cannot be as long as it should, and a damaged chunk: an error, and no file."""
    state = {f"w{i}": torch.randn(50_000) for i in range(4)}
    snapshot = store.take({"m": StateDict(**state)}, "s")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
    try:
        with pytest.raises(OSError, match=f"too large: '{tmp_path}/out'"):
            snapshot.export(tmp_path / "out", path="m", format=kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    pack = max((tmp_path / "store/casnap-store/packs").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(pack.read_bytes())
    content[300_000] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(content)
    with pytest.raises(DamagedError, match="m/w"):
        Snapshot(tmp_path / "store/s").export(tmp_path / "out", path="m", format=kind)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_disk_that_is_full(store: Store, tmp_path: Path, kind: str) -> None:
    """Said before it begins, or, as space may go meanwhile, by the write that fails."""
    snapshot = store.take({"m": StateDict(w=torch.randn(50_000))}, "s")
    with tmpfs(tmp_path / "disk", "64k") as disk:
        for free in (0, 1 << 40):
            with (
                mock.patch("shutil.disk_usage", return_value=mock.Mock(free=free)),
                pytest.raises(StorageFullError, match=r"no space left to write .*out"),
            ):
                snapshot.export(disk / "out", path="m", format=kind)
            assert list(disk.iterdir()) == []


@pytest.mark.parametrize("name", ["out.pt", "out.dcp"])
def test_a_pickled_value_names_what_reads_it(store: Store, tmp_path: Path, name: str) -> None:
    """An export has no allow_pickle=, so it does not advise it."""
    state = {"run": StateDict(odd=Odd()), "model": StateDict(w=torch.ones(2))}
    snapshot = store.take(state, "s", allow_pickle=True)
    with pytest.raises(UnsupportedTypeError, match="leave it out here") as e:
        snapshot.export(tmp_path / name)
    [way] = re.findall(r"read_object\('run/odd', allow_pickle=True\)", str(e.value))
    assert isinstance(eval(f"snapshot.{way}"), Odd)
    snapshot.export(tmp_path / name, path="model")


class Odd:
    """A class without a safe encoding."""
