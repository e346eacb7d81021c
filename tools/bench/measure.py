"""Clocks, disk caches and memory: how a figure is taken."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

Times = dict[str, list[float]]
"""Seconds or ratios, by contender; one for each repetition or more."""
_PIECE = 16 << 20


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Return how long one call takes, in seconds."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def settle() -> None:
    """Leave nothing behind that would be paid for by the next contender."""
    gc.collect()
    os.sync()


def remove(path: Path) -> None:
    """Delete a file or a tree and wait until the disk has done it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    settle()


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names in an order that differs from repetition to repetition."""
    if not names:
        return []
    shift = turn % len(names)
    return [*names[shift:], *names[:shift]]


def files_below(path: Path) -> Iterator[Path]:
    """Yield the file itself, or every file below a folder."""
    if path.is_file():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name)


def fsync_tree(path: Path) -> None:
    """Make a file, or a tree and its folders, durable."""
    for file in files_below(path):
        _fsync(file)
    for folder, _, _ in os.walk(path):
        _fsync(Path(folder))
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def warm(path: Path) -> None:
    """Read every file once, so that the page cache holds it."""
    buffer = bytearray(_PIECE)
    for file in files_below(path):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop(path: Path) -> None:
    """Take every file below a path out of the page cache, and all else where that is allowed."""
    os.sync()
    for file in files_below(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    drop_all()


def drop_all() -> bool:
    """Drop the whole page cache, dentries and inodes; False where that is not allowed."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def private_bytes() -> int:
    """Return this process's RssAnon + RssShmem in bytes.

    Shared anonymous maps are counted too, so that a pool cannot hide in one.
    """
    total = 0
    with Path("/proc/self/status").open() as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) << 10
    return total


class PeakMemory:
    """Sample this process's memory every 5 ms while the block runs.

    Attributes:
        extra: After the block: the peak less what was there before it, in bytes.
    """

    def __init__(self) -> None:
        """Prepare; nothing is sampled yet."""
        self.extra = 0
        self._stop = threading.Event()
        self._peak = 0
        self._before = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        """Give freed memory back to the system, note the level, and start to sample."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = self._peak = private_bytes()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop and work out the peak."""
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, private_bytes())
        self.extra = self._peak - self._before

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self._peak = max(self._peak, private_bytes())
