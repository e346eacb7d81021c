"""Survey the trees: find out which nodes and chunks they need, and which entries need these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from casnap.errors import DamagedError, UnsupportedFormatError
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
from casnap.format.records import DeltaPlace, PackId, Place, Root, pack_key
from casnap.format.tree import Branch, Child, Tree
from casnap.maintenance.damage import Damage, Findings
from casnap.maintenance.pack_checks import is_known
from casnap.maintenance.pack_survey import PackSurvey
from casnap.maintenance.uncached_store import UncachedStore
from casnap.storage import Contents, Entries, Repository, Want
from casnap.storage.inspecting import Failure, bases_at, preferred

if TYPE_CHECKING:
    from casnap.maintenance.entry_checks import Read

T = TypeVar("T")
# The most bytes of small chunks of one leaf that are read together.
_KEPT_BYTES = 32 << 20


class Below(NamedTuple):
    """The findings of the survey below a node of a tree.

    Attributes:
        hurts: Pairs of a path and a damage that hurts the entry at that path.
        balance: A sum over the entries, each counted by
            :func:`casnap.maintenance.entry_checks.balance`. Summed over all trees of a key, it
            is 0 if no container of the key lacks an element.
    """

    hurts: list[tuple[str, Damage]]
    balance: int = 0


def leaf_name(key: str, count: int) -> str:
    """Return the name of a node in messages: its first key, and how many more keys it has."""
    return key if count == 1 else f"{key} and {count - 1:,} more"


class TreeSurvey:
    """The nodes and chunks that the trees of a root need, and their damages.

    No node is read twice, however many snapshots share it.

    Args:
        store: The store.
        root: The root.
        packs: The survey that says which places are whole.
        findings: Gets each damage.
        reads: Whether to read and decode values, besides the structure.

    Attributes:
        nodes: The store, whose nodes are read from packs alone.
        needed: Each digest that snapshots and the table need → the length of the chunk; -1 for a
            node.
        lost: Needed digests without a whole place.
        known_lost: Digests that the root says are lost.
        rescued: Condemned packs that hold a needed digest which no live pack holds.
        reads: Whether to read and decode values.
        judges: Whether to check entries beyond their chunks. False while unfinished copies are
            surveyed, whose entries only name chunks.
    """

    def __init__(
        self,
        store: Repository,
        root: Root,
        packs: PackSurvey,
        findings: Findings,
        *,
        reads: bool,
    ) -> None:
        # This loads torch, which an open store and most commands do not need.
        from casnap.maintenance import entry_checks

        self._entry_checks = entry_checks
        self._root = root
        self._packs = packs
        self._findings = findings
        self.needed: dict[Digest, int] = {}
        self.nodes = UncachedStore(store, packs, self.needed, self.note_bad)
        self.lost: set[Digest] = set()
        self.known_lost = frozenset(split_digests(root.lost))
        self.rescued: set[PackId] = set()
        self.reads = reads
        self.judges = True
        self._has_unknown_nodes = False
        # The damages that hurt a needed digest.
        self._damages_of: dict[Digest, list[Damage]] = {}
        self._condemned_damage: dict[PackId, Damage] = {}
        # Findings that are kept: below subtrees and leaves, of lists of chunks, of containers.
        self._below: dict[bytes, Below] = {}
        self._lists: dict[tuple[object, ...], list[Damage]] = {}
        self._lacking: dict[tuple[bytes, ...], list[tuple[str, Damage]]] = {}

    @property
    def is_incomplete(self) -> bool:
        """Whether nodes or segments cannot be read, so that not all needed digests are known."""
        unknown = bool(self._packs.unreadable) or self._has_unknown_nodes
        return unknown or any(self.needed[digest] < 0 for digest in self.lost)

    def note_bad(self, digest: Digest, place: Place, failure: Failure) -> None:
        """Note that the bytes at a place are not the chunk or node with this digest."""
        self._packs.note_bad(digest, place, failure)
        self._damages_of.pop(digest, None)

    def read_ahead(self, tops: Iterable[bytes]) -> None:
        """On a remote store, read together the top nodes of those subtrees not surveyed yet."""
        self.nodes.read_ahead(top for top in tops if top not in self._below)

    def subtree(self, contents: Contents, key: str, top: bytes) -> Below:
        """Survey the subtree of a key; return the damages and the balance of its entries.

        A subtree that was surveyed before is not read again.

        Args:
            contents: The snapshot.
            key: The key.
            top: The digest of the subtree's top node.
        """
        if top in self._below:
            return self._below[top]
        label = f"{contents.name}: {key}"
        load = self.nodes.node
        tree, damages = self.try_read(partial(entry_tree, Digest(top), load), label)
        hurts = [("", damage) for damage in damages]
        below = Below([])
        if tree is not None:
            below = self._nodes(contents, key, tree, tree.children)
        self._below[top] = Below(hurts + below.hurts, below.balance)
        return self._below[top]

    def _nodes(
        self, contents: Contents, key: str, tree: Tree[Entry], children: list[Child]
    ) -> Below:
        """Survey some nodes of a tree; return the damages and the balance of the entries below.

        A node that was surveyed before is not read again.

        Args:
            contents: The snapshot.
            key: The key of the tree.
            tree: The tree.
            children: The nodes.
        """
        self.nodes.read_ahead(node for _, node, _ in children if node not in self._below)
        hurts: list[tuple[str, Damage]] = []
        total = 0
        for inner, node, count in children:
            if node not in self._below:
                self._below[node] = self._node(contents, key, tree, node, leaf_name(inner, count))
            below = self._below[node]
            hurts += below.hurts
            total += below.balance
        return Below(hurts, total)

    def _node(
        self, contents: Contents, key: str, tree: Tree[Entry], digest: bytes, entries: str
    ) -> Below:
        label = f"{contents.name}: {key}"
        node, damages = self.try_read(partial(tree.node, Digest(digest)), label)
        hurts = [(entries, damage) for damage in damages]
        if isinstance(node, Branch):
            below = self._nodes(contents, key, tree, node.children)
            return Below(hurts + below.hurts, below.balance)
        total, size = 0, len(tree)
        if node is not None:
            read = partial(self._content, contents, self._small_contents(node.items))
            for inner, entry in node.items:
                damaged, components = self._entry(contents, key + inner, entry, read)
                if damaged:
                    hurts += [(inner, damage) for damage in damaged]
                if self.reads:
                    total += self._entry_checks.balance(inner, entry, components, size)
        return Below(hurts, total)

    def _entry(
        self, contents: Contents, path: str, entry: Entry, read: Read
    ) -> tuple[list[Damage], Iterable[str]]:
        """Return the damages that hurt an entry, and the path components of its elements.

        Args:
            contents: The snapshot.
            path: The path of the entry.
            entry: The entry.
            read: Reads the bytes of a value or container.
        """
        if unknown_in(entry):
            return self._unknown(contents, path, entry), ()
        assert not isinstance(entry, UnknownEntry)
        if entry.payload.nbytes > INLINE_BYTES or not self.judges:
            damages = self._chunks(contents, path, entry)
            if damages or not self.judges:
                return damages, ()
        try:
            return [], self._entry_checks.check_entry(path, entry, read)
        except DamagedError as e:
            return [self._findings.add("malformed", "", f"{path}: {e}")], ()
        except UnsupportedFormatError as e:
            return [self._findings.add_unsupported(f"{path}: {e}")], ()

    def _chunks(self, contents: Contents, path: str, entry: KnownEntry) -> list[Damage]:
        """Return the damages of an entry's chunks. Each list of chunks is looked at only once."""
        payload = entry.payload
        form = entry.shape if isinstance(entry, TensorEntry) else ()
        content = (payload.digests, payload.depth, payload.nbytes, form)
        if payload.depth and content in self._lists:
            return self._lists[content]
        chunks, damages = self.try_read(partial(contents.chunks, path, entry), path)
        for digest, nbytes in chunks or ():
            if self.needed.get(digest) != nbytes or digest in self._damages_of:
                damages += self._chunk(digest, nbytes)
        damages = list(dict.fromkeys(damages))
        if payload.depth:
            self._lists[content] = damages
        return damages

    def _small_contents(self, items: list[tuple[str, Entry]]) -> dict[Digest, bytes]:
        """Return the chunks of values and specs among some entries; {} unless ``reads`` is set."""
        digests: dict[Digest, None] = {}
        if self.reads:
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
        """Return the bytes of a value or spec; None if values are not read, or a chunk is lost.

        Args:
            contents: The snapshot.
            known: Chunks that were read already.
            path: The path of the entry.
            entry: The entry.
        """
        if entry.payload.nbytes <= INLINE_BYTES:
            return entry.payload.inline
        if not self.reads:
            return None
        digests = [digest for digest, _ in contents.chunks(path, entry)]
        unread = [digest for digest in digests if digest not in known]
        parts = {**known, **self._read_chunks(unread)} if unread else known
        return b"".join(parts[d] for d in digests) if parts.keys() >= set(digests) else None

    def _read_chunks(self, digests: Iterable[Digest]) -> dict[Digest, bytes]:
        """Read some chunks; return those that can be read, by digest."""
        raws: dict[Digest, bytes] = {}

        def keep(digest: Digest, raw: memoryview) -> None:
            raws[digest] = bytes(raw)

        places = {d: preferred(self._packs.whole_places(d)) for d in digests}
        wanted_places = [
            (place, [Want(d, -1, partial(keep, d), "")])
            for d, place in places.items()
            if place is not None
        ]
        # A chunk that fails here is noted where all bytes are read.
        if wanted_places:
            self.nodes.read_places(wanted_places)
        return raws

    def lacking(self, contents: Contents, entries: Entries) -> list[tuple[str, Damage]]:
        """Report the containers that lack elements; return each with its damage.

        Args:
            contents: The snapshot.
            entries: The entries of a key that a rank sees.
        """
        if entries.tops not in self._lacking:
            self._lacking[entries.tops] = self._lacking_in(contents, entries)
        return self._lacking[entries.tops]

    def _lacking_in(self, contents: Contents, entries: Entries) -> list[tuple[str, Damage]]:
        if not sum(self.subtree(contents, "", top).balance for top in entries.tops):
            return []
        read = partial(self._content, contents, {})
        try:
            lacking = list(self._entry_checks.lacking_elements(entries.items(), read))
        except (DamagedError, UnsupportedFormatError):
            return []  # the survey of the trees has found that already
        return [(path, self._findings.add("malformed", "", str(e))) for path, e in lacking]

    def _unknown(self, contents: Contents, path: str, entry: Entry) -> list[Damage]:
        """Return the damages that hurt an entry of an unknown kind. Its chunks are checked."""
        unknown = self._findings.add_unsupported(
            f"a newer casnap wrote {unknown_in(entry)}; update casnap"
        )
        chunks, damages = self.try_read(partial(contents.named_chunks, entry.payload), path)
        for digest in chunks or ():
            # The digest alone tells whether the bytes are whole.
            sizes = (place.raw_size for place in self._packs.index.of(digest))
            damages += self._chunk(digest, next(sizes, 0))
        return list(dict.fromkeys([unknown, *damages]))

    def _chunk(self, digest: Digest, nbytes: int) -> list[Damage]:
        self.needed[digest] = nbytes
        places = self._packs.whole_places(digest)
        raw = {place.raw_size for place in places}
        if raw - {nbytes}:
            message = f"a tensor takes it for {nbytes:,} bytes, the index for {min(raw):,}"
            return [self._findings.add("malformed", "", message, digest)]
        damages = self.damages_of(digest, places)
        for base in bases_at(places):
            # A base may be in a pack that is about to be deleted.
            if self.needed.get(base) != nbytes:
                damages = [*damages, *self._chunk(base, nbytes)]
        return damages

    def try_read(self, attempt: Callable[[], T], label: str) -> tuple[T | None, list[Damage]]:
        """Read something from the trees; collect the damages of all nodes that were read.

        Args:
            attempt: Reads and returns it.
            label: The name of what is read, for messages.

        Returns:
            The result of ``attempt``, or None if it failed; and the damages.
        """
        self.nodes.asked = []
        result, error, unsupported = None, None, None
        try:
            result = attempt()
        except DamagedError as e:
            error = e
        except UnsupportedFormatError as e:
            unsupported, self._has_unknown_nodes = e, True
        damages = [d for digest in self.nodes.asked for d in self.damages_of(digest)]
        if unsupported is not None and not damages:
            damages = [self._findings.add_unsupported(f"{label}: {unsupported}")]
        if error is not None and not damages:
            damages = [self._findings.add("malformed", "", f"{label}: {error}")]
        return result, damages

    def damages_of(self, digest: Digest, places: list[Place] | None = None) -> list[Damage]:
        """Return why a needed chunk or node is lost or about to be deleted, as damages.

        Args:
            digest: The digest.
            places: Its places that are not known to be bad; None to look them up.
        """
        if digest in self._damages_of:
            return self._damages_of[digest]
        places = self._packs.whole_places(digest) if places is None else places
        if any(place.pack not in self._root.condemned for place in places):
            if not any(map(is_known, places)):
                packs = [place.pack for place in places]
                self._damages_of[digest] = list(map(self._packs.unsupported_in, packs))
            return self._damages_of.get(digest, [])
        # While its bases are looked at, a digest has no damages: so a circle of deltas ends.
        self._damages_of[digest] = []
        if not places:
            self.lost.add(digest)
        self._damages_of[digest] = self._condemned(places) if places else self._why_lost(digest)
        return self._damages_of[digest]

    def _condemned(self, places: list[Place]) -> list[Damage]:
        pack = places[0].pack
        self.rescued.add(pack)
        if pack not in self._condemned_damage:
            message = "the pack is needed, but condemned: a garbage collector will delete it"
            self._condemned_damage[pack] = self._findings.add("condemned", pack_key(pack), message)
        return [self._condemned_damage[pack]]

    def _why_lost(self, digest: Digest) -> list[Damage]:
        if self._packs.has_long_chain(digest):
            message = f"its chain has more than {MOST_LINKS} deltas"
            return [self._findings.add("malformed", "", message, digest)]
        of_bases = [
            damage
            for place in self._packs.index.of(digest)
            if isinstance(place, DeltaPlace)
            for damage in self._chunk(Digest(place.base), place.raw_size)
        ]
        of_packs = self._packs.blame(digest)
        if of_packs or of_bases:
            return [*of_packs, *of_bases]
        if digest in self.known_lost:
            message = "lost: a repair found no whole copy of it"
            return [self._findings.add("lost", "", message, digest)]
        if self._packs.unreadable:
            return list(self._packs.unreadable.values())
        return [self._findings.add("missing", "", "no pack of the index holds it", digest)]
