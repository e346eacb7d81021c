"""Taking a snapshot: capture, divide the work, stage, hash, write new chunks, commit.

A single process takes the same path as many ranks: its communicator is a group of one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from casnap.errors import FencedError, StateError, StorageFullError, UnavailableError
from casnap.format.codec import Codec
from casnap.format.names import key_of
from casnap.format.records import Root
from casnap.ranks.comm import Comm
from casnap.runtime.threads import Crew, collector_paused, run_shielded
from casnap.storage.catalog.table import checked_metadata
from casnap.storage.chunks.objects import Objects
from casnap.storage.commits.transaction import Transaction
from casnap.take import pending as background
from casnap.take.capture import Capturable, Capture
from casnap.take.commit import TakeCommit, TakeResult
from casnap.take.division import Division, divide
from casnap.take.exchange import Exchange
from casnap.take.hashing import Batches, Hasher
from casnap.take.manifest import build_manifest
from casnap.take.options import TakeOptions, agree_on_request
from casnap.take.pending import PendingTake
from casnap.take.staging import Piece, StagedCopies, batched

_log = logging.getLogger("casnap")
_TRIES = 5


def take(
    objects: Objects,
    name: str,
    asked: Capturable,
    options: TakeOptions,
    comm: Comm,
) -> TakeResult:
    """Take a snapshot and return once it is durable.

    Raises:
        CasnapError: An earlier take in the background failed, and no call has raised that yet.
        StateError: Something in the state cannot be taken.
        SnapshotExistsError: The name is taken.
        StoreError: The store failed; nothing was committed.
        RankError: Another rank failed, died or hangs.
    """
    started = time.monotonic()
    with background.turn:
        background.wait_for_room(objects.config.store_id, name, 1, alone=comm.size == 1)
        work = _begin(objects, name, asked, options, comm, started)
        return _stored(work, lambda nbytes: batched(work.pieces(), nbytes), lambda: True)


def async_take(
    objects: Objects,
    name: str,
    asked: Capturable,
    options: TakeOptions,
    comm: Comm,
) -> PendingTake:
    """Copy the state and return; the rest goes on in the background.

    The error of an earlier take of the store that no call has raised yet is raised first.

    This blocks while ``max_pending`` earlier takes of this process are pending. If
    ``max_staging_bytes`` do not hold their states, it also blocks until enough has been stored.
    """
    started = time.monotonic()
    pending: PendingTake | None = None
    try:
        with background.turn:
            store, most = objects.config.store_id, options.max_pending
            background.wait_for_room(store, name, most, alone=comm.size == 1)
            work = _begin(objects, name, asked, options, comm, started)
            copies = StagedCopies(options.max_staging_bytes, options.threads)
            in_call = Counter(objects.backend.requests) - Counter(work.requests_before)
            pending = PendingTake(store, name, partial(_store_copies, work, copies, in_call))
            try:
                if options.max_pending > 1:
                    comm.leave()
                copies.fill(work.pieces(), when_full=pending.start)
                work.capture.drop_tensors()
                pending.start()
            except BaseException as e:
                # Once started, the take in the background fails too, and tells the other ranks.
                if not pending.started:
                    try:
                        run_shielded(lambda _: copies.release())
                    except UnavailableError:
                        copies.release()
                    _tell_ranks_later(work, e)
                pending.note_seen()
                raise
            return pending
    except BaseException as e:
        if pending is None:
            comm.__exit__(type(e), e, None)
        raise


def _ranks_later(work: _Take) -> Comm:
    """Return the ranks as they meet for the part of an async take in the background."""
    return work.comm.background(work.seed) if work.options.max_pending > 1 else work.comm


def _tell_ranks_later(work: _Take, error: BaseException) -> None:
    """When its turn comes, tell the other ranks that a take failed before it stood in line.

    They may still store earlier takes, and would take the error for one of those.
    """

    def tell() -> TakeResult:
        _ranks_later(work).__exit__(type(error), error, None)
        raise StateError(f"the call for {work.name!r} failed")

    if work.options.max_pending == 1:
        work.comm.__exit__(type(error), error, None)
        return
    telling = PendingTake(work.objects.config.store_id, work.name, tell)
    telling.error_seen = True
    try:
        telling.start()
    except UnavailableError:
        # No thread can be started.
        background.wait_for_last()
        with suppress(BaseException):
            tell()


def _store_copies(work: _Take, copies: StagedCopies, in_call: Counter[str]) -> TakeResult:
    with _ranks_later(work) as comm:
        try:
            if work.options.max_pending > 1:
                # Takes that were pending at the call have ended since: rely on what they wrote, and
                # do not count their requests.
                before = Counter(work.objects.backend.requests)
                before.subtract(in_call)
                own = None
                if comm.rank == 0:
                    work.options.make_room(work.count_bytes)
                    own = work.objects.recent()
                base_root = comm.broadcast_message(own, Root)
                work = replace(work, comm=comm, requests_before=before, base_root=base_root)
            return _stored(work, copies.batches, copies.rewind)
        finally:
            copies.release()


def _stored(work: _Take, batches: Batches, rewind: Callable[[], bool]) -> TakeResult:
    """Store a state; start again where a collector was faster, or has made room on a full disk.

    Args:
        work: The take.
        batches: Returns the pieces in batches of so many bytes.
        rewind: Has that begin again; returns whether it can.

    Raises:
        FencedError: A collector was faster, and the take cannot start again.
        StorageFullError: The disk is full, and nothing there can be freed.
    """
    comm, name = work.comm, work.name
    for tries in count(1):
        try:
            return work.store(batches)
        except FencedError:
            if tries == _TRIES or comm.ended:
                raise
            again = "%s: a collector went past the take, which starts again"
            if not _all_can(comm, rewind):
                raise
        except StorageFullError as e:
            if tries == _TRIES or not comm.resume(e):
                raise
            again = "%s: the disk was full, and there is room now; the take starts again"
            if comm.rank == 0:
                work.options.on_full(e, work.count_bytes)
            # The other ranks wait for that here.
            if not _all_can(comm, rewind):
                raise
        _log.info(again, name)
        work = replace(work, base_root=None)
    raise AssertionError


def _all_can(comm: Comm, rewind: Callable[[], bool]) -> bool:
    return all(map(any, comm.all_gather(bytes([rewind()]))))


def _begin(
    objects: Objects,
    name: str,
    asked: Capturable,
    options: TakeOptions,
    comm: Comm,
    started: float,
) -> _Take:
    """Do the steps that need the caller's state: agree, capture, divide the work."""
    options = replace(options, metadata=checked_metadata(options.metadata or {}))
    before = dict(objects.backend.requests)
    comm.enter_phase("beginning a take")
    request = agree_on_request(objects, name, asked.keys(), options, comm)
    chunk_size = objects.config.chunk_size
    keys = [key_of(component) for component in request.keys]
    capture = asked.capture(keys, chunk_size, allow_pickle=options.allow_pickle)
    if comm.rank == 0 and options.max_pending == 1:
        # Otherwise this waits for its turn: what earlier takes rely on is not freed.
        options.make_room(lambda: comm.size * capture.bytes_to_hash())
    comm.enter_phase("sharing out the work")
    division = divide(comm, capture, asked.values, options, chunk_size, request.seed)
    capture.assign(division.assigned)
    return _Take(
        objects,
        name,
        options,
        request.codec,
        comm,
        capture,
        division,
        started,
        before,
        request.root,
        request.seed,
    )


