"""The warning that a run takes the same weights again and again."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from casnap.format.names import folder_of, key_of
from casnap.take.manifest import ManifestSummary

_log = logging.getLogger("casnap")
_PATIENCE = 3


@dataclass
class _Last:
    """The last take of a run.

    Attributes:
        name: Its full name.
        manifest: The digest of all that it took.
        weights: The digests of its weights, for each key and rank.
        count: How many takes in a row, up to this one, found the weights unchanged.
        first: The name of the take before these.
    """

    name: str
    manifest: bytes
    weights: list[bytes | None]
    count: int
    first: str


# By the id of the store, and the folder of the run in it.
_last: dict[tuple[str, str], _Last] = {}


def note_weights(store_id: str, name: str, summary: ManifestSummary, digest: bytes) -> None:
    """Compare the weights of a take with those of the one before it; warn at the third equal one.

    Weights are the states of modules that are trained: what is frozen does not change. What is
    compared are digests that the manifest has anyway.

    Args:
        store_id: The id of the store.
        name: The full name of the snapshot.
        summary: Its manifest.
        digest: The digest of the manifest.
    """
    if not summary.trained:
        return
    trees = [summary.manifest.shared, *summary.manifest.ranks.values()]
    weights = [tree.get(key) for tree in trees for key in summary.trained]
    run = store_id, folder_of(name)
    last = _last.get(run)
    if last is None or last.weights != weights:
        _last[run] = _Last(name, digest, weights, 0, name)
        return
    if (last.name, last.manifest) == (name, digest):
        return  # the same step again
    last.name, last.manifest, last.count = name, digest, last.count + 1
    if last.count == _PATIENCE:
        _log.warning(
            "%s: %d takes in a row have found all weights (%s) as %s has them. Is the optimizer "
            "stepping? warn_unchanged=False turns this warning off",
            name,
            _PATIENCE,
            ", ".join(map(key_of, summary.trained)),
            last.first,
        )
