"""Compute what a take of a live state would store, without storing it.

Callers compare the result with a snapshot or a witness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from casnap.format.digest import Digest, digest_of
from casnap.format.entries import Entry, Manifest
from casnap.format.names import key_of
from casnap.format.records import PackId, Place
from casnap.ranks.comm import Comm, SingleProcess
from casnap.runtime.threads import Crew, python_gc_paused, run_shielded
from casnap.state.device_hash import hasher_of
from casnap.storage import Raw, Repository
from casnap.take import pending as background
from casnap.take.capture import CapturedState, StateSource
from casnap.take.device_asking import Asking
from casnap.take.hashing import Batches, Digests, Hasher
from casnap.take.manifest import KeptNodes, PathDigest, Put, build_manifest, digests_by_path
from casnap.take.options import TakeOptions
from casnap.take.plan import RankPlan
from casnap.take.ranks.agreement import agree
from casnap.take.ranks.division import Division, divide
from casnap.take.ranks.exchange import Exchange
from casnap.take.staging import Piece, batched

_ANYWHERE = Place(PackId(b""), 0, 0, 0, 0)


def manifest_of(source: StateSource, chunk_size: int) -> Manifest:
    """Return the manifest that a take by one process would store; write nothing to a store.

    All bytes of the state are hashed.

    Args:
        source: The state.
        chunk_size: The chunk size of the store, in bytes.

    Raises:
        StateError: Something in the state cannot be taken.
    """
    return _manifest(source, chunk_size, digest_of)


def entries_of(source: StateSource, chunk_size: int) -> dict[str, Entry]:
    """Return the entries, by path, that a take by one process would make. All bytes are hashed.

    Args:
        source: The state.
        chunk_size: The chunk size of the store, in bytes.

    Raises:
        StateError: Something in the state cannot be taken.
    """
    nodes = KeptNodes()
    manifest = _manifest(source, chunk_size, nodes.put)
    return {
        key + path: entry
        for key, top in manifest.shared.items()
        for path, entry in nodes.tree(top).items()
    }


def _manifest(source: StateSource, chunk_size: int, put_node: Put) -> Manifest:
    comm = SingleProcess()
    hashed = _hashed(source, source.keys(), chunk_size, TakeOptions(), comm, 0)
    built = build_manifest(comm, *hashed, put_node, {})
    assert built is not None
    return built.manifest


def digests_of(
    store: Repository, name: str, source: StateSource, options: TakeOptions, comm: Comm
) -> list[PathDigest]:
    """Return a short digest of each path of a state, as a snapshot of it would have; store nothing.

    All ranks call this together, and share the work as in a take. Devices hash their own tensors.

    Args:
        store: The store.
        name: The name in messages to the user; the same on all ranks.
        source: The state of this rank.
        options: How to take it.
        comm: The ranks.

    Returns:
        On rank 0, the paths of all ranks with their digests; on other ranks, an empty list.

    Raises:
        StateError: Something in the state cannot be taken, or the ranks contradict each other.
        DeviceError: A device has computed a wrong digest.
        RankError: Another rank failed, died or hangs.
    """
    config = store.config
    with background.turn:
        background.wait_for_room(config.store_id, name, options, is_alone=comm.size == 1)
        agreed = agree(store, name, source.keys(), options, comm, is_new=False)
        keys = [key_of(component) for component in agreed.keys]
        hashed = _hashed(source, keys, config.chunk_size, options, comm, agreed.seed)
    with python_gc_paused():
        return digests_by_path(comm, *hashed)


class _Hashed(NamedTuple):
    """A state that was hashed: its leaves, how ranks divided the work, and this rank's digests."""

    state: CapturedState
    division: Division
    digests: Digests


def _hashed(
    source: StateSource,
    keys: Sequence[str],
    chunk_size: int,
    options: TakeOptions,
    comm: Comm,
    seed: int,
) -> _Hashed:
    state = source.capture(keys, chunk_size, allow_pickle=options.allow_pickle)
    division = divide(comm, state, source.values, options, chunk_size, seed)
    state.assign(division.plans)
    if division.is_single_process:
        return _Hashed(state, division, _hash_alone(state, options.threads))

    def share(hasher: Hasher, batches: Batches, crew: Crew) -> None:
        Exchange(comm, crew, state, division).run(batches, hasher.hash)

    return _Hashed(state, division, _hash(state, options.threads, share, comm.rank / comm.size))


def _hash_alone(state: CapturedState, threads: int | None) -> Digests:
    # A thread less, where entries hold all bytes.
    return _hash(state, threads, Hasher.hash_all) if state.grids else Digests(state)


def _hash(
    state: CapturedState,
    threads: int | None,
    work: Callable[[Hasher, Batches, Crew], None],
    share: float = 0.0,
) -> Digests:
    """Return the digests of this rank's cells of a state. A device that can hash does so itself.

    Args:
        state: The state.
        threads: The most threads that hash; None for no bound.
        work: Called once, with a hasher and the batches. It must give the hasher all batches.
        share: The fraction of the bytes, from 0 to 1, at which to begin. So ranks with equal
            tensors begin at different ones.
    """
    hasher = Hasher(state, lambda _: _Digester(), None)
    made = {device: hasher_of(device) for device in state.devices}
    hashers = {device: each for device, each in made.items() if each is not None}
    asking = None
    if hashers:
        asking = Asking(state, hashers, lambda digests: [_ANYWHERE] * len(digests), "")

    def batches(nbytes: int) -> Iterator[list[Piece]]:
        pieces = state.pieces(share)
        return batched(pieces if asking is None else asking.unknown(pieces), nbytes)

    run_shielded(lambda crew: work(hasher, batches, crew), threads)
    if asking is not None:
        asking.settle(hasher)
    return hasher.digests


def digests_alone(state: CapturedState, left_out: Iterable[int]) -> Mapping[int, bytes]:
    """Hash leaves of this process's state, without communication with other ranks.

    Args:
        state: The state.
        left_out: The numbers of the leaves not to hash. All sharded leaves must be among them.

    Returns:
        The number of each hashed leaf → the joined digests of its cells. Small leaves, which are
        stored inside their entries, have none.

    Raises:
        DeviceError: A device has computed a wrong digest.
    """
    state.assign({i: RankPlan() for i in left_out})
    digests = _hash_alone(state, None)
    hashed = (i for i in state.grids if i not in state.plans)
    return {i: digests.of_leaf(state.same_as.get(i, i)) for i in hashed}


class _Digester:
    """Stands in for a session's writer: it hashes chunks, and stores none."""

    def store(self, raws: list[Raw]) -> list[Digest]:
        """Return the digests of some chunks."""
        return [digest_of(raw) for raw in raws]

    def finish(self) -> None:
        """Do nothing: no chunk waits to be written."""
