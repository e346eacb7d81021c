"""The mean of snapshots is what torch computes, takes bounded memory, and is there or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import astuple
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import HealthOptions, NewStore, StateDict, Store
from casnap.cli import run
from casnap.errors import (
    DamagedError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateError,
    UnhealthyError,
)
from casnap.history.average import moving_weights
from tests.support.damaged import damage_chunk
from tests.support.ranks import Worlds
from tests.support.remote import RemoteDouble
from tests.support.warm import run_python

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
CHUNK = 1 << 16
NAMES = [f"run/step_{i}" for i in range(4)]


def state(step: int) -> dict[str, torch.Tensor]:
    """Return weights of all dtypes, of one and of several chunks, and with nothing in them."""
    generator = torch.Generator().manual_seed(step)
    some = {
        f"{dtype}".removeprefix("torch."): torch.randn(
            701, 31, generator=generator, dtype=torch.complex128 if dtype.is_complex else None
        ).to(dtype)
        for dtype in (*DTYPES, torch.complex128)
    }
    some["with_others"] = torch.tensor([1.0, torch.nan, torch.inf, -0.0, 3.0 * step] * 10_000)
    return {
        **some,
        "frozen": torch.arange(50_000.0) / 3,
        "scalar": torch.randn((), generator=generator),
        "empty": torch.empty(0, 3),
        "few_chunks": torch.randn(CHUNK // 4, generator=generator),
        "few": torch.randn(5, generator=generator),
        "count": torch.arange(step, step + 20_000),
    }


def mean_by_torch(
    tensors: Sequence[torch.Tensor], weights: Sequence[float] | None, *, exact: bool = False
) -> torch.Tensor:
    """Return the mean as ``Store.average`` promises it, by whole tensors."""
    wide = {torch.float64: torch.float64, torch.complex128: torch.complex128}
    narrow = torch.complex64 if tensors[0].is_complex() else torch.float32
    dtype = wide.get(tensors[0].dtype, narrow)
    if exact:
        dtype = torch.complex128 if tensors[0].is_complex() else torch.float64
    shares = weights or [1.0] * len(tensors)
    summands = [
        t.to(dtype) if weights is None else t.to(dtype) * w
        for t, w in zip(tensors, shares, strict=True)
    ]
    total = summands[0]
    for summand in summands[1:]:
        total = total + summand
    mean = (total / len(tensors) if weights is None else total).to(tensors[0].dtype)
    same = torch.ones(mean.shape, dtype=torch.bool)
    for other in tensors[1:]:
        same &= (other == tensors[0]) | (other.isnan() & tensors[0].isnan())
    keeps = weights is None or abs(sum(weights) - 1) < 1e-9
    return torch.where(same, tensors[0], mean) if keeps else mean


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store", create=NewStore(chunk_size=CHUNK))
    for i, name in enumerate(NAMES):
        store.take({"model": StateDict(**state(i)), "optim": StateDict(exp_avg=state(i))}, name)
    return store


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"exact": True},
        {"weights": [0.1, 0.2, 0.3, 0.4]},
        {"weights": [-1.0, 0.0, 0.5, 2.0], "exact": True},
        {"decay": 0.9},
    ],
    ids=str,
)
def test_the_mean_is_what_torch_computes(store: Store, how: dict[str, Any]) -> None:
    report = store.average(NAMES, "run/mean", **how)
    states = [state(i) for i in range(4)]
    found = store["run/mean"].get_state_dict_for_key("model")
    weights = moving_weights(4, how["decay"]) if "decay" in how else how.get("weights")
    for key, tensor in found.items():
        expected = states[-1][key]
        if key != "count":
            tensors = [each[key] for each in states]
            expected = mean_by_torch(tensors, weights, exact=how.get("exact", False))
        assert bits(tensor) == bits(expected), key
    assert {"model/count": "values"}.items() <= report.kept.items()
    assert report.kept["optim/exp_avg/float32"] == "moments"
    for key, tensor in store["run/mean"].get_state_dict_for_key("optim")["exp_avg"].items():
        assert bits(tensor) == bits(states[-1][key])
    assert store.check(data=True).ok


def test_it_has_no_environment_of_a_take(store: Store) -> None:
    store.average(NAMES, "means/all")
    assert store[NAMES[-1]].environment
    assert not store["means/all"].environment


def test_equal_tensors_take_no_room_and_are_not_read(store: Store) -> None:
    base = torch.randn(1 << 20)
    for i in range(3):
        adapter = StateDict(w=torch.full((2000,), float(i)))
        store.take({"base": StateDict(w=base), "adapter": adapter}, f"tuned/{i}")
    report = store.average([f"tuned/{i}" for i in range(3)], "tuned/mean")
    assert (report.averaged, report.equal) == (1, 1)
    assert report.new_bytes < 30_000
    assert torch.equal(store["tuned/mean"].read_object("base/w"), base)
    assert torch.equal(store["tuned/mean"].read_object("adapter/w"), torch.full((2000,), 1.0))


def test_buffers_and_other_shapes_are_of_the_last(tmp_path: Path) -> None:
    store = Store(tmp_path)
    models = [torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40)) for _ in "ab"]
    for i, model in enumerate(models):
        model(torch.randn(8, 30))
        head = torch.nn.Linear(40, 5 + i)
        store.take({"model": model, "head": head}, f"step_{i}", metadata={"loss": i})
    report = store.average(["step_0", "step_1"], "mean", metadata={"note": "two"})
    assert report.kept["model/1.running_mean"] == "a buffer"
    assert report.kept["head/weight"] == "float32 [5, 40] in step_0"
    mean = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    store["mean"].restore({"model": mean, "head": torch.nn.Linear(40, 6)})
    assert torch.equal(mean[1].running_mean, models[1][1].running_mean)
    weights = [model[0].weight.detach() for model in models]
    assert torch.equal(mean[0].weight.detach(), mean_by_torch(weights, None))
    metadata = store["mean"].metadata.user
    assert metadata == {"note": "two", "average_of": ["step_0", "step_1"]}


def take_on_ranks(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for step in range(3):
        torch.manual_seed(step)
        whole = torch.randn(3001, 17)
        app_state = {
            "model": StateDict(w=distribute_tensor(whole, mesh, [Shard(0)])),
            "own": StateDict(w=torch.full((999,), float(step * 10 + dist.get_rank()))),
        }
        Store(path).take(app_state, f"step_{step}")


def test_two_ranks_take_and_one_averages(tmp_path: Path, world: Worlds) -> None:
    world(2).run(take_on_ranks, str(tmp_path))
    store = Store(tmp_path)
    report = store.average([f"step_{i}" for i in range(3)], "mean")
    assert report.averaged == 3
    wholes = []
    for step in range(3):
        torch.manual_seed(step)
        wholes.append(torch.randn(3001, 17))
    mean = store["mean"]
    assert mean.world_size == 2
    assert torch.equal(mean.read_object("model/w"), mean_by_torch(wholes, None))
    assert torch.equal(mean.read_object("1/own/w"), torch.full((999,), 11.0))
    assert store.check(data=True).ok


def test_a_thinned_snapshot(store: Store) -> None:
    """It has a mean with others; where it is the last, the new snapshot is thinned as well."""
    store.thin({"optim/**": 1}, prefix="run")
    report = store.average(NAMES, "run/mean")
    assert report.kept["optim/exp_avg/float32"] == "moments"
    assert store["run/mean"].thinned == ()
    store.average(NAMES[::-1], "run/back")
    assert store["run/back"].thinned == ("optim",)


def test_bad_input(store: Store) -> None:
    before = sorted(snapshot.name for snapshot in store.snapshots())
    store.take({"other": StateDict(x=torch.ones(100))}, "other")
    with pytest.raises(StateError, match="no tensor of weights has one shape"):
        store.average([NAMES[0], "other"], "mean")
    with pytest.raises(SnapshotNotFoundError):
        store.average([NAMES[0], "run/step_9"], "mean")
    with pytest.raises(SnapshotExistsError):
        store.average(NAMES, NAMES[0])
    with pytest.raises(ValueError, match="at least one"):
        store.average([], "mean")
    with pytest.raises(TypeError, match="a list of snapshots; got the one name 'run/step_0'"):
        store.average(NAMES[0], "mean")
    some: Any
    for some in ([1.0, float("nan"), 0, 0], [1.0] * 3, [1e308] * 4, [10**400] * 4, [None] * 4, 3):
        with pytest.raises(ValueError, match="a number for each of the 4 snapshots"):
            store.average(NAMES, "mean", weights=some)
    with pytest.raises(ValueError, match="give one"):
        store.average(NAMES, "mean", weights=[1.0] * 4, decay=0.5)
    with pytest.raises(ValueError, match="from 0 to 1"):
        store.average(NAMES, "mean", decay=2.0)
    assert sorted(snapshot.name for snapshot in store.snapshots()) == sorted([*before, "other"])


def test_a_damaged_chunk_is_named_and_nothing_is_written(store: Store, tmp_path: Path) -> None:
    damage_chunk(tmp_path / "store", state(1)["few_chunks"])
    with pytest.raises(DamagedError, match="model/few_chunks"):
        store.average(NAMES, "run/mean")
    assert "run/mean" not in store


def test_a_snapshot_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, on a host that has read none of its trees yet."""
    for step in range(3):
        tensors = {f"w{i}": torch.full((20,), step + i / 1000) for i in range(900)}
        Store(tmp_path / "store").take({"model": StateDict(tensors)}, f"run/{step}")
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(tmp_path / "cache"))

    def weights() -> Iterator[float]:
        yield 0.5
        other = Store(tmp_path / "store")
        other.delete("run/1")
        other.gc(grace=0)
        yield 0.5

    some: Any = weights()
    with pytest.raises(SnapshotNotFoundError, match="run/1 was deleted"):
        Store(tmp_path / "store").average(["run/1", "run/2"], "mean", weights=some)


