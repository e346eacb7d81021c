"""Sharded state dicts of Megatron Core are snapshots: any parallelism goes on with them.

Megatron's own backend, ``torch_dist``, says what is right: both load into equal models.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from casnap import Snapshot, Store
from casnap.errors import (
    CasnapError,
    DamagedError,
    MismatchError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateError,
    UnsupportedTypeError,
    WitnessError,
)
from tests.support.bitwise import assert_same, noise
from tests.support.launched import kill_all, launched
from tests.support.trainer_contract import TrainerContract

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

CASNAP = ("casnap", 1)
VOCABULARY, LENGTH = 64, 8


class OnCpus(TorchFunctionMode):
    """Lets Megatron do on a CPU what it says CUDA to."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def own_strategy() -> Any:
    """Return Megatron's own strategy, which then writes in this process, not in forks of it."""
    import torch.distributed.checkpoint as dcp
    from megatron.core.dist_checkpointing.strategies import torch as own
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    class InProcess(own.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            state, *_ = own._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            planner = own.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            writer = dcp.FileSystemWriter(checkpoint_dir)
            dcp.save(own.mcore_to_pyt_state_dict(state), storage_writer=writer, planner=planner)
            return AsyncRequest(None, (), [])

    return InProcess("torch_dist", 1)


def on_ranks(size: int, work: Callable[[], object]) -> list[int]:
    """Do some work on gloo ranks that pass for ranks with GPUs."""
    with warnings.catch_warnings(action="ignore"):  # so that the ranks need not import it each
        import casnap.integrations.megatron  # noqa: F401

    def on() -> None:
        torch.set_num_threads(1)
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.FloatTensor = torch.FloatTensor
        dist.init_process_group("gloo")
        with warnings.catch_warnings(action="ignore"), OnCpus():
            work()

    return launched(size, on)


def all_end(size: int, work: Callable[[], object]) -> None:
    assert on_ranks(size, work) == [0] * size


_layout: list[int] = []


class Training:
    """A small GPT, and Adam with its state distributed over the ranks of one shard."""

    def __init__(self, tensor_parallel: int, pipeline_parallel: int, seed: int = 0) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        from megatron.core.transformer import TransformerConfig

        if _layout != [tensor_parallel, pipeline_parallel]:
            # Megatron makes dozens of groups, whose threads go only with the process.
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
            _layout[:] = tensor_parallel, pipeline_parallel
        get_cuda_rng_tracker().fork = lambda *_: nullcontext()
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            gated_linear_unit=True,  # its weights are saved by a factory
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=tensor_parallel,
            pipeline_model_parallel_size=pipeline_parallel,
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            bf16=True,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        ).bfloat16()
        self.parallel_model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), self.model
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=0.01, use_distributed_optimizer=True, params_dtype=torch.bfloat16, bf16=True
            ),
            [self.parallel_model],
        )
        (self.distributed,) = self.optimizer.chained_optimizers
        fill = self.distributed._set_main_param_and_optimizer_states

        def fill_all(parameter: Any, tensors: dict[str, Any]) -> None:
            # torch's Adam has a step for each parameter, which Megatron has set before.
            held = self.distributed._get_main_param_and_optimizer_states(parameter)
            fill(parameter, {"step": held["step"], **tensors})

        self.distributed._set_main_param_and_optimizer_states = fill_all
        self.step = 0

    def train(self, steps: int) -> None:
        """Train; by gradients of noise where a pipeline divides the layers."""
        for _ in range(steps):
            self.parallel_model.zero_grad_buffer()
            torch.manual_seed(100 * self.step + dist.get_rank())
            if self.model.pre_process and self.model.post_process:
                tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
                positions = torch.arange(LENGTH).expand(2, LENGTH)
                mask = torch.ones(LENGTH, LENGTH).triu(diagonal=1).bool()[None, None]
                self.parallel_model(tokens, positions, mask, labels=tokens).mean().backward()
            else:
                for parameter in self.model.parameters():
                    parameter.main_grad.normal_()
            self.parallel_model.finish_grad_sync()
            self.optimizer.step()
            self.step += 1

    def sharded(self, *, is_loading: bool = False) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedObject

        rank, size = dist.get_rank(), dist.get_world_size()
        is_new = hasattr(self.distributed, "sharded_param_state_fully_reshardable")
        kind = "fully_reshardable" if is_new else "fully_sharded_model_space"
        metadata = {"distrib_optim_sharding_type": kind}
        model = self.model.sharded_state_dict(metadata=metadata)
        return {
            "step": self.step,
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=metadata
            ),
            "rng": ShardedObject("rng", {"seed": [rank]}, (size,), (rank,)),
        }

    def save(self, folder: Path, strategy: Any = CASNAP, **options: Any) -> Any:
        from megatron.core import dist_checkpointing

        folder.mkdir(parents=True, exist_ok=True)
        return dist_checkpointing.save(self.sharded(), str(folder), strategy, **options)

    def load(self, folder: Path, *, with_rng: bool = True) -> Any:
        """Load into this, and return what was loaded."""
        from megatron.core import dist_checkpointing

        self.train(1)  # torch's Adam has no state before
        sharded = self.sharded(is_loading=True)
        if not with_rng:
            del sharded["rng"]
        state = dist_checkpointing.load(sharded, str(folder))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for held in self.distributed.optimizer.state.values():
            held["step"] = held["step"].clone()  # Megatron gives all parameters the same tensor
        self.step = state["step"]
        return state

    def whole(self) -> dict[str, Any]:
        """Return all that this rank trains with."""
        return {
            "step": self.step,
            "model": {name: p.detach().clone() for name, p in self.model.named_parameters()},
            "groups": self.distributed.state_dict(),
            "optimizer": self.distributed.get_parameter_state_dp_zero(),
        }


