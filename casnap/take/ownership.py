"""Which entries are everyone's, and the tree that they and those of each rank make up.

An entry is *global* if it is sharded, declared as replicated, or equal on every rank, which its
digest tells. All else belongs to its rank. Digests of a path go to the path's owner, which knows
what is to be known of it; only finished entries come to rank 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod
from operator import add
from typing import NamedTuple

import msgspec

from casnap.errors import StateError
from casnap.format.digest import DIGEST_SIZE, Digest, digest_of
from casnap.format.entries import (
    INLINE_BYTES,
    INLINE_DIGESTS,
    LIST_DIGESTS,
    BoxedTensorEntry,
    Entry,
    Manifest,
    Payload,
    TensorEntry,
    payload_of,
    with_payload,
)
from casnap.format.records import encode
from casnap.ranks.comm import Comm
from casnap.storage.tree import build
from casnap.take.capture import Capture
from casnap.take.division import OWN_NAMES, Division, owner_of, path_part, said_by_all
from casnap.take.scopes import Scope

Put = Callable[[bytes], Digest]
"""Stores a node and returns its digest."""


class Hashed(NamedTuple):
    """What came of hashing.

    Attributes:
        whole: The digests of leaves that this rank hashed all of, by leaf.
        cells: Of other leaves, the digest of each cell that it hashed, or its bytes where they
            are to stand in the entry.
    """

    whole: dict[int, bytearray]
    cells: dict[int, dict[int, bytes]]


class Agreed(NamedTuple):
    """What rank 0 knows in the end.

    Attributes:
        manifest: The top of the tree.
        logical_bytes: The bytes of all entries, each global one once.
        entries: How many there are.
    """

    manifest: Manifest
    logical_bytes: int
    entries: int


class _Report(msgspec.Struct, array_like=True):
    """What a rank tells the owner of paths: digests of cells, and how open leaves look."""

    cells: list[tuple[bytes, int, bytes]]
    seen: list[tuple[bytes, bytes]]


class _Share(msgspec.Struct, array_like=True):
    """What a rank adds to the tree: entries by key and path below it, and subtrees of its own."""

    entries: dict[str, list[tuple[str, Entry]]]
    subtrees: dict[str, bytes]
    logical_bytes: int
    count: int


def payload_for(nbytes: int, digests: bytes, put: Put) -> Payload:
    """Return a payload of chunks; long lists of digests are stored as nodes of their own.

    So an unchanged tensor costs one comparison.
    """
    depth = 0
    while len(digests) > INLINE_DIGESTS * DIGEST_SIZE:
        step = LIST_DIGESTS * DIGEST_SIZE
        lists = [digests[at : at + step] for at in range(0, len(digests), step)]
        digests, depth = b"".join(map(put, lists)), depth + 1
    return Payload(nbytes, b"", digests, depth)


def entry_of(capture: Capture, hashed: Hashed, leaf: int, put: Put) -> Entry:
    """Return the finished entry of a leaf that this rank knows all of."""
    entry = capture.leaves[leaf].entry
    inline = capture.inline.get(leaf)
    if inline is not None:
        return with_payload(entry, Payload(len(inline), inline))
    digests = hashed.whole[capture.same_as.get(leaf, leaf)]
    return with_payload(entry, payload_for(payload_of(entry).nbytes, bytes(digests), put))


def alone(capture: Capture, hashed: Hashed, put: Put) -> Agreed:
    """Return the tree of a single process: all is everyone's, but random states."""
    top, private = Manifest({}, {"0": {}}), top_of(capture)
    for span in capture.spans:
        entries = {
            capture.leaves[i].path[len(span.component) :]: entry_of(capture, hashed, i, put)
            for i in range(span.start, span.stop)
        }
        (top.ranks["0"] if span.private else top.shared)[span.component] = build(entries, put)
    return Agreed(top, private, len(capture.leaves))


def top_of(capture: Capture) -> int:
    """Return the bytes of all leaves."""
    return sum(payload_of(leaf.entry).nbytes for leaf in capture.leaves)


