"""Witnesses of the first steps after each snapshot, so that a run that resumes proves itself.

Each trainer has a :class:`Witnesses`, tells it of saves and loads, and asks it after each step of
the optimizer (``docs/decisions/0108-witnesses-of-trainers.md``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from casnap.errors import CasnapError, RankError, WitnessError
from casnap.extending import Comm, JoinedTake, StateSource, TakeOptions, local_path, own_rank

OnMismatch: TypeAlias = Literal["warn", "raise"]
"""What a trainer does if a resumed run computes otherwise than before."""
_log = logging.getLogger("casnap")


class Witnesses:
    """Stores or compares a witness at each of the first steps after a snapshot. All ranks have one.

    After a witness that differs, or cannot be compared or stored, there is none until the next
    snapshot: later ones would differ too.

    Args:
        steps: How many steps after each snapshot get a witness; 0 for none.
        on_mismatch: "warn" logs a state that differs; "raise" raises ``WitnessError``.
        options: How a save of the trainer takes the state.
        comm: Returns the ranks; by default the whole world.
        storage_options: How to reach a remote store.

    Attributes:
        steps: As given.

    Raises:
        ValueError: An argument has no such value.
    """

    def __init__(
        self,
        steps: int = 0,
        on_mismatch: OnMismatch = "warn",
        *,
        options: TakeOptions | None = None,
        comm: Callable[[], Comm] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        # A class of the user may have set it.
        given: object = steps
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ValueError(f"witness_steps is a number of steps, or 0; got {given!r:.80}")
        if on_mismatch not in get_args(OnMismatch):
            raise ValueError(f"on_mismatch is 'warn' or 'raise'; got {on_mismatch!r:.80}")
        self.steps = steps
        self._on_mismatch = on_mismatch
        self._comm = comm
        self._storage_options = storage_options
        self._options = options or TakeOptions()
        self._snapshot = ""
        self._made = 0

    def follow(self, path: str | os.PathLike[str] | None, *, allow_pickle: bool = False) -> None:
        """Begin to count steps: a snapshot was saved or loaded.

        Args:
            path: Its path; None if there is none, as where a run begins.
            allow_pickle: Whether values without a safe encoding are pickled.
        """
        self._made, self._snapshot = 0, ""
        self._options = replace(self._options, allow_pickle=allow_pickle)
        if path is not None:
            path = os.fspath(path)
            self._snapshot = path if "://" in path else str(Path(local_path(path)).absolute())

    @property
    def are_due(self) -> bool:
        """Whether the step that was just made gets a witness."""
        return bool(self._snapshot) and self._made < self.steps

    def take(self, source: Callable[[], StateSource]) -> None:
        """Store or compare the witness of this step. All ranks call it, if one is due.

        Args:
            source: Returns the state of this rank, as a save stores it.

        Raises:
            WitnessError: The state differs, and that is to be raised.
            RankError: Another rank failed, died or hangs.
        """
        self._made += 1
        snapshot, self._snapshot = self._snapshot, ""
        try:
            joined = JoinedTake(
                snapshot,
                self._options,
                comm=self._comm,
                storage_options=self._storage_options,
                create=False,
            )
            report = joined.witness(source, self._made, on_mismatch=self._on_mismatch)
        except (WitnessError, RankError):
            raise
        except CasnapError as e:
            # It only proves something: no training ends for that. All ranks have the same error.
            if own_rank() == 0:
                _log.warning("no witness of step %d after %s: %s", self._made, snapshot, e)
        else:
            if report.equal and not report.not_compared:
                self._snapshot = snapshot
