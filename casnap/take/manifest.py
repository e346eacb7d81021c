"""Build the manifest of a take: decide which entries are global, and make the trees.

An entry is *global* if it is sharded, declared as replicated, or equal on every rank, as digests
show. Each other entry belongs to one rank. Each path has an owner, one of the ranks. All ranks send
the owner the digests of the path's cells, and the owner makes the entry. Rank 0 gets finished
entries only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from casnap.errors import StateError
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.entries import (
    INLINE_BYTES,
    INLINE_DIGESTS,
    LIST_DIGESTS,
    Entry,
    KnownEntry,
    Manifest,
    Payload,
    entry_tree,
    with_payload,
)
from casnap.format.health import TensorHealth
from casnap.format.records import Stats, encode
from casnap.format.tree import Tree, build
from casnap.ranks.comm import Comm
from casnap.state.roles import form_of
from casnap.take.capture import CapturedState, Scope
from casnap.take.hashing import Digests
from casnap.take.health import HealthNotes, Measuring
from casnap.take.ranks.division import Division
from casnap.take.ranks.owners import NAMING_ADVICE, equal_on_all_ranks, owner_of, path_part

PATH_DIGEST_SIZE = 16
"""How many bytes a witness keeps of the digest of each path's entry."""

Put = Callable[[bytes], Digest]
"""Stores a node and returns its digest."""


class _Hashed(msgspec.Struct, array_like=True):
    """A message to an owner, after hashing: the sender's digests for leaves of this owner.

    Attributes:
        cells: The runs of cells that the sender hashed: id of the leaf, first cell, joined digests.
        undecided: The leaves that may be equal on all ranks: id of the leaf, digest of its entry.
        measured: The health of leaves that several ranks hash, as far as the sender has measured
            them: id of the leaf, health of the sender's part.
    """

    cells: list[tuple[bytes, int, bytes]]
    undecided: list[tuple[bytes, bytes]]
    measured: list[tuple[bytes, TensorHealth]] = []


class _Contribution(msgspec.Struct, array_like=True):
    """The message in which a rank tells rank 0 what it adds to the manifest.

    Attributes:
        shared: Global entries, by key of the app state and path below it.
        subtrees: Key → digest of the subtree of the rank's own entries.
        own_bytes: The bytes of the rank's own entries.
        own_entries: The number of the rank's own entries.
        health: The health of the tensors among these entries.
    """

    shared: dict[str, dict[str, KnownEntry]]
    subtrees: dict[str, bytes]
    own_bytes: int = 0
    own_entries: int = 0
    health: HealthNotes = msgspec.field(default_factory=HealthNotes)


class Built(NamedTuple):
    """A manifest, and facts about its entries for the row of the snapshot.

    Attributes:
        manifest: The manifest.
        stats: The number and bytes of its entries, each global entry counted once.
        health: The health of its tensors, and how many are unhealthy.
    """

    manifest: Manifest
    stats: Stats
    health: HealthNotes


def build_manifest(
    comm: Comm,
    state: CapturedState,
    division: Division,
    digests: Digests,
    put_node: Put,
    environment: dict[str, str],
    measuring: Measuring | None = None,
) -> Built | None:
    """Decide which entries are global, and store all trees.

    Args:
        comm: The ranks.
        state: The state of this rank.
        division: How the ranks divided the work.
        digests: The digests that this rank computed.
        put_node: Stores a tree node.
        environment: The environment of the take; only that of rank 0 counts.
        measuring: The measurements of this rank's tensors; None if none were made.

    Returns:
        On rank 0, the manifest with facts about it; None on other ranks.

    Raises:
        StateError: Two ranks name one path, but hold different things there.
    """
    builder = _Builder(comm, state, division, digests, put_node, measuring)
    if not division.is_single_process:
        builder.settle_scopes()
    contributions = comm.gather_messages(builder.contribution(), _Contribution)
    if not contributions:
        return None
    # The keys are in the order of the app state.
    components = [span.component for span in state.spans]
    return joined(contributions, components, put_node, environment)


