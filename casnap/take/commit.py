"""The commit of a take: the ranks hand over their packs, and rank 0 puts one root for all.

A process that takes alone is rank 0. The root also deletes the snapshots of the run that the
retention does not keep. Rank 0 writes the marker files after the root.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from casnap.errors import RankError
from casnap.format.entries import Manifest
from casnap.format.records import Row, Stats, encode
from casnap.ranks.comm import Comm
from casnap.ranks.failures import ErrorText, error_of_ranks, error_text
from casnap.storage import Handover, Markers, Repository, Session, Table, Upkeep
from casnap.take.options import TakeOptions
from casnap.take.ranks.agreement import check_name

_log = logging.getLogger("casnap")


class TakeResult(msgspec.Struct, frozen=True):
    """A snapshot that was taken just now.

    Attributes:
        row: Its row in the table.
        requests: How many requests the take made, by kind, on all ranks. The row does not have this
            number, since putting the root makes more requests after the row is written.
        freed_bytes: The bytes that the committing process has freed since its previous take.
    """

    row: Row
    requests: dict[str, int] = {}
    freed_bytes: int = 0


class _Instruction(msgspec.Struct, array_like=True):
    """The message in which rank 0 tells the other ranks what to do next in a commit.

    Exactly one field is set.

    Attributes:
        move: The number of a root. The receiver gives its packs ids under this root, and hands over
            again.
        writers: The ranks that now write segments, each of its own records and those of the ranks
            after it, up to the next writer.
        error: The error with which the commit has failed.
        result: The snapshot, which is committed.
    """

    move: int | None = None
    writers: list[int] | None = None
    error: ErrorText | None = None
    result: TakeResult | None = None


@dataclass(frozen=True)
class TakeCommit:
    """The commit of a take, on each of its ranks.

    Attributes:
        store: The store.
        name: The name of the snapshot.
        options: The options of the take.
        comm: The ranks.
        started: When the take began, by ``time.monotonic``.
        notes: The notes to put into the snapshot's row.
    """

    store: Repository
    name: str
    options: TakeOptions
    comm: Comm
    started: float
    notes: Mapping[str, Any]

    def lead(self, session: Session, manifest: Manifest, stats: Stats) -> TakeResult:
        """Commit the snapshot, with the packs of all ranks. Rank 0 calls this.

        Args:
            session: The session in which this rank wrote.
            manifest: The manifest.
            stats: The number and bytes of the entries in the manifest.

        Raises:
            FencedError: A pack that a rank wrote or relied on is gone.
            RankError: Another rank failed, died or hangs.
        """
        comm = self.comm
        comm.broadcast(session.commit_id)

        # Whether the other ranks wait for an instruction. Only then is an error sent as an
        # instruction. While they hand over, they would misread it; the communicator tells them of
        # the error.
        is_awaited = False

        def gather(seq: int) -> list[Handover]:
            nonlocal is_awaited
            is_awaited = False
            if seq:
                comm.broadcast_message(_Instruction(move=seq), _Instruction)
            handovers = self._gather_handovers()
            is_awaited = True
            return handovers

        try:
            session.include(gather, comm.check_not_abandoned)
            result = self._put_root(session, manifest, stats)
        except Exception as e:
            if is_awaited and not comm.ended and not session.may_be_referenced:
                comm.broadcast_message(_Instruction(error=error_text(e)), _Instruction)
            raise
        try:
            comm.broadcast_message(_Instruction(result=result), _Instruction)
        except RankError as e:
            _log.warning("it is committed, but rank 0 could not tell all ranks: %s", e)
        self.options.hooks.on_taken(self.name, result.row)
        return result

    def _gather_handovers(self) -> list[Handover]:
        """Return the handovers of all ranks but rank 0, with their records or segments.

        Rank 0 calls this. If any rank has too many records for a handover, some ranks first write
        all ranks' records into segments.
        """
        comm = self.comm
        handovers = comm.gather_messages(Handover(), Handover)
        if any(h.weight for h in handovers) and all(h.is_whole for h in handovers):
            writers = Handover.segment_writers(handovers)
            comm.broadcast_message(_Instruction(writers=writers), _Instruction)
            comm.all_to_all([b""] * comm.size)
            listed = comm.gather_messages(Handover(), Handover)
            for handover, more in zip(handovers, listed, strict=True):
                handover.segments, handover.full = more.segments, more.full
                handover.requests = more.requests or handover.requests
        if self.store.backend.costs.one_asks:
            # If ranks of one host name the same place, it is one place: one sample is enough.
            known: set[tuple[int, bytes]] = set()
            for rank, handover in enumerate(handovers):
                where = comm.hosts[rank] or -1 - rank, handover.place
                handover.sample = b"" if where in known else handover.sample
                known |= {where} if handover.sample else set()
        return handovers[1:]

    def _put_root(self, session: Session, manifest: Manifest, stats: Stats) -> TakeResult:
        """Put the root, which adds the new row and prunes the run; then replace marker files."""
        digest = session.put_node(encode(manifest))
        uri, options = self.store.backend.uri, self.options
        row: Row | None = None
        # The rows that are deleted; and as they were before, the rows that lose some keys.
        gone: dict[str, Row] = {}
        thinned: dict[str, Row] = {}

        def change(table: Table, seq: int) -> Mapping[str, Row | None]:
            nonlocal row, gone, thinned
            check_name(table, self.name, options, uri)
            seconds = time.monotonic() - self.started
            row = Row(
                commit=session.commit_id,
                manifest=session.ref(digest),
                seq=seq,
                time=time.time(),
                world_size=len(manifest.ranks),
                stats=replace(stats, new_bytes=session.new_bytes, seconds=seconds),
                metadata=dict(options.metadata or {}),
                notes=dict(self.notes),
            )
            upkeep = Upkeep.of_run(table, (self.name, row), options.retention, session)
            gone = _rows_in(table, [*upkeep.pruned, self.name])
            thinned = _rows_in(table, upkeep.thinned)
            return {**dict.fromkeys(gone), **upkeep.thinned, self.name: row}

        session.commit(change)
        assert row is not None
        options.hooks.on_release([*gone.values(), *thinned.values()])
        options.hooks.on_commit()
        Markers(self.store).replace(self.name, row, gone)
        return TakeResult(row, dict(session.requests), options.hooks.count_freed())

    # --- the other ranks ---

    def follow(self, session: Session) -> TakeResult:
        """Hand over this rank's packs, and follow rank 0's instructions until it has committed.

        Raises:
            RankError: Another rank failed, died or hangs.
        """
        comm = self.comm
        commit = bytes(comm.broadcast())
        handover = session.hand_over(comm.size)
        try:
            while True:
                comm.gather_messages(handover, Handover)
                instruction = comm.broadcast_message(None, _Instruction)
                if instruction.writers is not None:
                    handover = self._listed(session, instruction.writers)
                elif instruction.move is not None:
                    handover = session.hand_over(comm.size, instruction.move)
                else:
                    break
        except RankError as e:
            has_ended = 0 not in e.ranks and comm.await_end(0)
            row = self.store.read_at_newest(lambda root: self.store.table(root).get(self.name))
            if row is not None and row.commit == commit:
                return TakeResult(row)
            if has_ended:
                raise
            raise RankError(
                f"{e}. When this rank looked, the snapshot was not in the store; if rank 0 lives, "
                "it may still commit it",
                e.ranks,
            ) from e
        if instruction.error is not None:
            session.withdraw()
            raise error_of_ranks(comm.operation, {0: instruction.error})
        assert instruction.result is not None
        return instruction.result

    def _listed(self, session: Session, writers: list[int]) -> Handover:
        """Have the records that no segment has yet written into segments, by a few of the ranks.

        Each rank sends its records to a writer; a writer then writes one segment.

        Args:
            session: The session in which this rank wrote.
            writers: The ranks that write segments, in order.

        Returns:
            The new handover of this rank.
        """
        comm = self.comm
        parts = [b""] * comm.size
        if unlisted := session.unlisted:
            parts[writers[bisect_right(writers, comm.rank) - 1]] = unlisted
        return session.list_unlisted([bytes(part) for part in comm.all_to_all(parts) if part])


def _rows_in(table: Table, names: Iterable[str]) -> dict[str, Row]:
    return {name: row for name in names if (row := table.get(name)) is not None}
