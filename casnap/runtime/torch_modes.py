"""Running torch without the caller's modes.

Some modes belong to a thread: inference mode, a default device, a mode that records or fakes
operations. The caller's own code, such as a ``state_dict()``, runs in these modes. Casnap's code
must not: its tensors would be on another device, have no values, or be read-only for its other
threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def without_torch_modes() -> Iterator[None]:
    """Leave the modes of this thread for a block of code, or for a decorated function.

    There torch records no graph, and new tensors are ordinary tensors on the CPU.
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
    """Leave the transforms of torch.func, which wrap all new tensors."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def fill(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy ``source`` into ``target``, from any thread. They may be tensors of inference mode."""
    inference = target.is_inference()
    if inference == torch.is_inference_mode_enabled() and not torch.is_grad_enabled():
        target.copy_(
            source, non_blocking
        )  # for many small tensors, entering the modes would take longer
        return
    with torch.inference_mode(mode=inference), torch.no_grad():
        target.copy_(source, non_blocking)
