"""Every error that casnap raises on purpose.

::

    CasnapError
    ├── StoreError                  a store cannot be used
    │   ├── NotAStoreError          nothing (or something else) is at this place
    │   ├── UnsupportedFormatError  written by a newer casnap
    │   ├── MirrorError             the mirror of a store cannot be used, or lags
    │   ├── BackendError            the place refused, or failed, at an object
    │   │   └── StorageFullError    no space, or a quota, left
    │   └── UnavailableError        says nothing about the objects; stops the work; see ``reason``
    │       └── UnclearCommitError  a commit was put, or may have been, and may not last
    ├── SnapshotError               a name in a store
    │   ├── InvalidNameError        (ValueError) a name that cannot be used
    │   ├── SnapshotExistsError     (FileExistsError) the name is taken
    │   └── SnapshotNotFoundError   (KeyError) no such snapshot
    ├── StateError                  the state that was handed in
    │   ├── UnsupportedTypeError    (TypeError) not Stateful, or cannot be stored safely
    │   ├── MismatchError           (RuntimeError) state and snapshot differ
    │   ├── WitnessError            a state is not what it was at this step before
    │   ├── UnhealthyError          tensors of a state are NaN or infinite
    │   └── EntryNotFoundError      (KeyError) no such path inside the snapshot
    ├── FileFormatError             (ValueError) a file cannot be imported, or cannot hold an export
    ├── DamagedError                stored bytes are missing or not what was written
    ├── DeviceError                 an accelerator computed something wrong
    ├── NotServedError              (TimeoutError) followers do not serve a version in time
    ├── RankError                   another rank of a take or restore failed, died or hangs
    └── FencedError                 a collector deleted chunks that a paused take relied on

If the place of a store fails, the error is a :class:`BackendError` or an :class:`UnavailableError`;
``except StoreError`` catches both. An outage is not a ``BackendError``: code that catches
``BackendError`` skips an unreadable object or calls it damaged, which would be wrong while no
object can be read.

An :class:`UnavailableError` has a ``reason``, a str of :data:`Reason`:

===============  ====================================================================
``exhausted``    this process or host has no open files, no memory or no threads left
``unreachable``  no answer from the server, or none in time; or each attempt failed
``denied``       the server does not allow this: a policy, a key of KMS, who pays
``credentials``  credentials are missing, wrong or expired, or a clock is wrong
``no_bucket``    the bucket does not exist
``archived``     the object has to be restored from its storage class first
``other``        something else, which the message says
===============  ====================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import islice
from os.path import commonprefix
from typing import Any, Literal, TypeAlias

Reason: TypeAlias = Literal[
    "exhausted", "unreachable", "denied", "credentials", "no_bucket", "archived", "other"
]
"""The reason of an :class:`UnavailableError`."""


class CasnapError(Exception):
    """The base of all errors that casnap raises on purpose."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return str(self.args[0]) if self.args else ""


class StoreError(CasnapError):
    """A store cannot be used."""


class NotAStoreError(StoreError):
    """No casnap store is at this place."""


class UnsupportedFormatError(StoreError):
    """The store uses a format or feature that this version does not know."""


class MirrorError(StoreError):
    """The mirror of a store is not the right one, or did not get all snapshots in time."""


class BackendError(StoreError):
    """The file system or object store refused or failed."""


class StorageFullError(BackendError):
    """No space, or no quota, is left at the store's place."""


class UnavailableError(StoreError):
    """A call failed, but that does not mean that the object is damaged.

    Attributes:
        reason: Why the call failed, in a word that programs can compare.
    """

    def __init__(self, message: str, reason: Reason = "other") -> None:
        super().__init__(message)
        self.reason: Reason = reason


class UnclearCommitError(UnavailableError):
    """A commit was put, or may have been put, but it is not known whether it lasts.

    The call may have succeeded. Repeating it is safe: a take of the same name replaces its own
    commit.
    """


PlaceError: TypeAlias = BackendError | UnavailableError
"""An error of a store's place: a failure at an object, or an outage."""
PLACE_ERRORS = (BackendError, UnavailableError)
"""The types of :data:`PlaceError`, for ``except`` in code that can go on without the place."""


class SnapshotError(CasnapError):
    """The name of a snapshot cannot be used."""


class InvalidNameError(SnapshotError, ValueError):
    """A name cannot be the name of a snapshot or a tag."""


class SnapshotExistsError(SnapshotError, FileExistsError):
    """Another snapshot, or a file, already has the name."""


