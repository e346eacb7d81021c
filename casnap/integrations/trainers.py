"""The common part of all trainers: save, find the last checkpoint, delete old ones, load, refuse.

The module of a trainer knows how its framework names checkpoints, and which rank owns which part of
a state. The rest is here. A :class:`Save` takes the snapshot, and remembers its folder
(``folders/rotation.py``). :class:`Checkpoints` finds and prunes numbered checkpoints. So all
trainers raise the same errors.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from casnap import HealthOptions, PendingSnapshot, Snapshot, Stateful
from casnap.errors import (
    NotAStoreError,
    SnapshotError,
    SnapshotNotFoundError,
    StateError,
    shell_word,
)
from casnap.extending import (
    Comm,
    ForeignCheckpoints,
    JoinedTake,
    StateSource,
    TakeOptions,
    WeightFiles,
    amount,
    component_of,
    exists,
    is_folder,
    is_link,
    join,
    local_path,
    own_rank,
    paths_in,
)
from casnap.integrations.folders.rotation import forget, forget_deleted, note_saved
from casnap.integrations.notices import put_notices

StrPath: TypeAlias = str | os.PathLike[str]
_log = logging.getLogger("casnap")
WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)
"""The names of the files that trainers of Hugging Face load a model from, as globs."""
WEIGHTS_ALONE = (
    "For its weights, `casnap pull FOLDER NEW`, with this folder and a new one, writes a folder "
    'that every program opens, or use casnap.Snapshot(folder).restore({"model": model})'
)
"""The sentence, in the notices of trainers, that says how to get the weights alone."""
OTHER_WEIGHTS = "these are not the weights of the snapshot in that folder"
"""The message about weights that somebody else has put beside a snapshot, after their paths."""


class Value(NamedTuple):
    """Wraps a plain value of any type, so that an app state can have it under a key.

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
    """Files with another library's names, which this rank puts beside a snapshot.

    Attributes:
        subject: Their message, as for :func:`casnap.integrations.notices.put_notices`.
        names: The names of the files.
    """

    subject: str
    names: Sequence[str]

    def put(self, snapshot: Snapshot) -> bool:
        """Put the missing files, as ``put_notices`` does; return whether all of them are there."""
        return put_notices(snapshot, self.subject, *self.names)


