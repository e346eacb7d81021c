"""``dcp.save`` and ``dcp.load`` of one process through casnap."""

from __future__ import annotations

import enum
import io
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.utils._pytree import tree_map_only

from casnap import Retention, Snapshot, StateDict, Store, release_memory
from casnap.errors import MismatchError, StateError, UnsupportedTypeError
from casnap.integrations.dcp import CasnapReader, CasnapWriter, install, uninstall
from tests.support.bitwise import assert_same
from tests.support.cli_calls import invoke
from tests.support.dcp_saves import save
from tests.support.exports import assert_exports
from tests.support.torches import needs_torch
from tests.support.versioned import versioned

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is ",  # DCP says once in each call that there is no process group
    "ignore:Plan caching:FutureWarning",
    "ignore:TypedStorage is deprecated",  # of DCP's own writer, before torch 2.13
)


@contextmanager
def not_found(caplog: pytest.LogCaptureFixture, text: str) -> Iterator[None]:
    """Expect that a load finds no snapshot, and says why: in the log, if DCP drops the reason."""
    with pytest.raises(CheckpointException) as caught:
        yield
    said = caplog.text if torch.__version__ < "2.13" else str(caught.value)
    assert text in said


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300))
        self.head = nn.Linear(300, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def values() -> dict[str, Any]:
    """Return a state of all that DCP flattens, or takes as a whole."""
    return {
        "extra": {
            "epoch": 3,
            "none": None,
            "names": ["a", "b"],
            "pair": (1, torch.ones(3)),
            "list": [torch.arange(5), {"inner": 2.5}, 7],
            "long": list(range(2000)),
            "text": "x" * 200,
            "set": {1, 2},
        },
        "view": torch.arange(20).view(4, 5).t(),
        "expanded": torch.tensor([[1.5]]).expand(3, 4),
        "zero": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(100, dtype=torch.bfloat16),
        "a/b%.c": b"bytes",
        "file": io.BytesIO(b"losses"),
        "top": 7,
    }


def blank(state: Any) -> Any:
    """Return a state of the same form with nothing in it."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(v, torch.Tensor | dict) for v in state):
        return [blank(value) for value in state]
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    return None


def load(store: Store, name: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=name, storage_reader=CasnapReader(store), **options)
    return state


# --- what is saved is what is loaded ----------------------------------------------------------


def test_all_values_come_back(tmp_path: Path) -> None:
    store, state = Store(tmp_path), values()
    first = save(store, "run/a", state)
    assert save(store, "run/b", state).stats.new_bytes == 0
    assert_same(load(store, "run/b", blank(state)), {**state})

    assert_same(first.get_state_dict_for_key("extra"), state["extra"])
    assert_same(first.read_object("view"), state["view"])
    assert first.read_object("extra/list/1/inner") == 2.5
    assert "a%2Fb%25.c" in invoke("show", tmp_path / "run/a").stdout


def test_what_was_saved_by_a_path(tmp_path: Path) -> None:
    path = tmp_path / "ckpts/step_1"
    returned = dcp.save({"x": torch.arange(9)}, storage_writer=CasnapWriter(path))
    assert returned.storage_data["snapshot"] == str(path)
    state = {"x": torch.zeros(9, dtype=torch.int64)}
    dcp.load(state, storage_reader=CasnapReader(path))
    assert torch.equal(state["x"], torch.arange(9))
    # checkpoint_id= replaces the path.
    again = dcp.save(
        {"x": torch.ones(9)}, checkpoint_id=path, storage_writer=CasnapWriter("elsewhere")
    )
    assert returned.storage_meta.save_id != again.storage_meta.save_id
    assert again.storage_meta.checkpoint_id == str(path)
    assert torch.equal(Snapshot(str(path)).read_object("x"), torch.ones(9))


def test_a_model_and_its_optimizer_go_both_ways(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    store, state = Store(tmp_path), {"model": model, "optim": optimizer}
    save(store, "dcp", state)
    native = store.take(state, "native")
    assert native.stats.new_bytes < 2048, "only the specs of some containers are new"
    for name in ("dcp", "native"):
        other, its_optimizer = trained(1)
        load(store, name, {"model": other, "optim": its_optimizer})
        assert_same(dict(other.state_dict()), dict(model.state_dict()))
        assert_same(its_optimizer.state_dict(), optimizer.state_dict())
        fresh = Net()
        without_state = torch.optim.AdamW(fresh.parameters())
        store[name].restore({"model": fresh, "optim": without_state})
        assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
        assert_same(without_state.state_dict(), optimizer.state_dict())
        assert_exports(store[name], tmp_path, "model", model.state_dict())


def test_a_module_gets_its_own_versions_as_dcp_gives_them(tmp_path: Path) -> None:
    model, store = versioned(), Store(tmp_path)
    save(store, "module", {"model": model})
    save(store, "state", {"model": model.state_dict(), "deep": {"list": [model.state_dict()]}})
    dcp.save({"model": model}, checkpoint_id=tmp_path / "files")
    store.import_file(tmp_path / "files", "imported")
    for name in ("module", "state", "imported"):
        fresh = versioned()
        load(store, name, {"model": fresh})
        assert_same(fresh.state_dict(), model.state_dict())
        for strict in (True, False):
            fresh = versioned()
            store[name].restore({"model": fresh}, strict=strict)
            assert_same(fresh.state_dict(), model.state_dict())
    fresh = versioned()
    state = StateDict(list=[versioned().state_dict()])
    store["state"].restore({"deep": state})
    fresh.load_state_dict(state["list"][0])
    assert_same(fresh.state_dict(), model.state_dict())


def test_an_optimizer_that_has_no_state_yet(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(Net().parameters(), lr=0.5)
    snapshot = save(Store(tmp_path), "a", {"optim": optimizer})
    assert_same(snapshot.get_state_dict_for_key("optim"), optimizer.state_dict())
    other = torch.optim.AdamW(Net().parameters())
    snapshot.restore({"optim": other})
    assert other.param_groups[0]["lr"] == 0.5


def test_a_part_is_loaded(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, "a", values())
    state = load(store, "a", {"extra": {"epoch": None}, "zero": torch.zeros(())})
    assert state == {"extra": {"epoch": 3}, "zero": torch.tensor(3.5)}
    with pytest.raises(CheckpointException, match="Missing key"):
        load(store, "a", {"absent": torch.zeros(3)})
    partial = {"absent": torch.zeros(3), "top": 0}
    load(store, "a", partial, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert partial["top"] == 7

    reader = CasnapReader(store)
    reader.reset("a")
    found = _load_state_dict_from_keys({"extra", "view"}, storage_reader=reader)
    assert_same(found, {key: values()[key] for key in ("extra", "view")})


def test_tied_tensors_with_several_values(tmp_path: Path) -> None:
    store, ordered = Store(tmp_path), torch.arange(300_000.0)
    save(store, "a", {"x": ordered, "y": -ordered, "same": ordered, "part": ordered[7:9], "z": 1})
    both, other = torch.zeros(300_000), torch.zeros(300_000)
    with pytest.raises(CheckpointException, match=r"x, y: share memory here.* out of the state di"):
        load(store, "a", {"x": both, "y": both, "same": other})
    assert not both.any()
    assert not other.any()
    load(store, "a", {"x": both, "same": both, "part": both[7:9]})
    assert torch.equal(both, ordered)


# --- planners ---------------------------------------------------------------------------------


def test_a_planner_that_does_not_flatten(tmp_path: Path) -> None:
    store, state = Store(tmp_path), {"a.b": torch.arange(4), "deep": {"x": 1, "t": torch.ones(2)}}
    save(store, "a", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    found = load(store, "a", {"a.b": torch.zeros(4, dtype=torch.int64), "deep": 0}, planner=planner)
    assert_same(found, state)


class Halving(DefaultSavePlanner):
    """A planner that changes what it gives: tensors are halved, objects are stored as text."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return super().transform_object(write_item, str(object))
        return object / 2


class Doubling(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value) * 2

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor * 4)


