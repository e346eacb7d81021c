"""What is wrong in a store: every object looked at, and every damage with the tensors it hurts.

Nothing is believed but the store itself: neither what is remembered on this host nor a hint.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from casnap.errors import DamagedError
from casnap.format.digest import Digest, split_digests
from casnap.format.entries import BoxedTensorEntry, Boxes, Entry, TensorEntry, payload_of
from casnap.format.records import (
    PackId,
    Place,
    Root,
    Row,
    pack_key,
    segment_key,
)
from casnap.maintenance.damage import ALL, Damage, Hurt
from casnap.maintenance.file_survey import FileSurvey
from casnap.storage.contents import Contents
from casnap.storage.objects import Objects, Want, Why
from casnap.storage.tree import Branch, Child, Leaf, Tree

T = TypeVar("T")
_LOOKS = 5


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


class Survey(FileSurvey):
    """Everything that is wrong in a store, with the tensors that it hurts.

    Attributes:
        needed: What snapshots and the table need, and its length if it is a chunk, else -1.
        lost: What of that is nowhere whole.
        known_lost: What the root says is lost.
        rescued: Condemned packs that hold what is needed and is in no live pack.
        snapshots: How many snapshots there are.
        cuts: Shape → the boxes that hurt tensors of that shape are cut into.
    """

    def look(self, root: Root) -> None:
        """Begin to look at a root."""
        self.needed: dict[Digest, int] = {}
        self.lost: set[Digest] = set()
        self.rescued: set[PackId] = set()
        self.snapshots = 0
        self.cuts: dict[tuple[int, ...], set[Boxes]] = {}
        self.known_lost = frozenset(split_digests(root.lost))
        self._damages_of: dict[Digest, list[Damage]] = {}
        self._of_pack: dict[PackId, Damage] = {}
        self._below: dict[bytes, list[tuple[str, Damage]]] = {}
        self._lists: dict[tuple[object, ...], list[Damage]] = {}
        self._commits: dict[str, bytes] = {}
        self._uncached = _UncachedObjects(self)
        super().look(root)

    def run(self, *, share: float | None = None, seed: int | None = None) -> None:
        """Look at everything.

        Args:
            share: The share of all chunks and nodes to read and verify; None for none of them.
            seed: What the choice follows from, if less than all are read.
        """
        self.look_at_packs()
        if share is not None:
            self.read_share(share, random.Random(seed))
        self._snapshots()
        # What is missing may have been collected, or merged, since we began: look again.
        for _ in range(_LOOKS):
            if not self.damages or self.objects.newest() == self.root:
                return
            self.again()
        self._pass_over_what_went()

    def again(self) -> None:
        """Look at the newest root, in the light of what was read before."""
        self.look(self.objects.newest())
        for (digest, place), why in list(self.bad.items()):
            if place in self.places.of(digest):
                self.note_bad(digest, place, why)
        self.look_at_packs()
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
    def trees_incomplete(self) -> bool:
        """Whether parts of the trees cannot be read, so that what they need is not known."""
        return bool(self.unreadable) or any(self.needed[digest] < 0 for digest in self.lost)

    def note_bad(self, digest: Digest, place: Place, why: Why) -> None:
        """Note that the bytes at a place are not what they were."""
        super().note_bad(digest, place, why)
        self._damages_of.pop(digest, None)

    # --- snapshots ---

    def _snapshots(self) -> None:
        self._walk()
        for damage in self.damages:
            if damage.digest and not damage.hurts:
                if self.whole_places(Digest(bytes.fromhex(damage.digest))):
                    damage.message += "; another copy is whole"
                elif not self.trees_incomplete:
                    damage.message += "; nothing needs it"

    def _walk(self) -> None:
        table, damages = self._asking(partial(self._uncached.table, self.root), "the table")
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
                self.progress("looking at snapshots", self.snapshots, total)
                self._snapshot(name, row)

    def _snapshot(self, name: str, row: Row) -> None:
        self.snapshots += 1
        self._commits[name] = row.commit
        contents = Contents(self._uncached, name, row)
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
        load = self._uncached.node
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
            if self.needed.get(digest) != nbytes or digest in self._damages_of:
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
            return [self.add_damage("malformed", "", message, digest)]
        return self.damages_of(digest, places)

    def _asking(self, ask: Callable[[], T], what: str) -> tuple[T | None, list[Damage]]:
        """Return what somebody reads of the trees, and the damages that were met on the way."""
        self._uncached.asked = []
        answer, error = None, None
        try:
            answer = ask()
        except DamagedError as e:
            error = e
        damages = [d for digest in self._uncached.asked for d in self.damages_of(digest)]
        if error is not None and not damages:
            damages = [self.add_damage("malformed", "", f"{what}: {error}")]
        return answer, damages

    def damages_of(self, digest: Digest, places: list[Place] | None = None) -> list[Damage]:
        """Return the damages because of which a needed digest is not safe."""
        if digest in self._damages_of:
            return self._damages_of[digest]
        places = self.whole_places(digest) if places is None else places
        if any(place.pack not in self.root.condemned for place in places):
            return []
        if not places:
            self.lost.add(digest)
        self._damages_of[digest] = self._condemned(places) if places else self._why_lost(digest)
        return self._damages_of[digest]

    def _condemned(self, places: list[Place]) -> list[Damage]:
        pack = PackId(places[0].pack)
        self.rescued.add(pack)
        if pack not in self._of_pack:
            why = "the pack is needed, but condemned: a garbage collector will delete it"
            self._of_pack[pack] = self.add_damage("condemned", pack_key(pack), why)
        return [self._of_pack[pack]]

    def _why_lost(self, digest: Digest) -> list[Damage]:
        if digest in self.blame:
            return self.blame[digest]
        if digest in self.known_lost:
            why = "known to be lost since an earlier repair"
            return [self.add_damage("lost", "", why, digest)]
        if self.unreadable:
            return list(self.unreadable.values())
        return [self.add_damage("missing", "", "no pack of the index holds it", digest)]


def _first_of(first: str, count: int) -> str:
    return first if count == 1 else f"{first} and {count - 1:,} more"
