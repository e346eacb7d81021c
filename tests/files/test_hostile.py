"""Files that lie, ask for code, or lack something: each is one clear error, and no snapshot."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from casnap import Store
from casnap.errors import FileFormatError
from tests.support.torchsnapshots import tensor_at, torchsnapshot

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").make()


def refused(store: Store, source: Path, **how: Any) -> str:
    """Return the message of an import that fails; the store stays as it was."""
    with pytest.raises(FileFormatError) as raised:
        store.import_file(source, "bad", **how)
    assert store.snapshots() == []
    return str(raised.value)


def entry(dtype: Any = "F32", shape: Any = (2,), at: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


def written(folder: Path, header: Any, data: bytes = bytes(8), size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "m.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return file


LIES: dict[str, tuple[Any, str]] = {
    "overlap": ({"a": entry(), "b": entry()}, "overlap, or follow a hole"),
    "hole": ({"a": entry(at=(4, 8), shape=(1,))}, "overlap, or follow a hole"),
    "beyond": ({"a": entry(shape=(200,), at=(0, 800))}, "beyond the end"),
    "backwards": ({"a": entry(at=(8, 0))}, "beyond the end"),
    "negative": ({"a": entry(at=(-8, 0))}, "beyond the end"),
    "left over": ({"a": entry(shape=(1,), at=(0, 4))}, "cut off, or longer"),
    "sizes": ({"a": entry(dtype="F64")}, "but has 8 bytes"),
    "huge shape": ({"a": entry(shape=(1 << 62, 1 << 62))}, "no tensor can have that shape"),
    "no strides": ({"a": entry(shape=(0, 1 << 62, 9), at=(0, 0))}, "no tensor can have"),
    "negative shape": ({"a": entry(shape=(-2, -1))}, "no tensor can have that shape"),
    "axes": ({"a": entry(shape=(1,) * 70)}, "no tensor can have that shape"),
    "dtype": ({"a": entry(dtype="F6_E2M3")}, "no such dtype"),
    "half a byte": ({"a": entry(dtype="F4", shape=(3, 5))}, "no whole bytes"),
    "twice": (
        b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}",
        "'a' is there twice",
    ),
    "not JSON": (b"{'a': 1}", "not one of safetensors"),
    "a list": (b"[]", "not one of safetensors"),
    "nested": (b"[" * 9000, "not one of safetensors"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, "not one of safetensors"),
    "more fields": ({"a": {**entry(), "code": "x"}}, "not one of safetensors"),
    "bytes": (b"\xff\xfe{}", "not one of safetensors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(store: Store, tmp_path: Path, lie: str) -> None:
    header, said = LIES[lie]
    message = refused(store, written(tmp_path, header))
    assert said in message
    assert "m.safetensors" in message


def test_lengths_that_lie(store: Store, tmp_path: Path) -> None:
    for size in (1 << 63, 1 << 40, 99):
        assert "longer than it may be" in refused(store, written(tmp_path, {}, size=size))
    for content in (b"", b"1234567"):
        (tmp_path / "m.safetensors").write_bytes(content)
        assert "too short" in refused(store, tmp_path / "m.safetensors")


@settings(max_examples=100)
@given(st.data())
def test_a_changed_header_is_refused_or_read_as_safetensors_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("header")
    state = {"a": torch.arange(4.0), "b": torch.ones(2, 3).half()}
    save_file(state, folder / "m.safetensors")
    content = bytearray((folder / "m.safetensors").read_bytes())
    size = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, size - 1))
        likely = st.sampled_from(b'0123456789"{}[],:FBa b')
        content[at] = data.draw(likely | st.integers(0, 255))
    (folder / "m.safetensors").write_bytes(content)
    store = Store(f"memory://{folder.name}").make()
    try:
        store.import_file(folder / "m.safetensors", "m")
    except FileFormatError:
        assert "m" not in store
        return
    result = store["m"].get_state_dict_for_key("model")
    with safe_open(folder / "m.safetensors", "pt") as file:
        assert set(file.keys()) == result.keys()
        for name, tensor in result.items():
            theirs = file.get_tensor(name)
            assert (theirs.dtype, theirs.shape) == (tensor.dtype, tensor.shape)


def test_shards_that_are_missing_or_elsewhere(store: Store, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weights, said in (
        ({"a": "one.safetensors", "b": "two.safetensors"}, "'two.safetensors', which is missing"),
        ({"a": "../one.safetensors"}, "not below its folder"),
        ({"a": "/etc/passwd"}, "not below its folder"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "disagree on 'b'"),
        ({}, "names no tensors"),
    ):
        index.write_text(json.dumps({"weight_map": weights}))
        assert said in refused(store, index)
    index.write_text("{}")
    assert "is not an index" in refused(store, tmp_path)


def test_names_of_files_that_are_none(store: Store, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("x" * 300, "a/" * 3000 + "x", "pipe.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "which is missing" in refused(store, index)
    assert "is not a regular file" in refused(store, tmp_path / "pipe.safetensors")
    assert "is not a regular file" in refused(store, Path("/dev/zero"))


def test_a_file_larger_than_memory_is_mapped(store: Store, tmp_path: Path) -> None:
    nbytes = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file = written(tmp_path, {"a": entry("U8", (nbytes,), (0, nbytes))}, b"")
    try:
        os.truncate(file, file.stat().st_size + nbytes)
    except OSError:
        pytest.skip("this file system has no such large files")
    assert store.import_file(file, "m", dry_run=True).logical_bytes >= nbytes


@pytest.mark.parametrize("how", ["replaced", "a pipe", "its folder"])
def test_a_file_that_goes_while_it_is_imported(store: Store, tmp_path: Path, how: str) -> None:
    """What was begun is imported, not what is there by then."""
    file, other = tmp_path / "in" / "m.safetensors", tmp_path / "other"
    file.parent.mkdir()
    state = {f"t{i}": torch.rand(1 << 19) for i in range(8)}
    save_file(state, file)

    def change(*_: object) -> None:
        if not file.is_file():
            return
        file.unlink()
        if how == "replaced":
            other.write_bytes(bytes(1 << 10))
            other.replace(file)
        elif how == "a pipe":
            os.mkfifo(file)
        elif how == "its folder":
            file.parent.rmdir()
            file.parent.touch()

    store.import_file(file, "a", progress=change)
    assert all(torch.equal(store["a"].read_object(f"model/{name}"), t) for name, t in state.items())


def test_files_of_no_known_format(store: Store, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF and more")
    assert "is neither a safetensors file" in refused(store, tmp_path / "x.gguf")
    assert "holds no safetensors file" in refused(store, tmp_path)
    assert "is a casnap store" in refused(store, tmp_path / "store")
    with pytest.raises(FileNotFoundError):
        store.import_file(tmp_path / "nothing", "bad")
    for name in ("a", "b"):
        save_file({"a": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    assert "name the one to import" in refused(store, tmp_path)
    assert "rank= is for folders" in refused(store, tmp_path / "a.safetensors", rank=0)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, owned: Path) -> None:
        self.owned = owned

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.owned,)


def test_torch_files_that_need_pickle(store: Store, tmp_path: Path) -> None:
    torch.save({"model": torch.ones(3), "x": Evil(tmp_path / "owned")}, tmp_path / "evil.pt")
    message = refused(store, tmp_path / "evil.pt")
    assert "weights_only=False on a machine where it may run code" in message
    assert not (tmp_path / "owned").exists()
    torch.save(torch.ones(3), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "save it anew" in refused(store, tmp_path / "old.pt")


def test_a_torch_file_that_is_cut_off_or_damaged(store: Store, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3000)}, "step": 1}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    in_pickle = whole.index(b"model")
    broken = [whole[:cut] for cut in (4, 40, 300, len(whole) // 2, len(whole) - 30, len(whole) - 1)]
    broken += [whole[:-9000] + bytes(8900) + whole[-100:]]
    broken += [whole[:in_pickle] + b"\xff" * 40 + whole[in_pickle + 40 :]]
    for content in broken:
        (tmp_path / "broken.pt").write_bytes(content)
        message = refused(store, tmp_path / "broken.pt")
        assert message.startswith(f"{tmp_path}/broken.pt is damaged, or was cut off while it was")
        assert "trust" not in message


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save({"w": torch.randn(50, 40), "n": {"a": 1}}, checkpoint_id=tmp_path / "d")
    return tmp_path / "d"


def test_metadata_of_dcp_that_ask_for_code(store: Store, checkpoint: Path) -> None:
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    owned = checkpoint.parent / "owned"
    metadata.planner_data = {"w": ("w",), "x": Evil(owned)}
    for protocol in (2, 4, 5):
        file.write_bytes(pickle.dumps(metadata, protocol))
        message = refused(store, checkpoint)
        assert "was refused; nothing of it was run. On a machine where you trust it" in message
        assert not owned.exists()
    file.write_bytes(pickle.dumps(Evil(owned)))
    assert "asks for" in refused(store, checkpoint)
    file.write_bytes(pickle.dumps([1]))
    assert "does not hold metadata of DCP" in refused(store, checkpoint)
    assert not owned.exists()


def test_checkpoints_of_dcp_that_lie(store: Store, checkpoint: Path) -> None:
    file = checkpoint / ".metadata"
    content, metadata = file.read_bytes(), pickle.loads(file.read_bytes())
    about, places = metadata.state_dict_metadata["w"], metadata.storage_data
    where = places[next(index for index in places if index.fqn == "w")]

    def said(**changed: Any) -> str:
        kept = {name: getattr(where, name) for name in changed}
        vars(where).update(changed)
        file.write_bytes(pickle.dumps(metadata))
        vars(where).update(kept)
        return refused(store, checkpoint)

    assert "not below its folder" in said(relative_path="../d/__0_0.distcp")
    assert "which is missing" in said(relative_path="__7_0.distcp")
    assert "ends before it" in said(length=1 << 40)
    assert "cannot be imported" in said(offset=where.offset + 1)
    assert "compressed by an extension" in said(transform_descriptors=["zstd"])
    about.chunks[0].sizes = torch.Size([50, 39])
    assert "the metadata say float32 of shape [50, 39]" in said()
    about.chunks[0].sizes, about.size = torch.Size([50, 40]), torch.Size([50, 41])
    assert "do not make up a tensor" in said()
    about.chunks.append(about.chunks[0])
    for cut in range(0, len(content), 37):
        file.write_bytes(content[:cut])
        refused(store, checkpoint)


def test_metadata_of_dcp_that_leave_elements_out(store: Store, tmp_path: Path) -> None:
    """They were imported as an empty tensor."""
    folder = tmp_path / "d"
    dcp.save({"w": torch.arange(1000), "none": torch.empty(0, 3)}, checkpoint_id=folder)
    store.import_file(folder, "true")
    assert store["true"].read_object("none").shape == (0, 3)
    store.delete("true")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    about = metadata.state_dict_metadata["w"]
    sizes: list[list[list[int]]] = [[[1000]], [[0]], []]
    for chunks in sizes:
        about.size = torch.Size([0])
        about.chunks = about.chunks[:1] if chunks else []
        for chunk, size in zip(about.chunks, chunks, strict=True):
            chunk.sizes = torch.Size(size)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        message = refused(store, folder)
        assert "do not make up" in message or "metadata have none" in message


PATHS: dict[str, tuple[tuple[str | int, ...], str]] = {
    "a list of nothing": (("a", 1 << 40), "more gaps than values"),
    "a number first": ((5,), "an int in place of a name"),
    "a number in a dict": (("n", 5), "lies below another value"),
    "too deep": (("a",) * 900, "nested too deeply"),
    "much too deep": (("a",) * 5000, "nested more than"),
    "the same": (("n", "a"), "n/a is the path of several values"),
    "above": (("n",), "n is the path of several values"),
}


@pytest.mark.parametrize("case", PATHS)
def test_paths_of_dcp_that_lie(store: Store, checkpoint: Path, case: str) -> None:
    path, said = PATHS[case]
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data["w"] = path
    file.write_bytes(pickle.dumps(metadata))
    assert said in refused(store, checkpoint)


@pytest.mark.parametrize("key", ["01", "\u0661", "9" * 5000])
def test_keys_that_are_nearly_numbers(store: Store, checkpoint: Path, key: str) -> None:
    """They stay strings: the path of a value has to be the one that its container names."""
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data |= {"w": ("o", "state", key), "n.a": ("o", "param_groups")}
    file.write_bytes(pickle.dumps(metadata))
    store.import_file(checkpoint, "odd")
    assert list(store["odd"].get_state_dict_for_key("o")["state"]) == [key]


def test_links_that_lead_out_of_a_folder(store: Store, checkpoint: Path, tmp_path: Path) -> None:
    old = torchsnapshot(
        tmp_path / "old",
        {"0/m": {"type": "dict", "keys": ["w"]}, "0/m/w": tensor_at("data", [2])},
        data=bytes(8),
    )
    for folder, file in ((old, old / "data"), (checkpoint, checkpoint / "__0_0.distcp")):
        moved = file.rename(tmp_path / file.name)
        file.symlink_to(moved)
        message = refused(store, folder)
        assert f"{file} leads out of the folder, to {moved}" in message
        inside = folder / "inside"
        moved.rename(inside)
        file.unlink()
        file.symlink_to("inside")
        (tmp_path / "linked").unlink(missing_ok=True)
        (tmp_path / "linked").symlink_to(folder)
        assert store.import_file(tmp_path / "linked", "x", overwrite=True).tensors == 1
        store.delete("x")


def test_torchsnapshots_that_lie(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    top = {"0/m": {"type": "dict", "keys": ["w"]}}
    evil = tmp_path / "evil"
    torch.save(Evil(tmp_path / "owned"), evil)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"0/m/w": tensor_at("../secret", [2])}, "not below its folder"),
        ({"0/m/w": tensor_at("gone", [2])}, "which is missing"),
        ({"0/m/w": tensor_at("data", [3])}, "has 8 bytes for it"),
        ({"0/m/w": tensor_at("data", [2], byte_range=[4, 12])}, "ends before it"),
        ({"0/m/w": tensor_at("data", [2], serializer="pickle")}, "is written by 'pickle'"),
        ({"0/m/w": tensor_at("data", [-2, -1])}, "no tensor can have the shape"),
        ({"0/m/w": tensor_at("data", [2] + [1] * 70)}, "no tensor can have the shape"),
        ({"0/m/w": tensor_at("d" * 300, [2])}, "which is missing"),
        ({"9" * 5000 + "/m": {"type": "dict"}}, "does not begin with a rank"),
        ({"0/m": {"type": "list"}, "0/m/" + "9" * 5000: {"type": "dict"}}, "in no container"),
        ({"0/m": {"type": "dict", "keys": [1, "1"]}}, "'m' has a key twice"),
        ({"0/m/w": {"type": "Secret"}}, "of the unknown type"),
        ({"0/m/w": {"type": "int", "serialized_value": "x"}}, "cannot be imported"),
        ({"0/m/w": {"type": "object", "location": "evil", "serializer": "torch_save"}}, "m/w"),
        ({}, "'m/w' is missing from the manifest"),
        ({"0/m/w": tensor_at("data", [2]), "0/x/y": tensor_at("data", [2])}, "is in no container"),
        ({"x/m": {"type": "dict"}}, "does not begin with a rank"),
    ]  # fmt: skip
    for i, (manifest, said) in enumerate(cases):
        folder = tmp_path / f"ts{i}"
        torchsnapshot(folder, {**top, **manifest}, data=bytes(8), evil=evil.read_bytes())
        assert said in refused(store, folder), said
    assert not (tmp_path / "owned").exists()
    laughs = "a0: &a0 [1]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
    )
    odd = ("a: [", "[]", "{}", "x: !!python/object/apply:os.getcwd []", laughs, "[" * 200_000)
    for text in odd:
        (folder / ".snapshot_metadata").write_text(text)
        assert "not as TorchSnapshot writes it" in refused(store, folder)
    os.truncate(folder / ".snapshot_metadata", 100 << 30)
    assert "too long for the metadata" in refused(store, folder)
