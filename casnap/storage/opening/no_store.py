"""What is there where no store or snapshot was found: stores below, a marker, other files.

A program that has changed libraries finds no snapshot, and would begin its run anew without a word.
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
"""How many names of a folder are looked at."""
_SHOWN = 8
"""How many stores a message names."""


class Form(NamedTuple):
    """A form of checkpoints of another library.

    Attributes:
        name: How messages call it.
        telltales: Globs; each checkpoint of this form is a file, or a folder with a file, that one
            of them matches.
        is_sure: Whether nothing else is called so.
        reader: What reads it, if ``casnap import`` does not.
    """

    name: str
    telltales: tuple[str, ...]
    is_sure: bool = True
    reader: str = ""

    @property
    def advice(self) -> str:
        """What can be done with one: goes on after "a checkpoint of {name}, which"."""
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
"""The forms of folders. The first that matches counts."""
_LATEST = "latest"
"""DeepSpeed writes the name of its last checkpoint into this file, beside the checkpoint."""


def form_of(path: Path) -> Form | None:
    """Return the form of a checkpoint of another library, judged by names; None if it is none."""
    try:
        if is_file(path):
            return next((form for form in _FILES if _matches(form, path.name)), None)
        if not is_folder(path) or exists(path / MARKER):
            return None
        return _folder_form(path, _FOLDERS)
    except (OSError, *PLACE_ERRORS):
        # It is only for an advice.
        return None


def check_no_foreign_checkpoint(folder: Path, saver: str = "") -> None:
    """Check that the folder of a new snapshot holds no checkpoint of another library.

    Args:
        folder: The folder.
        saver: The library that saves, as messages call its form: one of that is looked for too, if
            others may be called so as well.

    Raises:
        SnapshotExistsError: It does. Whoever then looks for one by this name may find the other.
        PlaceError: It cannot be looked at.
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
    """Return the first of some forms that a folder has, or its last checkpoint of DeepSpeed."""
    folders = [folder]
    if is_file(latest := folder / _LATEST):
        with translated(str(latest)), latest.open(errors="replace") as file:
            tag = file.read(256).strip()
        if tag == Path(tag).name:
            folders.append(folder / tag)
    return next((form for form in forms if any(_has(each, form) for each in folders)), None)


def _has(folder: Path, form: Form) -> bool:
    """Whether a folder has a file that only a form has."""
    # A name is looked for itself: there may be too many others to look at.
    names = [glob for glob in form.telltales if "*" not in glob]
    if len(names) < len(form.telltales) and is_folder(folder):
        with translated(str(folder)):
            entries = _entries(folder)
        names += [entry.name for entry in entries if _matches(form, entry.name)]
    return any(is_file(folder / name) and not _is_ours(folder / name) for name in names)


def _matches(form: Form, name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in form.telltales)


def _is_ours(path: Path) -> bool:
    """Whether a file only stands there for programs that look for it (integrations/notices.py)."""
    with translated(str(path)), path.open("rb") as file:
        return file.read(len(NOTICE_HEAD)) == NOTICE_HEAD


def advice_at(path: Path) -> str:
    """Return what an error is to add if there is a checkpoint of another form; "" if not."""
    form = form_of(path)
    return "" if form is None else f". There is a checkpoint of {form.name}, which {form.advice}"


def link_advice(backend: Backend, name: str) -> str:
    """Return what an error is to add if a name that a store lacks is a link there; "" if not.

    Args:
        backend: The place of the store.
        name: The full name of a snapshot, or of a folder of them.
    """
    if backend.folder is None or not name:
        return ""
    parts = name.split("/")
    try:
        ways = (backend.folder.joinpath(*parts[: n + 1]) for n in range(len(parts)))
        link = next(filter(is_link, ways), None)
        target = None if link is None else link.resolve()
    except (OSError, RuntimeError, *PLACE_ERRORS):
        # It is only for an advice.
        return ""
    if link is None:
        return ""
    return (
        f". {link} is a link, and links in a store are not followed: name {target}, which it leads "
        f"to. For a name that moves on, tag a snapshot: `casnap tag {backend.uri}/NAME {link.name} "
        f"--move`, and ask for Store.tagged({link.name!r})"
    )


def advice_in(folder: Path) -> str:
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
    importing = f"`casnap import {path} {folder}/NAME` imports it as a snapshot"
    return (
        f"{folder} holds no snapshot, but {path.name}, a checkpoint of {form.name}{more}: "
        f"{f'{form.reader} loads it' if form.reader else importing}"
    )


def no_store_error(folder: Path) -> NotAStoreError:
    """Return the error for a folder that is in no store: it says what is there instead."""
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
    """What an error tells of a marker."""

    commit: str
    name: str = ""
    store: str = ""


def only_marker_error(backend: Backend, name: str) -> NotAStoreError | None:
    """Return the error for a folder that has a marker, where there is no store.

    Args:
        backend: The place.
        name: The name of the folder in it; empty for the place itself.
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
