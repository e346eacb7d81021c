"""What all trainers do with checkpoints: save, find the last one, let old ones go, load, refuse.

An adapter says how its framework calls a checkpoint, and what of a state is whose. The rest is
here: a :class:`Save` takes the snapshot, and has the process know its folder
(``folders/rotation.py``); :class:`Checkpoints` finds and prunes those that are numbered; and the
errors have one form.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from casnap import PendingSnapshot, Snapshot, Stateful
from casnap.errors import (
    NotAStoreError,
    SnapshotNotFoundError,
    StateError,
)
from casnap.extending import (
    Comm,
    ForeignCheckpoints,
    JoinedTake,
    StateSource,
    TakeOptions,
    component_of,
    exists,
    is_folder,
    is_link,
    local_path,
    own_rank,
    paths_in,
)
from casnap.integrations.folders.rotation import forget, forget_deleted, note_saved
from casnap.integrations.notices import put_notices

StrPath: TypeAlias = str | os.PathLike[str]
_log = logging.getLogger("casnap")


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


# --- saving -----------------------------------------------------------------------------------


class Notices(NamedTuple):
    """Files of another library's names, which this rank puts beside a snapshot.

    Attributes:
        subject: What they say, as for :func:`casnap.integrations.notices.notice`.
        names: Their names.
    """

    subject: str
    names: Sequence[str]


class Save:
    """One save of a checkpoint, by all ranks that make it together.

    Snapshots beside it whose folders this process saw go are forgotten first.

    Args:
        path: The path of the snapshot, or its name in ``store``.
        options: How to take it.
        notices: What this rank puts beside the snapshot, once that is durable.
        comm: The ranks; by default the whole world.
        store: The :class:`casnap.Store`, if one was given.
        storage_options: How to reach a remote store.
        root: A folder of this machine that the user has named for checkpoints. It becomes the store
            of a path deeper in it, if there is none above that path yet.
        advice: What a caller is told who saves within another call of casnap.
    """

    def __init__(
        self,
        path: StrPath,
        options: TakeOptions,
        notices: Notices | None = None,
        *,
        comm: Callable[[], Comm] | None = None,
        store: object = None,
        storage_options: Mapping[str, Any] | None = None,
        root: StrPath | None = None,
        advice: str = "",
    ) -> None:
        self._notices = notices
        self._take = JoinedTake(
            path,
            options,
            comm=comm,
            store=store,
            storage_options=storage_options,
            root=root,
            advice=advice,
        )
        if self.comm.rank == 0:
            forget_deleted(self._take.view, self._take.full_name)

    @property
    def comm(self) -> Comm:
        """The ranks."""
        return self._take.comm

    def take(self, source: Callable[[], StateSource]) -> Snapshot:
        """Take the snapshot of what ``source`` returns; it is durable when this returns."""
        snapshot = self._take.take(source)
        self._note(snapshot)
        return snapshot

    def begin(self, source: Callable[[], StateSource]) -> PendingSnapshot:
        """Copy what ``source`` returns, and take the snapshot in the background."""
        return self._take.begin(source, on_stored=self._note)

    def _note(self, snapshot: Snapshot) -> None:
        """See to the folder of the snapshot, which is durable."""
        if self._notices is not None:
            put_notices(snapshot, self._notices.subject, *self._notices.names)
        if self.comm.rank == 0:
            note_saved(self._take.view, self._take.full_name, snapshot.row.commit)


def plain_model(accelerator: Any, model: Any) -> Any:
    """Return a model without what Accelerate and ``torch.compile`` have put around it.

    ``keep_torch_compile=False`` does the same in newer versions of Accelerate alone. Without it,
    Accelerate takes DDP out of a compiled model that goes on training.
    """
    return accelerator.unwrap_model(getattr(model, "_orig_mod", model))


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


# --- which checkpoints there are --------------------------------------------------------------


def snapshot_at(path: StrPath, storage_options: Mapping[str, Any] | None = None) -> Snapshot | None:
    """Return the snapshot at a path; None if there is none. Symbolic links are followed."""
    path = os.fspath(path)
    try:
        return Snapshot(
            path if "://" in path else os.path.realpath(local_path(path)),
            storage_options=storage_options,
        )
    except (NotAStoreError, SnapshotNotFoundError):
        return None


class Checkpoints:
    """The checkpoints of a run that are called ``<prefix><number>``, in a folder of this machine.

    Args:
        folder: The folder.
        prefix: How their names begin.
        is_own: Whether the trainer itself has written a whole checkpoint, as files.
    """

    def __init__(self, folder: StrPath, prefix: str, is_own: Callable[[Path], bool]) -> None:
        self._folder = Path(local_path(folder))
        self._prefix = prefix
        self._is_own = is_own

    def paths(self) -> list[Path]:
        """Return the folders that are called so, whole or not, by their numbers."""
        numbered = [path for path in paths_in(self._folder) if self.number(path) is not None]
        return sorted(filter(is_folder, numbered), key=lambda path: self.number(path) or 0)

    def number(self, path: StrPath) -> int | None:
        """Return the number of a checkpoint; None if it has another name."""
        match = re.fullmatch(rf"{re.escape(self._prefix)}(\d+)", Path(path).name)
        return None if match is None else int(match[1])

    def last(self, comm: Comm) -> str | None:
        """Return the last one that a run can go on with, as rank 0 sees it; None if there is none.

        One whose save was cut off, whose snapshot is gone or was thinned is passed over.
        """
        return agreed(comm, self.find_last)

    def find_last(self) -> str | None:
        """Return the last one as this rank sees it."""
        for path in reversed(self.paths()):
            snapshot = snapshot_at(path)
            if self._is_own(path) or (snapshot is not None and not snapshot.thinned):
                return str(path)
            why = "its save was cut off, or its snapshot is gone"
            if snapshot is not None:
                why = f"its snapshot was thinned, and has lost {', '.join(snapshot.thinned)}"
            _log.warning("%s is passed over: %s", path, why)
        return None

    def forget_oldest(self, keep: int) -> None:
        """Forget the oldest snapshots beyond a number, and remove what hooks put in their folders.

        What the trainer has written stays. An error with a folder is a warning only.
        """
        checkpoints = [
            (path, s) for path in self.paths() if not self._is_own(path) if (s := snapshot_at(path))
        ]
        for path, snapshot in checkpoints[: -max(keep, 1)]:
            if forget(snapshot) and not is_link(path) and exists(path):
                try:
                    shutil.rmtree(path)
                except OSError as e:
                    _log.warning("%s is deleted, but its folder stays: %s", path, e)


class _Path(msgspec.Struct, array_like=True):
    path: str | None


def agreed(comm: Comm, find: Callable[[], str | None]) -> str | None:
    """Return what rank 0 finds: on a network's file system, ranks may see other folders."""
    found = find() if comm.rank == 0 else None
    return comm.broadcast_message(_Path(found), _Path).path


