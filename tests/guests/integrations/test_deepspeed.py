"""ZeRO's parts are named tensors in a snapshot: any stage and number of ranks goes on with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from casnap import Snapshot, Store
from casnap.errors import MismatchError, StateError, UnsupportedTypeError, WitnessError
from tests.support.bitwise import assert_same
from tests.support.deepspeed_on_cpus import import_deepspeed
from tests.support.exports import assert_exports
from tests.support.launched import kill_all, launched
from tests.support.trainer_contract import TrainerContract

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

BASE = 400 * 300


class Net(torch.nn.Module):
    """A frozen layer, a buffer, tied weights, and shapes that no number of ranks divides."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__()
        self.base = torch.nn.Linear(300, 400, bias=False).requires_grad_(requires_grad=False)
        self.first = torch.nn.Linear(400, hidden)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.second = torch.nn.Linear(hidden, hidden)
        self.tied = self.second
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.first(self.base(x)).relu() * self.scale
        return self.tied(self.second(hidden))


def engine_of(
    stage: int,
    dtype: str = "bf16",
    seed: int = 0,
    hidden: int = 13,
    *,
    net: torch.nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    scheduler: Any = torch.optim.lr_scheduler.StepLR,
) -> Any:
    deepspeed = import_deepspeed()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(seed)
    net = net or Net(hidden)
    trained = [p for p in net.parameters() if p.requires_grad]
    made = optimizer([{"params": trained[:1]}, {"params": trained[1:], "lr": 1e-3}])
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=made,
        lr_scheduler=None if scheduler is None else scheduler(made, 2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": dtype == "bf16"},
        },
    )
    return engine


def train(engine: Any, start: int, stop: int) -> None:
    import torch.distributed as dist

    for step in range(start, stop):
        torch.manual_seed(100 * step + dist.get_rank())
        dtype = next(engine.module.parameters()).dtype
        loss = engine(torch.randn(2, 300, dtype=dtype)).square().mean()
        engine.backward(loss)
        engine.step()


def whole(engine: Any) -> dict[str, Any]:
    """Return the whole of an engine, as DeepSpeed itself gathers it."""
    import deepspeed

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # At the first step DeepSpeed does so too early for all groups but the first.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    state: dict[str, Any] = {"step": engine.global_steps}
    state["groups"] = [
        {"lr": group["lr"], "betas": group["betas"]} for group in engine.optimizer.param_groups
    ]
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            state[f"model/{name}"] = parameter.detach().clone()
        if parameter.requires_grad:
            state[f"fp32/{name}"] = deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                value = deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                state[f"{key}/{name}"] = value.clone()
    return state | {f"model/{name}": b.clone() for name, b in engine.module.named_buffers()}


def on_ranks(size: int, work: Callable[[], object]) -> None:
    assert launched(size, work) == [0] * size


def put(state: Any, path: Path) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        torch.save(state, path)


def saved(folder: Path, size: int, stage: int, dtype: str = "bf16") -> dict[str, Any]:
    """Train three steps, save, train on; return the whole state at the save."""

    def work() -> None:
        from casnap.integrations.deepspeed import save_checkpoint

        engine = engine_of(stage, dtype)
        train(engine, 0, 3)
        put(whole(engine), folder / "saved")
        save_checkpoint(engine, folder / "run", client_state={"epoch": 7})
        train(engine, 3, 5)
        put(whole(engine), folder / "end")

    on_ranks(size, work)
    state: dict[str, Any] = torch.load(folder / "saved", weights_only=True)
    return state


