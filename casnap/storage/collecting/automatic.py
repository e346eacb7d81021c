"""Automatic collections: a process that deletes snapshots also frees their bytes.

The first collection of a process begins in the background once the process has deleted a snapshot.
It goes through the whole store. A later collection begins once enough bytes were deleted; how many
are enough depends on how much of the process's time collections have taken. On a local disk it
looks only at packs that are new, or that hold chunks no longer needed. Once much more was deleted
than is kept, a collection goes through the whole store again.

On a local disk, a collection frees the packs that were condemned before the end of the previous
collection. So each reader and each take has the time between two collections to finish. On a remote
store, and where the store sets a grace, condemned packs stay for the grace. These waits are not
what makes a collection safe: the protocol is (``docs/commit-protocol.md``).
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

from casnap.errors import CasnapError, StorageFullError, shell_word
from casnap.format.records import Root, Row
from casnap.runtime.environment import collects_by_itself
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.progress import Progress
from casnap.runtime.sizes import size
from casnap.runtime.threads import Worker
from casnap.storage.collecting.gc import GcOptions, GcReport, collect
from casnap.storage.collecting.plan import DAY
from casnap.storage.collecting.reference_counts import ReferenceCounts
from casnap.storage.commit_log.roots import read_root
from casnap.storage.reading.repository import Repository

_log = logging.getLogger("casnap")
# A collection begins once snapshots with 1/_PARTS of the kept bytes were deleted, as long as
# collections have taken no more than their SHARE.
_PARTS = 8
SHARE = 0.04
"""While collections have taken at most this share of this process's processor time, the next one
begins early: once ``1 / _PARTS`` of the kept bytes was deleted.
"""
MOST = 512 << 20
"""Once collections have taken more than ``SHARE``, the next one begins only after snapshots of
this many bytes were deleted.
"""
# To look at a snapshot costs less than 1 % of a take of this many bytes. A collection through the
# whole store costs as much as to look at all its snapshots, and at so many more.
_A_SNAPSHOT = 64 << 20
_ITSELF = 10
# A pack is copied if no more than about half of it is needed: one of two equal tensors.
_REPACK = 0.51
# The seconds to rest after a failure.
_FAILURE_REST = 60.0
# For how many seconds a process that ends waits for its collection; not at a remote place.
_LAST_SECONDS = 0.5
# The seconds between two looks whether it has ended.
_LOOK = 0.01


class _ExitError(Exception):
    """Raised in a collection to end it, because the process exits."""


class _Spent:
    """The processor time that this process has spent on collections, of all stores together.

    Collections through a whole store are not counted: the larger the store, the more must be
    deleted before one of them begins.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


_spent = _Spent()


