"""An app state at one moment: its leaves, and which of them hold the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from casnap.buffers import bytes_at
from casnap.containers import segment_of
from casnap.errors import NotStatefulError, UnsupportedTypeError
from casnap.flatten import flatten
from casnap.format import INLINE_BYTES, MAX_PATH_CHARS, payload_of
from casnap.grid import Grid
from casnap.staging import Piece, grid_for, pieces_of, settle
from casnap.state import RNGState, Stateful
from casnap.tensors import Leaf


class Span(NamedTuple):
    """The leaves of one key of the app state.

    Attributes:
        rank: Whose they are; None where they are everyone's.
        key: The key, as a path segment.
        start: The first leaf.
        stop: One past the last.
    """

    rank: int | None
    key: str
    start: int
    stop: int


class Capture:
    """The leaves of an app state; tensors are referred to, all else is encoded.

    Args:
        app_state: Key → what has ``state_dict`` and ``load_state_dict``.
        chunk_size: The store's, in bytes.
        allow_pickle: Whether what has no safe encoding may be pickled.

    Attributes:
        leaves: All leaves, in order.
        spans: Which of them belong to which key.
        grids: The grid of each leaf; None where it has no chunks.
        inline: The bytes of small leaves.
        same_as: Leaf → an earlier leaf that is the same memory seen the same way.
        logical_bytes: The bytes of all leaves.

    Raises:
        NotStatefulError: A value lacks one of the two methods.
        UnsupportedTypeError: A value can't be stored.
    """

    def __init__(
        self, app_state: Mapping[str, Stateful], chunk_size: int, *, allow_pickle: bool
    ) -> None:
        self.leaves: list[Leaf] = []
        self.spans: list[Span] = []
        for key in random_states_first(app_state):
            stateful = app_state[key]
            start, segment = len(self.leaves), segment_of(key)
            self.leaves.extend(flatten(stateful.state_dict(), segment, allow_pickle=allow_pickle))
            rank = 0 if isinstance(stateful, RNGState) else None
            self.spans.append(Span(rank, segment, start, len(self.leaves)))
        self.grids: list[Grid | None] = []
        self.inline: dict[int, bytes] = {}
        self.same_as: dict[int, int] = {}
        self.logical_bytes = 0
        self._look_at_leaves(chunk_size)
        # Other threads copy from the GPU: what the caller has begun there must have ended.
        settle(leaf.content for leaf in self.leaves)

    def _look_at_leaves(self, chunk_size: int) -> None:
        seen: dict[int, int] = {}
        for i, leaf in enumerate(self.leaves):
            if len(leaf.path) > MAX_PATH_CHARS:
                raise UnsupportedTypeError(
                    f"{leaf.path[:80]}…: a path of {len(leaf.path):,} characters is too long; "
                    f"keys are names, of at most {MAX_PATH_CHARS:,} characters in all"
                )
            nbytes = payload_of(leaf.entry).nbytes
            self.logical_bytes += nbytes
            if nbytes <= INLINE_BYTES:
                self.inline[i] = _small_bytes(leaf.content)
                self.grids.append(None)
                continue
            self.grids.append(grid_for(leaf, chunk_size))
            if isinstance(leaf.content, torch.Tensor):
                first = seen.setdefault(leaf.content.data_ptr(), i)
                same_grid = self.grids[first] == self.grids[i]
                if (
                    first != i
                    and same_grid
                    and _same_memory(leaf.content, self.leaves[first].content)
                ):
                    self.same_as[i] = first

    def let_go(self) -> None:
        """Keep the description alone: the bytes are copied, and the tensors may go."""
        self.leaves = [Leaf(path, entry, b"") for path, entry, _ in self.leaves]

    def pieces(self) -> Iterator[Piece]:
        """Yield the bytes of all leaves that need chunks, each memory once."""
        for i, grid in enumerate(self.grids):
            if grid is not None and i not in self.same_as:
                yield from pieces_of(i, self.leaves[i], grid)


def _same_memory(a: torch.Tensor, b: torch.Tensor | bytes) -> bool:
    """Whether two tensors at one address are the same elements in the same order."""
    return (
        isinstance(b, torch.Tensor)
        and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        and a.stride() == b.stride()
    )


def _small_bytes(content: torch.Tensor | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    if content.nbytes == 0:
        return b""
    host = content.cpu().contiguous()
    return bytes_at(host.data_ptr(), host.nbytes)


def random_states_first(app_state: Mapping[str, Stateful]) -> list[str]:
    """Return the keys, that of the random state first, since to read states may draw from it.

    Raises:
        NotStatefulError: A value lacks ``state_dict`` or ``load_state_dict``.
        RuntimeError: There are two random states.
    """
    if not isinstance(app_state, Mapping):
        raise NotStatefulError(
            f"an app state is a dict of keys and Statefuls, like {{'model': model}}; got a "
            f"{type(app_state).__qualname__}"
        )
    for key, value in app_state.items():
        if not isinstance(key, str):
            raise NotStatefulError(f"the keys of an app state are str; got {key!r}")
        if not isinstance(value, Stateful):
            raise NotStatefulError(
                f"app_state[{key!r}] is a {type(value).__qualname__}, which lacks state_dict() or "
                "load_state_dict(); wrap plain values in casnap.StateDict"
            )
    random = [k for k, v in app_state.items() if isinstance(v, RNGState)]
    if len(random) > 1:
        raise RuntimeError(f"an app state holds one RNGState at most; found {', '.join(random)}")
    return random + [k for k in app_state if k not in random]
