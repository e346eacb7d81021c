"""Ask a store which chunks of a device's memory it has: only the missing ones are copied.

The device hashes the cells in its own memory. If the store has a cell, the take notes its digest.
All other cells are copied to the host as pieces. The host hashes them again as it packs them, so
the name of a chunk never depends on what the device has computed.

The take also checks the device. It compares the device's digests of the copied cells with the
host's. From each device it also copies one chunk that the store has, drawn at random, and compares
the two digests of that chunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

import torch
from msgspec.structs import replace

from casnap.errors import DeviceError
from casnap.format.digest import Digest, digest_of, split_digests
from casnap.format.entries import INLINE_BYTES
from casnap.format.records import Place, Root
from casnap.runtime.buffers import view_at
from casnap.state.device_hash import (
    CellRun,
    DeviceHasher,
    check_trusted,
    distrusted,
    hasher_if_made,
)
from casnap.state.devices import devices_of
from casnap.state.sharded import Shards
from casnap.take.capture import CapturedState
from casnap.take.hashing import Hasher
from casnap.take.staging import Piece

RelyOn = Callable[[list[Digest]], Sequence[Place | None]]
"""Relies on the chunks of those digests that a store has; returns None for each other digest."""

# The bytes that a device hashes at a time; the bound of the memory that was made for pieces.
_WINDOW_BYTES, _MADE_BYTES = 512 << 20, 16 << 20
# A leaf that was new in _NEW_IN_A_ROW takes in a row is asked for in one of _LOOKS_AGAIN takes.
_NEW_IN_A_ROW, _LOOKS_AGAIN = 2, 8


# --- leaves that are new in each take -----------------------------------------------------------


class Streaks:
    """Counts, for each leaf, the last takes in a row in which one store had none of its chunks.

    After a few such takes, most takes do not ask the store for the chunks of this leaf: to hash the
    leaf on the device first would only cost time.
    """

    def __init__(self) -> None:
        self._takes = 0
        self._new_in_a_row: dict[str, int] = {}

    def is_asked(self, path: str) -> bool:
        """Whether this take asks the store for the chunks of the leaf at a path.

        After a long streak, only one take of several asks, in case the leaf no longer changes.
        """
        if self._new_in_a_row.get(path, 0) < _NEW_IN_A_ROW:
            return True
        return (self._takes + crc32(path.encode())) % _LOOKS_AGAIN == 0

    def note(self, is_new: Mapping[str, bool]) -> None:
        """Note the outcome of a take.

        Args:
            is_new: Path of each leaf that the take asked for → whether all its chunks were new.
        """
        self._takes += 1
        for path, all_new in is_new.items():
            if all_new:
                self._new_in_a_row[path] = self._new_in_a_row.get(path, 0) + 1
            else:
                self._new_in_a_row.pop(path, None)


_random = random.Random()
# The id of a store → the streaks of takes to it.
_streaks: dict[str, Streaks] = {}


# --- asking -------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """A run of cells for which the take has asked the store.

    Attributes:
        device: The device that holds the cells.
        piece: The cells, without their bytes.
        digests: The digests that the device computed, joined.
    """

    device: torch.device
    piece: Piece
    digests: bytes


class _Sample(NamedTuple):
    """A known chunk: its leaf, its bytes on the device, and the digest that the device computed."""

    leaf: int
    memory: torch.Tensor
    digest: Digest


def hashers_for(state: CapturedState, root: Root) -> dict[torch.device, DeviceHasher]:
    """Return the hashers of the devices that hold a state, except hashers that are not ready yet.

    Args:
        state: The state.
        root: The root that the take is based on. If the store is empty, no hasher is needed.
    """
    if not state.devices or not root.segments:
        return {}
    hashers = {device: hasher_if_made(device) for device in state.devices}
    return {device: hasher for device, hasher in hashers.items() if hasher is not None}


def _tensors_of(content: object) -> list[torch.Tensor]:
    contents = content.tensors if isinstance(content, Shards) else [content]
    return [each for each in contents if isinstance(each, torch.Tensor)]


class Asking:
    """Finds out, for one take, which cells in the memory of devices the store has already.

    Args:
        state: The state.
        hashers: The devices that hash the cells they hold.
        rely_on: Asks the store for digests, and protects the chunks that it has from collectors.
        store_id: The id of the store.

    Attributes:
        leaves: The numbers of the leaves whose cells the store is asked for.
    """

    def __init__(
        self,
        state: CapturedState,
        hashers: Mapping[torch.device, DeviceHasher],
        rely_on: RelyOn,
        store_id: str,
    ) -> None:
        self._state = state
        self._hashers = hashers
        self._rely_on = rely_on
        self._streaks = _streaks.setdefault(store_id, Streaks())
        self._known: list[_Asked] = []
        self._crossing: list[_Asked] = []
        self._all_new: dict[str, bool] = {}
        # A small leaf that ranks share has no chunks: its entry holds the bytes.
        self.leaves = {
            i
            for i, leaf in enumerate(state.leaves)
            if leaf.entry.payload.nbytes > INLINE_BYTES
            and not devices_of(_tensors_of(leaf.content)).isdisjoint(hashers)
            and self._streaks.is_asked(leaf.path)
        }
        # The leaf of the last piece, and the addresses of its storages.
        self._leaf, self._memories = -1, set[int]()
        # How many known chunks each device has, and one of them.
        self._counts: dict[torch.device, int] = {}
        self._samples: dict[torch.device, _Sample] = {}

    def unknown(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces that the host has to hash; after the last one, check the devices.

        Args:
            pieces: All pieces of the state.

        Raises:
            DeviceError: A device has computed a wrong digest, or a tensor was changed after that.
        """
        window, nbytes, made = list[Piece](), 0, 0
        for piece in pieces:
            memory = piece.on_device
            if memory is None or not self._is_asked(piece, memory):
                yield piece
                continue
            window.append(piece)
            nbytes += memory.nbytes
            if self._is_made(piece, memory):
                made += memory.nbytes
            if nbytes >= _WINDOW_BYTES or made >= _MADE_BYTES:
                yield from self._ask(window)
                window, nbytes, made = [], 0, 0
        yield from self._ask(window)
        self._check_samples()

    def _is_asked(self, piece: Piece, memory: torch.Tensor) -> bool:
        # Several devices may hold a leaf, and some of them may have no hasher.
        return (
            piece.leaf in self.leaves
            and memory.device in self._hashers
            and CellRun(memory, piece.sizes).is_hashable
        )

    def _is_made(self, piece: Piece, memory: torch.Tensor) -> bool:
        """Whether ``memory`` is a contiguous copy made for the piece, not memory of the state."""
        if piece.leaf != self._leaf:
            self._leaf = piece.leaf
            tensors = _tensors_of(self._state.leaves[piece.leaf].content)
            self._memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return memory.untyped_storage().data_ptr() not in self._memories

    def _ask(self, window: list[Piece]) -> Iterator[Piece]:
        for device, hasher in self._hashers.items():
            pieces = [p for p in window if p.on_device is not None and p.on_device.device == device]
            digests = hasher.digests_if_able(
                CellRun(p.on_device, p.sizes) for p in pieces if p.on_device is not None
            )
            if digests is None:
                yield from pieces
                continue
            known = [place is not None for place in self._rely_on(digests)] if digests else []
            start = 0
            for piece in pieces:
                stop = start + len(piece.sizes)
                yield from self._divided(device, piece, digests[start:stop], known[start:stop])
                start = stop

    def _divided(
        self, device: torch.device, piece: Piece, digests: list[Digest], known: list[bool]
    ) -> Iterator[Piece]:
        """Note the digests of a piece's cells; yield the cells that the store lacks, as pieces.

        Args:
            device: The device that holds the piece.
            piece: The piece.
            digests: The digest of each cell, as the device has computed it.
            known: Whether the store has each cell.
        """
        path, memory = self._state.leaves[piece.leaf].path, piece.on_device
        assert memory is not None
        self._all_new[path] = self._all_new.get(path, True) and not any(known)
        self._draw(device, piece, digests, known)
        cell = begin = 0
        for is_known, run in groupby(known):
            stop_cell = cell + len(list(run))
            sizes = piece.sizes[cell:stop_cell]
            stop = begin + sum(sizes)
            cells = Piece(piece.leaf, piece.first_cell + cell, sizes, b"")
            asked = _Asked(device, cells, b"".join(digests[cell:stop_cell]))
            if is_known:
                self._known.append(asked)
            else:
                self._crossing.append(asked)
                yield replace(cells, on_device=memory[begin:stop])
            cell, begin = stop_cell, stop

    # --- a device is not trusted ---

    def _draw(
        self, device: torch.device, piece: Piece, digests: list[Digest], known: list[bool]
    ) -> None:
        """Choose at random whether one of a piece's known chunks becomes the device's sample.

        After all pieces, each known chunk of the device has had the same chance.

        Args:
            device: The device that holds the piece.
            piece: The piece.
            digests: The digest of each chunk, as the device has computed it.
            known: Whether the store has each chunk.
        """
        count = sum(known)
        if not count:
            return
        self._counts[device] = self._counts.get(device, 0) + count
        if _random.random() * self._counts[device] < count:
            cell = _random.choice([i for i, is_known in enumerate(known) if is_known])
            start = sum(piece.sizes[:cell])
            assert piece.on_device is not None
            memory = piece.on_device[start : start + piece.sizes[cell]]
            self._samples[device] = _Sample(piece.leaf, memory, digests[cell])

    def _check_samples(self) -> None:
        samples, self._samples = self._samples, {}
        for device, sample in samples.items():
            host = sample.memory.cpu()
            if digest_of(view_at(host.data_ptr(), host.nbytes)) != sample.digest:
                raise self._difference(device, sample.leaf)

    def _difference(self, device: torch.device, leaf: int) -> DeviceError:
        """Return the error for a chunk for which device and host computed different digests."""
        path = self._state.leaves[leaf].path
        return distrusted(
            device,
            f"the bytes of a chunk of {path} have another BLAKE3, unless another thread or stream "
            "wrote to it before the call had returned",
        )

    def note_streaks(self) -> None:
        """Note in the streaks which leaves had only new chunks. Call this once for each take."""
        self._streaks.note(self._all_new)

    def settle(self, hasher: Hasher) -> None:
        """Give the hasher the digests of the chunks that the store has; check all other digests.

        The other chunks were copied to the host and hashed there too: the digests must be equal.

        Args:
            hasher: The hasher of the take, which has hashed all copied cells.

        Raises:
            DeviceError: A device has computed a wrong digest, or a tensor was changed after that.
        """
        for asked in self._known:
            # Since then, another take or a restore may have seen the device compute a wrong digest.
            check_trusted(asked.device)
            hasher.note_known(asked.piece, split_digests(asked.digests))
        for asked in self._crossing:
            if b"".join(hasher.digests.of_piece(asked.piece)) != asked.digests:
                raise self._difference(asked.device, asked.piece.leaf)
