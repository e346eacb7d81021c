"""Measure the health of the tensors of a take: NaN, infinities, norms and largest values.

A rank measures the cells that it hashes. So it measures the bytes that are stored, and no element
counts twice. A device measures the tensors that it holds during the call, before ``async_take``
returns. The host measures all other tensors right after it has hashed them, in the background too.
If the bytes of a tensor have the same digests as in the last take of this process, its health is
taken from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import msgspec

from casnap.errors import UnhealthyError
from casnap.format.digest import Digest
from casnap.format.entries import Entry, KnownEntry, TensorEntry
from casnap.format.health import MAX_HEALTH_BYTES, TensorHealth, has_health, pack_health
from casnap.runtime.sizes import amount
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.measuring import elements_in, measured_on_devices, measured_pieces
from casnap.take.capture import CapturedState
from casnap.take.options import HealthOptions
from casnap.take.staging import Piece

# How many pieces a device measures before it is waited for; and the bytes of their memory that are
# held for that, if they were made for the pieces.
_WINDOW, _WINDOW_BYTES = 64, 16 << 20
_MOST_TEXTS = 5
# What was measured before: by the id of the store, then by dtype and joined digests.
_Known = dict[tuple[str, bytes], TensorHealth]
_known: dict[str, _Known] = {}


class Measuring:
    """Measures the tensors of one take, on one of its ranks.

    Args:
        state: The state of this rank, with its plans.
        store_id: The id of the store.
        ignore: Globs of the paths of tensors that may have NaN or infinite elements.
    """

    def __init__(self, state: CapturedState, store_id: str, ignore: Sequence[str]) -> None:
        self._state = state
        self._ignore = ignore
        self._store_id = store_id
        self._dtypes = {
            i: entry.dtype
            for i in state.grids
            if isinstance(entry := state.leaves[i].entry, TensorEntry) and has_health(entry)
        }
        # Leaf → first cell of each piece → what was measured there.
        self._parts: defaultdict[int, dict[int, TensorHealth]] = defaultdict(dict)
        # The leaves whose pieces a device has measured: all but cells that ranks put together.
        self._by_device: set[int] = set()
        self._before = _known.get(store_id, {})
        self._now: _Known = {}

    def on_devices(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces as they are; have each device measure the pieces in its memory.

        The devices have measured all their pieces once this iterator has ended.

        Args:
            pieces: The pieces of the state.
        """
        window, nbytes = list[Piece](), 0
        for piece in pieces:
            memory = piece.on_device
            if memory is not None and piece.leaf in self._dtypes:
                window.append(piece)
                if memory.untyped_storage().nbytes() == memory.nbytes:
                    nbytes += memory.nbytes
                if len(window) == _WINDOW or nbytes >= _WINDOW_BYTES:
                    self._measure_there(window)
                    window, nbytes = [], 0
            yield piece
        self._measure_there(window)

    @without_torch_modes()
    def _measure_there(self, window: Sequence[Piece]) -> None:
        rows = [
            elements_in(self._dtypes[piece.leaf], piece.on_device)
            for piece in window
            if piece.on_device is not None
        ]
        for piece, found in zip(window, measured_on_devices(rows), strict=True):
            self._by_device.add(piece.leaf)
            self._parts[piece.leaf][piece.first_cell] = found

    def note(self, pieces: Iterable[Piece], digests: Sequence[Digest]) -> None:
        """Measure pieces in host memory after they were hashed. Any thread may call this.

        Args:
            pieces: The pieces.
            digests: One digest for each chunk, in the order of the pieces.
        """
        start, dtypes, before = 0, self._dtypes, self._before
        new: list[tuple[Piece, str, bytes]] = []
        # There may be many small pieces, so what is known is kept without further calls.
        for piece in pieces:
            stop = start + len(piece.sizes)
            dtype = dtypes.get(piece.leaf)
            if dtype is not None and not (self._by_device and self._is_measured(piece)):
                joined = digests[start] if stop == start + 1 else b"".join(digests[start:stop])
                known = before.get((dtype, joined))
                if known is None:
                    new.append((piece, dtype, joined))
                else:
                    self._keep(piece, dtype, joined, known)
            start = stop
        if new:
            self._measure_here(new)

    @without_torch_modes()
    def _measure_here(self, new: Sequence[tuple[Piece, str, bytes]]) -> None:
        """Measure pieces in host memory, given as triples: piece, dtype, joined digests."""
        health = measured_pieces((dtype, piece.view) for piece, dtype, _ in new)
        for each, found in zip(new, health, strict=True):
            self._keep(*each, found)

    def _is_measured(self, piece: Piece) -> bool:
        """Whether a device has measured the elements of a piece before they came to the host."""
        if piece.leaf not in self._by_device:
            return False
        plan = self._state.plans.get(piece.leaf)
        joints = [] if plan is None else plan.joints
        return not any(first <= piece.first_cell < stop for first, stop in joints)

    def _keep(self, piece: Piece, dtype: str, joined: bytes, found: TensorHealth) -> None:
        self._now[dtype, joined] = self._parts[piece.leaf][piece.first_cell] = found

    def keep_known(self) -> None:
        """Let the next take reuse what was measured. Call this once this take is committed."""
        _known[self._store_id] = self._now

    @property
    def leaves(self) -> Iterable[int]:
        """The floating-point leaves that are stored as chunks, not inside their entries."""
        return self._dtypes.keys()

    def parts_of(self, leaf: int) -> list[TensorHealth]:
        """Return the health of each part of a leaf that this rank has hashed, in order."""
        parts = self._parts.get(leaf, {})
        return [parts[cell] for cell in sorted(parts)] if len(parts) > 1 else [*parts.values()]

    def judge(
        self,
        key: str,
        entries: Mapping[str, KnownEntry],
        measured_by_path: Mapping[str, TensorHealth],
        notes: HealthNotes,
        rank: int | None = None,
    ) -> dict[str, TensorHealth]:
        """Add the unhealthy tensors of a key to the notes.

        Args:
            key: The key of the app state, as a component.
            entries: The entries that this rank makes, by path below the key.
            measured_by_path: The health of tensors, by path with the key.
            notes: The notes.
            rank: The rank that the entries belong to; None if they are global.

        Returns:
            The health of the tensors that are stored as chunks, by path below the key.
        """
        found = {p: measured_by_path[key + p] for p in entries if key + p in measured_by_path}
        inline = {
            path: (entry.dtype, entry.payload.inline)
            for path, entry in entries.items()
            if isinstance(entry, TensorEntry) and entry.payload.inline and has_health(entry)
        }
        with without_torch_modes():
            everything = found | dict(zip(inline, measured_pieces(inline.values()), strict=True))
        lead = "" if rank is None else f"{rank}/"
        for path, health in everything.items():
            if is_unhealthy(entries[path], health) and not is_ignored(key + path, self._ignore):
                notes.add_unhealthy(f"{lead}{key}{path}", health)
        return found


