"""Copying each new snapshot of a store as it is committed, for as long as asked."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from casnap.errors import (
    CasnapError,
    DamagedError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    UnavailableError,
)
from casnap.runtime.progress import Progress
from casnap.storage.objects import Objects
from casnap.transfer.copy import copy_snapshots
from casnap.transfer.patience import RETRY_REFUSED, Patience
from casnap.transfer.report import ChosenSnapshot, CopyOptions, CopyReport

_log = logging.getLogger("casnap")


@dataclass(frozen=True)
class Pair:
    """What is followed, and where its snapshots go.

    Attributes:
        source: The store to read from.
        destination: The store to write to.
        choose: Returns the snapshots that are meant, as the newest root of the source has them.
        options: How to copy.
    """

    source: Objects
    destination: Objects
    choose: Callable[[], list[ChosenSnapshot]]
    options: CopyOptions


@dataclass(frozen=True)
class FollowOptions:
    """How to follow; times in seconds.

    Attributes:
        interval: How often to look for new snapshots.
        give_up_after: For how long failures may go on without a success; None for ever.
    """

    interval: float = 5.0
    give_up_after: float | None = None


class Follower:
    """Copies what a store holds, and then each snapshot that is committed.

    A snapshot that was copied is not copied again, even if it is deleted at the destination. If it
    is taken anew under its name, its own earlier copy is replaced, and no other snapshot.

    Args:
        open_pair: Opens both stores.
        options: How to follow.
        progress: As for a copy.

    Attributes:
        refused: Snapshots, by name, that cannot be copied until the user acts, and why.
    """

    def __init__(
        self,
        open_pair: Callable[[], Pair],
        options: FollowOptions,
        progress: Progress | None = None,
    ) -> None:
        self._open_pair = open_pair
        self._options = options
        self._progress = progress
        self._pair: Pair | None = None
        self._looked_at: bytes | None = None
        self._retry_at = math.inf
        self._done: set[bytes] = set()
        self._copied: dict[str, set[bytes]] = {}
        self._patience = Patience("the copy")
        self.refused: dict[str, str] = {}

    def reports(self) -> Iterator[CopyReport]:
        """Copy, and yield a report for each snapshot; for ever.

        Raises:
            CasnapError: It cannot begin, or has failed for as long as the options allow.
        """
        while True:
            try:
                yield from self._look()
            except CasnapError as e:
                # At the beginning, only what may pass is tried again: it may be a wrong argument.
                if self._pair is None and not isinstance(e, UnavailableError):
                    raise
                self._patience.note_failure(e)
                most = self._options.give_up_after
                if most is not None and self._patience.failing_for >= most:
                    raise
            else:
                self._patience.note_success()
            time.sleep(max(self._options.interval, self._patience.delay))

    def _look(self) -> Iterator[CopyReport]:
        """Copy what is new since the last look."""
        pair = self._pair or self._open_pair()
        self._pair = pair
        root = pair.source.newest()
        if root.commit == self._looked_at and time.monotonic() < self._retry_at:
            return
        try:
            found = pair.choose()
        except SnapshotNotFoundError:
            # There is nothing yet.
            found = []
        self.refused = {}
        self._retry_at = math.inf
        for chosen in sorted(found, key=lambda c: c.row.seq):
            if chosen.row.commit not in self._done:
                report = self._copy(pair, chosen)
                if report is not None:
                    yield report
        self._looked_at = root.commit

    def _copy(self, pair: Pair, chosen: ChosenSnapshot) -> CopyReport | None:
        own = self._copied.setdefault(chosen.target, set())
        chosen = chosen._replace(replaces=frozenset(own))
        try:
            report = copy_snapshots(
                pair.source, pair.destination, [chosen], pair.options, self._progress
            )
        except SnapshotNotFoundError:
            # It was deleted meanwhile.
            return None
        except (SnapshotExistsError, DamagedError) as e:
            _log.warning("%s is not copied: %s", chosen.name, e)
            self.refused[chosen.name] = str(e)
            self._retry_at = time.monotonic() + RETRY_REFUSED
            return None
        own.add(chosen.row.commit)
        self._done.add(chosen.row.commit)
        return report if report.copied else None
