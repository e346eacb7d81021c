"""Checkpoints of Lightning as snapshots, where it is imported as ``pytorch_lightning``.

::

    import pytorch_lightning as pl
    from casnap.integrations.pytorch_lightning import CasnapCheckpointIO

    trainer = pl.Trainer(plugins=[CasnapCheckpointIO()])

All else is as with ``casnap.integrations.lightning``.
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

check_version("pytorch_lightning")

from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from pytorch_lightning.callbacks import Callback, ModelCheckpoint  # noqa: E402
from pytorch_lightning.core import saving  # noqa: E402

__all__ = ["CasnapCheckpointIO"]


class CasnapCheckpointIO(SnapshotIO, TorchCheckpointIO):
    """Saves each checkpoint of Lightning as a snapshot; :class:`SnapshotIO` says how."""


class _StepWitnesses(StepWitnesses, Callback):
    """Has a :class:`CasnapCheckpointIO` make its witnesses."""


read_snapshots(saving)
note_folders(ModelCheckpoint, _StepWitnesses)
pass_over_cut_off(ModelCheckpoint)