class AutomaticCollector:
    """Collects the garbage of one store, on a thread in the background of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._worker: Worker | None = None
        # The bytes of the snapshots that this process has deleted since the last collection, and
        # since the last one through the whole store; and the bytes that the last collection left
        # to free. Once the process deletes another snapshot, they ask for a collection as well.
        self._released = 0
        self._since_whole = 0
        self._waiting = 0
        # The bytes of a state that is taken.
        self._counted = 0
        # The bytes that were freed since the last take, and the report of the last collection.
        self._freed = 0
        self.last_report: GcReport | None = None
        # The counts that the next collection can go on from.
        self._counts = ReferenceCounts()
        # When the next collection may begin, by the monotonic clock.
        self._ready_at: float | None = None
        # Packs that were condemned up to this root may be freed. At first these are the packs that
        # others condemned before this process took anything.
        self._condemned_until: int | None = None

    @classmethod
    def of(cls, store: Repository) -> AutomaticCollector:
        """Return this process's collector for a store. Make one if there is none."""
        name = f"{store.config.store_id} {store.backend.identity}"
        with _collectors_lock:
            collector = _collectors.setdefault(name, cls())
            if collector in _recent:
                _recent.remove(collector)
            _recent.append(collector)
            return collector

    def note(self, store: Repository, rows: Iterable[Row]) -> None:
        """Note that snapshots were deleted, and start a collection in the background if one is due.

        Args:
            store: The store, as the caller has it open.
            rows: The rows of the deleted snapshots. If there are none, a collection may still be
                due, because the last one left garbage that could not be freed yet.
        """
        rows = list(rows)
        if not (rows or self._waiting) or not collects_by_itself():
            return
        with self._lock:
            nbytes = sum(row.stats.new_bytes for row in rows)
            self._released += nbytes + self._waiting
            self._since_whole += nbytes
            self._waiting = 0
        # Once the process ends, Python may no longer wait for a thread that begins now.
        if _main_thread_lives():
            # The commit is valid, whatever happens here.
            with suppress(CasnapError, OSError):
                if self._is_due(store) and store.settings(store.recent()).collects_unasked:
                    self._start(store)

    def count_freed(self) -> int:
        """Return how many bytes collections have freed since the last call."""
        with self._lock:
            freed, self._freed = self._freed, 0
        return freed

    def wait(self) -> None:
        """Wait for the collection in the background, for half a second at most."""
        with self._lock:
            worker = self._worker
        until = time.monotonic() + _LAST_SECONDS
        while worker is not None and not worker.ended and time.monotonic() < until:
            time.sleep(_LOOK)

    def make_room(self, store: Repository, count_bytes: Callable[[], int]) -> None:
        """If a state may not fit on the disk, collect all garbage now, without a grace.

        Args:
            store: The store, as the caller has it open.
            count_bytes: Returns the bytes of the state.
        """
        try:
            if self._condemned_until is None:
                self._condemned_until = store.recent().seq
            if self._may_not_fit(store, count_bytes):
                # Wait for a collection that is under way: it may still condemn packs.
                with self._collecting:
                    root = store.newest()
                if self.last_report is None or self._released or root.condemned:
                    self._sweep(store)
        except Exception as e:  # noqa: BLE001 - the take may fit all the same
            _log.warning("%s: its garbage is not collected: %s", store.backend.uri, e)

    def meet_full_disk(
        self, store: Repository, error: StorageFullError, count_bytes: Callable[[], int]
    ) -> None:
        """Collect all garbage now, without a grace, after an operation found the disk full.

        The caller can then try its operation again.

        Args:
            store: The store, as the caller has it open.
            error: The error of the operation.
            count_bytes: Returns how many bytes the operation writes at most.

        Raises:
            StorageFullError: The collection freed nothing. The message says what would free space.
        """
        uri, report = store.backend.uri, None
        try:
            report = self._sweep(store)
        except Exception as e:  # noqa: BLE001 - the disk is full in any case
            _log.warning("%s: its garbage is not collected: %s", uri, e)
        if report is not None and report.freed_bytes:
            return
        # The free space of the disk says nothing about a quota.
        is_quota = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EDQUOT
        free = None if is_quota else store.backend.free_bytes()
        lacking = f"up to {size(count_bytes())} are needed"
        lacking += "" if free is None else f", {size(free)} are free"
        raise StorageFullError(f"{error}. {lacking}; {_what_frees(uri, report)}") from (
            error.__cause__ or error
        )

    def _may_not_fit(self, store: Repository, count_bytes: Callable[[], int]) -> bool:
        free = store.backend.free_bytes()
        # To count takes long for many tensors, and states hardly ever grow to four times the size.
        if free is None or (self._counted and free > 4 * self._counted):
            return False
        self._counted = count_bytes()
        return free <= self._counted + self._counted // 10

    def _sweep(self, store: Repository) -> GcReport | None:
        """Collect all garbage without a grace.

        Returns:
            The report; None if the environment or a setting of the store forbids automatic
            collections.
        """
        with self._collecting:
            if not _collects_unasked(store, store.newest()):
                return None
            self._counts.clear()
            report = self._collect(store, GcOptions(grace=0))
        uri, freed = store.backend.uri, report.freed_bytes
        _log.info("%s: the disk is full, or nearly; %d bytes freed", uri, freed)
        return report

    def _start(self, store: Repository) -> None:
        with self._lock:
            if self._worker is None or self._worker.ended:
                self._worker = Worker(partial(self._run, store), "casnap-gc", in_background=True)
                self._worker.start()

    def _run(self, store: Repository) -> None:
        patience = _LAST_SECONDS if store.backend.costs.keeps_counts else 0.0
        progress = _ending_with_process(patience)
        while self._collect_in_background(store, progress):
            with self._lock:
                # A snapshot that is deleted from here on starts another thread.
                if not self._is_due(store):
                    self._worker = None
                    return

    def _collect_in_background(self, store: Repository, progress: Progress) -> bool:
        """Do one collection; return whether it succeeded. An error is logged.

        Args:
            store: The store.
            progress: Called from time to time. To end the collection, it raises an
                :class:`_ExitError`.
        """
        backend = store.backend
        rest = backend.costs.collection_rest
        try:
            with self._collecting:
                root, until = store.recent(), self._condemned_until
                if _grace_at(store, root) is not None:
                    until = None
                elif until is None:
                    until = root.seq
                options = GcOptions(condemned_until=until, repack=_REPACK)
                report = self._collect(store, options, progress)
        except _ExitError:
            return False
        except Exception as e:  # noqa: BLE001 - a backend may raise anything; the takes go on
            self._ready_at = time.monotonic() + max(rest, _FAILURE_REST)
            _log.warning("%s: its garbage is not collected: %s", backend.uri, e)
            return False
        self._ready_at = time.monotonic() + rest
        _log.info(
            "%s: collected garbage in %.3f s: %d bytes freed, %d bytes wait for the next time",
            backend.uri,
            report.seconds,
            report.freed_bytes,
            report.waiting_bytes,
        )
        return True

    def _is_due(self, store: Repository) -> bool:
        """Whether enough was deleted for a collection, and the pause after the last is over."""
        if self._ready_at is None:
            self._ready_at = time.monotonic() + store.backend.costs.collection_start
        if time.monotonic() < self._ready_at:
            return False
        report = self.last_report
        if report is None:
            # It is not known how many bytes earlier processes have deleted.
            return True
        has_time = _spent.seconds <= SHARE * time.process_time()
        enough = report.live_bytes / _PARTS if has_time else MOST
        # An empty store keeps no bytes, so that none at all would be enough.
        return self._released > 0 and self._released >= enough

    def _collect(
        self, store: Repository, options: GcOptions, progress: Progress | None = None
    ) -> GcReport:
        with self._lock:
            released, self._released = self._released, 0
            since_whole = self._since_whole
        counts = self._counts if store.backend.costs.keeps_counts else None
        last = self.last_report
        # The whole store is searched then: failed takes may have left packs in it, and other
        # processes may have deleted snapshots.
        most = 0 if last is None else last.live_bytes + _A_SNAPSHOT * (_ITSELF + last.snapshots)
        if since_whole >= most:
            self._counts.clear()
        is_whole = not self._counts.is_known
        report = GcReport()
        try:
            collect(store, options, progress, counts, report)
        except BaseException:
            with self._lock:
                self._released += released
            raise
        finally:
            # The cost of a collection that fails counts too.
            _spent.add(0.0 if is_whole else report.processor_seconds)
        with self._lock:
            self._since_whole -= since_whole * is_whole
            self._freed += report.freed_bytes
        self._waiting = 0 if options.condemned_until is None else report.waiting_bytes
        self._condemned_until = store.newest().seq
        self.last_report = report
        return report


