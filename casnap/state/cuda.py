"""GPUs: waiting for what was begun there, pinned memory, side streams."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from casnap.runtime import buffers
from casnap.runtime.buffers import Slot


def synchronize(contents: Iterable[object]) -> None:
    """Wait for what the calling thread has begun on the devices of these tensors."""
    for device in _devices(contents):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        elif (module := getattr(torch, device.type, None)) is not None:
            # Of other accelerators casnap knows no streams: all that they do ends.
            getattr(module, "synchronize", lambda: None)()


def synchronize_workers(contents: Iterable[object]) -> None:
    """Wait for what threads of casnap have begun on the GPUs of these tensors."""
    for device in _devices(contents):
        if device.type == "cuda":
            torch.cuda.default_stream(device).synchronize()


def _devices(contents: Iterable[object]) -> set[torch.device]:
    tensors = (c for c in contents if isinstance(c, torch.Tensor))
    return {t.device for t in tensors if t.device.type not in ("cpu", "meta")}


def pin(slot: Slot, device: torch.device) -> None:
    """Have the driver of GPUs know a slot, so that copies from and to it need no detour.

    Args:
        slot: The slot.
        device: A GPU that this process uses. The slot serves all, but a thread that names none
            would begin to use the first.
    """
    if slot.unpin is None:
        address = buffers.address_of(slot.view)
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, len(slot.view), 0))
        slot.unpin = partial(runtime.cudaHostUnregister, address)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that casnap copies on beside the caller's work."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
