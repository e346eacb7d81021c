"""What is noted of the health of a mean.

The mean of a tensor is measured as it is computed. The numbers of another tensor are those that a
source has noted of an equal one. If none has, its bytes are read. So each tensor of a mean that is
noted as healthy was measured by somebody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from glob import escape

from casnap.errors import DamagedError
from casnap.format.entries import OwnedTree, TensorEntry
from casnap.format.health import TensorHealth, has_health
from casnap.history.averaging_plan import TensorToAverage
from casnap.restore.read_health import read_health
from casnap.storage import Contents
from casnap.take.health import HealthNotes, is_ignored, is_unhealthy


def ignored_by_takes(sources: Iterable[Contents]) -> list[str]:
    """Return globs of the tensors that may have NaN or infinite elements, as it seems.

    The options of the takes are not known. A take that found such elements, and yet called its
    snapshot healthy, was told that they may be there.
    """
    globs = set[str]()
    for source in sources:
        noted = _noted(source) if source.row.unhealthy == 0 else {}
        bad = {path: health for path, health in noted.items() if not health.is_finite}
        for owned in source.manifest.trees() if bad else ():
            for inner, entry in source.tree(owned.digest).items():
                health = bad.get(owned.label + inner)
                if health is not None and is_unhealthy(entry, health):
                    globs.add(escape(owned.component + inner))
    return sorted(globs)


def known_health(
    sources: Sequence[Contents], means: Collection[str]
) -> tuple[dict[str, TensorHealth], list[TensorToAverage]]:
    """Return what is known of the tensors that a mean takes from the last snapshot.

    Args:
        sources: The snapshots.
        means: The paths of the other tensors, which are means.

    Returns:
        The health of tensors by path, as any source has noted it of an equal tensor; and the
        tensors of which none has, with their entry in the last snapshot alone.
    """
    last = sources[-1]
    unknown = {
        tree.label + inner: TensorToAverage(tree, inner, (entry,))
        for tree in last.manifest.trees()
        for inner, entry in last.tree(tree.digest).items()
        if isinstance(entry, TensorEntry) and has_health(entry) and tree.label + inner not in means
    }
    known = dict[str, TensorHealth]()
    for source in reversed(sources):
        noted = _noted(source) if unknown else {}
        trees = {t.label: source.tree(t.digest) for t in source.manifest.trees()} if noted else {}
        for path in [path for path in unknown if path in noted]:
            tensor = unknown[path]
            tree = trees.get(tensor.tree.label)
            if tree is not None and tree.get(tensor.inner) == tensor.entry:
                known[path] = noted[path]
                del unknown[path]
    return known, [*unknown.values()]


def health_of_mean(
    last: Contents,
    found: Mapping[str, TensorHealth],
    trees: Iterable[tuple[OwnedTree, bytes]],
    ignore: Iterable[str],
) -> HealthNotes:
    """Return the notes about the health of a mean.

    Args:
        last: The last snapshot.
        found: The health of each tensor of the mean, by path.
        trees: Each tree of the last snapshot, with the digest of the tree that replaces it.
        ignore: Globs of the paths of tensors that may have NaN or infinite elements.
    """
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
            if is_unhealthy(entry, found[path]) and not is_ignored(owned.component + inner, ignore):
                notes.add_unhealthy(path, found[path])
        notes.add_record(digest, paths, of_tree)
    return notes


def _noted(source: Contents) -> dict[str, TensorHealth]:
    """Return what is noted of the health of a snapshot; nothing if that is malformed."""
    try:
        return read_health(source)
    except DamagedError:
        return {}