# --- other sizes --------------------------------------------------------------------------------

LAYOUTS = {"tensors": (2, 1), "pipeline": (1, 2), "data": (1, 1)}


def test_tensor_pipeline_and_data_parallel_sizes_change(tmp_path: Path) -> None:
    def loaded(folder: str, layout: tuple[int, int]) -> Training:
        training = Training(*layout, seed=len(folder))
        training.load(tmp_path / folder, with_rng=False)
        return training

    def on_two() -> None:
        for name, layout in LAYOUTS.items():
            training = Training(*layout)
            training.train(2)
            training.save(tmp_path / name)
            training.save(tmp_path / f"{name}-own", own_strategy())
        for layout, name in product(LAYOUTS.values(), LAYOUTS):
            assert_same(loaded(name, layout).whole(), loaded(f"{name}-own", layout).whole())

    def on_one() -> None:
        for name in LAYOUTS:
            training = loaded(name, (1, 1))
            assert_same(training.whole(), loaded(f"{name}-own", (1, 1)).whole())
        training.save(tmp_path / "one")

    def on_two_again() -> None:
        for layout in LAYOUTS.values():
            assert_same(loaded("data", layout).whole(), loaded("one", layout).whole())

    all_end(2, on_two)
    all_end(1, on_one)
    all_end(2, on_two_again)
    # The weights do not depend on the sharding: the same chunks, stored once.
    snapshots = {s.name: s for s in Store(tmp_path, create=False).snapshots()}
    assert {name: s.metadata.user for name, s in snapshots.items()} == {
        name: {"step": 2} for name in (*LAYOUTS, "one")
    }
    assert snapshots["one"].stats.new_bytes < snapshots["data"].stats.new_bytes / 10


# --- what a state dict may hold -------------------------------------------------------------------

ROWS, COLUMNS = 6, 3000


