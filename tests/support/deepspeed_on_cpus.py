"""DeepSpeed on the CPU ranks of a test."""

from __future__ import annotations

import os
from typing import Any


def import_deepspeed() -> Any:
    """Import DeepSpeed for CPUs, with collectives of gloo.

    Its own, in shared memory, would be compiled first: into one folder for all versions, under a
    lock that a killed process leaves behind. Another version compiles them anew.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
