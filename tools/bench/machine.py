"""The lines above the table: the machine, the versions, how it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from tools.bench.limits import CORES
from tools.bench.settings import GIB, Settings

_VERSIONS = ("casnap", "torch", "safetensors", "torchsnapshot", "blake3", "lmdb")


def heading(settings: Settings, took: float) -> str:
    """Return two paragraphs: the machine, and the meaning of the columns."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    how = (
        f"raw writes: {settings.write_form} of 48 MiB"
        if settings.write_form == "files"
        else "raw writes: one big file"
    )
    threads = f"{settings.write_threads} thread(s), raw reads: {settings.read_threads} thread(s)"
    return (
        f"Machine: {_processor()}, {CORES} cores, {memory:.0f} GiB, Linux {platform.release()}, "
        f"{_file_system(settings.folder)}; Python {platform.python_version()}, {_versions()}; "
        f"{how}, {threads}; {'quick, ' if settings.quick else ''}{settings.repeat} interleaved "
        f"repetitions, {took / 60:.1f} minutes.\n\n"
        "Every save is synced. Medians; a ratio is taken within each repetition against what was "
        "measured beside it (a limit: the mean of the run before and the run after), then its "
        "median (smallest–largest). Memory is RssAnon + RssShmem, peak less before."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return platform.machine()


def _file_system(folder: str) -> str:
    """Return the type of the file system that holds the folder."""
    path = str(Path(folder).resolve())
    best = ("", "unknown file system")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _versions() -> str:
    found = []
    for name in _VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)" if name != "casnap" else "casnap (this tree)")
    return ", ".join(found)
