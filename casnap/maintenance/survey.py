"""Surveying a whole store: every object is read, and every damage named with what it hurts.

The survey trusts only the store itself, neither the cache of this host nor hints to places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from casnap.errors import DamagedError
from casnap.format.digest import Digest, split_digests
from casnap.format.entries import Entry, TensorEntry, payload_of
from casnap.format.names import UNFINISHED
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
from casnap.runtime.threads import mapped
from casnap.storage.contents import Contents
from casnap.storage.objects import Objects
from casnap.storage.place_reads import Want, Why
from casnap.storage.tree import Branch, Child, LeafNode, Tree

T = TypeVar("T")
_LOOKS = 5
# On a remote store, nodes of a pack that lie within so many bytes are read together.
_TOGETHER = 4 << 20
_KEPT_BYTES = 32 << 20
# So many packs are read at the same time.
_PACKS_AT_ONCE = 8


class _UncachedObjects(Objects):
    """A store whose nodes are read from packs only, at places that are not known to be bad."""

    def __init__(self, survey: Survey) -> None:
        super().__init__(survey.objects.backend, survey.objects)
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
        found: list[bytes] = []
        # Read all places: each is there in case that another fails.
        for place in self._survey.whole_places(digest):
            want = Want(digest, -1, lambda raw: found.append(bytes(raw)), "")
            for unread in self.read_places([(place, [want])]):
                self._survey.note_bad(digest, place, unread.why)
        if found:
            return found[0]
        raise DamagedError(f"tree node {digest.hex()} is nowhere whole")

    def read_ahead(self, digests: Iterable[bytes]) -> None:
        """On a remote store, read nodes that are needed soon, of several packs at a time.

        With 50 ms a request a check took 1.2 s so, and 8.8 s without it.
        """
        if not self.backend.is_remote:
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
            for _, whole in mapped(self._read_whole, around.values(), _PACKS_AT_ONCE):
                self._kept |= whole
                self._kept_bytes += sum(map(len, whole.values()))

    def _around(self, digest: Digest, places: list[Place]) -> dict[Digest, list[Place]]:
        """Return a node and those beside it in its pack: a commit writes all its nodes into one."""
        first = min(place.offset for place in places)
        near = range(first - _TOGETHER, first + _TOGETHER)
        todo: dict[Digest, list[Place]] = {digest: places}
        for other, place in self._survey.places.of_pack(PackId(places[0].pack)):
            # Each node has two places there.
            if place.offset in near and other not in todo and other not in self._kept:
                todo[other] = self._survey.whole_places(other)
        return {d: where for d, where in todo.items() if d == digest or len(where) > 1}

    def _read_whole(self, todo: dict[Digest, list[Place]]) -> dict[Digest, bytes]:
        """Return the nodes that are whole at all their places."""
        found: dict[Digest, list[bytes]] = {d: [] for d in todo}
        wants = {d: [Want(d, -1, partial(_keep, found[d]), "")] for d in todo}
        self.read_places([(place, wants[d]) for d in todo for place in todo[d]])
        # The rest is read alone, and noted as bad, where it is needed.
        return {
            d: copies[0] for d, copies in found.items() if copies and len(copies) == len(todo[d])
        }


def _keep(copies: list[bytes], raw: memoryview) -> None:
    copies.append(bytes(raw))


class Survey(FileSurvey):
    """Everything that is wrong in a store, with the tensors that it hurts.

    Attributes:
        needed: The digests that snapshots and the table need: the length of a chunk, -1 of a node.
        lost: Needed digests without a whole place.
        known_lost: Digests that the root says are lost.
        rescued: Condemned packs that hold a needed digest which no live pack holds.
        snapshots: How many snapshots there are.
        rejected_names: The names in the table that cannot be ones.
    """

    _only: str | None = None

    def look(self, root: Root) -> None:
        """Start over with a root."""
        self.needed: dict[Digest, int] = {}
        self.lost: set[Digest] = set()
        self.rescued: set[PackId] = set()
        self.snapshots = 0
        self.known_lost = frozenset(split_digests(root.lost))
        self._damages_of: dict[Digest, list[Damage]] = {}
        self._condemned_damage: dict[PackId, Damage] = {}
        self._below: dict[bytes, list[tuple[str, Damage]]] = {}
        self._lists: dict[tuple[object, ...], list[Damage]] = {}
        self._commits: dict[str, bytes] = {}
        self.rejected_names: set[str] = set()
        self._uncached = _UncachedObjects(self)
        super().look(root)

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
            self.narrow(set(self.needed))
        else:
            self.look_at_packs()
        if share is not None:
            self.read_share(share, random.Random(seed))
        if only is not None:
            self.again()
        else:
            self._snapshots()
        # What is missing may have been collected or merged since the survey began.
        for _ in range(_LOOKS):
            if not self.damages or self.objects.newest() == self.root:
                return
            self.again()
        self._drop_outdated()

    def again(self) -> None:
        """Survey the newest root, and keep the bad places that were found before."""
        self.look(self.objects.newest())
        for (digest, place), why in list(self.bad.items()):
            if place in self.places.of(digest):
                self.note_bad(digest, place, why)
        self.look_at_packs()
        self._snapshots()

    def _drop_outdated(self) -> None:
        """Drop the damages of objects that the newest root no longer names."""
        try:
            view = self.objects.view()
            commits = {n: r.commit for n, r in self.objects.table(view.root).items()}
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
        return bool(self.unreadable) or any(self.needed[digest] < 0 for digest in self.lost)

    def note_bad(self, digest: Digest, place: Place, why: Why) -> None:
        """Record that the bytes at a place are not what was written."""
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
        table, damages = self._reading(partial(self._uncached.table, self.root), "the table")
        self._hurt(damages, ALL.snapshot, "")
        if table is None:
            return
        if self._only is not None:
            row, damages = self._reading(partial(table.get, self._only), "the table")
            self._hurt(damages, self._only, "")
            if row is not None:
                self._snapshot(self._only, row)
            return
        self._rows(table, table.children, len(table))
        self.rejected_names = table.rejected
        for name in sorted(table.rejected):
            self.add_damage(
                "malformed",
                "",
                f"the table has a row {name!r:.200}, which cannot be the name of a snapshot, so it "
                "is passed over; `casnap repair` removes it (--yes in a script)",
            )

    def _rows(self, table: Tree[Row], children: list[Child], total: int) -> None:
        """Survey all snapshots below some nodes of the table."""
        self._uncached.read_ahead(digest for _, digest, _ in children)
        for first, digest, count in children:
            node, damages = self._reading(partial(table.node, Digest(digest)), "the table")
            self._hurt(damages, _first_of(first, count), "")
            if isinstance(node, Branch):
                self._rows(table, node.children, total)
            rows = node.items if isinstance(node, LeafNode) else ()
            self._uncached.read_ahead(row.manifest.digest for _, row in rows)
            for name, row in rows:
                self.progress("looking at snapshots", self.snapshots, total)
                self._snapshot(name, row)

    def _snapshot(self, name: str, row: Row) -> None:
        self.snapshots += not name.startswith(UNFINISHED)
        self._commits[name] = row.commit
        contents = Contents(self._uncached, name, row)
        manifest, damages = self._reading(lambda: contents.manifest, name)
        self._hurt(damages, name, "")
        self._hurt(self._reading(lambda: contents.metadata, name)[1], name, "")
        if manifest is None:
            return
        everyone = (manifest.shared, *manifest.ranks.values())
        tops = (top for subtrees in everyone for top in subtrees.values())
        self._uncached.read_ahead(top for top in tops if top not in self._below)
        groups = [("", manifest.shared), *((f"{r}/", k) for r, k in manifest.ranks.items())]
        for rank, subtrees in groups:
            for key, subtree in subtrees.items():
                for inner, damage in self._subtree(contents, key, subtree):
                    damage.hurts[Hurt(name, f"{rank}{key}{inner}")] = None

    def _hurt(self, damages: list[Damage], snapshot: str, path: str) -> None:
        for damage in damages:
            damage.hurts[Hurt(snapshot, path)] = None

    def _subtree(self, contents: Contents, key: str, top: bytes) -> list[tuple[str, Damage]]:
        """Return the damages below a key, by path. A known subtree is not read again."""
        if top in self._below:
            return self._below[top]
        what = f"{contents.name}: {key}"
        load = self._uncached.node
        tree, damages = self._reading(partial(Tree[Entry], Digest(top), load, Entry), what)
        found = [("", damage) for damage in damages]
        children = tree.children if tree is not None else []
        self._uncached.read_ahead(leaf for _, leaf, _ in children if leaf not in self._below)
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
        items, damages = self._reading(partial(tree.leaf, Digest(leaf)), what)
        found = [(entries, damage) for damage in damages]
        for inner, entry in items or ():
            found += [(inner, damage) for damage in self._entry(contents, key + inner, entry)]
        return found

    def _entry(self, contents: Contents, path: str, entry: Entry) -> list[Damage]:
        """Return the damages that hurt an entry. A known list of chunks is not read again."""
        payload = payload_of(entry)
        form = entry.shape if isinstance(entry, TensorEntry) else ()
        same = (payload.digests, payload.depth, payload.nbytes, form)
        if payload.depth and same in self._lists:
            return self._lists[same]
        chunks, damages = self._reading(partial(contents.chunks, path, entry), path)
        for digest, nbytes in chunks or ():
            if self.needed.get(digest) != nbytes or digest in self._damages_of:
                damages += self._chunk(digest, nbytes)
        damages = list(dict.fromkeys(damages))
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

    def _reading(self, read: Callable[[], T], what: str) -> tuple[T | None, list[Damage]]:
        """Return the result of reading from the trees, and the damages that this met."""
        self._uncached.asked = []
        result, error = None, None
        try:
            result = read()
        except DamagedError as e:
            error = e
        damages = [d for digest in self._uncached.asked for d in self.damages_of(digest)]
        if error is not None and not damages:
            damages = [self.add_damage("malformed", "", f"{what}: {error}")]
        return result, damages

    def damages_of(self, digest: Digest, places: list[Place] | None = None) -> list[Damage]:
        """Return the damages that make a needed digest lost, or about to be deleted."""
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
        if pack not in self._condemned_damage:
            why = "the pack is needed, but condemned: a garbage collector will delete it"
            self._condemned_damage[pack] = self.add_damage("condemned", pack_key(pack), why)
        return [self._condemned_damage[pack]]

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
