"""Compare a live state with a snapshot: hash it as a take does; read only chunks that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from casnap.comparing.changes import Change, Diff
from casnap.comparing.elements import Measure, is_measurable, measured
from casnap.format.digest import Digest, digest_of, split_digests
from casnap.format.entries import (
    INLINE_BYTES,
    ContainerEntry,
    Entry,
    KnownEntry,
    Payload,
    TensorEntry,
    ValueEntry,
    check_known,
    with_payload,
)
from casnap.format.names import component_of, rank_names
from casnap.format.region import Region
from casnap.restore.key_state import entries_seen
from casnap.restore.loading import elements_of, naming, with_item_axis
from casnap.restore.reuse import Candidate, lacking
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.sharded import Shards
from casnap.state.tensors import check_tensor, itemsize_of
from casnap.storage import Contents, Want
from casnap.take.capture import CapturedState, StateSource
from casnap.take.comparison import digests_alone
from casnap.take.manifest import payload_of

_NO_BYTES = Payload(0)


class _TensorPair(NamedTuple):
    """A stored tensor, and the live one of the same path, shape and dtype.

    Attributes:
        path: The path of both.
        old: The stored entry.
        new: The live entry.
        measure: Sums up how their elements differ.
    """

    path: str
    old: TensorEntry
    new: TensorEntry
    measure: Measure


def compare(contents: Contents, source: StateSource, rank: int) -> Diff:
    """Return how a live state differs from a snapshot; write no tensor, and ask no other rank.

    Args:
        contents: The snapshot.
        source: The live state.
        rank: This rank. The state it holds is compared with the state it would restore.

    Raises:
        UnsupportedTypeError: The state cannot be stored, and so not be compared.
        UnsupportedFormatError: Only a newer version can read some entries.
        DamagedError: Stored bytes are missing or damaged.
        DeviceError: A device computes wrong digests.
    """
    chunk_size = contents.store.config.chunk_size
    captured = source.capture(source.keys(), chunk_size, allow_pickle=True)
    with without_torch_modes():
        return _compared(contents, captured, rank)


def _compared(contents: Contents, captured: CapturedState, rank: int) -> Diff:
    components = [span.component for span in captured.spans]
    stored, left_out = _stored(contents, components, rank)
    olds = [stored.get(leaf.path) for leaf in captured.leaves]
    digests = digests_alone(captured, _not_hashed(captured, olds))
    changes = list[Change]()
    pairs = dict[int, _TensorPair]()
    for i, (leaf, old) in enumerate(zip(captured.leaves, olds, strict=True)):
        path, new = leaf.path, captured.inline.get(i, leaf.entry)
        if path.partition("/")[0] not in components:
            continue
        if old is None:
            changes.append(Change(path, "added", None, new, new.payload.nbytes, new.payload.nbytes))
        elif _with_digests(new, digests.get(i)) == old:
            continue
        elif i in captured.inline or not is_measurable(old, new):
            changes += _changes_of_values(path, old, new)
        else:
            assert isinstance(old, TensorEntry)
            assert isinstance(new, TensorEntry)
            twin = pairs.get(captured.same_as.get(i, -1))
            is_tied = twin is not None and twin.old.payload == old.payload
            measure = twin.measure if twin and is_tied else Measure(old, _held(leaf.content, old))
            pairs[i] = _TensorPair(path, old, new, measure)
    contents.store.fetch(lacking(_candidates(contents, captured, digests, pairs)))
    changes += [change for pair in pairs.values() for change in _changes_of(pair)]
    removed = stored.keys() - {leaf.path for leaf in captured.leaves}
    changes += [
        Change(path, "removed", stored[path], None, 0, stored[path].payload.nbytes)
        for path in removed
    ]
    return Diff(sorted(changes, key=lambda change: change.path), left_out)


def _not_hashed(captured: CapturedState, olds: list[Entry | None]) -> Iterator[int]:
    """Yield the numbers of the leaves whose digests are not needed.

    These are leaves without a stored entry of the same length, and sharded tensors.

    Args:
        captured: The live state.
        olds: The stored entry of each leaf, if there is one.
    """
    for i in captured.grids:
        leaf, old = captured.leaves[i], olds[i]
        is_as_long = old is not None and old.payload.nbytes == leaf.entry.payload.nbytes
        if not is_as_long or isinstance(leaf.content, Shards):
            yield i


def _with_digests(entry: KnownEntry, digests: bytes | None) -> KnownEntry:
    """Return an entry with the digests of its chunks, as a take would store it."""
    if digests is None:
        return entry
    return with_payload(entry, payload_of(entry.payload.nbytes, digests, digest_of))


def _stored(
    contents: Contents, components: list[str], rank: int
) -> tuple[dict[str, Entry], list[str]]:
    """Return the entries that this rank would restore, and a text for each key that is left out.

    A key is left out if the app state lacks it, or if the snapshot keeps a part of it for other
    ranks alone.

    Args:
        contents: The snapshot.
        components: The keys of the app state, as path components. This function removes the keys
            that are not compared from the list.
        rank: This rank.

    Returns:
        Path → entry; and a text for each key that is not compared.
    """
    stored, left_out = dict[str, Entry](), list[str]()
    for key in sorted(contents.keys()):
        component = component_of(key)
        if component not in components:
            left_out.append(f"{key} (the app state lacks this key)")
            continue
        entries, of_others = entries_seen(contents, component, rank)
        if of_others:
            # Containers that lack parts here cannot be compared either.
            holders = sorted({holder for ranks in of_others.values() for holder in ranks})
            left_out.append(f"{key} (kept for {rank_names(holders)} alone; this is rank {rank})")
            components.remove(component)
            continue
        stored |= entries
    check_known(contents.label, stored.items())
    return stored, left_out


def _held(content: torch.Tensor | bytes | Shards, entry: TensorEntry) -> int:
    """Return how many elements of a tensor this rank holds."""
    if isinstance(content, Shards):
        return sum(box.numel for box in content.boxes)
    return Region.whole(entry.shape).numel


def _changes_of(pair: _TensorPair) -> Iterator[Change]:
    path, old, new, measure = pair
    found = measure.found
    if found.differing or _form(old) != _form(new):
        nbytes = found.differing * itemsize_of(old)
        yield Change(path, "changed", old, new, nbytes, new.payload.nbytes, found)


def _form(entry: Entry) -> Entry:
    """Return an entry without its bytes and digests, to compare shape, dtype and kind."""
    assert isinstance(entry, TensorEntry | ValueEntry | ContainerEntry)
    return with_payload(entry, _NO_BYTES)


def _changes_of_values(path: str, old: Entry, new: KnownEntry) -> Iterator[Change]:
    """Yield the change between a stored and a live entry, which differ.

    The entries are values, containers or small tensors, or tensors of different shapes or dtypes.

    Args:
        path: The path.
        old: The stored entry.
        new: The live entry.
    """
    nbytes, elements = new.payload.nbytes, None
    if max(old.payload.nbytes, nbytes) <= INLINE_BYTES:
        if old.payload.inline == new.payload.inline and _form(old) == _form(new):
            return
        elements = measured(old, new, old.payload.inline, new.payload.inline)
    changed_bytes = nbytes
    if isinstance(new, TensorEntry) and elements is not None:
        changed_bytes = elements.differing * itemsize_of(new)
    yield Change(path, "changed", old, new, changed_bytes, nbytes, elements)


def _candidates(
    contents: Contents,
    captured: CapturedState,
    digests: Mapping[int, bytes],
    pairs: Mapping[int, _TensorPair],
) -> Iterator[Want | Candidate]:
    """Yield the chunks of the stored tensors of which this rank holds live elements.

    A chunk is read only if its digest differs. If this rank holds only some of its elements, the
    chunk is read in any case, and these elements are compared.

    Args:
        contents: The snapshot.
        captured: The live state.
        digests: Number of the live leaf → the digests of its chunks, unless it is sharded.
        pairs: Number of the live leaf → the pair to compare.
    """
    begun = set[int]()
    for i, pair in pairs.items():
        if id(pair.measure) in begun:
            continue  # a tied tensor is hashed once
        begun.add(id(pair.measure))
        content = captured.leaves[i].content
        assert not isinstance(content, bytes)
        if isinstance(content, Shards):
            parts = list(zip(content.boxes, content.tensors, strict=True))
        else:
            parts = [(Region.whole(pair.old.shape), content)]
        known = split_digests(digests[i]) if i in digests else None
        for box, tensor in parts:
            yield from _candidates_in(contents, pair, box, with_item_axis(pair.new, tensor), known)


def _candidates_in(
    contents: Contents,
    pair: _TensorPair,
    box: Region,
    held: torch.Tensor,
    known: list[Digest] | None,
) -> Iterator[Want | Candidate]:
    """Yield the chunks of a stored tensor that have elements in a box of the live tensor.

    A chunk whose elements all lie in the box is read only if its digest differs.

    Args:
        contents: The snapshot.
        pair: The stored and the live tensor.
        box: The box.
        held: The live elements in it.
        known: The digests of all chunks of the live tensor, if they are known.
    """
    path, old, _, measure = pair
    with naming(contents, path):
        check_tensor(old)
    if not box.numel:
        return
    if old.payload.nbytes <= INLINE_BYTES:
        raw = memoryview(bytearray(old.payload.inline))
        whole = Region.whole(old.shape)
        measure.add(elements_of(old, raw, whole)[box.within(whole)], held)
        return
    cells = contents.cells(path, old)
    digests = split_digests(contents.digests(old.payload, cells, path))

    def want(number: int, cell: Region, common: Region, part: torch.Tensor) -> Want:
        def sink(raw: memoryview) -> None:
            measure.add(elements_of(old, raw, cell)[common.within(cell)], part)

        return Want(digests[number], cells.cell_bytes(number), sink, path)

    for number in cells.covering(box):
        if known is not None and known[number] == digests[number]:
            continue
        cell = cells.region(number)
        common = cell.intersect(box)
        assert common is not None
        part = held[common.within(box)]
        wanted = want(number, cell, common, part)
        is_hashed_here = known is None and common == cell
        yield Candidate(wanted, part, _nothing) if is_hashed_here else wanted


def _nothing() -> None:
    """Do nothing: the callback for a chunk that is equal."""
