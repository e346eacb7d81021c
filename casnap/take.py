"""Taking a snapshot: capture, stage, hash, write what is new, commit."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from casnap.capture import Capture, random_states_first
from casnap.codec import Codec
from casnap.commit import Transaction
from casnap.digest import DIGEST_SIZE, Digest
from casnap.errors import FencedError, StateError, StoreError
from casnap.format import (
    INLINE_DIGESTS,
    LIST_DIGESTS,
    MARKER,
    Manifest,
    Payload,
    Root,
    Row,
    Stats,
    encode,
    payload_of,
    with_payload,
)
from casnap.manifest import build
from casnap.objects import Objects
from casnap.pipeline import Crew, Shared, Worker, collector_paused, cores, undisturbed
from casnap.retention import Pruning, Retention, check_retention, prune
from casnap.staging import Held, Piece, batched
from casnap.state import RNGState, Stateful
from casnap.table import check_free, checked_metadata, setting

_log = logging.getLogger("casnap")
_FENCED_TRIES = 5

Progress = Callable[[int, int], None]
"""Told the bytes done and the bytes in all, now and then, from any thread."""


@dataclass(frozen=True)
class TakeOptions:
    """How to take; see :meth:`casnap.Store.take`."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False
    allow_pickle: bool = False
    max_staging_bytes: int | None = None
    progress: Progress | None = None
    codec: Codec = Codec.RAW
    retention: Retention | None = None

    def __post_init__(self) -> None:
        if self.retention is not None:
            check_retention(self.retention)


# One take at a time in a process: pending ones keep their order, and share their buffers.
# A lock around what a caller does, and the take that goes on after that: an interrupt could lose
# a lock that one thread hands to another.
_turn = threading.Lock()
_last: PendingTake | None = None


def _free_turn_after_fork() -> None:
    global _turn, _last
    _turn, _last = threading.Lock(), None
    _pending.clear()


def _wait_for_last() -> None:
    if _last is not None:
        _last.wait_for_end()


os.register_at_fork(after_in_child=_free_turn_after_fork)


def take(
    objects: Objects, name: str, app_state: Mapping[str, Stateful], options: TakeOptions
) -> Row:
    """Take a snapshot and return its row once it is durable.

    Raises:
        StateError: Something in the state cannot be taken.
        SnapshotExistsError: The name is taken.
        StoreError: The store failed; nothing was committed.
    """
    started = time.monotonic()
    options = replace(options, metadata=checked_metadata(options.metadata))
    with _capture(objects, app_state, options) as capture, _turn:
        _wait_for_last()
        _check(objects, name, options)
        work = _Take(objects, name, capture, options, started)
        for _ in range(_FENCED_TRIES - 1):
            try:
                return work.run(batched(capture.pieces()))
            except FencedError:
                _log.info("%s: a collector went past the take, which starts again", name)
        return work.run(batched(capture.pieces()))


def async_take(
    objects: Objects, name: str, app_state: Mapping[str, Stateful], options: TakeOptions
) -> PendingTake:
    """Copy the state and return; the rest goes on in the background.

    Blocks while an earlier take of this process is pending, and where ``max_staging_bytes`` do
    not hold the state until enough of it has been stored.
    """
    started = time.monotonic()
    options = replace(options, metadata=checked_metadata(options.metadata))
    with _capture(objects, app_state, options) as capture, _turn:
        _wait_for_last()
        _check(objects, name, options)
        held = Held(options.max_staging_bytes)
        work = _Take(objects, name, capture, options, started)
        pending = PendingTake(name, lambda: _run_held(work, held))
        try:
            held.fill(capture.pieces(), when_full=pending.start)
        except BaseException:
            if not pending.started:
                undisturbed(lambda _: held.release())
            pending.error_seen = True
            raise
        capture.let_go()
        pending.start()
        return pending


def _run_held(work: _Take, held: Held) -> Row:
    try:
        return work.run(held.batches())
    finally:
        held.release()