@pytest.mark.parametrize(
    ("size", "stage", "dtype", "others"),
    [
        (2, 3, "bf16", [(2, 3), (3, 1), (1, 2)]),
        (3, 1, "fp32", [(3, 1), (2, 3)]),
    ],
)
def test_any_stage_and_number_of_ranks_goes_on(
    tmp_path: Path, size: int, stage: int, dtype: str, others: list[tuple[int, int]]
) -> None:
    wanted = saved(tmp_path, size, stage, dtype)

    for other_size, other_stage in others:

        def work(stage_here: int = other_stage) -> None:
            from casnap.integrations.deepspeed import load_checkpoint

            engine = engine_of(stage_here, dtype, seed=1)
            path, client_state = load_checkpoint(engine, tmp_path / "run")
            assert path == str(tmp_path / "run/global_step3")
            assert client_state == {"epoch": 7}
            put(whole(engine), tmp_path / "loaded")
            train(engine, 3, 5)
            put(whole(engine), tmp_path / "goes-on")

        on_ranks(other_size, work)
        assert_same(torch.load(tmp_path / "loaded", weights_only=True), wanted)
        if (other_size, other_stage) == (size, stage):
            ends = [torch.load(tmp_path / n, weights_only=True) for n in ("goes-on", "end")]
            assert_same(ends[0], ends[1])


class TestEngine(TrainerContract):
    ranks = 2
    kill_at = 4
    kept = tuple(f"global_step{step}" for step in range(1, 7))
    least_bytes = most_new_bytes = BASE
    name = "global_step1"

    def train(self, folder: Path, kill_at: int | None = None, way: str = "") -> dict[str, Any]:
        from casnap.integrations.deepspeed import async_save_checkpoint, load_checkpoint

        engine = engine_of(2)
        load_checkpoint(engine, folder)
        pending = None
        for step in range(engine.global_steps, 6):
            train(engine, step, step + 1)
            if step == kill_at:
                kill_all()
            pending = async_save_checkpoint(engine, folder, client_state={"step": step})
        assert pending is not None
        pending.wait()
        return whole(engine)

    def load(self, folder: Path) -> object:
        from casnap.integrations.deepspeed import load_checkpoint

        return load_checkpoint(engine_of(2, seed=1), folder)

    def check_last(self, snapshot: Snapshot, end: dict[str, Any], folder: Path) -> None:
        """A plain module loads and exports it."""
        net = Net()
        for parameter in net.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        net.count = net.count.to(end["model/count"].dtype)  # bf16 before DeepSpeed 0.17
        snapshot.load_into(net, "model")
        for name, value in (*net.named_parameters(), *net.named_buffers()):
            assert torch.equal(value, end[f"model/{name}"]), name
        assert torch.equal(snapshot.read_object("optimizer/fp32/scale"), end["fp32/scale"])
        assert_exports(snapshot, folder, "model", net.state_dict(), tied=net)


def test_what_is_loaded_in_part_and_what_is_refused(tmp_path: Path) -> None:
    wanted = saved(tmp_path, 2, 2)

    def work() -> None:
        from casnap.integrations.deepspeed import (
            async_save_checkpoint,
            load_checkpoint,
            save_checkpoint,
        )

        engine = engine_of(2, seed=1)
        assert load_checkpoint(engine, tmp_path / "nothing") == (None, {})
        with pytest.raises(KeyError, match=r"no snapshot at .*run/other"):
            load_checkpoint(engine, tmp_path / "run", "other")
        with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
            save_checkpoint(engine, tmp_path / "run", client_state={"value": Net})
        with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
            async_save_checkpoint(engine, tmp_path / "run", client_state={"value": Net})
        options: dict[str, Any] = {"exclude_frozen_parameters": True}
        save_checkpoint(engine, tmp_path / "trained", "a", **options)
        pickled = tmp_path / "pickled"
        save_checkpoint(engine, pickled, client_state={"value": Net}, allow_pickle=True)
        _, client_state = load_checkpoint(engine, pickled, allow_pickle=True)
        assert client_state == {"value": Net}
        load_checkpoint(engine, tmp_path / "run", load_module_only=True)
        state = whole_module(engine)
        for name, value in state.items():
            assert torch.equal(value, wanted[f"model/{name}"]), name
        assert engine.global_steps == 0
        other = engine_of(2, hidden=14)
        rates = [group["lr"] for group in other.optimizer.param_groups]
        with pytest.raises(MismatchError, match=r"nothing was loaded: .*first.weight: \(.*\) here"):
            load_checkpoint(other, tmp_path / "run")
        assert [group["lr"] for group in other.optimizer.param_groups] == rates
        with pytest.raises(StateError, match="does not support ZeRO-0"):
            save_checkpoint(engine_of(0), tmp_path / "run")

    on_ranks(2, work)
    trained = Snapshot(str(tmp_path / "trained/a"))
    assert "model/first.weight" in trained
    assert "model/base.weight" not in trained


