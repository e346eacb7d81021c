"""One commit for many ranks: rank 0 puts the root, for what all others hand over to it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from casnap.backends import Backend
from casnap.errors import FencedError, RankError, StoreError
from casnap.format.records import Row, SegmentId, encode, pack_key, segment_key
from casnap.ranks.comm import Comm, as_error, told
from casnap.ranks.link import Said
from casnap.storage.handover import Handover, OtherRanks, hand_over
from casnap.storage.transaction import Transaction

_log = logging.getLogger("casnap")


class _Order(msgspec.Struct, array_like=True):
    """What rank 0 tells the others while it commits: one of these."""

    move: int | None = None
    error: Said | None = None
    row: Row | None = None


def lead(comm: Comm, transaction: Transaction, publish: Callable[[OtherRanks], Row]) -> Row:
    """Commit for all ranks, as rank 0.

    Args:
        comm: The ranks.
        transaction: What this rank wrote.
        publish: Commits it and what the other ranks wrote, and returns the row.
    """
    comm.broadcast(transaction.commit)

    def move(seq: int) -> list[Handover]:
        comm.broadcast(encode(_Order(move=seq)))
        return _handovers(comm)

    try:
        row = publish(OtherRanks(_handovers(comm), move, comm.check_awaited))
    except Exception as e:
        if not comm.over and not transaction.may_stand:
            comm.broadcast(encode(_Order(error=told(e))))
        raise
    try:
        comm.broadcast(encode(_Order(row=row)))
    except RankError as e:
        _log.warning("it is committed, but not all ranks hear of it: %s", e)
    return row


def _handovers(comm: Comm) -> list[Handover]:
    """Return what the other ranks hand over.

    Raises:
        FencedError: What one wrote, or relied on, is gone; all take again.
    """
    handovers = [msgspec.msgpack.decode(part, type=Handover) for part in comm.gather(b"")[1:]]
    for handover in handovers:
        if handover.fenced:
            raise FencedError(handover.fenced)
    return handovers


def follow(comm: Comm, transaction: Transaction, look: Callable[[bytes], Row | None]) -> Row:
    """Hand over what this rank wrote, and do what rank 0 says until it has committed.

    Args:
        comm: The ranks.
        transaction: What this rank wrote.
        look: Returns the row in the store of a take, given its commit id, if it is there.
    """
    commit = bytes(comm.broadcast())
    handover = _hand_over(transaction, comm.size)
    try:
        while True:
            comm.gather(encode(handover))
            order = msgspec.msgpack.decode(comm.broadcast(), type=_Order)
            if order.move is None:
                break
            handover = _hand_over(transaction, comm.size, order.move)
    except RankError as e:
        ended = 0 not in e.ranks and comm.await_end(0)
        row = look(commit)
        if row is not None:
            return row
        if ended:
            raise
        raise RankError(
            f"{e}. When this rank looked, the snapshot was not in the store; if rank 0 lives, it "
            "may still commit it",
            e.ranks,
        ) from e
    if order.error is not None:
        transaction.withdraw()
        raise as_error(comm.doing, {0: order.error})
    assert order.row is not None
    return order.row


def check_written(backend: Backend, others: OtherRanks) -> None:
    """Check that what the other ranks say that they wrote is there, for this rank as well.

    Raises:
        StoreError: It is not: they write somewhere else, to a copy of the store for example.
    """
    ends = {pack_key(pack): 0 for pack in others.packs}
    ends |= {segment_key(SegmentId(ref.id)): 0 for ref in others.segments}
    for _, place in others.records:
        key = pack_key(place.pack)
        ends[key] = max(ends[key], place.offset + place.stored)
    for key, end in ends.items():
        size = backend.size_if_there(key)
        if size is None or size < end:
            raise StoreError(
                f"{backend.uri}/{key}, which another rank has written, is not there, or not whole, "
                "where rank 0 looks; all ranks must see one storage (a copy of a store, on a disk "
                "of each host, is another one)"
            )


def _hand_over(transaction: Transaction, world: int, seq: int = 0) -> Handover:
    try:
        return hand_over(transaction, world, seq)
    except FencedError as e:
        return Handover(b"", 0, 0, fenced=str(e))
