"""Taking a snapshot: capture, share out the work, stage, hash, write what is new, commit."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec

from casnap.errors import FencedError
from casnap.format.codec import Codec
from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.entries import INLINE_BYTES, payload_of
from casnap.format.names import MARKER
from casnap.format.records import (
    Root,
    Row,
    Stats,
    encode,
)
from casnap.ranks.comm import Alone, Comm
from casnap.runtime.buffers import SLOT_BYTES, SLOTS
from casnap.runtime.threads import Crew, Shared, collector_paused, cores, undisturbed
from casnap.runtime.torch_modes import plain
from casnap.state.stateful import RNGState, Stateful, random_states_first, same_random_state
from casnap.storage.commit import publish
from casnap.storage.handover import OtherRanks
from casnap.storage.objects import Objects
from casnap.storage.pack import Choose
from casnap.storage.retention import Pruning, Retention, check_retention, prune
from casnap.storage.table import check_free, checked_metadata, setting
from casnap.storage.transaction import Transaction
from casnap.take import pending as background
from casnap.take.capture import Capture
from casnap.take.division import Division, divide
from casnap.take.exchange import Exchange
from casnap.take.joint_commit import check_written, follow, lead
from casnap.take.ownership import Agreed, Hashed, agree, alone
from casnap.take.pending import PendingTake
from casnap.take.scopes import rules_for
from casnap.take.split_cells import Edges
from casnap.take.staging import PIECE_BYTES, Held, Piece, batched, give_back

_log = logging.getLogger("casnap")
_FENCED_TRIES = 5

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all, now and then, from any thread."""


@dataclass(frozen=True)
class TakeOptions:
    """How to take; see :meth:`casnap.Store.take`."""

    metadata: Mapping[str, Any] | None = None
    overwrite: bool = False
    allow_pickle: bool = False
    max_staging_bytes: int | None = None
    progress: Progress | None = None
    retention: Retention | None = None
    replicated: Sequence[str] | None = None
    per_rank: Sequence[str] | None = None
    codec: Codec = Codec.RAW

    def __post_init__(self) -> None:
        if self.retention is not None:
            check_retention(self.retention)
        for name in ("replicated", "per_rank"):
            if isinstance(globs := getattr(self, name), str):
                raise TypeError(f"{name} is a list of globs, such as [{globs!r}]; got a str")


class _Asked(msgspec.Struct, array_like=True):
    """What a rank was asked to take; that has to be the same on all.

    Attributes:
        store: The store's id.
        name: The name of the snapshot.
        keys: The keys of the app state.
        options: Those that have to be the same.
        codec: How chunks are stored; rank 0's counts.
        seed: Any number; rank 0's chooses which bytes of replicas are compared.
    """

    store: str
    name: str
    keys: list[str]
    options: dict[str, str]
    codec: Codec
    seed: int


def take(
    objects: Objects,
    name: str,
    app_state: Mapping[str, Stateful],
    options: TakeOptions,
    comm: Comm,
) -> Row:
    """Take a snapshot and return its row once it is durable.

    Raises:
        StateError: Something in the state cannot be taken.
        SnapshotExistsError: The name is taken.
        StoreError: The store failed; nothing was committed.
        RankError: Another rank failed, died or hangs.
    """
    started = time.monotonic()
    with background.turn:
        background.wait_for_last()
        options = replace(options, metadata=checked_metadata(options.metadata or {}))
        state, asked = _agreed_state(objects, name, app_state, options, comm)
        options = replace(options, codec=asked.codec)
        capture = _capture(objects, state, options)
        work = _Take(objects, name, capture, options, comm, started)
        work.divide(state, asked.seed)
        for tries in count(1):
            try:
                pieces = capture.pieces(comm.rank / comm.size)
                return work.run(batched(pieces, _batch_bytes(comm)))
            except FencedError:
                if tries == _FENCED_TRIES or comm.over:
                    raise
                _log.info("%s: a collector went past the take, which starts again", name)
    raise AssertionError


