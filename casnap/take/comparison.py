"""What a take of a live state would store, for comparing it with what a snapshot has."""

from __future__ import annotations

from collections.abc import Iterator

from casnap.format.digest import Digest, digest_of
from casnap.format.entries import Entry, Manifest, entry_tree
from casnap.ranks.comm import SingleProcess
from casnap.runtime.threads import Crew, run_shielded
from casnap.storage import Raw
from casnap.take.capture import StateSource
from casnap.take.hashing import Hasher
from casnap.take.manifest import Put, build_manifest
from casnap.take.options import TakeOptions
from casnap.take.ranks.division import divide
from casnap.take.ranks.exchange import Exchange
from casnap.take.staging import Piece, batched


def manifest_of(source: StateSource, chunk_size: int) -> Manifest:
    """Return the manifest that a take by one process would store; write nothing to a store.

    All bytes of the state are hashed.

    Args:
        source: The state.
        chunk_size: The chunk size of the store, in bytes.

    Raises:
        StateError: Something in the state cannot be taken.
    """
    return _hashed(source, chunk_size, digest_of)


def entries_of(source: StateSource, chunk_size: int) -> dict[str, Entry]:
    """Return the entries, by path, that a take by one process would make. All bytes are hashed.

    Args:
        source: The state.
        chunk_size: The chunk size of the store, in bytes.

    Raises:
        StateError: Something in the state cannot be taken.
    """
    nodes = dict[Digest, bytes]()

    def keep(node: bytes) -> Digest:
        digest = digest_of(node)
        nodes[digest] = node
        return digest

    manifest = _hashed(source, chunk_size, keep)
    return {
        key + path: entry
        for key, top in manifest.shared.items()
        for path, entry in entry_tree(Digest(top), nodes.__getitem__).items()
    }


def _hashed(source: StateSource, chunk_size: int, put_node: Put) -> Manifest:
    comm = SingleProcess()
    state = source.capture(source.keys(), chunk_size, allow_pickle=False)
    division = divide(comm, state, source.values, TakeOptions(), chunk_size, 0)
    state.assign(division.plans)
    hasher = Hasher(state, lambda _: _Digester(), None)

    def work(crew: Crew) -> None:
        def batches(nbytes: int) -> Iterator[list[Piece]]:
            return batched(state.pieces(), nbytes)

        if division.is_single_process:
            hasher.hash_all(batches, crew)
        else:
            Exchange(comm, crew, state, division).run(batches, hasher.hash)

    run_shielded(work)
    built = build_manifest(comm, state, division, hasher.digests, put_node, {})
    assert built is not None
    return built[0]


class _Digester:
    """Stands in for a session's writer: it hashes chunks, and stores none."""

    def store(self, raws: list[Raw]) -> list[Digest]:
        """Return the digests of some chunks."""
        return [digest_of(raw) for raw in raws]

    def finish(self) -> None:
        """Do nothing: no chunk waits to be written."""
