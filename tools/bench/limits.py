"""What the machine itself can do: raw disk, BLAKE3 and memory copies, with nothing around them."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from tools.bench.measure import drop, files_below, remove, seconds, settle
from tools.bench.settings import MIB, Settings

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 48 * MIB
CORES = len(os.sched_getaffinity(0))
_HASHED_PIECE = 1 * MIB
_COPIED_PIECE = 4 * MIB


def _share(threads: int, work: Callable[[int], None]) -> None:
    """Run ``work(k)`` on each of the threads and wait."""
    running = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


class RawDisk:
    """O_DIRECT writes and reads of a number of bytes, from warm aligned buffers."""

    def __init__(self, settings: Settings, nbytes: int) -> None:
        """Prepare the buffers for ``nbytes`` bytes, rounded up to 4 KiB."""
        self._settings = settings
        self._folder = settings.path("raw", "files")
        whole, rest = divmod(nbytes, PIECE)
        self._sizes = [PIECE] * whole + ([-(-rest // 4096) * 4096] if rest else [])
        self.nbytes = sum(self._sizes)
        self._buffers = [
            mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)
        ]
        noise = os.urandom(PIECE)
        for buffer in self._buffers:
            buffer[:] = noise

    def write(self) -> float:
        """Write durably in the form found fastest; return the seconds, leave no file."""
        self._folder.mkdir(parents=True)
        work = self._write_files if self._settings.write_form == "files" else self._write_big
        settle()
        took = seconds(work)
        remove(self._folder)
        return took

    def prepare_reads(self) -> None:
        """Write the files that ``read`` reads; they stay until ``close``."""
        self._folder.mkdir(parents=True)
        self._write_files()

    def read(self, *, buffered: bool = False) -> float:
        """Read all files with O_DIRECT, or through the empty page cache; return the seconds."""
        threads = self._settings.read_threads
        flags = os.O_RDONLY | (0 if buffered else os.O_DIRECT)
        if buffered:
            drop(self._folder)

        def work(k: int) -> None:
            view = memoryview(self._buffers[k])
            for i in range(k, len(self._sizes), threads):
                descriptor = os.open(self._folder / str(i), flags)
                self._whole(os.preadv(descriptor, [view[: self._sizes[i]]], 0), i)
                os.close(descriptor)

        return seconds(_share, threads, work)

    def close(self) -> None:
        """Delete the files."""
        if self._folder.exists():
            remove(self._folder)

    def _write_files(self) -> None:
        threads = self._settings.write_threads

        def work(k: int) -> None:
            view = memoryview(self._buffers[k])
            for i in range(k, len(self._sizes), threads):
                descriptor = self._create(self._folder / str(i))
                self._whole(os.write(descriptor, view[: self._sizes[i]]), i)
                os.fsync(descriptor)
                os.close(descriptor)

        _share(threads, work)
        self._fsync_folder()

    def _write_big(self) -> None:
        threads = self._settings.write_threads
        descriptor = self._create(self._folder / "big")

        def work(k: int) -> None:
            view = memoryview(self._buffers[k])
            for i in range(k, len(self._sizes), threads):
                self._whole(os.pwrite(descriptor, view[: self._sizes[i]], i * PIECE), i)

        _share(threads, work)
        os.fsync(descriptor)
        os.close(descriptor)
        self._fsync_folder()

    @staticmethod
    def _create(path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)

    def _whole(self, moved: int, i: int) -> None:
        if moved != self._sizes[i]:
            raise OSError(f"moved {moved} of {self._sizes[i]} bytes in one call")

    def _fsync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def calibrated(settings: Settings) -> Settings:
    """Return the settings with the fastest forms of raw disk access, tried in turn.

    The median of the rounds decides, since the speed of a disk drifts.
    """
    nbytes = 4 * PIECE if settings.quick else 12 * PIECE
    rounds = 3
    forms = [
        replace(settings, write_form=form, write_threads=threads)
        for form in ("files", "big")
        for threads in (1, 2)
    ]
    writers = [RawDisk(form, nbytes) for form in forms]
    wrote = [[disk.write() for disk in writers] for _ in range(rounds)]
    best = forms[_fastest(wrote)]
    readers = [replace(best, read_threads=n) for n in (1, 2)]
    disks = [RawDisk(reader, nbytes) for reader in readers]
    disks[0].prepare_reads()
    read = [[disk.read() for disk in disks] for _ in range(rounds)]
    disks[0].close()
    chosen = readers[_fastest(read)]
    print(
        f"raw limits: write {chosen.write_form} x {chosen.write_threads} threads, "
        f"read {chosen.read_threads} threads",
        file=sys.stderr,
    )
    return chosen


def _fastest(rounds: list[list[float]]) -> int:
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    return medians.index(min(medians))


def blake3_seconds(tensors: Iterable[Tensor]) -> float:
    """Hash all tensors in pieces of 1 MiB on all cores; return the seconds."""
    pieces = [
        view[start : start + _HASHED_PIECE]
        for view in map(_bytes_of, tensors)
        for start in range(0, len(view), _HASHED_PIECE)
    ]

    def work(k: int) -> None:
        for piece in pieces[k::CORES]:
            blake3(piece).digest()

    return seconds(_share, CORES, work)


def verified_read_seconds(folder: Path, memory: memoryview) -> float:
    """Read all files of a folder into memory, in pieces of 1 MiB, and hash each, on all cores.

    Args:
        folder: The folder; its files are in the page cache.
        memory: Warm memory, of as many bytes at least.

    Returns:
        The seconds.
    """
    pieces, start = [], 0
    for path in files_below(folder):
        for at in range(0, size := path.stat().st_size, _HASHED_PIECE):
            nbytes = min(_HASHED_PIECE, size - at)
            pieces.append((path, at, memory[start : start + nbytes]))
            start += nbytes

    def work(k: int) -> None:
        for path, at, piece in pieces[k::CORES]:
            descriptor = os.open(path, os.O_RDONLY)
            os.preadv(descriptor, [piece], at)
            os.close(descriptor)
            blake3(piece).digest()

    return seconds(_share, CORES, work)


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def memcpy_seconds(source: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    """Copy a state into warm memory, by torch's threads and by plain ones; the faster counts."""

    def by_torch() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    pieces = [
        (target[name].data_ptr() + start, tensor.data_ptr() + start, size)
        for name, tensor in source.items()
        for start in range(0, tensor.nbytes, _COPIED_PIECE)
        for size in (min(_COPIED_PIECE, tensor.nbytes - start),)
    ]

    def by_threads(k: int) -> None:
        for piece in pieces[k::CORES]:
            ctypes.memmove(*piece)

    return min(seconds(by_torch), seconds(_share, CORES, by_threads))
