"""What a difference after a resume usually means, by what the paths are to a training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from casnap import Diff

_MEANS = {
    "scheduler": (
        "the scheduler, or a learning rate, was not restored: it was made, or stepped, after the "
        "restore, or is not in the app state as the one that runs"
    ),
    "scaler": "the GradScaler began anew: it is made, or replaced, after the restore",
    "loader": (
        "the place in the data is another: the loader or sampler does not load what it has stored, "
        "or begins its epoch again"
    ),
    "generators": (
        "random numbers are others: something is seeded, or draws, after the restore; or the data "
        "begins again and draws its order from them"
    ),
    "counters": "a counter was not restored, or counts on from another number",
    "values": "values of the app state were not restored, or depend on the time or the process",
}
_LACKING = {
    "moments": "the app state has no optimizer: it begins anew, with its first learning rate",
    "loader": "the app state has no place in the data: the loader may begin its epoch again",
    "generators": "the app state has no random states, no RNGState: the numbers begin again",
}
_SMALL = 1e-5
"""A relative difference below this looks like another order of additions."""


class Cause(NamedTuple):
    """A usual cause of a difference.

    Attributes:
        role: What the paths that show it are to a training; ``run`` for the run as a whole.
        text: The cause in words.
    """

    role: str
    text: str


def causes_of(diff: Diff, roles: Mapping[str, str]) -> list[Cause]:
    """Return what may have caused a difference, the most likely first.

    Weights and moments tell the least: after one step, every cause makes them differ. So
    differences in other roles are looked at first, and a role that the snapshot lacks next.

    Args:
        diff: The first difference between an unbroken run and one that was resumed.
        roles: What each path of the snapshot is to the training.
    """
    found = diff.by_role()
    causes = list[Cause]()
    known = set(roles.values())
    # An optimizer has groups, also one without moments.
    if "moments" not in known and not any("/param_groups/" in path for path in roles):
        causes.append(Cause("moments", _LACKING["moments"]))
        known.add("moments")
    moments = found.get("moments", [])
    steps = [c for c in moments if c.path.rpartition("/")[2] == "step"]
    if steps or any(change.kind != "changed" for change in moments):
        shown = f" ({steps[0].path}: {steps[0].difference})" if steps else ""
        causes.append(
            Cause(
                "moments",
                "the optimizer has other moments: it was made, or rebuilt, after the restore, or "
                f"is not in the app state{shown}",
            )
        )
    causes += [Cause(role, _MEANS[role]) for role in found if role in _MEANS]
    return causes or _of_weights(diff, known)


def _of_weights(diff: Diff, roles: Collection[str]) -> list[Cause]:
    """Return causes of a difference that only weights and moments show."""
    causes = [Cause(role, text) for role, text in _LACKING.items() if role not in roles]
    weights = [c for c in diff.changes if c.role == "weights"]
    largest = max((c.elements.largest_relative for c in weights if c.elements), default=1.0)
    if largest < _SMALL:
        causes.append(
            Cause(
                "weights",
                f"all differ by less than {_SMALL:g} of their value, as after another order of "
                "additions: other kernels, threads or ranks, or TF32",
            )
        )
    else:
        keys = sorted({c.path.partition("/")[0] for c in weights})
        causes.append(
            Cause(
                "weights",
                f"something that the app state lacks changes {', '.join(keys) or 'the state'}: a "
                "generator of its own, gradients that were being accumulated, averages or master "
                "weights that are not stored, a tie, or a hook that changes what is loaded",
            )
        )
    return causes