def agree(
    comm: Comm, capture: Capture, division: Division, hashed: Hashed, put: Put
) -> Agreed | None:
    """Settle whose each entry is, and return the tree on rank 0.

    Raises:
        StateError: Ranks contradict each other.
    """
    scopes, keys = list(division.scopes), division.keys
    asked: list[list[int]] = [[] for _ in range(comm.size)]
    for i, scope in enumerate(scopes):
        if scope is Scope.OPEN:
            asked[owner_of(keys[i], comm.size)].append(i)
    reports = comm.all_to_all(
        [encode(report) for report in _reports(capture, hashed, division, asked)]
    )
    heard = [msgspec.msgpack.decode(report, type=_Report) for report in reports]
    share = _Share({}, {}, 0, 0)
    cells = _gathered(heard)
    for path, entry in _sharded(division, cells, put).items():
        _add(share, path, entry)
    answers = comm.all_to_all(_answers(heard, division, capture))
    for own, answer in zip(asked, answers, strict=True):
        for i, is_global in zip(own, answer, strict=True):
            scopes[i] = Scope.PINNED if is_global else Scope.PRIVATE
            if is_global and owner_of(keys[i], comm.size) == comm.rank:
                _add(share, capture.leaves[i].path, entry_of(capture, hashed, i, put))
    asked_open = {i for own in asked for i in own}
    for i, scope in enumerate(scopes):
        path = capture.leaves[i].path
        mine = owner_of(keys[i], comm.size) == comm.rank
        if scope is Scope.REPLICATED and mine:
            _add(share, path, _replicated(capture, hashed, i, cells.get(keys[i], {}), put))
        elif scope is Scope.PINNED and i not in asked_open and comm.rank == 0:
            _add(share, path, entry_of(capture, hashed, i, put))
    _add_private(share, capture, scopes, hashed, put)
    return _joined(comm.gather(encode(share)), put)


def _reports(
    capture: Capture, hashed: Hashed, division: Division, asked: list[list[int]]
) -> list[_Report]:
    reports = [_Report([], []) for _ in asked]
    for i, by_cell in hashed.cells.items():
        key = division.keys[i]
        cells = reports[owner_of(key, len(asked))].cells
        cells += [(key, first, joined) for first, joined in _runs(by_cell)]
    for report, own in zip(reports, asked, strict=True):
        for i in own:
            look = digest_of(encode(entry_of(capture, hashed, i, digest_of)))
            report.seen.append((division.keys[i], look))
    return reports


def _runs(by_cell: Mapping[int, bytes]) -> Iterable[tuple[int, bytes]]:
    """Yield runs of cells: the first one, and the digests of all."""
    first, run = -1, list[bytes]()
    for cell in sorted(by_cell):
        if run and cell != first + len(run):
            yield first, b"".join(run)
            run = []
        if not run:
            first = cell
        run.append(by_cell[cell])
    if run:
        yield first, b"".join(run)


def _gathered(heard: list[_Report]) -> dict[bytes, dict[int, bytes]]:
    """Return the runs of cells of each path, by first cell."""
    cells: defaultdict[bytes, dict[int, bytes]] = defaultdict(dict)
    for report in heard:
        for key, first, joined in report.cells:
            cells[key][first] = joined
    return cells


def _assembled(path: str, nbytes: int, count: int, runs: dict[int, bytes], put: Put) -> Payload:
    joined = b"".join(runs[first] for first in sorted(runs))
    inline = nbytes <= INLINE_BYTES
    if len(joined) != (nbytes if inline else count * DIGEST_SIZE):
        raise StateError(
            f"{path}: the ranks hashed {len(joined)} bytes of digests for {count} cells"
        )
    return Payload(nbytes, joined) if inline else payload_for(nbytes, joined, put)


