"""A content-addressed, deduplicating checkpoint store for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap import errors
from casnap.errors import CasnapError
from casnap.runtime.later import imported_later as _imported_later
from casnap.snapshot import EntriesByPath, Snapshot, SnapshotMetadata, TakeStats
from casnap.store import NewStore, Store
from casnap.version import __version__ as __version__

if TYPE_CHECKING:
    from casnap.diagnosis.doctor import doctor
    from casnap.diagnosis.report import DoctorReport, DoctorRow
    from casnap.files.file_reports import ExportReport, ImportReport
    from casnap.maintenance.check import CheckReport
    from casnap.maintenance.diff import Diff
    from casnap.maintenance.repair import RepairReport
    from casnap.maintenance.usage import Usage
    from casnap.mirror.mirror import Mirror
    from casnap.mirror.status import MirrorOptions, MirrorStatus
    from casnap.pending import PendingSnapshot, PendingTry
    from casnap.preemption import Preemption, on_preemption
    from casnap.restore.entry_handle import Handle
    from casnap.restore.restore_report import RestoreReport
    from casnap.runtime.buffers import release_memory
    from casnap.serving.handshake import FollowerState
    from casnap.serving.options import FollowEvent, PullReport
    from casnap.state.stateful import RNGState, StateDict, Stateful
    from casnap.storage import (
        GcReport,
        PruneReport,
        Retention,
        TagMove,
    )
    from casnap.transfer.copy_jobs import CopyReport

__all__ = [
    "CasnapError",
    "CheckReport",
    "CopyReport",
    "Diff",
    "DoctorReport",
    "DoctorRow",
    "EntriesByPath",
    "ExportReport",
    "FollowEvent",
    "FollowerState",
    "GcReport",
    "Handle",
    "ImportReport",
    "Mirror",
    "MirrorOptions",
    "MirrorStatus",
    "NewStore",
    "PendingSnapshot",
    "PendingTry",
    "Preemption",
    "PruneReport",
    "PullReport",
    "RNGState",
    "RepairReport",
    "RestoreReport",
    "Retention",
    "Snapshot",
    "SnapshotMetadata",
    "StateDict",
    "Stateful",
    "Store",
    "TagMove",
    "TakeStats",
    "Usage",
    "doctor",
    "errors",
    "on_preemption",
    "release_memory",
]

# These are imported when they are asked for: not every program needs them, and some need torch.
_LATER = {
    "CheckReport": "casnap.maintenance.check",
    "CopyReport": "casnap.transfer.copy_jobs",
    "Diff": "casnap.maintenance.diff",
    "DoctorReport": "casnap.diagnosis.report",
    "DoctorRow": "casnap.diagnosis.report",
    "ExportReport": "casnap.files.file_reports",
    "FollowEvent": "casnap.serving.options",
    "FollowerState": "casnap.serving.handshake",
    "GcReport": "casnap.storage",
    "Handle": "casnap.restore.entry_handle",
    "ImportReport": "casnap.files.file_reports",
    "Mirror": "casnap.mirror.mirror",
    "MirrorOptions": "casnap.mirror.status",
    "MirrorStatus": "casnap.mirror.status",
    "PendingSnapshot": "casnap.pending",
    "PendingTry": "casnap.pending",
    "Preemption": "casnap.preemption",
    "PruneReport": "casnap.storage",
    "PullReport": "casnap.serving.options",
    "RNGState": "casnap.state.stateful",
    "RepairReport": "casnap.maintenance.repair",
    "RestoreReport": "casnap.restore.restore_report",
    "Retention": "casnap.storage",
    "StateDict": "casnap.state.stateful",
    "Stateful": "casnap.state.stateful",
    "TagMove": "casnap.storage",
    "Usage": "casnap.maintenance.usage",
    "doctor": "casnap.diagnosis.doctor",
    "on_preemption": "casnap.preemption",
    "release_memory": "casnap.runtime.buffers",
}


__getattr__ = _imported_later(globals(), _LATER)


def __dir__() -> list[str]:
    # Without the packages that an import leaves here: ``casnap.take`` is nothing to call.
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
