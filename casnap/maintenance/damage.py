"""The findings of a check: damages in a store, which snapshots they hurt, and damaged roots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from casnap.backends import Backend
from casnap.errors import BackendError, DamagedError
from casnap.format.records import root_key
from casnap.runtime.threads import mapped
from casnap.storage.inspecting import COPIES, Reason, read_root


@dataclass(frozen=True)
class Hurt:
    """A part of a snapshot that cannot be restored.

    Attributes:
        snapshot: Its name in the store; ``*`` for all snapshots.
        path: The tensor, value or subtree; empty for the whole snapshot.
    """

    snapshot: str
    path: str


ALL = Hurt("*", "")


@dataclass(eq=False)
class Damage:
    """An object, chunk or record in a store that is not as it was written.

    Attributes:
        kind: ``missing``, ``cut off``, ``changed`` or ``unreadable`` (the storage refuses) for an
            object or a chunk; ``condemned`` for a pack that is needed and about to be deleted;
            ``lost`` for a chunk that a repair could not find; ``malformed`` for a record that was
            written wrongly. ``unsupported`` is no damage: this version cannot judge it.
        object: The key of the damaged object; empty if a digest has no place at all.
        message: What is wrong, for people.
        digest: The damaged chunk or node, in hex; empty if the whole object is damaged.
        hurts: Everything that cannot be restored because of the damage.
    """

    kind: str
    object: str
    message: str
    digest: str = ""
    hurts: dict[Hurt, None] = field(default_factory=dict)


UNSUPPORTED = "unsupported"
"""The kind of data that this version does not know, and so cannot judge. That is no damage."""
KINDS = {
    Reason.NOWHERE: "missing",
    Reason.MISSING: "missing",
    Reason.UNREADABLE: "unreadable",
    Reason.CUT_OFF: "cut off",
    Reason.IMPOSSIBLE: "changed",
    Reason.CHANGED: "changed",
    Reason.UNSUPPORTED: UNSUPPORTED,
}
"""The kind of the damage, by the reason why a chunk could not be read."""

# A listing may be stale, so up to this many roots in a row that it lacks are looked for by name. If
# more are lacking, all count as missing, since a root may claim any number.
_MOST_UNLISTED = 1000


class Findings:
    """The damages that a survey has found so far.

    Attributes:
        damages: The damages.
        unsupported: The parts that only a newer version can read.
    """

    def __init__(self) -> None:
        self.damages: list[Damage] = []
        self.unsupported: list[Damage] = []

    def add(self, kind: str, key: str, message: str, digest: bytes = b"") -> Damage:
        """Add a damage, and return it.

        Args:
            kind: Its kind, as in :class:`Damage`.
            key: The key of the damaged object.
            message: What is wrong, for people.
            digest: The damaged chunk or node; empty if the whole object is damaged.
        """
        self.damages.append(Damage(kind, key, message, digest.hex()))
        return self.damages[-1]

    def add_unsupported(self, message: str, key: str = "") -> Damage:
        """Add a part that this version cannot judge, and return it.

        Args:
            message: Why it cannot, for people.
            key: The key of the object; empty if there is none.
        """
        self.unsupported.append(Damage(UNSUPPORTED, key, message))
        return self.unsupported[-1]


READ_ERRORS = (FileNotFoundError, DamagedError, BackendError)
"""The errors of reading an object of a store that is damaged, or that cannot be read now."""


def kind_and_message(error: Exception, label: str) -> tuple[str, str]:
    """Return the kind and the message of the damage that an error shows.

    Args:
        error: The error of reading an object.
        label: The name of the object.
    """
    if isinstance(error, FileNotFoundError):
        return "missing", f"{label} is missing"
    return "unreadable" if isinstance(error, BackendError) else "changed", str(error)


def root_damages(backend: Backend, newest: int) -> tuple[list[Damage], list[Damage]]:
    """Return the damages of the newest root, and the damages of older roots.

    If the newest root is damaged, its copy is used instead. Older roots are history: no snapshot
    needs them.
    """
    stood_in_for = _damages_of_roots(backend, [newest])
    for damage in stood_in_for:
        damage.message += "; its copy stands in for it until a repair puts another one"
    return stood_in_for, history_damages(backend, newest)


def history_damages(backend: Backend, newest: int) -> list[Damage]:
    """Return the damages of the roots before the newest one."""
    damages: list[Damage] = []
    numbers: list[int] = []
    before = -1
    for seq in (*(seq for seq in listed_roots(backend) if seq < newest), newest):
        lacking = range(before + 1, seq)
        if len(lacking) > _MOST_UNLISTED:
            message = f"the roots {lacking[0]} to {lacking[-1]} are missing"
            damages.append(Damage("missing", root_key(lacking[0]), message))
        else:
            numbers += lacking
        if seq < newest:
            numbers.append(seq)
        before = seq
    return [*damages, *_damages_of_roots(backend, numbers)]


def listed_roots(backend: Backend) -> list[int]:
    """Return the numbers of all roots that the backend lists."""
    return sorted(
        int(key.rpartition("/")[2]) for key in _keys_among_roots(backend) if _is_root(key)
    )


def other_than_roots(backend: Backend) -> list[str]:
    """Return the keys of objects among the roots that are neither a root nor a copy of one."""
    keys = _keys_among_roots(backend)
    return [key for key in keys if not _is_root(key) and not key.startswith(f"{COPIES}/")]


def _keys_among_roots(backend: Backend) -> list[str]:
    folders = [f"roots/{folder}" for folder in backend.names("roots")]
    return [f"{folder}/{name}" for folder in folders for name in backend.names(folder)]


def _is_root(key: str) -> bool:
    name = key.rpartition("/")[2]
    return name.isascii() and name.isdigit() and root_key(int(name)) == key


def _damages_of_roots(backend: Backend, numbers: Iterable[int]) -> list[Damage]:
    """Return the damages of some roots."""

    def look(seq: int) -> Damage | None:
        try:
            read_root(backend, seq)
        except READ_ERRORS as e:
            kind, message = kind_and_message(e, "a root")
            return Damage(kind, root_key(seq), message)
        return None

    looks = mapped(look, numbers, backend.in_flight)
    return [damage for _, damage in looks if damage is not None]