def test_planners_that_change_what_they_are_given(tmp_path: Path) -> None:
    store = Store(tmp_path)
    snapshot = save(store, "a", {"x": torch.arange(4.0), "n": 5}, planner=Halving())
    assert snapshot.read_object("n") == "5"
    assert torch.equal(snapshot.read_object("x"), torch.arange(4.0) / 2)
    found = load(store, "a", {"x": torch.zeros(4), "n": None}, planner=Doubling())
    assert_same(found, {"x": torch.arange(4.0) * 2, "n": "55"})


class Forgetful(DefaultSavePlanner):
    """Makes plans of its own, without what the writer has put into them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        if self._where == "global":
            plans = [SavePlan(plan.items, planner_data=plan.planner_data) for plan in plans]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        return SavePlan(plan.items) if self._where == "finish" else plan


def test_planners_that_forget_what_the_writer_says(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, "a", {"x": {"y": 1}}, planner=Forgetful("global"))
    assert store["a"].get_state_dict_for_key("x") == {"y": 1}
    with pytest.raises(CheckpointException, match="has dropped storage_data"):
        save(store, "b", {"x": {"y": 1}}, planner=Forgetful("finish"))


def scheduled() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], gamma=0.1)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_scheduler_of_dcps_own_files(tmp_path: Path) -> None:
    """These hold the milestones as texts: the scheduler loaded them, and never decayed."""
    _, scheduler = scheduled()
    dcp.save({"sched": scheduler.state_dict()}, checkpoint_id=tmp_path / "dcp")
    store = Store(tmp_path / "store")
    store.import_file(tmp_path / "dcp", "a")
    _, again = scheduled()
    with pytest.raises(MismatchError, match=r"sched/milestones: the key '3' is a text"):
        store["a"].restore({"sched": again})
    report = store["a"].restore({"sched": again}, strict=False)
    assert len(report.mismatched) == 1
    assert [*again.milestones] == [3, 6]  # type: ignore[attr-defined]
    # Where the keys are texts, they stay so.
    config = StateDict(milestones={"7": 0}, gamma=0.0)
    store["a"].restore({"sched": config}, strict=False)
    assert config["milestones"] == {"3": 1, "6": 1}


@pytest.mark.parametrize("by", ["restore", "dcp.load"])
def test_a_scheduler_decays_at_its_milestones(tmp_path: Path, by: str) -> None:
    optimizer, scheduler = scheduled()
    rates(optimizer, scheduler, 2)
    state = {"optim": optimizer, "sched": scheduler}
    dcp.save(state, storage_writer=CasnapWriter(tmp_path / "a"))
    wanted = rates(optimizer, scheduler, 6)
    again = scheduled()
    into = dict(zip(state, again, strict=True))
    if by == "restore":
        Snapshot(tmp_path / "a").restore(into)
    else:
        dcp.load(into, storage_reader=CasnapReader(tmp_path / "a"))
        assert [*again[1].milestones] == [3, 6]  # type: ignore[attr-defined]
    assert rates(*again, 6) == wanted


KEYS = [3, -1, 0.5, True, None, (1, "a"), (), b"b", torch.float16, "3 ", "a.b/c%"]


def test_keys_keep_their_types(tmp_path: Path) -> None:
    """DCP makes a str of each."""
    state = {
        "values": {key: i for i, key in enumerate(KEYS)},
        "tensors": {key: torch.full((2,), i) for i, key in enumerate(KEYS)},
        "deep": {1: {2: [{3: torch.ones(3)}, {4: "x"}]}, "1.5": {2.5: {"y": 1}}},
    }
    writer = CasnapWriter(tmp_path / "a")
    pending: Any = dcp.async_save(state, storage_writer=writer)
    pending.result()
    snapshot = Snapshot(tmp_path / "a")
    for key, wanted in state.items():
        assert_same(snapshot.get_state_dict_for_key(key), wanted)
    into: dict[str, Any] = {
        "values": dict.fromkeys(KEYS),
        "tensors": {key: torch.zeros(2, dtype=torch.int64) for key in KEYS},
        "deep": {1: {2: [{3: torch.zeros(3)}, {4: None}]}, "1.5": {2.5: {"y": None}}},
    }
    dcp.load(into, storage_reader=CasnapReader(tmp_path / "a"))
    assert_same(into, state)


@needs_torch("2.10", "what dcp.save returns has no version")
def test_the_metadata_say_what_those_of_dcp_say(tmp_path: Path) -> None:
    writer, reader = CasnapWriter(tmp_path / "a"), CasnapReader(tmp_path / "a")
    saved = dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    own = dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "own")
    found = reader.read_metadata()
    assert saved.version == found.version == own.version  # type: ignore[attr-defined]
    assert saved.storage_meta is not None
    assert found.storage_meta is not None
    assert writer.save_id == saved.storage_meta.save_id == found.storage_meta.save_id
    assert reader.load_id == found.storage_meta.load_id
    dcp.save({"x": torch.zeros(2)}, storage_writer=writer)
    assert writer.save_id != found.storage_meta.save_id
    reader.reset(tmp_path / "a")
    assert reader.load_id != found.storage_meta.load_id


class Phase(enum.Enum):
    WARM = 1


def test_a_key_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"x/y: the key <Phase.WARM: 1> of type .*Phase "):
        dcp.save({"x": {"y": {Phase.WARM: 1}}}, storage_writer=CasnapWriter(tmp_path / "a"))
    assert Store(tmp_path).latest() is None


# --- async ------------------------------------------------------------------------------------


def test_async_saves_with_a_kept_stager(tmp_path: Path) -> None:
    store, x = Store(tmp_path), torch.zeros(1000)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    for step in range(3):
        writer = CasnapWriter(store, retention=Retention(keep_last=2))
        pending: Any = dcp.async_save(
            {"x": x, "step": step},
            checkpoint_id=f"run/{step}",
            storage_writer=writer,
            async_stager=stager,
        )
        x += 1  # what was staged is saved
        pending.result()
    stager.close()
    assert [snapshot.name for snapshot in store.snapshots()] == ["run/1", "run/2"]
    assert torch.equal(store["run/2"].read_object("x"), torch.full((1000,), 2.0))


def test_async_saves_keep_the_memory_of_their_copies(tmp_path: Path) -> None:
    release_memory()
    x, pending = torch.zeros(1 << 20), []
    for step in range(4):
        writer = CasnapWriter(tmp_path / f"{step}")
        saved: Any = dcp.async_save({"x": x}, storage_writer=writer)
        x += 1  # what was copied is saved
        # The last two go on at once, so they must not share their copies.
        pending.append(saved)
        if step < 2:
            saved.result()
    for saved in pending:
        saved.result()
    for step in range(4):
        assert (Snapshot(str(tmp_path / f"{step}")).read_object("x") == step).all()
    assert release_memory() >= x.nbytes


class Halves(torch.Tensor):
    """A quantized weight: what torch does with it gives plain tensors."""

    @staticmethod
    def __new__(cls, halves: torch.Tensor) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, halves.shape)  # type: ignore[attr-defined]
        made.halves = halves
        return made

    halves: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].halves)
        return func(*tree_map_only(cls, lambda t: t.halves / 2, args), **(kwargs or {}))


Z = torch.complex(torch.arange(1, 6.0), torch.arange(1, 6.0))
NOT_THEIR_BYTES: dict[str, Callable[[], Any]] = {
    "conjugated": Z.conj,
    "negated": lambda: Z.conj().imag,
    "both": lambda: torch._neg_view(Z.conj()),
    "in a tuple": lambda: (Z.conj(), 3),
    "in a deque": lambda: deque([Z.conj()]),
    "without memory": lambda: torch._efficientzerotensor(5),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(5.0), 0.1, 0, torch.qint8),
}
HALVES = torch.arange(5.0)
NO_VALUES: dict[str, Callable[[], Any]] = {
    "tensor subclass": lambda: Halves(HALVES),
    "subclass that dcp.async_save cannot copy": lambda: nn.Parameter(Halves(HALVES)),
    "store the plain tensors that it wraps": lambda: [Halves(HALVES)],
    "meta device": lambda: torch.empty(3, device="meta"),
    "has been freed": lambda: resized(torch.ones(3), 0),
}


def resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.fixture(params=["writer", "path"])
def async_save(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    def save(state: dict[str, Any], path: Path) -> None:
        if request.param == "path":
            install(path.parent)
            done: Any = dcp.async_save(state, checkpoint_id=path)
        else:
            done = dcp.async_save(state, storage_writer=CasnapWriter(path))
        done.result()

    yield save
    uninstall()


@pytest.mark.filterwarnings("ignore:.*(deprecated|beta state)")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=needs_torch("2.10", "DCP fails to copy it"))
        if kind in ("without memory", "sparse rows")
        else kind
        for kind in NOT_THEIR_BYTES
    ],
)
def test_async_saves_store_values_that_are_not_the_bytes_of_storages(
    tmp_path: Path, kind: str, async_save: Callable[..., None]
) -> None:
    state = {"x": NOT_THEIR_BYTES[kind]()}
    dcp.save(state, storage_writer=CasnapWriter(tmp_path / "now"))
    async_save(state, tmp_path / "later")
    assert_same(Snapshot(tmp_path / "later").read_object("x"), state["x"])
    assert not Store(tmp_path).diff("now", "later").changes


@pytest.mark.parametrize("reason", NO_VALUES)
def test_async_saves_refuse_what_they_cannot_copy(
    tmp_path: Path, reason: str, async_save: Callable[..., None]
) -> None:
    state = {"x": NO_VALUES[reason]()}
    with pytest.raises(UnsupportedTypeError, match=rf"^(x(/0)?|a tensor of the state): .*{reason}"):
        async_save(state, tmp_path / "later")
    assert Store(tmp_path).latest() is None


def test_async_saves_of_storages_that_change_their_size(
    tmp_path: Path, async_save: Callable[..., None]
) -> None:
    same, grown = torch.zeros(1 << 18), torch.zeros(1)
    for step in range(4):
        same.fill_(step)
        grown = resized(grown, 4 * (step + 1)).set_(grown.untyped_storage(), 0, (step + 1,))
        grown.fill_(step)
        async_save({"same": same, "grown": grown}, tmp_path / f"{step}")
    for step in range(4):
        snapshot = Snapshot(tmp_path / f"{step}")
        assert_same(snapshot.read_object("grown"), torch.full((step + 1,), float(step)))
        assert (snapshot.read_object("same") == step).all()


def test_a_save_that_ends_leaves_the_copies_of_another(tmp_path: Path) -> None:
    """It does not hand them to the next one."""
    writer, x = CasnapWriter(Store(tmp_path)), torch.zeros(1000)
    copies = []
    for value in range(4):
        x.fill_(value)
        copies.append(writer.stage({"x": x})["x"])
        dcp.save({"y": torch.ones(3)}, checkpoint_id=f"{value}", storage_writer=writer)
    assert [copy.unique().tolist() for copy in copies] == [[0], [1], [2], [3]]


def test_saves_at_once_by_one_writer_keep_their_names(tmp_path: Path) -> None:
    store, begun = Store(tmp_path), threading.Barrier(2)
    writer = CasnapWriter(store)

    class Together(DefaultSavePlanner):
        """Each save has its name before another writes."""

        def create_local_plan(self) -> SavePlan:
            begun.wait(30)
            return super().create_local_plan()

    saved: list[Any] = [
        dcp.async_save(
            {"step": step}, checkpoint_id=f"{step}", storage_writer=writer, planner=Together()
        )
        for step in range(2)
    ]
    for step, found in enumerate(saved):
        assert found.result().storage_data["snapshot"] == store[f"{step}"].path
        assert store[f"{step}"].read_object("step") == step


def test_a_path_outside_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "ckpts")
    for path in (tmp_path / "other" / "a", tmp_path / "ckpts", "s3://bucket/ckpts/a"):
        with pytest.raises(StateError, match="outside the store"):
            CasnapWriter(store).reset(str(path))
    assert list(store.snapshots()) == []


def test_the_folder_that_a_writer_is_made_with_is_the_store(tmp_path: Path) -> None:
    """Where checkpoint_id= names paths deeper in it: else each step would have a store of its own.

    A run that has such stores goes on in them.
    """
    root = tmp_path / "ckpts"
    state = {"w": torch.arange(100_000.0)}
    dcp.save(state, storage_writer=CasnapWriter(root / "step_0/model"))
    assert (root / "step_0/casnap-store").is_dir()
    writer = CasnapWriter(root)
    for step in range(3):
        dcp.save(state, checkpoint_id=root / f"step_{step}/model", storage_writer=writer)
        dcp.save(state, checkpoint_id=root / f"step_{step}/optim", storage_writer=writer)
    assert [s.name for s in Store(root / "step_0").snapshots()] == ["model", "optim"]
    later = Store(root).snapshots()
    assert [s.name for s in later] == [
        f"step_{n}/{key}" for n in (1, 2) for key in ("model", "optim")
    ]
    assert [s.stats.new_bytes > 100_000 for s in later] == [True, False, False, False]
    for step in range(3):
        path = root / f"step_{step}/optim"
        for reader in (CasnapReader(path), CasnapReader(root)):
            found = {"w": torch.zeros(100_000)}
            dcp.load(found, checkpoint_id=path, storage_reader=reader)
            assert_same(found, state)


# --- what is refused, and bad input -----------------------------------------------------------


class Own:
    """A class of the user's, which only pickle can store."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None  # type: ignore[assignment]


