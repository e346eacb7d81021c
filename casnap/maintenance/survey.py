"""Surveying a whole store: every object is read, and every damage named with what it hurts.

The survey trusts only the store itself, neither the cache of this host nor hints to places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from casnap.errors import BackendError, DamagedError, UnsupportedFormatError
from casnap.format.delta import MOST_LINKS
from casnap.format.digest import Digest, split_digests
from casnap.format.entries import (
    INLINE_BYTES,
    Entry,
    KnownEntry,
    TensorEntry,
    UnknownEntry,
    entry_tree,
    unknown_in,
)
from casnap.format.records import (
    DeltaPlace,
    PackId,
    Place,
    Record,
    Root,
    Row,
    SegmentId,
    SegmentRef,
    Stats,
    footer_size,
    max_segment_bytes,
    merged_segment,
    pack_key,
    segment_counts,
    segment_key,
)
from casnap.format.tree import Branch, Child, LeafNode, Tree
from casnap.maintenance.damage import (
    ALL,
    KINDS,
    READ_ERRORS,
    UNSUPPORTED,
    Damage,
    Hurt,
    kind_and_message,
)
from casnap.maintenance.full_index import FullIndex
from casnap.maintenance.pack_checks import bad_records, can_lie_at, is_known
from casnap.runtime.progress import Progress
from casnap.runtime.threads import mapped
from casnap.storage import Contents, Entries, Repository, Want
from casnap.storage.inspecting import (
    Failure,
    GivenPlaces,
    Reason,
    ShortestChains,
    bases_at,
    listed_packs,
    preferred,
    read_footer,
)

if TYPE_CHECKING:
    from casnap.maintenance.entry_checks import Read

T = TypeVar("T")
_LOOKS = 5
# On a remote store, nodes of a pack that lie within so many bytes are read together.
_TOGETHER = 4 << 20
_KEPT_BYTES = 32 << 20
# So many packs are read at the same time.
_PACKS_AT_ONCE = 8


_ROOT_ADVICE = (
    "It is the newest root, so nothing else can be looked at. Restore this file from a backup; "
    "never delete it, since the root before it would be taken for the newest one"
)


class _PackState(NamedTuple):
    """The length of a pack, -1 if that is not known; its footer, or why that cannot be read."""

    size: int
    footer: Sequence[Record] = ()
    error: Exception | None = None


def _length_of(records: Sequence[Record]) -> int:
    """Return how long a pack of these records is."""
    end = max((place.offset + place.stored_size for _, place in records), default=0)
    return end + footer_size(records)


def _wrong_length(size: int, records: Sequence[Record]) -> str:
    return f"the pack has {size:,} bytes, not the {_length_of(records):,} it was written with"


class _Below(NamedTuple):
    """What lies below a node: the damages, by path, and the sum of :func:`balance`."""

    hurts: list[tuple[str, Damage]]
    balance: int = 0


class _UncachedStore(Repository):
    """A store whose nodes are read from packs only, at places that are not known to be bad."""

    def __init__(self, survey: Survey) -> None:
        lookup = GivenPlaces(survey.store.lookup, survey.whole_places)
        super().__init__(survey.store.backend, survey.store.config, lookup)
        self._survey = survey
        self.asked: list[Digest] = []
        # Nodes that were read with their neighbours, and are whole at all their places.
        self._kept: dict[Digest, bytes] = {}
        self._kept_bytes = 0

    def node(self, digest: Digest, hint: Place | None = None) -> bytes:
        """Return a node, verified, and record that it is needed."""
        self.asked.append(digest)
        self._survey.needed[digest] = -1
        self.read_ahead([digest])
        if digest in self._kept:
            return self._kept[digest]
        copies: list[bytes] = []
        codecs: list[int] = []
        want = Want(digest, -1, lambda raw: copies.append(bytes(raw)), "")
        # Read all places: each is there in case that another fails.
        for place in self._survey.whole_places(digest):
            for unread in self.read_places([(place, [want])]):
                if unread.failure.reason is Reason.UNSUPPORTED:
                    codecs.append(place.codec)
                else:
                    self._survey.note_bad(digest, place, unread.failure)
        if copies:
            return copies[0]
        if codecs:
            raise UnsupportedFormatError(
                f"tree node {digest.hex()} is stored with codec {codecs[0]}"
            )
        raise DamagedError(f"tree node {digest.hex()} is nowhere whole")

    def read_ahead(self, digests: Iterable[bytes]) -> None:
        """On a remote store, read nodes that are needed soon, of several packs at a time.

        With 50 ms a request a check took 1.2 s so, and 8.8 s without it.
        """
        if not self.backend.costly_requests:
            return
        pending = [Digest(digest) for digest in dict.fromkeys(digests) if digest not in self._kept]
        for at in range(0, len(pending), _PACKS_AT_ONCE):
            if self._kept_bytes > _KEPT_BYTES:
                if at:
                    return
                self._kept, self._kept_bytes = {}, 0
            around: dict[PackId, dict[Digest, list[Place]]] = {}
            for digest in pending[at : at + _PACKS_AT_ONCE]:
                places = self._survey.whole_places(digest)
                if digest not in self._kept and places and places[0].pack not in around:
                    around[PackId(places[0].pack)] = self._around(digest, places)
            for _, content in mapped(self._read_whole, around.values(), _PACKS_AT_ONCE):
                self._kept |= content
                self._kept_bytes += sum(map(len, content.values()))

    def _around(self, digest: Digest, places: list[Place]) -> dict[Digest, list[Place]]:
        """Return a node and those beside it in its pack: a commit writes all its nodes into one."""
        start = min(place.offset for place in places)
        near = range(start - _TOGETHER, start + _TOGETHER)
        todo: dict[Digest, list[Place]] = {digest: places}
        for neighbour, place in self._survey.index.of_pack(PackId(places[0].pack)):
            # Each node has two places there.
            if place.offset in near and neighbour not in todo and neighbour not in self._kept:
                todo[neighbour] = self._survey.whole_places(neighbour)
        return {d: copies for d, copies in todo.items() if d == digest or len(copies) > 1}

    def _read_whole(self, todo: dict[Digest, list[Place]]) -> dict[Digest, bytes]:
        """Return the nodes that are whole at all their places."""
        copies: dict[Digest, list[bytes]] = {d: [] for d in todo}

        def keep(digest: Digest, raw: memoryview) -> None:
            copies[digest].append(bytes(raw))

        wants = {d: [Want(d, -1, partial(keep, d), "")] for d in todo}
        self.read_places([(place, wants[d]) for d in todo for place in todo[d]])
        # The rest is read alone, and noted as bad, where it is needed.
        return {d: raws[0] for d, raws in copies.items() if raws and len(raws) == len(todo[d])}


class Survey:
    """Everything that is wrong in a store, with the tensors that it hurts.

    A new survey has read the index. :meth:`run` reads the rest.

    Args:
        store: The store.
        progress: Called with the current phase, how much of it is done, and the total.

    Raises:
        DamagedError: The newest root cannot be read.

    Attributes:
        root: The newest root.
        index: The index by its readable segments.
        unreadable: Its segments that cannot be read.
        damages: What is wrong.
        hurt_packs: Packs with any damage.
        read_bytes: How many bytes were read and verified.
        needed: The digests that snapshots and the table need: the length of a chunk, -1 of a node.
        lost: Needed digests without a whole place.
        known_lost: Digests that the root says are lost.
        rescued: Condemned packs that hold a needed digest which no live pack holds.
        snapshots: How many snapshots there are.
        rejected_names: The names in the table that cannot be ones.
        unsupported: What a newer version has to read. It is no damage.
    """

    root: Root

    def __init__(self, store: Repository, progress: Progress | None = None) -> None:
        self.store = store
        self.read_bytes = 0
        # Places that were read and are not whole. This stays true for newer roots.
        self._bad: dict[Record, Failure] = {}
        # Deltas that stand on another base than the index says. So does this.
        self._other_bases: dict[Record, Digest] = {}
        # The one snapshot to survey, and what it needs; None for all.
        self._only: str | None = None
        self._wanted: set[Digest] | None = None
        # The share of all bytes to read; None if only the structure is looked at.
        self._reads: float | None = None
        self._progress = progress or (lambda phase, count, total: None)
        try:
            root = store.newest()
        except DamagedError as e:
            raise DamagedError(f"{e}. {_ROOT_ADVICE}") from e
        self._begin(root)

    def _begin(self, root: Root) -> None:
        """Start over with a root: read its segments."""
        self.root = root
        self.damages: list[Damage] = []
        self.hurt_packs: set[PackId] = set()
        self.unreadable: dict[SegmentRef, Damage] = {}
        self.needed: dict[Digest, int] = {}
        self.lost: set[Digest] = set()
        self.rescued: set[PackId] = set()
        self.snapshots = 0
        self.unsupported: list[Damage] = []
        self._unsupported_packs: dict[PackId, Damage] = {}
        self._has_unknown_nodes = False
        self.known_lost = frozenset(split_digests(root.lost))
        self.rejected_names: set[str] = set()
        # The damages that cost a digest one of its places; those that hurt a needed digest.
        self._blame: dict[Digest, list[Damage]] = {}
        self._damages_of: dict[Digest, list[Damage]] = {}
        self._condemned_damage: dict[PackId, Damage] = {}
        self._gone: set[PackId] = set()
        self._chains = ShortestChains(self._places_there)
        self._cut: set[Record] = set()
        # What was surveyed once: subtrees and leaves, and damages of lists of chunks.
        self._below: dict[bytes, _Below] = {}
        self._lists: dict[tuple[object, ...], list[Damage]] = {}
        self._lacking: dict[tuple[bytes, ...], list[tuple[str, Damage]]] = {}
        # This loads torch, which a store and most commands need not.
        from casnap.maintenance import entry_checks

        self._entry_checks = entry_checks
        self._judges_entries = True
        self._commits: dict[str, bytes] = {}
        self._uncached = _UncachedStore(self)
        self.index = FullIndex(self._segments())

    def run(
        self, *, share: float | None = None, seed: int | None = None, only: str | None = None
    ) -> None:
        """Survey everything, or what one snapshot needs.

        Args:
            share: The share of all chunks and nodes to read and verify; None to read none.
            seed: Chooses which, if the share is less than 1.
            only: The full name of the one snapshot.
        """
        self._only = only
        if only is not None:
            self._walk()
            self._wanted = set(self.needed)
        else:
            self._look_at_packs()
        self._reads = share
        if share is not None:
            self._read_share(share, random.Random(seed))
        if only is not None:
            self.run_again()
        else:
            self._snapshots()
        # What is missing may have been collected or merged since the survey began.
        for _ in range(_LOOKS):
            if not self.damages or self.store.newest() == self.root:
                return
            self.run_again()
        self._drop_outdated()

    def run_again(self) -> None:
        """Survey the newest root, and keep the bad places that were found before."""
        self._begin(self.store.newest())
        for (digest, place), failure in list(self._bad.items()):
            if place in self.index.of(digest):
                self.note_bad(digest, place, failure)
        self._note_other_bases()
        self._look_at_packs()
        self._snapshots()

    def _drop_outdated(self) -> None:
        """Drop the damages of objects that the newest root no longer names."""
        try:
            view = self.store.view()
            commits = {n: r.commit for n, r in self.store.table(view.root).items()}
            commits |= {_copy_name(c): copy.parts.digest for c, copy in view.root.copies.items()}
        except DamagedError:
            return
        keys = {pack_key(pack) for pack in view.packs}
        keys |= {segment_key(ref.id) for ref in view.root.segments}

        def is_gone(hurt: Hurt) -> bool:
            # The newest table can be read as a whole, so damages of all snapshots are outdated.
            before = self._commits.get(hurt.snapshot)
            return hurt == ALL or (before is not None and commits.get(hurt.snapshot) != before)

        if view.root != self.root:
            self.damages = [
                damage
                for damage in self.damages
                if damage.object in keys
                or (not damage.object and not (damage.hurts and all(map(is_gone, damage.hurts))))
            ]

    @property
    def trees_incomplete(self) -> bool:
        """Whether parts of the trees cannot be read, so that their needs are not known."""
        unknown = bool(self.unreadable) or self._has_unknown_nodes
        return unknown or any(self.needed[digest] < 0 for digest in self.lost)

    @property
    def table_is_lost(self) -> bool:
        """Whether the names of some snapshots cannot be read."""

        def read() -> list[tuple[str, Row]]:
            return list(self._uncached.table(self.root).items_in())

        return self._try_read(read, "the table")[0] is None

    def whole_places(self, digest: Digest) -> list[Place]:
        """Return the places of a digest that are not known to be bad."""
        places = self.index.of(digest)
        return [place for place in places if self._is_whole(digest, place)]

    def _is_whole(self, digest: Digest, place: Place) -> bool:
        return self._is_there(digest, place) and self._chains.ends(place)

    def _is_there(self, digest: Digest, place: Place) -> bool:
        record = (digest, place)
        return not (place.pack in self._gone or record in self._cut or record in self._bad)

    def _places_there(self, digest: Digest) -> list[Place]:
        return [place for place in self.index.of(digest) if self._is_there(digest, place)]

    def note_bad(self, digest: Digest, place: Place, failure: Failure) -> None:
        """Record that the bytes at a place are not what was written."""
        self._bad[digest, place] = failure
        self._chains.forget()
        message = f"at byte {place.offset:,}: {failure}"
        damage = self._hurt_pack(PackId(place.pack), KINDS[failure.reason], message, digest)
        self._blame.setdefault(digest, []).append(damage)
        self._damages_of.pop(digest, None)

    def _add_damage(self, kind: str, key: str, message: str, digest: bytes = b"") -> Damage:
        damage = Damage(kind, key, message, digest.hex())
        self.damages.append(damage)
        return damage

    # --- the index ---

    def _segments(self) -> Iterator[tuple[bytes, str]]:
        segments = self.root.segments
        for number, ref in enumerate(segments):
            self._progress("reading the index", number, len(segments))
            key = segment_key(SegmentId(ref.id))
            try:
                yield self._read_segment(ref, key), key
            except READ_ERRORS as e:
                kind, message = kind_and_message(e, "an index segment")
                damage = self.unreadable[ref] = self._add_damage(kind, key, message)
                # The index cannot be read until the segment is replaced. Its chunks may be whole.
                damage.hurts[ALL] = None

    def _read_segment(self, ref: SegmentRef, key: str) -> bytes:
        content = self.store.backend.read(key, max_segment_bytes(ref))
        if segment_counts(content) != (ref.count, ref.deltas):
            raise DamagedError(f"{key} is another index segment than the root says")
        if merged_segment([(content, key)])[0] != content:
            raise DamagedError(f"{key} is malformed: its packs or records are not in order")
        return content

    # --- packs ---

    @property
    def packs(self) -> Sequence[PackId]:
        """The packs to look at."""
        if self._wanted is None:
            return self.index.packs
        return sorted({PackId(place.pack) for d in self._wanted for place in self.index.of(d)})

    def _look_at_packs(self) -> None:
        """Compare the size and the footer of each pack with the index."""
        packs, backend = self.packs, self.store.backend
        listed = listed_packs(backend, are_many=False) if backend.costly_requests else None
        states = mapped(lambda pack: self._state_of(pack, listed), packs, backend.in_flight)
        for number, (pack, state) in enumerate(states):
            self._progress("looking at packs", number, len(packs))
            try:
                self._compare(pack, state)
            except FileNotFoundError:
                self._lose_pack(pack, "missing", "the pack is missing")
            except BackendError as e:
                self._lose_pack(pack, "unreadable", f"the pack cannot be read: {e}")

    def _state_of(self, pack: PackId, listed: dict[bytes, int] | None) -> _PackState:
        backend, size = self.store.backend, -1
        try:
            records = self.index.of_pack(pack)
            size = -1 if listed is None else listed.get(pack, -1)
            if size < _length_of(records):
                # A list is not enough to call a pack hurt.
                size = backend.size(pack_key(pack))
            if size < _length_of(records):
                return _PackState(size)
            return _PackState(size, read_footer(backend, pack, size, footer_size(records)))
        except READ_ERRORS as e:
            return _PackState(size, error=e)

    def _compare(self, pack: PackId, state: _PackState) -> None:
        records, size, error = self.index.of_pack(pack), state.size, state.error
        if size < 0 and error is not None:
            raise error
        if size < _length_of(records):
            self._note_cut_off(pack, size, records)
            return
        for digest, place in records:
            if (digest, place) not in self._bad and not can_lie_at(place):
                self.note_bad(digest, place, Failure(Reason.IMPOSSIBLE))
            elif not is_known(place):
                self._unsupported_in(pack)
        if error is not None:
            is_denied = isinstance(error.__cause__, PermissionError)
            if is_denied or isinstance(error, FileNotFoundError):
                raise error
            self._hurt_pack(pack, "changed", f"{error}; its chunks may be whole")
        elif not set(state.footer).issuperset(records):
            self._hurt_pack(pack, "changed", "the footer of the pack and the index disagree")
        elif size != _length_of(state.footer):
            self._hurt_pack(pack, "changed", _wrong_length(size, state.footer))

    def _note_cut_off(self, pack: PackId, size: int, records: Sequence[Record]) -> None:
        damage = self._hurt_pack(pack, "cut off", _wrong_length(size, records))
        for digest, place in records:
            if place.offset + place.stored_size > size:
                self._cut.add((digest, place))
                self._chains.forget()
                self._blame.setdefault(digest, []).append(damage)

    def _hurt_pack(self, pack: PackId, kind: str, message: str, digest: bytes = b"") -> Damage:
        self.hurt_packs.add(pack)
        return self._add_damage(kind, pack_key(pack), message, digest)

    def _lose_pack(self, pack: PackId, kind: str, message: str) -> None:
        damage = self._hurt_pack(pack, kind, message)
        self._gone.add(pack)
        self._chains.forget()
        for digest, _ in self.index.of_pack(pack):
            self._blame.setdefault(digest, []).append(damage)

    def _unsupported_in(self, pack: PackId) -> Damage:
        """Return what says that this version cannot read some of a pack."""
        if pack not in self._unsupported_packs:
            unknown = [p.codec for _, p in self.index.of_pack(pack) if not is_known(p)]
            codecs = ", ".join(map(str, sorted(set(unknown))))
            message = (
                f"{len(unknown):,} of its chunks have a form that this casnap does not know (codec "
                f"{codecs}), so they were not checked; update casnap"
            )
            self._unsupported_packs[pack] = self._add_unsupported(message, pack_key(pack))
        return self._unsupported_packs[pack]

    def _add_unsupported(self, message: str, key: str = "") -> Damage:
        self.unsupported.append(Damage(UNSUPPORTED, key, message))
        return self.unsupported[-1]

    # --- all bytes ---

    def _read_share(self, share: float, choice: random.Random) -> None:
        """Read and verify a share of all chunks and nodes."""
        total = int(self.stored_bytes * share)

        def report(nbytes: int) -> None:
            self.read_bytes += nbytes
            self._progress("reading", min(self.read_bytes, total), total)

        records = (r for r in self._to_read() if share >= 1 or choice.random() < share)
        bases = self._other_bases.__setitem__
        for (digest, place), failure in bad_records(self._uncached, records, report, bases):
            self.note_bad(digest, place, failure)
        self._note_other_bases()

    def _note_other_bases(self) -> None:
        """Note deltas whose base the index and their pack name wrongly: it may be collected."""
        for (digest, place), base in self._other_bases.items():
            if place in self.index.of(digest):
                message = (
                    f"at byte {place.offset:,}: a delta on {base.hex()}, of which the pack and the "
                    "index say another base, so a garbage collector may delete what it needs"
                )
                self._hurt_pack(PackId(place.pack), "malformed", message, digest)

    @property
    def stored_bytes(self) -> int:
        """The stored bytes of what is looked at, at all its places."""
        if self._wanted is None:
            return self.index.stored_bytes
        return sum(place.stored_size for d in self._wanted for place in self.index.of(d))

    def _to_read(self) -> Iterator[Record]:
        for pack in self.packs:
            for digest, place in self.index.of_pack(pack):
                if self._wanted is not None and digest not in self._wanted:
                    continue
                if self._is_whole(digest, place):
                    yield digest, place

    # --- snapshots ---

    def _snapshots(self) -> None:
        self._walk()
        for damage in self.damages:
            if damage.digest and not damage.hurts and damage.kind != "malformed":
                if self.whole_places(Digest(bytes.fromhex(damage.digest))):
                    damage.message += "; another copy is whole"
                elif not self.trees_incomplete:
                    damage.message += "; nothing needs it"

    def _walk(self) -> None:
        table, damages = self._try_read(partial(self._uncached.table, self.root), "the table")
        self._hurt(damages, ALL.snapshot, "")
        if self._only is None:
            self._copies()
        if table is None:
            return
        if self._only is not None:
            row, damages = self._try_read(partial(table.get, self._only), "the table")
            self._hurt(damages, self._only, "")
            if row is not None:
                self._snapshot(self._only, row)
                self.snapshots += 1
            return
        self._rows(table, table.children, len(table))
        self.rejected_names = table.rejected
        for name in sorted(table.rejected):
            self._add_damage(
                "malformed",
                "",
                f"the table has a row {name!r:.200}, which cannot be the name of a snapshot, so it "
                "is passed over; `casnap repair` removes it (--yes in a script)",
            )

    def _rows(self, table: Tree[Row], children: list[Child], total: int) -> None:
        """Survey all snapshots below some nodes of the table."""
        self._uncached.read_ahead(digest for _, digest, _ in children)
        for key, digest, count in children:
            node, damages = self._try_read(partial(table.node, Digest(digest)), "the table")
            self._hurt(damages, _name_of(key, count), "")
            if isinstance(node, Branch):
                self._rows(table, node.children, total)
            rows = node.items if isinstance(node, LeafNode) else ()
            self._uncached.read_ahead(row.manifest.digest for _, row in rows)
            for name, row in rows:
                self._progress("looking at snapshots", self.snapshots, total)
                self._snapshot(name, row)
                self.snapshots += 1

    def _copies(self) -> None:
        """Survey what was sent of unfinished copies, which is kept like a snapshot."""
        # Their entries name chunks, however short, and are no values.
        self._judges_entries = False
        for commit, copy in self.root.copies.items():
            row = Row(copy.parts.digest, copy.parts, self.root.seq, copy.time, 1, Stats())
            self._snapshot(_copy_name(commit), row)
        self._judges_entries = True

    def _snapshot(self, name: str, row: Row) -> None:
        self._commits[name] = row.commit
        contents = Contents(self._uncached, name, row)
        if row.unknown_features:
            names = ", ".join(row.unknown_features)
            unknown = self._add_unsupported(f"it has the features {names:.200}; update casnap")
            self._hurt([unknown], name, "")
        manifest, damages = self._try_read(lambda: contents.unchecked_manifest, name)
        self._hurt(damages, name, "")
        self._hurt(self._try_read(lambda: contents.metadata, name)[1], name, "")
        if manifest is None:
            return
        everyone = (manifest.shared, *manifest.ranks.values())
        tops = (top for subtrees in everyone for top in subtrees.values())
        self._uncached.read_ahead(top for top in tops if top not in self._below)
        groups = [("", manifest.shared), *((f"{r}/", k) for r, k in manifest.ranks.items())]
        for rank, subtrees in groups:
            for key, subtree in subtrees.items():
                for inner, damage in self._subtree(contents, key, subtree).hurts:
                    damage.hurts[Hurt(name, f"{rank}{key}{inner}")] = None
        if self._reads is not None and self._judges_entries and not row.unknown_features:
            self._elements(contents)

    def _hurt(self, damages: list[Damage], snapshot: str, path: str) -> None:
        for damage in damages:
            damage.hurts[Hurt(snapshot, path)] = None

    def _subtree(self, contents: Contents, key: str, top: bytes) -> _Below:
        """Return what lies below a key. A known subtree is not read again."""
        if top in self._below:
            return self._below[top]
        label = f"{contents.name}: {key}"
        load = self._uncached.node
        tree, damages = self._try_read(partial(entry_tree, Digest(top), load), label)
        hurts = [("", damage) for damage in damages]
        below = _Below([])
        if tree is not None:
            below = self._nodes(contents, key, tree, tree.children)
        self._below[top] = _Below(hurts + below.hurts, below.balance)
        return self._below[top]

    def _nodes(
        self, contents: Contents, key: str, tree: Tree[Entry], children: list[Child]
    ) -> _Below:
        """Return what lies below some nodes of a tree. A known node is not read again."""
        self._uncached.read_ahead(node for _, node, _ in children if node not in self._below)
        hurts: list[tuple[str, Damage]] = []
        total = 0
        for inner, node, count in children:
            if node not in self._below:
                self._below[node] = self._node(contents, key, tree, node, _name_of(inner, count))
            below = self._below[node]
            hurts += below.hurts
            total += below.balance
        return _Below(hurts, total)

    def _node(
        self, contents: Contents, key: str, tree: Tree[Entry], digest: bytes, entries: str
    ) -> _Below:
        label = f"{contents.name}: {key}"
        node, damages = self._try_read(partial(tree.node, Digest(digest)), label)
        hurts = [(entries, damage) for damage in damages]
        if isinstance(node, Branch):
            below = self._nodes(contents, key, tree, node.children)
            return _Below(hurts + below.hurts, below.balance)
        total, size = 0, len(tree)
        if node is not None:
            read = partial(self._content, contents, self._small_contents(node.items))
            for inner, entry in node.items:
                damaged, components = self._entry(contents, key + inner, entry, read)
                if damaged:
                    hurts += [(inner, damage) for damage in damaged]
                if self._reads is not None:
                    total += self._entry_checks.balance(inner, entry, components, size)
        return _Below(hurts, total)

    def _entry(
        self, contents: Contents, path: str, entry: Entry, read: Read
    ) -> tuple[list[Damage], Iterable[str]]:
        """Return the damages that hurt an entry, and the components of its elements."""
        if unknown_in(entry):
            return self._unknown(contents, path, entry), ()
        assert not isinstance(entry, UnknownEntry)
        if entry.payload.nbytes > INLINE_BYTES or not self._judges_entries:
            damages = self._chunks(contents, path, entry)
            if damages or not self._judges_entries:
                return damages, ()
        try:
            return [], self._entry_checks.check_entry(path, entry, read)
        except DamagedError as e:
            return [self._add_damage("malformed", "", f"{path}: {e}")], ()
        except UnsupportedFormatError as e:
            return [self._add_unsupported(f"{path}: {e}")], ()

    def _chunks(self, contents: Contents, path: str, entry: KnownEntry) -> list[Damage]:
        """Return the damages of the chunks of an entry. A known list of them is not read again."""
        payload = entry.payload
        form = entry.shape if isinstance(entry, TensorEntry) else ()
        content = (payload.digests, payload.depth, payload.nbytes, form)
        if payload.depth and content in self._lists:
            return self._lists[content]
        chunks, damages = self._try_read(partial(contents.chunks, path, entry), path)
        for digest, nbytes in chunks or ():
            if self.needed.get(digest) != nbytes or digest in self._damages_of:
                damages += self._chunk(digest, nbytes)
        damages = list(dict.fromkeys(damages))
        if payload.depth:
            self._lists[content] = damages
        return damages

    def _small_contents(self, items: list[tuple[str, Entry]]) -> dict[Digest, bytes]:
        """Return the chunks of the values and specs of a leaf, if all bytes are read: together."""
        digests: dict[Digest, None] = {}
        if self._reads is not None:
            total = 0
            for _, entry in items:
                payload = entry.payload
                if (
                    payload.nbytes > INLINE_BYTES
                    and not payload.depth
                    and self._entry_checks.is_decoded(entry)
                ):
                    total += payload.nbytes
                    if total > _KEPT_BYTES:
                        break
                    digests |= dict.fromkeys(split_digests(payload.digests))
        return self._read_chunks(digests)

    def _content(
        self, contents: Contents, known: dict[Digest, bytes], path: str, entry: KnownEntry
    ) -> bytes | None:
        """Return the bytes of an entry; None if they are not looked at, or cannot be read."""
        if entry.payload.nbytes <= INLINE_BYTES:
            return entry.payload.inline
        if self._reads is None:
            return None
        digests = [digest for digest, _ in contents.chunks(path, entry)]
        unread = [digest for digest in digests if digest not in known]
        parts = {**known, **self._read_chunks(unread)} if unread else known
        return b"".join(parts[d] for d in digests) if parts.keys() >= set(digests) else None

    def _read_chunks(self, digests: Iterable[Digest]) -> dict[Digest, bytes]:
        """Return those of some chunks that can be read."""
        raws: dict[Digest, bytes] = {}

        def keep(digest: Digest, raw: memoryview) -> None:
            raws[digest] = bytes(raw)

        places = {d: preferred(self.whole_places(d)) for d in digests}
        wanted_places = [
            (place, [Want(d, -1, partial(keep, d), "")])
            for d, place in places.items()
            if place is not None
        ]
        # What fails is found where all bytes are read.
        if wanted_places:
            self._uncached.read_places(wanted_places)
        return raws

    def _elements(self, contents: Contents) -> None:
        """Find containers without all their elements, as each rank sees them."""
        for rank in contents.ranks():
            for key, entries in contents.trees(rank).items():
                if entries.tops not in self._lacking:
                    self._lacking[entries.tops] = self._lacking_in(contents, entries)
                for inner, damage in self._lacking[entries.tops]:
                    damage.hurts[Hurt(contents.name, f"{rank}/{key}{inner}")] = None

    def _lacking_in(self, contents: Contents, entries: Entries) -> list[tuple[str, Damage]]:
        if not sum(self._subtree(contents, "", top).balance for top in entries.tops):
            return []
        read = partial(self._content, contents, {})
        try:
            lacking = list(self._entry_checks.lacking_elements(entries.items(), read))
        except (DamagedError, UnsupportedFormatError):
            return []  # that was found already
        return [(path, self._add_damage("malformed", "", str(e))) for path, e in lacking]

    def _unknown(self, contents: Contents, path: str, entry: Entry) -> list[Damage]:
        """Return the damages that hurt an entry of which only the payload is known."""
        unknown = self._add_unsupported(f"a newer casnap wrote {unknown_in(entry)}; update casnap")
        chunks, damages = self._try_read(partial(contents.named_chunks, entry.payload), path)
        for digest in chunks or ():
            # The digest alone tells whether the bytes are whole.
            sizes = (place.raw_size for place in self.index.of(digest))
            damages += self._chunk(digest, next(sizes, 0))
        return list(dict.fromkeys([unknown, *damages]))

    def _chunk(self, digest: Digest, nbytes: int) -> list[Damage]:
        self.needed[digest] = nbytes
        places = self.whole_places(digest)
        raw = {place.raw_size for place in places}
        if raw - {nbytes}:
            message = f"a tensor takes it for {nbytes:,} bytes, the index for {min(raw):,}"
            return [self._add_damage("malformed", "", message, digest)]
        damages = self.damages_of(digest, places)
        for base in bases_at(places):
            # A base may be in a pack that is about to be deleted.
            if self.needed.get(base) != nbytes:
                damages = [*damages, *self._chunk(base, nbytes)]
        return damages

    def _try_read(self, attempt: Callable[[], T], label: str) -> tuple[T | None, list[Damage]]:
        """Return the result of reading from the trees, and the damages that this met."""
        self._uncached.asked = []
        result, error, unsupported = None, None, None
        try:
            result = attempt()
        except DamagedError as e:
            error = e
        except UnsupportedFormatError as e:
            unsupported, self._has_unknown_nodes = e, True
        damages = [d for digest in self._uncached.asked for d in self.damages_of(digest)]
        if unsupported is not None and not damages:
            damages = [self._add_unsupported(f"{label}: {unsupported}")]
        if error is not None and not damages:
            damages = [self._add_damage("malformed", "", f"{label}: {error}")]
        return result, damages

    def damages_of(self, digest: Digest, places: list[Place] | None = None) -> list[Damage]:
        """Return the damages that make a needed digest lost, or about to be deleted."""
        if digest in self._damages_of:
            return self._damages_of[digest]
        places = self.whole_places(digest) if places is None else places
        if any(place.pack not in self.root.condemned for place in places):
            if not any(map(is_known, places)):
                packs = [PackId(place.pack) for place in places]
                self._damages_of[digest] = list(map(self._unsupported_in, packs))
            return self._damages_of.get(digest, [])
        # While its bases are looked for, there is none: so a circle of deltas ends.
        self._damages_of[digest] = []
        if not places:
            self.lost.add(digest)
        self._damages_of[digest] = self._condemned(places) if places else self._why_lost(digest)
        return self._damages_of[digest]

    def _condemned(self, places: list[Place]) -> list[Damage]:
        pack = PackId(places[0].pack)
        self.rescued.add(pack)
        if pack not in self._condemned_damage:
            message = "the pack is needed, but condemned: a garbage collector will delete it"
            self._condemned_damage[pack] = self._add_damage("condemned", pack_key(pack), message)
        return [self._condemned_damage[pack]]

    def _why_lost(self, digest: Digest) -> list[Damage]:
        if any(map(self._chains.is_too_long, self._places_there(digest))):
            message = f"its chain has more than {MOST_LINKS} deltas"
            return [self._add_damage("malformed", "", message, digest)]
        of_bases = [
            damage
            for place in self.index.of(digest)
            if isinstance(place, DeltaPlace)
            for damage in self._chunk(Digest(place.base), place.raw_size)
        ]
        if digest in self._blame or of_bases:
            return [*self._blame.get(digest, ()), *of_bases]
        if digest in self.known_lost:
            message = "lost: a repair found no whole copy of it"
            return [self._add_damage("lost", "", message, digest)]
        if self.unreadable:
            return list(self.unreadable.values())
        return [self._add_damage("missing", "", "no pack of the index holds it", digest)]


def _copy_name(commit: bytes) -> str:
    """Return what an unfinished copy is called in damages."""
    return f"the unfinished copy {commit.hex()}"


def _name_of(key: str, count: int) -> str:
    """Return the name of a leaf: its first key, and how many more it has."""
    return key if count == 1 else f"{key} and {count - 1:,} more"