def _check(objects: Objects, name: str, options: TakeOptions) -> None:
    def check(root: Root) -> None:
        table = objects.tree(root.table, Row)
        check_free(table, name, overwrite=options.overwrite, uri=objects.backend.uri)

    objects.current(check)


@contextmanager
def _capture(
    objects: Objects, app_state: Mapping[str, Stateful], options: TakeOptions
) -> Iterator[Capture]:
    """Capture the state; afterwards the random state is what it was before."""
    states_in_order = [app_state[key] for key in random_states_first(app_state)]
    random = [s for s in states_in_order if isinstance(s, RNGState)]
    states = [s.state_dict() for s in random]
    try:
        with collector_paused():
            capture = Capture(
                app_state, objects.config.chunk_size, allow_pickle=options.allow_pickle
            )
        yield capture
    finally:
        for state, before in zip(random, states, strict=True):
            state.load_state_dict(before)


class _Take:
    """One take on its way from captured leaves to a committed row."""

    def __init__(
        self, objects: Objects, name: str, capture: Capture, options: TakeOptions, started: float
    ) -> None:
        self._objects = objects
        self._name = name
        self._capture = capture
        self._options = options
        self._started = started
        self._digests: list[bytearray] = [
            bytearray(DIGEST_SIZE * grid.count if grid is not None else 0) for grid in capture.grids
        ]
        self._done_bytes = 0
        self._lock = threading.Lock()

    def run(self, batches: Iterable[list[Piece]]) -> Row:
        """Store what is new of these pieces, then the tree, and commit."""
        self._done_bytes = 0
        row = undisturbed(lambda crew: self._store(batches, crew))
        self._mark(row)
        if self._options.retention is not None:
            self._retain(row, self._options.retention)
        return row

    def _store(self, batches: Iterable[list[Piece]], crew: Crew) -> Row:
        transaction = Transaction(self._objects, crew, self._options.codec)
        try:
            source = Shared(batches, crew)
            crew.join(crew.start(lambda: self._hash(source, transaction), min(cores(), 8)))
            with collector_paused():
                manifest = encode(self._manifest(transaction))
            return self._commit(transaction, manifest)
        except BaseException as e:
            crew.fail(e)
            raise
        finally:
            transaction.close()

    def _hash(self, source: Shared[list[Piece]], transaction: Transaction) -> None:
        writer = transaction.chunk_writer()
        try:
            for batch in source:
                try:
                    self._note(batch, writer.store(_chunks_of(batch)))
                finally:
                    for piece in batch:
                        piece.give_back()
        finally:
            writer.finish()

    def _note(self, batch: list[Piece], digests: list[Digest]) -> None:
        """Put the digests of some pieces where they belong."""
        first = 0
        for piece in batch:
            stop, at = first + len(piece.sizes), piece.first * DIGEST_SIZE
            joined = b"".join(digests[first:stop])
            self._digests[piece.leaf][at : at + len(joined)] = joined
            first = stop
        self._report(sum(len(piece.view) for piece in batch))

    def _report(self, nbytes: int) -> None:
        if self._options.progress is not None:
            with self._lock:
                self._done_bytes += nbytes
                self._options.progress(self._done_bytes, self._capture.logical_bytes)

    def _manifest(self, transaction: Transaction) -> Manifest:
        capture = self._capture
        top = Manifest({}, {str(rank): {} for rank in range(1)})
        for span in capture.spans:
            entries = {}
            for i in range(span.start, span.stop):
                path, entry, _ = capture.leaves[i]
                payload = self._payload(i, transaction)
                entries[path[len(span.key) :]] = with_payload(entry, payload)
            keys = top.shared if span.rank is None else top.ranks[str(span.rank)]
            keys[span.key] = build(entries, transaction.put_node)
        return top

    def _payload(self, leaf: int, transaction: Transaction) -> Payload:
        inline = self._capture.inline.get(leaf)
        if inline is not None:
            return Payload(len(inline), inline)
        leaf_digests = self._digests[self._capture.same_as.get(leaf, leaf)]
        digests, depth = bytes(leaf_digests), 0
        while len(digests) > INLINE_DIGESTS * DIGEST_SIZE:
            # A long list is a node of its own, so an unchanged tensor costs one comparison.
            step = LIST_DIGESTS * DIGEST_SIZE
            lists = [digests[at : at + step] for at in range(0, len(digests), step)]
            digests, depth = b"".join(map(transaction.put_node, lists)), depth + 1
        return Payload(payload_of(self._capture.leaves[leaf].entry).nbytes, b"", digests, depth)

    def _commit(self, transaction: Transaction, manifest: bytes) -> Row:
        digest = transaction.put_node(manifest)
        made: list[Row] = []

        def row(seq: int) -> Row:
            stats = Stats(
                self._capture.logical_bytes,
                transaction.new_bytes,
                len(self._capture.leaves),
                time.monotonic() - self._started,
            )
            made.append(
                Row(
                    commit=transaction.commit,
                    manifest=transaction.ref(digest),
                    seq=seq,
                    time=time.time(),
                    world_size=1,
                    stats=stats,
                    metadata=dict(self._options.metadata),
                )
            )
            return made[-1]

        uri, overwrite = self._objects.backend.uri, self._options.overwrite
        transaction.publish(setting(self._name, row, overwrite=overwrite, uri=uri))
        return made[-1]

    def _mark(self, row: Row) -> None:
        """Leave a marker for ``ls``, ``glob`` and ``os.path.exists``; never read as truth."""
        content = {"casnap": "snapshot", "name": self._name, "commit": row.commit.hex()}
        try:
            self._objects.backend.mark(f"{self._name}/{MARKER}", msgspec.json.encode(content))
        except (StoreError, OSError) as e:
            _log.warning(
                "%s is committed, but its marker file cannot be written: %s", self._name, e
            )

    def _retain(self, row: Row, retention: Retention) -> None:
        """Forget what is not to be kept of the run."""
        folder = self._name.rpartition("/")[0]
        try:
            prune(self._objects, Pruning(retention, folder, row.commit))
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


