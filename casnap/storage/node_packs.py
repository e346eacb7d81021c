"""Reading a whole pack of nodes at once: on a remote store, each node alone would be a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from casnap.backends.base import Backend
from casnap.errors import BackendError, DamagedError, UnavailableError, UnsupportedFormatError
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
from casnap.storage.pack_runs import is_possible

MOST_HINTED_BYTES = 1 << 20
"""A pack of more bytes of nodes has no hints: it is not read whole."""
_MOST_BYTES = 4 << 20
# So much is read in any case: it is one request.
_LEAST_BYTES = 1 << 20
# A pack's bytes behind a hinted node: the later nodes of its commit.
_BEHIND = 64 << 10
_MOST_RAW = 64 << 20


@dataclass(frozen=True)
class Around:
    """What was found in a pack of nodes.

    Attributes:
        nodes: Its nodes, verified, and those that its hints hold.
        hints: Its hints, None if it has none.
        stored: The bytes of the hints.
        is_gone: Whether the pack is not there.
    """

    nodes: dict[Digest, bytes] = field(default_factory=dict)
    hints: Hints | None = None
    stored: bytes = b""
    is_gone: bool = False


def nodes_around(backend: Backend, hint: Place) -> Around:
    """Return the nodes of the pack that a hint names; none if the pack is large.

    A commit writes its nodes into one pack, each twice: first the trees, then the manifest, then
    the table, whose top the hint of a root names.

    Args:
        backend: Where the store lives.
        hint: The place of a node, from a root, a row or the hints of a pack.
    """
    end = hint.offset + hint.stored + _BEHIND
    # Each node lies there twice. The footer is a small part of that.
    most = max(2 * end + end // 2 + PAGE + MOST_HINTS_BYTES, _LEAST_BYTES)
    if not is_possible(hint) or most > _MOST_BYTES:
        return Around()
    content = bytearray(most)
    try:
        [n] = backend.read_into(pack_key(hint.pack), [(0, memoryview(content))])
        records = read_pack_footer(PackId(hint.pack), bytes(content[:n])) if n < most else []
    except UnavailableError:
        raise
    except FileNotFoundError:
        return Around(is_gone=True)
    except (DamagedError, BackendError):
        # The reader of the node itself says what is wrong.
        return Around()
    nodes = _nodes(memoryview(content)[:n], records)
    named = next((digest for digest, node in nodes.items() if are_hints(node)), None)
    # No tree needs it, so it is not kept among the nodes.
    stored = b"" if named is None else nodes.pop(named)
    hints = decode_hints(stored, hint.pack)
    if hints is None:
        return Around(nodes)
    return Around({digest_of(node): node for node in hints.nodes} | nodes, hints, stored)


def _nodes(content: memoryview, records: list[Record]) -> dict[Digest, bytes]:
    """Return the nodes of a pack that are whole."""
    found: dict[Digest, bytes] = {}
    total = 0
    for digest, place in records:
        stop = place.offset + place.stored
        if digest in found or not is_possible(place) or stop > len(content):
            continue
        total += place.raw
        if total > _MOST_RAW:
            break
        try:
            raw = decompress(place.codec, content[place.offset : stop], place.raw)
        except (DamagedError, UnsupportedFormatError):
            continue
        if len(raw) == place.raw and digest_of(raw) == digest:
            found[digest] = bytes(raw)
    return found