def _row_major(entry: Entry) -> Entry:
    """Return an entry with its bytes in it, which stand there row by row, not box by box."""
    if not isinstance(entry, BoxedTensorEntry):
        return entry
    itemsize = entry.data.nbytes // prod(entry.shape)
    content, at = bytearray(entry.data.nbytes), 0
    for offsets, sizes in entry.boxes:
        for index in product(*map(range, offsets, map(add, offsets, sizes))):
            flat = 0
            for i, size in zip(index, entry.shape, strict=True):
                flat = flat * size + i
            content[flat * itemsize : (flat + 1) * itemsize] = entry.data.inline[at : at + itemsize]
            at += itemsize
    payload = Payload(len(content), bytes(content))
    return TensorEntry(entry.dtype, entry.shape, payload, entry.kind, entry.requires_grad)


def _sharded(
    division: Division, cells: Mapping[bytes, dict[int, bytes]], put: Put
) -> dict[str, Entry]:
    """Return the entries of the sharded tensors that this rank is the owner of, by path."""
    entries: dict[str, Entry] = {}
    first: dict[str, list[int]] = {}
    for key, owned in division.owned.items():
        path, nbytes = owned.path, payload_of(owned.entry).nbytes
        payload = _assembled(path, nbytes, owned.cells, cells.get(key, {}), put)
        entry = with_payload(owned.entry, payload)
        if payload.inline:
            entry = _row_major(entry)
        if entries.setdefault(path, entry) != entry:
            raise StateError(
                f"{path} is one tensor on the ranks {first[path]}, and another on the ranks "
                f"{owned.ranks}. {OWN_NAMES}"
            )
        first.setdefault(path, owned.ranks)
    return entries


def _replicated(
    capture: Capture, hashed: Hashed, leaf: int, runs: dict[int, bytes], put: Put
) -> Entry:
    if leaf in capture.inline:
        return entry_of(capture, hashed, leaf, put)
    path, entry, _ = capture.leaves[leaf]
    nbytes, grid = payload_of(entry).nbytes, capture.assigned[leaf].grid
    return with_payload(entry, _assembled(path, nbytes, grid.count, runs, put))


def _answers(heard: list[_Report], division: Division, capture: Capture) -> list[bytes]:
    """Say, for each open leaf of each rank, whether all ranks hold the same."""
    sharded = {path_part(key): owned.path for key, owned in division.owned.items()}
    for rank, report in enumerate(heard):
        for key, _ in report.seen:
            if key in sharded:
                raise StateError(
                    f"{sharded[key]} is sharded, but not on rank {rank}; all ranks "
                    "that have it must hold pieces of it"
                )
    same = said_by_all([report.seen for report in heard])
    return [bytes(same[key] for key, _ in report.seen) for report in heard]


def _add(share: _Share, path: str, entry: Entry) -> None:
    key, slash, inner = path.partition("/")
    share.entries.setdefault(key, []).append((slash + inner, entry))


def _add_private(
    share: _Share, capture: Capture, scopes: list[Scope], hashed: Hashed, put: Put
) -> None:
    for span in capture.spans:
        entries = {}
        for i in range(span.start, span.stop):
            if scopes[i] is Scope.PRIVATE:
                entry = entry_of(capture, hashed, i, put)
                entries[capture.leaves[i].path[len(span.component) :]] = entry
                share.logical_bytes += payload_of(entry).nbytes
        if entries:
            share.subtrees[span.component] = build(entries, put)
            share.count += len(entries)


def _joined(shares: list[memoryview], put: Put) -> Agreed | None:
    """Return, on rank 0, the tree of what all ranks give."""
    if not shares:
        return None
    manifest = Manifest({}, {})
    by_key: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
    logical_bytes = count = 0
    for rank, given in enumerate(shares):
        share = msgspec.msgpack.decode(given, type=_Share)
        manifest.ranks[str(rank)] = share.subtrees
        logical_bytes += share.logical_bytes
        count += share.count
        for key, entries in share.entries.items():
            by_key[key].update(entries)
    for key in sorted(by_key):
        manifest.shared[key] = build(by_key[key], put)
        logical_bytes += sum(payload_of(entry).nbytes for entry in by_key[key].values())
        count += len(by_key[key])
    return Agreed(manifest, logical_bytes, count)
