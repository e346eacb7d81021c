"""Find tensors that share memory here, but have different values in the snapshot.

Shared memory can keep only one of the values. This happens where a model with tied weights meets a
checkpoint in which these weights differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from casnap.format.entries import Entry
from casnap.restore.loading import Loading
from casnap.restore.targets import conflicts, memory_of
from casnap.state.overlap import can_hold_all
from casnap.state.sharded import Shards
from casnap.storage import Contents


def conflicting_ties(
    contents: Contents, targets: Mapping[str, Shards], entries: Mapping[str, Entry]
) -> list[list[str]]:
    """Return the groups of targets that share memory, but cannot all hold their stored values.

    If tied tensors have equal digests, they agree. Views of each other, and tensors that are cast,
    may agree although their digests differ. So their values are read and compared.

    Args:
        contents: The snapshot.
        targets: The tensors to fill, by path.
        entries: The entries, by path.

    Raises:
        DamagedError: A value that has to be read is missing or damaged.
    """
    groups = []
    for group in conflicts(memory_of(targets), entries):
        paths = sorted({path for path, _ in group})
        # Each rank holds other parts of a sharded tensor, but all ranks have to decide alike.
        if any(targets[path].is_sharded for path in paths) or not _agree(
            contents, {path: targets[path].value for path in paths}, entries
        ):
            groups.append(paths)
    return groups


def _agree(
    contents: Contents, tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Entry]
) -> bool:
    loading = Loading(contents)
    for path in tensors:
        loading.add(path, entries[path])
    leaves = loading.load()
    return can_hold_all((tensor, leaves[path].content) for path, tensor in tensors.items())


def conflict_text(
    paths: Iterable[str], advice: str = "leave some out by rename= of load_into()"
) -> str:
    """Return a message that some paths share memory here, but differ in the snapshot.

    Args:
        paths: The paths of the tensors.
        advice: Advice for a user who wants them to stay tied.
    """
    return (
        f"{', '.join(paths)}: share memory here, but are not the same in the snapshot; untie them "
        f"first, or {advice}"
    )
