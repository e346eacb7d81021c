"""Fewer requests for nodes of a remote store: whole packs of nodes, and the hints in them.

A hint says where a node or chunk may lie. This host keeps the hints that it has read in the cache,
so that a later process finds them beside the nodes. No take believes them.
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
    PackId,
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
"""A pack of more bytes of nodes has no hints: it is not read whole."""
_MOST_BYTES = 4 << 20
# So much is read in any case: it is one request.
_LEAST_BYTES = 1 << 20
# A pack's bytes behind a hinted node: the later nodes of its commit.
_BEHIND = 64 << 10
_MOST_RAW = 64 << 20
# Begin the notes of the hints of a pack, and of the pack that has hints for a node.
_HINTS, _HINTED_BY = b"hints", b"hinted by"
_MOST_PACKS, _MOST_NODES = 16, 256


@dataclass(frozen=True)
class NodePack:
    """What was found in a pack of nodes.

    Attributes:
        nodes: Its nodes, verified, and those that its hints hold.
        hints: Its hints, None if it has none.
        hints_form: The bytes of the hints.
        is_gone: Whether the pack is not there.
    """

    nodes: dict[Digest, bytes] = field(default_factory=dict)
    hints: Hints | None = None
    hints_form: bytes = b""
    is_gone: bool = False


def read_node_pack(backend: Backend, hint: Place) -> NodePack:
    """Return the nodes of the pack that a hint names; none if the pack is large.

    A commit writes its nodes into one pack, each twice: first the trees, then the manifest, then
    the table, whose top the hint of a root names.

    Args:
        backend: Where the store lives.
        hint: The place of a node, from a root, a row or the hints of a pack.
    """
    end = hint.offset + hint.stored_size + _BEHIND
    # Each node lies there twice. The footer is a small part of that.
    most = max(2 * end + end // 2 + PAGE + MOST_HINTS_BYTES, _LEAST_BYTES)
    if not is_possible(hint) or most > _MOST_BYTES:
        return NodePack()
    content = bytearray(most)
    try:
        [n] = backend.read_into(pack_key(hint.pack), [(0, memoryview(content))])
        records = read_pack_footer(PackId(hint.pack), bytes(content[:n])) if n < most else []
    except FileNotFoundError:
        return NodePack(is_gone=True)
    except (DamagedError, BackendError):
        # The reader of the node itself says what is wrong.
        return NodePack()
    nodes = _nodes(memoryview(content)[:n], records)
    hints_digest = next((digest for digest, node in nodes.items() if are_hints(node)), None)
    # No tree needs it, so it is not kept among the nodes.
    hints_form = b"" if hints_digest is None else nodes.pop(hints_digest)
    hints = decode_hints(hints_form, hint.pack)
    if hints is None:
        return NodePack(nodes)
    return NodePack({digest_of(node): node for node in hints.nodes} | nodes, hints, hints_form)


def _nodes(content: memoryview, records: list[Record]) -> dict[Digest, bytes]:
    """Return the nodes of a pack that are whole."""
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
    """The hints in the packs whose nodes this process has used lately."""

    def __init__(self) -> None:
        self._packs: OrderedDict[bytes, Hints] = OrderedDict()
        # Nodes that were used, whose hints were not looked for in the cache yet.
        self._used: deque[Digest] = deque(maxlen=_MOST_NODES)
        self._lock = new_lock()

    def keep(self, cache: IndexCache, pack: bytes, node_pack: NodePack) -> None:
        """Keep the hints of a pack that was read."""
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
        """Note that a cached node is used: what it names may be looked for next."""
        self._used.append(digest)

    def find(self, cache: IndexCache, digest: Digest) -> Place | None:
        """Return the hinted place of a digest; None without a hint."""
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
