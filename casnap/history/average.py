"""The mean of snapshots, element by element, as a new snapshot.

Snapshots of one store are cut into the same chunks. So the mean is computed chunk by chunk, in
memory that is bounded, and a chunk that all snapshots share is neither read nor written.

The mean of an element is summed in the order in which the snapshots are named: ``(x0 + x1 + …) /
n``, or with weights ``x0 * w0 + x1 * w1 + …``, each step rounded to the dtype of the sum. Then it
is cast to the dtype of the tensor. If the weights sum to one, an element with the same bits in all
snapshots stays as it is.

Means of checkpoints: "Averaging Weights Leads to Wider Optima and Better Generalization", Izmailov
et al., 2018. Sums of differences: "Editing Models with Task Arithmetic", Ilharco et al., 2022.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, isfinite

import msgspec
import torch

from casnap.errors import DamagedError
from casnap.format.digest import Digest, split_digests
from casnap.format.entries import INLINE_BYTES, Entry, Manifest, Payload, TensorEntry, with_payload
from casnap.format.records import THINNED, Row, Stats
from casnap.format.region import Region
from casnap.history.averaging_plan import SUM_DTYPES, TensorToAverage, plan_average
from casnap.ranks.comm import SingleProcess
from casnap.restore.loading import elements_of
from casnap.runtime.batches import batches
from casnap.runtime.buffers import bytes_at, view_at
from casnap.runtime.progress import ProgressCounter
from casnap.runtime.threads import Crew, run_shielded
from casnap.runtime.torch_modes import without_torch_modes
from casnap.storage import Contents, Repository, Session, Want, again
from casnap.take.commit import TakeCommit
from casnap.take.manifest import payload_of
from casnap.take.metadata import checked_metadata
from casnap.take.options import TakeOptions
from casnap.take.ranks.agreement import agree

# The bytes of one snapshot's chunks whose means are computed at a time. Besides them, their sums
# are in memory, which take up to four times as much (bfloat16, summed as float64).
_WINDOW_BYTES = 12 << 20
# The most digests that are looked up at a time.
_BATCH = 1024
# How many elements torch gets at a time. With more, it would use threads of its own, which wait for
# each other; casnap already uses threads.
_BLOCK = 1 << 15
_EXACT = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class AverageReport:
    """The outcome of an average.

    Attributes:
        name: The name of the new snapshot.
        of: The names of the snapshots that were averaged.
        weights: The weight of each.
        averaged: How many tensors are means.
        equal: How many tensors are equal in all snapshots, and were not read.
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


