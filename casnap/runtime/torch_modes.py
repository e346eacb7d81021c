"""Run torch code of casnap outside the modes that the caller has set.

Torch keeps some modes for each thread: inference mode, a default device, a mode that records or
fakes operations. The caller's own code, such as a ``state_dict()``, runs in these modes. Casnap's
own code must not: its tensors would lie on another device, have no values, or be read-only for
other threads of casnap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_torch_modes() -> Iterator[None]:
    """Switch off the torch modes of this thread for a block of code, or for a decorated function.

    In the block torch records no graph, and new tensors are ordinary tensors on the CPU.
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
    """Return a context in which the transforms of ``torch.func`` do not wrap new tensors."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def fill(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy ``source`` into ``target``, on any thread. Both may be tensors of inference mode."""
    inference = target.is_inference()
    if inference == torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
        target.copy_(
            source, non_blocking
        )  # for many small tensors, entering the modes would take longer
        return
    with torch.inference_mode(mode=inference), torch.no_grad():
        target.copy_(source, non_blocking)