def test_values_that_need_pickle(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="allow_pickle=True"):
        dcp.save({"o": Own()}, storage_writer=CasnapWriter(tmp_path / "a"))
    dcp.save({"o": Own()}, storage_writer=CasnapWriter(tmp_path / "a", allow_pickle=True))
    with pytest.raises(CheckpointException, match="allow_pickle=True"):
        dcp.load({"o": 0}, storage_reader=CasnapReader(tmp_path / "a"))
    state: dict[str, Any] = {"o": 0}
    dcp.load(state, storage_reader=CasnapReader(tmp_path / "a", allow_pickle=True))
    assert state["o"] == Own()


def test_what_cannot_be_saved_so(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="use_collectives=False"):
        dcp.save({}, storage_writer=CasnapWriter(tmp_path / "a"), use_collectives=False)
    with pytest.raises(CheckpointException, match="pass checkpoint_id="):
        dcp.save({}, storage_writer=CasnapWriter())
    writer = CasnapWriter(tmp_path / "a", overwrite=False)
    dcp.save({"x": 1}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="SnapshotExistsError"):
        dcp.save({"x": 2}, storage_writer=writer)
    assert Snapshot(str(tmp_path / "a")).read_object("x") == 1


@pytest.mark.parametrize("reader", [CasnapReader, None], ids=["reader", "install"])
def test_metadata_of_dcp_that_ask_for_code_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: Any
) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "it ran"),)

    Store(tmp_path / "store").make()
    folder = tmp_path / "store/dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Code()))
    if reader is None:
        install(tmp_path / "store")
    try:
        options = {"storage_reader": reader(folder)} if reader else {"checkpoint_id": folder}
        with not_found(caplog, "is a pickle, which may run any code"):
            dcp.load({"x": 1}, **options)
    finally:
        uninstall()
    assert not (tmp_path / "it ran").exists()


