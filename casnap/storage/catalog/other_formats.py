"""What is there where no store or snapshot was found: stores below, checkpoints of another form.

A program that has changed libraries finds no snapshot, and would begin its run anew without a word.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from casnap.backends.places import exists, is_file, is_folder, is_taken
from casnap.backends.system_errors import translated
from casnap.errors import BackendError, NotAStoreError, SnapshotExistsError
from casnap.format.names import MARKER, NOTICE_HEAD, STORE_FOLDER
from casnap.format.records import CONFIG_KEY
from casnap.storage.catalog.location import narrow_hint

_MOST = 1000
"""How many names of a folder are looked at."""
_SHOWN = 8
"""How many stores a message names."""
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
        if is_file(path):
            return _FILES.get(path.suffix)
        if not is_folder(path) or exists(path / MARKER):
            return None
        if (form := _folder_form(path)) is not None:
            return form
        names = [entry.name for entry in _entries(path)]
    except (OSError, BackendError):
        # It is only for a hint.
        return None
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else None


def _is_ours(path: Path) -> bool:
    """Whether a file only stands there for programs that look for it (integrations/notices.py)."""
    with translated(str(path)), path.open("rb") as file:
        return file.read(len(NOTICE_HEAD)) == NOTICE_HEAD


def check_no_other_form(folder: Path) -> None:
    """Check that the folder of a new snapshot holds no checkpoint of another library.

    Raises:
        SnapshotExistsError: It does. Whoever then looks for one by this name may find the other.
        BackendError: It cannot be looked at.
    """
    form = _folder_form(folder)
    if form is not None:
        raise SnapshotExistsError(
            f"{folder} holds a checkpoint of {form}, and one name is not for two states: take "
            f"under another name, or remove that one. `casnap import {folder} NAME` imports it as "
            "a snapshot"
        )


def _folder_form(folder: Path) -> str | None:
    """Return the form of a checkpoint that is a folder, judged by the file that each has."""
    for name, form in _FOLDERS.items():
        if is_file(folder / name) and not _is_ours(folder / name):
            return form
    return None


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
    checkpoints = [
        (path, form) for path in map(Path, entries) if (form := form_of(path)) is not None
    ]
    if not checkpoints:
        return ""
    path, form = checkpoints[-1]
    more = f", and {len(checkpoints) - 1} more" if len(checkpoints) > 1 else ""
    return (
        f"{folder} holds no snapshot, but {path.name}, a checkpoint of {form}{more}: "
        f"`casnap import {path} {folder}/NAME` imports it as a snapshot"
    )


def no_store_error(folder: Path) -> NotAStoreError:
    """Return the error for a folder that is in no store: it says what is there instead."""
    if narrow := narrow_hint(folder):
        return NotAStoreError(f"{folder} is not a casnap store, nor in one{narrow}")
    base = f"{folder} is not a casnap store, nor is any folder above it"
    stores = _stores_below(folder)
    if stores:
        more = ", …" if len(stores) > _SHOWN else ""
        return NotAStoreError(
            f"{base}, but there {'are stores' if len(stores) > 1 else 'is a store'} right below: "
            f"{', '.join(stores[:_SHOWN])}{more}. Name one, like {folder / stores[0]}"
        )
    if hint := hint_in(folder):
        return NotAStoreError(f"{base}. {hint}")
    return NotAStoreError(
        f"{base}{hint_at(folder) or f'; make one with `casnap init {folder}`, or check the path'}"
    )


def _stores_below(folder: Path) -> list[str]:
    """Return the names of the stores right in a folder."""
    try:
        entries = _entries(folder)
    except OSError:
        return []
    stores: list[str] = []
    for entry in entries:
        with suppress(BackendError):
            if is_taken(Path(entry.path, STORE_FOLDER, CONFIG_KEY)):
                stores.append(entry.name)
    return sorted(stores)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(islice(entries, _MOST))