def joined(
    contributions: list[_Contribution],
    components: Iterable[str],
    put_node: Put,
    environment: dict[str, str],
) -> Built:
    """Build the manifest from the contributions of all ranks; only rank 0 calls this.

    Args:
        contributions: The contribution of each rank.
        components: The keys of the app state, in order.
        put_node: Stores a tree node.
        environment: The environment of the take.
    """
    manifest = Manifest({}, {}, environment=environment)
    health = HealthNotes.joined(contribution.health for contribution in contributions)
    nbytes = sum(contribution.own_bytes for contribution in contributions)
    count = sum(contribution.own_entries for contribution in contributions)
    shared: dict[str, dict[str, KnownEntry]] = {}
    for rank, contribution in enumerate(contributions):
        manifest.ranks[str(rank)] = contribution.subtrees
        for key, of_rank in contribution.shared.items():
            if shared.setdefault(key, of_rank) is not of_rank:
                shared[key].update(of_rank)
    for component in components:
        if of_key := shared.get(component):
            manifest.shared[component] = digest = build(of_key, put_node)
            health.add_record(digest, of_key, health.shared.get(component, {}))
            nbytes += _nbytes(of_key)
            count += len(of_key)
    manifest = msgspec.structs.replace(manifest, health=health.fitting_records)
    return Built(manifest, Stats(logical_bytes=nbytes, entries=count), health)


class KeptNodes(dict[Digest, bytes]):
    """Tree nodes that are kept in memory and not stored, by digest."""

    def put(self, node: bytes) -> Digest:
        """Keep a node; return its digest."""
        self[digest := digest_of(node)] = node
        return digest

    def tree(self, top: bytes) -> Tree[Entry]:
        """Return the tree of a key, given the digest of its top."""
        return entry_tree(Digest(top), self.__getitem__)


PathDigest: TypeAlias = tuple[str, int, bytes]
"""A short digest of what a state holds at a path. A tuple, since it may have a million paths:

- the path; if the entry belongs to one rank, the rank's number and a ``/`` come first
- the form of its entry, as :func:`casnap.state.roles.form_of` gives it
- the first bytes of the digest of its entry
"""


def digests_by_path(
    comm: Comm, state: CapturedState, division: Division, digests: Digests
) -> list[PathDigest]:
    """Return short digests of the paths of all ranks' states, on rank 0; nothing on other ranks.

    Args:
        comm: The ranks.
        state: The state of this rank.
        division: How the ranks divided the work.
        digests: The digests that this rank computed.

    Returns:
        The paths, sorted.
    """
    nodes = KeptNodes()
    builder = _Builder(comm, state, division, digests, nodes.put)
    if not division.is_single_process:
        builder.settle_scopes()
    contribution = builder.contribution()
    own, shared = contribution.subtrees.items(), contribution.shared.items()
    by_prefix: list[tuple[str, Iterable[tuple[str, Entry]]]] = [
        *((f"{comm.rank}/{key}", nodes.tree(top).items()) for key, top in own),
        *((key, entries.items()) for key, entries in shared),
    ]
    size = PATH_DIGEST_SIZE
    found = [
        (prefix + path, form_of(entry), digest_of(encode(entry))[:size])
        for prefix, entries in by_prefix
        for path, entry in entries
    ]
    told = comm.gather_messages(found, list[PathDigest])
    # A container may be shared by several owners.
    return sorted(found if comm.size == 1 else set().union(*told))


