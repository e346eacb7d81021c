"""``dcp.save`` and ``dcp.load`` of plain tensors that hold parts of larger ones, through casnap."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from casnap import NewStore, Snapshot, StateDict, Store
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from tests.support.cli_calls import invoke
from tests.support.dcp_saves import save
from tests.support.parts import PADDING, blank, holding, say, say_as
from tests.support.ranks import Worlds

protocol = pytest.importorskip(
    "torch.distributed.checkpoint.protocol",
    reason="this torch has no CheckpointableTensor: it needs 2.14 or newer",
)

Layout = tuple[list[tuple[int, int]], int]

CHUNK = 64 << 10
ROWS, COLUMNS = 1000, 101  # no edge of a part is an edge of a chunk
LAYOUTS: dict[str, Layout] = {
    "rows": ([(0, 333), (333, 1000)], 0),
    "swapped rows": ([(700, 1000), (0, 500), (500, 700)], 0),
    "columns": ([(0, 7), (50, 101), (7, 50)], 1),
    "one": ([(0, 1000)], 0),
}


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is ",  # DCP says once in each call that there is no process group
    "ignore:Plan caching:FutureWarning",
    "ignore:`_get_pg_default_device`",
)


def counted(first: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(first, first + ROWS * COLUMNS).to(dtype).reshape(ROWS, COLUMNS)


def parts(layout: str, whole: torch.Tensor) -> torch.Tensor:
    made = holding(whole, *LAYOUTS[layout])
    assert isinstance(made, protocol.CheckpointableTensor)
    return made


def load(store: Store, name: str, state: dict[str, Any], **options: Any) -> None:
    dcp.load(state, checkpoint_id=name, storage_reader=CasnapReader(store, **options))


# --- one process ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_layout_saves_and_loads_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    store, whole = Store(tmp_path, create=NewStore(chunk_size=CHUNK)), counted(dtype=dtype)
    for number, layout in enumerate(LAYOUTS):
        saved = save(store, layout, {"w": parts(layout, whole), "step": 1})
        assert number == 0 or saved.stats.new_bytes == 0, "the chunks do not depend on the layout"
        assert torch.equal(saved.read_object("w"), whole)
        assert torch.equal(
            saved.read_object("w", index=(slice(300, 720, 7), 60)), whole[300:720:7, 60]
        )
    assert store.take({"w": StateDict(w=whole)}, "native").stats.new_bytes < 2048
    for source in LAYOUTS:
        for layout in LAYOUTS:
            wanted = parts(layout, whole)
            live = {"w": blank(wanted)}
            load(store, source, live)
            assert torch.equal(live["w"], wanted), "the parts, and the padding as before"
        plain = {"w": torch.zeros_like(whole)}
        load(store, source, plain)
        assert torch.equal(plain["w"], whole)
    assert not store.check(data=True).damages


def test_tiles_in_a_view(tmp_path: Path) -> None:
    """Cut along all axes, in memory that is not contiguous."""
    whole = torch.arange(60.0 * 70 * 80).reshape(60, 70, 80)
    starts = list(itertools.product((0, 30), (0, 35), (0, 40)))
    local = torch.empty(80, 70, 60).permute(2, 1, 0)
    say(local, (60, 70, 80), starts, starts[::-1], [(30, 35, 40)] * 8)
    for a, b in zip(starts, starts[::-1], strict=True):
        tile = tuple(slice(n, n + m) for n, m in zip(a, (30, 35, 40), strict=True))
        there = tuple(slice(n, n + m) for n, m in zip(b, (30, 35, 40), strict=True))
        local[there] = whole[tile]
    store, wanted = Store(tmp_path, create=NewStore(chunk_size=CHUNK)), local.clone()
    assert torch.equal(save(store, "a", {"w": local}).read_object("w"), whole)
    local.zero_()
    load(store, "a", {"w": local})
    assert torch.equal(local, wanted)


def test_what_snapshot_take_has_taken_is_loaded_into_parts(tmp_path: Path) -> None:
    store, whole = Store(tmp_path), counted()
    store.take({"model": StateDict(w=whole)}, "native")
    wanted = parts("swapped rows", whole)
    live = {"model": {"w": blank(wanted)}}
    load(store, "native", live)
    assert torch.equal(live["model"]["w"], wanted)


def test_parameters_and_scalars(tmp_path: Path) -> None:
    store, whole = Store(tmp_path), counted()
    wanted = parts("columns", whole)
    parameter = torch.nn.Parameter(wanted.clone())
    say_as(wanted, parameter)
    scalar = torch.tensor(2.5)
    say(scalar, (), ((),), ((),), ((),))
    saved = save(store, "a", {"p": parameter, "scalar": scalar})
    assert torch.equal(saved.read_object("p"), whole)
    assert torch.equal(saved.read_object("scalar"), torch.tensor(2.5))
    live = {"p": blank(wanted), "scalar": blank(scalar)}
    load(store, "a", live)
    assert torch.equal(live["p"], wanted)
    assert torch.equal(live["scalar"], scalar)


def test_a_tensor_of_no_element(tmp_path: Path) -> None:
    empty = torch.zeros(0, 8)
    say(empty, (0, 8), ((0, 4), (0, 0)), ((0, 4), (0, 0)), ((0, 4), (0, 4)))
    store = Store(tmp_path)
    assert save(store, "a", {"x": empty}).read_object("x").shape == (0, 8)
    load(store, "a", {"x": empty})


def test_parts_that_do_not_make_the_whole_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(CheckpointException, match="w"):
        save(store, "a", {"w": holding(counted(), [(0, 400), (500, 1000)])})
    assert not store.snapshots()


def test_the_copy_of_a_save_in_the_background_keeps_the_parts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in range(3):  # the memory of the first copy is used again
        state = {"w": parts("swapped rows", counted(step))}
        writer = CasnapWriter(store)
        pending: Any = dcp.async_save(state, checkpoint_id=f"{step}", storage_writer=writer)
        state["w"].zero_()
        pending.result()
        assert torch.equal(store[f"{step}"].read_object("w"), counted(step))


def test_checkpoints_of_dcp_itself_go_both_ways(tmp_path: Path) -> None:
    whole = counted()
    dcp.save({"model": {"w": parts("columns", whole)}}, checkpoint_id=tmp_path / "old")
    assert invoke("import", tmp_path / "old", tmp_path / "store/a").exit_code == 0
    assert torch.equal(Snapshot(str(tmp_path / "store/a")).read_object("model/w"), whole)
    export = ("export", tmp_path / "store/a", tmp_path / "left", "--format", "dcp")
    assert invoke(*export).exit_code == 0
    wanted = parts("swapped rows", whole)
    live = {"model": {"w": blank(wanted)}}
    dcp.load(live, checkpoint_id=tmp_path / "left")
    assert torch.equal(live["model"]["w"], wanted)


# --- two ranks --------------------------------------------------------------------------------

EACH: dict[str, list[Layout]] = {
    "interleaved": [([(0, 333), (800, 1000)], 0), ([(333, 500), (500, 800)], 0)],
    "columns": [([(60, 101)], 1), ([(31, 60), (0, 31)], 1)],
    "all on one": [([], 0), ([(500, 1000), (0, 500)], 0)],
    "replicas": [([(0, 1000)], 0), ([(0, 1000)], 0)],
}


def state_of(layout: str, whole: torch.Tensor) -> dict[str, Any]:
    """Return the parts of this rank, and a value that both have."""
    return {"model": {"w": holding(whole, *EACH[layout][dist.get_rank()])}, "step": 3}


def save_each(folder: str) -> list[list[int]]:
    """Save each layout twice, and with a row changed; return the new bytes of each."""
    store, new = Store(folder), []
    for layout in EACH:
        whole = counted()
        states = [state_of(layout, whole), state_of(layout, whole)]
        whole[-1] = -1
        states.append(state_of(layout, whole))
        saves = [save(store, f"{layout} {i}", state) for i, state in enumerate(states)]
        new.append([saved.stats.new_bytes for saved in saves])
    return new


def load_each(folder: str) -> None:
    store, whole = Store(folder), counted()
    for source in EACH:
        for layout in EACH:
            wanted = state_of(layout, whole)
            live = {"model": {"w": blank(wanted["model"]["w"])}, "step": 0}
            load(store, f"{source} 1", live, read_once=layout != "columns")
            assert torch.equal(live["model"]["w"], wanted["model"]["w"]), (source, layout)
            assert live["step"] == 3
            # On the meta device, DCP makes the memory.
            live["model"]["w"] = meta = blank(wanted["model"]["w"], "meta")
            load(store, f"{source} 1", live)
            held = wanted["model"]["w"] != PADDING
            assert live["model"]["w"] is not meta
            assert torch.equal(live["model"]["w"][held], wanted["model"]["w"][held])
        mesh = init_device_mesh("cpu", (2,))
        sharded: Any = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)])
        load(store, f"{source} 1", {"model": {"w": sharded}})
        assert torch.equal(sharded.full_tensor(), whole)


def test_two_ranks(world: Worlds, tmp_path: Path) -> None:
    store, whole = Store(tmp_path, create=NewStore(chunk_size=CHUNK)), counted()
    new = world(2).run(save_each, str(tmp_path))[0]
    assert new[0][0] >= whole.nbytes
    for number, (first, again, changed) in enumerate(new):
        # DCP names the values in another order if rank 0 does not have them all.
        assert number == 0 or first < 512, "the chunks do not depend on the layout"
        assert again == 0
        assert changed < (2 * CHUNK if number == 0 else 512)
    for layout in EACH:
        assert torch.equal(store[f"{layout} 0"].read_object("model/w"), whole)
        assert store[f"{layout} 0"].get_manifest().is_global("0/model/w")
        # One process, with a layout of its own.
        wanted = parts("swapped rows", whole)
        live = {"model": {"w": blank(wanted)}}
        load(store, f"{layout} 0", live)
        assert torch.equal(live["model"]["w"], wanted)
    world(2).run(load_each, str(tmp_path))
    assert not store.check(data=True).damages


def save_in_a_process(folder: str) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    writer = CasnapWriter(Store(folder))
    pending: Any = dcp.async_save(
        state_of("interleaved", counted()),
        checkpoint_id="a",
        storage_writer=writer,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    pending.result()


def test_what_another_process_would_take_for_whole_is_refused(
    world: Worlds, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    with world(2).fresh() as ranks:
        outcomes = ranks.run(save_in_a_process, str(tmp_path), expect_errors=True)
    for outcome in outcomes:
        assert "model/w holds parts of a larger tensor" in str(outcome)
        assert "AsyncCheckpointerType.THREAD" in str(outcome)
    assert not store.snapshots()
