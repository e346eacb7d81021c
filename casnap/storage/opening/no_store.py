"""Errors where no store or snapshot was found: they name stores below, markers, other checkpoints.

A program that has just changed to casnap finds no snapshot. Without a word about its old
checkpoints, it would begin its run anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from casnap.backends import Backend
from casnap.backends.local.local_paths import exists, is_file, is_folder, is_link, is_taken
from casnap.backends.local.system_errors import translated
from casnap.errors import PLACE_ERRORS, CasnapError, NotAStoreError, SnapshotExistsError
from casnap.format.decoding import json_decoder
from casnap.format.names import MARKER, NOTICE_HEAD, STORE_FOLDER
from casnap.format.records import CONFIG_KEY
from casnap.storage.opening.location import not_served_text

_MOST = 1000
"""The most names of a folder to look at."""
_SHOWN = 8
"""The most stores that a message names."""


class Form(NamedTuple):
    """A form of checkpoints of another library.

    Attributes:
        name: The name of the form in messages.
        telltales: Globs. A checkpoint of this form is a file that one of them matches, or a folder
            with such a file.
        is_sure: Whether no other files match the globs.
        reader: The program that reads the form, if ``casnap import`` does not; else "".
    """

    name: str
    telltales: tuple[str, ...]
    is_sure: bool = True
    reader: str = ""

    @property
    def advice(self) -> str:
        """How to read a checkpoint of the form, in words after "a checkpoint of {name}, which"."""
        return f"{self.reader} loads" if self.reader else "`casnap import` imports as a snapshot"


_SAFETENSORS = Form("safetensors", ("*.safetensors",), is_sure=False)
_FILES = (
    _SAFETENSORS,
    Form("torch.save", ("*.pt", "*.pth", "*.ckpt", "*.bin"), is_sure=False),
)
_FOLDERS = (
    Form("torch.distributed.checkpoint", (".metadata",)),
    Form("TorchSnapshot", (".snapshot_metadata",)),
    Form("DeepSpeed", ("*mp_rank_*_states.pt",), reader="DeepSpeed's own load_checkpoint"),
    Form("Accelerate", ("random_states_0.pkl",), reader="Accelerate's own load_state"),
    _SAFETENSORS,
    Form("torch_checkpointing", ("metadata.pkl", "*_0.pt"), is_sure=False),
)
"""The forms of folders. The first one that matches counts."""
_LATEST = "latest"
"""DeepSpeed writes the name of its last checkpoint into this file, beside the checkpoint."""


def form_of(path: Path) -> Form | None:
    """Return the form of another library's checkpoint, judged by names; None if it is none."""
    try:
        if is_file(path):
            return next((form for form in _FILES if _matches(form, path.name)), None)
        if not is_folder(path) or exists(path / MARKER):
            return None
        return _folder_form(path, _FOLDERS)
    except (OSError, *PLACE_ERRORS):
        # The form only serves for advice.
        return None


def check_no_foreign_checkpoint(folder: Path, saver: str = "") -> None:
    """Check that the folder of a new snapshot holds no checkpoint of another library.

    Args:
        folder: The folder.
        saver: The name of the form of the library that saves. A checkpoint of this form counts even
            if its names are not sure.

    Raises:
        SnapshotExistsError: The folder holds one. A search by the name could find either of them.
        PlaceError: The folder cannot be looked at.
    """
    form = _folder_form(folder, [form for form in _FOLDERS if form.is_sure or form.name == saver])
    if form is not None:
        importing = f"`casnap import {folder} NAME` imports it as a snapshot"
        raise SnapshotExistsError(
            f"{folder} holds a checkpoint of {form.name}, and one name is not for two states: take "
            "under another name, or remove that one. "
            + (f"{form.reader} loads it" if form.reader else importing)
        )


def _folder_form(folder: Path, forms: Sequence[Form]) -> Form | None:
    """Return the first form that a folder matches, or its last checkpoint of DeepSpeed does."""
    folders = [folder]
    if is_file(latest := folder / _LATEST):
        with translated(str(latest)), latest.open(errors="replace") as file:
            tag = file.read(256).strip()
        if tag == Path(tag).name:
            folders.append(folder / tag)
    return next((form for form in forms if any(_has(each, form) for each in folders)), None)


