"""Runs a script whose FSDP is for GPUs on CPUs: ``torchrun -m tests.support.fsdp_on_cpus FILE``."""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState

from tests.support.accelerate_fsdp import use_plugin


def main() -> None:
    init = AcceleratorState.__init__

    @functools.wraps(init)
    def keeping(self: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        is_first = not AcceleratorState._shared_state
        init(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if is_first and fsdp_plugin is not None:
            use_plugin(self, fsdp_plugin)

    AcceleratorState.__init__ = keeping
    runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()
