"""The usual causes of a difference after a resume, by the roles of the paths that differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from casnap import Diff
from casnap.extending import TensorEntry

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
_HALVES = frozenset({"bfloat16", "float16"})
_SMALL = 1e-5
"""Relative differences below this may come from floating-point additions in another order."""


class Cause(NamedTuple):
    """A usual cause of a difference.

    Attributes:
        role: The role of the paths that show it, such as ``weights``; or ``run`` for the run as a
            whole, ``environment`` for its settings, ``ranks`` for another number of ranks.
        text: The cause in words.
    """

    role: str
    text: str


def causes_of(diff: Diff, roles: Mapping[str, str], own_keys: Collection[str] = ()) -> list[Cause]:
    """Return what may have caused a difference, the most likely first.

    Weights and moments say the least about the cause: after one step, every cause makes them
    differ. So differences in other roles are looked at first, then roles that the snapshot lacks.

    Args:
        diff: The first difference between an unbroken run and one that was resumed.
        roles: The role in the training of each path of the snapshot.
        own_keys: Keys of entries that single ranks kept for themselves, if the run went on with
            other ranks.
    """
    found = diff.by_role()
    causes = [*_of_ties(diff), *_of_names(diff)]
    known = set(roles.values())
    # An optimizer has groups, also one without moments.
    if "moments" not in known and not any("/param_groups/" in path for path in roles):
        causes.append(Cause("moments", _LACKING["moments"]))
        known.add("moments")
    causes += _of_moments(diff)
    causes += [Cause(role, _MEANS[role]) for role in found if role in _MEANS]
    return causes or _of_weights(diff, known, own_keys)


def environment_cause(before: Mapping[str, str], after: Mapping[str, str]) -> list[Cause]:
    """Return a cause that says how the environments of two takes differ; none if they are equal."""
    changed = [
        f"{key} {before.get(key, 'none')} → {after.get(key, 'none')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
        # Some are noted late, as the device; variables are there from the start, or never.
        and (key.isupper() or (key in before and key in after))
    ]
    text = f"the run went on with other settings: {', '.join(changed)}"
    return [Cause("environment", text)] if changed else []


def _of_ties(diff: Diff) -> list[Cause]:
    """Return a cause if weights were equal, as tied weights are, and now differ."""
    alike = defaultdict[object, list[tuple[str, object]]](list)
    for change in diff.of("changed"):
        old, new = change.old, change.new
        if change.role == "weights" and old and new and old.payload.digests:
            key = change.path.partition("/")[0]  # an average of its own is no tie
            alike[key, old.payload].append((change.path, new.payload))
    for tensors in alike.values():
        if len({payload for _, payload in tensors}) > 1:
            names = " and ".join(path for path, _ in tensors[:2])
            return [Cause("weights", f"a tie is lost: {names} were equal, and are not any more")]
    return []


def _of_names(diff: Diff) -> list[Cause]:
    """Return a cause if weights were added or removed."""
    parts = [
        f"{path} is {word}"
        for changes, word in ((diff.of("removed"), "gone"), (diff.of("added"), "new"))
        for path in [change.path for change in changes if change.role == "weights"][:1]
    ]
    text = f"the weights have other names: {', '.join(parts)}; with strict=False nothing fills them"
    return [Cause("weights", text)] if parts else []


def _of_moments(diff: Diff) -> list[Cause]:
    """Return a cause if moments were added or removed, or if their steps differ.

    Other changes of moments say nothing, since every cause leads to them.
    """
    moments = [change for change in diff.changes if change.role == "moments"]
    steps = [c for c in moments if c.path.rpartition("/")[2] == "step" and c.kind != "added"]
    new = [change for change in moments if change.kind == "added"]
    if new and not steps and all(change.kind != "removed" for change in moments):
        return [
            Cause(
                "moments",
                f"the optimizer has more moments, as {new[0].path}: it trains parameters that it "
                "did not, such as a part that was frozen",
            )
        ]
    if not steps and all(change.kind == "changed" for change in moments):
        return []
    shown = f" ({steps[0].path}: {steps[0].difference})" if steps else ""
    return [
        Cause(
            "moments",
            "the optimizer has other moments: it was made, or rebuilt, after the restore, or is "
            f"not in the app state{shown}",
        )
    ]


def _of_weights(diff: Diff, known: Collection[str], own_keys: Collection[str]) -> list[Cause]:
    """Return the possible causes if only weights and moments differ.

    A role that the app state lacks, such as generators, may be the cause too.
    """
    lacking = [Cause(role, text) for role, text in _LACKING.items() if role not in known]
    weights = [change for change in diff.changes if change.role == "weights"]
    largest = max((c.elements.largest_relative for c in weights if c.elements), default=1.0)
    if largest < _SMALL:
        return [
            *lacking,
            Cause(
                "weights",
                f"all differ by less than {_SMALL:g} of their value, as after another order of "
                "additions: other kernels, threads or ranks",
            ),
        ]
    causes = list[Cause]()
    if own_keys:
        causes.append(
            Cause(
                "ranks",
                f"single ranks keep {', '.join(own_keys)} for themselves: a new rank has nothing "
                "of it, and what moves to another rank is left behind. Let shards be DTensors",
            )
        )
    dtypes = {c.old.dtype for c in weights if isinstance(c.old, TensorEntry)}
    if dtypes and dtypes <= _HALVES:
        causes.append(
            Cause(
                "weights",
                f"the app state has weights in {' and '.join(sorted(dtypes))} alone: if there are "
                "master weights in float32, they are not stored",
            )
        )
    keys = sorted({c.path.partition("/")[0] for c in weights})
    rest = Cause(
        "weights",
        f"something that the app state lacks changes {', '.join(keys) or 'the state'}: a generator "
        "of its own, gradients that were being accumulated, averages or master weights that are "
        "not stored, a hook that changes what is loaded, or a compiled graph with older values",
    )
    return [*causes, *lacking, rest]
