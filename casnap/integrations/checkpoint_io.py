"""The plugin for Lightning, which comes as two packages: ``lightning`` and ``pytorch_lightning``.

``lightning.py`` and ``pytorch_lightning.py`` each derive from :class:`SnapshotIO` and from the
class of their package.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fsspec.core import url_to_fs

from casnap import Snapshot
from casnap.errors import StateError, UnsupportedTypeError, WitnessError
from casnap.extending import (
    JoinedTake,
    LiveState,
    SingleProcess,
    TakeOptions,
    exists,
    is_file,
    is_folder,
    is_link,
    is_taken,
    key_of,
    local_path,
    log_remarks,
    map_leaves,
    own_rank,
    paths_in,
)
from casnap.integrations.folders.rotation import forget
from casnap.integrations.trainers import (
    Save,
    StrPath,
    Value,
    check_alone,
    not_found_error,
    snapshot_at,
)
from casnap.integrations.witnesses import OnMismatch, Witnesses

_log = logging.getLogger("casnap")
# Prefixes of temporary files of the tuner. They lie in a folder that the user has not named, where
# casnap must not make a store.
_FOR_THE_MOMENT = (".lr_find_", ".scale_batch_size_")
# The method of a ModelCheckpoint that lists what ckpt_path="last" may mean.
_FIND_LAST = "_find_last_checkpoints"
# The end of the stem of a replaced file, which is kept until the new snapshot is durable.
# It has no dot: in a name without a suffix, that would begin one.
_ASIDE = "-replaced-by-casnap"


if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class SnapshotIO(_Base):
    """Saves each checkpoint of Lightning as a snapshot at the checkpoint's path.

    The folder of the checkpoints, ``dirpath``, is the store, unless there is a store above it; this
    holds even if ``filename`` has slashes, as with names of metrics. Files that Lightning itself
    wrote before are still loaded and removed. Two kinds of checkpoints stay Lightning's files:
    temporary ones of the tuner, and those that are saved within another call of casnap, for example
    if SLURM requeues the job during a save.

    Args:
        async_save: Return once the state is copied, and store it in the background. The next save
            or load, or the end of the run, waits for that, and raises its error. A checkpoint that
            Lightning removes is kept until the one that replaces it is stored.
        allow_pickle: Unpickle values that have no safe encoding, such as the hyperparameters of
            some models. They are stored by pickle even without it, as Lightning does, with a
            warning; but loading them needs it, or ``weights_only=False``.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.
        witness_steps: How many steps after each checkpoint get a witness, by which a run that
            resumes proves that it computes the same; see ``docs/guides/proving-a-resume.md``. This
            needs a ``ModelCheckpoint``.
        on_mismatch: "warn" if a resumed run computes something else, or "raise".
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        witness_steps: int = 0,
        on_mismatch: OnMismatch = "warn",
    ) -> None:
        self._witnesses = Witnesses(
            witness_steps, on_mismatch, comm=SingleProcess, storage_options=storage_options
        )
        self._async_save = async_save
        self._allow_pickle = allow_pickle
        self._pickles = allow_pickle
        self._storage_options = storage_options
        self._waits: list[Callable[[], Snapshot]] = []
        self._path_saved = ""
        self._outdated: list[StrPath] = []
        self._roots: set[str] = set()
        self._names_of_last: set[str] = set()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: StrPath,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a snapshot of a checkpoint, in this process alone; replace one of the same name.

        Args:
            checkpoint: The checkpoint that Lightning saves.
            path: The path of the snapshot.
            storage_options: These replace the storage options of this object.

        Raises:
            CasnapError: This checkpoint, or the one before it, cannot be stored.
        """
        if not JoinedTake.may_begin():
            self._save_file(checkpoint, path)
            return
        self.wait()
        if Path(os.fspath(path)).name.startswith(_FOR_THE_MOMENT):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        self._path_saved = os.fspath(path)
        try:
            wait = self._take(checkpoint, path, storage_options)
        except UnsupportedTypeError as e:
            if self._pickles:
                raise
            # Lightning itself would pickle the value. The error comes only after hours of training,
            # and no training may fail for a value of its hyperparameters.
            _log.warning(
                "%s. It is stored by pickle, as Lightning does; to load this checkpoint, use "
                "CasnapCheckpointIO(allow_pickle=True), or weights_only=False",
                e,
            )
            self._pickles = True
            wait = self._take(checkpoint, path, storage_options)
        if self._async_save:
            self._waits.append(wait)
        else:
            wait()
        self._witnesses.follow(path, allow_pickle=self._pickles)

    def _save_file(self, checkpoint: dict[str, Any], path: StrPath) -> None:
        """Write a checkpoint as Lightning does, when a signal has interrupted a call of casnap.

        A snapshot would need locks that the interrupted call holds.
        """
        path = os.fspath(path)
        if is_folder(local_path(path)) or path == self._path_saved:
            # Another name, since the interrupted call may be making a snapshot of this name.
            suffix = Path(path).suffix
            path = f"{path.removesuffix(suffix)}.saved-within-a-call{suffix}"
        super().save_checkpoint(checkpoint, path)
        _log.warning(
            "%s was asked for within another call of casnap, as by a signal handler during a save, "
            "so it is a file of Lightning's, not a snapshot; it is loaded like one",
            path,
        )

    def _take(
        self, checkpoint: dict[str, Any], path: StrPath, options: Mapping[str, Any] | None
    ) -> Callable[[], Snapshot]:
        place, aside = Path(local_path(path)), _aside(path)
        was_there = aside is not None and _is_replaceable(place)
        if aside is not None and was_there:
            aside = _over(aside, snapshot_at(place, follows=False))
            place.replace(aside)
        elif aside is not None and place.stem.startswith(tuple(self._names_of_last)):
            # Lightning looks for its last checkpoint by folder. The snapshot's own one comes after
            # the commit: a kill in between would hide the snapshot.
            with suppress(OSError):  # the take tells it
                place.mkdir(parents=True, exist_ok=True)

        def put_back() -> None:
            if aside is not None and was_there and not is_taken(place):
                aside.replace(place)

        def wait() -> Snapshot:
            try:
                snapshot = pending if isinstance(pending, Snapshot) else pending.wait()
            except BaseException:
                put_back()
                raise
            for replaced in _replaced(path):
                replaced.unlink(missing_ok=True)
            return snapshot

        try:
            save = Save(
                path,
                TakeOptions(
                    metadata=_metadata_of(checkpoint), overwrite=True, allow_pickle=self._pickles
                ),
                comm=SingleProcess,
                storage_options=options or self._storage_options,
                root=self._root_of(path),
            )
            state = LiveState({key: Value(value) for key, value in checkpoint.items()})
            pending = (save.begin if self._async_save else save.take)(lambda: state)
        except BaseException:
            put_back()
            raise
        return wait

    def _root_of(self, path: StrPath) -> str | None:
        """Return the innermost ``dirpath`` of a callback above a path; None if there is none."""
        parents = Path(local_path(path)).absolute().parents
        return max((r for r in self._roots if Path(r) in parents), key=len, default=None)

    def load_checkpoint(
        self, path: StrPath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, verified.

        Args:
            path: The path of a snapshot, or of a file, which Lightning reads itself.
            map_location: The device of the tensors; the CPU by default.
            weights_only: ``False`` also unpickles values that were stored by pickle.

        Raises:
            SnapshotNotFoundError: There is no checkpoint at this path.
            StateError: Both a snapshot and a file, or another checkpoint, are at this path.
            DamagedError: Stored bytes are missing or damaged.
        """
        self.wait()
        self._witnesses.follow(None)
        snapshot, here = snapshot_at(path, self._storage_options), Path(local_path(path))
        # A save that should have replaced the file may have been cut off.
        cut_off = (f for f in _replaced(path) if not _is_successor(snapshot, f))
        file = here if is_file(here) else next(cut_off, None)
        if file is not None and snapshot is not None:
            raise StateError(
                f"{file} is a file, and the store {snapshot.store.uri} has a snapshot "
                f"{snapshot.name!r} as well, with {snapshot.metadata.user}; move the file away to "
                "load the snapshot, or load the file under another name"
            )
        if file is not None:
            load = self._load_file if is_file(file) else self.load_checkpoint
            return load(file, map_location, weights_only)
        if snapshot is None:
            if _aside(path) is None and url_to_fs(os.fspath(path))[0].isfile(path):
                return self._load_file(path, map_location, weights_only)
            raise not_found_error(path, "a file")
        check_alone(path)
        allow_pickle = self._allow_pickle or weights_only is False
        self._witnesses.follow(snapshot.path, allow_pickle=self._pickles)
        checkpoint = _values_of(snapshot, allow_pickle=allow_pickle)
        # One process has taken it, for all.
        log_remarks(snapshot.contents, snapshot.contents.entries(), own_rank(), ranks=1)
        return _move_to(checkpoint, map_location)

    def _load_file(
        self, path: StrPath, map_location: Any, weights_only: bool | None
    ) -> dict[str, Any]:
        # Lightning has weights_only= since 2.6.
        given = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint: dict[str, Any] = super().load_checkpoint(path, map_location or "cpu", **given)
        return checkpoint

    def remove_checkpoint(self, path: StrPath) -> None:
        """Delete a snapshot, whose bytes casnap frees later; or remove a file.

        If a save is running in the background, the checkpoint is removed only once that save has
        succeeded.
        """
        self._outdated.append(path)
        if not self._waits and JoinedTake.may_begin():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, then remove the checkpoints that it replaces.

        Raises:
            CasnapError: The save failed. Nothing is removed then.
        """
        outdated, self._outdated = self._outdated, []
        while self._waits:
            self._waits.pop(0)()
        for path in outdated:
            self._forget(path)

    def _forget(self, path: StrPath) -> None:
        if is_link(link := Path(local_path(path))):
            link.unlink()
            return
        snapshot = snapshot_at(path, self._storage_options)
        if snapshot is not None:
            forget(snapshot)
        # A file, or the files that Lightning's sharded strategies have put beside the snapshot.
        if snapshot is None or "://" not in os.fspath(path):
            super().remove_checkpoint(path)

    def _witness(self, checkpoint: dict[str, Any]) -> WitnessError | None:
        """Make a witness of what would be saved now, if one is due.

        The keys ``callbacks`` and ``loops`` are left out: they hold times, paths, and how often a
        run was resumed. An error is returned, so that all ranks can raise it.
        """
        if not self._witnesses.are_due:
            return None
        kept = {k: Value(v) for k, v in checkpoint.items() if k not in ("callbacks", "loops")}
        try:
            self._witnesses.take(lambda: LiveState(kept))
        except WitnessError as e:
            return e
        return None

    def teardown(self) -> None:
        """Wait for the save in the background."""
        self.wait()


def _aside(path: StrPath) -> Path | None:
    """Return where a replaced file is kept until the new snapshot is durable; None in a bucket.

    The new name begins and ends as the old one does: Lightning finds its last checkpoint by that,
    also if the save is cut off before its commit.
    """
    if "://" in (path_here := local_path(path)):
        return None
    place = Path(path_here)
    return place.with_name(f"{place.stem}{_ASIDE}{place.suffix}")


def _over(aside: Path, snapshot: Snapshot | None) -> Path:
    """Return where a file is kept if the store has an older snapshot of its name.

    The commit id of that snapshot, in the name, tells it from the one that replaces the file.
    """
    return aside if snapshot is None else aside.with_stem(f"{aside.stem}-{snapshot.commit_id}")


def _replaced(path: StrPath) -> list[Path]:
    """Return the files that saves of a checkpoint have put aside, and not deleted yet."""
    aside = _aside(path)
    if aside is None:
        return []
    place = Path(local_path(path))
    return [p for p in paths_in(aside.parent) if _successor(p) == place and exists(p)]


def _successor(place: Path) -> Path | None:
    """Return the path of the snapshot that replaces a file, if a save has put this file aside."""
    stem, is_aside, _ = place.stem.rpartition(_ASIDE)
    return place.with_stem(stem) if is_aside else None


def _is_successor(snapshot: Snapshot | None, aside: Path) -> bool:
    """Whether the snapshot at a path is the one that has replaced a file."""
    return snapshot is not None and not aside.stem.endswith(f"-{snapshot.commit_id}")


def _is_replaceable(place: Path) -> bool:
    """Whether a save may replace the file or link at a path, as Lightning would."""
    return is_link(place) or (is_file(place) and zipfile.is_zipfile(place))


def _values_of(snapshot: Snapshot, *, allow_pickle: bool) -> dict[str, Any]:
    """Return a checkpoint as Lightning saved it, in new memory."""
    keys = map(key_of, snapshot.contents.trees(0))
    return {k: snapshot.get_state_dict_for_key(k, allow_pickle=allow_pickle) for k in keys}


def _move_to(checkpoint: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """Return a checkpoint with its tensors moved to ``map_location``."""

    def move(leaf: Any) -> Any:
        return leaf.to(map_location) if isinstance(leaf, torch.Tensor) else leaf

    if isinstance(map_location, str | torch.device):
        # Do not use Lightning's function: its dicts would lose their attribute with the modules'
        # versions.
        return {key: map_leaves(value, move) for key, value in checkpoint.items()}
    if map_location is not None:
        raise TypeError(f"map_location= is a device here, not {map_location!r:.80}")
    return checkpoint


def read_snapshots(saving: Any) -> None:
    """Make Lightning's ``load_from_checkpoint``, which uses no plugin, read snapshots too.

    Args:
        saving: The module of Lightning that reads its files.
    """
    read_file = saving.pl_load

    @functools.wraps(read_file)
    def read(path: Any, map_location: Any = None, **named: Any) -> Any:
        try:
            return read_file(path, map_location=map_location, **named)
        except (FileNotFoundError, IsADirectoryError):
            if not isinstance(path, str | os.PathLike) or (snapshot := snapshot_at(path)) is None:
                raise
        checkpoint = _values_of(snapshot, allow_pickle=named.get("weights_only") is False)
        if "pytorch-lightning_version" not in checkpoint:
            raise StateError(
                f"{snapshot.path} was saved by a sharded strategy, or not by Lightning; make the "
                "model and read its weights into it: "
                'casnap.Snapshot(path).restore({"state_dict": model})'
            )
        # By default, Lightning passes a function for tensors in files; others come to the CPU.
        return _move_to(checkpoint, None if callable(map_location) else map_location)

    saving.pl_load = read


class StepWitnesses(_Base):
    """Has a plugin make its witnesses: a callback, since the plugin is told of no step.

    Args:
        io: The plugin. Of many ranks, only that of the first one saves.
    """

    def __init__(self, io: SnapshotIO) -> None:
        self.io = io
        self._left, self._step, self._is_asking = 0, 0, False

    def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
        """Begin to count steps anew: a checkpoint is saved."""
        if not self._is_asking:
            self._left, self._step = self.io._witnesses.steps, trainer.global_step

    def on_load_checkpoint(self, _: Any, __: Any, checkpoint: Mapping[str, Any]) -> None:
        """Begin to count steps anew: a checkpoint was loaded."""
        self._left, self._step = self.io._witnesses.steps, checkpoint["global_step"]

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Make a witness, on all ranks, if this batch has ended a step."""
        if not self._left or trainer.global_step == self._step:
            return
        self._left, self._step, self._is_asking = self._left - 1, trainer.global_step, True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self._is_asking = False
        error = self.io._witness(checkpoint) if trainer.is_global_zero else None
        if (error := trainer.strategy.broadcast(error)) is not None:
            raise error


