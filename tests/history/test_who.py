"""Whose weights a file has: told by digests, whatever the paths and the format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from casnap import NewStore, StateDict, Store
from casnap.cli import run
from casnap.errors import FileFormatError, StateError, UnsupportedTypeError
from tests.support.ranks import Worlds


def model_at(step: int) -> nn.Module:
    torch.manual_seed(step)
    return nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 100))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=1 << 16))
    for step in range(4):
        store.take({"model": model_at(step), "progress": StateDict(step=step)}, f"run/step_{step}")
    return store


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_at(step).state_dict().items()}


def test_each_form_of_the_weights_of_a_step(store: Store, tmp_path: Path) -> None:
    tensors = tensors_at(2)
    save_file(
        {f"other.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "m.safetensors"
    )
    torch.save(tensors, tmp_path / "m.pt")
    for source in (tmp_path / "m.safetensors", str(tmp_path / "m.pt"), model_at(2), tensors):
        report = store.who(source)
        assert report.whole == ["run/step_2"], source
        assert report.tensors == 9
    assert store.who(store["run/step_1"]).whole == ["run/step_1"]


def test_a_swapped_head(store: Store) -> None:
    tensors = tensors_at(3) | {
        "2.weight": tensors_at(1)["2.weight"],
        "2.bias": torch.full((100,), 9.0),
    }
    report = store.who(tensors)
    assert report.whole == []
    assert report.holders[0].name == "run/step_3"
    assert report.elsewhere == {"model/2.bias": [], "model/2.weight": ["run/step_1"]}
    said = str(report)
    assert "7 of 9 tensors: run/step_3" in said
    assert "run/step_3 lacks model/2.weight: it is of run/step_1" in said
    assert "run/step_3 lacks model/2.bias: it is of no snapshot" in said


def test_weights_that_were_cast_to_more_bits(store: Store) -> None:
    model = model_at(7).to(torch.bfloat16)
    store.take({"model": model}, "run/half")
    report = store.who(model.float())
    assert report.whole == ["run/half"]
    assert set(report.cast.values()) == {"bfloat16"}
    assert "held as bfloat16, with the same values" in str(report)
    assert store.who(model_at(7)).whole == []


def test_weights_that_were_cast_to_fewer_bits(store: Store, tmp_path: Path) -> None:
    tensors = {f"{name}": tensor for name, tensor in tensors_at(2).items()}
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(half, tmp_path / "half.safetensors")
    for source in (tmp_path / "half.safetensors", half):
        report = store.who(source)
        assert report.whole == ["run/step_2"]
        assert report.rounded["model/0.weight"] == "float32"
        assert report.cast == {}
        assert "held as float32, and equal once it is cast" in str(report)
    # A head of another step; and a single bit in the last chunk of a tensor.
    half["2.weight"] = tensors_at(1)["2.weight"].bfloat16()
    bits = half["0.weight"].view(torch.int16)
    bits[-1, -1] ^= 1
    report = store.who(half)
    assert report.holders[0].name == "run/step_2"
    assert set(report.holders[0].lacking) == {"model/0.weight", "model/2.weight"}
    assert report.elsewhere["model/2.weight"] == ["run/step_1"]
    assert store.who(model_at(9).half()).holders[0].found < 9


def test_two_tensors_that_were_exchanged(store: Store) -> None:
    """Paths do not count, so all tensors are there; that two have each other's names is said."""
    tensors = tensors_at(0)
    tensors["0.bias"], tensors["1.bias"] = tensors["1.bias"], tensors["0.bias"]
    report = store.who(tensors)
    assert report.whole == ["run/step_0"]
    assert report.renamed == {"model/0.bias": "model/1.bias", "model/1.bias": "model/0.bias"}
    assert "model/0.bias is not what run/step_0 has there, but its model/1.bias" in str(report)
    # Casts do not hide it.
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    assert store.who(half).holders[0].found < 9
    store.take({"model": StateDict(**half)}, "half/step_0")
    wide = {n: t.float() if t.is_floating_point() else t for n, t in half.items()}
    wide["0.bias"], wide["1.bias"] = wide["1.bias"], wide["0.bias"]
    assert store.who(wide).renamed.keys() == {"model/0.bias", "model/1.bias"}


@pytest.mark.parametrize("key", ["0", "7", "model"])
def test_a_key_of_digits_is_no_rank(store: Store, key: str) -> None:
    tensors = tensors_at(0)
    tensors["0.bias"], tensors["1.bias"] = tensors["1.bias"], tensors["0.bias"]
    report = store.who(tensors, key=key)
    assert report.renamed == {f"{key}/0.bias": "model/1.bias", f"{key}/1.bias": "model/0.bias"}
    swapped = store.take({key: StateDict(**tensors)}, "swapped/1")
    assert store.who(swapped, prefix="run").renamed == report.renamed