def _has(folder: Path, form: Form) -> bool:
    """Whether a folder has a file that a telltale of a form matches."""
    # Ask for a plain name directly: the folder may have too many names to look at.
    names = [glob for glob in form.telltales if "*" not in glob]
    if len(names) < len(form.telltales) and is_folder(folder):
        with translated(str(folder)):
            entries = _entries(folder)
        names += [entry.name for entry in entries if _matches(form, entry.name)]
    return any(is_file(folder / name) and not _is_ours(folder / name) for name in names)


def _matches(form: Form, name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in form.telltales)


def _is_ours(path: Path) -> bool:
    """Whether a file is a notice, which casnap put for other programs (integrations/notices.py)."""
    with translated(str(path)), path.open("rb") as file:
        return file.read(len(NOTICE_HEAD)) == NOTICE_HEAD


def advice_at(path: Path) -> str:
    """Return advice for an error if a checkpoint of another library is at a path; else ""."""
    form = form_of(path)
    return "" if form is None else f". There is a checkpoint of {form.name}, which {form.advice}"


def link_advice(backend: Backend, name: str) -> str:
    """Return advice for an error if a name that a store lacks leads over a link there; else "".

    Args:
        backend: The backend of the store.
        name: The full name of a snapshot, or of a folder of snapshots.
    """
    if backend.folder is None or not name:
        return ""
    parts = name.split("/")
    try:
        ways = (backend.folder.joinpath(*parts[: n + 1]) for n in range(len(parts)))
        link = next(filter(is_link, ways), None)
        target = None if link is None else link.resolve()
    except (OSError, RuntimeError, *PLACE_ERRORS):
        # The link only serves for advice.
        return ""
    if link is None:
        return ""
    return (
        f". {link} is a link, and links in a store are not followed: name {target}, which it leads "
        f"to. For a name that moves on, tag a snapshot: `casnap tag {backend.uri}/NAME {link.name} "
        f"--move`, and ask for Store.tagged({link.name!r})"
    )


def advice_in(folder: Path) -> str:
    """Return a message about checkpoints of other libraries in a folder; "" if there are none."""
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
    importing = f"`casnap import {path} {folder}/NAME` imports it as a snapshot"
    return (
        f"{folder} holds no snapshot, but {path.name}, a checkpoint of {form.name}{more}: "
        f"{f'{form.reader} loads it' if form.reader else importing}"
    )


def no_store_error(folder: Path) -> NotAStoreError:
    """Return the error for a folder that is in no store. It says what is there instead."""
    if narrow := not_served_text(folder):
        return NotAStoreError(f"{folder} is not a casnap store, nor in one{narrow}")
    base = f"{folder} is not a casnap store, nor is any folder above it"
    stores = _stores_below(folder)
    if stores:
        more = ", …" if len(stores) > _SHOWN else ""
        return NotAStoreError(
            f"{base}, but there {'are stores' if len(stores) > 1 else 'is a store'} right below: "
            f"{', '.join(stores[:_SHOWN])}{more}. Name one, like {folder / stores[0]}"
        )
    if advice := advice_in(folder):
        return NotAStoreError(f"{base}. {advice}")
    return NotAStoreError(
        f"{base}{advice_at(folder) or f'; make one with `casnap init {folder}`, or check the path'}"
    )


class _Marker(msgspec.Struct):
    """The fields of a marker that an error tells."""

    commit: str
    name: str = ""
    store: str = ""


def only_marker_error(backend: Backend, name: str) -> NotAStoreError | None:
    """Return the error for a folder that has a marker, but is in no store; None without a marker.

    Args:
        backend: The place.
        name: The name of the folder below the place; "" for the place itself.
    """
    if backend.folder is None:
        # The error of a remote place says how to name a store further up.
        return None
    try:
        marker = json_decoder(_Marker).decode(
            backend.read_marker(f"{name}/{MARKER}" if name else MARKER)
        )
    except (FileNotFoundError, CasnapError, ValueError, RecursionError):
        return None
    place = f"{backend.uri}/{name}" if name else backend.uri
    return NotAStoreError(
        f"{place!r:.500} is only a marker of the snapshot {marker.name!r:.200}; its bytes are in "
        f"the store that was at {marker.store!r:.500}. Copy that whole store, or the snapshot by "
        f"`casnap cp`"
    )


def _stores_below(folder: Path) -> list[str]:
    """Return the names of the stores right in a folder."""
    try:
        entries = _entries(folder)
    except OSError:
        return []
    stores: list[str] = []
    for entry in entries:
        with suppress(*PLACE_ERRORS):
            if is_taken(Path(entry.path, STORE_FOLDER, CONFIG_KEY)):
                stores.append(entry.name)
    return sorted(stores)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(islice(entries, _MOST))