def note_folders(callback: Any, witnesses: Any) -> None:
    """Make each callback tell the plugin, when it is set up, what only the callback knows.

    This is its ``dirpath``, and its name of the last checkpoint. The plugin itself only gets the
    paths of checkpoints. If it makes witnesses, the Trainer gets another callback for these.

    Args:
        callback: The class, ``ModelCheckpoint``.
        witnesses: The class of the other callback.
    """
    set_up = callback.setup

    @functools.wraps(set_up)
    def set_up_noted(self: Any, trainer: Any, *args: Any, **named: Any) -> None:
        set_up(self, trainer, *args, **named)
        plugin = trainer.strategy.checkpoint_io
        # Lightning's plugin for saves in the background wraps another plugin.
        plugin = getattr(plugin, "checkpoint_io", plugin)
        if not isinstance(plugin, SnapshotIO):
            return
        if plugin._witnesses.steps and plugin is not trainer.strategy.checkpoint_io:
            raise StateError("witness_steps= goes with async_save=True, not with AsyncCheckpointIO")
        if plugin._witnesses.steps and not any(isinstance(c, witnesses) for c in trainer.callbacks):
            trainer.callbacks.append(witnesses(plugin))
        if self.dirpath:
            plugin._roots.add(str(Path(local_path(self.dirpath)).absolute()))
            if hasattr(callback, _FIND_LAST):
                plugin._names_of_last.add(self.CHECKPOINT_NAME_LAST)

    callback.setup = set_up_noted


