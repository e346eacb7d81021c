"""The mean of snapshots, element by element, as a new snapshot.

Snapshots of one store are cut into the same chunks. So the mean is computed chunk by chunk, in
memory that is bounded, and a chunk that all snapshots share is not written. It is read only to be
measured: once, and if the mean is measured at all.

The mean of an element is summed in the order in which the snapshots are named: ``(x0 + x1 + …) /
n``, or with weights ``x0 * w0 + x1 * w1 + …``, each step rounded to the dtype of the sum. Then it
is cast to the dtype of the tensor. If the weights sum to one, an element with the same bits in all
snapshots stays as it is.

Means of checkpoints: "Averaging Weights Leads to Wider Optima and Better Generalization", Izmailov
et al., 2018. Sums of differences: "Editing Models with Task Arithmetic", Ilharco et al., 2022.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import fsum, isfinite
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch

from casnap.errors import DamagedError
from casnap.format.digest import Digest, split_digests
from casnap.format.entries import INLINE_BYTES, Entry, Manifest, OwnedTree, Payload, with_payload
from casnap.format.health import TensorHealth
from casnap.format.records import THINNED, UNHEALTHY, Row, Stats
from casnap.history.averaging_plan import SUM_DTYPES, TensorToAverage, plan_average
from casnap.history.mean_health import health_of_mean, ignored_by_takes, known_health
from casnap.history.means import Means
from casnap.ranks.comm import SingleProcess
from casnap.runtime.batches import batches
from casnap.runtime.buffers import copy, view_at
from casnap.runtime.progress import ProgressCounter
from casnap.runtime.threads import Crew, SharedItems, cores, run_shielded
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.measuring import measured_pieces
from casnap.state.tensors import TENSOR_DTYPES
from casnap.storage import Contents, ReadOptions, Repository, Session, Want, again
from casnap.take.commit import TakeCommit
from casnap.take.health import HealthNotes
from casnap.take.manifest import payload_of
from casnap.take.metadata import checked_metadata
from casnap.take.options import HealthOptions, TakeOptions
from casnap.take.ranks.agreement import agree

_log = logging.getLogger("casnap")
# About how many bytes of chunks a thread reads from a disk at a time, of all snapshots together.
# They are few, so that they are still in a cache when they are summed.
_STAGED_BYTES = 4 << 20
# As many from a server, by all threads together: enough for large requests, and many under way.
_STAGED_FROM_SERVER = 48 << 20
# The most threads. Each has what it has read, up to twice as much, and a slot for a pack.
_MOST_THREADS = 6
# Chunks begin at multiples of so many bytes, for torch.
_ALIGNED = 64
# The most digests that are looked up at a time.
_BATCH = 1024
# The most names that go into the metadata of a mean, which have little room.
_MOST_NOTED = 400
_EXACT = {torch.float32: torch.float64, torch.complex64: torch.complex128}

_Place: TypeAlias = Sequence[torch.Tensor]
"""Where the chunks of a snapshot are read to, one for each cell."""


@dataclass
class AverageReport:
    """The outcome of an average.

    Attributes:
        name: The name of the new snapshot.
        of: The names of the snapshots that were averaged.
        weights: The weight of each.
        averaged: How many tensors are means.
        equal: How many tensors are equal in all snapshots, so that nothing was computed.
        kept: The path of each tensor that was taken from the last snapshot → why it is no mean.
        new_bytes: The stored bytes that were new to the store.
        seconds: How long it took.
    """

    name: str
    of: list[str]
    weights: list[float]
    averaged: int = 0
    equal: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    new_bytes: int = 0
    seconds: float = 0.0


def notes_of(names: Sequence[str], weights: Sequence[float] | None) -> dict[str, Any]:
    """Return the metadata that say of what a mean was made.

    Args:
        names: The names of the snapshots.
        weights: Their weights; None for equal ones.
    """
    if len(names) > _MOST_NOTED:
        return {"average_of": [names[0], f"… {len(names) - 2:,} more", names[-1]]}
    weighted = {} if weights is None else {"average_weights": list(weights)}
    return {"average_of": list(names), **weighted}


def checked_weights(count: int, weights: Sequence[float] | None) -> list[float] | None:
    """Return the weights of snapshots as floats; None for equal ones.

    Args:
        count: How many snapshots there are.
        weights: A number for each; None for equal weights.

    Raises:
        ValueError: There is no snapshot, there are not as many weights, one is no finite number, or
            their sum is too large.
    """
    if count == 0:
        raise ValueError("an average needs at least one snapshot")
    if weights is None:
        return None
    try:
        checked = [float(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        checked = []
    # Weights whose sum is too large for a float make all elements infinite.
    if len(checked) != count or not isfinite(sum(map(abs, checked))):
        raise ValueError(
            f"weights= has a number for each of the {count} snapshots, with a finite sum; got "
            f"{weights!r:.200}"
        )
    return checked


def moving_weights(count: int, decay: float) -> list[float]:
    """Return the weights of an exponential moving average that begins with the first snapshot.

    Args:
        count: How many snapshots there are.
        decay: The share that the average keeps at each further snapshot, from 0 to 1.

    Raises:
        ValueError: ``decay`` is not from 0 to 1.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"the decay of a moving average is from 0 to 1; got {decay}")
    return [(1 - decay if i else 1.0) * decay ** (count - 1 - i) for i in range(count)]


