"""Importing files of other formats: what comes in, what is shared, and what is kept beside."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from casnap import RNGState, StateDict, Store
from casnap.errors import FileFormatError
from casnap.files.importing import is_imported
from tests.support.bitwise import assert_same, noise
from tests.support.ranks import Worlds
from tests.support.torchsnapshots import (
    SEED,
    app_of_every_kind,
    tensor_at,
    torchsnapshot,
    write_with_torchsnapshot,
)
from tests.support.versioned import of_first_version, versioned
from tests.support.warm import run_python

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def of_every_dtype() -> dict[str, torch.Tensor]:
    state = {f"layers.{i}/{d}": noise(d, (3, 8)) for i, d in enumerate(DTYPES)}
    return {
        **state,
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 7),
        "large": torch.randn(300, 99),
    }


def state_of_training() -> dict[str, Any]:
    model = torch.nn.Linear(200, 90)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 100}


def test_more_files_than_descriptors(store: Store, tmp_path: Path) -> None:
    of = {f"w{i}": f"model-{i}.safetensors" for i in range(100)}
    for name, file in of.items():
        save_file({name: torch.full((9,), 1.0)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    process = run_python(
        "import resource, sys; from casnap.cli import run;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)); sys.exit(run(sys.argv[1:]))",
        *("import", tmp_path, f"{store.uri}/m"),
    )
    if sys.version_info >= (3, 13):
        assert process.returncode == 0, process.stderr
    else:
        assert (process.returncode, list(store.snapshots())) == (1, [])
        assert "raise the limit (ulimit -n)" in process.stderr
        assert "Traceback" not in process.stderr


def test_a_safetensors_file(store: Store, tmp_path: Path) -> None:
    state = of_every_dtype()
    save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt", "author": "é"})
    report = store.import_file(tmp_path / "m.safetensors", "m", metadata={"loss": 1.5})
    assert (report.format, report.files, report.keys) == ("safetensors", 1, ["model"])
    assert (report.tensors, report.values) == (len(state), 0)
    assert store["m"].metadata.user == {"format": "pt", "author": "é", "loss": 1.5}
    result = store["m"].get_state_dict_for_key("model")
    assert result.keys() == state.keys()
    assert_same({name: result[name] for name in state}, state)


def test_it_shares_chunks_with_a_take(store: Store, tmp_path: Path) -> None:
    state = {"a": torch.randn(500, 300), "b": torch.randn(7, 1000).to(torch.bfloat16)}
    snapshot = store.take({"other": StateDict(**state)}, "taken")
    assert snapshot.stats.new_bytes > 600_000
    save_file(state, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    for i, source in enumerate(("m.safetensors", "m.pt", "dcp")):
        report = store.import_file(tmp_path / source, f"imported-{i}")
        assert report.logical_bytes > 600_000
        assert report.new_bytes < 2000
        assert is_imported(tmp_path / source, store[report.name].contents, key=None, rank=None)


PARTS = [{"a": torch.arange(100.0)}, {"b": torch.ones(50), "c": torch.zeros(2, 2)}]
WHOLE = {**PARTS[0], **PARTS[1]}


def shards(folder: Path, kind: str, *, with_index: bool) -> list[Path]:
    """Write shards as Transformers does, of which none says by its name of what format it is."""
    stem, suffix, write = {
        "safetensors": ("model", ".safetensors", save_file),
        "torch": ("pytorch_model", ".bin", torch.save),
    }[kind]
    files = [folder / f"{stem}-0000{i}-of-00002{suffix}" for i in (1, 2)]
    for file, part in zip(files, PARTS, strict=True):
        write(part, file)  # type: ignore[operator]
    if with_index:
        weights = {
            name: file.name for file, part in zip(files, PARTS, strict=True) for name in part
        }
        index = folder / f"{stem}{suffix}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        return [index, *files]
    return files


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_set_of_shards_is_imported_whole(
    store: Store, tmp_path: Path, kind: str, with_index: bool
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    files = shards(folder, kind, with_index=with_index)
    for i, source in enumerate((folder, *files)):
        report = store.import_file(source, f"{i}")
        assert (report.format, report.files, report.tensors) == (kind, 2, 3)
        assert_same(store[f"{i}"].get_state_dict_for_key("model"), WHOLE)
    files[-1].unlink()
    for source in (folder, *files[:-1]):
        with pytest.raises(FileFormatError, match=rf"{files[-1].name}.* is missing"):
            store.import_file(source, "lacking")
    assert "lacking" not in store


def test_shards_that_do_not_belong_together(store: Store, tmp_path: Path) -> None:
    index, first, second = shards(tmp_path, "torch", with_index=True)
    torch.save({**PARTS[1], "more": torch.ones(1)}, second)
    with pytest.raises(FileFormatError, match=r"disagree on 'more'"):
        store.import_file(index, "a")
    torch.save({"b": [1]}, second)
    with pytest.raises(FileFormatError, match="holds more than tensors"):
        store.import_file(index, "a")
    save_file(PARTS[1], second)
    with pytest.raises(FileFormatError, match=r"some of its shards are safetensors"):
        store.import_file(index, "a")
    index.unlink()
    torch.save(PARTS[0], second)
    with pytest.raises(FileFormatError, match=r"both have 'a'"):
        store.import_file(first, "a")


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_the_small_files_of_a_folder_go_along_to_an_engine(
    store: Store, tmp_path: Path, kind: str
) -> None:
    folder, live = tmp_path / "hub", tmp_path / "live"
    folder.mkdir()
    shards(folder, kind, with_index=True)
    small = {"config.json": b"{}", "tokenizer.model": bytes(range(256)), "chat_template.jinja": b""}
    for name, data in {**small, ".hidden": b"x", "training_args.bin": b"x"}.items():
        (folder / name).write_bytes(data)
    (folder / "original").mkdir()
    report = store.import_file(folder, "base")
    assert (report.keys, report.files, report.values) == (["model", "files"], 5, 3)
    assert store["base"].read_object("files") == small
    store.pull(live)
    assert {f.name: f.read_bytes() for f in live.iterdir() if f.name in small} == small
    names = {file.name for file in live.iterdir() if not file.name.startswith((".", "casnap"))}
    assert names == {*small, "model.safetensors"}
    # A file brings itself alone.
    assert store.import_file(next(folder.glob("*1-of-*")), "files").keys == ["model"]


def test_a_file_of_torch_save(store: Store, tmp_path: Path) -> None:
    state = {**state_of_training(), "list": [1, {"t": torch.ones(3).t()}], "strided": None}
    state["strided"] = torch.arange(60_000).reshape(200, 300).t()
    torch.save(state, tmp_path / "c.pt")
    report = store.import_file(tmp_path / "c.pt", "c")
    assert report.keys == list(state)
    assert_same(store["c"].read_object("optim"), state["optim"])
    assert_same(store["c"].read_object("strided"), state["strided"])
    assert store["c"].read_object("step") == 100
    torch.save(state["model"], tmp_path / "m.pt")
    assert store.import_file(tmp_path / "m.pt", "m").keys == ["model"]
    assert store.import_file(tmp_path / "c.pt", "under", key="all").keys == ["all"]
    assert store["under"].read_object("all/step") == 100


def test_the_state_of_a_module_keeps_its_versions(store: Store, tmp_path: Path) -> None:
    class Counting(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == {"count": 3}

    def model() -> nn.Module:
        return nn.Sequential(*versioned(spectral=True), Counting())

    source = model()
    for version, state in ((2, source.state_dict()), (1, of_first_version(source))):
        torch.save(state, tmp_path / f"{version}.pt")
        report = store.import_file(tmp_path / f"{version}.pt", f"v{version}")
        assert report.keys == ["model"]
        store[f"v{version}"].export(tmp_path / f"again{version}.pt", path="model")
        fresh, again = model(), model()
        store[f"v{version}"].restore({"model": fresh})
        again.load_state_dict(torch.load(tmp_path / f"again{version}.pt", weights_only=True))
        assert_same(fresh.state_dict(), source.state_dict())
        assert_same(again.state_dict(), source.state_dict())


def test_a_checkpoint_of_dcp(store: Store, tmp_path: Path) -> None:
    state = {**state_of_training(), "nested": {"a": [1, 2, {"b": torch.ones(3)}], "e": "text"}}
    dcp.save(state, checkpoint_id=tmp_path / "d")
    report = store.import_file(tmp_path / "d", "d")
    assert (report.format, report.files) == ("dcp", 2)
    assert_same(store["d"].read_object("model"), dict(state["model"]))
    assert_same(store["d"].read_object("optim/state"), state["optim"]["state"])
    assert_same(store["d"].read_object("nested"), state["nested"])
    assert store.import_file(tmp_path / "d", "k", key="all").keys == ["all"]


def test_a_namespace_in_an_old_file(store: Store, tmp_path: Path) -> None:
    """Many training scripts saved their arguments so: each way that an error names works."""
    args = argparse.Namespace(lr=0.1, layers=[1, 2])
    state = {"model": {"w": torch.randn(9)}, "args": args}
    torch.save(state, tmp_path / "old.pt")
    dcp.save(state, checkpoint_id=tmp_path / "old", no_dist=True)
    for file in ("old.pt", "old"):
        with pytest.raises(FileFormatError, match=r"an argparse\.Namespace") as e:
            store.import_file(tmp_path / file, "v1")
        assert "allow_pickle" not in str(e.value)
        assert ("such as vars()" if file == "old.pt" else "add_safe_globals") in str(e.value)
        with torch.serialization.safe_globals([argparse.Namespace]):
            store.import_file(tmp_path / file, file)
            assert store[file].read_object("args") == args
    trusted = torch.load(tmp_path / "old.pt", weights_only=False)
    torch.save({**trusted, "args": vars(trusted["args"])}, tmp_path / "new.pt")
    store.import_file(tmp_path / "new.pt", "v2")
    assert store["v2"].read_object("args") == vars(args)
    assert torch.equal(store["v2"].read_object("model/w"), state["model"]["w"])


def test_a_dry_run_changes_nothing(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "m.safetensors")
    report = store.import_file(tmp_path / "m.safetensors", "m", dry_run=True)
    assert (report.dry_run, report.tensors, report.logical_bytes) == (True, 1, report.logical_bytes)
    assert "m" not in store


def test_progress_and_overwriting(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.randn(100_000)}, tmp_path / "m.safetensors")
    calls: list[tuple[str, int, int]] = []
    store.import_file(tmp_path / "m.safetensors", "m", progress=lambda *told: calls.append(told))
    assert calls[-1] == ("storing", 400_000, 400_000)
    with pytest.raises(FileExistsError):
        store.import_file(tmp_path / "m.safetensors", "m")
    store.import_file(tmp_path / "m.safetensors", "m", overwrite=True)


# --- TorchSnapshot ----------------------------------------------------------------------------


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def test_a_snapshot_of_torchsnapshot(store: Store, tmp_path: Path) -> None:
    value = torch.randn(3, 4)
    saved = tmp_path / "saved"
    torch.save([1, "two"], saved)
    manifest = {
        "0/app": {"type": "dict", "keys": ["w", "b", 7, "list", "a%2Fb", "chunked"]},
        "0/app/w": tensor_at("data", [3, 4], byte_range=[8, 56]),
        "0/app/b": {"type": "bool", "serialized_value": "True", "replicated": False},
        "0/app/7": {"type": "float", "serialized_value": "AAAAAAAA4D8=", "readable": "0.5"},
        "0/app/list": {"type": "list"},
        "0/app/list/0": {"type": "int", "serialized_value": "5"},
        "0/app/list/1": {"type": "object", "location": "saved", "serializer": "torch_save"},
        "0/app/a%252Fb": {"type": "str", "serialized_value": "x"},
        "0/app/chunked": {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [3, 4],
                          "chunks": [
            {"offsets": [i, 0], "sizes": [n, 4],
             "tensor": tensor_at("data", [n, 4], byte_range=[8 + 16 * i, 8 + 16 * (i + n)])}
            for i, n in ((0, 1), (1, 2))
        ]},
    }  # fmt: skip
    folder = torchsnapshot(
        tmp_path / "ts", manifest, data=b"12345678" + raw(value), saved=saved.read_bytes()
    )
    assert store.import_file(folder, "ts").format == "torchsnapshot"
    want = {
        "w": value, "b": True, 7: 0.5, "list": [5, [1, "two"]], "a%2Fb": "x", "chunked": value,
    }  # fmt: skip
    assert_same(store["ts"].read_object("app"), want)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning")
@pytest.mark.parametrize("made", ["before", "now"])
@pytest.mark.parametrize("strict", [True, False])
def test_each_kind_of_value_that_torchsnapshot_writes(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, made: str, strict: bool
) -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "torchsnapshot"
    if made == "now":
        pytest.importorskip("torchsnapshot")
        folder = tmp_path / "made"
        write_with_torchsnapshot(folder)
    store.import_file(folder, "ts")
    taken, live = app_of_every_kind(trained=True), app_of_every_kind(trained=False)
    torch.manual_seed(3)
    random.seed(3)
    python = random.getstate()
    assert not store["ts"].restore({**live, "rng": RNGState()}, strict=strict)
    for key, value in taken.items():
        assert_same(dict(live[key].state_dict()), dict(value.state_dict()))
    assert_same(torch.get_rng_state(), torch.Generator().manual_seed(SEED).get_state())
    assert random.getstate() == python
    assert "those of Python and numpy stay as they are" in caplog.text


def test_yaml_of_older_torchsnapshots(store: Store, tmp_path: Path) -> None:
    folder = torchsnapshot(tmp_path / "ts", {}, data=raw(torch.ones(2)))
    (folder / ".snapshot_metadata").write_text(
        "version: 0.0.1\nworld_size: 1\nmanifest:\n"
        "  0/app: {type: OrderedDict, keys: [w]}\n"
        "  0/app/w: {type: Tensor, location: data, serializer: buffer_protocol,\n"
        "    dtype: torch.float32, shape: [2], replicated: false}\n"
    )
    store.import_file(folder, "ts")
    assert_same(store["ts"].read_object("app/w"), torch.ones(2))


def test_torchsnapshots_of_many_ranks(store: Store, tmp_path: Path) -> None:
    value = torch.randn(4, 100)

    def part(rank: int) -> dict[str, Any]:
        tensor = tensor_at(f"shard{rank}", [2, 100])
        return {"offsets": [2 * rank, 0], "sizes": [2, 100], "tensor": tensor}

    manifest: dict[str, Any] = {}
    for rank in (0, 1):
        manifest |= {
            f"{rank}/app": {"type": "dict", "keys": ["s", "r"]},
            f"{rank}/app/s": {"type": "ShardedTensor", "shards": [part(rank)]},
        }
    manifest["0/app/r"] = {"type": "int", "serialized_value": "3", "replicated": True}
    shards = {f"shard{i}": raw(value[2 * i : 2 * i + 2]) for i in (0, 1)}
    store.import_file(torchsnapshot(tmp_path / "ts", manifest, 2, **shards), "ts")
    assert_same(store["ts"].read_object("app"), {"s": value, "r": 3})
    again = partial(is_imported, tmp_path / "ts", key=None, rank=None)
    assert again(store["ts"].contents)
    (tmp_path / "ts/shard1").write_bytes(raw(value[2:] + 1))
    assert not again(store["ts"].contents)
    (tmp_path / "ts/shard1").write_bytes(shards["shard1"])
    own = {f"{rank}/app/o": {"type": "int", "serialized_value": str(rank)} for rank in (0, 1)}
    for rank in (0, 1):
        manifest[f"{rank}/app"] = {"type": "dict", "keys": ["s", "r", "o"]}
    folder = torchsnapshot(tmp_path / "own", {**manifest, **own}, 2, **shards)
    with pytest.raises(FileFormatError, match=r"rank 1 of 2 have entries of their own.*rank=0"):
        store.import_file(folder, "own")
    store.import_file(folder, "own", rank=1)
    assert_same(store["own"].read_object("app"), {"s": value, "r": 3, "o": 1})


# --- torch_checkpointing --------------------------------------------------------------------------


def write_with_torch_checkpointing(folder: str) -> None:
    """Write what its default layout writes: a file for each item and rank, DTensors whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(WEIGHT, mesh, [Shard(0)])
    model = {"rows": rows, "columns": distribute_tensor(WEIGHT, mesh, [Shard(1)])}
    model |= {"whole": distribute_tensor(WEIGHT, mesh, [Replicate()]), "nan": WEIGHT / 0}
    for item, state in {"model": model, "step": 7, "data": {"seen": [rank, 2]}}.items():
        torch.save(state, Path(folder, f"{item}_{rank}.pt"))


