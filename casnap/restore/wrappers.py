"""Advise on names that differ from those in a snapshot by a part that a wrapper adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

_MAKERS = {"_orig_mod.": "torch.compile()", "module.": "DistributedDataParallel"}


def advice_on_wrappers(path: str, missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return advice if the names differ by a part that a wrapper adds; else an empty text.

    Args:
        path: Where the names are in the snapshot.
        missing: The names that only the module has.
        unexpected: The names that only the snapshot has.
    """
    if added := _added_to(missing, unexpected):
        side, begins = "in the snapshot", _begins(added, unexpected)
        call = f"load_into(module, {path!r}, rename=lambda name: name.replace({added!r}, ''))"
        if begins:
            call = f"load_into(module, '{path}/{added.rstrip('.')}')"
        advice = f"{call} fills the module here"
    elif added := _added_to(unexpected, missing):
        side, begins = "here", _begins(added, missing)
        advice = "give the module as it is before its parts are wrapped"
        if begins:
            advice = f"give the module inside of the wrapper, its attribute {added.rstrip('.')}"
    else:
        return ""
    maker = f", as {_MAKERS[added]} makes them" if added in _MAKERS else ""
    verb = "begin with" if begins else "have"
    return f"Names below {path} {verb} {added!r} {side} alone{maker}: {advice}."


def _begins(added: str, names: Collection[str]) -> bool:
    return added not in _MAKERS or all(name.startswith(added) for name in names)


def _added_to(names: Collection[str], longer: Collection[str]) -> str:
    """Return the part that most of the ``longer`` names have in addition to ``names``.

    This is a part that a known wrapper adds, or else a common beginning. Empty if there is none.
    """
    for added in _MAKERS:
        if _are_mostly(names, (_without(added, name) for name in longer)):
            return added
    known = set(names)
    beginnings = Counter(
        name[: dot + 1]
        for name in longer
        for dot, letter in enumerate(name)
        if letter == "." and name[dot + 1 :] in known
    )
    for added, _ in beginnings.most_common(1):
        if _are_mostly(names, (name.removeprefix(added) for name in longer)):
            return added
    return ""


def _without(added: str, name: str) -> str:
    return f".{name}".replace(f".{added}", ".")[1:]


def _are_mostly(names: Collection[str], others: Iterable[str]) -> bool:
    others = set(others)
    return 2 * len(others.intersection(names)) > max(len(others), len(names))
