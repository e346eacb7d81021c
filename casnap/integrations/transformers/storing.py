"""The base class of a Trainer with casnap: it loads snapshots, and the Trainer's checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import Trainer

from casnap import RNGState, Snapshot
from casnap.errors import SnapshotNotFoundError
from casnap.extending import ForeignCheckpoints, WeightFiles, is_file, own_rank
from casnap.integrations import with_deepspeed
from casnap.integrations.notices import is_notice
from casnap.integrations.sharded import optimizer_for
from casnap.integrations.trainers import (
    OTHER_WEIGHTS,
    both_there_error,
    check_beside,
    check_saved_by,
    check_whole,
    load_own,
    snapshot_at,
)
from casnap.integrations.transformers.small_files import put_back
from casnap.integrations.transformers.weights import is_its_own, may_be_others
from casnap.integrations.versions import check_methods

check_methods(
    "transformers",
    Trainer,
    [
        *("_get_output_dir", "_load_best_model", "_load_from_checkpoint", "_load_rng_state"),
        *("_load_optimizer_and_scheduler", "_load_scaler", "_save", "_save_checkpoint"),
        *("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler", "save_model"),
    ],
)
_log = logging.getLogger("casnap")
_MODULE = "casnap.integrations.transformers"
STATE = ("optimizer.pt", "scheduler.pt")
"""Files of the Trainer without which it would go on with a fresh optimizer, and say nothing."""


class StoringTrainer(Trainer):
    """A Trainer that loads from snapshots, and whose methods write no files while it saves one.

    It is the last class before ``Trainer`` in the method resolution order, so the methods of users'
    subclasses still run. The snapshot has what the replaced methods would write.
    """

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._trainer_has_saved = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for ``from_pretrained``, as the Trainer does."""
        if not self._saving_checkpoint:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saving_checkpoint:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        if not self._saving_checkpoint:
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._saving_checkpoint:
            super()._save_rng_state(output_dir)

    # --- loading ---

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        snapshot = snapshot_at(resume_from_checkpoint)
        if snapshot is None:
            if not is_its_own(Path(resume_from_checkpoint)):
                raise SnapshotNotFoundError(
                    f"{resume_from_checkpoint} holds no whole checkpoint: its save was cut off, "
                    "its snapshot was deleted, or the store of casnap is not there. "
                    "resume_from_checkpoint=True takes the last whole one"
                    + ForeignCheckpoints(Path(resume_from_checkpoint)).advice()
                )
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        check_saved_by(snapshot, _MODULE, ["files"])
        _check_folder(snapshot, Path(resume_from_checkpoint))
        if own_rank() == 0:
            put_back(snapshot, Path(resume_from_checkpoint))
        if model is None or self.is_fsdp_enabled:
            model = self._model_state(self.model if model is None else model)
        snapshot.restore({"model": model})

    def _load_best_model(self) -> None:
        snapshot = snapshot_at(self.state.best_model_checkpoint)
        if snapshot is None or self._engine is not None:
            super()._load_best_model()
        else:
            if own_rank() == 0:
                _warn_of_others(snapshot)
            snapshot.restore({"model": self._model_state(self.model)})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        snapshot = None if checkpoint is None else snapshot_at(checkpoint)
        # The Trainer calls this whenever it begins. Witnesses of another run are not this one's.
        self._witnesses.follow(_path_in(self.args.output_dir, snapshot))
        if snapshot is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        check_whole(snapshot, "optimizer")
        if "optimizer" in snapshot.contents.trees(own_rank()):
            state = self._optimizer_and_scheduler()
            if self._engine is None:
                state["optimizer"] = optimizer_for(
                    snapshot, "optimizer", self.model, self.optimizer, self.is_fsdp_enabled
                )
            snapshot.restore(state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        snapshot = None if checkpoint is None else snapshot_at(checkpoint)
        if snapshot is None:
            super()._load_scaler(checkpoint)
        elif self._scaler is not None:
            load_own(snapshot, "scaler", self._scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        snapshot = None if checkpoint is None else snapshot_at(checkpoint)
        if snapshot is None:
            super()._load_rng_state(checkpoint)
        elif not load_own(snapshot, "rng", RNGState()):
            _log.warning("%s has no random state of rank %d", checkpoint, own_rank())


def load_engine(engine: Any, load: Any, load_dir: str, *args: Any, **options: Any) -> Any:
    """Load a checkpoint into an engine of DeepSpeed: a snapshot, or DeepSpeed's own checkpoint."""
    snapshot = snapshot_at(load_dir)
    if snapshot is None:
        return load(load_dir, *args, **options)
    _check_folder(snapshot, Path(load_dir))
    return with_deepspeed.load(engine, snapshot)


def _path_in(folder: str, snapshot: Snapshot | None) -> str | None:
    """Return the path of a snapshot; None if there is none, or it is in another folder."""
    if snapshot is None or Path(folder).resolve() not in Path(snapshot.path).resolve().parents:
        return None
    return snapshot.path


def _check_folder(snapshot: Snapshot, folder: Path) -> None:
    """Check that no other checkpoint is in the folder of a snapshot. All ranks call this.

    Raises:
        StateError: The folder has an optimizer of the Trainer's, a checkpoint of another library,
            or other weights.
    """
    state = folder / STATE[0]
    if is_file(state) and not is_notice(state):
        raise both_there_error(folder, "the Trainer itself", f"remove {state}")
    check_beside(snapshot, folder, may_be_others(snapshot, folder))


def _warn_of_others(snapshot: Snapshot) -> None:
    """Log a warning if the best snapshot's folder has files of weights that differ from it.

    Somebody may have put them there for the Trainer to load. A resume raises an error then. Here
    an error would lose a training that has ended.
    """
    paths = may_be_others(snapshot, Path(snapshot.path))
    if others := WeightFiles.others_than(snapshot.contents, paths):
        text = "%s: %s. The best model is that of the snapshot"
        _log.warning(text, ", ".join(map(str, others)), OTHER_WEIGHTS)
