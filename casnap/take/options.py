"""The options of a take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from casnap.format.records import Row
from casnap.runtime.progress import Progress
from casnap.runtime.threads import check_count
from casnap.storage.catalog.retention import Retention, check_retention


# No lambdas: options are pickled for processes that save in the background.
def _ignore(_rows: Sequence[Row]) -> None:
    pass


def _make_no_room(_count_bytes: Callable[[], int]) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class TakeOptions:
    """How to take. :meth:`casnap.Snapshot.take` describes the options.

    Attributes:
        on_commit: Called right after the commit, on the rank that commits; the snapshot is then
            noted as one that the mirror of the store lacks. None if there is no mirror.
        on_release: Called after the commit with the rows of snapshots that it let go.
        make_room: Called before anything is written, with what counts the bytes of the state, and
            where the disk is full; returns whether there is more room now.
    """

    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    allow_pickle: bool = False
    max_staging_bytes: int | None = None
    max_pending: int = 1
    progress: Progress | None = None
    retention: Retention | None = None
    replicated: Sequence[str] | None = None
    per_rank: Sequence[str] | None = None
    threads: int | None = None
    on_commit: Callable[[], None] | None = None
    on_release: Callable[[Sequence[Row]], None] = _ignore
    make_room: Callable[[Callable[[], int]], bool] = _make_no_room

    def __post_init__(self) -> None:
        if self.retention is not None:
            check_retention(self.retention)
        if self.threads is not None:
            check_count("threads", self.threads)
        check_count("max_pending", self.max_pending)
        for name in ("replicated", "per_rank"):
            if isinstance(globs := getattr(self, name), str):
                raise TypeError(f"{name} is a list of globs, such as [{globs!r}]; got a str")
