"""The kernels of ``casnap.state.device_kernels``, compiled for a GPU that is not there.

``python -m tests.support.compiled_kernels`` prints, as JSON, what ptxas says of each for an H100.
It is a process of its own: where ``TRITON_INTERPRET`` is set, nothing can be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from casnap.state import device_kernels as kernels

H100, MI300 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
_POINTERS = {"table": "*i64", "nodes": "*u32", "below": "*u32", "digests": "*i32"}
_KERNELS = {
    "whole leaves": (kernels.hash_leaves, {"whole": True}),
    "any leaves": (kernels.hash_leaves, {"whole": False}),
    "nodes": (kernels.join_nodes, {}),
    "digests": (kernels.put_digests, {}),
}


def compiled(name: str, target: GPUTarget) -> Any:
    """Return what Triton compiles, for arguments as ``hash_batch`` gives them."""
    kernel, chosen = _KERNELS[name]
    constants = {**chosen, "lanes": kernels.LANES}
    signature = {
        argument: "constexpr" if argument in constants else _POINTERS.get(argument, "i32")
        for argument in kernel.arg_names
    }
    # What the allocator of torch gives begins at a multiple of 16 bytes, and Triton sees that.
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument in _POINTERS
        if argument in kernel.arg_names
    }
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=target)


def facts(name: str) -> dict[str, Any]:
    """Return the registers, bytes and loads of a kernel on an H100."""
    program = compiled(name, H100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(program.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        )
    loads = re.findall(r"ld\.global\S*", program.asm["ptx"])
    return {
        **{
            k.lower(): int(v)
            for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage.stdout)
        },
        "loads": sorted({load: loads.count(load) for load in loads}.items()),
    }


if __name__ == "__main__":
    json.dump({name: facts(name) for name in _KERNELS}, sys.stdout)