class _Builder:
    """The work of one rank to build a manifest."""

    def __init__(
        self,
        comm: Comm,
        state: CapturedState,
        division: Division,
        digests: Digests,
        put_node: Put,
        measuring: Measuring | None = None,
    ) -> None:
        self._comm = comm
        self._state = state
        self._division = division
        self._digests = digests
        self._put_node = put_node
        self._measuring = measuring
        self._scopes = list(division.scopes)
        # For the paths that this rank owns: their cells, and the entries of sharded tensors.
        self._cells: defaultdict[bytes, dict[int, bytes]] = defaultdict(dict)
        self._sharded: dict[str, KnownEntry] = {}
        # What all ranks have measured of leaves that several of them hash.
        self._measured: defaultdict[bytes, list[TensorHealth]] = defaultdict(list)

    def settle_scopes(self) -> None:
        """Send the digests to the owners, and learn from them which undecided leaves are equal."""
        comm, scopes, leaf_ids = self._comm, self._scopes, self._division.leaf_ids
        undecided: list[list[int]] = [[] for _ in range(comm.size)]
        to_decide = Scope.UNDECIDED
        for i, scope in enumerate(scopes):
            if scope is to_decide:
                undecided[owner_of(leaf_ids[i], comm.size)].append(i)
        hashed = comm.exchange_messages(self._hashed(undecided), _Hashed)
        for of_rank in hashed:
            for leaf_id, first_cell, digests in of_rank.cells:
                self._cells[leaf_id][first_cell] = digests
            for leaf_id, found in of_rank.measured:
                self._measured[leaf_id].append(found)
        self._sharded = _sharded_entries(self._division, self._cells, self._put_node)
        answers = comm.all_to_all(_answers(hashed, self._division))
        for leaves, answer in zip(undecided, answers, strict=True):
            for i, is_equal in zip(leaves, answer, strict=True):
                scopes[i] = Scope.EQUAL if is_equal else Scope.PER_RANK

    def _hashed(self, undecided: list[list[int]]) -> list[_Hashed]:
        """Return one message for each owner: the digests that this rank has for the owner's leaves.

        Args:
            undecided: For each owner, the numbers of the undecided leaves that it owns.
        """
        leaf_ids = self._division.leaf_ids
        hashed = [_Hashed([], []) for _ in undecided]
        for i, by_cell in self._digests.shared.items():
            cells = hashed[owner_of(leaf_ids[i], len(hashed))].cells
            cells += [(leaf_ids[i], first_cell, digests) for first_cell, digests in _runs(by_cell)]
            if self._measuring is not None and (parts := self._measuring.parts_of(i)):
                found = leaf_ids[i], TensorHealth.of_parts(parts)
                hashed[owner_of(leaf_ids[i], len(hashed))].measured.append(found)
        for for_owner, leaves in zip(hashed, undecided, strict=True):
            for i in leaves:
                digest = digest_of(encode(self._entry(i, digest_of)))
                for_owner.undecided.append((leaf_ids[i], digest))
        return hashed

    def contribution(self) -> _Contribution:
        """Return what this rank adds to the manifest. Call :meth:`settle_scopes` first."""
        state, scopes = self._state, self._scopes
        contribution = _Contribution({}, {})
        of_rank: dict[str, dict[str, KnownEntry]] = {}
        for path, entry in self._sharded.items():
            key, slash, inner_path = path.partition("/")
            contribution.shared.setdefault(key, {})[slash + inner_path] = entry
        leaves, inline = state.leaves, state.inline
        # Enum attribute access is slow, and there may be a million leaves.
        per_rank, is_sharded = Scope.PER_RANK, Scope.SHARDED
        divided, from_rank_0 = Scope.DIVIDED, Scope.FROM_RANK_0
        rank, size, leaf_ids = self._comm.rank, self._comm.size, self._division.leaf_ids
        for span in state.spans:
            own: dict[str, KnownEntry] = {}
            shared = contribution.shared.setdefault(span.component, {})
            prefix = len(span.component)
            for i in range(span.start, span.stop):
                scope = scopes[i]
                if scope is per_rank:
                    entries_of_key = own
                elif scope is is_sharded:
                    continue
                elif scope is divided or (
                    rank == (0 if scope is from_rank_0 else owner_of(leaf_ids[i], size))
                ):
                    entries_of_key = shared
                else:
                    continue
                # In a state of many entries most are inline, and a call for each takes long.
                entry = inline[i] if i in inline else self._entry(i, self._put_node)
                entries_of_key[leaves[i].path[prefix:]] = entry
            if own:
                of_rank[span.component] = own
                contribution.subtrees[span.component] = build(own, self._put_node)
                contribution.own_bytes += _nbytes(own)
                contribution.own_entries += len(own)
        if self._measuring is not None:
            self._note_health(self._measuring, contribution, of_rank)
        return contribution

    def _note_health(
        self,
        measuring: Measuring,
        contribution: _Contribution,
        of_rank: Mapping[str, Mapping[str, KnownEntry]],
    ) -> None:
        """Add the health of the entries that this rank contributes to its contribution.

        Args:
            measuring: The measurements of this rank's tensors.
            contribution: The contribution, which has its entries already.
            of_rank: The rank's own entries, by key and path below it.
        """
        health, measured = contribution.health, self._measured_by_path(measuring)
        for key, entries in of_rank.items():
            found = measuring.judge(key, entries, measured, health, self._comm.rank)
            health.add_record(contribution.subtrees[key], entries, found)
        for key, entries in contribution.shared.items():
            health.shared[key] = measuring.judge(key, entries, measured, health)

    def _measured_by_path(self, measuring: Measuring) -> dict[str, TensorHealth]:
        """Return the health of the tensors whose entries this rank may make, by path."""
        state, leaf_ids = self._state, self._division.leaf_ids
        parts = {owned.path: self._measured[i] for i, owned in self._division.owned.items()}
        for i in measuring.leaves:
            path = state.leaves[i].path
            if i in state.plans:
                parts[path] = self._measured[leaf_ids[i]]
            else:
                parts[path] = measuring.parts_of(state.same_as.get(i, i))
        return {path: TensorHealth.of_parts(each) for path, each in parts.items() if each}

    def _entry(self, leaf: int, put_node: Put) -> KnownEntry:
        """Return the entry of a leaf that is not sharded, with the digests of its chunks."""
        state = self._state
        if leaf in state.inline:
            return state.inline[leaf]
        entry = state.leaves[leaf].entry
        nbytes = entry.payload.nbytes
        if leaf in state.plans:
            runs = self._cells.get(self._division.leaf_ids[leaf], {})
            path = state.leaves[leaf].path
            payload = _assembled(path, nbytes, state.grids[leaf].count, runs, put_node)
            return with_payload(entry, payload)
        digests = self._digests.of_leaf(state.same_as.get(leaf, leaf))
        return with_payload(entry, payload_of(nbytes, digests, put_node))


