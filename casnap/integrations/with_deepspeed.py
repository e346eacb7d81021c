"""Save and load the state of a trainer together with its DeepSpeed engine, if it has one.

This module can be imported without DeepSpeed; ``deepspeed.py`` cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from casnap import Snapshot, Stateful
from casnap.extending import LiveState, TakeOptions
from casnap.integrations.trainers import Notices, Save, StrPath
from casnap.integrations.witnesses import Witnesses

KEYS = ("model", "optimizer", "engine")
"""The keys of a snapshot that hold the state of an engine."""


def take(
    engine: Any,
    state: Mapping[str, Stateful],
    path: StrPath,
    options: TakeOptions,
    notices: Notices,
    root: StrPath | None = None,
) -> Snapshot:
    """Take a snapshot of a state, and of an engine if there is one. All ranks call it.

    Raises:
        StateError: The engine splits the model in a way that casnap does not support.
    """
    if engine is None:
        return Save(path, options, notices, root=root).take(lambda: LiveState(state))
    from casnap.integrations.deepspeed import check_supported, take_with

    check_supported(engine)
    save = Save(path, options, notices, root=root)
    return take_with(engine, save.take, state, allow_pickle=options.allow_pickle)


def witness(engine: Any, state: Mapping[str, Stateful], witnesses: Witnesses) -> None:
    """Make the witness of a step, of the same state as :func:`take`. All ranks call it."""
    if engine is None:
        witnesses.take(lambda: LiveState(state))
        return
    from casnap.integrations.deepspeed import take_with

    take_with(engine, witnesses.take, state)


def check(engine: Any, snapshot: Snapshot, *, allow_pickle: bool = False) -> None:
    """Check that a snapshot fits an engine, if there is one, before other values are loaded.

    Raises:
        MismatchError: The snapshot does not fit.
    """
    if engine is not None:
        from casnap.integrations.deepspeed import check_with

        check_with(engine, snapshot.path, allow_pickle=allow_pickle)


def load(
    engine: Any, snapshot: Snapshot, *, allow_pickle: bool = False
) -> tuple[str | None, dict[str, Any]]:
    """Load the engine's part of a snapshot; return the same as DeepSpeed's ``load_checkpoint``."""
    from casnap.integrations.deepspeed import load_checkpoint

    folder, _, name = snapshot.path.rpartition("/")
    return load_checkpoint(engine, folder, name, allow_pickle=allow_pickle)


def not_of_engine(engine: Any, schedulers: Iterable[Any]) -> list[Any]:
    """Return the schedulers that an engine does not keep itself; all if there is no engine."""
    if engine is None:
        return list(schedulers)
    from accelerate.utils import DeepSpeedSchedulerWrapper  # there only beside DeepSpeed

    return [each for each in schedulers if not isinstance(each, DeepSpeedSchedulerWrapper)]
