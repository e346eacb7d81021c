"""Find checkpoints of other libraries at a path where a snapshot was looked for.

An error then names the checkpoint. Without it, a program that has switched to casnap would find no
snapshot, and silently begin its run from the start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from casnap.backends.local_files import exists, is_file, is_folder, translated
from casnap.errors import PLACE_ERRORS, SnapshotExistsError, shell_word
from casnap.format import notices
from casnap.format.names import MARKER

_MOST = 1000
"""The most names of a folder to look at."""


class CheckpointForm(NamedTuple):
    """A form in which another library stores checkpoints.

    Attributes:
        name: The name of the form, for messages.
        telltales: Globs of file names. A checkpoint of this form is a file that matches one of
            them, or a folder with such a file.
        is_sure: Whether only checkpoints of this form have files that match.
        reader: The program that reads the form; "" if ``casnap import`` does.
    """

    name: str
    telltales: tuple[str, ...]
    is_sure: bool = True
    reader: str = ""

    @property
    def advice(self) -> str:
        """How to read a checkpoint of this form.

        The words continue a sentence that begins with "There is a checkpoint of {name}, which".
        """
        return f"{self.reader} loads" if self.reader else "`casnap import` imports as a snapshot"


_SAFETENSORS = CheckpointForm("safetensors", ("*.safetensors",), is_sure=False)
_FILES = (
    _SAFETENSORS,
    CheckpointForm("torch.save", ("*.pt", "*.pth", "*.ckpt", "*.bin"), is_sure=False),
)
_FOLDERS = (
    CheckpointForm("torch.distributed.checkpoint", (".metadata",)),
    CheckpointForm("TorchSnapshot", (".snapshot_metadata",)),
    CheckpointForm(
        "DeepSpeed", ("*mp_rank_*_states.pt",), reader="DeepSpeed's own load_checkpoint"
    ),
    CheckpointForm("Accelerate", ("random_states_0.pkl",), reader="Accelerate's own load_state"),
    _SAFETENSORS,
    CheckpointForm("torch_checkpointing", ("metadata.pkl", "*_0.pt"), is_sure=False),
)
"""The forms of checkpoints that are folders. A folder has the first form that it matches."""
_LATEST = "latest"
"""DeepSpeed writes the name of its last checkpoint into this file, beside the checkpoint."""


def form_of(path: Path) -> CheckpointForm | None:
    """Return the form of a checkpoint at a path, judged by file names; None if there is none."""
    try:
        if is_file(path):
            return next((form for form in _FILES if _matches(form, path.name)), None)
        if not is_folder(path) or exists(path / MARKER):
            return None
        return _folder_form(path, _FOLDERS)
    except (OSError, *PLACE_ERRORS):
        # The form only serves for advice.
        return None


class ForeignCheckpoints:
    """Finds checkpoints of other libraries by their file names.

    Args:
        path: A file or folder that may be a checkpoint, or a folder that may contain some.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @staticmethod
    def notice(subject: str) -> bytes:
        """Return the content of a notice: a file of casnap where another library expects its own.

        A program that unpickles the notice gets an error. Its message begins with ``casnap``, and
        contains ``subject``.
        """
        return notices.notice(subject)

    @staticmethod
    def is_notice(path: Path) -> bool:
        """Whether a file is a notice of casnap, though it has a name that another library uses.

        Raises:
            PlaceError: The file cannot be read.
        """
        if not is_file(path):
            return False
        with translated(str(path)), path.open("rb") as file:
            return notices.is_notice(file.read(notices.HEAD_BYTES))

    def advice(self) -> str:
        """Return advice for an error if the path is another library's checkpoint; else ""."""
        form = form_of(self._path)
        return (
            "" if form is None else f". There is a checkpoint of {form.name}, which {form.advice}"
        )

    def advice_within(self) -> str:
        """Return a message about other libraries' checkpoints in the folder; "" if it has none."""
        folder = self._path
        try:
            entries = sorted(
                entries_of(folder), key=lambda entry: entry.stat(follow_symlinks=False).st_mtime
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
        words = f"{shell_word(path)} {shell_word(f'{folder}/NAME')}"
        importing = f"`casnap import {words}` imports it as a snapshot"
        return (
            f"{folder} holds no snapshot, but {path.name}, a checkpoint of {form.name}{more}: "
            f"{f'{form.reader} loads it' if form.reader else importing}"
        )

    def library(self, saver: str = "") -> str:
        """Return the name of the library whose checkpoint the folder contains; "" without one.

        Args:
            saver: The name of a form that counts even if other files may match its telltales.

        Raises:
            PlaceError: The folder cannot be looked at.
        """
        form = self._certain(saver)
        return "" if form is None else form.name

    def check_none(self, saver: str = "") -> None:
        """Check that the folder for a new snapshot contains no checkpoint of another library.

        Args:
            saver: The name of a form that counts even if other files may match its telltales: that
                of the library that takes the snapshot.

        Raises:
            SnapshotExistsError: The folder contains a checkpoint. A library that is given the
                snapshot's path would find this checkpoint instead of the snapshot.
            PlaceError: The folder cannot be looked at.
        """
        folder, form = self._path, self._certain(saver)
        if form is not None:
            importing = f"`casnap import {shell_word(folder)} NAME` imports it as a snapshot"
            raise SnapshotExistsError(
                f"{folder} holds a checkpoint of {form.name}, and one name is not for two states: "
                "take under another name, or remove that one. "
                + (f"{form.reader} loads it" if form.reader else importing)
            )

    def _certain(self, saver: str) -> CheckpointForm | None:
        forms = [form for form in _FOLDERS if form.is_sure or form.name == saver]
        return _folder_form(self._path, forms)


def _folder_form(folder: Path, forms: Sequence[CheckpointForm]) -> CheckpointForm | None:
    """Return the first of some forms that a folder matches; None if it matches none.

    In a folder of DeepSpeed, the checkpoint that the file ``latest`` names may match instead.
    """
    folders = [folder]
    if is_file(latest := folder / _LATEST):
        with translated(str(latest)), latest.open(errors="replace") as file:
            tag = file.read(256).strip()
        if tag == Path(tag).name:
            folders.append(folder / tag)
    return next((form for form in forms if any(_has(each, form) for each in folders)), None)


def _has(folder: Path, form: CheckpointForm) -> bool:
    """Whether a folder has a file that matches a telltale of a form, and is not a notice."""
    # Ask for a plain name directly: the folder may have too many names to look at.
    names = [glob for glob in form.telltales if "*" not in glob]
    if len(names) < len(form.telltales) and is_folder(folder):
        with translated(str(folder)):
            entries = entries_of(folder)
        names += [entry.name for entry in entries if _matches(form, entry.name)]
    return any(
        is_file(folder / name) and not ForeignCheckpoints.is_notice(folder / name) for name in names
    )


def _matches(form: CheckpointForm, name: str) -> bool:
    return any(fnmatchcase(name, glob) for glob in form.telltales)


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; if there are more than a thousand, the first thousand."""
    with os.scandir(folder) as entries:
        return list(islice(entries, _MOST))