class Deeper(Net):
    """A module with one parameter and one buffer more."""

    def __init__(self) -> None:
        super().__init__()
        self.third = torch.nn.Linear(3, 3, bias=False)
        self.register_buffer("last", torch.zeros(2))


def test_what_does_not_fit_is_one_error_before_anything_is_loaded(tmp_path: Path) -> None:
    """And an engine that was refused goes on as if nothing had been tried."""

    def save() -> None:
        from casnap.integrations.deepspeed import save_checkpoint

        save_checkpoint(engine_of(2, net=Deeper()), tmp_path / "larger", "a")
        save_checkpoint(engine_of(2, scheduler=None), tmp_path / "plain", "a")
        adam = engine_of(2)
        train(adam, 0, 1)
        adam.optimizer.param_groups[1]["note"] = Setting()
        save_checkpoint(adam, tmp_path / "adam", "a", allow_pickle=True)

    on_ranks(2, save)

    def load() -> None:
        from casnap.integrations.deepspeed import load_checkpoint

        def refused(engine: Any, name: str, **options: Any) -> str:
            before = whole_module(engine)
            before = {key: value.clone() for key, value in before.items()}
            with pytest.raises(MismatchError, match="nothing was loaded") as caught:
                load_checkpoint(engine, tmp_path / name, "a", allow_pickle=True, **options)
            assert_same(whole_module(engine), before)
            return str(caught.value)

        engine = engine_of(2, seed=1)
        text = refused(engine, "larger")
        for lacking in (
            "model/third.weight",
            "model/last",
            "optimizer/fp32/third.weight",
        ):
            assert f"{lacking}: in the snapshot alone" in text
        assert "model/last: in" in refused(engine, "larger", load_module_only=True)
        text = refused(engine, "plain")
        assert "saved without a scheduler" in text
        assert "load_lr_scheduler_states=False" in text
        train(engine, 0, 1)
        load_checkpoint(engine, tmp_path / "plain", "a", load_lr_scheduler_states=False)
        train(engine, 0, 1)  # with states as in a first step
        once = whole(engine)
        load_checkpoint(engine, tmp_path / "plain", "a", load_lr_scheduler_states=False)
        train(engine, 0, 1)
        assert_same(whole(engine) | {"groups": once["groups"]}, once)  # these have a scheduler
        with pytest.raises(UnsupportedTypeError, match="allow_pickle=True"):
            load_checkpoint(engine, tmp_path / "adam", "a")
        load_checkpoint(engine, tmp_path / "adam", "a", allow_pickle=True)
        assert type(engine.optimizer.param_groups[1]["note"]).__name__ == "Setting"
        assert engine.global_steps == 1

        for momentum in (0.0, 0.9):
            sgd = engine_of(2, optimizer=partial(torch.optim.SGD, momentum=momentum))
            assert "betas" in refused(sgd, "adam")
            load_checkpoint(sgd, tmp_path / "adam", "a", load_optimizer_states=False)
            train(sgd, 0, 1)
            assert "exp_avg" in refused(sgd, "adam") or not momentum
            train(sgd, 1, 2)

    on_ranks(2, load)


class Setting:
    """A setting of a group that has no safe encoding."""


