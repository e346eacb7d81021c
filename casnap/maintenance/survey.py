"""What is wrong in a store: every object looked at, and every damage with the tensors it hurts.

Nothing is believed but the store itself: neither what is remembered on this host nor a hint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from casnap.errors import BackendError, DamagedError, ExhaustedError
from casnap.format.digest import Digest, split_digests
from casnap.format.entries import BoxedTensorEntry, Boxes, Entry, TensorEntry, payload_of
from casnap.format.records import (
    FOOTER_RECORD_SIZE,
    PACK_TAIL_SIZE,
    PackId,
    Place,
    Record,
    Root,
    Row,
    SegmentId,
    SegmentRef,
    merged_segment,
    pack_key,
    segment_key,
)
from casnap.maintenance.damage import ALL, KINDS, READ_ERRORS, Damage, Hurt, kind_and_message
from casnap.maintenance.places import Places, bad_records, can_lie_at, read_footer
from casnap.runtime.progress import Progress
from casnap.storage.contents import Contents
from casnap.storage.objects import Objects, Reason, Want, Why
from casnap.storage.tree import Branch, Child, Leaf, Tree

T = TypeVar("T")
_LOOKS = 5
_ROOT_ADVICE = (
    "It is the newest root, so nothing else can be looked at. Restore this file from a backup; "
    "never delete it, since the root before it would be taken for the newest one"
)


class _UncachedObjects(Objects):
    """A store whose nodes are read from its packs alone, at places that are not known as bad."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey.objects.backend, survey.objects)
        self._survey = survey
        self.asked: list[Digest] = []

    def node(self, digest: Digest, hint: Place | None = None) -> bytes:
        """Return a node, verified, and note that it was needed."""
        self.asked.append(digest)
        self._survey.needed[digest] = -1
        found: list[bytes] = []
        # At all of them, for each is there in case that another fails.
        for place in self._survey.whole_places(digest):
            want = Want(digest, -1, lambda raw: found.append(bytes(raw)), "")
            for unread in self.read_places([(place, [want])]):
                self._survey.note_bad(digest, place, unread.why)
        if found:
            return found[0]
        raise DamagedError(f"tree node {digest.hex()} is nowhere whole")


