"""Rows that keep the sent parts of an unfinished copy from the collector.

A row of the table, under a name that no snapshot can have, refers to the chunks that were sent. Its
manifest has a key for each part, with an entry for each chunk: a value of its bytes. So for every
collector it is a snapshot like others.
"""

from __future__ import annotations

import time

from casnap.format.digest import Digest
from casnap.format.entries import Entry, Manifest, Payload, ValueEntry
from casnap.format.names import UNFINISHED
from casnap.format.records import NodeRef, Row, Stats, decode, encode
from casnap.format.tree import build
from casnap.storage.catalog.table import Table
from casnap.storage.chunks.open_store import OpenStore
from casnap.storage.commits.transaction import Transaction
from casnap.transfer.copy_jobs import CopyJob


def name_of(job: CopyJob) -> str:
    """Return the name of the row that keeps what was sent of a snapshot."""
    return UNFINISHED + job.row.commit.hex()


def put_part(transaction: Transaction, sizes: list[tuple[Digest, int]]) -> dict[str, bytes]:
    """Store the tree that refers to some chunks.

    Args:
        transaction: The one that wrote them.
        sizes: Digest and raw length of each.

    Returns:
        The key of the part, and the top of its tree.
    """
    entries: dict[str, Entry] = {
        f"/{number}": ValueEntry("bytes", Payload(nbytes, b"", digest))
        for number, (digest, nbytes) in enumerate(sizes)
    }
    return {transaction.commit_id.hex(): build(entries, transaction.put_node)}


def parts_of(store: OpenStore, row: Row | None) -> dict[str, bytes]:
    """Return the parts that a row refers to."""
    if row is None:
        return {}
    node = store.node(Digest(row.manifest.digest), row.manifest.hint)
    return decode(node, Manifest, "the manifest of an unfinished copy").shared


def with_parts(
    transaction: Transaction,
    table: Table,
    seq: int,
    job: CopyJob,
    parts: dict[str, bytes],
) -> dict[str, Row | None]:
    """Return the change of the table that adds some parts."""
    name = name_of(job)
    every = {**parts_of(transaction.store, table.get(name)), **parts}
    manifest = encode(Manifest(every, {"0": {}}))
    row = Row(
        commit=transaction.commit_id,
        manifest=NodeRef(transaction.put_table_node(manifest), None),
        seq=seq,
        time=time.time(),
        world_size=1,
        stats=Stats(entries=len(every)),
        metadata={"copying": job.new_name},
    )
    return {name: row}
