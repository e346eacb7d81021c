"""Read nodes as a survey does: from packs alone, and at every place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from casnap.errors import DamagedError, UnsupportedFormatError
from casnap.format.digest import Digest
from casnap.format.records import PackId, Place
from casnap.maintenance.pack_survey import PackSurvey
from casnap.runtime.threads import mapped
from casnap.storage import Repository, Want
from casnap.storage.inspecting import Failure, GivenPlaces, Reason

# On a remote store, nodes of a pack that lie within this many bytes are read together.
_TOGETHER = 4 << 20
_KEPT_BYTES = 32 << 20
# How many bytes of nodes are read at the same time, and a little more.
_READ_BYTES = 16 << 20


class UncachedStore(Repository):
    """A store whose nodes are read from packs only, not from the cache or by hints.

    Places that are known to be bad are not read.

    Args:
        store: The store.
        packs: The survey that says which places are not known to be bad.
        needed: Gets each node that is asked for, with -1 for its length.
        note_bad: Called with a node, its place, and why it is not whole there.

    Attributes:
        asked: The nodes that were asked for since the caller last emptied this list.
    """

    def __init__(
        self,
        store: Repository,
        packs: PackSurvey,
        needed: dict[Digest, int],
        note_bad: Callable[[Digest, Place, Failure], None],
    ) -> None:
        super().__init__(store.backend, store.config, GivenPlaces(store.lookup, packs.whole_places))
        self._packs = packs
        self._needed = needed
        self._note_bad = note_bad
        self.asked: list[Digest] = []
        # Nodes that were read with their neighbours, and are whole at all their places.
        self._kept: dict[Digest, bytes] = {}
        self._kept_bytes = 0

    def node(self, digest: Digest, hint: Place | None = None) -> bytes:
        """Read a node at all its places, verify it, and note that it is needed.

        Raises:
            DamagedError: No place has it whole.
            UnsupportedFormatError: It is stored with a codec that this version does not know.
        """
        self.asked.append(digest)
        self._needed[digest] = -1
        self.read_ahead([digest])
        if digest in self._kept:
            return self._kept[digest]
        copies: list[bytes] = []
        codecs: list[int] = []
        want = Want(digest, -1, lambda raw: copies.append(bytes(raw)), "")
        # Read all places: each is there in case another one fails.
        for place in self._packs.whole_places(digest):
            for unread in self.read_places([(place, [want])]):
                if unread.failure.reason is Reason.UNSUPPORTED:
                    codecs.append(place.codec)
                else:
                    self._note_bad(digest, place, unread.failure)
        if copies:
            return copies[0]
        if codecs:
            raise UnsupportedFormatError(
                f"tree node {digest.hex()} is stored with codec {codecs[0]}"
            )
        raise DamagedError(f"tree node {digest.hex()} is nowhere whole")

    def read_ahead(self, digests: Iterable[bytes]) -> None:
        """On a remote store, read nodes that are needed soon, from several packs at a time.

        With 50 ms a request, a check took 1.2 s with this, and 8.8 s without.
        """
        if not self.backend.costs.waiting:
            return
        pending = deque(Digest(d) for d in dict.fromkeys(digests) if d not in self._kept)
        if pending and self._kept_bytes > _KEPT_BYTES:
            self._kept, self._kept_bytes = {}, 0
        while pending and self._kept_bytes <= _KEPT_BYTES:
            around: dict[PackId, dict[Digest, list[Place]]] = {}
            nbytes = 0
            while pending and nbytes < _READ_BYTES:
                digest = pending.popleft()
                places = self._packs.whole_places(digest)
                if digest not in self._kept and places and places[0].pack not in around:
                    around[places[0].pack] = found = self._around(digest, places)
                    nbytes += sum(place.raw_size for copies in found.values() for place in copies)
            for _, content in mapped(self._read_whole, around.values(), self.backend.in_flight):
                self._kept |= content
                self._kept_bytes += sum(map(len, content.values()))

    def _around(self, digest: Digest, places: list[Place]) -> dict[Digest, list[Place]]:
        """Return the places of a node, and of its neighbours in the pack.

        A commit writes all its nodes into one pack, so the neighbours are needed soon.
        """
        start = min(place.offset for place in places)
        near = range(start - _TOGETHER, start + _TOGETHER)
        todo: dict[Digest, list[Place]] = {digest: places}
        for neighbour, place in self._packs.index.of_pack(places[0].pack):
            # Each node has two places there.
            if place.offset in near and neighbour not in todo and neighbour not in self._kept:
                todo[neighbour] = self._packs.whole_places(neighbour)
        return {d: copies for d, copies in todo.items() if d == digest or len(copies) > 1}

    def _read_whole(self, todo: dict[Digest, list[Place]]) -> dict[Digest, bytes]:
        """Read nodes; return those that are whole at all their places.

        Args:
            todo: Each node → its places.
        """
        copies: dict[Digest, list[bytes]] = {d: [] for d in todo}

        def keep(digest: Digest, raw: memoryview) -> None:
            copies[digest].append(bytes(raw))

        wants = {d: [Want(d, -1, partial(keep, d), "")] for d in todo}
        self.read_places([(place, wants[d]) for d in todo for place in todo[d]])
        # The other nodes are read alone where they are needed, and noted as bad.
        return {d: raws[0] for d, raws in copies.items() if raws and len(raws) == len(todo[d])}