WEIGHT = torch.arange(2000.0).reshape(500, 4)


@pytest.fixture(scope="module")
def of_two_ranks(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step_7")
    world(2).run(write_with_torch_checkpointing, str(folder))
    return folder


def test_ranks_of_torch_checkpointing(store: Store, of_two_ranks: Path) -> None:
    with pytest.raises(FileFormatError, match=r"ranks 0 and 1 .*data/seen.*rank=0 \(--rank 0\)"):
        store.import_file(of_two_ranks, "a")
    report = store.import_file(of_two_ranks, "a", rank=1)
    assert (report.format, report.files, report.tensors) == ("torch_checkpointing", 6, 4)
    assert report.keys == ["data", "model", "step"]
    model = store["a"].get_state_dict_for_key("model")
    for name in ("rows", "columns", "whole"):
        assert_same(model[name], WEIGHT)
    assert_same(model["nan"], WEIGHT / 0)
    assert store["a"].read_object("step") == 7
    assert store["a"].get_state_dict_for_key("data") == {"seen": [1, 2]}


def test_a_folder_of_torch_checkpointing_that_lacks_something(
    store: Store, of_two_ranks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_8"
    shutil.copytree(of_two_ranks, folder)
    (folder / "model_1.pt").unlink()
    with pytest.raises(FileFormatError, match="model/rows: its parts do not make up a tensor"):
        store.import_file(folder, "a", rank=0)
    with pytest.raises(FileFormatError, match="has model of rank 0, not of rank 1"):
        store.import_file(folder, "a", rank=1)
    with pytest.raises(FileFormatError, match="keys of its own"):
        store.import_file(folder, "a", key="k")
    torch.save({"rows": torch.optim.SGD([WEIGHT])}, folder / "model_1.pt")
    with pytest.raises(FileFormatError, match=r"model_1.pt is not read: .* weights_only"):
        store.import_file(folder, "a", rank=0)
    folder = folder.rename(tmp_path / "tmp_step_8")
    with pytest.raises(FileFormatError, match="has not finished"):
        store.import_file(folder, "a", rank=0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metadata.pkl").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"no file such as model_0.pt.*CheckpointManager"):
        store.import_file(tmp_path / "other", "a")
    assert list(store.snapshots()) == []
