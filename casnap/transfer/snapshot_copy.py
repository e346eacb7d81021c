"""Copy one snapshot, part by part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice

import msgspec

from casnap.backends import Backend
from casnap.errors import FencedError
from casnap.format.codec import BY_SIZE, Codec, codec_among
from casnap.format.digest import Digest, split_digests
from casnap.format.names import folder_of
from casnap.format.records import Place, Root, Row
from casnap.runtime.batches import batches
from casnap.runtime.fork import cached_property
from casnap.runtime.threads import Crew, run_shielded
from casnap.storage import Contents, Location, Markers, Repository, Session, Table, bases_in
from casnap.transfer import unfinished
from casnap.transfer.copy_jobs import CopyJob, CopyOptions, Placement
from casnap.transfer.delta_copies import DeltaCopier
from casnap.transfer.source_tree import SourceTree
from casnap.transfer.tally import Tally

# The most digests that are looked up at a time.
_BATCH = 1024
# The stored bytes after which the copy asks whether the time of a part is over.
_TURN_BYTES = 32 << 20
# The most chunks of a part: all of its entries are in memory at once.
_MOST_CHUNKS = 1 << 16

RelyOn = Callable[[list[Digest]], "list[Place | None]"]
Planned = dict[Digest, "Place | None"]
"""The chunks to send, with their places in the source."""


def placement_in(table: Table, job: CopyJob, backend: Backend, seq: int) -> Placement | None:
    """Return how to put a snapshot into a table; None if the table has this copy already.

    Args:
        table: The table of the destination.
        job: The snapshot.
        backend: The destination.
        seq: The number of its next root.

    Raises:
        SnapshotExistsError: Another snapshot, or a file, has its name.
    """
    row = table.get(job.new_name)
    if row is not None and row.commit == job.row.commit:
        return None
    placement = job.placement(table, seq)
    Location(backend, job.new_name).check_path_is_free()
    table.check_free(
        job.new_name,
        overwrite=job.new_name in placement.replaced,
        uri=backend.uri,
        moved_tag=job.moved_tag,
        advice="it is not the snapshot to copy, but perhaps an earlier one of this name. "
        "Delete it there, or copy the new one alone, under another name",
    )
    return placement


class SnapshotCopy:
    """Copies one snapshot.

    Args:
        source: The store to read from.
        job: The snapshot.
        tree: Its tree.
        options: The options of the copy.
        tally: Counts the chunks and bytes.
    """

    def __init__(
        self,
        source: Repository,
        job: CopyJob,
        tree: SourceTree,
        options: CopyOptions,
        tally: Tally,
    ) -> None:
        self._source = source
        self._job = job
        self._tree = tree
        self._options = options
        self._tally = tally
        self._pending: Iterator[Digest] = tree.chunks()
        # The digests that the destination has: of this part, and of earlier parts.
        self._present, self._present_before = bytearray(), bytearray()
        self._looks_again = False
        self._candidates: dict[Digest, Digest] | None = None
        self._parts: dict[str, bytes] = {}
        self._new_bytes = 0
        # Once the snapshot is committed: its row, and the rows of the snapshots that it replaced.
        self._row: Row | None = None
        self._gone: dict[str, Row] = {}

    # --- planning ---

    def _plan(self, reuse: RelyOn) -> tuple[Planned, bool]:
        """Plan the next part.

        Args:
            reuse: Asks the destination which chunks it has, and relies on these.

        Returns:
            The chunks to send, each with its place in the source; and whether these are the last.
        """
        planned: Planned = {}
        nbytes = 0
        self._present_before += self._present
        self._present = bytearray()
        view = self._source.recent_view()
        most = max(1, min(_BATCH, self._options.part_bytes // self._source.config.chunk_size))
        while nbytes < self._options.part_bytes and len(planned) <= _MOST_CHUNKS - _BATCH:
            batch = list(dict.fromkeys(islice(self._pending, most)))
            if not batch:
                if not self._present_before:
                    return planned, True
                # Chunks of earlier parts may have been collected since.
                self._pending = iter(split_digests(bytes(self._present_before)))
                self._present_before = bytearray()
                self._looks_again = True
                continue
            lacking = self._lacking(batch, reuse, planned)
            places = self._source.find(lacking, view) if lacking else []
            planned.update(zip(lacking, places, strict=True))
            nbytes += sum(place.stored_size for place in places if place is not None)
        return planned, False

    def _lacking(self, batch: list[Digest], reuse: RelyOn, planned: Planned) -> list[Digest]:
        lacking = []
        for digest, place in zip(batch, reuse(batch), strict=True):
            if place is None:
                if digest not in planned:
                    lacking.append(digest)
                continue
            self._present += digest
            if not self._looks_again:
                self._tally.count_present(place)
                self._tally.bytes.add(place.raw_size)
        return lacking

    def look(self, destination: Repository | None) -> None:
        """Count what a copy would send, and send nothing.

        Args:
            destination: The store to write to; None if it is to be made.
        """
        if destination is None:
            self._look(lambda digests: [None] * len(digests))
            return
        with Session(destination, dry_run=True) as session:
            self._look(session.rely_on)

    def _look(self, reuse: RelyOn) -> None:
        is_last = False
        while not is_last:
            planned, is_last = self._plan(reuse)
            # Cleared, so that the plan does not look a second time: the result would be the same.
            self._present = bytearray()
            self._count_would(planned)
        for digests in _batches([*self._tree.nodes.values()]):
            digest_places = zip(digests, reuse(digests), strict=True)
            lacking = [digest for digest, place in digest_places if place is None]
            places = self._source.find(lacking)
            self._count_would(dict(zip(lacking, places, strict=True)))

    def _count_would(self, planned: Planned) -> None:
        would = self._tally.would_send
        for digest in planned.keys() - would:
            would.add(digest)
            place = planned[digest]
            self._tally.count_sent(1, place.stored_size if place is not None else 0)
            self._tally.bytes.add(place.raw_size if place is not None else 0)

    # --- sending ---

    def copy(self, destination: Repository) -> bool:
        """Copy the snapshot; return False if another process has copied it meanwhile.

        Raises:
            FencedError: A collector has deleted chunks that this copy has written or relied on.
        """
        while not run_shielded(partial(self._part, destination)):
            continue
        if self._row is None:
            return False
        Markers(destination).replace(self._job.new_name, self._row, self._gone)
        self._options.hooks.on_release(list(self._gone.values()))
        self._options.hooks.on_commit()
        return True

    def _part(self, destination: Repository, crew: Crew) -> bool:
        """Send and commit one part of the snapshot.

        Args:
            destination: The store to write to.
            crew: The owner of the threads.

        Returns:
            Whether the destination now has the whole snapshot.
        """
        with Session(destination, crew, copies=True) as session:
            planned, is_last = self._plan(session.rely_on)
            sizes = self._send(session, planned)
            if len(sizes) < len(planned):  # the time of the part is over
                remaining = planned.keys() - {digest for digest, _ in sizes}
                self._pending = chain(filter(remaining.__contains__, planned), self._pending)
            elif is_last:
                self._finish(session, len(sizes))
                return True
            return not self._commit_part(session, sizes)

    def _send(self, session: Session, planned: Planned) -> list[tuple[Digest, int]]:
        """Copy chunks into new packs, until the part's time is over.

        Args:
            session: The session of the destination.
            planned: The chunks, each with its place in the source.

        Returns:
            The digest and the raw length of each chunk that was sent.
        """
        ends = time.monotonic() + self._options.part_seconds
        sizes: list[tuple[Digest, int]] = []

        def note(digest: Digest, nbytes: int) -> None:
            sizes.append((digest, nbytes))
            self._tally.bytes.add(nbytes)

        def stored_bytes(digest: Digest) -> int:
            place = planned[digest]
            return 0 if place is None else place.stored_size

        deltas: DeltaCopier | None = None
        # Either all chunks are compressed, or all are sent as they are stored.
        if self._compresses(session):
            session.use(codec_among(BY_SIZE))
            # Without chunks to send, candidates need not be found, which takes long.
            if planned:
                deltas = DeltaCopier(self._source, session, self._candidates_for(session))
        else:
            places = planned.values()
            session.use(codec_among(place.codec for place in places if place is not None))
        for digests in batches(planned, stored_bytes, _TURN_BYTES):
            if deltas is None:
                session.copy(self._source, digests, note)
            else:
                deltas.copy({digest: planned[digest] for digest in digests}, note)
            if time.monotonic() >= ends:
                break
        return sizes

    def _compresses(self, session: Session) -> bool:
        """Whether chunks are sent compressed, as deltas or in planes, not in the source's form."""
        settings = session.store.settings(session.base.root)
        # Send small chunks, unless a later `gc` at the destination makes them smaller.
        is_small = settings.is_auto and (self._options.gets_all or not settings.recodes)
        return settings.codec is not Codec.RAW or is_small

    def _candidates_for(self, session: Session) -> dict[Digest, Digest]:
        """Return chunk → the chunk of the same cell in an earlier snapshot of the destination."""
        if self._candidates is None:
            contents = Contents(self._source, self._job.name, self._job.row)
            there = _Presence(session, self._job)
            self._candidates = bases_in(
                contents, self._source.recent(), there.has, there.last_before
            )
        return self._candidates

    def _commit_part(self, session: Session, sizes: list[tuple[Digest, int]]) -> bool:
        """Commit a root that refers to the sent chunks, so that no collector deletes them.

        Args:
            session: The session of the destination.
            sizes: The digest and the raw length of each chunk that was sent.

        Returns:
            False if another process has copied the whole snapshot meanwhile.
        """
        parts = unfinished.put_part(session, sizes)

        def update_root(root: Root) -> Root:
            return unfinished.with_parts(session, root, self._job, parts)

        if not self._commit(session, lambda *_: {}, len(sizes), update_root):
            return False
        self._parts |= parts
        return True

    def _finish(self, session: Session, chunks: int) -> None:
        """Write the tree, and commit the snapshot.

        Args:
            session: The session of the destination.
            chunks: How many chunks the session has written.
        """
        nodes = self._put_nodes(session)
        job = self._job
        contents = Contents(self._source, job.name, job.row)
        # Read both, so that a row that does not fit its manifest is found before the copy.
        metadata, _ = contents.metadata, contents.manifest
        row = job.row
        notes = self._options.hooks.notes(job.new_name)

        def change(table: Table, seq: int, placement: Placement) -> dict[str, Row | None]:
            nonlocal row
            stats = msgspec.structs.replace(
                job.row.stats,
                new_bytes=self._new_bytes + session.new_bytes,
            )
            row = msgspec.structs.replace(
                job.row.of_this_version(),
                manifest=session.ref(Digest(job.row.manifest.digest)),
                seq=seq,
                stats=stats,
                metadata=metadata,
                metadata_node=b"",
                tags=tuple(sorted({*job.row.tags, *placement.tags})),
                notes=dict(sorted({**notes, **placement.notes}.items())),
            )
            self._gone = dict(placement.replaced)
            thinned: dict[str, Row] = {}
            if job.upkeep is not None:
                pruned, thinned = job.upkeep(table, placement.replaced, row, session)
                self._gone |= pruned
            return {**dict.fromkeys(self._gone), **thinned, job.new_name: row}

        def update_root(root: Root) -> Root:
            self._check_kept(session.store, root)
            return unfinished.without(root, job)

        if self._commit(session, change, chunks + nodes, update_root):
            self._row = row

    def _put_nodes(self, session: Session) -> int:
        """Write the tree nodes that the destination lacks; return how many."""
        count = 0
        # In reverse order, so that the manifest comes last, as in a take.
        for digests in _batches([*reversed(self._tree.nodes.values())]):
            lacking = []
            for digest, place in zip(digests, session.rely_on(digests), strict=True):
                if place is None:
                    lacking.append(digest)
                else:
                    self._tally.count_present(place)
            count += session.copy_nodes(self._source, lacking)
        return count

    def _commit(
        self,
        session: Session,
        change: Callable[[Table, int, Placement], dict[str, Row | None]],
        chunks: int,
        update_root: Callable[[Root], Root],
    ) -> bool:
        """Commit; return False if another process has copied the whole snapshot meanwhile.

        Args:
            session: The session of the destination.
            change: Given the table, the number of the next root, and the placement, returns the
                changes to rows.
            chunks: How many chunks the session has written.
            update_root: Returns the next root with further changes.
        """

        def placed(table: Table, seq: int) -> dict[str, Row | None] | None:
            placement = placement_in(table, self._job, session.store.backend, seq)
            return None if placement is None else change(table, seq, placement)

        if session.commit(placed, update_root=update_root) is None:
            return False
        self._new_bytes += session.new_bytes
        self._tally.count_sent(chunks, session.new_bytes)
        return True

    def _check_kept(self, store: Repository, root: Root) -> None:
        """Check that the destination's root still keeps all chunks that this copy needs.

        Two things keep them: earlier parts of this copy, and snapshots that were copied before and
        share subtrees with this one.

        Raises:
            FencedError: One of these parts or snapshots was deleted.
        """
        table = store.table(root)
        stand = self._parts.items() <= unfinished.parts_of(store, root, self._job).items()
        for name, job in self._tree.shared_with.items():
            row = table.get(name)
            stand &= row is not None and row.manifest.digest == job.row.manifest.digest
        if not stand:
            raise FencedError


