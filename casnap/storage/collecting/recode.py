"""Recoding: chunks of older snapshots are stored as deltas against the snapshot before.

The newest snapshots stay as they were taken, so that they are read at full speed. A chunk that only
older snapshots need becomes a delta: its base is the chunk of the same cell in the snapshot before,
which may be a delta too. So chains of deltas arise. Once a chain is too long to be read quickly,
the next chunk is stored compressed, and begins a new chain. A chunk that is already the base of
deltas does not become a delta, since this would make all their chains longer.

Recoding only adds smaller copies of chunks. The next collection frees the larger ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from casnap.format.codec import WHOLE_CODECS
from casnap.format.digest import Digest
from casnap.format.records import Root, Row
from casnap.runtime.batches import batches
from casnap.runtime.progress import Progress
from casnap.storage.lookup.chains import NewBases
from casnap.storage.lookup.index import IndexView
from casnap.storage.reading.repository import Repository
from casnap.storage.reading.table import Table
from casnap.storage.snapshots.cell_pairs import CellPair, cell_pairs, snapshot_before
from casnap.storage.snapshots.contents import Contents
from casnap.storage.snapshots.references import MANIFEST, is_node, walk
from casnap.storage.snapshots.runs import folders_of
from casnap.storage.writing.chunk_forms import Base, ChunkForms
from casnap.storage.writing.copying import ChunkBuffer
from casnap.storage.writing.session import Session

RECODED = "recoded"
"""The note of a snapshot whose chunks were recoded."""
# A form that saves less is not worth the copy.
_WORTH = 0.9
# The bytes of chunks that are held while they are encoded; their bases take as many.
_GROUP_BYTES = 8 << 20
# For a group and its bases; a group may have a little more.
_BUFFER_BYTES = 5 * _GROUP_BYTES // 2
# The bytes of chunks that one commit recodes.
_COMMIT_BYTES = 1 << 30


@dataclass
class Recoding:
    """The outcome of recoding.

    Attributes:
        snapshots: How many snapshots were recoded.
        chunks: How many of their chunks have a smaller form now.
        before_bytes: The stored bytes of these chunks before.
        after_bytes: Their stored bytes now.
    """

    snapshots: int = 0
    chunks: int = 0
    before_bytes: int = 0
    after_bytes: int = 0


@dataclass(frozen=True)
class RecodingPlan:
    """Which snapshots are to be recoded, and which are not.

    Attributes:
        snapshots: The snapshots to recode, each with the snapshot before it in its folder, or None.
        all_rows: The name and row of all snapshots of the store.
        kept: The rows of the newest snapshots, whose chunks stay as they are.
    """

    snapshots: list[tuple[Contents, Contents | None]]
    all_rows: list[tuple[str, Row]]
    kept: list[Row]


def plan_recoding(
    store: Repository, root: Root, newest: int, deleted: Collection[str] = ()
) -> RecodingPlan:
    """Choose the snapshots to recode. Only the table of snapshots is read.

    It leaves out the last ``newest`` snapshots of each folder, the snapshots that were recoded
    before, and those that a later version of casnap has stored.

    Args:
        store: The store.
        root: The store's newest root.
        newest: How many of the newest snapshots of each folder stay as they are.
        deleted: Names of snapshots to treat as deleted.
    """
    todo: list[tuple[Contents, Contents | None]] = []
    kept: list[Row] = []
    snapshots = [each for each in store.table(root).items_in() if each[0] not in deleted]
    for run in folders_of(sorted(snapshots, key=lambda each: each[1].seq)):
        older = [Contents(store, *each) for each in run.older(newest)]
        kept += [row for _, row in run.newest(newest)]
        older = [contents for contents in older if not contents.row.unknown_features]
        pairs = zip(older, [None, *older], strict=False)
        todo += [pair for pair in pairs if not pair[0].row.has_note(RECODED)]
    # Chunks may become deltas of chunks in another folder, so snapshots go in order of commits.
    todo.sort(key=lambda pair: pair[0].row.seq)
    return RecodingPlan(todo, snapshots, kept)


def recode(store: Repository, plan: RecodingPlan, progress: Progress) -> Recoding:
    """Recode older snapshots of a store.

    An interrupt undoes nothing: snapshots that were already recoded stay recoded.

    Args:
        store: The store.
        plan: The snapshots to recode.
        progress: Called with the current phase, how much of it is done, and the total.

    Raises:
        DamagedError: A node is missing or damaged.
        StorageFullError: There is no space for the smaller forms.
    """
    recoding = Recoding()
    if not plan.snapshots:
        return recoding
    tops = [MANIFEST + row.manifest.digest for row in plan.kept]
    spared = {d for _, below in walk(store, tops, set()) for d in below if not is_node(d)}
    recoder = _Recoder(store, spared, recoding)
    for done, (contents, before) in enumerate(plan.snapshots):
        progress("recoding", done, len(plan.snapshots))
        recoder.recode(contents, before or snapshot_before(contents, plan.all_rows))
        recoding.snapshots += 1
    return recoding


class _Recoder:
    """Recodes snapshots, one after the other.

    Args:
        store: The store.
        spared: The digests of the chunks that stay as they are.
        recoding: The outcome so far. It is updated with each chunk.
    """

    def __init__(self, store: Repository, spared: set[bytes], recoding: Recoding) -> None:
        self._store = store
        self._spared = spared
        self._recoding = recoding
        self._buffer = ChunkBuffer(_BUFFER_BYTES)
        self._forms = ChunkForms(store.index)
        # The chunks that are bases of deltas.
        self._bases: set[bytes] = set()
        self._new_bases = NewBases()

    def recode(self, contents: Contents, before: Contents | None) -> None:
        """Recode the chunks of a snapshot, and commit their new forms.

        Args:
            contents: The snapshot.
            before: The snapshot before, whose chunks become the bases; None if there is none.
        """
        pairs = cell_pairs(contents, before)
        groups = batches(pairs, lambda pair: pair.nbytes, _GROUP_BYTES)
        is_last = False
        while not is_last:
            with Session(self._store, copies=True) as session:
                is_last = self._recode_some(session, groups)
                self._publish(session, contents, is_last=is_last)

    def _publish(self, session: Session, contents: Contents, *, is_last: bool) -> None:
        def change(table: Table, _seq: int) -> dict[str, Row | None]:
            row = table.get(contents.name)
            if not is_last or row is None or row.commit != contents.row.commit:
                return {}
            return {contents.name: row.with_notes({RECODED: True})}

        session.commit(change)

    def _recode_some(self, session: Session, groups: Iterator[list[CellPair]]) -> bool:
        """Recode groups of chunks into new packs, until enough bytes for one commit were read.

        Returns:
            Whether all groups are recoded.
        """
        self._store.read_at_newest(self._learn_bases)
        nbytes = 0
        for group in groups:
            nbytes += self._recode_group(session, group)
            if nbytes >= _COMMIT_BYTES:
                return False
        return True

    def _learn_bases(self, root: Root) -> None:
        self._bases |= self._new_bases.of(root, self._store.index)

    def _recode_group(self, session: Session, group: list[CellPair]) -> int:
        """Recode a group of chunks; return how many bytes of chunks and bases were read."""
        session.renew_announcement()
        sizes = {pair.digest: self._stored_bytes(session.base, pair.digest) for pair in group}
        todo = [pair for pair in group if sizes[pair.digest]]
        bases = list(dict.fromkeys(pair.base for pair in todo if pair.base is not None))
        places = session.rely_on(bases) if bases else []
        usable = {base for base, place in zip(bases, places, strict=True) if place is not None}
        chunks = dict.fromkeys([*(pair.digest for pair in todo), *usable])
        self._buffer.clear()
        raws = self._buffer.read(self._store, chunks)
        for digest, base, nbytes in todo:
            like = None
            # The chains that end in a chunk must not become longer.
            if base is not None and base in raws and digest not in self._bases:
                # The chains of bases that were just recoded are longer now.
                chain = self._forms.chains_below(session.base, [base])[base]
                like = Base(base, raws[base], chain)
            form = self._forms.choose(digest, raws[digest], like)
            if form is not None and len(form.content) < _WORTH * sizes[digest]:
                self._forms.write(session.new_packs, digest, nbytes, form)
                if form.base is not None:
                    self._bases.add(form.base)
                self._recoding.chunks += 1
                self._recoding.before_bytes += sizes[digest]
                self._recoding.after_bytes += len(form.content)
        return sum(map(len, raws.values()))

    def _stored_bytes(self, view: IndexView, digest: Digest) -> int:
        """Return the least stored bytes of a chunk; 0 if the chunk must stay as it is."""
        if digest in self._spared or self._forms.has_written(digest):
            return 0
        places = self._store.index.find_all(view, digest)
        # A chunk that is a delta, or has a form that this version does not know, stays as it is.
        if any(place.codec not in WHOLE_CODECS for place in places):
            return 0
        return min((place.stored_size for place in places), default=0)