@dataclass(frozen=True)
class _Take:
    """A take whose state is captured, and whose work is divided among the ranks.

    Attributes:
        codec: How new chunks are stored.
        started: When it began, by ``time.monotonic``.
        base_root: The root to base it on, if rank 0 has sent one; by default the newest one.
        seed: A random number that all ranks of this take have, and no other take.
    """

    objects: Objects
    name: str
    options: TakeOptions
    codec: Codec
    comm: Comm
    capture: Capture
    division: Division
    started: float
    requests_before: Mapping[str, int]
    base_root: Root | None
    seed: int

    def count_bytes(self) -> int:
        """Return about how many bytes the state has on all ranks."""
        return self.comm.size * self.capture.bytes_to_hash()

    def pieces(self) -> Iterable[Piece]:
        """Return the bytes that this rank hashes; each rank begins with another part of them."""
        return self.capture.pieces(self.comm.rank / self.comm.size)

    def store(self, batches: Batches) -> TakeResult:
        """Store the new chunks, then the manifest, and commit.

        Args:
            batches: Returns the pieces in batches of so many bytes.
        """
        return run_shielded(partial(self._store, batches), limit=self.options.threads)

    def _store(self, batches: Batches, crew: Crew) -> TakeResult:
        comm = self.comm
        transaction = Transaction(
            self.objects,
            crew,
            self.codec,
            self.requests_before,
            self.base_root,
            puts_root=comm.rank == 0,
        )
        try:
            comm.enter_phase("hashing and writing")
            hasher = Hasher(self.capture, transaction, self.options.progress)
            if comm.size == 1 and not self.division.assigned:
                hasher.hash_all(batches, crew)
            else:
                Exchange(comm, crew, self.division).run(batches, hasher.hash)
            comm.enter_phase("assembling the manifest")
            with collector_paused():
                built = build_manifest(
                    comm, self.capture, self.division, hasher.digests, transaction.put_node
                )
            comm.enter_phase("committing")
            commit = TakeCommit(self.objects, self.name, self.options, comm, self.started)
            if built is None:
                return commit.follow(transaction)
            return commit.lead(transaction, built)
        except BaseException as e:
            crew.fail(e)
            raise
        finally:
            transaction.close()
