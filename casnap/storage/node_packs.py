"""Reading a whole pack of nodes at once: on a remote store, each node alone would be a request."""

from __future__ import annotations

from casnap.backends.base import Backend
from casnap.errors import BackendError, DamagedError, UnavailableError, UnsupportedFormatError
from casnap.format.codec import decompress
from casnap.format.digest import Digest, digest_of
from casnap.format.records import PackId, Place, pack_key, read_pack_footer
from casnap.runtime.buffers import PAGE
from casnap.storage.pack_runs import is_possible

_MOST_BYTES = 4 << 20
# What of a pack lies behind a node that was hinted at: the later nodes of its commit.
_BEHIND = 64 << 10
_MOST_RAW = 64 << 20


def nodes_around(backend: Backend, hint: Place) -> list[tuple[Digest, bytes]]:
    """Return the nodes of the pack that a hint names, verified; none if the pack is large.

    A commit writes its nodes into one pack, each twice: first the trees, then the manifest, then
    the table, whose top the hint of a root names.

    Args:
        backend: Where the store lives.
        hint: The place of a node, from a root or a row.
    """
    end = hint.offset + hint.stored + _BEHIND
    # Each node lies there twice. The footer is a small part of that.
    most = 2 * end + end // 2 + PAGE
    if not is_possible(hint) or most > _MOST_BYTES:
        return []
    content = bytearray(most)
    try:
        [n] = backend.read_into(pack_key(hint.pack), [(0, memoryview(content))])
        records = read_pack_footer(PackId(hint.pack), bytes(content[:n])) if n < most else []
    except UnavailableError:
        raise
    except (FileNotFoundError, DamagedError, BackendError):
        # Whoever reads the node itself says what is wrong.
        return []
    found: dict[Digest, bytes] = {}
    total = 0
    for digest, place in records:
        stop = place.offset + place.stored
        if digest in found or not is_possible(place) or stop > n:
            continue
        total += place.raw
        if total > _MOST_RAW:
            break
        try:
            raw = decompress(place.codec, memoryview(content)[place.offset : stop], place.raw)
        except (DamagedError, UnsupportedFormatError):
            continue
        if len(raw) == place.raw and digest_of(raw) == digest:
            found[digest] = bytes(raw)
    return list(found.items())
