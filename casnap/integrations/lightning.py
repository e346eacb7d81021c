"""Checkpoints of Lightning as snapshots.

::

    from casnap.integrations.lightning import CasnapCheckpointIO

    trainer = Trainer(plugins=[CasnapCheckpointIO()], callbacks=[ModelCheckpoint("/ckpts/run1")])
    trainer.fit(model, ckpt_path="last")

``load_from_checkpoint`` of a module of Lightning does not use the plugin. In a process that has
imported ``casnap.integrations.lightning``, it reads snapshots as well.
"""

from __future__ import annotations

from casnap.integrations.checkpoint_io import (
    SnapshotIO,
    StepWitnesses,
    note_folders,
    pass_over_cut_off,
    read_snapshots,
)
from casnap.integrations.versions import check_version

check_version("lightning")

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.core import saving  # noqa: E402

__all__ = ["CasnapCheckpointIO"]


class CasnapCheckpointIO(SnapshotIO, TorchCheckpointIO):
    """Saves each checkpoint of Lightning as a snapshot; :class:`SnapshotIO` says how."""


class _StepWitnesses(StepWitnesses, Callback):
    """Has a :class:`CasnapCheckpointIO` make its witnesses."""


read_snapshots(saving)
note_folders(ModelCheckpoint, _StepWitnesses)
pass_over_cut_off(ModelCheckpoint)