class Save:
    """One save of a checkpoint, which all ranks make together.

    Before it saves, it deletes each older snapshot in the same parent folder whose own folder this
    process has seen, and a user or a program has deleted since.

    Args:
        path: The path of the snapshot, or its name in ``store``.
        options: How to take it.
        notices: Files that this rank puts beside the snapshot once that is durable.
        comm: Returns the ranks; by default the whole world.
        store: The :class:`casnap.Store` for the snapshot; None: the store of ``path``.
        storage_options: How to reach a remote store.
        root: A folder of this machine that the user has named for checkpoints. It becomes the store
            for a path deeper in it, if there is no store above that path yet.
        advice: Advice for the error if the caller is inside another call of casnap.
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
        """Take a snapshot of the state that ``source`` returns; return once it is durable."""
        snapshot = self._take.take(source)
        self._note(snapshot)
        return snapshot

    def begin(self, source: Callable[[], StateSource]) -> PendingSnapshot:
        """Copy the state that ``source`` returns, and take the snapshot in the background."""
        return self._take.begin(source, on_stored=self._note)

    def _note(self, snapshot: Snapshot) -> None:
        """Put the notices of a durable snapshot, and remember its folder."""
        if self._notices is not None:
            self._notices.put(snapshot)
        if self.comm.rank == 0:
            note_saved(self._take.view, self._take.full_name, snapshot.row.commit)


def plain_model(accelerator: Any, model: Any) -> Any:
    """Return a model without what Accelerate and ``torch.compile`` have put around it.

    Only newer versions of Accelerate can do the same, by ``keep_torch_compile=False``. Without that
    option, Accelerate would take DDP out of a compiled model whose training goes on.
    """
    return accelerator.unwrap_model(getattr(model, "_orig_mod", model))


def step_in(state: object) -> dict[str, int]:
    """Return the step of a training as metadata, under the name that rules of retention read.

    Args:
        state: The state that a trainer saves. If it has no count at its top, this returns {}.
    """
    values = state if isinstance(state, Mapping) else {}
    for name in ("step", "global_step", "iteration"):
        if isinstance(count := values.get(name), int) and not isinstance(count, bool):
            return {"step": count}
    return {}


# --- finding checkpoints ----------------------------------------------------------------------


def snapshot_at(
    path: StrPath, storage_options: Mapping[str, Any] | None = None, *, follows: bool = True
) -> Snapshot | None:
    """Return the snapshot at a path; None if there is none.

    Args:
        path: The path. Symbolic links in it are followed.
        storage_options: How to reach a remote store.
        follows: Whether a link at the path itself is followed too.
    """
    path = os.fspath(path)
    if "://" not in path:
        place = Path(local_path(path))
        resolved = Path(os.path.realpath(place if follows else place.parent))
        path = str(resolved if follows else resolved / place.name)
    try:
        return Snapshot(path, storage_options=storage_options)
    except (NotAStoreError, SnapshotNotFoundError):
        return None


class Checkpoints:
    """The checkpoints of a run that are called ``<prefix><number>``, in a folder of this machine.

    Args:
        folder: The folder.
        prefix: The prefix of their names.
        is_own: Returns whether the trainer itself has written a whole checkpoint at a path.
    """

    def __init__(self, folder: StrPath, prefix: str, is_own: Callable[[Path], bool]) -> None:
        self._folder = Path(local_path(folder))
        self._prefix = prefix
        self._is_own = is_own

    def paths(self) -> list[Path]:
        """Return all folders that are named as checkpoints, in the order of their numbers."""
        numbered = [path for path in paths_in(self._folder) if self.number(path) is not None]
        return sorted(filter(is_folder, numbered), key=lambda path: self.number(path) or 0)

    def number(self, path: StrPath) -> int | None:
        """Return the number of a checkpoint; None if it has another name."""
        match = re.fullmatch(rf"{re.escape(self._prefix)}(\d+)", Path(path).name)
        return None if match is None else int(match[1])

    def last(self, comm: Comm) -> str | None:
        """Return the last checkpoint from which a run can resume, as rank 0 sees it, or None.

        This skips checkpoints whose save was cut off, and those whose snapshot is gone, thinned or
        unhealthy.

        Raises:
            SnapshotError: All checkpoints are unhealthy.
        """
        return agreed(comm, self.find_last)

    def find_last(self) -> str | None:
        """Return the last checkpoint from which a run can resume, as this rank sees it.

        Raises:
            SnapshotError: All checkpoints are unhealthy.
        """
        unhealthy: Snapshot | None = None
        for path in reversed(self.paths()):
            snapshot = snapshot_at(path)
            if self._is_own(path):
                return str(path)
            why = "its save was cut off, or its snapshot is gone"
            if snapshot is not None and snapshot.thinned:
                why = f"its snapshot was thinned, and has lost {', '.join(snapshot.thinned)}"
            elif snapshot is not None:
                if not (snapshot.unhealthy and HealthOptions.are_obeyed()):
                    return str(path)
                unhealthy = unhealthy or snapshot
                why = f"NaN or infinite elements in {amount(snapshot.unhealthy, 'tensor')}"
            _log.warning("%s is passed over: %s", path, why)
        return None if unhealthy is None else self._without_folder(unhealthy)

    def _without_folder(self, unhealthy: Snapshot) -> str:
        """Return the path of the last healthy checkpoint that has a snapshot, but no folder left.

        Args:
            unhealthy: The last checkpoint that has a folder. No checkpoint with a folder is
                healthy.

        Raises:
            SnapshotError: There is no healthy checkpoint.
        """
        run = unhealthy.name.rpartition("/")[0]
        for snapshot in reversed(unhealthy.store.snapshots(run or None)):
            place, is_well = self._folder / snapshot.name.rpartition("/")[2], not snapshot.unhealthy
            is_of_run = snapshot.row.run_of(snapshot.name) == run and not snapshot.row.is_rewound
            if is_well and is_of_run and self.number(place) is not None and not snapshot.thinned:
                _log.warning("%s is taken: its folder is gone, but not its snapshot", place)
                return str(place)
        raise SnapshotError(
            f"all checkpoints in {self._folder} have NaN or infinite elements; the last one is "
            f"{unhealthy.path}: `casnap show {shell_word(unhealthy.path)} --health` says where. To "
            "resume from it after all, set CASNAP_HEALTH=off, or name it"
        )

    def next_number(self) -> int:
        """Return the number for the next checkpoint: one more than the highest that exists."""
        whole = (path for path in self.paths() if self._is_own(path) or snapshot_at(path))
        return max((self.number(path) or 0 for path in whole), default=-1) + 1

    def forget_oldest(self, keep: int) -> None:
        """Delete all snapshots but the newest ``keep``, and their folders with all that is in them.

        The newest snapshot stays even if ``keep`` is 0. Snapshots that a tag or a mirror holds
        stay, and so do checkpoints that the trainer itself has written. If a folder cannot be
        deleted, a warning says so.
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
    """Return rank 0's result of ``find``: on a network file system, ranks may see other folders."""
    found = find() if comm.rank == 0 else None
    return comm.broadcast_message(_Path(found), _Path).path


