"""Save requests for nodes of a remote store: read whole packs of nodes, and keep the hints in them.

A hint says where a node or chunk may be. This host's cache keeps the hints that were read, so that
a later process finds them too. No take relies on a hint.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from casnap.backends.base import Backend
from casnap.errors import BackendError, DamagedError, UnsupportedFormatError
from casnap.format.codec import decompress
from casnap.format.digest import Digest, digest_of
from casnap.format.hints import MOST_HINTS_BYTES, Hints, are_hints, decode_hints
from casnap.format.records import (
    Place,
    Record,
    pack_key,
    read_pack_footer,
)
from casnap.runtime.buffers import PAGE
from casnap.runtime.fork import new_lock
from casnap.storage.lookup.index_cache import IndexCache
from casnap.storage.packs.chunk_reads import is_possible

MOST_HINTED_BYTES = 1 << 20
"""The most bytes of nodes in a pack with hints. A larger pack is not read whole."""
_MOST_BYTES = 4 << 20
# The fewest bytes to read: a request for fewer takes as long.
_LEAST_BYTES = 1 << 20
# The bytes of a pack to expect behind a hinted node: the later nodes of its commit.
_BEHIND = 64 << 10
_MOST_RAW = 64 << 20
# The prefixes of two kinds of notes: the hints of a pack; and the pack that has hints for a node.
_HINTS, _HINTED_BY = b"hints", b"hinted by"
_MOST_PACKS, _MOST_NODES = 16, 256


@dataclass(frozen=True)
class NodePack:
    """The nodes and hints that a read of a pack of nodes has found.

    Attributes:
        nodes: The verified nodes in the pack, and the nodes in its hints, by digest.
        hints: The hints; None if the pack has none.
        hints_form: The encoded hints, as the pack has them.
        is_gone: Whether the pack does not exist.
    """

    nodes: dict[Digest, bytes] = field(default_factory=dict)
    hints: Hints | None = None
    hints_form: bytes = b""
    is_gone: bool = False


def read_node_pack(backend: Backend, hint: Place) -> NodePack:
    """Read the pack of nodes at a hinted place, as a whole. A large pack is not read.

    A commit writes its nodes into one pack, each node twice: first the trees, then the manifest,
    then the table. A root's hint names the top node of the table, which is the last one.

    Args:
        backend: The backend of the store.
        hint: The place of a node, from a root, a row or the hints of a pack.

    Returns:
        The nodes and hints; none if the pack is too large, or cannot be read.
    """
    end = hint.offset + hint.stored_size + _BEHIND
    # The pack has each node twice, and a footer of at most a quarter of these bytes.
    most = max(2 * end + end // 2 + PAGE + MOST_HINTS_BYTES, _LEAST_BYTES)
    if not is_possible(hint) or most > _MOST_BYTES:
        return NodePack()
    content = bytearray(most)
    try:
        [n] = backend.read_into(pack_key(hint.pack), [(0, memoryview(content))])
        records = read_pack_footer(hint.pack, bytes(content[:n])) if n < most else []
    except FileNotFoundError:
        return NodePack(is_gone=True)
    except (DamagedError, BackendError):
        # Reading the node itself will report the error.
        return NodePack()
    nodes = _nodes(memoryview(content)[:n], records)
    hints_digest = next((digest for digest, node in nodes.items() if are_hints(node)), None)
    # No tree needs the hints, so they are not kept among the nodes.
    hints_form = b"" if hints_digest is None else nodes.pop(hints_digest)
    hints = decode_hints(hints_form, hint.pack)
    if hints is None:
        return NodePack(nodes)
    return NodePack({digest_of(node): node for node in hints.nodes} | nodes, hints, hints_form)


def _nodes(content: memoryview, records: list[Record]) -> dict[Digest, bytes]:
    """Return the nodes of a pack that are whole, by digest.

    Args:
        content: The bytes of the pack.
        records: The records in the footer of the pack.
    """
    nodes: dict[Digest, bytes] = {}
    total = 0
    for digest, place in records:
        stop = place.offset + place.stored_size
        if digest in nodes or not is_possible(place) or stop > len(content):
            continue
        total += place.raw_size
        if total > _MOST_RAW:
            break
        try:
            raw = decompress(place.codec, content[place.offset : stop], place.raw_size)
        except (DamagedError, UnsupportedFormatError):
            continue
        if len(raw) == place.raw_size and digest_of(raw) == digest:
            nodes[digest] = bytes(raw)
    return nodes


class KnownHints:
    """The hints of those packs whose nodes this process has used lately."""

    def __init__(self) -> None:
        self._packs: OrderedDict[bytes, Hints] = OrderedDict()
        # Used nodes whose hints were not looked for in the cache yet.
        self._used: deque[Digest] = deque(maxlen=_MOST_NODES)
        self._lock = new_lock()

    def keep(self, cache: IndexCache, pack: bytes, node_pack: NodePack) -> None:
        """Remember the hints of a pack in this object, and write them to this host's cache.

        Args:
            cache: This host's cache.
            pack: The id of the pack.
            node_pack: The nodes and hints of the pack.
        """
        if node_pack.hints is not None:
            with self._lock:
                self._add(pack, node_pack.hints)
            cache.keep_notes(
                {
                    _HINTS + pack: node_pack.hints_form,
                    **{_HINTED_BY + d: pack for d in node_pack.nodes},
                }
            )

    def use(self, digest: Digest) -> None:
        """Note that a cached node was used.

        The chunks and nodes that it names may be needed next.
        """
        self._used.append(digest)

    def find(self, cache: IndexCache, digest: Digest) -> Place | None:
        """Return the hinted place of a chunk or node; None if no kept hints name its digest."""
        with self._lock:
            while self._used:
                pack = cache.note(_HINTED_BY + self._used.popleft())
                if pack is not None and pack not in self._packs:
                    hints = decode_hints(cache.note(_HINTS + pack) or b"", pack)
                    if hints is not None:
                        self._add(pack, hints)
            # The hints that were read last are the most likely ones.
            packs = list(reversed(self._packs.values()))
        places = (hints.find(digest) for hints in packs)
        return next((place for place in places if place is not None), None)

    def _add(self, pack: bytes, hints: Hints) -> None:
        self._packs[pack] = hints
        self._packs.move_to_end(pack)
        if len(self._packs) > _MOST_PACKS:
            self._packs.popitem(last=False)
