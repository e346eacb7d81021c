"""Rows that keep the sent parts of an unfinished copy from the collector.

A row of the table, under a name that no snapshot can have, refers to the chunks that were sent. Its
manifest has a key for each part: a tensor of bytes, cut into boxes that are the chunks. So for
every reader and collector, of earlier versions too, it is a snapshot like others.
"""

from __future__ import annotations

import time
from itertools import accumulate

from casnap.format.digest import DIGEST_SIZE, Digest
from casnap.format.entries import (
    INLINE_DIGESTS,
    LIST_DIGESTS,
    BoxedTensorEntry,
    Entry,
    Manifest,
    Payload,
)
from casnap.format.names import UNFINISHED
from casnap.format.records import NodeRef, Row, Stats, decode, encode
from casnap.storage.objects import Objects
from casnap.storage.table import Table
from casnap.storage.transaction import Transaction
from casnap.storage.tree import build
from casnap.transfer.report import ChosenSnapshot


def name_of(chosen: ChosenSnapshot) -> str:
    """Return the name of the row that keeps what was sent of a snapshot."""
    return UNFINISHED + chosen.row.commit.hex()


def put_part(transaction: Transaction, sent: list[tuple[Digest, int]]) -> dict[str, bytes]:
    """Store the tree that refers to some chunks.

    Args:
        transaction: The one that wrote them.
        sent: Digest and raw length of each.

    Returns:
        The key of the part, and the top of its tree.
    """
    sizes = [nbytes for _, nbytes in sent]
    digests, depth = b"".join(digest for digest, _ in sent), 0
    while len(digests) > INLINE_DIGESTS * DIGEST_SIZE:
        step = LIST_DIGESTS * DIGEST_SIZE
        lists = [digests[i : i + step] for i in range(0, len(digests), step)]
        digests, depth = b"".join(map(transaction.put_node, lists)), depth + 1
    offsets = accumulate(sizes, initial=0)
    boxes = tuple(((at,), (size,)) for at, size in zip(offsets, sizes, strict=False))
    total = sum(sizes)
    entry = BoxedTensorEntry("uint8", (total,), Payload(total, b"", digests, depth), boxes=boxes)
    entries: dict[str, Entry] = {"": entry}
    return {transaction.commit.hex(): build(entries, transaction.put_node)}


def parts_of(objects: Objects, row: Row | None) -> dict[str, bytes]:
    """Return the parts that a row refers to."""
    if row is None:
        return {}
    node = objects.node(Digest(row.manifest.digest), row.manifest.hint)
    return decode(node, Manifest, "the manifest of an unfinished copy").shared


def with_parts(
    transaction: Transaction,
    table: Table,
    seq: int,
    chosen: ChosenSnapshot,
    parts: dict[str, bytes],
) -> dict[str, Row | None]:
    """Return the change of the table that adds some parts."""
    name = name_of(chosen)
    every = {**parts_of(transaction.objects, table.get(name)), **parts}
    manifest = encode(Manifest(every, {"0": {}}))
    row = Row(
        commit=transaction.commit,
        manifest=NodeRef(transaction.put_table_node(manifest), None),
        seq=seq,
        time=time.time(),
        world_size=1,
        stats=Stats(entries=len(every)),
        metadata={"copying": chosen.target},
    )
    return {name: row}