class _Presence:
    """Finds snapshots of the destination whose chunks can be bases of deltas in a copy.

    These are the snapshots that the source has too, and the last one taken before the copied
    snapshot.

    Args:
        session: The session of the destination.
        job: The snapshot that is copied.
    """

    def __init__(self, session: Session, job: CopyJob) -> None:
        self._store = session.store
        self._table = session.store.table(session.base.root)
        self._folder = folder_of(job.new_name)
        self._time = job.row.time

    def has(self, name: str, row: Row) -> bool:
        """Whether the destination has a snapshot of the source, by its commit id.

        It looks first under the same name in the folder of the copy, where most are.

        Args:
            name: The name of the snapshot in the source.
            row: Its row.
        """
        inner = name.rpartition("/")[2]
        there = self._table.get(f"{self._folder}/{inner}" if self._folder else inner)
        if there is not None and there.commit == row.commit:
            return True
        return row.commit in self._commits

    def last_before(self) -> Contents | None:
        """Return the last snapshot in the copy's folder that is older than the copied one.

        Return None if there is none.
        """
        earlier = [
            (name, row)
            for name, row in self._table.items_in(self._folder)
            if folder_of(name) == self._folder
            and row.time < self._time
            and not row.unknown_features
        ]
        last = max(earlier, key=lambda each: each[1].time, default=None)
        return None if last is None else Contents(self._store, *last)

    @cached_property
    def _commits(self) -> set[bytes]:
        return {row.commit for _, row in self._table.items_in()}


def _batches(digests: list[Digest]) -> Iterator[list[Digest]]:
    for at in range(0, len(digests), _BATCH):
        yield digests[at : at + _BATCH]
