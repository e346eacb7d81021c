"""Accelerators: wait for them, pin memory for them, and copy to the host on a side stream.

These functions use the module that torch has for a device: ``torch.cuda`` (also ROCm),
``torch.xpu``, or the one that another backend registers. If a device has no streams, they wait for
the whole device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch

from casnap.runtime import buffers
from casnap.runtime.buffers import Slot

_log = logging.getLogger("casnap")
# A flag of cudaHostRegister: the memory is pinned for all devices.
_PORTABLE = 1


def _module_of(device: torch.device) -> Any:
    """Return torch's module for a device, such as ``torch.cuda``; None if there is none."""
    return getattr(torch, device.type, None)


def synchronize(contents: Iterable[object]) -> None:
    """Wait for the work that the calling thread has begun on the devices of these tensors."""
    _synchronize(devices_of(contents))


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        module = _module_of(device)
        if hasattr(module, "current_stream"):
            module.current_stream(device).synchronize()
        elif hasattr(module, "synchronize"):
            module.synchronize()


def synchronize_workers(contents: Iterable[object]) -> None:
    """Wait for the work of this thread and of casnap's threads on the devices of these tensors.

    casnap's threads use the default stream, as every new thread does.
    """
    devices = devices_of(contents)
    _synchronize(devices)
    for device in devices:
        module = _module_of(device)
        if hasattr(module, "default_stream"):
            module.default_stream(device).synchronize()
        elif hasattr(module, "current_stream"):
            module.synchronize(device)


def synchronize_devices(contents: Iterable[object]) -> None:
    """Wait for the work that all threads have begun on the devices of these tensors."""
    for device in devices_of(contents):
        module = _module_of(device)
        if hasattr(module, "synchronize"):
            module.synchronize(device)


def devices_of(contents: Iterable[object]) -> set[torch.device]:
    """Return the accelerators that these tensors are on."""
    # To ask for the device takes longer than these two questions, and most tensors have none.
    return {
        each.device
        for each in contents
        if isinstance(each, torch.Tensor) and not (each.is_cpu or each.is_meta)
    }


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes a device the current one of its kind."""
    module = _module_of(device)
    context: AbstractContextManager[object] = (
        module.device(device) if hasattr(module, "device") else nullcontext()
    )
    return context


def name_of(device: torch.device) -> str:
    """Return the name of a device, with its model if torch knows it."""
    module = _module_of(device)
    if not hasattr(module, "get_device_name"):
        return str(device)
    return f"{device} ({module.get_device_name(device)})"


def pin(slot: Slot, device: torch.device) -> bool:
    """Register a slot as pinned memory, so that the driver copies directly from and to it.

    Only CUDA and ROCm can pin memory that is allocated already. Other drivers copy through memory
    of their own, and so does CUDA's if the memory cannot be pinned.

    Args:
        slot: The slot.
        device: A device that this process uses. The pinned slot serves all devices of that kind. If
            no device were given, torch would initialise the first one too.

    Returns:
        Whether the slot is pinned now.
    """
    module = _module_of(device)
    if slot.unpin is not None or not hasattr(module, "cudart"):
        return slot.unpin not in (None, _do_nothing)
    address = buffers.address_of(slot.view)
    with module.device(device):
        runtime = module.cudart()
        # Set before the memory is registered: if it were freed and never unregistered, the driver
        # would copy into freed memory.
        slot.unpin = partial(runtime.cudaHostUnregister, address)
        if int(runtime.cudaHostRegister(address, len(slot.view), _PORTABLE)):
            slot.unpin = _do_nothing  # so no later call tries again
            with suppress(RuntimeError):
                torch.ones(1, device=device)  # the next kernel of this thread gets the error again
            _log_pageable(device.type)
            return False
    return True


def _do_nothing() -> None:
    """Unpin nothing: this is the ``unpin`` of a slot that could not be pinned."""


@cache
def _log_pageable(kind: str) -> None:
    _log.warning("%s: the driver pins no more memory; copies from and to the host are slow", kind)


_side_streams: dict[torch.device, Any] = {}


def begin_copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None] | None:
    """Begin to copy a tensor to the host, while the caller's stream goes on.

    Args:
        target: Memory of the host, in a slot that is pinned. It must not be given back before the
            copy has ended.
        source: A tensor on a device. It must not be freed before the copy has ended.

    Returns: A function that waits until the copy has ended; None if it has ended already, as on a
    device without streams.
    """
    device = source.device
    module = _module_of(device)
    if not hasattr(module, "Stream"):
        target.copy_(source)
        return None
    if device not in _side_streams:
        _side_streams[device] = module.Stream(device)
    stream = _side_streams[device]
    # The copy reads what the caller's stream is still to write.
    stream.wait_stream(module.current_stream(device))
    try:
        with module.stream(stream):
            target.copy_(source, non_blocking=True)
            event = module.Event()
            event.record(stream)
    except BaseException:
        stream.synchronize()  # the copy may have begun
        raise
    wait: Callable[[], None] = event.synchronize
    return wait