def _main_thread_lives() -> bool:
    return threading.main_thread().is_alive()


def _what_frees(uri: str, report: GcReport | None) -> str:
    """Return advice on how to free space, for the message of an error.

    Args:
        uri: The URI of the store.
        report: The report of a collection without a grace, which freed nothing; None if no
            collection was made.
    """
    if report is None:
        return f"`casnap gc {shell_word(uri)} --grace 0` frees what no snapshot needs any more"
    waiting = f", and {size(report.waiting_bytes)} wait for other takes" * bool(
        report.waiting_packs
    )
    return (
        f"{uri} has no garbage left to free: its {report.snapshots:,} snapshots take up "
        f"{size(report.live_bytes)}{waiting}. Let some of them go, with `casnap rm` or `casnap "
        f"prune`; then `casnap gc {shell_word(uri)} --grace 0` frees their bytes"
    )


def _ending_with_process(patience: float) -> Progress:
    """Return a progress callback that ends a collection when the process exits.

    Args:
        patience: How many seconds the collection may still go on once the process exits. So a short
            process, such as `casnap rm`, still finishes a short collection.
    """
    until = math.inf

    def look(_phase: str, _done: int, _total: int) -> None:
        nonlocal until
        if not _main_thread_lives():
            until = min(until, time.monotonic() + patience)
            if time.monotonic() >= until:
                raise _ExitError

    return look


# --- what becomes of garbage --------------------------------------------------------------------


class Outlook:
    """Whether and when the garbage of a store will be freed, as of the store's newest root.

    Args:
        store: The store.
    """

    def __init__(self, store: Repository) -> None:
        self._store = store
        self._root = store.newest()

    @property
    def is_freed_unasked(self) -> bool:
        """Whether the environment and the store's settings allow automatic collections."""
        return _collects_unasked(self._store, self._root)

    @property
    def grace(self) -> float | None:
        """For how many seconds collections keep condemned packs.

        It is None if there is no grace: the next automatic collection frees them.
        """
        return _grace_at(self._store, self._root)

    @property
    def freed_at(self) -> float | None:
        """When the grace of all condemned packs is over, in seconds since the epoch.

        It is None if no pack is condemned, or if there is no grace.
        """
        condemned, grace = self._root.condemned, self.grace
        if not condemned or grace is None:
            return None
        return read_root(self._store.backend, max(condemned.values())).time + grace


def _collects_unasked(store: Repository, root: Root) -> bool:
    return collects_by_itself() and store.settings(root).collects_unasked


def _grace_at(store: Repository, root: Root) -> float | None:
    grace = store.settings(root).grace
    is_needed = store.backend.costs.has_grace or not _collects_unasked(store, root)
    return DAY if grace is None and is_needed else grace


# The last few collectors stay alive, since a process may open its store anew for each take.
_collectors: WeakValueDictionary[str, AutomaticCollector] = WeakValueDictionary()
_recent: deque[AutomaticCollector] = deque(maxlen=16)
_collectors_lock = new_lock()


@in_child
def _forget_inherited() -> None:
    _collectors.clear()
    _recent.clear()
    # The processor time of the child begins anew too.
    _spent.seconds = 0.0