def test_among_equals_one_with_the_same_names_comes_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    q, k = torch.full((50, 50), 1.0), torch.full((50, 50), 2.0)
    store.take({"model": StateDict({"q": q, "k": k})}, "run/1")
    store.take({"model": StateDict({"q": k, "k": q})}, "run/2")
    store.take({"model": StateDict({"q": k, "k": q, "v": q})}, "run/3")
    report = store.who({"q": q, "k": k})
    assert report.renamed == {}
    assert report.whole == ["run/1", "run/3", "run/2"]


def test_other_names_are_no_news(store: Store) -> None:
    """Only a name that means another tensor there is told, not a prefix, a key or a copy."""
    tensors = tensors_at(1)
    assert store.who({f"net.{name}": tensor for name, tensor in tensors.items()}).renamed == {}
    assert store.who(tensors, key="other").renamed == {}
    ema = {name: tensor + 1 for name, tensor in tensors.items()}
    store.take({"model": StateDict(**ema), "ema": StateDict(**tensors)}, "ema/step_0")
    assert store.who(tensors, prefix="ema").renamed == {}
    zeros = StateDict(a=torch.zeros(99), b=torch.zeros(99))
    store.take({"model": zeros}, "zeros/step_0")
    assert store.who(zeros.state_dict(), prefix="zeros").renamed == {}


def test_steps_with_equal_weights(store: Store) -> None:
    assert store.equal_weights() == []
    store.take({"model": model_at(1), "progress": StateDict(step=9)}, "run/step_9")
    other = model_at(1)
    other(torch.randn(4, 300))  # counts a batch, and changes what BatchNorm knows
    store.take({"model": other}, "run/step_10")
    # Buffers do not count: it has not trained.
    assert store.equal_weights("run") == [["run/step_1", "run/step_9", "run/step_10"]]
    frozen = StateDict(w=torch.ones(1000))
    for step in range(3):
        store.take(
            {"base": frozen, "adapter": StateDict(w=torch.full((9,), step + 0.5))}, f"t/{step}"
        )
    assert store.equal_weights("t") == []


