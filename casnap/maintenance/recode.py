"""Recoding: storing what older snapshots hold as how it differs from the snapshot before.

The newest snapshots stay as they were taken, so that they are read at full speed. The chunks that
only older ones need become chains: each chunk a delta against that of the same cell in the snapshot
before, until the chain is too long to be read quickly; then one is stored compressed, and begins
the next chain. Recoding only adds places. The collection after it frees the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from casnap.format.codec import Codec, compress
from casnap.format.delta import MOST_STORED, encode_delta
from casnap.format.digest import Digest
from casnap.format.records import INTERNAL, Row
from casnap.runtime.progress import Progress
from casnap.runtime.threads import Crew
from casnap.storage.catalog.contents import Contents
from casnap.storage.catalog.references import MANIFEST, is_node, walk
from casnap.storage.catalog.table import Table, snapshots_in
from casnap.storage.chunks.chunk_reads import ReadOptions, Want
from casnap.storage.chunks.copying import one_at_a_time
from casnap.storage.chunks.index import View
from casnap.storage.chunks.objects import Objects
from casnap.storage.commits.commit import publish
from casnap.storage.commits.transaction import Transaction
from casnap.storage.log.roots import with_deltas

RECODED = f"{INTERNAL}recoded"
"""The tag of a snapshot whose chunks were recoded."""
# Shorter chunks take as much in the index as they would save.
_LEAST_BYTES = 4096
# So many bytes of chunks are held while they are encoded, and their bases too.
_GROUP_BYTES = 8 << 20
# So many bytes of chunks are recoded by one commit.
_COMMIT_BYTES = 1 << 30
# If a delta takes more than this, the chunk alone may take less.
_LARGE_SHARE = 0.5
# The weight of a chain, at most. With 16 links that change little, or 4 that change much, its mean
# is near what longer ones reach, and it is read at 0.2 to 0.4 GB/s.
_MOST_WEIGHT = 16
# A link that changes much takes a reader as long as so many that change little.
_DENSE_WEIGHT, _DENSE_SHARE = 4, 1 / 16


class _Pair(NamedTuple):
    """A chunk of a snapshot, and that of the same cell in the snapshot before, if there is one."""

    digest: Digest
    base: Digest | None
    nbytes: int


@dataclass
class Recoding:
    """What was recoded.

    Attributes:
        snapshots: How many snapshots.
        chunks: How many of their chunks have a smaller form now.
        before_bytes: What these took up before.
        after_bytes: What they take up now.
    """

    snapshots: int = 0
    chunks: int = 0
    before_bytes: int = 0
    after_bytes: int = 0


def recode(objects: Objects, newest: int, progress: Progress) -> Recoding:
    """Recode what older snapshots of a store hold.

    What was done stays done if it is interrupted.

    Args:
        objects: The store.
        newest: How many snapshots of each folder stay as they are.
        progress: Called with the current phase, how much of it is done, and the total.

    Raises:
        DamagedError: A node is missing or damaged.
        StorageFullError: There is no space for the smaller forms.
    """
    recoding = Recoding()
    table = objects.table(objects.recent())
    runs: dict[str, list[tuple[str, Row]]] = {}
    for name, row in snapshots_in(table):
        runs.setdefault(name.rpartition("/")[0], []).append((name, row))
    todo: list[tuple[str, Row, tuple[str, Row] | None]] = []
    kept: list[Row] = []
    for run in runs.values():
        run.sort(key=lambda each: each[1].seq)
        older = run[: max(0, len(run) - newest)]
        kept += [row for _, row in run[len(older) :]]
        for before, (name, row) in zip([None, *older], older, strict=False):
            if RECODED not in row.tags:
                todo.append((name, row, before))
    if not todo:
        return recoding
    tops = [MANIFEST + row.manifest.digest for row in kept]
    spared = {d for _, below in walk(objects, tops, set()) for d in below if not is_node(d)}
    recoder = _Recoder(objects, spared, recoding)
    for done, (name, row, before) in enumerate(todo):
        progress("recoding", done, len(todo))
        recoder.recode(name, row, before)
        recoding.snapshots += 1
    return recoding


class _Recoder:
    """Recodes snapshots, one after the other.

    Args:
        objects: The store.
        spared: The chunks that stay as they are.
        recoding: What was recoded so far.
    """

    def __init__(self, objects: Objects, spared: set[bytes], recoding: Recoding) -> None:
        self._objects = objects
        self._spared = spared
        self._recoding = recoding
        # The new forms: the base of each, or None, and its stored bytes.
        self._forms: dict[Digest, tuple[Digest | None, int]] = {}

    def recode(self, name: str, row: Row, before: tuple[str, Row] | None) -> None:
        """Recode a snapshot, against the one before, if there is one."""
        pairs = _pairs(self._objects, (name, row), before)
        is_last = False
        while not is_last:
            with one_at_a_time(), Crew() as crew:
                transaction = Transaction(self._objects, crew)
                try:
                    is_last = self._recode_some(transaction, pairs)
                    self._publish(transaction, name, row, is_last=is_last)
                except BaseException as e:
                    crew.fail(e)
                    raise
                finally:
                    transaction.close()

    def _publish(self, transaction: Transaction, name: str, row: Row, *, is_last: bool) -> None:
        def change(table: Table, _seq: int) -> dict[str, Row | None]:
            newest = table.get(name)
            if not is_last or newest is None or newest.commit != row.commit:
                return {}
            tags = tuple(sorted({*newest.tags, RECODED}))
            return {name: msgspec.structs.replace(newest, tags=tags)}

        publish(transaction, change, update_root=with_deltas)

    def _recode_some(self, transaction: Transaction, pairs: Iterator[_Pair]) -> bool:
        """Recode some chunks, into new packs; return whether they were the last ones."""
        nbytes = 0
        group: list[_Pair] = []
        for pair in pairs:
            group.append(pair)
            if sum(each.nbytes for each in group) >= _GROUP_BYTES:
                nbytes += self._recode_group(transaction, group)
                group = []
                if nbytes >= _COMMIT_BYTES:
                    return False
        self._recode_group(transaction, group)
        return True

    def _recode_group(self, transaction: Transaction, group: list[_Pair]) -> int:
        """Recode some chunks; return how many bytes were read."""
        transaction.renew_announcement()
        todo = [pair for pair in group if self._is_raw(transaction.base, pair.digest)]
        bases = list(dict.fromkeys(pair.base for pair in todo if pair.base is not None))
        places = transaction.reused.reuse_at(bases) if bases else []
        usable = {base for base, place in zip(bases, places, strict=True) if place is not None}
        raws: dict[Digest, bytes] = {}
        wanted = dict.fromkeys([*(pair.digest for pair in todo), *usable])
        wants = (Want(digest, -1, partial(_keep, raws, digest), "") for digest in wanted)
        self._objects.fetch(wants, ReadOptions(readers=1))
        for digest, base, _ in todo:
            raw = raws[digest]
            stored, codec = self._smallest(transaction.base, digest, base, raws)
            if stored is not None:
                transaction.new_packs.copy_stored(digest, stored, len(raw), codec)
                self._recoding.chunks += 1
                self._recoding.before_bytes += len(raw)
                self._recoding.after_bytes += len(stored)
        return sum(map(len, raws.values()))

    def _is_raw(self, view: View, digest: Digest) -> bool:
        """Whether a chunk is to be recoded, and was not."""
        if digest in self._spared or digest in self._forms:
            return False
        places = self._objects.index.find_all(view, digest)
        return bool(places) and all(place.codec == Codec.RAW for place in places)

    def _smallest(
        self, view: View, digest: Digest, base: Digest | None, raws: dict[Digest, bytes]
    ) -> tuple[bytes | None, Codec]:
        """Return the smallest form of a chunk that a reader can afford; None for none."""
        raw = raws[digest]
        delta = None
        if base is not None and base in raws:
            chain = self._chain(view, base)
            delta = encode_delta(raw, raws[base], base) if chain and digest not in chain else None
        if delta is not None:
            sizes = [len(delta), *chain.values()]
            weight = sum(_weight(size, len(raw)) for size in sizes[:-1])
            if weight > _MOST_WEIGHT or sum(sizes) > MOST_STORED * len(raw):
                delta = None
        if delta is None or len(delta) > _LARGE_SHARE * len(raw):
            planes = compress(raw)
            if planes is not None and (delta is None or len(planes) <= len(delta)):
                self._forms[digest] = None, len(planes)
                return planes, Codec.ZSTD
        if delta is not None:
            self._forms[digest] = base, len(delta)
        return delta, Codec.DELTA

    def _chain(self, view: View, digest: Digest) -> dict[Digest, int]:
        """Return a chunk and what it stands on, with their stored bytes; nothing if that is broken.

        The last one is no delta.
        """
        chain: dict[Digest, int] = {}
        base: Digest | None = digest
        while base is not None and base in self._forms and base not in chain:
            digest = base
            base, chain[digest] = self._forms[digest]
        if base is None:
            return chain
        rest = self._objects.index.newest_chain(view, base)
        return {**chain, **{d: place.stored for d, place in rest}} if rest else {}


def _weight(stored: int, nbytes: int) -> int:
    return _DENSE_WEIGHT if stored > _DENSE_SHARE * nbytes else 1


def _keep(raws: dict[Digest, bytes], digest: Digest, raw: memoryview) -> None:
    raws[digest] = bytes(raw)


def _pairs(
    objects: Objects, snapshot: tuple[str, Row], before: tuple[str, Row] | None
) -> Iterator[_Pair]:
    """Yield the chunks of a snapshot, each once, with those of the same cells before."""
    contents = Contents(objects, *snapshot)
    contents_before = None if before is None else Contents(objects, *before)
    seen: set[Digest] = set()
    manifest = contents.manifest
    for rank, trees in ((None, manifest.shared), *manifest.ranks.items()):
        earlier: dict[str, bytes] = {}
        if contents_before is not None:
            before_manifest = contents_before.manifest
            earlier = (
                before_manifest.shared if rank is None else before_manifest.ranks.get(rank, {})
            )
        for key, digest in trees.items():
            if earlier.get(key) == digest:
                continue
            tree = contents.tree(digest)
            tree_before = None
            if contents_before is not None and key in earlier:
                tree_before = contents_before.tree(earlier[key])
            for path, entry in tree.items():
                entry_before = None if tree_before is None else tree_before.get(path)
                chunks = contents.chunks(key + path, entry)
                bases: list[tuple[Digest, int]] = []
                if entry_before is not None and contents_before is not None:
                    bases = contents_before.chunks(key + path, entry_before)
                for i, (chunk, nbytes) in enumerate(chunks):
                    if chunk in seen or nbytes < _LEAST_BYTES:
                        continue
                    seen.add(chunk)
                    base = bases[i][0] if len(bases) == len(chunks) else None
                    is_alike = base is not None and base != chunk and bases[i][1] == nbytes
                    yield _Pair(chunk, base if is_alike else None, nbytes)
