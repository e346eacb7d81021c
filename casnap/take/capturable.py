"""The input of a take: an app state, or leaves that were divided beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from casnap.format.names import component_of
from casnap.runtime.threads import collector_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import flatten
from casnap.state.parts import check_state
from casnap.state.stateful import RNGState, Stateful, random_states_first, same_random_state
from casnap.state.tensors import Leaf
from casnap.take.capture import Capture, KeySpan


class Capturable(Protocol):
    """The input of a take.

    Attributes:
        values: The values of an app state that may declare something about themselves.
    """

    values: Mapping[str, Stateful]

    def keys(self) -> list[str]:
        """Return the keys, the same on all ranks, in the order in which they are captured."""

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> Capture:
        """Capture what is below the keys.

        Args:
            keys: All keys, in the order that all ranks agreed on.
            chunk_size: The store's, in bytes.
            allow_pickle: Whether values without a safe encoding may be pickled.
        """


class LiveState:
    """An app state: each rank has its own, and casnap finds out what they have in common.

    Args:
        values: Key → a value with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, values: Mapping[str, Stateful]) -> None:
        self.values = values

    def keys(self) -> list[str]:
        """Return the keys; that of a random state comes first.

        Raises:
            UnsupportedTypeError: A value lacks one of the two methods.
        """
        return random_states_first(self.values)

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> Capture:
        """Capture the state; reading it leaves the random state as it was before."""
        random = [s for s in self.values.values() if isinstance(s, RNGState)]
        states = [s.state_dict() for s in random]
        try:
            with collector_paused():
                leaves, spans = _flattened(self.values, keys, allow_pickle)
                return Capture(leaves, spans, chunk_size)
        finally:
            # Set it back at once, and only if it has changed: else the numbers that other threads
            # draw meanwhile would be drawn twice.
            for state, before in zip(random, states, strict=True):
                if not same_random_state(state.state_dict(), before):
                    state.load_state_dict(before)


class GivenLeaves:
    """Leaves that were divided among the ranks before the take; all of them are global.

    Args:
        leaves: Key → the leaves of it that this rank has. All ranks have the same keys.
    """

    def __init__(self, leaves: Mapping[str, list[Leaf]]) -> None:
        self.values: Mapping[str, Stateful] = {}
        self._leaves = leaves

    def keys(self) -> list[str]:
        """Return the keys."""
        return list(self._leaves)

    def capture(self, keys: Sequence[str], chunk_size: int, *, allow_pickle: bool) -> Capture:
        """Capture the leaves."""
        leaves: list[Leaf] = []
        spans = []
        for key in keys:
            start, own = len(leaves), self._leaves[key]
            leaves += own
            spans.append(KeySpan(False, component_of(key), start, len(leaves), given=True))
        return Capture(leaves, spans, chunk_size)


def _flattened(
    app_state: Mapping[str, Stateful], keys: Sequence[str], allow_pickle: bool
) -> tuple[list[Leaf], list[KeySpan]]:
    """Return the leaves of an app state, and which of them belong to which key.

    Raises:
        UnsupportedTypeError: A value cannot be stored.
    """
    leaves: list[Leaf] = []
    spans: list[KeySpan] = []
    for key in keys:
        stateful = app_state[key]
        start, component = len(leaves), component_of(key)
        state = stateful.state_dict()
        with without_torch_modes():
            check_state(key, stateful, state)
            leaves.extend(flatten(state, component, allow_pickle=allow_pickle))
        per_rank = isinstance(stateful, RNGState)
        spans.append(KeySpan(per_rank, component, start, len(leaves)))
    return leaves, spans
