"""GPUs: synchronization, pinned memory, side streams."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from casnap.runtime import buffers
from casnap.runtime.buffers import Slot


def synchronize(contents: Iterable[object]) -> None:
    """Wait for the work of the calling thread on the devices of these tensors."""
    for device in _devices(contents):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        elif (module := getattr(torch, device.type, None)) is not None:
            # casnap does not know the streams of other accelerators, so it waits for all work.
            getattr(module, "synchronize", lambda: None)()


def synchronize_workers(contents: Iterable[object]) -> None:
    """Wait for the work of casnap's threads on the GPUs of these tensors."""
    for device in _devices(contents):
        if device.type == "cuda":
            torch.cuda.default_stream(device).synchronize()


def _devices(contents: Iterable[object]) -> set[torch.device]:
    tensors = (c for c in contents if isinstance(c, torch.Tensor))
    return {t.device for t in tensors if t.device.type not in ("cpu", "meta")}


def pin(slot: Slot, device: torch.device) -> None:
    """Register a slot as pinned memory, so that the GPU driver copies directly from and to it.

    Args:
        slot: The slot.
        device: A GPU that this process uses. The slot then serves all GPUs, but without a device
            torch would also initialise the first one.
    """
    if slot.unpin is None:
        address = buffers.address_of(slot.view)
        with torch.cuda.device(device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, len(slot.view), 0))
        slot.unpin = partial(runtime.cudaHostUnregister, address)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return casnap's own stream for copies, beside the stream of the caller."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
