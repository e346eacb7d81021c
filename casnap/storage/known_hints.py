"""The hints that this host has read: where nodes and chunks of a remote store may lie.

They are kept in the cache, so that a later process finds them beside the nodes. No take believes
them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from casnap.format.digest import Digest
from casnap.format.hints import Hints, decode_hints
from casnap.format.records import Place
from casnap.storage.cache import Cache
from casnap.storage.node_packs import Around

# Begin the notes of the hints of a pack, and of the pack that has hints for a node.
_HINTS, _BEHIND = b"hints", b"hinted by"
_MOST_PACKS, _MOST_NODES = 16, 256


class KnownHints:
    """The hints in the packs whose nodes this process has used lately."""

    def __init__(self) -> None:
        self._packs: OrderedDict[bytes, Hints] = OrderedDict()
        # Nodes that were used, whose hints were not looked for in the cache yet.
        self._used: deque[Digest] = deque(maxlen=_MOST_NODES)
        self._lock = threading.Lock()

    def keep(self, cache: Cache, pack: bytes, around: Around) -> None:
        """Keep the hints of a pack that was read."""
        if around.hints is not None:
            with self._lock:
                self._add(pack, around.hints)
            cache.keep_notes(
                {_HINTS + pack: around.stored, **{_BEHIND + d: pack for d in around.nodes}}
            )

    def use(self, digest: Digest) -> None:
        """Note that a cached node is used: what it names may be looked for next."""
        self._used.append(digest)

    def find(self, cache: Cache, digest: Digest) -> Place | None:
        """Return the hinted place of a digest; None without a hint."""
        with self._lock:
            while self._used:
                pack = cache.note(_BEHIND + self._used.popleft())
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
