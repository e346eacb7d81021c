"""The mirror of a store: another store that gets each snapshot, in the background.

A take with a mirror commits its row with a note that the mirror lacks the snapshot
(``notes.py``). A **pass** copies all snapshots with such a note, in the order of their commits, and
removes the notes. It runs on a thread that the interpreter waits for at exit. A pass begins after
each commit of this process. A **watcher**, a daemon thread, begins other passes: after a failure,
or for snapshots that other processes have committed. On each host one process at a time has a pass.

A mirror may follow a tag. The pass then copies only the snapshot that the tag is published on, and
moves the tag at the mirror. No take waits for the mirror or gets its errors.

Three places decide when to copy: :meth:`Mirror.wake` begins each pass, :meth:`Mirror._copy_all`
copies in it, and :meth:`Mirror._pause` holds it up during a take. To make copies wait, change
``_copy_all``: after ``destination()``, raise an error that :meth:`Mirror._run` ignores, as it
ignores ``BusyError``. A plain return would count as a success, and end the pauses after failures.
Leave ``wake`` as it is: :meth:`Mirror.start` waits for the first pass, and :meth:`Mirror.wait`
returns only once all snapshots are copied. To end a pass that runs, raise such an error in
``_on_progress``.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from casnap.errors import (
    PLACE_ERRORS,
    CasnapError,
    MirrorError,
    NotAStoreError,
    SnapshotExistsError,
    UnavailableError,
)
from casnap.format.names import folder_of
from casnap.format.records import Root, Row
from casnap.mirror.continued_runs import SucceededError, Succession
from casnap.mirror.notes import (
    Lag,
    MirrorPlace,
    attach_mirror,
    check_same_mirror,
    check_same_tag,
    follows_of,
    lag_in,
    mark_mirrored,
    mirror_place,
    restored_from,
    succeeded_in,
    taken_notes,
    wrong_mirror_error,
)
from casnap.mirror.status import (
    Destination,
    HostFiles,
    HostStatus,
    MirrorOptions,
    MirrorStatus,
)
from casnap.runtime.backoff import Backoff
from casnap.runtime.environment import is_other_rank
from casnap.runtime.fork import in_child, new_lock
from casnap.runtime.host_locks import BusyError, locked
from casnap.runtime.threads import Worker
from casnap.storage import CommitHooks, Location, Repository, Table, Tags, open_at
from casnap.transfer.continuous import ContinuousCopier, Pair
from casnap.transfer.copy_jobs import CopyJob, CopyOptions
from casnap.transfer.copy_selection import check_pair

_log = logging.getLogger("casnap")
# The seconds between two looks for snapshots that other processes have committed.
_LOOK = 5.0
# How many seconds a new Store waits to hear that its mirror is the wrong one.
_FIRST_CONTACT = 5.0
# How many seconds the copy of a snapshot waits in all for takes of this process to end; and the
# seconds between two looks.
_GIVE_WAY = 60.0
_GIVE_WAY_LOOK = 0.01
# The seconds after which a long pass notes which snapshots it has copied.
_SETTLE = 10.0


class _StoppedError(Exception):
    """The mirror was stopped, so the running copy ends."""


class _OvertakenError(Exception):
    """The tag has moved on in the mirrored store, so the mirror must not give it to this copy."""


class Mirror:
    """Copies each snapshot of a store to another store, in the background.

    Args:
        source: The mirrored store.
        prefix: The prefix of the open view: it must be "", so that the view is the whole store.
        options: The user's options for the mirror.
        hooks_of: Given the mirror as a repository, returns the hooks of each commit to it.
        is_taking: Returns whether this process is taking a snapshot. The copy waits meanwhile.

    Raises:
        CasnapError: This store cannot have that mirror.
    """

    def __init__(
        self,
        source: Repository,
        prefix: str,
        options: MirrorOptions,
        *,
        hooks_of: Callable[[Repository], CommitHooks],
        is_taking: Callable[[], bool],
    ) -> None:
        if prefix:
            uri = source.backend.uri
            raise MirrorError(
                f"{uri}/{prefix} is a view of the store {uri}; the mirror is of a whole store: "
                "give mirror= to that one"
            )
        self.how = options
        self._tag = options.tag or ""
        self.uri = Location.of_store(options.uri, options.storage_options).backend.uri
        self._source = source
        self._host = HostFiles(source, self.uri)
        self._hooks_of = hooks_of
        self._is_taking = is_taking
        self._patient_for = 0.0
        # Among many ranks, rank 0 alone commits and copies; others are passive.
        self._passive = is_other_rank()
        # The mirror of the store, as a passive rank saw it first.
        self._place_seen: MirrorPlace | None = None
        self._stopped = False
        self._there: Destination | None = None
        self._misfit: CasnapError | None = None
        # By run, two roots of the mirror: the one from which a user got a snapshot, and the one
        # that the takes of this process follow.
        self._seen: dict[str, int] = {}
        self._follows: dict[str, int] = {}
        self._succeeded: dict[str, tuple[str, float]] = {}
        self._lock, self._opening = new_lock(), new_lock()
        self._begin()
        in_child(self._begin)
        _all.add(self)

    def _begin(self) -> None:
        """Set all attributes as before the first pass. A forked child calls this too."""
        self._event = threading.Event()
        self._changed = threading.Condition()
        self._backoff = Backoff(f"the mirror of {self._source.backend.uri} at {self.uri}")
        self._pass: Worker | None = None
        self._again = False
        self._watcher: threading.Thread | None = None
        self._contacted = threading.Event()
        # Made by the first pass: until then this object is in no cycle of references. So a mirror
        # that never copies, as in a worker that reads, is freed with its store.
        self._copier: ContinuousCopier | None = None
        self._succession: Succession | None = None
        # The facts to note in the mirrored store: the snapshots that the mirror has or is not to
        # get, the ones that it never gets, and the last publish that it has.
        self._dealt_with: dict[str, bytes] = {}
        self._given_up: dict[str, bytes] = {}
        self._moved = 0
        self._lag = Lag({})
        self._passes = 0

    def __repr__(self) -> str:
        tag = f", tag={self._tag!r}" if self._tag else ""
        state = ", stopped" if self._stopped else ""
        return f"<Mirror {self.uri!r} of {self._source.backend.uri!r}{tag}{state}>"

    # --- called by threads of users; none of these raises because of the mirror, or waits for it --

    def start(self) -> None:
        """Begin to copy; wait a moment to see whether the place holds the right store.

        Raises:
            CasnapError: The place holds another store; or it holds none, and none can be made.
        """
        if self._passive:
            # Only a mirror with a tag needs this. Without a tag, a wait ends when the notes of a
            # forgotten mirror are removed.
            if self._tag:
                self._place_seen = mirror_place(self._source.recent(), self._source.backend.uri)
            return
        self.wake()
        self._contacted.wait(_FIRST_CONTACT)
        if self._misfit is not None:
            self.stop()
            raise self._misfit

    def stop(self) -> None:
        """Stop copying. The store keeps its notes, so another Store with this mirror goes on."""
        self._stopped = True
        self._event.set()

    def wake(self) -> None:
        """Begin a pass, or have the running one look again. Commits and the watcher call this."""
        if self._stopped or self._passive:
            return
        try:
            self._watch()
            if not self._backoff.delay:
                self._start_pass()
        except (RuntimeError, UnavailableError) as e:
            # No thread can be started. A later commit tries again.
            self._backoff.note_failure(e)

    def note_returned(self, name: str, number: int) -> None:
        """Note that a user got a snapshot from the mirror, and may resume from it.

        Args:
            name: The name of the snapshot in the mirrored store.
            number: The number of a root of the mirror that has the snapshot.
        """
        run = folder_of(name)
        self._seen[run] = max(number, self._seen.get(run, 0))

    def notes(self, name: str) -> dict[str, Any]:
        """Return the notes for the row of a new snapshot of the mirrored store.

        If the mirror gets all snapshots, a note says that the mirror lacks this one. Another note
        says which root of the mirror the run of the snapshot continues. The first call for a run
        chooses that root, for all later calls of this process.

        Args:
            name: The full name of the snapshot.
        """
        run = folder_of(name)
        source = self._source
        place = None if self._passive else mirror_place(source.newest(), source.backend.uri)
        if place is None:
            return taken_notes("", 0, self._tag)
        if run not in self._follows:
            rows = source.read_at_newest(lambda root: list(source.table(root).items_in(run)))
            followed = [follows_of(r, place.store) for n, r in rows if folder_of(n) == run]
            resumed = max(self._seen.get(run, 0), restored_from(place, run))
            self._follows[run] = max([resumed, *followed])
        return taken_notes(place.store, self._follows[run], self._tag)

    def _watch(self) -> None:
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=_watch, args=(ref(self), self._event), name="casnap-mirror", daemon=True
                )
                self._watcher.start()

    def _start_pass(self) -> None:
        with self._lock:
            self._again = True
            if self._pass is not None and not self._pass.ended:
                return
            self._pass = Worker(self._run, "casnap-mirror-pass", in_background=True)
            self._pass.start()

    def due(self) -> float:
        """Return after how many seconds the watcher looks again for snapshots to copy."""
        # A look at a remote store is a request or two, so its looks are rarer.
        return self._backoff.delay or self._source.backend.costs.watch

    # --- the pass ---

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._again or self._stopped:
                    self._pass = None
                    return
                self._again = False
            try:
                self._copy_all()
                self._backoff.note_success()
            except (BusyError, _StoppedError):
                pass
            except BaseException as e:  # noqa: BLE001 - it must never reach a take
                self._note_failure(e)
                self._again = False
                self._host.write(self._host_status())
            finally:
                self._passes += 1
                self._contacted.set()
                self._tell_waiting()

    def _note_failure(self, error: BaseException) -> None:
        # After the first pass, start() raises that the mirror is the wrong store.
        is_raised = self._misfit is not None and self._passes == 0
        if not self._stopped and not is_raised:
            self._backoff.note_failure(error)

    def _copy_all(self) -> None:
        """Copy all snapshots that the mirror lacks.

        Raises:
            BusyError: Another process of this host is copying.
        """
        # Open the mirror before the lock, so that each process finds out if its mirror is the wrong
        # store.
        destination = self.destination()
        with ExitStack() as stack:
            if (lock := self._host.lock) is not None:
                stack.enter_context(locked(lock, 0))
            while not self._stopped and self._copy_some(destination):
                continue
            self._host.write(self._host_status())

    def _copy_some(self, destination: Destination) -> bool:
        """Copy the snapshots that the mirror lacks now; return whether there were any."""
        if self._copier is None:
            self._copier = ContinuousCopier(self._pair, self._on_progress, self._explain)
        settled = time.monotonic()
        any_copied = False
        try:
            for job, report in self._copier.look():
                any_copied = True
                if report.copied:
                    self._say_continued(destination, job)
                if job.name == self._lag.published:
                    try:
                        self._publish(destination, job)
                    except _OvertakenError:
                        continue
                    except SucceededError as e:
                        self._explain(job, e)
                        continue
                self._dealt_with[job.name] = job.row.commit
                if time.monotonic() - settled > _SETTLE:
                    self._settle()
                    settled = time.monotonic()
        finally:
            if self._dealt_with or self._given_up:
                self._pause()
                self._settle()
        return any_copied

    def _publish(self, destination: Destination, job: CopyJob) -> None:
        """Move the followed tag, at the mirror, to the copy of the snapshot that has the tag here.

        Args:
            destination: The mirror.
            job: The copied snapshot.

        Raises:
            _OvertakenError: The tag has moved on in the mirrored store.
            SucceededError: Another store writes the run at the mirror.
        """
        number = self._lag.number
        succession = self._succession_of(destination, job.new_name, job.row)

        def check(table: Table, seq: int) -> None:
            # Another process may have moved the tag at the mirror to a later publish. This commit
            # then begins again, calls this again, and sees the later publish.
            if self.lag().number != number:
                raise _OvertakenError
            succession.place(table, seq)

        Tags(destination.store).publish(self._tag, job.new_name, job.row.commit.hex(), check)
        self._moved = number

    def _pair(self) -> Pair:
        destination = self.destination()
        choose = partial(self._choose, destination)
        return Pair(self._source, destination.store, choose, destination.options)

    def _choose(self, destination: Destination) -> Iterator[CopyJob]:
        """Yield a job for each snapshot that the mirror lacks."""
        root, lag = self._look()
        self._check_attached(root)
        self._lag = lag
        tag, lacking = self._tag, lag.rows
        strays = lacking.keys() - {lag.published} if tag else ()
        there = self._commits_at(destination) if strays else ()
        for name, row in lacking.items():
            if name in strays and row.commit not in there:
                # The run went back from it, or it was taken before the mirror followed the tag.
                self._dealt_with[name] = row.commit
                continue
            # Takes go first, unless the mirror falls behind. A low priority of this thread would
            # not do: while it holds Python's lock, the training would wait for it.
            self._patient_for = 0.0 if len(lacking) > 1 else _GIVE_WAY
            prefix = destination.place.prefix
            new_name = f"{prefix}/{name}" if prefix else name
            succession = self._succession = self._succession_of(destination, new_name, row)
            place, upkeep = succession.place, succession.upkeep
            yield CopyJob(name, new_name, row, place=place, moved_tag=tag, upkeep=upkeep)

    def _check_attached(self, root: Root) -> None:
        """Check that the store still has this mirror, with this tag.

        Args:
            root: The newest root of the store.

        Raises:
            MirrorError: A user has given the store another mirror, or the mirror another tag.
        """
        source = self._source
        attached = mirror_place(root, source.backend.uri)
        known = self._place_seen if self._there is None else self._there.place
        try:
            if known is not None:
                check_same_mirror(source, attached, known)
            elif attached is not None:
                check_same_tag(attached, self._tag, source.backend.uri)
        except MirrorError as e:
            self._misfit = e
            raise
        self._misfit = None

    def _succession_of(self, destination: Destination, new_name: str, row: Row) -> Succession:
        store, retention = destination.store, self.how.retention
        return Succession(self._source, store, new_name, row, retention, self._tag)

    def _commits_at(self, destination: Destination) -> set[bytes]:
        store = destination.store
        rows = store.read_at_newest(lambda root: list(store.table(root).items_in()))
        return {row.commit for _, row in rows}

    def _say_continued(self, destination: Destination, job: CopyJob) -> None:
        """If this store has taken over a run from another, warn, and name the replaced copies.

        Args:
            destination: The mirror.
            job: The snapshot that was copied.
        """
        succession = self._succession
        if succession is None or not (succession.predecessor or succession.replaced):
            return
        run = f" in {succession.run!r}" if succession.run else ""
        replaced = ", ".join(succession.replaced)
        _log.warning(
            "%s continues the run%s of %s, by %s%s",
            self._source.backend.uri,
            run,
            destination.store.backend.uri,
            job.name,
            f", which replaces {replaced:.1000} of another branch" if replaced else "",
        )

    def _settle(self) -> None:
        # Do this before the notes are removed: a thread that waits for their removal must find no
        # failure.
        self._backoff.note_success()
        self._host.write(self._host_status())
        notes = self._dealt_with, self._given_up, self._moved
        mark_mirrored(self._source, *notes, check=self._check_attached)
        self._dealt_with.clear()
        self._given_up.clear()
        # Note it only once: by the next commit, the publish may have to be repeated.
        self._moved = 0
        self._host.write(self._host_status())
        self._tell_waiting()

    def _on_progress(self, _phase: str, _done: int, _total: int) -> None:
        self._pause()
        if self._stopped:
            raise _StoppedError

    def _pause(self) -> None:
        """Wait while a take goes on, so that the take has the cores, the disk and the network."""
        is_needed = threading.main_thread().is_alive
        while self._patient_for > 0 and self._is_taking() and is_needed() and not self._stopped:
            time.sleep(_GIVE_WAY_LOOK)
            self._patient_for -= _GIVE_WAY_LOOK

    def _explain(self, job: CopyJob, error: CasnapError) -> str | None:
        """Return why a snapshot cannot be copied now; None if it can never be copied.

        Args:
            job: The snapshot.
            error: The error of its copy.
        """
        if isinstance(error, SucceededError):
            run = folder_of(job.name)
            if run not in self._succeeded:
                _log.error("%s", error)
            self._succeeded.setdefault(run, (str(error), time.time()))
            self._given_up[job.name] = job.row.commit
            if job.name == self._lag.published:
                self._moved = self._lag.number
            return None
        store, source = self.destination().store, self._source
        row = store.read_at_newest(lambda root: store.table(root).get(job.new_name))
        if row is None or not isinstance(error, SnapshotExistsError):
            return str(error)
        origin, _ = row.origin
        origin_text = f"copied from the store {origin}" if origin else "not copied by a mirror"
        return (
            f"{store.backend.uri} holds another snapshot {job.new_name!r} (commit "
            f"{row.commit.hex()}, {origin_text}) than {source.backend.uri} (commit "
            f"{job.row.commit.hex()}, the store {source.config.store_id}). Neither is "
            "overwritten. Take it under another name, or delete the one that you do not need; two "
            "runs that use one mirror need names of their own, or a folder each, as in "
            "mirror='s3://bucket/ckpts//node1'"
        )

    # --- the store at the mirror ---

    def destination(self) -> Destination:
        """Open the mirror, unless it is open, and return it.

        Raises:
            CasnapError: The mirror cannot be reached or used, or is the wrong store.
        """
        with self._opening:
            if self._there is None:
                try:
                    self._there = self._open_destination()
                    self._misfit = None
                except CasnapError as e:
                    # A failure of the place may pass. Any other error stays until the user acts.
                    if not isinstance(e, PLACE_ERRORS):
                        self._misfit = e
                    raise
            return self._there

    def _open_destination(self) -> Destination:
        """Open the mirror; make it if the store has none yet."""
        source = self._source
        root = source.newest()
        attached = mirror_place(root, source.backend.uri)
        check_same_tag(attached, self._tag, source.backend.uri, attaches=True)
        try:
            # A new look at the place: another process may have made the mirror meanwhile.
            place = Location.of_store(self.how.uri, self.how.storage_options)
            store, _ = open_at(
                place,
                create=attached is None,
                chunk_size=source.config.chunk_size,
                settings=source.settings(root).of_new_store,
            )
        except NotAStoreError as e:
            if attached is None:
                raise
            raise wrong_mirror_error(source, attached, f"there is no store: {e}") from e
        store.check_writable("mirror to")
        if store.config.store_id == source.config.store_id:
            raise MirrorError(
                f"{self.uri} is the store {source.backend.uri} itself, or a copy of its files; a "
                "mirror is another store, which casnap makes"
            )
        check_pair(source, store)
        mirror = MirrorPlace(store.config.store_id, place.name, self.uri, self._tag)
        attach_mirror(source, mirror)
        options = CopyOptions(hooks=self._hooks_of(store), gets_all=True)
        return Destination(store, mirror, options)

    # --- what is known ---

    def lag(self) -> Lag:
        """Return which snapshots the mirror lacks, by the newest root of the mirrored store."""
        return self._look()[1]

    def _look(self) -> tuple[Root, Lag]:
        store, tag = self._source, self._tag
        return store.read_at_newest(
            lambda root: (root, lag_in(root, store.table(root), tag, store.backend.uri))
        )

    def lacking(self) -> dict[str, Row]:
        """Return the snapshots that the mirror lacks, by full name."""
        return self.lag().rows

    def succeeded(self) -> dict[str, Row]:
        """Return the snapshots that the mirror never gets: another store has taken over the run."""
        store = self._source
        return store.read_at_newest(lambda root: succeeded_in(store.table(root)))

    def status(self) -> MirrorStatus:
        """Return how many snapshots the mirror lacks, and why."""
        lacking = self.lacking()
        status = self._host_status()
        if not status.error and not status.refused:
            status = self._host.read() or status
        return MirrorStatus(
            self.uri,
            len(lacking),
            sum(row.stats.new_bytes for row in lacking.values()),
            self._pass is not None and not self._pass.ended,
            status.error or None,
            status.since or None,
            {name: reason for name, reason in status.refused.items() if name in lacking},
        )

    def wait(self, timeout: float | None, seconds_asked: float | None) -> None:
        """Wait until the mirror holds all snapshots that were committed before this call.

        Args:
            timeout: How many seconds to wait at most; None: as long as it takes.
            seconds_asked: The timeout that the user gave, for the message.

        Raises:
            MirrorError: The time is over, some snapshots cannot be mirrored, or the mirror was
                stopped.
        """
        until = None if timeout is None else time.monotonic() + timeout
        first = self._awaited_lag()
        commits = {row.commit for row in first.rows.values()}
        passes = self._passes
        self._backoff.hurry()
        if self._copier is not None:
            self._copier.retry_refused()
        while commits:
            self.wake()
            seconds_left = None if until is None else until - time.monotonic()
            with self._changed:
                self._changed.wait(
                    0.5 if seconds_left is None else min(0.5, max(0.0, seconds_left))
                )
            lag = self._awaited_lag()
            if lag.moved < first.number and lag.published:
                # The tag was published again since: the wait is for the newer snapshot now.
                commits.add(lag.rows[lag.published].commit)
            lacking = {name: row for name, row in lag.rows.items() if row.commit in commits}
            commits &= {row.commit for row in lacking.values()}
            if not commits:
                break
            status = self.status()
            hopeless = lacking.keys() <= status.refused.keys() or self._misfit is not None
            hopeless &= self._passive or self._passes > passes
            hopeless |= self._stopped and not self._passive
            if hopeless or (until is not None and time.monotonic() >= until):
                stopped = "it was stopped by this process" if self._stopped else ""
                raise MirrorError(
                    _lag(status, lacking, None if hopeless else seconds_asked, stopped)
                )
        # If the store has another mirror now, the notes say nothing about this one.
        self._check_attached(self._source.newest())
        given_up = self.succeeded()
        if given_up:
            raise MirrorError(_given_up_text(self.status(), given_up))

    def _awaited_lag(self) -> Lag:
        """Return which snapshots the mirror lacks. :meth:`wait` calls this.

        Raises:
            MirrorError: On a rank other than 0: the store has another mirror now, or none. On rank
                0, a pass finds that out.
        """
        root, lag = self._look()
        if self._passive:
            self._check_attached(root)
            self._place_seen = self._place_seen or mirror_place(root, self._source.backend.uri)
        return lag

    def _tell_waiting(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _host_status(self) -> HostStatus:
        backoff = self._backoff
        error, since = "", 0.0
        if backoff.error is not None:
            error, since = f"{backoff.error}", backoff.since or 0.0
        elif self._succeeded:
            error, since = next(iter(self._succeeded.values()))
        refused = {} if self._copier is None else self._copier.refused
        return HostStatus(os.getpid(), error, since, refused)


def _lag(status: MirrorStatus, lacking: Iterable[str], timeout: float | None, stopped: str) -> str:
    names = sorted(lacking)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    reasons = [f"{name}: {text}" for name, text in status.refused.items() if name in names]
    if status.error is not None:
        reasons.append(status.error)
    after = "" if timeout is None else f" after {timeout:g} s"
    causes = stopped or "; ".join(reasons[:3]) or "it is still copying"
    return (
        f"{status.uri} lacks {', '.join(names[:3])}{more}{after}: {causes}. They are kept here, "
        "and a Store with this mirror goes on copying them"
    )


def _given_up_text(status: MirrorStatus, given_up: Iterable[str]) -> str:
    names = sorted(given_up)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    reason = status.error or "another store continues their run there"
    return f"{status.uri} never gets {', '.join(names[:3])}{more}: {reason}"


def _watch(mirror_ref: ref[Mirror], event: threading.Event) -> None:
    """Begin a pass from time to time, as long as the mirror is in use.

    The watcher thread runs this.

    Args:
        mirror_ref: The mirror; the thread does not keep it alive.
        event: Set to look at once.
    """
    delay = _LOOK
    while True:
        event.wait(delay)
        mirror = mirror_ref()
        if mirror is None or mirror._stopped:
            return
        mirror.wake()
        delay = mirror.due()
        del mirror


_all: WeakSet[Mirror] = WeakSet()


@atexit.register
def _warn_of_lag() -> None:
    for mirror in list(_all):
        lacking: dict[str, Row] = {}
        # A forked child that has not used the mirror has nothing to warn of.
        if not (mirror._stopped or mirror._passive) and mirror._watcher is not None:
            with suppress(Exception):
                lacking = mirror.lacking()
        if lacking:
            # Printed, not logged: logging may be torn down at exit.
            print(
                f"casnap: WARNING: {mirror.uri} lacks {len(lacking)} of the snapshots of "
                f"{mirror._source.backend.uri}. They are kept there, and the next Store "
                "with this mirror copies them",
                file=sys.stderr,
            )
