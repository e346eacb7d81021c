"""Take a snapshot: capture, divide the work, stage, hash, write new chunks, commit.

A single process takes the same path as many ranks: its communicator is a group of one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from casnap.errors import (
    FencedError,
    StateError,
    StorageFullError,
    UnavailableError,
)
from casnap.format.digest import Digest
from casnap.format.names import key_of
from casnap.format.records import UNHEALTHY, PackId, Place, Root
from casnap.ranks.comm import Comm
from casnap.runtime.fork import in_child
from casnap.runtime.threads import Crew, python_gc_paused, run_shielded
from casnap.state.run_environment import run_environment
from casnap.storage import (
    Reliance,
    Repository,
    Session,
    again,
)
from casnap.take import pending as background
from casnap.take.capture import StateSource
from casnap.take.commit import TakeCommit, TakeResult
from casnap.take.device_asking import Asking, hashers_for
from casnap.take.hashing import Batches, Hasher
from casnap.take.health import Measuring
from casnap.take.left_out import hints
from casnap.take.manifest import build_manifest
from casnap.take.metadata import checked_metadata
from casnap.take.options import TakeOptions, unclear_commits
from casnap.take.pending import PendingTake
from casnap.take.ranks.agreement import agree
from casnap.take.ranks.division import divide
from casnap.take.ranks.exchange import Exchange
from casnap.take.staging import Piece, StagedCopies, batched


def take(
    repository: Repository, name: str, source: StateSource, options: TakeOptions, comm: Comm
) -> TakeResult:
    """Take a snapshot and return once it is durable.

    Args:
        repository: The store.
        name: The name of the snapshot.
        source: The state of this rank.
        options: The options of the take.
        comm: The ranks.

    Raises:
        CasnapError: An earlier take in the background failed, and no call has raised that yet.
        StateError: Something in the state cannot be taken.
        SnapshotExistsError: The store has a snapshot of this name.
        StoreError: The store failed; nothing was committed.
        RankError: Another rank failed, died or hangs.
    """
    steps = _Steps(repository, name, options, comm)
    with background.turn:
        background.wait_for_room(repository.config.store_id, name, options, is_alone=comm.size == 1)
        steps.begin(source)
        result = steps.store(steps.live_batches, lambda: True)
    options.attempt.note_stored(result.row)
    return result


def async_take(
    repository: Repository, name: str, source: StateSource, options: TakeOptions, comm: Comm
) -> PendingTake:
    """Copy the state and return; a thread in the background does the rest.

    If an earlier take of the store failed, and no call has raised that yet, its error is raised
    first. This call blocks while ``max_pending`` earlier takes of this process are pending. If
    ``max_staging_bytes`` do not hold their states, it also blocks until enough has been stored.

    Args:
        repository: The store.
        name: The name of the snapshot.
        source: The state of this rank.
        options: The options of the take.
        comm: The ranks.
    """
    steps = _Steps(repository, name, options, comm)
    pending: PendingTake | None = None
    try:
        with background.turn:
            store_id = repository.config.store_id
            background.wait_for_room(store_id, name, options, is_alone=comm.size == 1)
            steps.begin(source)
            steps.begin_asking()
            copies = StagedCopies(options.staging_bytes, options.threads)
            pending = PendingTake(
                store_id, name, lambda: steps.store_copies(copies), options.attempt
            )
            try:
                if options.max_pending > 1:
                    comm.leave()
                copies.fill(steps.unknown_pieces(), when_full=partial(steps.go_on, pending))
                steps.state.drop_tensors()
                steps.go_on(pending)
            except BaseException as e:
                # Once started, the take in the background fails too, and tells the other ranks.
                if not pending.started:
                    try:
                        run_shielded(lambda _: copies.release())
                    except UnavailableError:
                        copies.release()
                    steps.end_reliance()
                    steps.tell_ranks_later(e)
                pending.note_seen()
                raise
            return pending
    except BaseException as e:
        if pending is None:
            steps.end_reliance()
            comm.__exit__(type(e), e, None)
        raise


_log = logging.getLogger("casnap")
_GONE = (
    "a garbage collector whose grace was shorter than this take has deleted chunks that the store "
    "had at the call. They stayed on the device, so they cannot be written anew: take again, and "
    "give `casnap gc` a longer --grace. With CASNAP_DEVICE_HASH=off all is copied at the call"
)


# The takes that rely on chunks from their calls on, and have announced that.
_calls: WeakSet[_Steps] = WeakSet()
in_child(_calls.clear)


class _Steps:
    """The steps of a take, on one of its ranks.

    Args:
        repository: The store.
        name: The name of the snapshot.
        options: The options of the take.
        comm: The ranks.
    """

    def __init__(self, repository: Repository, name: str, options: TakeOptions, comm: Comm) -> None:
        self._started = time.monotonic()
        self._repository = repository
        self._name = name
        self._options = options
        self._comm = comm
        self._requests_before = Counter[str]()
        # The requests that the call of an async take made.
        self._in_call = Counter[str]()
        # Knows the chunks that the store has, and that stay on devices. None if no device hashes.
        self._asking: Asking | None = None
        # The chunks that an async take relies on from its call on, and whether they are gone.
        self._reliance: Reliance | None = None
        self._is_gone = False
        # Measures the tensors. None if the options do not ask for that.
        self._measuring: Measuring | None = None

    def begin(self, source: StateSource) -> None:
        """Do the steps that need the caller's state: agree, capture, divide the work.

        Args:
            source: The state of this rank.
        """
        repository, comm = self._repository, self._comm
        metadata = checked_metadata(self._options.metadata or {})
        options = self._options = replace(self._options, metadata=metadata)
        self._requests_before = Counter(repository.backend.requests)
        comm.enter_phase("beginning a take")
        agreed = agree(repository, self._name, source.keys(), options, comm)
        # The root to base the take on; if it is None, the newest one.
        self._base_root, self._lists = agreed.root, agreed.lists
        self._codec, self._seed = agreed.codec, agreed.seed
        chunk_size = repository.config.chunk_size
        keys = [key_of(component) for component in agreed.keys]
        self.state = source.capture(keys, chunk_size, allow_pickle=options.allow_pickle)
        # Rank 0 makes notes, and records the environment, for all ranks.
        is_first = comm.rank == 0
        if is_first:
            hints.look(source.values, self.state.leaves)
        self._notes = options.hooks.notes(self._name) if is_first else {}
        has_environment = is_first and options.environment
        self._environment = run_environment(with_commit=True) if has_environment else {}
        comm.enter_phase("sharing out the work")
        self._division = divide(comm, self.state, source.values, options, chunk_size, agreed.seed)
        self.state.assign(self._division.plans)
        if options.health is not None:
            store_id, ignore = repository.config.store_id, options.health.ignore
            self._measuring = Measuring(self.state, store_id, ignore)
        if comm.rank == 0 and options.max_pending == 1:
            # If takes may be pending, room is made at this take's turn: before that, chunks that
            # earlier takes rely on cannot be freed.
            options.hooks.make_room(self._count_bytes)

    def _count_bytes(self) -> int:
        """Return about how many bytes the state has on all ranks."""
        return self._comm.size * self.state.bytes_to_hash()

    def live_batches(self, session: Session) -> Batches:
        """Return the batches of pieces to hash, read from the state itself, not from copies."""
        hashers = hashers_for(self.state, session.base.root)
        self._asking = None
        if hashers:
            store_id = self._repository.config.store_id
            self._asking = Asking(self.state, hashers, session.rely_on, store_id)
        return lambda nbytes: batched(self.unknown_pieces(), nbytes)

    def begin_asking(self) -> None:
        """Prepare to ask the store which chunks it has, for each device that can hash.

        Chunks that the store has stay on the device; ``async_take`` copies only the others to the
        host.
        """
        if not self.state.devices:
            return
        store = self._repository
        root = self._base_root or store.recent()
        hashers = hashers_for(self.state, root)
        if not hashers:
            return
        # Collectors must see the take at once, since chunks that stay on the device cannot be
        # written anew. In an object store, rank 0 announces the take for all ranks.
        is_seen = self._comm.rank == 0 or not store.backend.costs.one_asks

        def begin(_: Crew) -> None:
            self._reliance = Reliance(
                store, self._base_root, announced=root.seq if is_seen else None, at_once=True
            )

        def rely_on(digests: list[Digest]) -> Sequence[Place | None]:
            assert self._reliance is not None
            return self._reliance.rely_on(digests)

        asking = Asking(self.state, hashers, rely_on, store.config.store_id)
        if asking.leaves:
            # Shielded, so that no interrupt comes before ``_reliance`` is set, which can end it.
            run_shielded(begin)
            _calls.add(self)
        self._asking = asking

    def unknown_pieces(self) -> Iterable[Piece]:
        """Return the pieces that the host has to hash: all but the chunks that stay on a device.

        Each rank begins at a different place of the state.
        """
        pieces: Iterable[Piece] = self.state.pieces(self._comm.rank / self._comm.size)
        if self._measuring is not None:
            pieces = self._measuring.on_devices(pieces)
        return pieces if self._asking is None else self._asking.unknown(pieces)

    def end_reliance(self) -> None:
        """End the reliance on chunks that stayed on devices, so that collectors may free them."""
        if self._reliance is not None:
            self._reliance.end()

    # --- in the background ---

    def go_on(self, pending: PendingTake) -> None:
        """Start the background thread of the take, unless it runs already."""
        if not pending.started:
            self._in_call = Counter(self._repository.backend.requests) - self._requests_before
            pending.start()

    def store_copies(self, copies: StagedCopies) -> TakeResult:
        """Store the copied pieces and commit, then free them; the background thread calls this.

        Raises:
            FencedError: A collector was faster, and the take cannot start again.
            StorageFullError: The disk is full, and nothing there can be freed.
        """
        with self._background_ranks() as comm:
            try:
                if self._options.max_pending > 1:
                    # Takes that were pending at the call have ended since. This take relies on the
                    # chunks that they wrote, and does not count their requests.
                    self._requests_before = Counter(self._repository.backend.requests)
                    self._requests_before.subtract(self._in_call)
                    root = None
                    if comm.rank == 0:
                        self._options.hooks.make_room(self._count_bytes)
                        root = self._repository.recent()
                    self._base_root = comm.broadcast_message(root, Root)
                    self._comm = comm
                return self.store(
                    lambda _: copies.batches,
                    lambda: copies.start_over() and self._still_relies(),
                )
            except (FencedError, StorageFullError) as e:
                if self._is_gone:
                    raise FencedError(_GONE) from e
                raise
            finally:
                copies.release()
                self.end_reliance()

    def _still_relies(self) -> bool:
        """Whether the store still has the chunks that stayed on devices during the call."""
        self._is_gone = self._reliance is not None and not self._reliance.stands()
        return not self._is_gone

    def _background_ranks(self) -> Comm:
        """Return the communicator for the background part of an async take."""
        return self._comm.background(self._seed) if self._options.max_pending > 1 else self._comm

    def tell_ranks_later(self, error: BaseException) -> None:
        """Tell the other ranks that the call failed, once it is this take's turn to store.

        Until then, other ranks may be storing earlier takes, and would mistake the error for
        theirs.

        Args:
            error: The error that the call has met.
        """

        def tell() -> TakeResult:
            self._background_ranks().__exit__(type(error), error, None)
            raise StateError(f"the call for {self._name!r} failed")

        if self._options.max_pending == 1:
            self._comm.__exit__(type(error), error, None)
            return
        telling = PendingTake(self._repository.config.store_id, self._name, tell)
        telling.error_seen = True
        telling.start()

    # --- storing ---

    def store(
        self, batches_for: Callable[[Session], Batches], start_over: Callable[[], bool]
    ) -> TakeResult:
        """Store the new chunks, then the manifest, and commit.

        The take starts again if a collector was faster, or if room was made on a full disk.

        Args:
            batches_for: Returns the batches to hash, for a session.
            start_over: Lets the batches begin again; returns whether they can.

        Raises:
            FencedError: A collector was faster, and the take cannot start again.
            StorageFullError: The disk is full, and nothing there can be freed.
        """
        limit = self._options.threads
        return again(
            self._repository,
            lambda: run_shielded(lambda crew: self._store_once(batches_for, crew), limit),
            f"{self._name}: the take",
            on_full=self._make_room,
            start_over=lambda: self._start_over(start_over),
        )

    def _make_room(self, error: StorageFullError) -> None:
        """Free room after the disk was full. Rank 0 does it; all ranks call this.

        Raises:
            StorageFullError: The take cannot go on after this error.
        """
        comm = self._comm
        if not comm.resume(error):
            raise error
        # Takes that wait for this one give up their reliance, or the chunks that they rely on could
        # not be freed. Snapshots hold most of these chunks; a take that has lost some says so.
        store_id = self._repository.config.store_id
        for steps in list(_calls):
            if steps._repository.config.store_id == store_id:
                steps.end_reliance()
        # Wait until all ranks have deleted their packs, and have withdrawn their announcements.
        mine = self.state.bytes_to_hash().to_bytes(8, "big")
        nbytes = sum(int.from_bytes(each, "big") for each in comm.all_gather(mine))
        if comm.rank == 0:
            self._options.hooks.on_full(error, lambda: nbytes)

    def _start_over(self, start_over: Callable[[], bool]) -> bool:
        """Let all ranks start again; if one of them cannot, none does.

        Args:
            start_over: Lets the batches of this rank begin again; returns whether they can.

        Returns:
            Whether all ranks start again.
        """
        comm = self._comm
        # The other ranks wait here until rank 0 has made room.
        if comm.ended or not all(map(any, comm.all_gather(bytes([start_over()])))):
            return False
        self._base_root = None
        if comm.size > 1 and self._repository.backend.costs.one_asks:
            # Other ranks may know an older root.
            newest = self._repository.newest() if comm.rank == 0 else None
            self._base_root = comm.broadcast_message(newest, Root)
        return True

    def _tell_lengths(self, packs: int) -> None:
        """Have rank 0 list the packs, and send their lengths to all ranks. This saves requests.

        Args:
            packs: How many packs this rank would have to look at by itself.
        """
        comm, store = self._comm, self._repository
        told = store.list_packs_for(comm.size, packs) if comm.rank == 0 else None
        store.note_packs(comm.broadcast_message(told, dict[PackId, int]))

    def _store_once(self, batches_for: Callable[[Session], Batches], crew: Crew) -> TakeResult:
        comm, options = self._comm, self._options
        with Session(
            self._repository,
            crew,
            self._codec,
            self._requests_before,
            self._base_root,
            self._reliance,
            puts_root=comm.rank == 0,
        ) as session:
            comm.enter_phase("hashing and writing")
            if self._lists:
                self._lists = False
                self._tell_lengths(session.base.packs.at_most)
            hasher = Hasher(self.state, session.writer, options.progress, self._measuring)
            batches, asking = batches_for(session), self._asking
            if self._division.is_single_process:
                hasher.hash_all(batches, crew)
            else:
                exchange = Exchange(comm, crew, self.state, self._division)
                exchange.run(batches, hasher.hash)
            if asking is not None:
                asking.settle(hasher)
            comm.enter_phase("assembling the manifest")
            with python_gc_paused():
                built = build_manifest(
                    comm,
                    self.state,
                    self._division,
                    hasher.digests,
                    session.put_node,
                    self._environment,
                    self._measuring,
                )
            comm.enter_phase("committing")
            notes, warning = self._notes, ""
            if built is not None and options.health is not None:
                warning = built.health.judgement(self._name, options.health)
                notes = dict(sorted({**notes, UNHEALTHY: built.health.count}.items()))
            commit = TakeCommit(self._repository, self._name, options, comm, self._started, notes)
            try:
                if built is None:
                    result = commit.follow(session)
                else:
                    result = commit.lead(session, built.manifest, built.stats)
            finally:
                if built is not None and session.may_be_referenced:
                    unclear_commits.add(session.commit_id)
            # Note the streaks only here, so that a take that starts again counts once.
            if asking is not None:
                asking.note_streaks()
            if self._measuring is not None:
                self._measuring.keep_known()
            if warning:
                _log.warning("%s", warning)
            return result
