"""Takes measure tensors: against the same numbers by torch, over whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import HealthOptions, NewStore, RNGState, Snapshot, StateDict, Store, TensorHealth
from casnap.errors import DamagedError, StateError, StoreError, UnhealthyError
from casnap.format.entries import TORCH_DTYPES
from casnap.format.records import encode
from tests.support.forger import Forger
from tests.support.ranks import Worlds
from tests.support.sharded import LAYOUTS, training
from tests.support.sharded import expected as whole_training

CHUNK = 1 << 16
FLOATS = [name for name in TORCH_DTYPES if name.startswith(("float", "bfloat", "complex"))]
FLOATS = [name for name in FLOATS if hasattr(torch, name) and not name.startswith("float4")]


def measured(tensor: torch.Tensor) -> TensorHealth:
    """Return the numbers about a tensor, in the plainest way."""
    with torch.no_grad():
        if tensor.dtype is torch.complex32:
            tensor = torch.view_as_real(tensor).double().view(-1).view(torch.complex128)
        wide = tensor.to(torch.complex128).flatten()
    size = torch.hypot(wide.real, wide.imag)
    finite = size[size.isfinite()]
    largest = float(finite.max()) if len(finite) else 0.0
    norm = largest * float((finite / largest).norm()) if largest else 0.0
    parts = torch.view_as_real(wide)
    nan_count, inf_count = (int(t.any(1).sum()) for t in (parts.isnan(), parts.isinf()))
    return TensorHealth(nan_count, inf_count, norm, largest)


def close(found: TensorHealth, expected: TensorHealth) -> bool:
    both = zip(msgspec.structs.astuple(found), msgspec.structs.astuple(expected), strict=True)
    return all(a == pytest.approx(b, rel=1e-12) for a, b in both)


def measuring(folder: Path, **options: Any) -> Store:
    return Store(folder, create=NewStore(chunk_size=CHUNK), health=HealthOptions(**options))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return measuring(tmp_path / "store")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_dtype(store: Store, dtype: str) -> None:
    """Random bits have NaN, and numbers of all sizes."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, count in (("many", 90_000), ("few", 100), ("tiny", 2)):
        kind = getattr(torch, dtype)
        raw = torch.randint(256, (count * kind.itemsize,), dtype=torch.uint8, generator=generator)
        state[name] = raw.view(kind)
    state["none"], state["one"] = state["few"][:0], state["few"][0]
    state["columns"] = state["many"].view(300, 300)[:, ::7]
    found = store.take({"s": StateDict(state)}, "run/1").health()
    assert found.keys() == {f"s/{name}" for name in state}
    for name, tensor in state.items():
        assert close(found[f"s/{name}"], measured(tensor)), name


def test_arrays_of_numpy(store: Store) -> None:
    state, expected = StateDict(ints=np.arange(5), words=np.array(["nan"])), {}
    for kind in ("<f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c16"):
        array = np.random.default_rng(1).standard_normal((200, 300)).astype(kind)
        array[3] = nan
        state |= {kind: array, f"{kind}-row": array[0], f"{kind}-one": array[0, 0]}
        plain = torch.from_numpy(array.astype(np.complex128))
        expected |= {f"s/{kind}": plain, f"s/{kind}-row": plain[0], f"s/{kind}-one": plain[0, 0]}
    found = store.take({"s": state}, "run/1").health()
    assert found.keys() == expected.keys()
    assert all(close(found[path], measured(tensor)) for path, tensor in expected.items())


def test_numbers_whose_squares_are_none(store: Store) -> None:
    state = StateDict()
    for numbers in ([1e200] * 3, [1e-200, 3e-200], [5e-324], [1e308, -inf], [0.0, -0.0], [nan]):
        for times in (1, 40, 20_000):
            tensor = torch.tensor(numbers, dtype=torch.float64).repeat(times)
            state[f"{numbers[0]} {times}"] = tensor
    found = store.take({"s": state}, "run/1").health()
    assert all(close(found[f"s/{name}"], measured(tensor)) for name, tensor in state.items())


