"""Files that a Trainer keeps beside the state, and that differ though the training is the same."""

from __future__ import annotations

import json
from typing import Any

from casnap import Diff, Snapshot

_ARGUMENTS = "files/training_args.bin"
_PROGRESS = "files/trainer_state.json"


def records_in(diff: Diff, old: Snapshot, new: Snapshot) -> dict[str, str]:
    """Return why some differences say nothing about the training: path → the reason in words.

    Args:
        diff: The differences.
        old: The snapshot of the one run.
        new: The snapshot of the other run.
    """
    changed, found = {change.path for change in diff.of("changed")}, dict[str, str]()
    if _ARGUMENTS in changed:
        found[_ARGUMENTS] = "the arguments of the Trainer, which name the folder of the run"
    if _PROGRESS in changed and _without_log(old) == _without_log(new):
        found[_PROGRESS] = (
            "its log alone: the Trainer averages losses from the resume on, and notes speeds"
        )
    return found


def _without_log(snapshot: Snapshot) -> dict[str, Any]:
    progress: dict[str, Any] = json.loads(snapshot.read_object(_PROGRESS))
    return {**progress, "log_history": None}
