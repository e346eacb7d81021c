"""Verify chunks on the devices that a restore has copied them to.

The cores of the host then only read and copy, and what a transfer changes is noticed too. This is
done where a device hashes already, for a take or for ``reuse=True``. A restore has no kernel
compiled: that takes longer than most restores.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from casnap.format.digest import Digest
from casnap.restore.reuse import audit, differing, hashed_there
from casnap.state.devices import devices_of, synchronize_workers
from casnap.storage import Want

_numbers = random.SystemRandom()


class Landings:
    """The devices that verify what one load copies to them.

    Args:
        tensors: The tensors that are filled.

    Attributes:
        devices: The devices.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.devices = set[torch.device]()
        # If nothing has imported it, no device has a hasher, and numpy need not be there.
        if "casnap.state.device_hash" in sys.modules:
            from casnap.state.device_hash import made_hasher

            self.devices = {d for d in devices_of(tensors) if made_hasher(d) is not None}

    def accept(self, part: torch.Tensor) -> bool:
        """Whether a chunk that fills a run of a device's memory is verified there."""
        if part.device not in self.devices:
            return False
        from casnap.state.device_hash import CellRun

        return CellRun(part, (part.nbytes,)).is_hashable

    def settle(
        self, wants: Sequence[Want], read_again: Callable[[set[Digest]], set[Digest]]
    ) -> None:
        """Verify chunks where they lie; have those read again that a device does not confirm.

        Args:
            wants: All wants for chunks that threads have copied to devices.
            read_again: Reads chunks once more, verifies them on the host, and returns those that
                are damaged in the store.

        Raises:
            DeviceError: A chunk is whole in the store, and has other bytes on the device. Or the
                device computes wrong digests.
        """
        by_device: dict[torch.device, list[Want]] = {}
        for want in wants:
            by_device.setdefault(want.on_device.device, []).append(want)
        doubtful = set[Digest]()
        denied: list[Want] = []
        for device, of_device in by_device.items():
            parts = [want.on_device for want in of_device]
            # The threads that copied use the default stream; this thread may use another.
            synchronize_workers(parts)
            pairs = list(zip(of_device, hashed_there(device, parts), strict=True))
            doubtful |= {want.digest for want, digest in pairs if digest != want.digest}
            denied += [want for want, digest in pairs if digest not in (None, want.digest)]
            confirmed = [want for want, digest in pairs if digest == want.digest]
            if confirmed:
                chosen = _numbers.choice(confirmed)
                audit(chosen, chosen.on_device)
        damaged = read_again(doubtful) if doubtful else set[Digest]()
        for want in denied:
            if want.digest not in damaged:
                raise differing(want, want.on_device)