def a_model() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 200))
    model[1].weight = torch.nn.Parameter(torch.randn(200, 200, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tied = StateDict(w=model[0].weight, t=model[0].weight.detach().t(), n=torch.arange(9000))
    return {"model": model, "optim": optimizer, "tied": tied, "rng": RNGState()}


def tensors_of(state: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of floating-point numbers in nested dicts, by path."""
    if isinstance(state, torch.Tensor):
        return {path: state} if state.is_floating_point() else {}
    items = state.items() if isinstance(state, dict) else []
    return {k: v for name, each in items for k, v in tensors_of(each, f"{path}/{name}").items()}


def test_a_training(store: Store) -> None:
    state = a_model()
    snapshot = store.take(state, "run/1")
    expected = {}
    for key in ("model", "optim", "tied"):
        expected |= tensors_of(dict(state[key].state_dict()), key)
    found = snapshot.health()
    assert found.keys() == expected.keys()
    assert all(close(found[path], measured(tensor)) for path, tensor in expected.items())
    assert snapshot.unhealthy == 0
    assert found == Store(store.uri)["run/1"].health()


def test_what_is_stored_is_measured_and_not_what_comes_later(store: Store) -> None:
    tensor = torch.randn(300, 1000)
    before = measured(tensor)
    pending = store.async_take({"s": StateDict(x=tensor, t=tensor.t())}, "run/1")
    tensor.fill_(nan)
    found = pending.wait().health()
    assert close(found["s/x"], before)
    assert close(found["s/t"], before)
    later = store.async_take({"s": StateDict(x=tensor)}, "run/2").wait()
    assert later.health()["s/x"].nan == tensor.numel()
    assert (pending.wait().unhealthy, later.unhealthy) == (0, 1)


def test_what_has_not_changed_is_not_measured_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from casnap.take import health

    state = a_model()
    first = store.take(state, "run/1")
    looked_at: list[int] = []
    # Small entries hold their bytes, and are looked at each time.
    pieces = health.measured_pieces

    def looking(some: Iterable[tuple[str, bytes]]) -> list[TensorHealth]:
        listed = [*some]
        looked_at.extend(len(raw) for _, raw in listed if len(raw) > 64)
        return pieces(listed)

    monkeypatch.setattr(health, "measured_pieces", looking)
    second = store.take(state, "run/2")
    third = store.async_take(state, "run/3").wait()
    assert not looked_at
    assert first.health() == second.health() == third.health()
    assert first.row.manifest.digest == second.row.manifest.digest
    with torch.no_grad():
        state["model"][0].bias[0] = 5.0
    store.take(state, "run/4")
    assert looked_at == [800]


def test_trees_stay_what_they_are(store: Store) -> None:
    state = a_model()
    noted, plain = store.take(state, "run/1"), Store(store.uri).take(state, "run/2")
    assert noted.contents.manifest.shared == plain.contents.manifest.shared
    assert not store.diff("run/1", "run/2")
    assert (plain.health(), plain.unhealthy) == ({}, None)


# --- what is unhealthy ----------------------------------------------------------------------------


def unhealthy_state() -> dict[str, Any]:
    """Moments with an infinite number, a mask, and a best loss that is not there yet."""
    moments = torch.zeros(70, 70)
    moments[3, 4] = inf
    mask = torch.full((50, 50), -inf).triu(1)
    return {
        "model": StateDict({"w": torch.ones(100), "attn.mask": mask}),
        "optim": StateDict(state={0: {"exp_avg_sq": moments, "step": torch.tensor(3.0)}}),
        "best": StateDict(loss=torch.tensor(inf), score=torch.tensor([-inf])),
    }


def test_a_warning_names_the_tensors(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = store.take(unhealthy_state(), "run/1")
    assert snapshot.unhealthy == 2
    assert caplog.messages == [
        "run/1: 2 tensors with NaN or infinite elements: model/attn.mask (1,225 infinite), "
        "optim/state/0/exp_avg_sq (1 infinite)"
    ]
    assert snapshot.health()["best/loss"] == TensorHealth(0, 1, 0.0, 0.0)


def test_some_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = measuring(tmp_path / "store", ignore=["*.mask", "optim/**"])
    assert store.take(unhealthy_state(), "run/1").unhealthy == 0
    assert not caplog.messages
    assert not store["run/1"].health()["model/attn.mask"].is_finite


def test_nothing_is_stored_if_the_take_is_to_raise(tmp_path: Path) -> None:
    store = measuring(tmp_path / "store", on_unhealthy="raise", ignore=["model/*"])
    healthy = {"s": StateDict(x=torch.ones(5))}
    store.take(healthy, "run/1")
    text = "run/2: 1 tensor with NaN or infinite elements, so nothing is stored: optim/state/0/exp"
    with pytest.raises(UnhealthyError, match=text):
        store.take(unhealthy_state(), "run/2")
    with pytest.raises(UnhealthyError, match=text):
        store.try_take(unhealthy_state(), "run/2")
    pending = store.async_take(unhealthy_state(), "run/2")
    with pytest.raises(UnhealthyError, match=text):
        pending.wait()
    store.take(healthy, "run/2")
    assert [(s.name, s.unhealthy) for s in store.snapshots()] == [("run/1", 0), ("run/2", 0)]
    assert store.check(data=True).ok


def test_options_that_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'warn' or 'raise'; got 'stop'"):
        HealthOptions(on_unhealthy="stop")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ignore is a list of globs"):
        HealthOptions(ignore="*.mask")
    with pytest.raises(TypeError, match="a bool or a HealthOptions; got 'warn'"):
        Store(tmp_path, health="warn")  # type: ignore[arg-type]
    monkeypatch.setenv("CASNAP_HEALTH", "yes")
    with pytest.raises(StoreError, match="set it to warn, raise or off"):
        Store(tmp_path)


def test_the_environment_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a trainer, which finds its store by a path."""
    state = {"s": StateDict(x=torch.full((3,), nan))}
    assert Snapshot.take(tmp_path / "run" / "1", state).unhealthy is None
    monkeypatch.setenv("CASNAP_HEALTH", "warn")
    assert Snapshot.take(tmp_path / "run" / "2", state).unhealthy == 1
    assert Store(tmp_path / "run", health=False).take(state, "3").unhealthy is None
    monkeypatch.setenv("CASNAP_HEALTH", "raise")
    with pytest.raises(UnhealthyError):
        Snapshot.take(tmp_path / "run" / "4", state)


# --- the notes go with the snapshot ---------------------------------------------------------------


def test_copies_and_mirrors_have_them(tmp_path: Path) -> None:
    options = HealthOptions()
    store = Store(tmp_path / "store", health=options, mirror=tmp_path / "mirror")
    noted = store.take(unhealthy_state(), "run/1").health()
    store.wait_mirrored()
    store.copy("run/1", to=tmp_path / "copy")
    for place in ("mirror", "copy"):
        copied = Store(tmp_path / place)["run/1"]
        assert (copied.health(), copied.unhealthy) == (noted, 2)


def test_a_thinned_snapshot_has_those_of_its_keys(store: Store) -> None:
    whole = store.take(unhealthy_state(), "run/1").health()
    store.take(unhealthy_state(), "run/2")
    store.thin({"optim": 1})
    thinned = store["run/1"]
    assert thinned.thinned == ("optim",)
    assert thinned.health() == {k: v for k, v in whole.items() if not k.startswith("optim")}
    assert len(thinned.contents.manifest.health) == 1, "the key best holds its bytes"


def test_collections(store: Store) -> None:
    noted = store.take(a_model(), "run/1").health()
    store.take(a_model(), "run/2", metadata={"a": 1})
    store.gc(grace=0, recode_after=0)
    assert store["run/1"].health() == noted


RECORDS: dict[str, Any] = {
    "no array": 7,
    "text": ["x", "y"],
    "cut off": [b"1", b""],
    "counts alone": [b"", bytes(20)],
    "too many": [(9).to_bytes(4, "little") + bytes(16), b""],
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_malformed_notes_are_named_and_do_no_more_harm(tmp_path: Path, record: Any) -> None:
    check_malformed(tmp_path, lambda tree: {tree: record})


@pytest.mark.parametrize("health", [7, ["x"], {"text": [b"", b""]}, None], ids=str)
def test_no_map_of_notes_does_no_more_harm(tmp_path: Path, health: Any) -> None:
    check_malformed(tmp_path, lambda _: health)


def check_malformed(tmp_path: Path, health: Callable[[bytes], Any]) -> None:
    forger = Forger(tmp_path)
    payload = [4, torch.ones(1).numpy().tobytes(), b"", 0]
    spec = encode([["x"], None, None])
    container = ["c", [len(spec), spec, b"", 0], "dict", 1]
    tree = forger.tree(
        ["", container], ["/x", ["t", payload, "float32", [1], "tensor", False, None]]
    )
    forger.publish({}, {"global": {"s": tree}, "ranks": {"0": {}}, "health": health(tree)})
    snapshot = Store(tmp_path)["evil"]
    with pytest.raises(DamagedError, match=r"evil: what is noted of the health of .* is malformed"):
        snapshot.health()
    state = StateDict(x=torch.zeros(1))
    snapshot.restore({"s": state})
    assert state["x"].item() == 1.0


# --- many ranks -----------------------------------------------------------------------------------


def of_ranks(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randn(1001, 200, generator=generator), torch.randn(64, 1001)
    rows[700, 3] = inf
    columns.copy_(torch.randn(64, 1001, generator=generator))
    return {
        "sharded": StateDict(
            rows=distribute_tensor(rows, mesh, [Shard(0)]),
            columns=distribute_tensor(columns, mesh, [Shard(1)]),
            small=distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]),
            one=distribute_tensor(torch.tensor([nan, 1.0]), mesh, [Shard(0)]),
        ),
        "same": StateDict(w=torch.ones(500, 300), b=torch.ones(3)),
        "own": StateDict(x=torch.full((200, 200), float(rank)), s=torch.tensor(rank - nan)),
    }


def taken_by_ranks(path: Path) -> list[Any]:
    rank = torch.distributed.get_rank()
    state = of_ranks(rank)
    store = measuring(path)
    snapshots = [
        store.take(state, "run/1", replicated=["same/*"]),
        store.async_take(state, "run/2").wait(),
    ]
    found = [(s.health(), s.unhealthy) for s in snapshots]
    whole = {f"sharded/{k}": v.full_tensor() for k, v in state["sharded"].items()}
    expected = {path: measured(tensor) for path, tensor in whole.items()}
    return [found, expected]


@pytest.mark.parametrize("size", [3])
def test_each_element_counts_once(world: Worlds, tmp_path: Path, size: int) -> None:
    for found, expected in world(size).run(taken_by_ranks, tmp_path / "store"):
        expected["same/w"] = measured(torch.ones(500, 300))
        expected["same/b"] = measured(torch.ones(3))
        for rank in range(size):
            expected[f"{rank}/own/x"] = measured(torch.full((200, 200), float(rank)))
            expected[f"{rank}/own/s"] = measured(torch.tensor(nan))
        for health, unhealthy in found:
            assert health.keys() == expected.keys() - {f"{r}/own/s" for r in range(size)} | {
                "own/s"
            }
            assert all(
                close(health[p], expected.get(p, measured(torch.tensor(nan)))) for p in health
            )
            assert unhealthy == 3
    shown = Store(tmp_path / "store")["run/1"].health()
    assert (shown["sharded/rows"].infinite, shown["sharded/one"].nan) == (1, 1)


def raised_by_ranks(path: Path) -> str:
    rank = torch.distributed.get_rank()
    state = {"s": StateDict(x=torch.full((200, 200), nan if rank else 1.0))}
    store = measuring(path, on_unhealthy="raise")
    texts = []
    for take in (store.take, lambda *a: store.async_take(*a).wait()):
        with pytest.raises(UnhealthyError, match=r"1/s/x \(40,000 NaN\)") as caught:
            take(state, "run/1")
        texts.append(str(caught.value))
    store.take({"s": StateDict(x=1)}, "run/1")
    return texts[0]


def test_all_ranks_raise(world: Worlds, tmp_path: Path) -> None:
    assert all(world(2).run(raised_by_ranks, tmp_path / "store"))
    assert len(Store(tmp_path / "store").snapshots()) == 1


def of_two_minds(path: Path) -> None:
    store = Store(path, health=torch.distributed.get_rank() == 0)
    with pytest.raises(StateError, match="the option health="):
        store.take({"s": StateDict(x=1)}, "run/1")


def test_ranks_ask_for_the_same(world: Worlds, tmp_path: Path) -> None:
    world(2).run(of_two_minds, tmp_path / "store")


def taken_in_layouts(path: Path) -> None:
    for layout in LAYOUTS:
        measuring(path).take({"s": training(layout, 7)}, layout)


def test_all_layouts_have_the_same_numbers(world: Worlds, tmp_path: Path) -> None:
    world(4).run(taken_in_layouts, tmp_path / "store")
    expected = {f"s/{path}": measured(tensor) for path, tensor in whole_training(7).items()}
    for layout in LAYOUTS:
        found = measuring(tmp_path / "store")[layout].health()
        assert found.keys() == expected.keys(), layout
        assert all(close(found[path], expected[path]) for path in found), layout
