"""Keep chunks that tensors already hold: hash the live cells, and read only those that differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from msgspec import Struct

from casnap.errors import DeviceError
from casnap.format.digest import Digest, digest_of
from casnap.runtime.buffers import view_at
from casnap.runtime.threads import Crew, SharedItems, cores
from casnap.state.devices import synchronize, synchronize_workers
from casnap.storage import Want

# How much is hashed together, so that a device needs few launches. A part that is not contiguous is
# copied for that, which takes memory, so its bytes count several times.
_WINDOW_BYTES, _WINDOW_CELLS, _FOR_A_COPY = 256 << 20, 1 << 14, 4
_MOST_THREADS = 8
# One thread hashes fewer bytes than these in less time than a second thread needs to start.
_SHARE_BYTES = 1 << 20
_numbers = random.SystemRandom()


class Candidate(Struct, frozen=True):
    """A chunk to read, unless a live tensor holds its elements already.

    Attributes:
        want: The chunk.
        part: The part of the live tensor that may hold these elements.
        keep: Called instead of reading the chunk, if the part holds the elements. If another tensor
            is to be filled, it copies the elements there.
    """

    want: Want
    part: torch.Tensor
    keep: Callable[[], None]


def lacking(candidates: Iterable[Want | Candidate]) -> Iterator[Want]:
    """Yield the chunks that no tensor holds; call ``keep`` of the other candidates.

    The part of each candidate is hashed, and its digest is compared with that of the chunk. A part
    on a device is hashed on the calling thread's current stream of the device, a part on the host
    by threads. Work that writes to a part may still be under way when this is called.

    Args:
        candidates: The chunks. A chunk without such a part is a plain ``Want``.

    Raises:
        DeviceError: A device has computed a wrong digest.
    """
    window, nbytes = list[Candidate](), 0
    for each in candidates:
        if isinstance(each, Want):
            yield each
            continue
        window.append(each)
        nbytes += each.want.nbytes * (1 if each.part.is_contiguous() else _FOR_A_COPY)
        if nbytes >= _WINDOW_BYTES or len(window) == _WINDOW_CELLS:
            yield from _lacking_of(window)
            window, nbytes = [], 0
    yield from _lacking_of(window)


def _lacking_of(window: Sequence[Candidate]) -> list[Want]:
    """Return the chunks of some candidates whose parts do not have the chunks' digests.

    For the other candidates, ``keep`` is called at once, since reads of later chunks may overwrite
    the parts.

    Args:
        window: The candidates, which are hashed together.
    """
    wants = list[Want]()
    by_device: dict[torch.device, list[Candidate]] = {}
    for each in window:
        by_device.setdefault(each.part.device, []).append(each)
    for device, candidates in by_device.items():
        parts = [each.part for each in candidates]
        # Threads may have begun to fill the same memory under another key.
        synchronize_workers(parts)
        digests = _by_host(parts) if device.type == "cpu" else hashed_there(device, parts)
        pairs = list(zip(candidates, digests, strict=True))
        kept = [each for each, digest in pairs if digest == each.want.digest]
        wants += [each.want for each, digest in pairs if digest != each.want.digest]
        if kept and device.type != "cpu":
            chosen = _numbers.choice(kept)
            audit(chosen.want, chosen.part)
        for each in kept:
            each.keep()
    # The reads that follow may use other streams than the copies of kept parts: wait for these.
    synchronize(each.part for each in window)
    return wants


def _by_host(parts: Sequence[torch.Tensor]) -> list[Digest]:
    digests: dict[int, Digest] = {}
    nbytes = sum(part.nbytes for part in parts)
    threads = max(1, min(cores(), _MOST_THREADS, nbytes // _SHARE_BYTES))
    with Crew() as crew:
        source = SharedItems(enumerate(parts), crew)

        def work() -> None:
            for i, part in source:
                digests[i] = _digest(part)

        crew.start(work, threads - 1)
        work()
    return [digests[i] for i in range(len(parts))]


def _digest(part: torch.Tensor) -> Digest:
    contiguous = part if part.is_cpu else part.to("cpu")
    contiguous = contiguous.contiguous()
    return digest_of(view_at(contiguous.data_ptr(), contiguous.nbytes))


def hashed_there(device: torch.device, parts: Sequence[torch.Tensor]) -> list[Digest | None]:
    """Return the digest of each part, computed on the device; None if the device cannot hash it.

    Args:
        device: The device that holds the parts.
        parts: Parts of tensors.

    Raises:
        DeviceError: A digest is of other bytes.
    """
    from casnap.state.device_hash import CellRun, hasher_of  # which needs numpy

    digests: list[Digest | None] = [None] * len(parts)
    hasher = hasher_of(device)
    if hasher is None:
        return digests
    hashable = list[int]()

    def runs() -> Iterator[CellRun]:
        for i, part in enumerate(parts):
            run = CellRun(part.contiguous(), (part.nbytes,))
            if run.is_hashable:
                hashable.append(i)
                yield run

    computed = hasher.digests_if_able(runs())
    if computed is None:
        return digests
    for i, digest in zip(hashable, computed, strict=True):
        digests[i] = digest
    return digests


def audit(want: Want, part: torch.Tensor) -> None:
    """Check a digest that a device has computed, by hashing the same part on the host.

    Args:
        want: The chunk whose digest the part has, according to the device.
        part: A part of a tensor.

    Raises:
        DeviceError: The host computes another digest.
    """
    if _digest(part) != want.digest:
        raise differing(want, part)


def differing(want: Want, part: torch.Tensor) -> DeviceError:
    """Return the error for a chunk that has another digest on its device; trust no device now."""
    from casnap.state.device_hash import distrusted

    return distrusted(
        part.device,
        f"the bytes of a chunk of {want.path} have another BLAKE3, unless another thread or stream "
        "writes to it meanwhile",
    )