def by_hand(value: torch.Tensor | None = None) -> dict[str, Any]:
    """Return a sharded state dict with one of each kind; with data, if there is a value."""
    from megatron.core.dist_checkpointing import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
    )
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    rank, size = dist.get_rank(), dist.get_world_size()
    has_data = value is not None
    rows = torch.zeros(ROWS // size, COLUMNS) if value is None else value.chunk(size)[rank].clone()
    whole = torch.zeros(ROWS, COLUMNS) if value is None else value.clone()

    def build(key: str, data: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {
            half: ShardedTensor.from_rank_offsets(f"{key}.{half}", part, (0, rank, size))
            for half, part in zip(("left", "right"), data.chunk(2, dim=1), strict=True)
        }

    def merge(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([parts["left"], parts["right"]], dim=1)

    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, size)),
        "layers": [
            ShardedTensor.from_rank_offsets(
                "layers", row, (0, rank * len(rows) + i, ROWS), prepend_axis_num=1
            )
            for i, row in enumerate(rows)
        ],
        "replica": ShardedTensor.from_rank_offsets("replica", whole, replica_id=rank),
        "columns": ShardedTensor.from_rank_offsets(
            "columns", whole.chunk(size, dim=1)[rank], (1, rank, size)
        ),
        "scalar": ShardedTensor.from_rank_offsets(
            "scalar", torch.tensor(3.0 * has_data), replica_id=rank
        ),
        "factory": ShardedTensorFactory("factory", rows.clone(), build, merge),
        7: {
            "object": ShardedObject(
                "an/object", {"rank": rank, "x": torch.arange(rank)}, (size,), (rank,)
            ),
            "same": ShardedObject("same", [1, (2, None)], (1,), (0,), replica_id=rank),
            "here": LocalNonpersistentObject(f"of rank {rank}, {has_data}"),
        },
        "common": {"step": 3, "betas": (0.9, 0.95), "groups": [{"lr": 0.1}]},
    }


def test_each_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    value = noise(torch.float32, (ROWS, COLUMNS))

    def save() -> None:
        from megatron.core import dist_checkpointing as dc
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelLoadStrategyWrapper,
            FullyParallelSaveStrategyWrapper,
        )

        from casnap.integrations.megatron import CasnapLoadStrategy, CasnapSaveStrategy

        whole, divided = tmp_path / "whole", tmp_path / "divided"
        whole.mkdir(exist_ok=True)
        divided.mkdir(exist_ok=True)
        dc.save(by_hand(value), str(whole), CASNAP, content_metadata={"kind": "test"})
        wrapped = FullyParallelSaveStrategyWrapper(CasnapSaveStrategy())
        dc.save(by_hand(value), str(divided), wrapped)
        for folder, strategy in (
            (whole, None),
            (divided, FullyParallelLoadStrategyWrapper(CasnapLoadStrategy())),
        ):
            check(dc.load(by_hand(), str(folder), strategy), value)
        assert dc.load_content_metadata(str(whole)) == {"kind": "test"}

    def load() -> None:
        from megatron.core import dist_checkpointing as dc

        folder = str(tmp_path / "whole")
        wanted = by_hand()
        del wanted[7]["object"]  # Megatron lays objects out for one number of ranks
        state, missing, unexpected = dc.load(wanted, folder, strict="return_all")
        assert (missing, unexpected) == ({"an/object"}, set())
        check(state, value)
        plain = dc.load_plain_tensors(folder)
        assert_same(plain["rows"], value)
        assert_same(plain["layers"], value)

    all_end(2, save)
    all_end(1, load)
    all_end(3, load)
    snapshot = Snapshot(tmp_path / "whole")
    assert_same(snapshot.read_object("tensors/columns"), value)
    assert_same(snapshot.read_object("objects/an%2Fobject/shard_1_2")["x"], torch.arange(1))
    snapshot.export(tmp_path / "weights.safetensors", path="tensors")
    assert_same(load_file(tmp_path / "weights.safetensors")["columns"], value)
    # Each of the ways to divide it makes the same chunks.
    assert Snapshot(tmp_path / "divided").stats.new_bytes < value.nbytes / 4


