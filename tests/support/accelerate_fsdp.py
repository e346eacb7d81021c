"""FSDP of Accelerate, on CPUs."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def has_fsdp2() -> bool:
    """Return whether this version of Accelerate knows FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    return "fsdp_version" in inspect.signature(FullyShardedDataParallelPlugin).parameters


def use_fsdp(accelerator: Any, version: int = 2, kind: str = "SHARDED_STATE_DICT") -> None:
    """Have an Accelerator use FSDP.

    It leaves the plugin out on CPUs, though all that it does with one works there. So this notes
    what it would note on GPUs.

    Args:
        accelerator: The Accelerator, which has prepared nothing yet.
        version: 1 or 2.
        kind: How its own saves are.
    """
    from accelerate import FullyShardedDataParallelPlugin

    # So the Trainer of Transformers has it, too; a frozen part needs it.
    more = {"use_orig_params": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **more)
    use_plugin(accelerator.state, plugin)
    assert accelerator.is_fsdp2 == (version == 2)


def use_plugin(state: Any, plugin: Any) -> None:
    """Note in the state of an Accelerator on CPUs what it would note for a plugin on GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    # A number of a CPU is not the device that FSDP1 finds the parameters on.
    state.device = PartialState._shared_state["device"] = torch.device("cpu")
