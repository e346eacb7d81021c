"""One commit for all ranks: rank 0 puts the root, the others hand over what they wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from casnap.errors import FencedError, RankError, StoreError
from casnap.format.records import Row, pack_key, segment_key
from casnap.ranks.comm import Comm
from casnap.ranks.failures import ErrorText, error_of_ranks, error_text
from casnap.runtime.threads import mapped
from casnap.storage.chunks.objects import Objects
from casnap.storage.commits.rank_parts import OtherRanks, RankPart, finish_rank_part
from casnap.storage.commits.transaction import Transaction
from casnap.take.publish import Taken

_log = logging.getLogger("casnap")


class _Instruction(msgspec.Struct, array_like=True):
    """The orders of rank 0 to the other ranks while it commits.

    Attributes:
        move: Move what you wrote to names under this root, and hand over again.
        error: The commit failed.
        taken: The commit is done.
    """

    move: int | None = None
    error: ErrorText | None = None
    taken: Taken | None = None


def commit_together(
    comm: Comm,
    transaction: Transaction,
    publish: Callable[[OtherRanks], Taken],
    find: Callable[[bytes], Row | None],
) -> Taken:
    """Commit what all ranks wrote. A single process is rank 0 of one.

    Args:
        comm: The ranks.
        transaction: What this rank wrote.
        publish: Called on rank 0: commits, with what the others wrote.
        find: Returns the row of this take if the store has it, given the commit id.

    Raises:
        FencedError: Something that a rank wrote, or relied on, is gone.
        RankError: Another rank failed, died or hangs.
    """
    if comm.rank == 0:
        return _lead(comm, transaction, publish)
    return _follow(comm, transaction, find)


def _lead(comm: Comm, transaction: Transaction, publish: Callable[[OtherRanks], Taken]) -> Taken:
    comm.broadcast(transaction.commit)

    def move(seq: int) -> list[RankPart]:
        comm.broadcast_message(_Instruction(move=seq), _Instruction)
        return _handovers(comm)

    try:
        others = OtherRanks(_handovers(comm), move, comm.check_not_abandoned)
        _check_written(transaction.objects, others)
        taken = publish(others)
    except Exception as e:
        if not comm.ended and not transaction.may_be_referenced:
            comm.broadcast_message(_Instruction(error=error_text(e)), _Instruction)
        raise
    try:
        comm.broadcast_message(_Instruction(taken=taken), _Instruction)
    except RankError as e:
        _log.warning("it is committed, but rank 0 could not tell all ranks: %s", e)
    return taken


def _handovers(comm: Comm) -> list[RankPart]:
    """Return what the other ranks hand over.

    Raises:
        FencedError: Something that a rank wrote, or relied on, is gone; all ranks take again.
    """
    handovers = comm.gather_messages(RankPart(b"", 0, 0), RankPart)[1:]
    for handover in handovers:
        if handover.fenced:
            raise FencedError(handover.fenced)
    return handovers


def _check_written(objects: Objects, others: OtherRanks) -> None:
    """Check that rank 0 sees the files that the other ranks wrote.

    Raises:
        StoreError: It does not: they write to another storage, such as a copy of the store.
    """
    # At a remote place one of each rank says where it writes; all see a put that was answered.
    written = others.samples if objects.backend.costly_requests else others.packs
    ends = dict.fromkeys(map(pack_key, written), 0)
    ends |= {segment_key(ref.id): 0 for ref in others.segments}
    for _, place in others.records:
        key = pack_key(place.pack)
        if key in ends:
            ends[key] = max(ends[key], place.offset + place.stored)
    sizes = mapped(objects.backend.size_if_there, ends, objects.backend.in_flight)
    lacking = [key for key, size in sizes if size is None or size < ends[key]]
    if lacking:
        raise StoreError(
            f"{objects.backend.where(lacking[0])}, which another rank has written, is not there, "
            "or not whole, where rank 0 looks; all ranks must see one storage (a copy of a store, "
            "on a disk of each host, is another one)"
        )


def _follow(comm: Comm, transaction: Transaction, find: Callable[[bytes], Row | None]) -> Taken:
    """Hand over what this rank wrote, and do what rank 0 says until it has committed."""
    commit = bytes(comm.broadcast())
    handover = _hand_over(transaction, comm.size)
    try:
        while True:
            comm.gather_messages(handover, RankPart)
            instruction = comm.broadcast_message(None, _Instruction)
            if instruction.move is None:
                break
            handover = _hand_over(transaction, comm.size, instruction.move)
    except RankError as e:
        ended = 0 not in e.ranks and comm.await_end(0)
        row = find(commit)
        if row is not None:
            return Taken(row)
        if ended:
            raise
        raise RankError(
            f"{e}. When this rank looked, the snapshot was not in the store; if rank 0 lives, it "
            "may still commit it",
            e.ranks,
        ) from e
    if instruction.error is not None:
        transaction.may_be_referenced = False
        raise error_of_ranks(comm.operation, {0: instruction.error})
    assert instruction.taken is not None
    return instruction.taken


def _hand_over(transaction: Transaction, world: int, seq: int = 0) -> RankPart:
    """Return what this rank hands over; if some of it is gone, a handover that says so."""
    try:
        return finish_rank_part(transaction, world, seq)
    except FencedError as e:
        return RankPart(b"", 0, 0, fenced=str(e))
