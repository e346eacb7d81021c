"""What is noted of the health of a mean.

The mean of a tensor is measured as it is computed. What was taken from the last snapshot has the
numbers that the take of that snapshot has noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from casnap.errors import DamagedError
from casnap.format.entries import OwnedTree, TensorEntry
from casnap.format.health import TensorHealth
from casnap.restore.read_health import read_health
from casnap.storage import Contents
from casnap.take.health import HealthNotes, is_ignored, is_unhealthy


def health_of_mean(
    sources: Sequence[Contents],
    measured: Mapping[str, TensorHealth],
    trees: Iterable[tuple[OwnedTree, bytes]],
    ignore: Iterable[str],
) -> HealthNotes:
    """Return the notes about the health of a mean.

    Args:
        sources: The snapshots.
        measured: The health of each tensor that is a mean, by path.
        trees: Each tree of the last snapshot, with the digest of the tree that replaces it.
        ignore: Globs of the paths of tensors that may have NaN or infinite elements.
    """
    last = sources[-1]
    found = {**_noted(last), **measured}
    unhealthy = {path for path, health in found.items() if not health.is_finite}
    # The options of the takes are not known. A take that found such elements, and yet called its
    # snapshot healthy, was told that they may be there.
    for source in sources if unhealthy else ():
        if source.row.unhealthy == 0:
            unhealthy -= {path for path, each in _noted(source).items() if not each.is_finite}
    notes = HealthNotes()
    for owned, digest in trees:
        of_tree, paths = dict[str, TensorHealth](), list[str]()
        for inner, entry in last.tree(owned.digest).items():
            path = owned.label + inner
            paths.append(inner)
            if path not in found or not isinstance(entry, TensorEntry):
                continue
            if not entry.payload.inline:
                of_tree[inner] = found[path]
            if (
                path in unhealthy
                and is_unhealthy(entry, found[path])
                and not is_ignored(owned.component + inner, ignore)
            ):
                notes.add_unhealthy(path, found[path])
        notes.add_record(digest, paths, of_tree)
    return notes


def _noted(source: Contents) -> dict[str, TensorHealth]:
    """Return what is noted of the health of a snapshot; nothing if that is malformed."""
    try:
        return read_health(source)
    except DamagedError:
        return {}