TAKE = """
import sys, torch
from casnap import StateDict, Store
for step in range(4):
    store = Store(sys.argv[1])
    store.take({"model": StateDict(w=torch.randn(50 << 20, dtype=torch.bfloat16))}, f"step_{step}")
"""
AVERAGE = """
import resource, sys
from casnap import Store
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Store(sys.argv[1]).average([f"step_{i}" for i in range(4)], "mean", exact=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    run_python(TAKE, str(tmp_path))
    done = run_python(AVERAGE, str(tmp_path))
    assert int(done.stdout) < 400


def test_the_command(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["average", store.uri, "run/*", "--last", "3", "--into", "mean"]) == 0
    said = capsys.readouterr().out
    assert "run/step_0" not in said
    assert "mean: the mean of" in said
    assert run(["average", store.uri, "run/*", "--ema", "0.5", "--into", "ema", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["weights"] == [0.125, 0.125, 0.25, 0.5]
    assert run(["average", store.uri, *NAMES[:2], "--weights=-1,3", "--into", "x"]) == 0
    assert "the weights sum to 2" in capsys.readouterr().out
    assert run(["average", store.uri, "none/*", "--into", "y"]) == 1
    assert run(["average", store.uri, *NAMES, "--weights=1,2", "--into", "y"]) == 2
    assert "y" not in store


def test_fractions_of_a_loader_are_no_weights(tmp_path: Path) -> None:
    """A mean of shuffled samples is nonsense. A module may be called a sampler or a generator."""
    store = Store(tmp_path)
    for step in range(3):
        some = torch.full((40, 40), float(step))
        nested = {"shuffled": some, "position": step}
        store.take(
            {
                "model": StateDict({"sampler.weight": some, "rng.bias": some}),
                "generator": StateDict(weight=some),
                "data2vec": StateDict(weight=some),
                "net": StateDict(data={"w": some}),
                "train-loader2": StateDict(buffer=some),
                "dataloader_0": StateDict(buffers=[nested]),
                "trainer": StateDict(sampler=nested, scheduler={"curve": some}),
                "rng": StateDict(noise=some),
                "dataset": StateDict(mixture=some),
            },
            f"run/{step}",
        )
    report = store.average(["run/0", "run/1", "run/2"], "mean")
    assert {path: why for path, why in report.kept.items() if why != "values"} == {
        "dataloader_0/buffers/0/shuffled": "loader",
        "trainer/sampler/shuffled": "loader",
        "trainer/scheduler/curve": "scheduler",
        "rng/noise": "generators",
        "dataset/mixture": "loader",
        "train-loader2/buffer": "loader",
    }
    assert report.averaged == 5
    mean = store["mean"]
    assert float(mean.read_object("model/sampler.weight")[0, 0]) == 1
    assert float(mean.read_object("dataloader_0/buffers/0/shuffled")[0, 0]) == 2


def test_many_snapshots(tmp_path: Path) -> None:
    """Their names would not fit into the metadata."""
    store = Store(tmp_path)
    names = [f"run/a_name_of_some_length/step_{i:06}" for i in range(5)]
    for step, name in enumerate(names):
        store.take({"model": StateDict(w=torch.full((4,), float(step)))}, name)
    store.average(names * 401, "mean", decay=0.0)
    assert float(store["mean"].read_object("model/w")[0]) == 4
    assert store["mean"].metadata.user["average_of"] == [names[0], "… 2,003 more", names[-1]]


def test_a_bucket_is_asked_for_several_chunks_at_a_time(tmp_path: Path) -> None:
    weights = [torch.randn(16 << 20, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for step, weight in enumerate(weights):
        Store(RemoteDouble(str(tmp_path))).take({"model": StateDict(w=weight)}, f"run/{step}")
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend, create=False, threads=2)
    backend.reset()
    store.average([f"run/{step}" for step in range(4)], "mean")
    # They have 256 chunks.
    assert backend.requests["get"] < 130, backend.requests
    assert torch.equal(store["mean"].read_object("model/w"), mean_by_torch(weights, None))


def a_state(step: int, *, bad: bool = False) -> dict[str, Any]:
    """Return weights of several chunks that a step changes in part, small ones, and moments."""
    w = torch.arange(3 * CHUNK / 4)
    w[7] = float(step)
    some = {"w": w, "bias": torch.tensor([1.0, float(step)]), "half": w.half().clamp(max=6e4)}
    if bad:
        some["w"][7] = some["half"][9] = torch.nan
    mask = torch.full((99,), -torch.inf)
    mask[0] = step
    moments = torch.tensor([1.0, torch.inf] * 50 if bad else [1.0, 2.0] * 50)
    return {
        "model": StateDict(**some, mask=mask, frozen=torch.ones(200)),
        "optim": StateDict(exp_avg=moments),
    }


IGNORE = HealthOptions(ignore=["model/mask"])


def as_a_take_notes_it(store: Store, name: str) -> tuple[int | None, dict[str, Any]]:
    """Return what a take measures of the state of a snapshot."""
    keys = ("model", "optim")
    whole = {key: StateDict(**store[name].get_state_dict_for_key(key)) for key in keys}
    taken = store.take(whole, f"again/{name}")
    return taken.unhealthy, taken.health()


def test_a_mean_has_the_health_that_a_take_would_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, health=IGNORE, create=NewStore(chunk_size=CHUNK))
    for step in range(3):
        store.take(a_state(step, bad=step == 1), f"run/{step}")
    caplog.clear()
    store.average(["run/0", "run/2"], "means/well")
    assert not caplog.records
    store.average(["run/0", "run/1", "run/2"], "means/bad")
    store.average(["run/2", "run/1"], "means/of_bad_moments")
    for name, bad in (("means/well", 0), ("means/bad", 2), ("means/of_bad_moments", 3)):
        again = as_a_take_notes_it(store, name)
        assert store[name].unhealthy == again[0] == bad
        health = store[name].health()
        assert health.keys() == again[1].keys()
        for path, each in again[1].items():
            # A take sums the norms of other parts of a tensor.
            expected = astuple(each)[:2], pytest.approx(each.norm, rel=1e-12), each.largest
            found = health[path]
            assert (astuple(found)[:2], found.norm, found.largest) == expected, path
    assert "bad: 2 tensors with NaN or infinite elements: model/half (1 NaN), " in caplog.text
    assert "model/w (1 NaN). There are such elements in run/1" in caplog.text
    last = store.latest("means", healthy=True)
    assert last is not None
    assert last.name == "means/well"


def test_a_store_that_is_opened_without_options(tmp_path: Path) -> None:
    store = Store(tmp_path, health=IGNORE, create=NewStore(chunk_size=CHUNK))
    for step in range(2):
        store.take(a_state(step), f"run/{step}")
    Store(tmp_path).average(["run/0", "run/1"], "means/1")
    # The takes were told to ignore the mask, so it is no news that it is infinite.
    assert (store["means/1"].unhealthy, store["run/1"].unhealthy) == (0, 0)
    assert store["means/1"].health()["model/mask"].infinite == 98


def test_a_mean_of_what_nobody_measured(tmp_path: Path) -> None:
    """It is measured if its store asks for it; else it counts as healthy, as its snapshots do."""
    Store(tmp_path).take(a_state(0), "run/0")
    Store(tmp_path).take(a_state(1, bad=True), "run/1")
    assert Store(tmp_path).average(["run/1", "run/0"], "means/1").averaged == 4
    assert Store(tmp_path)["means/1"].unhealthy is None
    strict = Store(tmp_path, health=HealthOptions(on_unhealthy="raise"))
    with pytest.raises(UnhealthyError, match=r"means/2: 3 tensors .* model/mask \(98 infinite\)"):
        strict.average(["run/1", "run/0"], "means/2")
    assert "means/2" not in strict


def take_with_nan(step: int, path: Path, *, where: str, measures: bool) -> None:
    """Take a snapshot that has NaN in weights that no step changes, or in moments."""
    some = {name: torch.full((size,), 1.0) for name, size in (("chunks", CHUNK), ("small", 9))}
    bad = {name: torch.full_like(each, torch.nan) for name, each in some.items()}
    state = {
        "model": StateDict(
            w=torch.full((CHUNK,), float(step)), **(bad if "model" in where else some)
        ),
        "optim": StateDict(exp_avg=bad if "optim" in where else some),
    }
    create = NewStore(chunk_size=CHUNK) if step == 0 else False
    Store(path, health=measures, create=create).take(state, f"run/{step}")


@pytest.mark.parametrize("where", ["model", "optim"])
@pytest.mark.parametrize("measured", [(True, False), (False, True), (False, False)], ids=str)
def test_nan_that_not_all_takes_have_measured(
    tmp_path: Path, where: str, measured: tuple[bool, bool]
) -> None:
    for step, measures in enumerate(measured):
        take_with_nan(step, tmp_path, where=where, measures=measures)
    store = Store(tmp_path, create=False)
    if any(measured):
        store.average(["run/0", "run/1"], "means/sum", weights=[1.0, 1.0])
        store.average(["run/0", "run/1"], "means/mean")
        assert (store["means/mean"].unhealthy, store["means/sum"].unhealthy) == (2, 2)
        assert len(store["means/mean"].health()) == 5
    strict = Store(tmp_path, create=False, health=HealthOptions(on_unhealthy="raise"))
    with pytest.raises(UnhealthyError, match=rf"2 tensors .*{where}/.*chunks \({CHUNK:,} NaN\)"):
        strict.average(["run/0", "run/1"], "means/strict")
    assert "means/strict" not in strict


def test_a_strict_store_inherits_nothing_that_takes_ignored(tmp_path: Path) -> None:
    for step in range(2):
        Store(tmp_path, health=IGNORE).take(a_state(step), f"run/{step}")
    strict = Store(tmp_path, health=HealthOptions(on_unhealthy="raise"))
    with pytest.raises(UnhealthyError, match=r"mean: 1 tensor .*: model/mask \(98 infinite\)"):
        strict.average(["run/0", "run/1"], "mean")


@pytest.mark.parametrize("measured", [(True, True), (False, False), (True, False)], ids=str)
def test_what_all_snapshots_share_is_read_once_at_most(
    tmp_path: Path, measured: tuple[bool, bool]
) -> None:
    shared, frozen = torch.randn(4 << 20), torch.randn(4 << 20)
    for step in range(4):
        shared[0] = float(step)
        measures = measured[step == 3]
        create = NewStore(chunk_size=1 << 20) if step == 0 else False
        store = Store(RemoteDouble(str(tmp_path)), health=measures, create=create)
        store.take({"model": StateDict(shared=shared, frozen=frozen)}, f"run/{step}")
    backend = RemoteDouble(str(tmp_path))
    store = Store(backend, create=False, threads=1)
    backend.reset()
    # They are so many that they are read in five turns.
    report = store.average([f"run/{step}" for step in range(4)] * 100, "mean")
    # The other fifteen chunks are read only to be measured. Any measured snapshot knows the rest.
    most = 5 * 4 + (15 if any(measured) else 0)
    assert backend.read_bytes < (most + 3) << 20, backend.read_bytes
    assert report.new_bytes < 2 << 20
    assert float(store["mean"].read_object("model/shared")[0]) == 1.5
    assert len(store["mean"].health()) == (2 if any(measured) else 0)


def test_sparse_tensors_are_of_the_last(tmp_path: Path) -> None:
    """The values of two sparse tensors may be at other places."""
    store = Store(tmp_path)
    for step, dense in enumerate((torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]]))):
        parts = {"coo": dense.to_sparse(), "coo.bias": dense, "csr": dense.to_sparse_csr()}
        store.take({"model": StateDict(values=dense, **parts)}, f"step_{step}")
    report = store.average(["step_0", "step_1"], "mean")
    assert report.averaged == 2
    assert report.kept["model/coo/values"] == "a part of a sparse tensor"
    mean = store["mean"].get_state_dict_for_key("model")
    assert torch.equal(mean["values"], torch.tensor([[0.5, 1.5]]))
    for key in ("coo", "csr"):
        assert torch.equal(mean[key].to_dense(), torch.tensor([[0.0, 3.0]]))


@pytest.mark.parametrize(
    "metadata",
    [{3: 4}, {"x": object()}, {"x": "a" * 70_000}],
    ids=["key", "value", "size"],
)
def test_bad_metadata_are_refused(store: Store, metadata: dict[Any, Any]) -> None:
    """Once they were committed, no command could read the store again."""
    with pytest.raises(StateError, match="metadata"):
        store.average(NAMES, "run/mean", metadata=metadata)
    assert "run/mean" not in Store(store.uri)
    assert store.check().ok


def test_a_snapshot_of_another_view_or_store(store: Store, tmp_path: Path) -> None:
    """A snapshot is what it is: its name may mean another one here."""
    other = Store(tmp_path / "other")
    for name in (*NAMES, "step_1"):
        other.take({"model": StateDict(w=torch.full((99,), 7.0))}, name)
    with pytest.raises(SnapshotNotFoundError, match="of another store"):
        store.average([other[NAMES[0]], other[NAMES[1]]], "mean")
    view = Store(f"{other.uri}/run")
    view.take({"model": StateDict(w=torch.full((99,), 1.0))}, "step_1", overwrite=True)
    other.average([view["step_1"], other["step_1"]], "mean")
    assert torch.equal(other["mean"].read_object("model/w"), torch.full((99,), 4.0))
    view.average([other["run/step_1"], "step_0"], "mean")
    assert view["mean"].metadata.user == {"average_of": ["step_1", "step_0"]}
    with pytest.raises(SnapshotNotFoundError, match="not in"):
        view.average([other["step_1"]], "mean")
    replaced = store[NAMES[0]]
    store.take({"model": StateDict(w=torch.ones(99))}, NAMES[0], overwrite=True)
    with pytest.raises(SnapshotNotFoundError, match="replaced"):
        store.average([replaced], "mean")


def test_a_pattern_matches_nothing_that_a_rewind_has_moved_aside(store: Store) -> None:
    """A run went back since these were not well."""
    store.rewind(NAMES[1])
    assert run(["average", store.uri, "run/*", "--into", "means/run"]) == 0
    assert store["means/run"].metadata.user["average_of"] == NAMES[:2]
    assert run(["average", store.uri, "run/rewound*", "--into", "means/other"]) == 1


def test_a_pattern_matches_no_average(store: Store) -> None:
    """Else the second mean would be of the first one, too."""
    for into in ("run/mean", "run/ema"):
        assert run(["average", store.uri, "run/*", "--into", into]) == 0
        assert store[into].metadata.user["average_of"] == NAMES
    assert run(["average", store.uri, "run/m*", "--into", "x"]) == 1
    assert run(["average", store.uri, "run/mean", "run/step_0", "--into", "x"]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_elements_that_are_equal_in_some_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    """A cell is compared block by block, until no element of a block is equal in all."""
    store = Store(tmp_path)
    states = [torch.full((100_000,), 0.1).to(dtype) for _ in range(3)]
    states[1][30_000:] += 1
    states[2][70_000:] += 3
    for step, tensor in enumerate(states):
        store.take({"model": StateDict(w=tensor)}, f"step_{step}")
    for weights in (None, [0.2, 0.3, 0.5]):
        store.average([f"step_{i}" for i in range(3)], "mean", weights=weights, overwrite=True)
        mean = store["mean"].read_object("model/w")
        assert bits(mean) == bits(mean_by_torch(states, weights))


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_elements_that_all_snapshots_have(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    """Some sums lose nothing, so nothing is compared: unless n * x is too large, or x is NaN.

    The chunks of twenty snapshots do not fit into memory at once, so they take turns.
    """
    store = Store(tmp_path)
    limits = torch.finfo(dtype)
    odd = torch.tensor([limits.max, -limits.max, -0.0, limits.tiny / 4, torch.inf]).to(dtype)
    payload = torch.full((1,), -3, dtype=torch.int16 if dtype.itemsize == 2 else torch.int32)
    odd = torch.cat([odd, payload.view(dtype)])
    states = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        tensor = torch.randn(1 << 20, generator=generator).to(dtype)
        tensor[:6] = tensor[-6:] = odd
        tensor[300_000:600_000] = 0.1
        states.append(tensor)
        store.take({"model": StateDict(w=tensor)}, f"step_{step}")
    store.average([f"step_{i}" for i in range(count)], "mean")
    mean = store["mean"].read_object("model/w")
    assert bits(mean) == bits(mean_by_torch(states, None))
    assert bits(mean[:6]) == bits(mean[-6:]) == bits(odd)