class Survey:
    """A look at a store as its newest root has it.

    Args:
        objects: The store.
        progress: Told what is being looked at; of what is read, bytes.

    Raises:
        DamagedError: The newest root cannot be read.

    Attributes:
        root: The root.
        listing: What its readable segments list.
        unreadable: Its other segments.
        damages: What is wrong.
        hurt_packs: Packs of which anything is wrong.
        needed: What snapshots and the table need, and its length if it is a chunk, else -1.
        lost: What of that is nowhere whole.
        known_lost: What the root says is lost.
        rescued: Condemned packs that hold what is needed and is in no live pack.
        snapshots: How many snapshots there are.
        cuts: Shape → the boxes that hurt tensors of that shape are cut into.
    """

    root: Root

    def __init__(self, objects: Objects, progress: Progress | None = None) -> None:
        self.objects = objects
        self._bad: dict[Record, Why] = {}
        self.read_bytes = 0
        self._tell = progress or (lambda what, done, total: None)
        try:
            root = objects.newest()
        except DamagedError as e:
            raise DamagedError(f"{e}. {_ROOT_ADVICE}") from e
        self._look(root)

    def _look(self, root: Root) -> None:
        self.root = root
        self.damages: list[Damage] = []
        self.hurt_packs: set[PackId] = set()
        self.unreadable: dict[SegmentRef, Damage] = {}
        self.needed: dict[Digest, int] = {}
        self.lost: set[Digest] = set()
        self.rescued: set[PackId] = set()
        self.snapshots = 0
        self.cuts: dict[tuple[int, ...], set[Boxes]] = {}
        self.known_lost = frozenset(split_digests(root.lost))
        self._gone: set[PackId] = set()
        self._cut: set[Record] = set()
        self._blame: dict[Digest, list[Damage]] = {}
        self._troubles: dict[Digest, list[Damage]] = {}
        self._of_pack: dict[PackId, Damage] = {}
        self._below: dict[bytes, list[tuple[str, Damage]]] = {}
        self._lists: dict[tuple[object, ...], list[Damage]] = {}
        self._commits: dict[str, bytes] = {}
        self._direct = _UncachedObjects(self)
        self.places = Places(self._segments())

    def run(self, *, share: float | None = None, seed: int | None = None) -> None:
        """Look at everything.

        Args:
            share: The share of all chunks and nodes to read and verify; None for none of them.
            seed: What the choice follows from, if less than all are read.
        """
        self._packs()
        if share is not None:
            self._read(share, random.Random(seed))
        self._snapshots()
        # What is missing may have been collected, or merged, since we began: look again.
        for _ in range(_LOOKS):
            if not self.damages or self.objects.newest() == self.root:
                return
            self.again()
        self._pass_over_what_went()

    def again(self) -> None:
        """Look at the newest root, in the light of what was read before."""
        self._look(self.objects.newest())
        for (digest, place), why in list(self._bad.items()):
            if place in self.places.of(digest):
                self.note_bad(digest, place, why)
        self._packs()
        self._snapshots()

    def _pass_over_what_went(self) -> None:
        """Keep only the damages of what the newest root, which is younger than the look, has."""
        try:
            view = self.objects.view()
            commits = {n: r.commit for n, r in self.objects.table(view.root).items()}
        except DamagedError:
            return
        keys = {pack_key(pack) for pack in view.packs}
        keys |= {segment_key(ref.id) for ref in view.root.segments}

        def went(hurt: Hurt) -> bool:
            # The table as a whole can be read now, but of a part of it nothing is known.
            before = self._commits.get(hurt.snapshot)
            return hurt == ALL or (before is not None and commits.get(hurt.snapshot) != before)

        if view.root != self.root:
            self.damages = [
                damage
                for damage in self.damages
                if damage.object in keys
                or (not damage.object and not (damage.hurts and all(map(went, damage.hurts))))
            ]

    @property
    def hidden(self) -> bool:
        """Whether parts of the trees cannot be read, so that what they need is not known."""
        return bool(self.unreadable) or any(self.needed[digest] < 0 for digest in self.lost)

    def whole_places(self, digest: Digest) -> list[Place]:
        """Return the places of a digest that are not known as bad."""
        places = self.places.of(digest)
        return [place for place in places if self.is_whole(digest, place)]

    def is_whole(self, digest: Digest, place: Place) -> bool:
        """Whether nothing bad is known of a place."""
        record = (digest, place)
        return place.pack not in self._gone and record not in self._cut and record not in self._bad

    def note_bad(self, digest: Digest, place: Place, why: Why) -> None:
        """Note that the bytes at a place are not what they were."""
        self._bad[digest, place] = why
        pack = PackId(place.pack)
        damage = self._damage(
            KINDS[why.reason], pack_key(pack), f"at byte {place.offset:,}: {why}", digest
        )
        self.hurt_packs.add(pack)
        self._blame.setdefault(digest, []).append(damage)
        self._troubles.pop(digest, None)

    def _damage(self, kind: str, key: str, message: str, digest: bytes = b"") -> Damage:
        damage = Damage(kind, key, message, digest.hex())
        self.damages.append(damage)
        return damage

    # --- segments ---

    def _segments(self) -> Iterator[tuple[bytes, str]]:
        segments = self.root.segments
        for done, ref in enumerate(segments):
            self._tell("reading the index", done, len(segments))
            key = segment_key(SegmentId(ref.id))
            try:
                yield self._read_segment(ref, key), key
            except READ_ERRORS as e:
                kind, why = kind_and_message(e, "an index segment")
                damage = self.unreadable[ref] = self._damage(kind, key, why)
                # Until it is replaced no index can be read, though what it lists may be whole.
                damage.hurts[ALL] = None

    def _read_segment(self, ref: SegmentRef, key: str) -> bytes:
        content = self.objects.backend.read(key)
        if merged_segment([(content, key)])[2] != ref.count:
            raise DamagedError(f"{key} is another index segment than the root says")
        return content

    # --- packs ---

    def _packs(self) -> None:
        packs = self.places.packs
        for done, pack in enumerate(packs):
            self._tell("looking at packs", done, len(packs))
            try:
                self._pack(pack)
            except FileNotFoundError:
                self._lose_pack(pack, "missing", "the pack is missing")
            except ExhaustedError:
                raise
            except BackendError as e:
                self._lose_pack(pack, "unreadable", f"the pack cannot be read: {e}")

    def _pack(self, pack: PackId) -> None:
        records = self.places.of_pack(pack)
        backend = self.objects.backend
        size = backend.size(pack_key(pack))
        end = max((place.offset + place.stored for _, place in records), default=0)
        whole = end + len(records) * FOOTER_RECORD_SIZE + PACK_TAIL_SIZE
        if size < whole:
            damage = self._hurt_pack(
                pack,
                "cut off",
                f"the pack has {size:,} bytes, not the {whole:,} it was written with",
            )
            for digest, place in records:
                if place.offset + place.stored > size:
                    self._cut.add((digest, place))
                    self._blame.setdefault(digest, []).append(damage)
            return
        for digest, place in records:
            if (digest, place) not in self._bad and not can_lie_at(place):
                self.note_bad(digest, place, Why(Reason.IMPOSSIBLE))
        try:
            footer = read_footer(backend, pack, size, len(records))
        except (DamagedError, BackendError) as e:
            if isinstance(e, ExhaustedError) or isinstance(e.__cause__, PermissionError):
                raise
            self._hurt_pack(pack, "changed", f"{e}; its chunks may be whole")
            return
        end = max((place.offset + place.stored for _, place in footer), default=0)
        written = end + len(footer) * FOOTER_RECORD_SIZE + PACK_TAIL_SIZE
        if not set(footer).issuperset(records):
            self._hurt_pack(pack, "changed", "the footer of the pack and the index disagree")
        elif size != written:
            why = f"the pack has {size:,} bytes, not the {written:,} it was written with"
            self._hurt_pack(pack, "changed", why)

    def _hurt_pack(self, pack: PackId, kind: str, message: str) -> Damage:
        self.hurt_packs.add(pack)
        return self._damage(kind, pack_key(pack), message)

    def _lose_pack(self, pack: PackId, kind: str, message: str) -> None:
        damage = self._hurt_pack(pack, kind, message)
        self._gone.add(pack)
        for digest, _ in self.places.of_pack(pack):
            self._blame.setdefault(digest, []).append(damage)

    # --- all bytes ---

    def _read(self, share: float, chosen: random.Random) -> None:
        total = int(self.places.stored_bytes * share)

        def told(nbytes: int) -> None:
            self.read_bytes += nbytes
            self._tell("reading", min(self.read_bytes, total), total)

        records = (r for r in self._to_read() if share >= 1 or chosen.random() < share)
        for (digest, place), why in bad_records(self.objects, records, told):
            self.note_bad(digest, place, why)

    def _to_read(self) -> Iterator[Record]:
        for pack in self.places.packs:
            for digest, place in self.places.of_pack(pack):
                if self.is_whole(digest, place):
                    yield digest, place

    # --- snapshots ---

    def _snapshots(self) -> None:
        self._walk()
        for damage in self.damages:
            if damage.digest and not damage.hurts:
                if self.whole_places(Digest(bytes.fromhex(damage.digest))):
                    damage.message += "; another copy is whole"
                elif not self.hidden:
                    damage.message += "; nothing needs it"

    def _walk(self) -> None:
        table, damages = self._asking(partial(self._direct.table, self.root), "the table")
        self._hurt(damages, ALL.snapshot, "")
        if table is None:
            return
        self._rows(table, table.children, len(table))

    def _rows(self, table: Tree[Row], children: list[Child], total: int) -> None:
        """Look at all snapshots below some nodes of the table."""
        for first, digest, count in children:
            node, damages = self._asking(partial(table.node, Digest(digest)), "the table")
            self._hurt(damages, _first_of(first, count), "")
            if isinstance(node, Branch):
                self._rows(table, node.children, total)
            for name, row in node.items if isinstance(node, Leaf) else ():
                self._tell("looking at snapshots", self.snapshots, total)
                self._snapshot(name, row)

    def _snapshot(self, name: str, row: Row) -> None:
        self.snapshots += 1
        self._commits[name] = row.commit
        contents = Contents(self._direct, name, row)
        manifest, damages = self._asking(lambda: contents.manifest, name)
        self._hurt(damages, name, "")
        self._hurt(self._asking(lambda: contents.metadata, name)[1], name, "")
        if manifest is None:
            return
        groups = [("", manifest.shared), *((f"{r}/", k) for r, k in manifest.ranks.items())]
        for rank, subtrees in groups:
            for key, subtree in subtrees.items():
                for inner, damage in self._subtree(contents, key, subtree):
                    damage.hurts[Hurt(name, f"{rank}{key}{inner}")] = None

    def _hurt(self, damages: list[Damage], snapshot: str, path: str) -> None:
        for damage in damages:
            damage.hurts[Hurt(snapshot, path)] = None

    def _subtree(self, contents: Contents, key: str, top: bytes) -> list[tuple[str, Damage]]:
        """Return what is hurt below a key, by path; a subtree that was seen is not read again."""
        if top in self._below:
            return self._below[top]
        what = f"{contents.name}: {key}"
        load = self._direct.node
        tree, damages = self._asking(partial(Tree[Entry], Digest(top), load, Entry), what)
        found = [("", damage) for damage in damages]
        children = tree.children if tree is not None else []
        for first, leaf, count in children:
            if leaf not in self._below:
                assert tree is not None
                self._below[leaf] = self._leaf(contents, key, tree, leaf, _first_of(first, count))
            found += self._below[leaf]
        self._below[top] = found
        return found

    def _leaf(
        self, contents: Contents, key: str, tree: Tree[Entry], leaf: bytes, entries: str
    ) -> list[tuple[str, Damage]]:
        what = f"{contents.name}: {key}"
        items, damages = self._asking(partial(tree.leaf, Digest(leaf)), what)
        found = [(entries, damage) for damage in damages]
        for inner, entry in items or ():
            found += [(inner, damage) for damage in self._entry(contents, key + inner, entry)]
        return found

    def _entry(self, contents: Contents, path: str, entry: Entry) -> list[Damage]:
        """Return what hurts an entry; lists of chunks that were seen are not looked at again."""
        payload = payload_of(entry)
        boxes = entry.boxes if isinstance(entry, BoxedTensorEntry) else ()
        form = (entry.shape, boxes) if isinstance(entry, TensorEntry) else ()
        same = (payload.digests, payload.depth, payload.nbytes, form)
        if payload.depth and same in self._lists:
            return self._lists[same]
        chunks, damages = self._asking(partial(contents.chunks, path, entry), path)
        for digest, nbytes in chunks or ():
            if self.needed.get(digest) != nbytes or digest in self._troubles:
                damages += self._chunk(digest, nbytes)
        damages = list(dict.fromkeys(damages))
        if damages and chunks and isinstance(entry, BoxedTensorEntry):
            self.cuts.setdefault(entry.shape, set()).add(entry.boxes)
        if payload.depth:
            self._lists[same] = damages
        return damages

    def _chunk(self, digest: Digest, nbytes: int) -> list[Damage]:
        self.needed[digest] = nbytes
        places = self.whole_places(digest)
        raw = {place.raw for place in places}
        if raw - {nbytes}:
            message = f"a tensor takes it for {nbytes:,} bytes, the index for {min(raw):,}"
            return [self._damage("malformed", "", message, digest)]
        return self.trouble(digest, places)

    def _asking(self, ask: Callable[[], T], what: str) -> tuple[T | None, list[Damage]]:
        """Return what somebody reads of the trees, and the damages that were met on the way."""
        self._direct.asked = []
        answer, error = None, None
        try:
            answer = ask()
        except DamagedError as e:
            error = e
        damages = [d for digest in self._direct.asked for d in self.trouble(digest)]
        if error is not None and not damages:
            damages = [self._damage("malformed", "", f"{what}: {error}")]
        return answer, damages

    def trouble(self, digest: Digest, places: list[Place] | None = None) -> list[Damage]:
        """Return the damages because of which a needed digest is not safe."""
        if digest in self._troubles:
            return self._troubles[digest]
        places = self.whole_places(digest) if places is None else places
        if any(place.pack not in self.root.condemned for place in places):
            return []
        if not places:
            self.lost.add(digest)
        self._troubles[digest] = self._condemned(places) if places else self._why_lost(digest)
        return self._troubles[digest]

    def _condemned(self, places: list[Place]) -> list[Damage]:
        pack = PackId(places[0].pack)
        self.rescued.add(pack)
        if pack not in self._of_pack:
            why = "the pack is needed, but condemned: a garbage collector will delete it"
            self._of_pack[pack] = self._damage("condemned", pack_key(pack), why)
        return [self._of_pack[pack]]

    def _why_lost(self, digest: Digest) -> list[Damage]:
        if digest in self._blame:
            return self._blame[digest]
        if digest in self.known_lost:
            why = "known to be lost since an earlier repair"
            return [self._damage("lost", "", why, digest)]
        if self.unreadable:
            return list(self.unreadable.values())
        return [self._damage("missing", "", "no pack of the index holds it", digest)]


def _first_of(first: str, count: int) -> str:
    return first if count == 1 else f"{first} and {count - 1:,} more"