def test_a_loader_that_goes_on_does_not_hide_equal_weights(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(2):
        samples = {"shuffled": torch.full((40, 40), float(step))}
        store.take({"model": model_at(0), "loader": StateDict(samples)}, f"run/{step}")
    assert store.equal_weights() == [["run/0", "run/1"]]


def test_a_snapshot_of_ranks(tmp_path: Path, world: Worlds) -> None:
    """A tensor that all ranks have is one tensor, under the path that a file gives it."""
    world(2).run(_take_by_ranks, str(tmp_path))
    store = Store(tmp_path)
    report = store.who(store["b/exchanged"])
    assert report.tensors == 4
    assert report.whole == ["b/exchanged"]
    report = store.who(store["b/exchanged"], prefix="a")
    assert report.renamed == {"model/k": "model/q", "model/q": "model/k"}
    assert report.holders[0].lacking == ("1/own/x",)
    assert report.elsewhere == {"1/own/x": []}


def _take_by_ranks(folder: str) -> None:
    own, q, k = (torch.full((50, 50), float(i)) for i in (100, 1, 2))
    rank = dist.get_rank()
    for name, model in (("a/plain", {"q": q, "k": k}), ("b/exchanged", {"q": k, "k": q})):
        own = own + rank
        app = {"model": StateDict(model), "own": StateDict(x=own)}
        Store(folder).take(app, name, replicated=["model/**"])


def test_only_tensors_count(store: Store) -> None:
    """A state may hold more: who() stores nothing."""
    tensors = tensors_at(2)
    objects = np.array([object()], dtype=object)
    state = {"net": tensors, "loss": lambda x: x, "other": object(), "lr": 0.1, "all": objects}
    report = store.who(state)
    assert report.tensors == 9
    assert report.whole == ["run/step_2"]
    with pytest.raises(UnsupportedTypeError, match="model/net/far: a tensor on the meta device"):
        store.who({"net": {"far": torch.empty(3, device="meta")}})
    key: tuple[object, ...] = ()
    for _ in range(100_000):
        key = (key,)
    with pytest.raises(UnsupportedTypeError, match="nested too deeply"):
        store.who({"net": {key: torch.ones(3)}})


def test_a_snapshot_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has not read its trees yet passes over it."""

    def tensors(step: int) -> dict[str, torch.Tensor]:
        return {f"w{i}": torch.full((20,), step + i / 1000) for i in range(900)}

    class Deletes:
        def state_dict(self) -> dict[str, torch.Tensor]:
            other = Store(tmp_path / "store")
            other.delete("run/1")
            other.gc(grace=0)
            return tensors(2)

    for step in range(3):
        Store(tmp_path / "store").take({"model": StateDict(tensors(step))}, f"run/{step}")
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "cache"))
    assert Store(tmp_path / "store").who(Deletes()).whole == ["run/2"]


def test_bad_input(store: Store, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no weights")
    with pytest.raises(FileFormatError):
        store.who(tmp_path / "text.txt")
    with pytest.raises(UnsupportedTypeError, match="got int"):
        store.who(3)
    with pytest.raises(StateError, match="no tensor with elements"):
        store.who({"x": torch.empty(0), "y": 3})
    assert str(store.who({"x": torch.rand(100)})) == "no snapshot holds any of the 1 tensors"


def test_the_command(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_file(tensors_at(2), tmp_path / "m.safetensors")
    assert run(["who", str(tmp_path / "m.safetensors"), "--store", store.uri]) == 0
    assert "9 of 9 tensors: run/step_2" in capsys.readouterr().out
    assert run(["who", "run/step_0", "--store", store.uri, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["holders"][0] == {"name": "run/step_0", "found_count": 9, "lacking": []}
    assert run(["who", "--store", store.uri]) == 0
    assert capsys.readouterr().out == "no two snapshots have equal weights\n"
    assert run(["who", "nothing", "--store", store.uri]) == 1


def test_the_exit_status_says_whether_a_snapshot_holds_all(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So `casnap who FILE && rm FILE` deletes nothing that the store does not have."""
    some = {**tensors_at(2), "new": torch.rand(99)}
    for name, tensors, holders in ("some", some, 4), ("none", {"new": some["new"]}, 0):
        save_file(tensors, tmp_path / name)
        assert run(["who", str(tmp_path / name), "--store", store.uri]) == 1
        assert f"{len(tensors)} tensors" in capsys.readouterr().out
        assert run(["who", str(tmp_path / name), "--store", store.uri, "--json"]) == 1
        assert len(json.loads(capsys.readouterr().out)["holders"]) == holders


def test_the_store_that_a_file_lies_in(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the current folder is in no store, the store at or above the file is meant."""
    exports = tmp_path / "store/run/exports"
    exports.mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    file = exports / "m.safetensors"
    for each in (file, elsewhere / "m.safetensors"):
        save_file(tensors_at(2), each)
    monkeypatch.chdir(elsewhere)
    assert run(["who", str(file)]) == 0
    said = capsys.readouterr()
    assert "9 of 9 tensors: run/step_2" in said.out
    assert said.err == f"{file} lies in {store.uri}\n"
    assert run(["who", "m.safetensors"]) == 1
    assert f"{elsewhere} is not a casnap store" in capsys.readouterr().err
    # A folder of weights may have its store inside, as the output of a trainer has. The error
    # names it.
    output = tmp_path / "output"
    shutil.copytree(tmp_path / "store", output / "casnap-store")
    save_file(tensors_at(2), output / "model.safetensors")
    assert run(["who", str(output)]) == 1
    assert f"Name one, like {output}/casnap-store" in capsys.readouterr().err
    # No snapshot lies below the folder of exports.
    monkeypatch.chdir(exports)
    assert run(["who", "m.safetensors"]) == 0
    assert "9 of 9 tensors: run/step_2" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "store/run")
    assert run(["who", "step_1"]) == 0
    assert "9 of 9 tensors: step_1" in capsys.readouterr().out


def test_a_snapshot_of_another_store(store: Store, tmp_path: Path) -> None:
    """Digests of chunks of another size say nothing."""
    same = Store(tmp_path / "same", create=NewStore(chunk_size=1 << 16))
    other = Store(tmp_path / "other")
    for each in (same, other):
        each.take({"net": model_at(2)}, "x")
    assert store.who(same["x"]).whole == ["run/step_2"]
    with pytest.raises(StateError, match=r"up to 1\.0 MB, and this store of up to 65"):
        store.who(other["x"])
    assert store.who(other["x"].get_state_dict_for_key("net")).whole == ["run/step_2"]


def test_the_command_in_the_folder_of_a_store(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the name of a snapshot is that of a file as well: of its marker."""
    monkeypatch.chdir(tmp_path / "store")
    assert run(["who", "run/step_1"]) == 0
    assert "9 of 9 tensors: run/step_1" in capsys.readouterr().out
    assert run(["who", str(tmp_path / "store" / "run" / "step_2")]) == 0
    assert "9 of 9 tensors: run/step_2" in capsys.readouterr().out
    torch.save(tensors_at(3), "weights.pt")
    assert run(["who", "weights.pt"]) == 0
    assert "9 of 9 tensors: run/step_3" in capsys.readouterr().out
    assert run(["who", "../store/weights.pt"]) == 0
    for arguments in ([], ["weights.pt"]):
        assert run(["who", *arguments, "--prefix", "rum"]) == 1
        assert "holds no snapshot below 'rum'" in capsys.readouterr().err
        assert run(["who", *arguments, "--prefix", "run/step_3"]) == 1
        assert "run/step_3 is a snapshot, not a folder" in capsys.readouterr().err
    assert run(["check", str(tmp_path / "store"), "--history", "run/step_3"]) == 1
    assert "run/step_3 is a snapshot, not a folder" in capsys.readouterr().err