def test_where_there_is_no_snapshot_a_checkpoint_of_another_form_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        from casnap.integrations.deepspeed import load_checkpoint, save_checkpoint

        engine = engine_of(2)
        train(engine, 0, 1)
        engine.save_checkpoint(str(tmp_path / "own"))
        save_checkpoint(engine, tmp_path / "run")
        caplog.clear()
        assert load_checkpoint(engine, tmp_path / "own") == (None, {})
        if int(os.environ["RANK"]) == 0:
            assert "DeepSpeed's own load_checkpoint loads it" in caplog.text
        with pytest.raises(KeyError, match=r"DeepSpeed's own load_checkpoint loads"):
            load_checkpoint(engine, tmp_path / "own", "global_step1")
        with pytest.raises(StateError, match=r"the folder '.*run' and the tag 'global_step1'"):
            load_checkpoint(engine, tmp_path / "run/global_step1")
        path, _ = load_checkpoint(engine, tmp_path / "run")
        assert path == str(tmp_path / "run/global_step1")

    on_ranks(2, work)


def test_a_checkpoint_that_deepspeed_has_saved_later_stops_a_resume(tmp_path: Path) -> None:
    """In the folder of the snapshot, or in one beside it that ``latest`` names."""

    def work() -> None:
        from casnap.integrations.deepspeed import load_checkpoint, save_checkpoint

        engine, folder = engine_of(2), tmp_path / "run"
        train(engine, 0, 1)
        engine.save_checkpoint(str(folder))
        train(engine, 1, 2)
        taken = save_checkpoint(engine, folder)
        # One that is older than the snapshot is no reason.
        assert load_checkpoint(engine, folder)[0] == taken.path
        # In a copy with new times nobody can tell, so the error says how to go on.
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy, copy_function=shutil.copy)
        with pytest.raises(StateError, match=r"names 'global_step1', .* in such a copy, give load"):
            load_checkpoint(engine, copy)
        assert load_checkpoint(engine, copy, "global_step2")[0] == str(copy / "global_step2")
        (copy / "latest").unlink()
        assert load_checkpoint(engine, copy)[0] == str(copy / "global_step2")
        train(engine, 2, 3)
        engine.save_checkpoint(str(folder))
        with pytest.raises(StateError, match=r"itself has saved after it: engine[.]load_check"):
            load_checkpoint(engine, folder)
        assert load_checkpoint(engine, folder, "global_step2")[0] == taken.path
        engine.save_checkpoint(str(folder))
        with pytest.raises(StateError, match=r"global_step2 holds a snapshot of .* that DeepSpeed"):
            load_checkpoint(engine, folder, "global_step2")
        assert engine.load_checkpoint(str(folder), "global_step3")[0]

    on_ranks(1, work)


def whole_module(engine: Any) -> dict[str, torch.Tensor]:
    return {
        **{name: p.detach() for name, p in engine.module.named_parameters()},
        **dict(engine.module.named_buffers()),
    }


def test_a_witness_by_hand(tmp_path: Path) -> None:
    """As docs/guides/proving-a-resume.md advises: the weights of the module tell."""

    def resumed(*, fault: bool = False) -> None:
        from casnap.integrations.deepspeed import load_checkpoint

        engine = engine_of(2)
        load_checkpoint(engine, tmp_path)
        if fault:
            engine.optimizer.param_groups[1]["lr"] *= 2
        train(engine, 3, 4)
        store, state = Store(tmp_path), {"model": engine.module}
        if fault:
            with pytest.raises(WitnessError, match=r"weights: model/first"):
                store.witness(state, "step_4")
        else:
            assert store.witness(state, "step_4").equal

    def first() -> None:
        from casnap.integrations.deepspeed import save_checkpoint

        engine = engine_of(2)
        train(engine, 0, 3)
        save_checkpoint(engine, tmp_path)
        train(engine, 3, 4)
        assert Store(tmp_path).witness({"model": engine.module}, "step_4").stored

    on_ranks(2, first)
    on_ranks(2, resumed)
    on_ranks(2, partial(resumed, fault=True))
