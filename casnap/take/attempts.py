"""Takes that fail: they raise, or with ``on_error="warn"`` they warn, and the run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

from casnap.errors import (
    BackendError,
    CasnapError,
    DamagedError,
    FencedError,
    UnclearCommitError,
)
from casnap.format.records import Row

_log = logging.getLogger("casnap")
T = TypeVar("T")
U = TypeVar("U")

OnError: TypeAlias = Literal["raise", "warn"]

# What may be gone at the next take. A wrong state or name is not, nor is a rank that died. An error
# of one rank has the same type on all of them, so all of them go on, or none.
_OF_STORAGE = (BackendError, DamagedError, FencedError)


@dataclass
class _Series:
    """Takes that failed one after the other.

    Attributes:
        since: The time of the first one.
        count: How many they are.
        last_error: The error of the last one.
    """

    since: float
    count: int = 0
    last_error: str = ""


# The takes that have failed since one was stored, by the path of their run.
_series: dict[str, _Series] = {}
# The commits of this process that stand, or may, although no caller was told so. A take of the same
# name replaces them.
unclear_commits: set[bytes] = set()


def what_failed(snapshot: str, error: BaseException) -> str:
    """Return what to tell of a take that failed.

    Args:
        snapshot: The name of the snapshot, or its path.
        error: Why it failed.
    """
    if isinstance(error, UnclearCommitError):
        return f"it is not known whether the snapshot {snapshot} is stored"
    return f"the snapshot {snapshot} was NOT stored"


class Attempt:
    """One take of a loop.

    Args:
        path: The path of the snapshot, or its URI.
        on_error: What becomes of an error of the storage: it is raised, or only logged.

    Attributes:
        on_error: As given.

    Raises:
        ValueError: ``on_error`` is something else.
    """

    def __init__(self, path: str = "", on_error: OnError = "raise") -> None:
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error= is 'raise' or 'warn', not {on_error!r:.80}")
        self.on_error: OnError = on_error
        self._path = path
        self._run = path.rpartition("/")[0]
        self._is_noted = False

    def run(self, take: Callable[[], T], if_failed: Callable[[CasnapError], U]) -> T | U:
        """Take; if that fails, and the run goes on, return something else.

        Args:
            take: Takes the snapshot, or begins to.
            if_failed: Returns that, given the error.
        """
        try:
            return take()
        except _OF_STORAGE as e:
            if not self.tolerates(e):
                raise
            return if_failed(e)

    def tolerates(self, error: BaseException) -> bool:
        """Return whether the run goes on after an error of the take; log it then."""
        if self.on_error == "raise" or not isinstance(error, _OF_STORAGE):
            return False
        # A call and its part in the background may fail both.
        if not self._is_noted:
            self._is_noted = True
            series = _series.setdefault(self._run, _Series(time.time()))
            series.count += 1
            series.last_error = f"{type(error).__name__}: {error}"
            _log.warning(
                "%s; the run goes on (on_error='warn'): %s",
                what_failed(self._path, error),
                series.last_error,
            )
        return True

    def note_stored(self, row: Row) -> None:
        """Note that the snapshot is stored; log what takes of its run have failed before."""
        unclear_commits.discard(row.commit)
        series = _series.pop(self._run, None)
        if series is not None:
            _log.warning(
                "the snapshot %s is stored; %d before it failed since %s, the last with %s",
                self._path,
                series.count,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(series.since)),
                series.last_error,
            )
