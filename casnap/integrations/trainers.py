"""Code that the integrations of trainers share: version checks, plain values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from casnap.errors import MismatchError, NotAStoreError, SnapshotNotFoundError
from casnap.format.entries import ContainerEntry, Entry, TensorEntry
from casnap.format.names import component_of, key_of
from casnap.ranks.comm import SingleProcess
from casnap.ranks.joining import own_rank
from casnap.restore.targets import why_unfit
from casnap.runtime.environment import local_path
from casnap.runtime.nesting import refuse_nested_take
from casnap.snapshot import Snapshot, begin_take, take_from
from casnap.state.containers import live_components
from casnap.state.stateful import Stateful
from casnap.storage.places.other_formats import hint_at, hint_in
from casnap.take.capture import LiveState
from casnap.take.options import TakeOptions
from casnap.view import find_view


def check_version(package: str, minimum: str, limit: str, extra: str | None = None) -> None:
    """Check that a framework is installed, in a version that its integration was tested with.

    Args:
        package: The name of its package.
        minimum: The first version.
        limit: The first version after the last one.
        extra: The name of the integration, and of the extra of casnap; by default the package's.

    Raises:
        ImportError: It is not; the message says what was found, and what to do.
    """
    try:
        installed = version(package)
    except PackageNotFoundError:
        problem = "it is not installed"
    else:
        if _numbers(minimum) <= _numbers(installed) < _numbers(limit):
            return
        problem = f"this is {package} {installed}"
    extra = extra or package
    raise ImportError(
        f"casnap.integrations.{extra} is tested with {package} >={minimum},<{limit}, and "
        f"{problem}: pip install 'casnap[{extra}]'",
        name=package,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


class Value(NamedTuple):
    """A value of an app state that is a state itself, of any type.

    Attributes:
        value: The value.
    """

    value: Any

    def state_dict(self) -> Any:
        """Return the value."""
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse: there is nothing to load into."""
        raise TypeError("a plain value cannot be restored in place; read it instead")


def take_alone(
    path: str | os.PathLike[str],
    values: Mapping[str, Any],
    options: TakeOptions,
    *,
    storage_options: Mapping[str, Any] | None = None,
    later: bool = False,
) -> Callable[[], Snapshot]:
    """Take a snapshot of this process alone, on any rank.

    Args:
        path: The path of the snapshot.
        values: Key → a value of any type.
        options: How to take it.
        storage_options: How to reach a remote store.
        later: Return once the values may change, and store them in the background.

    Returns:
        What waits for the snapshot, and returns it.
    """
    refuse_nested_take()
    view, name = find_view(path, storage_options, create=True)
    app_state = {key: Value(value) for key, value in values.items()}
    if later:
        return begin_take(view, SingleProcess(), LiveState(app_state), name, options).wait
    snapshot = take_from(view, SingleProcess(), lambda: LiveState(app_state), name, options)
    return lambda: snapshot


