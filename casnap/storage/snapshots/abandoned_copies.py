"""Unfinished copies that no process continues. A collector drops them from the root."""

from __future__ import annotations

import time

import msgspec

from casnap.format.records import Root
from casnap.storage.reading.repository import Repository
from casnap.storage.snapshots.changes import Changes

_AFTER = 7 * 86400.0


def without_abandoned(root: Root) -> Root:
    """Return a root without the unfinished copies that no process has continued for a week.

    A copy whose time is more than a week in the future is dropped too; otherwise it would stay for
    ever.
    """
    now = time.time()
    copies = {c: copy for c, copy in root.copies.items() if abs(now - copy.time) <= _AFTER}
    return root if len(copies) == len(root.copies) else msgspec.structs.replace(root, copies=copies)


def drop_abandoned(store: Repository) -> None:
    """Drop the unfinished copies that no process has continued for a week, in one commit.

    If there are none, no root is put.
    """
    root = store.recent()
    if without_abandoned(root) is not root:
        Changes(store).commit(lambda *_: {}, without_abandoned)