def not_found_error(path: StrPath, others: str = "") -> SnapshotNotFoundError:
    """Return the error for a place with no checkpoint; it says what of another form is there.

    Args:
        path: The path of a checkpoint, or of a folder of checkpoints.
        others: What else than a snapshot a checkpoint could be here.
    """
    text, advice = os.fspath(path), ""
    if "://" not in text:
        folder = Path(local_path(text))
        inner_advice = ForeignCheckpoints(folder).advice_within()
        advice = ForeignCheckpoints(folder).advice() or (
            f". {inner_advice}" if inner_advice else ""
        )
    what = (
        f"checkpoint at {text}, neither a snapshot nor {others}"
        if others
        else f"snapshot at {text}"
    )
    return SnapshotNotFoundError(f"there is no {what}{advice}")


def both_there_error(path: StrPath, whose: str, mend: str) -> StateError:
    """Return the error for a place with a snapshot, and a checkpoint that a trainer wrote later.

    Args:
        path: The path of both.
        whose: Who has written the other one: "the Trainer itself".
        mend: How that one is removed.
    """
    return StateError(
        f"{os.fspath(path)} holds a snapshot of casnap, and a checkpoint that {whose} has written "
        f"there later: {mend}, or remove the snapshot by `casnap rm`, and the one that is left is "
        "loaded"
    )


# --- loading ----------------------------------------------------------------------------------


def check_saved_by(snapshot: Snapshot, module: str, keys: Collection[str]) -> None:
    """Check that a snapshot is one of an integration, and has not lost a key.

    Raises:
        StateError: It has not the keys that this integration saves.
        EntryNotFoundError: It was thinned, and lacks one.
    """
    for key in keys:
        check_whole(snapshot, key)
    if not snapshot.contents.keys() >= set(keys):
        raise StateError(f"{snapshot.path} was not saved by {module}")


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