def not_found_error(path: StrPath, others: str = "") -> SnapshotNotFoundError:
    """Return the error for a place without a checkpoint; it names checkpoints of another form.

    Args:
        path: The path of a checkpoint, or of a folder of checkpoints.
        others: What else than a snapshot a checkpoint could be here, in words.
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


def both_there_error(path: StrPath, whose: str, mend: str = "move its files away") -> StateError:
    """Return the error for a place with a snapshot and a checkpoint that a trainer wrote later.

    Args:
        path: The path of both.
        whose: Who has written that checkpoint, such as "the Trainer itself".
        mend: How to remove that checkpoint.
    """
    return StateError(
        f"{os.fspath(path)} holds a snapshot of casnap, and a checkpoint that {whose} has written "
        f"there later: {mend}, or remove the snapshot by `casnap rm`, and load the one that is left"
    )


# --- loading ----------------------------------------------------------------------------------


def check_alone(path: StrPath, saver: str = "") -> None:
    """Check that the folder of a snapshot, as this rank sees it, contains no other checkpoint.

    A program without casnap may have saved one there later, or somebody may have copied it there. A
    run that goes on from the snapshot would go on from another state than that person expects.

    Args:
        path: The path of the snapshot.
        saver: The library in whose place casnap saves, as for :class:`ForeignCheckpoints`.

    Raises:
        StateError: The folder contains a checkpoint of another library.
    """
    if (other := _other_library(path, saver)) is not None:
        raise both_there_error(path, other)


def check_beside(
    snapshot: Snapshot,
    path: StrPath,
    weights: Iterable[Path],
    keys: Collection[str] = ("model",),
) -> None:
    """Check that a snapshot's folder contains no other checkpoint, nor other weights.

    All ranks call this, and rank 0 looks. A run goes on from the snapshot, but whoever has put
    other files there may think that it goes on from them.

    Args:
        snapshot: The snapshot.
        path: Its path.
        weights: The files of weights beside it.
        keys: The keys of the snapshot that hold weights.

    Raises:
        StateError: The folder contains a checkpoint of another library, or other weights.
    """

    def found() -> str | None:
        if (other := _other_library(path)) is not None:
            return str(both_there_error(path, other))
        others = WeightFiles.others_than(snapshot.contents, weights, keys)
        if not others:
            return None
        return (
            f"{', '.join(map(str, others))}: {OTHER_WEIGHTS}. A run that resumes goes on from the "
            "snapshot: to have that, delete these files, or move them out of the folder. To train "
            "from the weights in them, begin a new run"
        )

    # By its last name: hosts may have the folder at other paths.
    name = Path(snapshot.path).name
    with join(None, None, f"looking at what lies beside {name}") as comm:
        problem = agreed(comm, found)
    if problem is not None:
        raise StateError(problem)


def _other_library(path: StrPath, saver: str = "") -> str | None:
    """Return whose checkpoint, other than the snapshot, is at a path; None if there is none."""
    if "://" in os.fspath(path):
        return None
    return ForeignCheckpoints(Path(local_path(path))).library(saver) or None


def check_saved_by(snapshot: Snapshot, module: str, keys: Collection[str]) -> None:
    """Check that an integration has saved a snapshot, and that the snapshot has all its keys.

    Raises:
        StateError: The snapshot does not have the keys that this integration saves.
        EntryNotFoundError: The snapshot was thinned, and lacks a key.
    """
    for key in keys:
        check_whole(snapshot, key)
    if not snapshot.contents.keys() >= set(keys):
        raise StateError(f"{snapshot.path} was not saved by {module}")


def check_whole(snapshot: Snapshot, key: str) -> None:
    """Check that no thinning has removed a key, without which a trainer would start from scratch.

    Raises:
        EntryNotFoundError: The snapshot was thinned, and has lost the key.
    """
    if key in snapshot.thinned:
        snapshot.contents.entry(component_of(key))


def load_own(snapshot: Snapshot, key: str, into: Stateful, *, allow_pickle: bool = False) -> bool:
    """Load this rank's value of a key; on a new rank, the value that all ranks share.

    A new rank is one that the take did not have.

    Returns:
        Whether there was a value. There is none on a new rank if each rank stored its own value.
    """
    rank = own_rank()
    check_whole(snapshot, key)
    if component_of(key) not in snapshot.contents.trees(rank):
        return False
    path = f"{rank}/{component_of(key)}" if rank < snapshot.world_size else component_of(key)
    into.load_state_dict(snapshot.read_object(path, allow_pickle=allow_pickle))
    return True
