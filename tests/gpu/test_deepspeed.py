"""DeepSpeed on a GPU: each stage, both halves, and an optimizer that is offloaded to the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = pytest.mark.gpu

TRAINING = """
import os, sys
import torch

folder, stage, dtype, offload = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "offload"
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[5], RANK="0", LOCAL_RANK="0")
os.environ.update(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
import deepspeed
from casnap.integrations.deepspeed import async_save_checkpoint, load_checkpoint

deepspeed.init_distributed(dist_backend="nccl")

def made(seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 300))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 20, "loss_scale_window": 2},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]

def train(engine, start, stop):
    for step in range(start, stop):
        torch.manual_seed(step)
        kind = next(engine.module.parameters()).dtype
        loss = engine(torch.randn(2, 300, device="cuda", dtype=kind)).square().mean()
        engine.backward(loss)
        engine.step()

def bits(engine):
    held = [engine.loss_scale() if dtype == "fp16" else 1.0]
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            held.append(parameter.detach().cpu().clone())
        held.append(deepspeed.utils.safe_get_full_fp32_param(parameter).cpu().clone())
    return held

engine = made(0)
train(engine, 0, 4)
pending = async_save_checkpoint(engine, folder)
train(engine, 4, 8)
pending.wait()
wanted = bits(engine)
again = made(1)
train(again, 0, 1)
path, _ = load_checkpoint(again, folder)
assert path is not None
train(again, 4, 8)
for value, other in zip(bits(again), wanted, strict=True):
    assert torch.equal(torch.as_tensor(value), torch.as_tensor(other))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("offload", ["offload", "device"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_goes_on_with_the_same_bits(
    tmp_path: Path, stage: int, dtype: str, offload: str
) -> None:
    pytest.importorskip("deepspeed")
    given = [str(tmp_path / "run"), str(stage), dtype, offload, str(free_port())]
    command = [sys.executable, "-c", TRAINING, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
