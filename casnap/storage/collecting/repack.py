"""Repacking: copy the needed chunks out of mostly dead packs, so that these can be deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.codec import codec_among
from casnap.format.digest import Digest
from casnap.format.records import PackId
from casnap.runtime.batches import batches
from casnap.storage.collecting.marks import Marks
from casnap.storage.lookup.chains import can_carry, chains_below
from casnap.storage.lookup.index import IndexView
from casnap.storage.reading.repository import Repository
from casnap.storage.writing.copying import copy_verified
from casnap.storage.writing.session import Session

_log = logging.getLogger("casnap")
_BATCH_BYTES = 1 << 30

Report = Callable[[int], None]
"""Called with the number of bytes copied since the last call, from any thread."""


def sparse_packs(marks: Marks, view: IndexView, share: float) -> dict[PackId, int]:
    """Return the live packs that are worth repacking, each with the bytes of its needed part.

    These are packs of which less than ``share`` is needed. The pack that the root's hint names is
    left out, since readers begin with it. Packs with needed chunks that this version cannot copy
    are left out too. If the packs together have little garbage, none is returned.

    Args:
        marks: How much of each pack is needed.
        view: The index according to the marked root.
        share: A fraction, from 0 to 1.
    """
    table = view.root.table
    table_pack = None if table is None or table.hint is None else table.hint.pack
    sparse = {
        pack: use
        for pack, use in marks.uses.items()
        if use.needed
        and use.live < share * use.stored
        and pack in view.live
        and pack != table_pack
        and not use.is_fixed
    }
    garbage = sum(use.stored - use.live for use in sparse.values())
    if garbage < marks.least_garbage:
        return {}
    return {pack: use.live for pack, use in sparse.items()}


def repack(
    store: Repository, marks: Marks, view: IndexView, packs: Mapping[PackId, int], report: Report
) -> Iterator[dict[bytes, PackId]]:
    """Copy the needed part of some packs into new packs, and commit each batch of packs.

    Trees hold digests, so no tree changes. The old packs stay as they are: before condemning them,
    the caller must check that the copies are still live. A chunk that cannot be read whole stays in
    its pack.

    Args:
        store: The store.
        marks: Which chunks and nodes are needed.
        view: The index according to the marked root.
        packs: The packs to copy from, each with the bytes of its needed part.
        report: Called with the number of bytes copied.

    Yields:
        For each batch, the digests of the needed chunks and nodes, each with another pack that
        holds it whole.

    Raises:
        StorageFullError: There is no space for the copies.
        FencedError: Another collector has deleted the copies before they were committed.
    """
    for batch in batches(packs, packs.__getitem__, _BATCH_BYTES):
        contents = {digest for digest, _, _ in marks.contents_of(frozenset(batch))}
        needed = marks.needed_of(contents)
        copied_to = _proven_elsewhere(store, view, needed.keys(), packs)
        to_copy = {Digest(d): is_node for d, is_node in needed.items() if d not in copied_to}
        if to_copy:
            copied_to |= _copy(store, batch, to_copy, report)
        yield copied_to


def _proven_elsewhere(
    store: Repository, view: IndexView, digests: Iterable[bytes], packs: Collection[PackId]
) -> dict[bytes, PackId]:
    """Return chunks and nodes that need not be copied, because a newer pack holds them whole.

    Each chunk or node is read from the newest live pack that holds it, and verified. It is returned
    only if that succeeds, and if this pack is not one of ``packs``. A delta is returned only if its
    chain ends, and does not lead back to the same chunk. Chunks of one chain are read one after the
    other, so that each delta is applied only once.

    Args:
        store: The store.
        view: The index according to the marked root.
        digests: The digests of the chunks and nodes.
        packs: The packs that are to be emptied.

    Returns:
        The digests, each with the newest live pack that holds it.
    """
    find = partial(store.index.find_newest, view)
    chains = filter(None, chains_below(map(Digest, digests), find).values())
    proven: dict[bytes, PackId] = {}
    last: dict[Digest, bytes] = {}
    for chain in sorted(chains, key=lambda chain: (chain[-1][0], len(chain))):
        digest, newest = chain[0]
        raw = None if newest.pack in packs else store.read_at(newest, digest, last)
        if raw is not None:
            proven[digest] = newest.pack
            last = {digest: raw}
    return proven


def _can_stand_on(session: Session, digest: Digest, base: Digest) -> bool:
    """Return whether a delta can be copied as it is; if so, have the session rely on its base.

    The chain of the base is checked here, since the caller may not have checked it: a chunk may be
    stored as several deltas, each with another chain.

    Args:
        session: The session.
        digest: The digest of the chunk.
        base: The digest of the base.
    """
    find = partial(session.store.index.find_newest, session.base)
    if not can_carry(chains_below([base], find)[base], digest):
        return False
    return session.rely_on([base])[0] is not None


def _copy(
    store: Repository, packs: Collection[PackId], to_copy: dict[Digest, bool], report: Report
) -> dict[bytes, PackId]:
    sizes: list[int] = []

    def count(_digest: Digest, nbytes: int) -> None:
        sizes.append(nbytes)
        report(nbytes)

    chunks = [digest for digest, is_node in to_copy.items() if not is_node]
    places = store.index.find(store.view(), chunks)
    codec = codec_among(place.codec for place in places if place is not None)
    with Session(store, codec=codec, copies=True) as session:
        try:
            copy_verified(
                store,
                to_copy.items(),
                session.new_packs,
                count,
                keeps_delta=partial(_can_stand_on, session),
            )
        except (DamagedError, UnsupportedFormatError) as e:
            has_moved = (
                not session.base.packs.issuperset(packs) or store.newest() != session.base.root
            )
            if isinstance(e, DamagedError) and has_moved:
                # Another collector has moved the chunks since they were marked, or deleted them. So
                # this one must mark again.
                raise
            _log.warning("some chunks cannot be copied out of a pack, so the pack stays: %s", e)
        if sizes:
            session.commit(lambda table, seq: {})
        records = session.new_packs.segment().records
        return {digest: place.pack for digest, place in records}