def async_take(
    objects: Objects,
    name: str,
    app_state: Mapping[str, Stateful],
    options: TakeOptions,
    comm: Comm,
) -> PendingTake:
    """Copy the state and return; the rest goes on in the background.

    Blocks while an earlier take of this process is pending, and where ``max_staging_bytes`` do
    not hold the state until enough of it has been stored.
    """
    started = time.monotonic()
    pending: PendingTake | None = None
    try:
        with background.turn:
            background.wait_for_last()
            options = replace(options, metadata=checked_metadata(options.metadata or {}))
            state, asked = _agreed_state(objects, name, app_state, options, comm)
            options = replace(options, codec=asked.codec)
            capture = _capture(objects, state, options)
            held = Held(options.max_staging_bytes)
            work = _Take(objects, name, capture, options, comm, started)
            work.divide(state, asked.seed)
            pending = PendingTake(name, lambda: _run_held(work, held, comm))
            try:
                held.fill(capture.pieces(comm.rank / comm.size), when_full=pending.start)
                capture.let_go()
                pending.start()
            except BaseException:
                if not pending.started:
                    undisturbed(lambda _: held.release())
                pending.error_seen = True
                raise
            return pending
    except BaseException as e:
        # What goes on in the background fails too, and tells the others itself.
        if pending is None or not pending.started:
            comm.__exit__(type(e), e, None)
        raise


def _batch_bytes(comm: Comm) -> int:
    """Return how much is hashed at a time: where others have to be asked, as much as a pack."""
    return PIECE_BYTES if comm.size == 1 else SLOT_BYTES


def _run_held(work: _Take, held: Held, comm: Comm) -> Row:
    with comm:
        try:
            return work.run(held.batches(_batch_bytes(comm)))
        finally:
            held.release()


def _agreed_state(
    objects: Objects,
    name: str,
    app_state: Mapping[str, Stateful],
    options: TakeOptions,
    comm: Comm,
) -> tuple[dict[str, Stateful], _Asked]:
    """Check that the name is free and all ranks were asked the same.

    Returns:
        The state in the order of rank 0, and what that one was asked.

    To read states may be a collective of their own, so all ranks do it in one order.
    """
    comm.at("beginning a take")
    keys = random_states_first(app_state)
    if comm.rank == 0:
        _check(objects, name, options)
    said = {
        "overwrite": str(options.overwrite),
        "allow_pickle": str(options.allow_pickle),
        "retention": repr(options.retention),
    }
    seed = int.from_bytes(os.urandom(7), "big")
    mine = _Asked(objects.config.store_id, name, keys, said, options.codec, seed)
    asked = msgspec.msgpack.decode(comm.broadcast(encode(mine)), type=_Asked)
    for what, here, there in (
        ("the store", mine.store, asked.store),
        ("the name", mine.name, asked.name),
        ("the keys of app_state", sorted(mine.keys), sorted(asked.keys)),
        *((f"the option {key}=", value, asked.options[key]) for key, value in said.items()),
    ):
        comm.check_same(what, here, there)
    return {key: app_state[key] for key in asked.keys}, asked


def _check(objects: Objects, name: str, options: TakeOptions) -> None:
    def check(root: Root) -> None:
        table = objects.table(root)
        check_free(table, name, overwrite=options.overwrite, uri=objects.backend.uri)

    objects.current(check)


def _capture(objects: Objects, app_state: Mapping[str, Stateful], options: TakeOptions) -> Capture:
    """Capture the state; the random state is what it was before, whatever reading it drew."""
    random = [s for s in app_state.values() if isinstance(s, RNGState)]
    states = [s.state_dict() for s in random]
    try:
        with collector_paused():
            return Capture(app_state, objects.config.chunk_size, allow_pickle=options.allow_pickle)
    finally:
        # At once, and only if need be: what other threads draw meanwhile, they would draw again.
        for state, before in zip(random, states, strict=True):
            if not same_random_state(state.state_dict(), before):
                state.load_state_dict(before)


