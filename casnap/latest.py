"""Find a snapshot by name, or the one to resume from, in a store or in its mirror.

This module imports ``view.py`` and lower layers; ``store.py`` imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from casnap.errors import SnapshotError, SnapshotNotFoundError, StoreError, shell_word
from casnap.format.names import folder_of
from casnap.format.records import Row
from casnap.storage import Contents, Table
from casnap.view import View

_log = logging.getLogger("casnap")
# How many snapshots a warning names.
_MOST_NAMED = 5


class FoundRow(NamedTuple):
    """A snapshot that was found.

    Attributes:
        view: The view that has it: of the store, or of its mirror.
        name: Its name in that view.
        row: Its row.
    """

    view: View
    name: str
    row: Row


def find_row(view: View, name: str) -> FoundRow:
    """Find a snapshot by name, in the store or else in its mirror.

    Args:
        view: The store.
        name: The local name.

    Raises:
        SnapshotNotFoundError: Neither of them has it.
    """
    name = view.local_name(name)
    try:
        return FoundRow(view, name, view.row_of(name))
    except SnapshotNotFoundError:
        mirror = view.at_mirror()
        if mirror is None:
            raise
    seq = mirror.repository.newest().seq
    found = FoundRow(mirror, name, mirror.row_of(name))
    _note_returned(view, found, seq)
    return found


class FoundWitness(NamedTuple):
    """The result of looking for a witness.

    Attributes:
        contents: The witness, from the store or else from its mirror; None if neither has it.
        follows: For a witness that the store lacks, the commit id of the snapshot that it is to
            follow, in hex; "" if its run has no snapshot yet, None if that snapshot is gone.
    """

    contents: Contents | None
    follows: str | None


def find_witness(view: View, name: str, after: str | None = None) -> FoundWitness:
    """Look for a witness in a store, or else in its mirror.

    If the mirror cannot be reached, only the store counts, and a warning is logged.

    Args:
        view: The store.
        name: The local name that a user gave the witness.
        after: The local name of the snapshot that the witness follows; None for the last of its
            run.
    """
    full = view.full_of(name)

    def look(table: Table) -> tuple[Row | None, str | None]:
        row = table.get(Table.witness_name(full))
        if row is not None:
            return row, None
        if after is None:
            return None, table.last_commit(folder_of(full))
        followed = table.get(view.full_of(after))
        return None, None if followed is None else followed.commit.hex()

    local = Table.witness_name(name)
    row, follows = view.read(look)
    if row is not None:
        return FoundWitness(Contents(view.readable, view.full_of(local), row), follows)
    try:
        mirror = view.at_mirror()
        if mirror is not None:
            contents = Contents(mirror.readable, mirror.full_of(local), mirror.row_of(local))
            return FoundWitness(contents, follows)
    except SnapshotNotFoundError:
        pass
    except StoreError as e:
        _log.warning("%s is looked for here alone, since the mirror fails: %s", name, e)
    return FoundWitness(None, follows)


def _note_returned(view: View, found: FoundRow, seq: int) -> None:
    """Note that the user gets a snapshot of the mirror, so that later takes here follow it.

    Args:
        view: The store.
        found: The snapshot.
        seq: The number of the mirror's newest root before the snapshot was looked up.
    """
    if view.mirror is not None:
        view.mirror.note_returned(found.name, max(seq, found.row.seq))


def newest_row(
    view: View, prefix: str | None, *, thinned: bool, healthy: bool = False
) -> FoundRow | None:
    """Find the snapshot to resume from, as :meth:`casnap.Store.latest` describes.

    Args:
        view: The store.
        prefix: Look only below this folder; None for the whole view.
        thinned: Whether a thinned snapshot counts too.
        healthy: Whether an unhealthy snapshot does not count. A warning then names it.
    """
    newest, last, passed = _newest(view, prefix, thinned=thinned, healthy=healthy)
    if newest is None and last is not None:
        error = _all_thinned_error if last.row.is_thinned else _all_rewound_error
        if last.row.unhealthy and not last.row.is_rewound:
            error = all_unhealthy_error
        raise error(last.view.path_of(last.name))
    if newest is not None and passed:
        _log.warning("%s", passed_over_text(passed, newest.view.path_of(newest.name)))
    if newest is None:
        from casnap.storage import ForeignCheckpoints, Location

        folder = view.folder_on_disk(prefix)
        if folder is not None and (advice := ForeignCheckpoints(folder).advice_within()):
            _log.warning("%s", advice)
        if advice := Location(view.place.backend, view.folder(prefix)).link_advice():
            _log.warning("%s holds no snapshot below %r%s", view.uri, view.folder(prefix), advice)
    return newest


def _all_rewound_error(path: str) -> SnapshotError:
    """Return the error for a run that has only snapshots which a rewind has moved aside.

    Args:
        path: The path of the last snapshot that is left.
    """
    return SnapshotError(
        "only snapshots are left that their run went back from; the last one is "
        f"{path}. To go on from it after all: `casnap rewind {shell_word(path)}`, or Store.rewind"
    )


def _all_thinned_error(path: str) -> SnapshotError:
    """Return the error for a run of which only thinned snapshots are left.

    Args:
        path: The path of the last thinned snapshot.
    """
    return SnapshotError(
        "only thinned snapshots are left, which have lost what a resume needs; the last one is "
        f"{path}. To begin anew from its weights, open it by its name, or ask for "
        "latest(thinned=True), and restore the keys that it has: `casnap show` lists them"
    )


def all_unhealthy_error(path: str) -> SnapshotError:
    """Return the error for a run that has only snapshots with NaN or infinite elements.

    Args:
        path: The path of the last such snapshot.
    """
    return SnapshotError(
        "only snapshots are left that have NaN or infinite elements; the last one is "
        f"{path}: `casnap show {shell_word(path)} --health` says where. To go on from it after "
        "all, open it by its name. Tensors that may have such elements are named by "
        "HealthOptions(ignore=...), for later takes"
    )


def passed_over_text(names: Sequence[str], found: str) -> str:
    """Return the warning about unhealthy snapshots that a resume passes over.

    Args:
        names: Their names or paths, the last one at the end.
        found: The name or path of the snapshot that the run resumes from.
    """
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"passed over, since they have NaN or infinite elements: {', '.join(names[-_MOST_NAMED:])}"
        f"{more}. The last one before is {found}"
    )


class _Newest(NamedTuple):
    """The result of looking for the snapshot to resume from, here or at the mirror.

    Attributes:
        found: The snapshot; None if there is none.
        last: The snapshot that an error names if ``found`` is None: the last one that is only
            unhealthy; if there is none, the last one that is not thinned; else the last of all.
        passed: The paths of the later snapshots that were passed over, since they are unhealthy.
    """

    found: FoundRow | None
    last: FoundRow | None
    passed: list[str]


def _newest(view: View, prefix: str | None, *, thinned: bool, healthy: bool) -> _Newest:
    """Find the snapshot to resume from, here or at the mirror.

    It is the last snapshot that no rewind has moved aside. Thinned snapshots count only with
    ``thinned``; unhealthy ones do not count with ``healthy``.

    Args:
        view: The store.
        prefix: Look only below this folder; None for the whole view.
        thinned: Whether a thinned snapshot counts too.
        healthy: Whether an unhealthy snapshot does not count.
    """
    rows = [FoundRow(view, *named_row) for named_row in view.rows(prefix)]
    here = [found for found in rows if thinned or not found.row.is_thinned]
    live = [found for found in here if not found.row.is_rewound]
    well = [found for found in live if not (healthy and found.row.unhealthy)]
    newest = next(reversed(well), None)
    passed = [view.path_of(f.name) for f in live[live.index(well[-1]) + 1 :]] if well else []
    at_home = _Newest(newest, next(reversed(live or here or rows), None), passed)
    try:
        mirror = view.at_mirror()
        if mirror is None:
            return at_home
        seq = mirror.repository.newest().seq
        there = _newest(mirror, prefix, thinned=thinned, healthy=healthy)
    except StoreError as e:
        if newest is None:
            raise
        _log.warning("%s is the newest snapshot here; its mirror fails: %s", newest.name, e)
        return at_home
    mirrored = there.found
    if mirrored is None:
        return at_home._replace(last=at_home.last or there.last)
    is_known = any(found.row.commit == mirrored.row.commit for found in here)
    if newest is not None and not is_known:
        from casnap.mirror.notes import is_newer_here

        mirror_id = mirror.repository.config.store_id
        if is_newer_here(view.repository, mirror_id, newest[1:], mirrored[1:]):
            return at_home
    _note_returned(view, mirrored, seq)
    return at_home if is_known else there