class SnapshotNotFoundError(SnapshotError, KeyError):
    """No snapshot has this name."""


class StateError(CasnapError):
    """The given state cannot be taken or restored."""


class UnsupportedTypeError(StateError, TypeError):
    """A value that is not Stateful, or that cannot be stored and read back safely."""


class MismatchError(StateError, RuntimeError):
    """The state to be restored and the snapshot do not fit each other."""


class WitnessError(StateError):
    """A state is not what it was when its witness was stored.

    Attributes:
        report: What differs: a :class:`casnap.WitnessReport`.
    """

    def __init__(self, message: str = "", report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class UnhealthyError(StateError):
    """Tensors of a state have NaN or infinite elements, and the take was asked to raise that."""


class EntryNotFoundError(StateError, KeyError):
    """No entry of the snapshot has this path."""


class FileFormatError(CasnapError, ValueError):
    """A file of another format cannot be read, cannot hold the exported state, or is in the way."""


class DamagedError(CasnapError):
    """Stored bytes are missing or differ from what was written.

    Attributes:
        paths: The paths inside the snapshot that need the bytes, as far as they are known.
        what: The message without the advice.
    """

    def __init__(self, message: str, paths: tuple[str, ...] = (), advice: str = "") -> None:
        super().__init__(f"{message}. {advice}" if advice else message)
        self.paths = paths
        self.what = message


class DeviceError(CasnapError):
    """An accelerator computed a wrong digest, or does not hold what was copied to it."""


class FencedError(CasnapError):
    """A garbage collector deleted chunks that a take relied on, before the take could commit.

    A take then starts again by itself. It raises this error if it cannot: collectors were faster
    five times, ``max_staging_bytes`` did not let an async take keep all its copies, or the chunks
    that it relied on were never copied from a device.
    """

    def __init__(
        self,
        message: str = "a garbage collector whose grace was shorter than this has deleted packs "
        "that were written or relied on; take again, and give `casnap gc` a longer --grace",
    ) -> None:
        super().__init__(message)


class NotServedError(CasnapError, TimeoutError):
    """Some followers do not serve a version in time; the message says which.

    Attributes:
        lagging: The followers that do not serve it, each as ``host:pid``.
    """

    def __init__(self, message: str, lagging: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lagging = lagging


class RankError(CasnapError):
    """Another rank failed, died, or did not answer within the deadline.

    Attributes:
        ranks: The ranks at fault, as far as they are known.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def retold(error: BaseException, text: str) -> CasnapError:
    """Return a copy of an error with another text.

    The copy has the error's type if casnap defines that type; otherwise it is a CasnapError.
    """
    if not isinstance(error, CasnapError):
        return CasnapError(text)
    copy = type(error)(text)
    copy.__dict__.update(error.__dict__)
    return copy


def with_article(noun: str) -> str:
    """Return ``noun``, such as the name of a type, with "a" or "an" before it."""
    # By sound, not by letter: an ndarray, but a UserDict.
    is_vowel = noun.lower().startswith(("a", "e", "i", "o", "ndarray"))
    return f"{'an' if is_vowel else 'a'} {noun}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, which suggests the most similar name.

    Comparing names is slow. If there are many, this compares only the names whose beginning and end
    are most like those of ``name``.

    Args:
        name: The unknown name.
        names: The names that exist.
    """
    from difflib import get_close_matches

    def ends_alike(other: str) -> int:
        pairs = (name, other), (name[::-1], other[::-1])
        return sum(len(commonprefix(pair)) for pair in pairs)  # noqa: RUF071 - of characters

    likely = nlargest(_MOST_COMPARED, islice(names, _MOST_NAMES), ends_alike)
    near = get_close_matches(name[:_LONGEST], [n for n in likely if len(n) <= _LONGEST], 3, 0.5)
    return f"; nearest: {', '.join(near)}" if near else ""


_MOST_COMPARED, _MOST_NAMES, _LONGEST = 100, 100_000, 1000


def shell_word(text: object) -> str:
    """Return a path, URI or name as one word of a shell, for a command in a message."""
    import shlex

    return shlex.quote(str(text))


SOURCE = "/path/to/casnap"
"""The place from which pip installs casnap: a clone, as long as no version is on an index."""


def pip_install(extra: str) -> str:
    """Return the command that installs casnap with the packages of an extra."""
    return f"pip install '{SOURCE}[{extra}]'"
