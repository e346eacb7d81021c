"""Checkpoints of another form, where a store or a snapshot was looked for.

A program that has changed libraries finds no snapshot, and would begin its run anew without a word.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from casnap.format.names import MARKER

_MOST = 1000
"""How many names of a folder are looked at."""
_FILES = {
    ".safetensors": "safetensors",
    ".pt": "torch.save",
    ".pth": "torch.save",
    ".ckpt": "torch.save",
    ".bin": "torch.save",
}
_FOLDERS = {".metadata": "torch.distributed.checkpoint", ".snapshot_metadata": "TorchSnapshot"}


def form_of(path: Path) -> str | None:
    """Return the form of a checkpoint that ``casnap import`` reads, judged by names; or None."""
    try:
        if path.is_file():
            return _FILES.get(path.suffix)
        if not path.is_dir() or (path / MARKER).exists():
            return None
        for name, form in _FOLDERS.items():
            if (path / name).is_file() and not _is_ours(path / name):
                return form
        names = [entry.name for entry in _entries(path)]
    except OSError:
        return None
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else None


def _is_ours(path: Path) -> bool:
    """Whether a file only stands there for programs that look for it (integrations/notices.py)."""
    with path.open("rb") as file:
        return b"casnap" in file.read(32)


def hint_at(path: Path) -> str:
    """Return what an error is to add if there is a checkpoint of another form; "" if not."""
    form = form_of(path)
    if form is None:
        return ""
    return f". There is a checkpoint of {form}, which `casnap import` imports as a snapshot"


def hint_in(folder: Path) -> str:
    """Return what to say of a folder that holds checkpoints of another form; "" if it does not."""
    try:
        entries = sorted(
            _entries(folder), key=lambda entry: entry.stat(follow_symlinks=False).st_mtime
        )
    except OSError:
        return ""
    found = [(path, form) for path in map(Path, entries) if (form := form_of(path)) is not None]
    if not found:
        return ""
    path, form = found[-1]
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{folder} holds no snapshot, but {path.name}, a checkpoint of {form}{more}: "
        f"`casnap import {path} {folder}/NAME` imports it as a snapshot"
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(islice(found, _MOST))
