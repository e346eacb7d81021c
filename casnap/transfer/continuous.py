"""Copy each new snapshot of a store soon after its commit.

A :class:`ContinuousCopier` copies the snapshots that were committed since it last looked. A mirror
uses one on a thread of its own, and ``casnap cp --follow`` uses one in a loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from casnap.errors import (
    CasnapError,
    DamagedError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    UnavailableError,
)
from casnap.runtime.backoff import Backoff
from casnap.runtime.progress import Progress
from casnap.storage import Repository
from casnap.transfer.copy import copy_snapshots
from casnap.transfer.copy_jobs import CopyJob, CopyOptions, CopyReport, PlacementError

_log = logging.getLogger("casnap")
# The seconds after which a snapshot that waits for the user to act is tried again.
_RETRY_REFUSED = 60.0


@dataclass(frozen=True)
class Pair:
    """The store that is followed, and the store that gets its snapshots.

    Attributes:
        source: The store to read from.
        destination: The store to write to.
        choose: Returns a job for each snapshot of the source that the destination is to have, even
            if it has the snapshot already.
        options: The options of each copy.
    """

    source: Repository
    destination: Repository
    choose: Callable[[], Iterable[CopyJob]]
    options: CopyOptions = field(default_factory=CopyOptions)


class _Refusal(NamedTuple):
    """A snapshot that cannot be copied until the user acts: its commit id, and the reason."""

    commit: bytes
    reason: str


class ContinuousCopier:
    """Copies the snapshots that were committed since it last looked.

    Args:
        open_pair: Opens both stores, at the first look.
        progress: Called with "copying", the bytes that were sent or found present, and the total.
        explain: Given a snapshot that cannot be copied, and the error, returns the reason to show
            to the user; None to never try that snapshot again.
    """

    def __init__(
        self,
        open_pair: Callable[[], Pair],
        progress: Progress | None = None,
        explain: Callable[[CopyJob, CasnapError], str | None] = lambda _, error: str(error),
    ) -> None:
        self._open_pair = open_pair
        self._pair: Pair | None = None
        self._progress = progress
        self._explain = explain
        self._seen_root: bytes | None = None
        self._retry_at = 0.0
        self._refused: dict[str, _Refusal] = {}

    @property
    def refused(self) -> dict[str, str]:
        """Name of each snapshot that waits for the user to act → why it cannot be copied."""
        # A copy of the dict: another thread may be changing it.
        return {name: refusal.reason for name, refusal in dict(self._refused).items()}

    def retry_refused(self) -> None:
        """Try the refused snapshots again when :meth:`look` is called next."""
        self._retry_at = 0.0

    def look(
        self, choose_of: Callable[[Iterable[CopyJob]], Iterable[CopyJob]] = iter
    ) -> Iterator[tuple[CopyJob, CopyReport]]:
        """Look once for new snapshots; copy them, and yield each job with the report of its copy.

        Args:
            choose_of: Given all jobs of the pair, returns those to copy now, in their order.
        """
        pair = self._pair = self._pair or self._open_pair()
        root = pair.source.newest()
        is_retry = bool(self._refused) and time.monotonic() >= self._retry_at
        if root.commit == self._seen_root and not is_retry:
            return
        try:
            jobs = pair.choose()
        except SnapshotNotFoundError:
            jobs = ()  # the source has no such snapshot yet
        names: set[str] = set()
        for job in choose_of(jobs):
            names.add(job.name)
            refusal = self._refused.get(job.name)
            if refusal is not None and refusal.commit == job.row.commit and not is_retry:
                continue
            try:
                report = copy_snapshots(
                    pair.source, pair.destination, [job], pair.options, self._progress
                )
            except SnapshotNotFoundError:
                # The snapshot was deleted meanwhile.
                continue
            except (SnapshotExistsError, DamagedError, PlacementError) as e:
                reason = self._explain(job, e)
                if reason is not None:
                    self._refuse(job, reason, pair.destination.backend.uri)
                continue
            self._refused.pop(job.name, None)
            yield job, report
        self._refused = {name: each for name, each in self._refused.items() if name in names}
        self._seen_root = root.commit

    def _refuse(self, job: CopyJob, reason: str, uri: str) -> None:
        refusal = _Refusal(job.row.commit, reason)
        if self._refused.get(job.name) != refusal:
            _log.warning("%s is not copied to %s: %s", job.name, uri, reason)
        self._refused[job.name] = refusal
        self._retry_at = time.monotonic() + _RETRY_REFUSED

    def follow(self, interval: float, give_up_after: float | None = None) -> Iterator[CopyReport]:
        """Copy the snapshots of the source, then each new one, for ever; yield the reports.

        A snapshot that was copied is not copied again, even if it is deleted at the destination. If
        a new snapshot is taken under its name, the new copy replaces the old copy, and no other
        snapshot.

        Args:
            interval: The seconds between two looks.
            give_up_after: For how many seconds failures may go on without a success; None: for
                ever.

        Raises:
            CasnapError: Copying cannot begin, or has failed for ``give_up_after`` seconds.
        """
        copied: dict[str, set[bytes]] = {}
        backoff = Backoff("the copy")
        while True:
            try:
                for job, report in self.look(partial(_not_copied, copied)):
                    copied.setdefault(job.new_name, set()).add(job.row.commit)
                    if report.copied:
                        yield report
            except CasnapError as e:
                # The first look retries only errors that may pass: others may come from an
                # argument.
                if self._pair is None and not isinstance(e, UnavailableError):
                    raise
                backoff.note_failure(e)
                if give_up_after is not None and backoff.failing_for >= give_up_after:
                    raise
            else:
                backoff.note_success()
            time.sleep(max(interval, backoff.delay))


def _not_copied(copied: dict[str, set[bytes]], jobs: Iterable[CopyJob]) -> Iterator[CopyJob]:
    """Yield the jobs whose snapshots were not copied yet, in the order of their commits.

    Each may replace earlier copies under its name.

    Args:
        copied: Name at the destination → the commits that were copied.
        jobs: The jobs.
    """
    for job in sorted(jobs, key=lambda job: job.row.seq):
        commits = frozenset(copied.get(job.new_name, ()))
        if job.row.commit not in commits:
            yield job._replace(replaces=commits)
