"""Warn if two steps of a run have equal weights: perhaps the training has not gone on.

Buffers do not count as weights. All weights must be equal, so a frozen base beside an adapter that
trains is no reason to warn. There is a warning only if training seems to have gone on between two
snapshots: their names differ in numbers alone, as ``step_100`` and ``step_200``, or moments of an
optimizer changed. So a last snapshot that has the weights of the last step causes no warning.

A take is compared with this process's previous take in the same run. A snapshot that is published
or exported by another process is compared with the snapshots before and after it in the run. The
trees are compared by digests, and no chunk is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from casnap.comparing.diff import entries_apart, subtrees
from casnap.errors import CasnapError
from casnap.format.entries import Entry, TensorEntry
from casnap.format.records import Row
from casnap.state.roles import is_trained, role_of
from casnap.storage import Contents, Repository, Table

_log = logging.getLogger("casnap.hints")
_MOST_RUNS = 64
"""How many runs a process remembers."""
_NUMBER = re.compile("[0-9]+")


class _Taken(NamedTuple):
    """The last take of a run.

    Attributes:
        name: The full name of the snapshot.
        row: Its row.
        weight: The path of a weight that changed at that take; "" if none is known.
    """

    name: str
    row: Row
    weight: str = ""


# The last takes of this process, by the id of the store and the run.
_taken: dict[tuple[str, str], _Taken] = {}
# The runs about which this process has warned.
_told: set[tuple[str, str]] = set()


def look_at_take(store: Repository, name: str, row: Row) -> None:
    """Compare a snapshot that was just taken with the one before it; warn if its weights are equal.

    The nodes of both are in the cache of this host. If the training goes on, few of them are read:
    the comparison begins with a weight that changed at an earlier take.

    Args:
        store: The store.
        name: The full name of the snapshot.
        row: Its row.
    """
    run = (store.config.store_id, row.run_of(name))
    if row.is_witness or run in _told:
        return
    before = _taken.pop(run, None)
    weight = ""
    if before is not None:
        # The snapshot is committed, so no fault of this look may reach the caller.
        with suppress(CasnapError):
            a, b = Contents(store, *before[:2]), Contents(store, name, row)
            weight = before.weight
            if not (weight and _is_apart(a, b, weight)):
                weight = _first_weight_apart(a, b)
                if not weight and _warn(a, b, run):
                    return
    while len(_taken) >= _MOST_RUNS:
        _taken.pop(next(iter(_taken)), None)
    _taken[run] = _Taken(name, row, weight)


def look_at_neighbors(store: Repository, name: str, commit_id: str) -> None:
    """Compare a snapshot with those before and after it in its run; warn if the weights are equal.

    Args:
        store: The store.
        name: The full name of the snapshot.
        commit_id: Its commit id, in hex.
    """
    run = (store.config.store_id, name.rpartition("/")[0])
    if run in _told or run in _taken:  # The takes of this process were looked at.
        return
    # The caller's work is done, so no fault of this look may reach the caller. The snapshot may
    # have been deleted or moved aside.
    with suppress(CasnapError, ValueError):
        rows = store.read_table(lambda table: table.rows_of_run(run[1]))
        steps = [item for item in Table.in_commit_order(rows.items()) if not item[1].is_rewound]
        at = [row.commit.hex() for _, row in steps].index(commit_id)
        for other in (*steps[max(at - 1, 0) : at], *steps[at + 1 : at + 2]):
            a, b = Contents(store, *other), Contents(store, *steps[at])
            if not _first_weight_apart(a, b) and _warn(a, b, run):
                return


def _warn(a: Contents, b: Contents, run: tuple[str, str]) -> bool:
    """Warn that two snapshots have equal weights, if training seems to have gone on between them.

    Args:
        a: Another snapshot of the run.
        b: The snapshot that was taken, published or exported.
        run: The id of the store, and the run.

    Returns:
        Whether later snapshots of the run need not be compared.
    """
    if not (_are_steps(a.name, b.name) or any(_moments_apart(a, b))):
        return False
    _told.add(run)
    if _has_weights(b):
        _log.warning(
            "%s: the weights are those of %s: did training go on? `casnap check --history` lists "
            "the steps with equal weights",
            b.label,
            a.name,
        )
    return True


def _are_steps(a: str, b: str) -> bool:
    """Whether two names differ in numbers alone, as ``run/step_0100`` and ``run/step_200`` do."""
    numbers = [[each.lstrip("0") for each in _NUMBER.findall(name)] for name in (a, b)]
    return _NUMBER.sub("0", a) == _NUMBER.sub("0", b) and numbers[0] != numbers[1]


def _has_weights(contents: Contents) -> bool:
    return any(
        entry.payload.nbytes and is_trained(component + inner, entry)
        for _, component, top in contents.manifest.trees()
        for inner, entry in contents.tree(top).items()
    )


def _is_apart(a: Contents, b: Contents, path: str) -> bool:
    """Whether both snapshots have an entry at a path, with different bytes."""
    found = [each[1].payload for each in (a.find(path), b.find(path)) if each is not None]
    return len(found) == 2 and found[0] != found[1]


def _first_weight_apart(a: Contents, b: Contents) -> str:
    """Return the path of a weight that only one snapshot has, or that differs; "" for none."""
    for path, was, now in _entries_apart(a, b):
        if any(each is not None and is_trained(path, each) for each in (was, now)):
            return path
    return ""


def _moments_apart(a: Contents, b: Contents) -> Iterator[str]:
    """Yield the paths of the moments that both snapshots have, and that differ."""
    for path, was, now in _entries_apart(a, b):
        if was is not None and now is not None and role_of(path, now) == "moments":
            yield path


def _entries_apart(a: Contents, b: Contents) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Yield the path of each entry that differs in two snapshots, and the entries.

    The entries of the smallest tree come first, since a model has fewer tensors than its optimizer.
    """
    apart = [(was, now, prefix) for prefix, was, now in subtrees(a, b) if was != now]

    def count(trees: tuple[bytes | None, bytes | None, str]) -> tuple[int, str]:
        was, now, prefix = trees
        sizes = (len(each.tree(top)) for each, top in ((a, was), (b, now)) if top is not None)
        return sum(sizes), prefix

    for was_top, now_top, prefix in sorted(apart, key=count):
        for path, was, now in entries_apart(a, b, prefix, was_top, now_top):
            # Whether a tensor requires grad is no part of its weights.
            if _content(was) != _content(now):
                yield path, was, now


def _content(entry: Entry | None) -> object:
    if isinstance(entry, TensorEntry):
        return entry.dtype, entry.shape, entry.payload
    return entry