def average(
    store: Repository,
    sources: Sequence[Contents],
    weights: Sequence[float] | None,
    name: str,
    options: TakeOptions,
    *,
    exact: bool,
) -> AverageReport:
    """Write the mean of snapshots as a new snapshot, in one commit.

    Args:
        store: The store of all snapshots.
        sources: The snapshots. A tensor without a mean is taken from the last one.
        weights: The weight of each snapshot, as :func:`checked_weights` returns them.
        name: The full name of the new snapshot.
        options: The metadata of the new snapshot, whether it replaces one of the same name, and how
            to measure it. It is measured in any case if one of the snapshots was.
        exact: Whether to sum in float64.

    Raises:
        SnapshotExistsError: The name is taken.
        UnhealthyError: A tensor of the mean has NaN or infinite elements, and the options ask for
            this error. Nothing was committed.
        SnapshotNotFoundError: A snapshot was deleted meanwhile, and its chunks were collected.
        StateError: No tensor of weights has one shape and dtype in all snapshots; or the metadata
            hold something that JSON cannot, or take more than 64 KiB.
        DamagedError: A chunk is missing or damaged; nothing was committed.
        FencedError: A collector deleted chunks that the mean needed, several times.
    """
    started = time.monotonic()
    options = replace(options, metadata=checked_metadata(options.metadata or {}))
    keeps_equal = weights is None or abs(fsum(weights) - 1) < 1e-9
    comm = SingleProcess()
    warning = ""

    def write(crew: Crew) -> Row:
        nonlocal warning
        with comm, without_torch_modes():
            codec = agree(store, name, [], options, comm).codec
            with Session(store, crew, codec) as session:
                averaging = _Averaging(
                    sources, weights, session, crew, options, exact=exact, keeps_equal=keeps_equal
                )
                manifest = averaging.write(plan.tensors)
                notes = dict(options.hooks.notes(name))
                if manifest.thinned:
                    notes[THINNED] = True
                if averaging.health is not None and options.health is not None:
                    warning = averaging.health.judgement(name, options.health)
                    notes[UNHEALTHY] = averaging.health.count
                commit = TakeCommit(store, name, options, comm, started, notes)
                last = sources[-1].row.stats
                stats = Stats(logical_bytes=last.logical_bytes, entries=last.entries)
                return commit.lead(session, manifest, stats).row

    with ExitStack() as reading:
        for source in sources:
            reading.enter_context(source.reading())
        if options.health is None and any(source.row.unhealthy is not None for source in sources):
            options = replace(options, health=HealthOptions(ignore=ignored_by_takes(sources)))
        plan = plan_average(sources, keeps_equal=keeps_equal)
        row = again(store, lambda: run_shielded(write, options.threads), f"{name}: the average")
    if warning:
        unhealthy = ", ".join(source.name for source in sources if source.row.unhealthy)
        also = f". There are such elements in {unhealthy:.400}" if unhealthy else ""
        _log.warning("%s%s", warning, also)
    return AverageReport(
        name,
        [source.name for source in sources],
        [1 / len(sources)] * len(sources) if weights is None else list(weights),
        len(plan.tensors),
        plan.equal,
        plan.kept,
        row.stats.new_bytes,
        time.monotonic() - started,
    )


