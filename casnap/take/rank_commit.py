"""The commit of a take: rank 0 puts one root for all ranks, which hand over what they wrote.

A single process is rank 0 of one. The same root prunes the run. The marker files come after it.
"""

from __future__ import annotations

import logging
import time
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
from casnap.storage import (
    Handover,
    Repository,
    Session,
    Table,
    replace_markers,
    upkeep_of_run,
)
from casnap.take.agreement import check_name
from casnap.take.options import TakeOptions

_log = logging.getLogger("casnap")


class TakeResult(msgspec.Struct, frozen=True):
    """A snapshot that was taken just now.

    Attributes:
        row: Its row in the table.
        requests: How many requests the take made, by kind, on all ranks. They are not stored: when
            a row is written, its take still has to put the root.
        freed_bytes: The bytes that the process which committed has freed since its take before.
    """

    row: Row
    requests: dict[str, int] = {}
    freed_bytes: int = 0


class _Instruction(msgspec.Struct, array_like=True):
    """The orders of rank 0 to the other ranks while it commits.

    Attributes:
        move: Move what you wrote to names under this root, and hand over again.
        error: The commit failed.
        result: The commit is done.
    """

    move: int | None = None
    error: ErrorText | None = None
    result: TakeResult | None = None


@dataclass(frozen=True)
class TakeCommit:
    """The commit of a take, on each of its ranks.

    Attributes:
        store: The store.
        name: The name of the snapshot.
        options: How it is taken.
        comm: The ranks.
        started: When the take began, by ``time.monotonic``.
        notes: The notes that its row gets.
    """

    store: Repository
    name: str
    options: TakeOptions
    comm: Comm
    started: float
    notes: Mapping[str, Any]

    def lead(self, session: Session, manifest: Manifest, stats: Stats) -> TakeResult:
        """On rank 0, commit the snapshot with all that the ranks wrote.

        Args:
            session: What this rank wrote.
            manifest: The manifest.
            stats: How much that describes.

        Raises:
            FencedError: Something that a rank wrote, or relied on, is gone.
            RankError: Another rank failed, died or hangs.
        """
        comm = self.comm
        comm.broadcast(session.commit_id)

        def gather(seq: int) -> list[Handover]:
            if seq:
                comm.broadcast_message(_Instruction(move=seq), _Instruction)
            return comm.gather_messages(Handover(), Handover)[1:]

        try:
            session.include(gather, comm.check_not_abandoned)
            result = self._put_root(session, manifest, stats)
        except Exception as e:
            if not comm.ended and not session.may_be_referenced:
                comm.broadcast_message(_Instruction(error=error_text(e)), _Instruction)
            raise
        try:
            comm.broadcast_message(_Instruction(result=result), _Instruction)
        except RankError as e:
            _log.warning("it is committed, but rank 0 could not tell all ranks: %s", e)
        return result

    def _put_root(self, session: Session, manifest: Manifest, stats: Stats) -> TakeResult:
        """Put the root, which prunes the run too, and see to the markers."""
        digest = session.put_node(encode(manifest))
        uri, options = self.store.backend.uri, self.options
        row: Row | None = None
        # The rows that go, and those, as they were, that lose some keys.
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
                world_size=self.comm.size,
                stats=replace(stats, new_bytes=session.new_bytes, seconds=seconds),
                metadata=dict(options.metadata or {}),
                notes=dict(self.notes),
            )
            upkeep = upkeep_of_run(table, (self.name, row), options.retention, session)
            gone = _rows_in(table, [*upkeep.pruned, self.name])
            thinned = _rows_in(table, upkeep.thinned)
            return {**dict.fromkeys(gone), **upkeep.thinned, self.name: row}

        session.commit(change)
        assert row is not None
        options.hooks.on_release([*gone.values(), *thinned.values()])
        options.hooks.on_commit()
        replace_markers(self.store, self.name, row, gone)
        return TakeResult(row, dict(session.requests), options.hooks.count_freed())

    # --- the other ranks ---

    def follow(self, session: Session) -> TakeResult:
        """Hand over what this rank wrote, and do what rank 0 says until it has committed.

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
                if instruction.move is None:
                    break
                handover = session.hand_over(comm.size, instruction.move)
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


def _rows_in(table: Table, names: Iterable[str]) -> dict[str, Row]:
    return {name: row for name in names if (row := table.get(name)) is not None}
