"""Unfinished copies: the root refers to their parts, so that no collector deletes sent chunks.

Each unfinished copy has a manifest like a snapshot's, so the collector treats both alike. The
manifest has a key for each part, and below it a value for each chunk.
"""

from __future__ import annotations

import time

import msgspec

from casnap.format.digest import Digest
from casnap.format.entries import KnownEntry, Manifest, Payload, ValueEntry
from casnap.format.records import NodeRef, Root, UnfinishedCopy, decode_kept, encode
from casnap.format.tree import build
from casnap.storage import Repository, Session
from casnap.transfer.copy_jobs import CopyJob


def put_part(session: Session, sizes: list[tuple[Digest, int]]) -> dict[str, bytes]:
    """Store the tree of a part, whose entries name the chunks that were sent.

    Args:
        session: The session that wrote the chunks.
        sizes: The digest and the raw length of each chunk.

    Returns:
        The key of the part, with the digest of the top of its tree.
    """
    entries: dict[str, KnownEntry] = {
        f"/{number}": ValueEntry(Payload(nbytes, b"", digest), "bytes")
        for number, (digest, nbytes) in enumerate(sizes)
    }
    return {session.commit_id.hex(): build(entries, session.put_node)}


def parts_of(store: Repository, root: Root, job: CopyJob) -> dict[str, bytes]:
    """Return the parts of a snapshot's copy that a root refers to: key → digest of the tree."""
    copy = root.copies.get(job.row.commit)
    if copy is None:
        return {}
    node = store.node(Digest(copy.parts.digest), copy.parts.hint)
    return decode_kept(node, Manifest, "the manifest of an unfinished copy").shared


def with_parts(session: Session, root: Root, job: CopyJob, parts: dict[str, bytes]) -> Root:
    """Return a root that refers to further parts of a snapshot's copy.

    Args:
        session: The session that stored the parts.
        root: The root to change.
        job: The snapshot.
        parts: Key of each part → digest of its tree.
    """
    every = {**parts_of(session.store, root, job), **parts}
    manifest = session.put_table_node(encode(Manifest(every, {"0": {}})))
    copy = UnfinishedCopy(NodeRef(manifest, None), time.time())
    return msgspec.structs.replace(root, copies={**root.copies, job.row.commit: copy})


def without(root: Root, job: CopyJob) -> Root:
    """Return a root that no longer refers to parts of a snapshot's copy."""
    copies = {commit: copy for commit, copy in root.copies.items() if commit != job.row.commit}
    return msgspec.structs.replace(root, copies=copies)
