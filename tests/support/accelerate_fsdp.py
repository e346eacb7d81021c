"""FSDP of Accelerate, on CPUs."""

from __future__ import annotations

import inspect
from typing import Any


def has_fsdp2() -> bool:
    """Return whether this version of Accelerate knows FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    return "fsdp_version" in inspect.signature(FullyShardedDataParallelPlugin).parameters


def use_fsdp(accelerator: Any) -> None:
    """Have an Accelerator use FSDP2.

    It leaves the plugin out on CPUs, though all that it does with one works there. So this notes
    what it would note on GPUs.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
