"""Copying each new snapshot of a store as it is committed, for as long as asked.

A :class:`Follower` copies what is new since its last look. A mirror has one on a thread of its own
(``mirror.py``), and ``casnap cp --follow`` is a :class:`ContinuousCopy`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from casnap.errors import (
    CasnapError,
    DamagedError,
    MirrorError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    UnavailableError,
)
from casnap.runtime.progress import Progress
from casnap.storage.reading.repository import Repository
from casnap.transfer.copy import copy_snapshots
from casnap.transfer.copy_jobs import CopyJob, CopyOptions, CopyReport

_log = logging.getLogger("casnap")
_random = random.SystemRandom()
# The first and the longest pause after a failure, in seconds.
_FIRST, _LONGEST = 1.0, 60.0
# After how many seconds to try again a snapshot that waits for the user to act.
_RETRY_REFUSED = 60.0


@dataclass(frozen=True)
class Pair:
    """What is followed, and where its snapshots go.

    Attributes:
        source: The store to read from.
        destination: The store to write to.
        choose: Returns the snapshots that are meant, as the source has them now, in the order in
            which they are to be copied.
        options: How to copy.
    """

    source: Repository
    destination: Repository
    choose: Callable[[], Iterable[CopyJob]]
    options: CopyOptions = field(default_factory=CopyOptions)


class Refusal(NamedTuple):
    """A snapshot that cannot be copied until the user acts: its commit id, and the reason."""

    commit: bytes
    reason: str


class Follower:
    """Copies what was committed since its last look.

    Args:
        pair: What to copy, and where.
        progress: As for a copy.
        explain: Returns the reason why a snapshot cannot be copied, given the error; None if it is
            not to be tried again.

    Attributes:
        refused: The snapshots, by name, that cannot be copied until the user acts.
    """

    def __init__(
        self,
        pair: Pair,
        progress: Progress | None = None,
        explain: Callable[[CopyJob, CasnapError], str | None] = lambda _, error: str(error),
    ) -> None:
        self._pair = pair
        self._progress = progress
        self._explain = explain
        self._seen_root: bytes | None = None
        self._retry_at = 0.0
        self.refused: dict[str, Refusal] = {}

    def look(self) -> Iterator[tuple[CopyJob, CopyReport]]:
        """Copy the snapshots that are new, and yield each with its report."""
        pair = self._pair
        root = pair.source.newest()
        is_retry = bool(self.refused) and time.monotonic() >= self._retry_at
        if root.commit == self._seen_root and not is_retry:
            return
        names: set[str] = set()
        for job in pair.choose():
            names.add(job.name)
            refusal = self.refused.get(job.name)
            if refusal is not None and refusal.commit == job.row.commit and not is_retry:
                continue
            try:
                report = copy_snapshots(
                    pair.source, pair.destination, [job], pair.options, self._progress
                )
            except SnapshotNotFoundError:
                # It was deleted meanwhile.
                continue
            except (SnapshotExistsError, DamagedError, MirrorError) as e:
                reason = self._explain(job, e)
                if reason is not None:
                    self._refuse(job, reason)
                continue
            self.refused.pop(job.name, None)
            yield job, report
        self.refused = {
            name: reason_refused for name, reason_refused in self.refused.items() if name in names
        }
        self._seen_root = root.commit

    def retry_refused(self) -> None:
        """Try what was refused again at the next look."""
        self._retry_at = 0.0

    def _refuse(self, job: CopyJob, reason: str) -> None:
        refusal = Refusal(job.row.commit, reason)
        if self.refused.get(job.name) != refusal:
            uri = self._pair.destination.backend.uri
            _log.warning("%s is not copied to %s: %s", job.name, uri, reason)
        self.refused[job.name] = refusal
        self._retry_at = time.monotonic() + _RETRY_REFUSED


@dataclass(frozen=True)
class FollowOptions:
    """How to follow; times in seconds.

    Attributes:
        interval: How often to look for new snapshots.
        give_up_after: For how long failures may go on without a success; None for ever.
    """

    interval: float = 5.0
    give_up_after: float | None = None


class ContinuousCopy:
    """Copies what a store holds, and then each snapshot that is committed.

    A snapshot that was copied is not copied again, even if it is deleted at the destination. If it
    is taken anew under its name, its own earlier copy is replaced, and no other snapshot.

    Args:
        open_pair: Opens both stores.
        options: How to follow.
        progress: As for a copy.
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
        self._follower: Follower | None = None
        self._copied: dict[str, set[bytes]] = {}
        self._backoff = Backoff("the copy")

    @property
    def refused(self) -> dict[str, str]:
        """Snapshots, by name, that cannot be copied until the user acts, and the reasons."""
        refused = {} if self._follower is None else self._follower.refused
        return {name: refusal.reason for name, refusal in refused.items()}

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
                if self._follower is None and not isinstance(e, UnavailableError):
                    raise
                self._backoff.note_failure(e)
                most = self._options.give_up_after
                if most is not None and self._backoff.failing_for >= most:
                    raise
            else:
                self._backoff.note_success()
            time.sleep(max(self._options.interval, self._backoff.delay))

    def _look(self) -> Iterator[CopyReport]:
        if self._follower is None:
            self._follower = self._open_follower()
        for job, report in self._follower.look():
            self._copied.setdefault(job.new_name, set()).add(job.row.commit)
            if report.copied:
                yield report

    def _open_follower(self) -> Follower:
        pair = self._open_pair()

        def new_jobs() -> Iterator[CopyJob]:
            try:
                snapshots = sorted(pair.choose(), key=lambda job: job.row.seq)
            except SnapshotNotFoundError:
                return  # there is nothing yet
            for job in snapshots:
                commits = frozenset(self._copied.get(job.new_name, ()))
                if job.row.commit not in commits:
                    yield job._replace(replaces=commits)

        return Follower(Pair(pair.source, pair.destination, new_jobs, pair.options), self._progress)


class Backoff:
    """The failures of some work that is tried again and again: after each, it waits longer.

    Args:
        task: The work, for messages.

    Attributes:
        error: The last failure; None if the last try was a success.
        since: When it began to fail, in seconds since the epoch.
    """

    def __init__(self, task: str) -> None:
        self.error: BaseException | None = None
        self.since: float | None = None
        self._task = task
        self._failures = 0
        self._next = 0.0

    def note_failure(self, error: BaseException) -> None:
        """Note a failure; log the first one."""
        if self.since is None:
            self.since = time.time()
            _log.warning("%s fails, and is tried again: %.1000s", self._task, error)
        else:
            _log.info("%s fails still: %.1000s", self._task, error)
        self.error = error
        # Random, so that many hosts do not come back together.
        delay = min(_LONGEST, _FIRST * 2 ** min(self._failures, 10))
        self._failures += 1
        self._next = time.monotonic() + delay * _random.uniform(0.5, 1.0)

    def note_success(self) -> None:
        """Note that a try did not fail."""
        if self.since is not None:
            _log.warning("%s works again", self._task)
        self.error, self.since = None, None
        self._failures, self._next = 0, 0.0

    def hurry(self) -> None:
        """Have the next try at once."""
        self._next = 0.0

    @property
    def failing_for(self) -> float:
        """For how many seconds it has been failing."""
        return 0.0 if self.since is None else time.time() - self.since

    @property
    def delay(self) -> float:
        """How many seconds to wait before the next try; 0 for none."""
        return max(0.0, self._next - time.monotonic())
