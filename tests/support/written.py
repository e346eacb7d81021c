"""Stores written past the take: snapshots of many ranks, rows and settings as they are given."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from casnap import Snapshot, Store
from casnap.backends import Backend
from casnap.format.codec import Codec
from casnap.format.digest import DIGEST_SIZE
from casnap.format.entries import (
    INLINE_BYTES,
    INLINE_DIGESTS,
    KnownEntry,
    Manifest,
    Payload,
    TensorEntry,
    with_payload,
)
from casnap.format.grid import grid_of
from casnap.format.records import CONFIG_KEY, Root, Row, Stats, encode
from casnap.format.region import Region
from casnap.format.tree import Tree, build
from casnap.runtime.buffers import view_at
from casnap.state.flatten import Leaf, flatten
from casnap.state.sharded import Shards
from casnap.state.tensors import itemsize_of
from casnap.storage.commit_log.roots import next_root, put_root
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.session import Session

State = Mapping[str, Mapping[str, Any]]


@contextmanager
def change_of(store: Store | Repository, codec: Codec = Codec.RAW) -> Iterator[Session]:
    """Give a change of a store, to be filled with chunks and nodes, and committed."""
    repository = store._view.repository if isinstance(store, Store) else store
    with Session(repository, codec=codec) as session:
        yield session


def commit(session: Session, rows: Mapping[str, Row | None] | None = None) -> Root:
    """Put the root with what a change holds, and with some rows as they are."""
    root = session.commit(lambda _table, _seq: dict(rows or {}))
    assert root is not None
    return root


def put_next_root(backend: Backend, root: Root, **changes: Any) -> Root | None:
    """Put the root after this one, with some fields changed; None if another took its number."""
    new_root = next_root(backend.uri, root, os.urandom(16), **changes)
    return new_root if put_root(backend, new_root) else None


def write(
    store: Store,
    name: str,
    states: State | Sequence[State],
    *,
    own: Collection[str] = (),
) -> Snapshot:
    """Write a snapshot of some ranks.

    Args:
        store: Where.
        name: Its name.
        states: What each rank holds, or the only one, by key.
        own: Paths of what each rank keeps for itself; all else is global, as rank 0 holds it.
    """
    with change_of(store) as session:
        commit_snapshot(session, name, states, own=own)
    return store[name]


def commit_snapshot(
    session: Session,
    name: str,
    states: State | Sequence[State],
    *,
    own: Collection[str] = (),
) -> None:
    """Commit what :func:`write` writes."""
    ranks = [states] if isinstance(states, Mapping) else list(states)
    writer = _Writer(session)
    top = Manifest({}, {str(rank): {} for rank in range(len(ranks))})
    for rank, state in enumerate(ranks):
        for key, value in state.items():
            leaves = list(flatten(value, key))
            mine = [leaf for leaf in leaves if leaf.path in own]
            if mine:
                top.ranks[str(rank)][key] = writer.tree(key, mine)
            if rank == 0 and len(mine) < len(leaves):
                others = [leaf for leaf in leaves if leaf.path not in own]
                top.shared[key] = writer.tree(key, others)
    writer.finish()
    digest = session.put_node(encode(top))

    def change(_table: Tree[Row], seq: int) -> dict[str, Row | None]:
        stats = Stats(writer.nbytes, session.new_bytes, writer.entries, 0.1)
        ref = session.ref(digest)
        return {name: Row(session.commit_id, ref, seq, 1.8e9, len(ranks), stats)}

    session.commit(change)


class _Writer:
    """Stores the bytes of leaves, and trees of them."""

    def __init__(self, session: Session) -> None:
        self._chunk_size = session.store.config.chunk_size
        self._session = session
        self._chunks = session.writer()
        self.finish = self._chunks.finish
        self.nbytes = self.entries = 0

    def tree(self, key: str, leaves: list[Leaf]) -> bytes:
        entries = {leaf.path[len(key) :]: self._entry(leaf) for leaf in leaves}
        return build(entries, self._session.put_node)

    def _entry(self, leaf: Leaf) -> KnownEntry:
        entry, content = leaf.entry, leaf.content
        assert not isinstance(content, Shards)
        raw = content if isinstance(content, bytes) else _bytes_of(content)
        self.nbytes += len(raw)
        self.entries += 1
        if len(raw) <= INLINE_BYTES:
            return with_payload(entry, Payload(len(raw), raw))
        digests, depth = b"".join(self._chunks.store(self._cut(entry, raw))), 0
        if len(digests) > INLINE_DIGESTS * DIGEST_SIZE:
            digests, depth = self._session.put_node(digests), 1
        return with_payload(entry, Payload(len(raw), b"", digests, depth))

    def _cut(self, entry: KnownEntry, raw: bytes) -> list[memoryview]:
        tensor = entry if isinstance(entry, TensorEntry) else None
        shape, itemsize = (tensor.shape, itemsize_of(tensor)) if tensor else ((len(raw),), 1)
        cells = grid_of(shape, itemsize, self._chunk_size)
        items = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(*shape, itemsize)
        regions = map(cells.region, range(cells.count))
        cut = [items[region.within(Region.whole(shape))] for region in regions]
        return [memoryview(_bytes_of(cell)) for cell in cut]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.contiguous()
    return bytes(view_at(tensor.data_ptr(), tensor.nbytes))


def publish(store: Store, rows: dict[str, Row]) -> None:
    """Put rows into the table as they are."""
    with change_of(store) as session:
        commit(session, rows)


def configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "casnap-store" / CONFIG_KEY).read_text())
    (path / "casnap-store" / CONFIG_KEY).write_text(json.dumps(config | changes))