class _Results(NamedTuple):
    """The results for a tensor whose bytes lie in chunks.

    Attributes:
        digests: The digest of each of its chunks.
        health: The number of each cell that was measured → its health.
    """

    digests: list[Digest]
    health: dict[int, TensorHealth]


class _CellToAverage(NamedTuple):
    """A cell of a tensor whose mean is to be computed.

    Attributes:
        tensor: The tensor.
        number: The number of the cell.
        nbytes: Its bytes.
        digests: The digest of its chunk in each snapshot.
        stays: Whether it stays as it is: it is read once, and only measured.
        into: The results for the tensor, which get those of this cell.
    """

    tensor: TensorToAverage
    number: int
    nbytes: int
    digests: tuple[Digest, ...]
    stays: bool
    into: _Results


class _Averaging:
    """Writes the chunks and the tree of the mean.

    Args:
        sources: The snapshots.
        weights: Their weights; None for equal ones.
        session: The session to write with.
        crew: The threads of the session. They fail at an interrupt.
        options: The options of the new snapshot.
        exact: Whether to sum in float64.
        keeps_equal: Whether an element that is equal in all snapshots stays as it is.

    Attributes:
        health: The notes about the health of the mean, once it is written; None if the options do
            not ask for them.
    """

    def __init__(
        self,
        sources: Sequence[Contents],
        weights: Sequence[float] | None,
        session: Session,
        crew: Crew,
        options: TakeOptions,
        *,
        exact: bool,
        keeps_equal: bool,
    ) -> None:
        self._sources = sources
        self._weights = weights
        self._session = session
        self._crew = crew
        self._options = options
        self._measures = options.health is not None
        self.health: HealthNotes | None = None
        self._progress = ProgressCounter(options.progress, "averaging")
        self._exact = exact
        self._keeps_equal = keeps_equal
        self._threads = crew.limited(min(cores(), _MOST_THREADS))
        is_server = session.store.backend.costs.waiting
        self._staged_bytes = _STAGED_FROM_SERVER // self._threads if is_server else _STAGED_BYTES

    def write(self, tensors: Sequence[TensorToAverage]) -> Manifest:
        """Write the mean of tensors; return the manifest of the last snapshot with these means."""
        found, unknown = dict[str, TensorHealth](), list[TensorToAverage]()
        if self._measures:
            found, unknown = known_health(self._sources, {tensor.path for tensor in tensors})
        everything = [*tensors, *unknown]
        self._progress.total = len(self._sources) * sum(t.entry.payload.nbytes for t in everything)
        results = [_Results([], {}) for _ in everything]
        cells = (
            cell
            for i, (tensor, into) in enumerate(zip(everything, results, strict=True))
            for cell in self._cells(tensor, into, stays=i >= len(tensors))
        )
        most = max(1, self._staged_bytes // max(2, len(self._sources)))
        windows = SharedItems(batches(cells, lambda cell: cell.nbytes, most), self._crew)
        self._rely_on_last()
        self._crew.run(lambda: self._compute(windows), self._threads)
        changes: dict[OwnedTree, dict[str, Entry]] = {}
        means: dict[str, Means] = {}
        small = {t.path: (t.entry.dtype, t.entry.payload.inline) for t in unknown if _is_small(t)}
        for tensor, own in zip(tensors, results, strict=False):
            nbytes = tensor.entry.payload.nbytes
            if _is_small(tensor):
                payload = Payload(nbytes, self._small_mean(tensor, means))
                small[tensor.path] = tensor.entry.dtype, payload.inline
            else:
                payload = payload_of(nbytes, b"".join(own.digests), self._session.put_node)
            changes.setdefault(tensor.tree, {})[tensor.inner] = with_payload(tensor.entry, payload)
        if self._measures:
            found |= zip(small, measured_pieces(small.values()), strict=True)
            for tensor, own in zip(everything, results, strict=True):
                if own.health:
                    parts = [own.health[number] for number in sorted(own.health)]
                    found[tensor.path] = TensorHealth.of_parts(parts)
        return self._manifest(changes, found)

    def _rely_on_last(self) -> None:
        """Declare that the commit needs all nodes and chunks of the last snapshot.

        The new snapshot shares most of them.
        """
        for node in self._sources[-1].nodes(set()):
            named = [node.digest, *node.chunks]
            for at in range(0, len(named), _BATCH):
                if None in self._session.rely_on(named[at : at + _BATCH]):
                    raise DamagedError(f"{self._sources[-1].label} names chunks that no pack has")

    def _means_of(self, dtype: str, made: dict[str, Means]) -> Means:
        """Return what computes means of a dtype.

        Args:
            dtype: The dtype.
            made: What this thread has made, by dtype. This adds to it.
        """
        if dtype not in made:
            of_sum = SUM_DTYPES[dtype]
            of_sum = _EXACT.get(of_sum, of_sum) if self._exact else of_sum
            count, weights = len(self._sources), self._weights
            made[dtype] = Means(
                TENSOR_DTYPES[dtype], of_sum, count, weights, keeps_equal=self._keeps_equal
            )
        return made[dtype]

    def _small_mean(self, tensor: TensorToAverage, made: dict[str, Means]) -> bytes:
        """Return the mean, as bytes, of a small tensor whose bytes lie in its entries."""
        dtype = TENSOR_DTYPES[tensor.entry.dtype]
        raws = [bytearray(entry.payload.inline) for entry in tensor.entries]
        elements = [torch.frombuffer(raw, dtype=dtype) for raw in raws]
        means = self._means_of(tensor.entry.dtype, made)
        means.add(0, elements[0], enumerate(elements))
        means.write(0, elements[0])
        return bytes(raws[0])

    def _cells(
        self, tensor: TensorToAverage, into: _Results, *, stays: bool
    ) -> Iterator[_CellToAverage]:
        """Yield the cells of a tensor that must be read, to be averaged or only measured.

        Args:
            tensor: The tensor.
            into: Gets the digests of its chunks in the last snapshot. The caller replaces the
                digest of a yielded cell by that of its mean.
            stays: Whether all of the tensor stays as it is in the last snapshot.
        """
        if _is_small(tensor):
            return
        grid = self._sources[-1].cells(tensor.path, tensor.entry)
        sources = self._sources[-len(tensor.entries) :]
        lists = [
            split_digests(source.digests(entry.payload, grid, tensor.path))
            for source, entry in zip(sources, tensor.entries, strict=True)
        ]
        into.digests.extend(lists[-1])
        for number, digests in enumerate(zip(*lists, strict=True)):
            nbytes = grid.cell_bytes(number)
            cell_stays = stays or (self._keeps_equal and len({*digests}) == 1)
            if cell_stays and not self._measures:
                self._progress.add(nbytes * len(digests))
            else:
                yield _CellToAverage(tensor, number, nbytes, digests, cell_stays, into)

    def _compute(self, windows: Iterable[Sequence[_CellToAverage]]) -> None:
        """Read the chunks of some cells at a time, and write their means. Each thread calls this.

        The chunks of all snapshots are read into one memory, in which each snapshot has its place.
        If not all fit in, the first snapshot stays in its place, and the others take turns.
        """
        writer, made, count = self._session.writer(), dict[str, Means](), len(self._sources)
        memory = torch.empty(0, dtype=torch.uint8)
        try:
            for window in windows:
                sizes = (-(-cell.nbytes // _ALIGNED) * _ALIGNED for cell in window)
                *starts, nbytes = accumulate(sizes, initial=0)
                most = min(count, max(2, 2 * self._staged_bytes // nbytes))
                if len(memory) < most * nbytes:
                    memory = torch.empty(most * nbytes, dtype=torch.uint8)
                places: list[_Place] = [
                    [place[at : at + c.nbytes] for at, c in zip(starts, window, strict=True)]
                    for place in torch.split(memory[: most * nbytes], nbytes)
                ]
                self._take_turns(window, dict(enumerate(places)), places[0], made)
                for at in range(most, count, most - 1 or 1):
                    turn = dict(zip(range(at, count), places[1:], strict=False))
                    self._take_turns(window, turn, places[0], made)
                raws = [view_at(chunk.data_ptr(), chunk.nbytes) for chunk in places[0]]
                means = [(c, r) for c, r in zip(window, raws, strict=True) if not c.stays]
                stored = writer.store([raw for _, raw in means])
                for (cell, _), digest in zip(means, stored, strict=True):
                    cell.into.digests[cell.number] = digest
                if self._measures:
                    pieces = ((c.tensor.entry.dtype, r) for c, r in zip(window, raws, strict=True))
                    for cell, found in zip(window, measured_pieces(pieces), strict=True):
                        cell.into.health[cell.number] = found
        finally:
            writer.finish()

    def _take_turns(
        self,
        window: Sequence[_CellToAverage],
        turn: Mapping[int, _Place],
        first: _Place,
        made: dict[str, Means],
    ) -> None:
        """Read the chunks of some snapshots, and add them; write the means after the last one.

        Args:
            window: The cells.
            turn: The numbers of the snapshots, in order → where to read their chunks to.
            first: The chunks of the first snapshot, in whose place the means are written.
            made: What computes means, by dtype.
        """
        if self._crew.error is not None:
            raise self._crew.error
        self._session.renew_announcement()
        wants = [
            _want(cell, number, chunk)
            for number, place in turn.items()
            for cell, chunk in zip(window, place, strict=True)
            if number == 0 or not cell.stays
        ]
        # This thread waits with a slot in its hands, so it must not wait for others.
        self._session.store.fetch(wants, ReadOptions(readers=0))
        self._progress.add(len(turn) * sum(cell.nbytes for cell in window))
        total = 0
        for i, cell in enumerate(window):
            if cell.stays:
                continue
            means = self._means_of(cell.tensor.entry.dtype, made)
            chunks = (place[i] for place in turn.values())
            for head, *parts in zip(*map(means.blocks, (first[i], *chunks)), strict=True):
                means.add(total, head, zip(turn, parts, strict=True))
                if len(self._sources) - 1 in turn:
                    means.write(total, head)
                # Sums of all blocks are kept only if there is another turn.
                total += len(turn) < len(self._sources)

    def _manifest(
        self,
        changes: Mapping[OwnedTree, dict[str, Entry]],
        found: Mapping[str, TensorHealth],
    ) -> Manifest:
        """Return the manifest of the last snapshot, with some of its entries replaced.

        Args:
            changes: The entries to replace in each tree, by their paths below its key.
            found: The health of all tensors, by path, if they are measured.
        """
        last = self._sources[-1]
        manifest = last.manifest
        shared = dict(manifest.shared)
        ranks = {rank: dict(trees) for rank, trees in manifest.ranks.items()}
        for tree, entries in changes.items():
            edited = last.tree(tree.digest).edit(entries, self._session.put_node)
            assert edited is not None
            (shared if tree.owner is None else ranks[str(tree.owner)])[tree.component] = edited
        # The last take has its environment; the mean was computed here.
        mean = msgspec.structs.replace(
            manifest, shared=shared, ranks=ranks, environment={}, health={}
        )
        if self._options.health is None:
            return mean
        # Both have trees of the same keys, in the same order.
        trees = [(old, new.digest) for old, new in zip(manifest.trees(), mean.trees(), strict=True)]
        ignore = self._options.health.ignore
        self.health = health_of_mean(last, found, trees, ignore)
        return msgspec.structs.replace(mean, health=self.health.fitting_records)


def _is_small(tensor: TensorToAverage) -> bool:
    """Whether the bytes of a tensor lie in its entry, not in chunks."""
    return tensor.entry.payload.nbytes <= INLINE_BYTES


def _want(cell: _CellToAverage, number: int, chunk: torch.Tensor) -> Want:
    """Return what to read of a snapshot for a cell.

    Args:
        cell: The cell.
        number: The number of the snapshot.
        chunk: The memory to read to.
    """
    target = view_at(chunk.data_ptr(), chunk.nbytes)

    def keep(raw: memoryview) -> None:
        if raw is not target:  # else it was read there
            copy(target, raw)

    return Want(cell.digests[number], cell.nbytes, keep, cell.tensor.path, target)