class PendingTake:
    """A take that goes on in a thread, which the interpreter waits for before it exits.

    Args:
        name: The snapshot's name.
        finish: What is left to do.
    """

    def __init__(self, name: str, finish: Callable[[], Row]) -> None:
        self.name = name
        self.error_seen = False
        self._finish: Callable[[], Row] | None = finish
        self._row: Row | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread: Worker | None = None

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, unless it was; other takes wait for its end."""
        global _last
        with self._lock:
            if self._thread is None:
                self._thread = Worker(self._run, "casnap-async-take")
                _last = self
                _pending.add(self)
                self._thread.start()

    def _run(self) -> None:
        try:
            assert self._finish is not None
            self._row = self._finish()
            _pending.discard(self)
        except BaseException as e:  # noqa: BLE001 - raised by wait
            self._error = e
        finally:
            # It holds the state's description, which would live as long as this.
            self._finish = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is not None and self._thread.ended

    def wait_for_end(self) -> None:
        """Wait for the end, good or bad."""
        assert self._thread is not None
        self._thread.wait()

    def wait(self) -> Row:
        """Wait for the end; return the row or raise what went wrong."""
        self.wait_for_end()
        if self._error is not None:
            self.error_seen = True
            raise self._error
        if self._row is None:
            raise StateError(
                f"the take of {self.name!r} goes on in the process that began it; wait for it "
                "there, not in a fork"
            )
        return self._row


_pending: set[PendingTake] = set()


@atexit.register
def _warn_of_unseen_errors() -> None:
    for pending in list(_pending):
        if not pending.error_seen:
            # Logging may be torn down by now, and this must be seen.
            print(
                f"casnap: WARNING: the snapshot {pending.name!r} was NOT stored, and nobody "
                f"called wait(): {type(pending._error).__name__}: {pending._error}",
                file=sys.stderr,
            )
