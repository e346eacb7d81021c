"""The error to raise when no store was found. It tells what is at the path instead."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from casnap.backends.local_files import is_taken
from casnap.errors import PLACE_ERRORS, NotAStoreError, shell_word
from casnap.format.names import STORE_FOLDER
from casnap.format.records import CONFIG_KEY
from casnap.storage.opening.foreign_checkpoints import ForeignCheckpoints, entries_of
from casnap.storage.opening.location import not_served_text

_SHOWN = 8
"""The most stores that a message names."""


def no_store_error(folder: Path) -> NotAStoreError:
    """Return the error to raise for a folder that is in no store.

    The error tells what the folder is instead.
    """
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
    others = ForeignCheckpoints(folder)
    if advice := others.advice_within():
        return NotAStoreError(f"{base}. {advice}")
    making = f"; make one with `casnap init {shell_word(folder)}`, or check the path"
    return NotAStoreError(f"{base}{others.advice() or making}")


def _stores_below(folder: Path) -> list[str]:
    """Return the names of the folders right below a folder that hold stores."""
    try:
        entries = entries_of(folder)
    except OSError:
        return []
    stores: list[str] = []
    for entry in entries:
        with suppress(*PLACE_ERRORS):
            if is_taken(Path(entry.path, STORE_FOLDER, CONFIG_KEY)):
                stores.append(entry.name)
    return sorted(stores)
