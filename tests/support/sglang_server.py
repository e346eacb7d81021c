"""SGLang's server on a CPU without its kernels: ``python -m tests.support.sglang_server ...``.

PyPI has `sgl_kernel` for GPUs alone, and SGLang's own engine for CPUs is built from its sources.
It imports names from there, but calls none of them on a CPU without AMX: torch does the arithmetic.
So here these names are there, and raise an error if they are called. The processes that the server
spawns import this module too, as `__mp_main__`.
"""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import version
from types import ModuleType
from typing import Any, NoReturn

import torch


class _Kernels(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel has no {name} here")

        return missing


def stand_in() -> None:
    """Have `sgl_kernel`, and a torchvision that can be imported."""
    sys.modules.setdefault("sgl_kernel", _Kernels("sgl_kernel"))
    # A torchvision that was built for CUDA does not define its operators where torch is for CPUs;
    # and then says that they do not exist.
    if torch.version.cuda is None and "+cpu" not in version("torchvision"):
        for name in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)


if __name__ in ("__main__", "__mp_main__"):
    stand_in()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