def checked_weights(count: int, weights: Sequence[float] | None) -> list[float] | None:
    """Return the weights of snapshots as floats; None for equal ones.

    Args:
        count: How many snapshots there are.
        weights: A number for each; None for equal weights.

    Raises:
        ValueError: There is no snapshot, there are not as many weights, or one is not finite.
    """
    if count == 0:
        raise ValueError("an average needs at least one snapshot")
    if weights is None:
        return None
    checked = [float(weight) for weight in weights]
    if len(checked) != count or not all(map(isfinite, checked)):
        raise ValueError(
            f"weights= has a finite number for each of the {count} snapshots; got {weights!r:.200}"
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
        options: The metadata of the new snapshot, and whether it replaces one of the same name.
        exact: Whether to sum in float64.

    Raises:
        SnapshotExistsError: The name is taken.
        StateError: No tensor of weights has one shape and dtype in all snapshots; or the metadata
            hold something that JSON cannot, or take more than 64 KiB.
        DamagedError: A chunk is missing or damaged; nothing was committed.
        FencedError: A collector deleted chunks that the mean needed, several times.
    """
    started = time.monotonic()
    options = replace(options, metadata=checked_metadata(options.metadata or {}))
    keeps_equal = weights is None or abs(fsum(weights) - 1) < 1e-9
    plan = plan_average(sources, keeps_equal=keeps_equal)
    comm = SingleProcess()

    def write(crew: Crew) -> Row:
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
                commit = TakeCommit(store, name, options, comm, started, notes)
                last = sources[-1].row.stats
                stats = Stats(logical_bytes=last.logical_bytes, entries=last.entries)
                return commit.lead(session, manifest, stats).row

    row = again(store, lambda: run_shielded(write, options.threads), f"{name}: the average")
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


class _Mean:
    """The mean of one cell of a tensor. The elements of the snapshots are added in their order.

    Args:
        entry: The entry of the tensor.
        cell: The elements of the tensor.
        dtype: The dtype of the sum.
        keeps_equal: Whether an element that is equal in all snapshots stays as it is.
    """

    def __init__(
        self, entry: TensorEntry, cell: Region, dtype: torch.dtype, *, keeps_equal: bool
    ) -> None:
        self._entry = entry
        self._cell = cell
        self._dtype = dtype
        self._keeps_equal = keeps_equal
        self._first, self._sum = torch.empty(0), torch.empty(0)
        # Whether an element has the same bits in all snapshots so far.
        self._same = torch.empty(0, dtype=torch.bool)
        # The numbers of the blocks without such an element. They are not compared any more.
        self._apart = set[int]()
        self._count = 0

    def add(self, raw: memoryview, weight: float | None) -> None:
        """Add the elements of the next snapshot.

        Args:
            raw: Their bytes.
            weight: The weight of the snapshot; None if all have the same.
        """
        values = elements_of(self._entry, raw, self._cell).flatten()
        self._count += 1
        if self._count == 1:
            self._first = torch.empty_like(values)
            self._sum = torch.empty(len(values), dtype=self._dtype)
            self._same = torch.empty(len(values), dtype=torch.bool)
        compared = (_bits(values), _bits(self._first))
        blocks = _blocks(values, self._first, self._sum, self._same, *compared)
        for number, (summand, first, total, same, bits, first_bits) in enumerate(blocks):
            # Round the product before it is added. If torch did both in one step, it would depend
            # on the place of the element whether the result is rounded once or twice.
            product = summand if weight is None else summand.to(self._dtype) * weight
            if self._count == 1:
                first.copy_(summand)
                total.copy_(product)
                same.fill_(True)
                continue
            total.add_(product)
            if self._keeps_equal and number not in self._apart:
                equal = bits == first_bits
                same.logical_and_(equal if equal.dim() == 1 else equal.all(1))
                if not same.any():
                    self._apart.add(number)

    def result(self, *, is_weighted: bool) -> torch.Tensor:
        """Return the mean, in the dtype of the tensor. Call this once, after the last snapshot.

        Args:
            is_weighted: Whether the summands were multiplied by weights. If not, the sum is divided
                by the number of snapshots.
        """
        blocks = _blocks(self._first, self._sum, self._same)
        for number, (first, mean, same) in enumerate(blocks):
            if not is_weighted:
                mean.div_(self._count)
            if self._keeps_equal and number not in self._apart:
                mean = torch.where(same, first, mean.to(first.dtype))
            first.copy_(mean)
        return self._first


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors of equal length into blocks; yield the first block of each, then the second."""
    return zip(*(torch.split(tensor, _BLOCK) for tensor in tensors), strict=True)


def _bits(elements: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements as integers: one for each element, two for complex128."""
    bits = elements.view(_INTEGERS[min(8, elements.itemsize)])
    return bits.view(-1, 2) if elements.itemsize > 8 else bits


@dataclass
class _CellToAverage:
    """A cell of a tensor whose mean is to be computed.

    Attributes:
        path: The path of the tensor.
        number: The number of the cell.
        nbytes: Its bytes.
        digests: The digest of its chunk in each snapshot.
        mean: The mean.
        into: The list that gets the digest of the new chunk, at index ``number``.
    """

    path: str
    number: int
    nbytes: int
    digests: tuple[Digest, ...]
    mean: _Mean
    into: list[Digest]


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
        self._progress = ProgressCounter(options.progress, "averaging")
        self._exact = exact
        self._keeps_equal = keeps_equal
        self._writer = session.writer()

    def write(self, tensors: Sequence[TensorToAverage]) -> Manifest:
        """Write the mean of tensors; return the manifest of the last snapshot with these means."""
        with self._sources[-1].reading():
            self._rely_on_last()
        self._progress.total = len(self._sources) * sum(t.entry.payload.nbytes for t in tensors)
        digests = [list[Digest]() for _ in tensors]
        cells = (c for t, into in zip(tensors, digests, strict=True) for c in self._cells(t, into))
        for window in batches(cells, lambda cell: cell.nbytes, _WINDOW_BYTES):
            self._compute(window)
        self._writer.finish()
        changes: dict[tuple[int | None, str], dict[str, Entry]] = {}
        for tensor, own in zip(tensors, digests, strict=True):
            nbytes = tensor.entry.payload.nbytes
            if nbytes <= INLINE_BYTES:
                payload = Payload(nbytes, self._small_mean(tensor))
            else:
                payload = payload_of(nbytes, b"".join(own), self._session.put_node)
            of_key = changes.setdefault((tensor.owner, tensor.component), {})
            of_key[tensor.inner] = with_payload(tensor.entry, payload)
        return self._manifest(changes)

    def _rely_on_last(self) -> None:
        """Declare that the commit needs all nodes and chunks of the last snapshot.

        The new snapshot shares most of them.
        """
        for node in self._sources[-1].nodes(set()):
            named = [node.digest, *node.chunks]
            for at in range(0, len(named), _BATCH):
                if None in self._session.rely_on(named[at : at + _BATCH]):
                    raise DamagedError(f"{self._sources[-1].label} names chunks that no pack has")

    def _mean_of(self, tensor: TensorToAverage, cell: Region) -> _Mean:
        dtype = SUM_DTYPES[tensor.entry.dtype]
        dtype = _EXACT.get(dtype, dtype) if self._exact else dtype
        return _Mean(tensor.entry, cell, dtype, keeps_equal=self._keeps_equal)

    def _weight(self, number: int) -> float | None:
        return None if self._weights is None else self._weights[number]

    def _result(self, mean: _Mean) -> torch.Tensor:
        return mean.result(is_weighted=self._weights is not None)

    def _small_mean(self, tensor: TensorToAverage) -> bytes:
        """Return the mean, as bytes, of a small tensor whose bytes lie in its entries."""
        mean = self._mean_of(tensor, Region.whole(tensor.entry.shape))
        for number, entry in enumerate(tensor.entries):
            mean.add(memoryview(bytearray(entry.payload.inline)), self._weight(number))
        result = self._result(mean)
        return bytes_at(result.data_ptr(), result.nbytes)

    def _cells(self, tensor: TensorToAverage, into: list[Digest]) -> Iterator[_CellToAverage]:
        """Yield the cells of a tensor whose means must be computed.

        Args:
            tensor: The tensor.
            into: Gets the digests of its chunks in the last snapshot. The caller replaces the
                digest of each yielded cell by that of its mean.
        """
        if tensor.entry.payload.nbytes <= INLINE_BYTES:
            return
        path = tensor.path
        lists = []
        for source, entry in zip(self._sources, tensor.entries, strict=True):
            with source.reading():
                grid = source.cells(path, entry)
                lists.append(split_digests(source.digests(entry.payload, grid, path)))
        into += lists[-1]
        for number, digests in enumerate(zip(*lists, strict=True)):
            nbytes = grid.cell_bytes(number)
            if self._keeps_equal and len({*digests}) == 1:
                self._progress.add(nbytes * len(digests))
            else:
                mean = self._mean_of(tensor, grid.region(number))
                yield _CellToAverage(path, number, nbytes, digests, mean, into)

    def _compute(self, window: Sequence[_CellToAverage]) -> None:
        """Read the chunks of some cells, and write their means."""
        for i, source in enumerate(self._sources):
            if self._crew.error is not None:
                raise self._crew.error
            self._session.renew_announcement()

            def want(cell: _CellToAverage, i: int = i) -> Want:
                def sink(raw: memoryview) -> None:
                    cell.mean.add(raw, self._weight(i))
                    self._progress.add(cell.nbytes)

                return Want(cell.digests[i], cell.nbytes, sink, cell.path)

            with source.reading():
                source.store.fetch(map(want, window))
        means = [self._result(cell.mean) for cell in window]
        raws = [view_at(mean.data_ptr(), mean.nbytes) for mean in means]
        for cell, digest in zip(window, self._writer.store(raws), strict=True):
            cell.into[cell.number] = digest

    def _manifest(self, changes: Mapping[tuple[int | None, str], dict[str, Entry]]) -> Manifest:
        """Return the manifest of the last snapshot, with some of its entries replaced."""
        last = self._sources[-1]
        manifest = last.manifest
        shared = dict(manifest.shared)
        ranks = {rank: dict(trees) for rank, trees in manifest.ranks.items()}
        for (owner, component), entries in changes.items():
            trees = shared if owner is None else ranks[str(owner)]
            edited = last.tree(trees[component]).edit(entries, self._session.put_node)
            assert edited is not None
            trees[component] = edited
        # The last take has its environment; the mean was computed here, and not measured.
        return msgspec.structs.replace(
            manifest, shared=shared, ranks=ranks, environment={}, health={}
        )
