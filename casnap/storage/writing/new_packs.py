"""Write chunks, tree nodes, and copies of both into new packs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice

from casnap.format.codec import Codec
from casnap.format.delta import base_of
from casnap.format.digest import Digest
from casnap.format.hints import MOST_HINTS, MOST_HINTS_BYTES, encode_hints, named_in
from casnap.format.records import PackId, Place, Segment
from casnap.runtime.buffers import shared_pool
from casnap.runtime.threads import Crew
from casnap.storage.lookup.node_hints import MOST_HINTED_BYTES
from casnap.storage.packs.pack_writer import (
    CHUNKS,
    NODES,
    PackFiller,
    PackWriter,
    Room,
    moved_place,
)
from casnap.storage.reading.repository import Repository

Find = Callable[[list[Digest]], list[Place | None]]
"""Returns a place, or None, for each digest."""


class NewPacks:
    """The packs that one change writes.

    Args:
        store: The store.
        base_seq: The number of the root that the packs are written under.
        crew: Starts the threads in the background.
        codec: The codec of new chunks and nodes.

    Attributes:
        base_seq: The number of the root that the packs are written under.
        nodes: For each node that :meth:`add_node` has added, its bytes and its place.
    """

    def __init__(self, store: Repository, base_seq: int, crew: Crew, codec: Codec) -> None:
        pool = shared_pool(store.config.chunk_size + (64 << 10))
        folder = os.urandom(1)
        self._chunks, self._nodes = (
            PackWriter(store.backend, base_seq, folder, kind, pool, crew, codec)
            for kind in (CHUNKS, NODES)
        )
        self._node_filler = self._nodes.filler()
        self._copies = (self._chunks.filler(), self._nodes.filler())
        self._claimed: set[Digest] = set()
        # The second lock is held while a thread waits for memory.
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self.base_seq = base_seq
        self.nodes: dict[Digest, tuple[bytes, Place]] = {}

    @property
    def stored_bytes(self) -> int:
        """The stored bytes of the chunks in full packs, and of the nodes that were added."""
        return self._chunks.stored_bytes + sum(p.stored_size for _, p in self.nodes.values())

    def filler(self) -> PackFiller:
        """Return a new filler, by which one thread fills packs of chunks."""
        return self._chunks.filler()

    def claim(self, digests: list[Digest], is_new: list[bool]) -> list[bool]:
        """Claim chunks or nodes for the calling thread. Each can be claimed once.

        Args:
            digests: The digests of the chunks or nodes.
            is_new: For each, whether the store lacks it.

        Returns:
            For each, whether the calling thread must write it.
        """
        claimed = []
        with self._lock:
            for digest, is_lacking in zip(digests, is_new, strict=True):
                claimed.append(is_lacking and digest not in self._claimed)
                if claimed[-1]:
                    self._claimed.add(digest)
        return claimed

    def add_node(self, digest: Digest, node: bytes) -> None:
        """Write a node that was claimed before. Only one thread may call this."""
        self._node_filler.add_known([(digest, node)])
        self.nodes[digest] = (node, self._node_filler.last_place())

    def copy(
        self, digest: Digest, raw: memoryview, *, is_node: bool, is_verified: bool = False
    ) -> None:
        """Write a chunk or node, unless it was claimed before. Any thread may call this.

        Args:
            digest: The digest of the chunk or node.
            raw: The bytes.
            is_node: Whether the bytes are a node.
            is_verified: Whether the bytes were verified, in memory that no other thread writes to.
                If not, they are hashed again in the pack.
        """
        with self._lock:
            if digest in self._claimed:
                return
            self._claimed.add(digest)
        with self._copying:
            filler = self._copies[is_node]
            if is_verified:
                filler.add_verified(digest, raw)
            else:
                filler.add_known([(digest, raw)])

    def copy_stored(
        self, digest: Digest, stored_form: bytes | memoryview, nbytes: int, codec: Codec
    ) -> None:
        """Write a chunk in a stored form, unless it was claimed before. Any thread may call this.

        Args:
            digest: The digest of the chunk.
            stored_form: The stored bytes. The caller has verified that they give the chunk.
            nbytes: The raw length of the chunk.
            codec: The codec of the form.
        """
        base = base_of(stored_form) if codec == Codec.DELTA else None
        if self.claim([digest], [True])[0]:
            with self._copying:
                self._copies[0].add_stored(digest, stored_form, nbytes, codec, base)

    def room(self, nbytes: int, count: int) -> Room | None:
        """Reserve memory in a pack, into which the caller puts copies of chunks.

        Any thread may call this.

        Args:
            nbytes: The bytes of the memory.
            count: The most chunks that the caller puts into the memory.

        Returns:
            The room; None if the chunks must be copied one by one.
        """
        with self._copying:
            room = self._copies[0].room(nbytes, count)
        return room and Room(room.view, partial(self._keep, room))

    def _keep(self, room: Room, chunks: Sequence[tuple[Digest, int, int]]) -> None:
        with self._lock:
            new_chunks = [chunk for chunk in chunks if chunk[0] not in self._claimed]
            self._claimed.update(digest for digest, _, _ in new_chunks)
        room.keep(new_chunks)

    def use(self, codec: Codec) -> None:
        """Use another codec for chunks and nodes that are written from now on."""
        self._chunks.codec = self._nodes.codec = codec

    def finish_chunks(self) -> None:
        """Wait until all chunks and copies are written. Nodes may still be added."""
        for filler in self._copies:
            filler.seal()
        self._chunks.finish()

    def finish(self, find: Find | None = None, upper_nodes: Sequence[bytes] = ()) -> None:
        """Wait until all packs are written.

        Args:
            find: Finds the places of chunks and nodes in earlier packs. If it is given, the last
                pack of nodes gets hints to the chunks and nodes that its nodes name.
            upper_nodes: Nodes of earlier commits whose bytes the hints contain.
        """
        self.finish_chunks()
        self._node_filler.seal(b"" if find is None else self._hints(find, upper_nodes))
        self._nodes.finish()

    def _hints(self, find: Find, upper_nodes: Sequence[bytes]) -> bytes:
        """Return the hints for the open pack of nodes; b"" if the pack is too large for hints."""
        open_pack = self._node_filler.filling
        if open_pack is None or open_pack[1] > MOST_HINTED_BYTES:
            return b""
        places_of = {d: place for d, (_, place) in self.nodes.items()}
        nodes = [node for node, place in self.nodes.values() if place.pack == open_pack[0]]
        # The last nodes are the table and the manifest.
        names = chain.from_iterable(map(named_in, chain(reversed(nodes), upper_nodes)))
        others = (d for d in names if d not in places_of or places_of[d].pack != open_pack[0])
        wanted_digests = dict.fromkeys(islice(others, MOST_HINTS))
        # Reversed: a pack holds a small chunk twice, and its first place must win.
        records = reversed(self._chunks.records)
        places_of |= {d: place for d, place in records if d in wanted_digests}
        unknown = [d for d in wanted_digests if d not in places_of]
        places_of |= {d: place for d, place in zip(unknown, find(unknown), strict=True) if place}
        places = [(d, places_of[d]) for d in wanted_digests if d in places_of]
        hints = encode_hints(places, upper_nodes, open_pack[0])
        while len(hints) > MOST_HINTS_BYTES:
            places = places[: len(places) // 2]
            hints = encode_hints(places, upper_nodes if places else (), open_pack[0])
        return hints

    def move(self, base_seq: int) -> None:
        """Give the packs ids under a newer root, so that no collector deletes them.

        Args:
            base_seq: The number of the newer root.

        Raises:
            FileNotFoundError: A pack is gone.
        """
        new_ids = self._chunks.move(base_seq) | self._nodes.move(base_seq)
        self.nodes = {d: (node, moved_place(p, new_ids)) for d, (node, p) in self.nodes.items()}
        self.base_seq = base_seq

    @property
    def lengths(self) -> dict[PackId, int]:
        """The length of each pack that was written."""
        return self._chunks.lengths | self._nodes.lengths

    def segment(self) -> Segment:
        """Return a segment of all packs that were written."""
        packs = (*self._chunks.packs, *self._nodes.packs)
        return Segment(packs, [*self._chunks.records, *self._nodes.records])

    def close(self) -> None:
        """End the threads, and give the memory back."""
        for filler in (self._node_filler, *self._copies):
            filler.seal()
        # The threads of both writers end here, even if a later step fails.
        for writer in (self._chunks, self._nodes):
            writer.close()

    def delete(self) -> None:
        """Delete the packs from the store. No root may name any of them."""
        for writer in (self._chunks, self._nodes):
            writer.delete_packs()