def test_a_snapshot_with_two_values_of_one_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    store.take({"a": StateDict({"b.c": 1, "b": {"c": 2}})}, "x")
    with not_found(caplog, "read it with casnap.Snapshot"):
        load(store, "x", {"a": {"b.c": 0}})


def test_a_writer_goes_to_another_process(tmp_path: Path) -> None:
    for where in (tmp_path / "a", Store(tmp_path)):
        writer = pickle.loads(pickle.dumps(CasnapWriter(where, metadata={"loss": 0.5})))
        dcp.save({"x": 1}, checkpoint_id=tmp_path / "b", storage_writer=writer)
        assert Store(tmp_path)["b"].metadata.user["loss"] == 0.5
    assert pickle.loads(pickle.dumps(UnsupportedTypeError("x"))).args == ("x",)


class Gone:
    """A class that a program may have lost when it loads."""


def test_a_value_that_cannot_be_decoded_leaves_tensors_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "store/s")
    writer = CasnapWriter(place, allow_pickle=True)
    dcp.save({"w": torch.ones(50_000), "value": Gone()}, storage_writer=writer)
    monkeypatch.delattr(f"{__name__}.Gone")
    state = {"w": torch.zeros(50_000), "value": None}
    with pytest.raises(CheckpointException, match=r"value was stored by pickle.*AttributeError"):
        dcp.load(state, storage_reader=CasnapReader(place, allow_pickle=True))
    assert not state["w"].any()


def test_a_load_says_what_has_changed_since_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "casnap")
    model, optimizer = trained(0)
    whole = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    path = str(tmp_path / "ckpts" / "step_1")
    dcp.save(whole, storage_writer=CasnapWriter(path))
    dcp.load(whole, storage_reader=CasnapReader(path))
    assert "since the take" not in caplog.text
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    dcp.load({"model": model.state_dict()}, storage_reader=CasnapReader(path))
    dcp.load(whole, storage_reader=CasnapReader(path))
    text = f"{path}: since the take: cudnn_deterministic off → on"
    said = [(r.levelname, r.message) for r in caplog.records if "since the take" in r.message]
    assert said == [
        ("INFO", text),
        ("WARNING", f"{text}. So the training may compute other numbers than before"),
    ]
