"""Checkpoints of torchtitan as snapshots.

::

    from casnap.integrations.torchtitan import CasnapCheckpointManager

    config.checkpoint = CasnapCheckpointManager.Config(enable=True, interval=500)
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
    save,
)

from casnap.extending import ForeignCheckpoints, LiveState, is_file, local_path
from casnap.integrations.dcp import CasnapReader, CasnapWriter
from casnap.integrations.folders.rotation import forget
from casnap.integrations.notices import is_notice
from casnap.integrations.trainers import Checkpoints, snapshot_at
from casnap.integrations.versions import check_version
from casnap.integrations.witnesses import OnMismatch, Witnesses

check_version("torchtitan")

from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.tools.utils import GarbageCollection  # noqa: E402

__all__ = ["CasnapCheckpointManager"]

_log = logging.getLogger("casnap")
_PREFIX = "step-"


class CasnapCheckpointManager(CheckpointManager):
    """torchtitan's CheckpointManager, which saves ``step-<n>`` as a snapshot.

    ``checkpoint.folder`` is the store, unless there is a store above it. All settings mean the same
    as in torchtitan. Checkpoints that torchtitan itself has written are still loaded and purged,
    and checkpoints in Hugging Face's format are loaded, written and purged as before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of torchtitan's CheckpointManager, and two of casnap's.

        Attributes:
            witness_steps: How many steps after each checkpoint get a witness, by which a run that
                resumes proves that it computes the same; see
                ``docs/guides/proving-a-resume.md``.
            on_mismatch: "warn" if a resumed run computes something else, or "raise".
        """

        witness_steps: int = 0
        on_mismatch: OnMismatch = "warn"

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self._witnesses = Witnesses(config.witness_steps, config.on_mismatch)
        super().__init__(config, **kwargs)

    @property
    def folder(self) -> str:
        """The folder of the checkpoints, with ``~`` expanded, in which steps are looked for too."""
        return self._folder

    @folder.setter
    def folder(self, path: str) -> None:
        self._folder = local_path(path)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state as a snapshot of all ranks.

        Args:
            state_dict: The state.
            checkpoint_id: The path of the snapshot.
            async_mode: Whether to save in the background, and where the state is copied for that.
            enable_garbage_collection: Run Python's garbage collection afterwards.
            to_hf: Have torchtitan write safetensors in Hugging Face's format instead.

        Returns: None for a synchronous save. For one in the background a future of the save, or an
        object with futures of the copy and of the save; ``async_mode`` decides which.
        """
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        step = re.search(r"step-(\d+)$", checkpoint_id)
        writer = CasnapWriter(
            checkpoint_id, metadata={} if step is None else {"step": int(step[1])}
        )
        if async_mode == AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
            pending = None
        elif async_mode == AsyncMode.ASYNC:
            pending = async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            pending = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        self._witnesses.follow(checkpoint_id)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return pending

    @torch.no_grad()
    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Make the witness of a step if one is due, then save if a checkpoint is.

        Args:
            curr_step: The step that was just made.
            last_step: Whether it is the last one.
        """
        if self._witnesses.are_due:
            self.maybe_wait_for_saving()
            self._witnesses.take(lambda: LiveState(self.states))
        super().save(curr_step, last_step)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a snapshot, on any number of ranks; or a checkpoint of torchtitan itself.

        Args:
            state_dict: The state, which is filled in place.
            checkpoint_id: The path of the snapshot.
            from_hf: Have torchtitan load a checkpoint in Hugging Face's format.
            from_quantized: Whether the checkpoint in that format is quantized.
        """
        if from_hf or snapshot_at(checkpoint_id) is None:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=CasnapReader(checkpoint_id))
        # The model's part of the state is flat, so DCP does not see that it has a module to load.
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
        # Not of another run, such as that of initial_load_path.
        is_own = Path(checkpoint_id).absolute().parent == Path(self.folder).absolute()
        self._witnesses.follow(checkpoint_id if is_own else None)

    def _find_load_step(self, folder: str = "") -> int:
        folder = folder or self.folder
        if "://" in folder:
            own_step: int = super()._find_load_step(folder)
            return own_step
        checkpoints = Checkpoints(folder, _PREFIX, _is_own)
        # No agreement of ranks: torchtitan calls this only on ranks that see the folder.
        last = checkpoints.find_last()
        if last is None and (advice := ForeignCheckpoints(Path(folder)).advice_within()):
            _log.warning("%s", advice)
        step = None if last is None else checkpoints.number(last)
        return -1 if step is None else step

    def _purge_stale_checkpoints(self) -> None:
        if "://" in self.folder:
            super()._purge_stale_checkpoints()
        elif self._should_purge():
            checkpoints = Checkpoints(self.folder, _PREFIX, _is_own)
            for path in checkpoints.paths()[: -self.keep_latest_k]:
                snapshot = snapshot_at(path)
                if snapshot is None or forget(snapshot):
                    self.purge_queue.put(os.fspath(path))


def _is_own(path: Path) -> bool:
    """Whether a path has a whole checkpoint of torchtitan itself, by torchtitan's own test."""
    metadata = path / ".metadata"
    is_of_dcp = is_file(metadata) and not is_notice(metadata)
    return is_of_dcp or is_file(path / "model.safetensors.index.json")