class _Take:
    """One take on its way from captured leaves to a committed row."""

    def __init__(
        self,
        objects: Objects,
        name: str,
        capture: Capture,
        options: TakeOptions,
        comm: Comm,
        started: float,
    ) -> None:
        self._objects = objects
        self._name = name
        self._capture = capture
        self._options = options
        self._comm = comm
        self._started = started
        self._division: Division | None = None
        self._hashed = Hashed({}, {})
        self._total = capture.logical_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    @plain()
    def divide(self, app_state: Mapping[str, Stateful], seed: int) -> None:
        """Share out the work among the ranks; alone, there is nothing to share out."""
        if isinstance(self._comm, Alone) and not self._capture.sharded:
            return
        self._comm.at("sharing out the work")
        declared = self._options.replicated or (), self._options.per_rank or ()
        rules = rules_for(app_state, *declared, self._comm.ranks)
        chunk_size = self._objects.config.chunk_size
        self._division = divide(self._comm, self._capture, rules, chunk_size, seed)
        self._total = self._capture.bytes_to_hash()

    def run(self, batches: Iterable[list[Piece]]) -> Row:
        """Store what is new of these pieces, then the tree, and commit."""
        self._done_bytes = 0
        capture = self._capture
        self._hashed = Hashed(
            {
                i: bytearray(DIGEST_SIZE * grid.count)
                for i, grid in enumerate(capture.grids)
                if grid
            },
            {i: {} for i in capture.assigned},
        )
        return undisturbed(lambda crew: self._store(batches, crew))

    def _store(self, batches: Iterable[list[Piece]], crew: Crew) -> Row:
        transaction = Transaction(self._objects, crew, self._options.codec)
        try:
            self._comm.at("hashing and writing")
            source = Shared(batches, crew)
            if self._division is None:
                threads = min(cores(), 8)
                crew.run(lambda: self._hash(source, transaction), threads)
            else:
                self._hash_together(source, transaction, crew, self._division)
            self._comm.at("settling what is whose")
            with collector_paused():
                agreed = self._agreed(transaction)
            self._comm.at("committing")
            return self._commit(transaction, agreed)
        except BaseException as e:
            crew.fail(e)
            raise
        finally:
            transaction.close()

    # --- hashing ---

    def _hash(
        self,
        batches: Iterable[list[Piece]],
        transaction: Transaction,
        ask: Choose | None = None,
    ) -> None:
        writer = transaction.chunk_writer(ask)
        try:
            for batch in batches:
                try:
                    stored = [piece for piece in batch if not self._keep_inline(piece)]
                    self._note(stored, writer.store(_chunks_of(stored)))
                finally:
                    give_back(batch)
        finally:
            writer.finish()

    def _hash_together(
        self,
        source: Shared[list[Piece]],
        transaction: Transaction,
        crew: Crew,
        division: Division,
    ) -> None:
        """Hash with the other ranks: some threads wait for answers while others hash."""
        # Each keeps a slot, part-filled, while it waits for all others: some must be left for them.
        threads = min(cores() + 2, SLOTS - 2)
        edges = Edges(self._comm.size, division.keys, division.targets)
        exchange = Exchange(self._comm, crew, edges, threads)
        hashing = crew.start(
            lambda: self._hash(exchange.batches(source), transaction, exchange.ask), threads
        )
        try:
            exchange.run()
        except BaseException as e:
            crew.fail(e)
            # Packs are deleted only after nobody writes any more.
            for thread in hashing:
                thread.wait()
            raise
        crew.join(hashing)

    def _keep_inline(self, piece: Piece) -> bool:
        """Keep the bytes themselves of a sharded tensor that is to stand in its entry."""
        cells = self._hashed.cells.get(piece.leaf)
        if (
            cells is None
            or payload_of(self._capture.leaves[piece.leaf].entry).nbytes > INLINE_BYTES
        ):
            return False
        if piece.ready is not None:
            piece.ready()
        cells[piece.first] = bytes(piece.view)
        return True

    def _note(self, batch: list[Piece], digests: list[Digest]) -> None:
        """Put the digests of some pieces where they belong."""
        first = 0
        for piece in batch:
            stop = first + len(piece.sizes)
            found = digests[first:stop]
            cells = self._hashed.cells.get(piece.leaf)
            if cells is None:
                at, joined = piece.first * DIGEST_SIZE, b"".join(found)
                self._hashed.whole[piece.leaf][at : at + len(joined)] = joined
            else:
                cells.update(zip(range(piece.first, piece.first + len(found)), found, strict=True))
            first = stop
        self._report(sum(len(piece.view) for piece in batch))

    def _report(self, nbytes: int) -> None:
        if self._options.progress is not None:
            with self._lock:
                self._done_bytes += nbytes
                self._options.progress(self._done_bytes, self._total)

    # --- the tree, and the commit ---

    def _agreed(self, transaction: Transaction) -> Agreed | None:
        capture, put = self._capture, transaction.put_node
        if self._division is None:
            return alone(capture, self._hashed, put)
        return agree(self._comm, capture, self._division, self._hashed, put)

    def _commit(self, transaction: Transaction, agreed: Agreed | None) -> Row:
        if agreed is None:
            return follow(self._comm, transaction, self._row_of)
        if self._comm.size == 1:
            return self._publish(transaction, agreed, OtherRanks())
        return lead(self._comm, transaction, lambda o: self._publish(transaction, agreed, o))

    def _row_of(self, commit: bytes) -> Row | None:
        """Return the row of this take if it was committed, whatever was heard of that."""
        row = self._objects.current(lambda root: self._objects.table(root).get(self._name))
        return row if row is not None and row.commit == commit else None

    def _publish(self, transaction: Transaction, agreed: Agreed, others: OtherRanks) -> Row:
        digest = transaction.put_node(encode(agreed.manifest))
        made: list[Row] = []

        def row(seq: int) -> Row:
            stats = Stats(
                agreed.logical_bytes,
                transaction.new_packs.stored_bytes + others.new_bytes,
                agreed.entries,
                time.monotonic() - self._started,
            )
            made.append(
                Row(
                    commit=transaction.commit,
                    manifest=transaction.ref(digest),
                    seq=seq,
                    time=time.time(),
                    world_size=self._comm.size,
                    stats=stats,
                    metadata=dict(self._options.metadata or {}),
                )
            )
            return made[-1]

        check_written(self._objects.backend, others)
        uri, overwrite = self._objects.backend.uri, self._options.overwrite
        publish(transaction, setting(self._name, row, overwrite=overwrite, uri=uri), others)
        self._mark(made[-1])
        if self._options.retention is not None:
            self._retain(made[-1], self._options.retention)
        return made[-1]

    def _mark(self, row: Row) -> None:
        """Leave a marker for ``ls``, ``glob`` and ``os.path.exists``; never read as truth."""
        content = {"casnap": "snapshot", "name": self._name, "commit": row.commit.hex()}
        try:
            self._objects.backend.mark(f"{self._name}/{MARKER}", msgspec.json.encode(content))
        except Exception as e:  # noqa: BLE001 - the take is committed, whatever it was
            _log.warning(
                "%s is committed, but its marker file cannot be written: %s", self._name, e
            )

    def _retain(self, row: Row, retention: Retention) -> None:
        """Forget what is not to be kept of the run."""
        folder = self._name.rpartition("/")[0]
        try:
            prune(self._objects, Pruning(self._objects, retention, folder, row.commit))
        except Exception as e:  # noqa: BLE001 - the take is committed, whatever it was
            _log.warning(
                "%s is committed, but its run was not pruned: %s: %s",
                self._name,
                type(e).__name__,
                e,
            )


def _chunks_of(batch: list[Piece]) -> list[memoryview]:
    chunks = []
    for piece in batch:
        if piece.ready is not None:
            piece.ready()
        start = 0
        for size in piece.sizes:
            chunks.append(piece.view[start : start + size])
            start += size
    return chunks