def check(state: dict[Any, Any], value: torch.Tensor) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = value.chunk(size)[rank].contiguous()
    assert_same(state["rows"], rows)
    assert_same(torch.stack(state["layers"]), rows)
    assert_same(state["replica"], value)
    assert_same(state["columns"].contiguous(), value.chunk(size, dim=1)[rank].contiguous())
    assert_same(state["factory"], rows)
    assert_same(state["scalar"], torch.tensor(3.0))
    if "object" in state[7]:
        assert_same(state[7]["object"], {"rank": rank, "x": torch.arange(rank)})
    assert state[7]["same"] == [1, (2, None)]
    assert state[7]["here"] == f"of rank {rank}, False"
    assert state["common"] == {"step": 3, "betas": (0.9, 0.95), "groups": [{"lr": 0.1}]}


# --- saves in the background, and kills ---------------------------------------------------------


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that Megatron takes for complete."""
    complete = sorted(path.parent for path in folder.glob("*/metadata.json"))
    return complete[-1] if complete else None


class TestCheckpoints(TrainerContract):
    ranks = 2
    kill_at = 4
    kept = tuple(f"iter_{step}" for step in range(1, 7))
    least_bytes, most_new_bytes = 0, 1 << 20
    name = "iter_1"
    nothing = SnapshotNotFoundError
    other = StateError

    def work(self, work: Callable[[], object]) -> list[int]:
        return on_ranks(2, work)

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        training, calls = Training(1, 1), AsyncCallsQueue()
        if (last := newest(folder)) is not None:
            training.load(last)
        while training.step < 6:
            training.train(1)
            calls.maybe_finalize_async_calls()
            if training.step == kill_at:
                calls.maybe_finalize_async_calls(blocking=True)
                training.save(folder / f"iter_{training.step}", async_sharded_save=True)
                kill_all()
            calls.schedule_async_request(
                training.save(folder / f"iter_{training.step}", async_sharded_save=True)
            )
        calls.close()
        return training.whole()

    def load(self, folder: Path) -> object:
        from casnap.integrations.megatron import CasnapLoadStrategy

        training, last = Training(1, 1, seed=1), newest(folder)
        if last is None:  # Megatron's own load finds no metadata.json
            return CasnapLoadStrategy().load(by_hand(), folder / self.name)
        return training.load(last)

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        assert snapshot.metadata.user == {"step": 6}


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path) -> None:
    value = noise(torch.float32, (ROWS, COLUMNS))

    def work() -> None:
        from megatron.core import dist_checkpointing as dc
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        folder, calls = tmp_path / "later", AsyncCallsQueue()
        folder.mkdir(exist_ok=True)
        state = by_hand(value)
        request = dc.save(state, str(folder), CASNAP, async_sharded_save=True)
        state["rows"].data.zero_()
        state["replica"].data.zero_()
        dist.barrier()
        assert not (folder / "metadata.json").exists()
        calls.schedule_async_request(request)
        assert calls.maybe_finalize_async_calls(blocking=True) == [0]
        check(dc.load(by_hand(), str(folder)), value)

        again = tmp_path / "again"
        again.mkdir(exist_ok=True)
        dc.save(by_hand(value), str(again), CASNAP, async_sharded_save=True).execute_sync()
        check(dc.load(by_hand(), str(again)), value)

        # The snapshot of this name has a tag, so it cannot be replaced.
        if dist.get_rank() == 0:
            Store(tmp_path).tag("again", "kept")
        dist.barrier()
        with pytest.raises(SnapshotExistsError, match="kept"):
            dc.save(by_hand(value + 1), str(again), CASNAP, async_sharded_save=True)

    all_end(2, work)


# --- what goes wrong ------------------------------------------------------------------------------


def test_damage_of_the_common_state_reaches_the_caller(tmp_path: Path) -> None:
    value = noise(torch.float32, (ROWS, COLUMNS))

    def save() -> None:
        from megatron.core import dist_checkpointing as dc

        (tmp_path / "first").mkdir(exist_ok=True)
        dc.save(by_hand(value), str(tmp_path / "first"), CASNAP)

    def load_beside_other_common_state() -> None:
        from megatron.core import dist_checkpointing as dc

        from casnap.integrations.megatron import CasnapLoadStrategy

        folder = str(tmp_path / "first")
        with pytest.raises(DamagedError, match=r"common\.pt is damaged, or of a save .*not compl"):
            dc.load(by_hand(), folder)
        one = CasnapLoadStrategy()
        check(dc.load(by_hand(), folder, one, one), value)

    all_end(2, save)
    torch.save({"step": 4}, tmp_path / "first/common.pt")
    all_end(2, load_beside_other_common_state)


def test_what_does_not_fit_and_what_is_refused(tmp_path: Path) -> None:
    value = noise(torch.float32, (ROWS, COLUMNS))

    def work() -> None:
        from megatron.core import dist_checkpointing as dc
        from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

        from casnap.integrations.megatron import CasnapLoadStrategy

        rank, folder = dist.get_rank(), tmp_path / "run"
        folder.mkdir(exist_ok=True)
        dc.save(by_hand(value), str(folder), CASNAP)

        wanted = by_hand()
        short = torch.ones(ROWS + 2, COLUMNS)
        wanted["replica"] = ShardedTensor.from_rank_offsets("replica", short, replica_id=rank)
        wanted["other"] = ShardedTensor.from_rank_offsets("other", short, replica_id=rank)
        with pytest.raises(CasnapError, match=r"nothing was loaded|rank 0 failed") as caught:
            dc.load(wanted, str(folder))
        assert isinstance(caught.value, MismatchError), caught.value
        assert "tensors/replica: (8, 3000) here, (6, 3000) in the snapshot" in str(caught.value)
        assert "tensors/other: not in the snapshot" in str(caught.value)
        assert short.eq(1).all()
        assert not wanted["rows"].data.any()

        padded = ShardedTensor.from_rank_offsets(
            "replica", short, replica_id=rank, allow_shape_mismatch=True
        )
        state = dc.load({"padded": padded}, str(folder))
        assert_same(state["padded"], torch.cat([value, torch.zeros(2, COLUMNS)]))

        for later in (False, True):
            state = {"x": ShardedObject("x", [Training, 1][rank], (2,), (rank,))}
            with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
                dc.save(state, str(folder), CASNAP, async_sharded_save=later)
        with pytest.raises(StateError, match="does not change"):
            CasnapLoadStrategy().remove_sharded_tensors(str(folder), "rows")
        with pytest.raises(DamagedError, match=r"of a save to this folder that was not completed"):
            dc.load(by_hand(), str(folder))
        one = CasnapLoadStrategy()
        check(dc.load(by_hand(), str(folder), one, one), value)

        own = tmp_path / "own"
        own.mkdir(exist_ok=True)
        dc.save(by_hand(value), str(own), own_strategy())
        with pytest.raises(StateError, match="saved by the backend 'torch_dist'"):
            dc.load(by_hand(), str(own), CasnapLoadStrategy())
        dist.barrier()
        shutil.copy(folder / "metadata.json", own)
        with pytest.raises(SnapshotNotFoundError, match=r"there is no snapshot at .*own"):
            dc.load(by_hand(), str(own))

    all_end(2, work)


@pytest.mark.parametrize("layout", ["tensors", "data"])
def test_a_witness_by_hand(tmp_path: Path, layout: str) -> None:
    """As docs/guides/proving-a-resume.md advises: the weights of each rank's module tell."""

    def first() -> None:
        training = Training(*LAYOUTS[layout])
        training.train(2)
        training.save(tmp_path / "iter_2")
        training.train(1)
        assert Store(tmp_path).witness({"model": training.model}, "iter_3").stored

    def resumed() -> None:
        training = Training(*LAYOUTS[layout], seed=1)
        training.load(tmp_path / "iter_2")
        training.train(1)
        store, state = Store(tmp_path), {"model": training.model}
        assert store.witness(state, "iter_3").equal
        training.load(tmp_path / "iter_2")
        training.distributed.optimizer.param_groups[0]["lr"] *= 2
        training.train(1)
        with pytest.raises(WitnessError, match="weights: "):
            store.witness(state, "iter_3")

    all_end(2, first)
    all_end(2, resumed)