# --- what the numbers mean ------------------------------------------------------------------------


class HealthNotes(msgspec.Struct, array_like=True):
    """The health of the tensors of one rank, or, once :meth:`joined`, of a whole snapshot.

    Attributes:
        shared: The health of the global tensors that are stored as chunks, by key of the app state
            and path below it.
        records: The digest of a tree → the health record of its tensors, for the manifest. A rank
            adds the trees of its own entries; rank 0 then adds the global trees.
        count: How many tensors are unhealthy.
        texts: For the first few unhealthy tensors, the path, and what is wrong.
    """

    shared: dict[str, dict[str, TensorHealth]] = msgspec.field(default_factory=dict)
    records: dict[bytes, list[bytes]] = msgspec.field(default_factory=dict)
    count: int = 0
    texts: list[str] = msgspec.field(default_factory=list)

    def add_record(
        self, tree: bytes, paths: Iterable[str], found: Mapping[str, TensorHealth]
    ) -> None:
        """Add the health record of a tree.

        Args:
            tree: The digest of the tree.
            paths: The paths of all entries of the tree.
            found: The health of some of these entries, by path.
        """
        if found:
            numbers = enumerate(sorted(paths))
            self.records[tree] = pack_health({i: found[p] for i, p in numbers if p in found})

    def add_unhealthy(self, path: str, health: TensorHealth) -> None:
        """Count an unhealthy tensor.

        Args:
            path: The path of the tensor, after its rank if it belongs to one.
            health: What was measured of it.
        """
        self.count += 1
        if len(self.texts) < _MOST_TEXTS:
            self.texts.append(f"{path} ({_counts_in_words(health)})")

    @classmethod
    def joined(cls, notes: Iterable[HealthNotes]) -> HealthNotes:
        """Join the notes of all ranks into the notes of their snapshot."""
        all_notes = cls()
        for each in notes:
            for key, found in each.shared.items():
                all_notes.shared.setdefault(key, {}).update(found)
            all_notes.records |= each.records
            all_notes.count += each.count
            all_notes.texts += each.texts[: _MOST_TEXTS - len(all_notes.texts)]
        return all_notes

    @property
    def fitting_records(self) -> dict[bytes, list[bytes]]:
        """``records``; empty if they are too large for a manifest, which each restore reads."""
        nbytes = sum(len(part) for record in self.records.values() for part in record)
        return self.records if nbytes <= MAX_HEALTH_BYTES else {}

    def judgement(self, name: str, options: HealthOptions) -> str:
        """Return the warning about the unhealthy tensors of a snapshot; empty if there are none.

        Args:
            name: The name of the snapshot, which is about to be committed.
            options: How its store wants tensors to be measured.

        Raises:
            UnhealthyError: Some tensors are unhealthy, and the options ask for this error.
        """
        if not self.count:
            return ""
        text = f"{name}: {amount(self.count, 'tensor')} with NaN or infinite elements"
        if options.on_unhealthy == "raise":
            raise UnhealthyError(f"{text}, so nothing is stored: {self}")
        return f"{text}: {self}"

    def __str__(self) -> str:
        more = f", and {self.count - len(self.texts)} more" if self.count > len(self.texts) else ""
        return f"{', '.join(self.texts)}{more}"


def _counts_in_words(health: TensorHealth) -> str:
    counts = (health.nan, "NaN"), (health.infinite, "infinite")
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def is_ignored(path: str, globs: Iterable[str]) -> bool:
    """Whether a tensor may have NaN or infinite elements, as the globs of its options say.

    Args:
        path: The path of the tensor, with its key.
        globs: The globs.
    """
    return any(fnmatchcase(path, glob) for glob in globs)


def is_unhealthy(entry: Entry, health: TensorHealth) -> bool:
    """Whether a tensor has NaN or infinite elements, as after a training has diverged.

    A tensor of a single element may be infinite: trainers begin with such a "best loss so far".
    """
    assert isinstance(entry, TensorEntry)
    return bool(health.nan or (health.infinite and prod(entry.shape) > 1))
