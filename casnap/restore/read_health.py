"""Read the health of a snapshot's tensors, which the take has measured."""

from __future__ import annotations

from typing import Any

from casnap.errors import DamagedError
from casnap.format.entries import TensorEntry
from casnap.format.health import TensorHealth, has_health, unpack_health
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.measuring import measured_pieces
from casnap.storage import Contents


@without_torch_modes()
def read_health(contents: Contents) -> dict[str, TensorHealth]:
    """Return the health of the tensors of a snapshot, by path; empty if the take measured none.

    A path begins with a rank if its entry belongs to that rank.

    Args:
        contents: The snapshot.

    Raises:
        DamagedError: A record of the manifest is malformed, or a node is missing or damaged.
    """
    manifest = contents.manifest
    records = manifest.health_by_tree
    if records is None:
        raise _malformed_error(contents, "all keys", "it is no map from digests")
    if not records and contents.row.unhealthy is None:
        return {}
    found: dict[str, TensorHealth] = {}
    # Entries that hold their bytes: what these have is computed here.
    inline = dict[str, tuple[str, bytes]]()
    for owned in manifest.trees():
        label, tree = owned.label, contents.tree(owned.digest)
        noted = _noted(contents, label, len(tree), records.get(owned.digest, [b"", b""]))
        for number, (path, entry) in enumerate(tree.items()):
            if not isinstance(entry, TensorEntry) or not has_health(entry):
                continue
            if number in noted:
                found[label + path] = noted[number]
            elif not entry.payload.digests:
                inline[label + path] = entry.dtype, entry.payload.inline
    found |= zip(inline, measured_pieces(inline.values()), strict=True)
    return dict(sorted(found.items()))


def _noted(contents: Contents, label: str, count: int, record: Any) -> dict[int, TensorHealth]:
    """Decode the health of the tensors below one key of the app state.

    Args:
        contents: The snapshot.
        label: The key, after its rank if it belongs to one rank; for errors.
        count: How many entries lie below the key.
        record: What the manifest has of their health, encoded.

    Returns: The number of an entry below the key → its health.

    Raises:
        DamagedError: The record is malformed.
    """
    try:
        noted = unpack_health(record)
    except ValueError as e:
        raise _malformed_error(contents, label, str(e)) from e
    if any(number >= count for number in noted):
        raise _malformed_error(contents, label, "it names more entries than there are")
    return noted


def _malformed_error(contents: Contents, what: str, why: str) -> DamagedError:
    return DamagedError(
        f"{contents.label}: what is noted of the health of {what} is malformed: {why}. It can be "
        "restored all the same"
    )