def pass_over_cut_off(callback: Any) -> None:
    """Have ``ckpt_path="last"`` pass over what a save that was cut off has left.

    That is the folder of a first save, which the plugin makes before the save, and which is empty
    until the snapshot is committed. Or it is the file that a save has replaced, if the snapshot is
    committed, but its folder is not made yet, or the file not deleted. Or it is an older snapshot,
    if the file was saved over it.

    Args:
        callback: The class, ``ModelCheckpoint``.
    """
    find = getattr(callback, _FIND_LAST, None)
    if find is None:
        return

    @functools.wraps(find)
    def find_whole(self: Any, trainer: Any) -> set[str]:
        replaced = set[str]()
        for path in find(self, trainer):
            place = Path(local_path(path))
            successor = _successor(place)
            if successor is not None and (snapshot := snapshot_at(successor)) is not None:
                if not _is_successor(snapshot, place):
                    # The file is newer, so pass over the folder of the snapshot.
                    replaced.update({os.path.normpath(successor)} if is_folder(successor) else ())
                    continue
                with suppress(OSError):  # it is a file again, or nobody may write here
                    successor.mkdir(exist_ok=True)
                replaced.add(path)
            elif is_folder(place) and snapshot_at(place) is None:
                with suppress(OSError):  # it is not empty, or another rank was faster
                    place.rmdir()
        return find(self, trainer) - replaced  # type: ignore[no-any-return]

    setattr(callback, _FIND_LAST, find_whole)


def _metadata_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata for `casnap ls`: the progress of the training, and the monitored metrics."""
    numbers: dict[str, Any] = {
        k: checkpoint[k] for k in ("epoch", "global_step") if k in checkpoint
    }
    if "global_step" in checkpoint:
        # Rules of retention look for this name.
        numbers["step"] = checkpoint["global_step"]
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, Mapping) and isinstance(state.get("monitor"), str):
            score = state.get("current_score")
            if isinstance(score, torch.Tensor) and math.isfinite(score):
                numbers[state["monitor"]] = score.item()
    return numbers