def values_of(snapshot: Snapshot, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return what a process took alone, in new memory."""
    keys = map(key_of, snapshot.contents.trees(0))
    return {k: snapshot.get_state_dict_for_key(k, allow_pickle=allow_pickle) for k in keys}


def step_in(state: object) -> dict[str, int]:
    """Return the metadata that says the step of a training, as rules of retention read it.

    Args:
        state: What a trainer saves; without a count at its top there is no such metadata.
    """
    values = state if isinstance(state, Mapping) else {}
    for name in ("step", "global_step", "iteration"):
        if isinstance(count := values.get(name), int) and not isinstance(count, bool):
            return {"step": count}
    return {}


def check_fit(snapshot: Snapshot, problems: Collection[str]) -> None:
    """Check that nothing was found that does not fit a snapshot, before anything is loaded.

    Raises:
        MismatchError: Something was; the one error names it all.
    """
    if problems:
        raise MismatchError(
            f"{snapshot.path} does not fit what is to be loaded; nothing was loaded: "
            + "; ".join(problems)
        )


def unfit_parts(wanted: Any, path: str, stored: Mapping[str, Entry]) -> Iterator[str]:
    """Yield what of a value to fill does not fit what is stored.

    What is not stored is left out, as is what None stands for.

    Args:
        wanted: Tensors, plain values, and dicts, lists and tuples of those.
        path: Its path.
        stored: The entries of the snapshot, by path.
    """
    entry = stored.get(path)
    if entry is None or wanted is None:
        return
    is_sequence = isinstance(wanted, list | tuple)
    if isinstance(wanted, torch.Tensor):
        # A tensor that consists of others is a container there.
        if not isinstance(entry, ContainerEntry) and (
            reason := why_unfit(entry, tuple(wanted.shape), wanted)
        ):
            yield f"{path}: {reason}"
    elif isinstance(wanted, Mapping) or is_sequence:
        if isinstance(entry, TensorEntry):
            yield f"{path}: {type(wanted).__name__} here, a tensor in the snapshot"
        for component, inner in _elements(wanted):
            yield from unfit_parts(inner, f"{path}/{component}", stored)
    elif isinstance(entry, TensorEntry) and isinstance(wanted, str | bytes | int | float):
        yield f"{path}: {type(wanted).__name__} here, a tensor in the snapshot"


def empty_here(wanted: Any, path: str, stored: Mapping[str, Entry]) -> Iterator[str]:
    """Yield the paths of dicts of a value to fill that are empty, but not in the snapshot."""
    entry = stored.get(path)
    if not isinstance(entry, ContainerEntry) or not isinstance(wanted, Mapping | list | tuple):
        return
    if isinstance(wanted, Mapping) and not wanted and entry.count:
        yield path
    for component, inner in _elements(wanted):
        yield from empty_here(inner, f"{path}/{component}", stored)


def _elements(value: Mapping[Any, Any] | Sequence[Any]) -> Iterable[tuple[str, Any]]:
    """Return the elements of a dict, list or tuple by their path components."""
    if isinstance(value, Mapping):
        return zip(live_components(value), value.values(), strict=True)
    return zip(map(str, range(len(value))), value, strict=True)


def snapshot_at(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Snapshot | None:
    """Return the snapshot at a path; None if there is none. Symbolic links are followed."""
    path = os.fspath(path)
    try:
        return Snapshot(
            path if "://" in path else os.path.realpath(local_path(path)),
            storage_options=storage_options,
        )
    except (NotAStoreError, SnapshotNotFoundError):
        return None


def not_found_error(path: str | os.PathLike[str], others: str = "") -> SnapshotNotFoundError:
    """Return the error for a place with no checkpoint; it says what of another form is there.

    Args:
        path: The path of a checkpoint, or of a folder of checkpoints.
        others: What else than a snapshot a checkpoint could be here.
    """
    text, hint = os.fspath(path), ""
    if "://" not in text:
        folder = Path(local_path(text))
        inner_hint = hint_in(folder)
        hint = hint_at(folder) or (f". {inner_hint}" if inner_hint else "")
    what = (
        f"checkpoint at {text}, neither a snapshot nor {others}"
        if others
        else f"snapshot at {text}"
    )
    return SnapshotNotFoundError(f"there is no {what}{hint}")


def check_whole(snapshot: Snapshot, key: str) -> None:
    """Check that a snapshot has not lost a key, without which a trainer would begin anew.

    Raises:
        EntryNotFoundError: It has.
    """
    if key in snapshot.thinned:
        snapshot.contents.entry(component_of(key))


def load_own(snapshot: Snapshot, key: str, into: Stateful, *, allow_pickle: bool = False) -> bool:
    """Load what this rank, or all ranks together, took under a key.

    Returns:
        Whether there was any: a rank beyond the world of the take has none of its own.
    """
    rank = own_rank()
    check_whole(snapshot, key)
    if component_of(key) not in snapshot.contents.trees(rank):
        return False
    path = f"{rank}/{component_of(key)}" if rank < snapshot.world_size else component_of(key)
    into.load_state_dict(snapshot.read_object(path, allow_pickle=allow_pickle))
    return True