# --- the owner of a path ----------------------------------------------------------------------


def _answers(hashed: list[_Hashed], division: Division) -> list[bytes]:
    """Return the owner's answers: for each rank, one byte for each undecided leaf that it sent.

    The byte is 1 if the leaf is equal on all ranks, else 0.

    Raises:
        StateError: A leaf is sharded on one rank, and not on another.
    """
    sharded = {path_part(leaf_id): owned.path for leaf_id, owned in division.owned.items()}
    for rank, of_rank in enumerate(hashed):
        for leaf_id, _ in of_rank.undecided:
            if leaf_id in sharded:
                raise StateError(
                    f"{sharded[leaf_id]} is sharded, but not on rank {rank}; all ranks "
                    "that have it must hold pieces of it"
                )
    equal = equal_on_all_ranks([of_rank.undecided for of_rank in hashed])
    return [bytes(equal[leaf_id] for leaf_id, _ in of_rank.undecided) for of_rank in hashed]


def _sharded_entries(
    division: Division, cells: Mapping[bytes, dict[int, bytes]], put_node: Put
) -> dict[str, KnownEntry]:
    """Return, by path, the entries of the sharded tensors that this rank owns.

    Args:
        division: How the ranks divided the work.
        cells: Id of the leaf → first cell of a run → the run's joined digests.
        put_node: Stores a tree node.

    Raises:
        StateError: Ranks hold different tensors under one path.
    """
    entries: dict[str, KnownEntry] = {}
    first_cells: dict[str, list[int]] = {}
    for leaf_id, owned in division.owned.items():
        path, nbytes = owned.path, owned.entry.payload.nbytes
        payload = _assembled(path, nbytes, owned.cells, cells.get(leaf_id, {}), put_node)
        entry = with_payload(owned.entry, payload)
        if entries.setdefault(path, entry) != entry:
            raise StateError(
                f"{path} is one tensor on the ranks {first_cells[path]}, and another on the ranks "
                f"{owned.ranks}. {NAMING_ADVICE}"
            )
        first_cells.setdefault(path, owned.ranks)
    return entries


def _runs(by_cell: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
    """Join the digests of cells that follow each other.

    Args:
        by_cell: Cell → its digest.

    Yields:
        Runs of cells: the first cell, and the joined digests of all cells of the run.
    """
    first_cell, run = -1, list[bytes]()
    for cell in sorted(by_cell):
        if run and cell != first_cell + len(run):
            yield first_cell, b"".join(run)
            run = []
        if not run:
            first_cell = cell
        run.append(by_cell[cell])
    if run:
        yield first_cell, b"".join(run)


def _assembled(
    path: str, nbytes: int, count: int, runs: dict[int, bytes], put_node: Put
) -> Payload:
    """Return the payload of a tensor whose cells several ranks hashed.

    Args:
        path: The path of the tensor.
        nbytes: The bytes of the tensor.
        count: The number of its cells.
        runs: First cell of a run → the run's joined digests, or the bytes of a small tensor.
        put_node: Stores a tree node.

    Raises:
        StateError: The runs have too few or too many digests.
    """
    joined = b"".join(runs[first_cell] for first_cell in sorted(runs))
    inline = nbytes <= INLINE_BYTES
    if len(joined) != (nbytes if inline else count * DIGEST_SIZE):
        raise StateError(
            f"{path}: the ranks hashed {len(joined)} bytes of digests for {count} cells"
        )
    return Payload(nbytes, joined) if inline else payload_of(nbytes, joined, put_node)


def payload_of(nbytes: int, digests: bytes, put_node: Put) -> Payload:
    """Return a payload with the digests of a tensor's chunks.

    A long list of digests is stored as tree nodes, and the payload holds the digests of the top
    nodes alone. So two equal tensors are compared by a few digests.

    Args:
        nbytes: The bytes of the tensor.
        digests: The digests of all its chunks, joined.
        put_node: Stores a tree node.
    """
    depth = 0
    while len(digests) > INLINE_DIGESTS * DIGEST_SIZE:
        step = LIST_DIGESTS * DIGEST_SIZE
        lists = [digests[at : at + step] for at in range(0, len(digests), step)]
        digests, depth = b"".join(map(put_node, lists)), depth + 1
    return Payload(nbytes, b"", digests, depth)


def _nbytes(entries: Mapping[str, KnownEntry]) -> int:
    return sum(entry.payload.nbytes for entry in entries.values())
