"""Files that a Trainer keeps beside the state, and that differ though the training is the same."""

from __future__ import annotations

import json
from typing import Any

from casnap import Diff, Snapshot, Store

_ARGUMENTS = "files/training_args.bin"
_PROGRESS = "files/trainer_state.json"


def records_in(diff: Diff, store: Store, old: str, new: str) -> dict[str, str]:
    """Return why some differences say nothing about the training: path → the reason in words.

    Args:
        diff: The differences.
        store: The store. Its snapshots are opened only if a Trainer's progress differs.
        old: The name of the snapshot of the one run.
        new: The name of the snapshot of the other run.
    """
    changed, found = {change.path for change in diff.of("changed")}, dict[str, str]()
    if _ARGUMENTS in changed:
        found[_ARGUMENTS] = "the arguments of the Trainer, which name the folder of the run"
    if _PROGRESS in changed and _without_log(store[old]) == _without_log(store[new]):
        found[_PROGRESS] = (
            "its log alone: the Trainer averages losses from the resume on, and notes speeds"
        )
    return found


def _without_log(snapshot: Snapshot) -> dict[str, Any]:
    progress: dict[str, Any] = json.loads(snapshot.read_object(_PROGRESS))
    return {**progress, "log_history": None}
