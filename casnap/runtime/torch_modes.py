"""Torch as it is by default: what casnap does with tensors does not depend on its caller's modes.

Some modes belong to a thread: inference mode, a default device, a mode that records or fakes what
is done. The caller's own code, a ``state_dict()`` say, runs in them; casnap's must not: what it
made would be on another device, without values, or not to be written to by its other threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def plain() -> Iterator[None]:
    """Leave the modes of this thread for a block of code, or for a function.

    No graph is recorded, and what is made are ordinary tensors on the CPU, that anybody can use.
    """
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        _transforms_left(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
    ):
        yield


def _transforms_left() -> AbstractContextManager[object]:
    """Leave the functions that torch.func transforms, which wrap all that is made in them."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor, also one that was made in inference mode, from any thread."""
    inference = target.is_inference()
    if inference == torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
        target.copy_(source)  # where there are many small ones, the modes would cost more
        return
    with torch.inference_mode(mode=inference), torch.no_grad():
        target.copy_(source)
