"""Compute the BLAKE3 of cells in a device's memory, so that their bytes stay there.

The host gets only digests: for each cell 32 bytes, and a tag of 4 bytes, which names the call and
the cell. The kernels are in ``device_kernels.py``. They need Triton, which every build of torch for
CUDA, ROCm or XPU brings along.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from casnap.errors import DeviceError, UnavailableError
from casnap.format.digest import Digest, digest_of, split_digests
from casnap.runtime.environment import hashes_on_device
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.threads import Worker
from casnap.state.devices import as_current, name_of

_log = logging.getLogger("casnap")

LEAF_BYTES = 1024
"""The bytes that one lane hashes; BLAKE3 calls them a chunk."""
WORD_BYTES = 4
_VECTOR_BYTES = 16
# The nodes of a batch take 54 bytes of the device's memory for each leaf: 27 MiB.
_BATCH_LEAVES = 512 << 10
_NODE_WORDS = 9
# These bounds keep the numbers in the kernels, tags among them, below 2³¹.
_MOST_CELLS, _MOST_CALLS = 1 << 27, 1 << 30
_PROOF_BYTES = 1 << 20


class CellRun(NamedTuple):
    """Cells that lie one after the other in a device's memory.

    Attributes:
        memory: A contiguous tensor that begins with the first cell. Nothing may write to it.
        sizes: The bytes of each cell.
    """

    memory: torch.Tensor
    sizes: Sequence[int]

    @property
    def is_hashable(self) -> bool:
        """Whether the device can hash the run: each cell has bytes, and begins at a multiple of 4.

        Cells of some views begin within a word, as does a cell after one whose size is not a
        multiple of 4.
        """
        begins = self.memory.data_ptr() % WORD_BYTES == 0
        inner = all(size % WORD_BYTES == 0 for size in self.sizes[:-1])
        return begins and inner and all(self.sizes)


class Batch(NamedTuple):
    """Cells that are hashed together.

    Attributes:
        first: The number of the first cell.
        cells: The number of cells.
        leaves: How many leaves of BLAKE3 (pieces of 1,024 bytes) all cells have.
        levels: How many levels of nodes the largest cell has above its leaves.
        is_aligned: Whether each cell begins at a multiple of 16 bytes.
        has_ends: Whether any cell ends with a part of a leaf.
    """

    first: int
    cells: int
    leaves: int
    levels: int
    is_aligned: bool
    has_ends: bool


HashBatch: TypeAlias = Callable[[torch.Tensor, Batch, int, torch.Tensor], None]
"""Hashes a batch on the current stream, as ``device_kernels.hash_batch`` does."""


class DeviceHasher:
    """Computes the BLAKE3 of cells in the memory of one device.

    Args:
        device: The device.
        hash_batch: The function that launches the kernels.
    """

    def __init__(self, device: torch.device, hash_batch: HashBatch) -> None:
        self._device = device
        self._hash_batch = hash_batch

    def digests(self, runs: Iterable[CellRun]) -> list[Digest]:
        """Return the digests of all cells, in order.

        The device computes them on the current stream of the calling thread, after the work that
        the thread has begun there. This call waits for them.

        Args:
            runs: Cells in runs for which :attr:`CellRun.is_hashable` holds.

        Raises:
            DeviceError: A digest has the tag of another call or another cell.
            torch.OutOfMemoryError: There is no room for the nodes of a batch.
        """
        runs = list(runs)  # keeps their memory until the end
        spans = [span for run in runs for span in _spans(run)]
        if not spans:
            return []
        assert len(spans) < _MOST_CELLS
        call = _numbers.randrange(1, _MOST_CALLS)
        # Aligned cells come first, since a batch has aligned cells only, or others only.
        order = sorted(range(len(spans)), key=lambda i: spans[i][0] % _VECTOR_BYTES != 0)
        spans = [spans[i] for i in order]
        batches, bases = _batches(spans)
        with as_current(self._device):
            rows = np.array([*zip(*spans, strict=True), bases])
            table = torch.from_numpy(rows).to(self._device)
            # Where no kernel writes, there stays a number that is no tag of this call.
            shape = (_NODE_WORDS, len(spans))
            on_device = torch.full(shape, call - 1, dtype=torch.int32, device=self._device)
            for batch in batches:
                self._hash_batch(table, batch, call, on_device)
            columns = on_device.cpu().numpy()
        self._check(columns[-1], call)
        digests = split_digests(np.ascontiguousarray(columns[:-1].T).tobytes())
        in_order = [digests[0]] * len(digests)
        for i, digest in zip(order, digests, strict=True):
            in_order[i] = digest
        return in_order

    def digests_if_able(self, runs: Iterable[CellRun]) -> list[Digest] | None:
        """Return the digests as :meth:`digests` does; None if the device cannot hash the cells.

        If the device lacks memory, a later call may succeed. After any other failure, which is
        logged, the device hashes no more in this process.

        Raises:
            DeviceError: A digest has the tag of another call or another cell.
        """
        if _hashers.get(self._device) is not self:
            return None
        try:
            return self.digests(runs)
        except torch.OutOfMemoryError:
            return None
        except DeviceError:
            raise
        except Exception as e:  # noqa: BLE001 - as in _proven
            _hashers[self._device] = None
            _log_hashes_not(self._device, e)
            return None

    def _check(self, tags: np.ndarray, call: int) -> None:
        """Raise a DeviceError if a digest has the tag of another call or another cell."""
        wrong = int(np.count_nonzero(tags != np.arange(call, call + len(tags))))
        if wrong:
            raise distrusted(
                self._device, f"{wrong} of {len(tags)} digests are of another call or another cell"
            )

    def prove(self) -> None:
        """Hash random bytes by each path through the kernels, and compare with the host's BLAKE3.

        Raises:
            DeviceError: A digest is wrong.
        """
        data = memoryview(bytearray(os.urandom(_PROOF_BYTES)))
        with as_current(self._device):
            memory = torch.frombuffer(data, dtype=torch.uint8).to(self._device)
        # All bytes; a cell whose last leaf is not whole; a cell that begins at no multiple of 16.
        cells = (0, len(data)), (len(data) // 2, len(data) // 3 | 1), (WORD_BYTES, LEAF_BYTES * 70)
        runs = [CellRun(memory[start : start + size], (size,)) for start, size in cells]
        expected = [digest_of(data[start : start + size]) for start, size in cells]
        if self.digests(runs) != expected:
            raise distrusted(self._device, "of a random megabyte, it computes another BLAKE3")


def _spans(run: CellRun) -> Iterable[tuple[int, int]]:
    """Yield the address and the length in bytes of each cell."""
    assert run.is_hashable
    assert sum(run.sizes) <= run.memory.nbytes
    address = run.memory.data_ptr()
    for size in run.sizes:
        yield address, size
        address += size


def _batches(spans: Sequence[tuple[int, int]]) -> tuple[list[Batch], list[int]]:
    """Divide cells into batches, each of aligned cells only, or of unaligned ones only.

    Args:
        spans: The address of each cell, and its bytes.

    Returns:
        The batches; and for each cell, how many leaves of its batch come before it.
    """
    # One plain loop: a take waits for it, and there may be thousands of cells.
    batches, bases = list[Batch](), list[int]()
    first = before = most = 0
    was_aligned = has_ends = False
    for i, (address, size) in enumerate(spans):
        leaves, is_aligned = -(-size // LEAF_BYTES), address % _VECTOR_BYTES == 0
        if i > first and (is_aligned != was_aligned or before + leaves > _BATCH_LEAVES):
            levels = (most - 1).bit_length()
            batches.append(Batch(first, i - first, before, levels, was_aligned, has_ends))
            first, before, most, has_ends = i, 0, 0, False
        was_aligned = is_aligned
        bases.append(before)
        before += leaves
        most = max(most, leaves)
        has_ends |= size % LEAF_BYTES != 0
    levels = (most - 1).bit_length()
    batches.append(Batch(first, len(spans) - first, before, levels, was_aligned, has_ends))
    return batches, bases


# --- one for each device ----------------------------------------------------------------------

_numbers = random.SystemRandom()
_lock = new_lock()
# The hasher of each device; None if the device cannot hash.
_hashers: dict[torch.device, DeviceHasher | None] = {}
_distrusted: list[torch.device] = []
# The devices whose hashers threads are making.
_in_the_making: set[torch.device] = set()
in_child(_in_the_making.clear)


def hasher_of(device: torch.device) -> DeviceHasher | None:
    """Return the hasher of a device; None if the host has to hash its bytes.

    There is none for the CPU, without Triton, with ``CASNAP_DEVICE_HASH=off``, where Triton cannot
    compile, and after a wrong digest. The first call for a device compiles the kernels, and checks
    their digests against those of the host.

    Raises:
        DeviceError: The device computes wrong digests.
    """
    if not _may_hash(device):
        return None
    with _lock:
        if device not in _hashers:
            try:
                _hashers[device] = _proven(device)
            except torch.OutOfMemoryError:
                return None  # perhaps there is memory next time
        return _hashers[device]


def made_hasher(device: torch.device) -> DeviceHasher | None:
    """Return the hasher of a device if it is ready; else None, and nothing is begun."""
    return _hashers.get(device) if _may_hash(device) else None


def _may_hash(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and not _distrusted and hashes_on_device()


def hasher_if_made(device: torch.device) -> DeviceHasher | None:
    """Return the hasher of a device if it is ready; else return None, and let a thread make it.

    So nobody waits for a compiler. If the device computes wrong digests, the thread logs that.
    """
    if not _may_hash(device):
        return None
    if device not in _hashers and device not in _in_the_making:
        _in_the_making.add(device)
        try:
            Worker(partial(_make, device), "casnap-device-hash", in_background=True).start()
        except UnavailableError:
            _in_the_making.discard(device)
    return _hashers.get(device)


def _make(device: torch.device) -> None:
    try:
        hasher_of(device)
    except DeviceError as e:
        _log.error("%s", e)
    finally:
        _in_the_making.discard(device)


def _proven(device: torch.device) -> DeviceHasher | None:
    try:
        from casnap.state import device_kernels
    except ImportError:
        return None
    try:
        if not device_kernels.runs_on(device):
            return None
        hasher = DeviceHasher(device, device_kernels.hash_batch)
        hasher.prove()
    except (DeviceError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # noqa: BLE001 - Triton, its compilers and drivers raise what they like
        _log_hashes_not(device, e)
        return None
    return hasher


def _log_hashes_not(device: torch.device, error: Exception) -> None:
    _log.warning(
        "%s does not hash, so what it holds is copied to the host for that: %s", device, error
    )


def check_trusted(device: torch.device) -> None:
    """Check that a device has computed no wrong digest so far.

    Raises:
        DeviceError: The device has computed one.
    """
    if device in _distrusted:
        raise DeviceError(
            f"{name_of(device)} has hashed some of this, and has since computed a wrong digest"
        )


def distrusted(device: torch.device, reason: str) -> DeviceError:
    """Stop hashing on devices in this process; return the error to raise.

    Args:
        device: The device that computed a wrong digest.
        reason: What was wrong, for the message.
    """
    _distrusted.append(device)
    return DeviceError(
        f"{name_of(device)} does not hash as it should: {reason}. From now on this process hashes "
        "on the host alone; with CASNAP_DEVICE_HASH=off it does from the start. The device, its "
        "driver or Triton may be at fault"
    )
