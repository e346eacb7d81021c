"""A content-addressed, deduplicating checkpoint store for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap import errors as errors
from casnap.errors import CasnapError as CasnapError
from casnap.runtime.lazy_imports import imported_later as _imported_later
from casnap.snapshot import EntriesByPath as EntriesByPath
from casnap.snapshot import Snapshot as Snapshot
from casnap.snapshot import SnapshotMetadata as SnapshotMetadata
from casnap.snapshot import TakeStats as TakeStats
from casnap.store import NewStore as NewStore
from casnap.store import Store as Store
from casnap.version import __version__ as __version__

if TYPE_CHECKING:
    # Imported at their first use: not every program needs these names, and some need torch.
    from casnap.comparing.changes import Diff as Diff
    from casnap.comparing.statistics import GroupStatistics as GroupStatistics
    from casnap.comparing.witness_report import WitnessReport as WitnessReport
    from casnap.diagnosis.doctor import doctor as doctor
    from casnap.diagnosis.report import DoctorReport as DoctorReport
    from casnap.diagnosis.report import DoctorRow as DoctorRow
    from casnap.files.file_reports import ExportReport as ExportReport
    from casnap.files.file_reports import ImportReport as ImportReport
    from casnap.format.health import TensorHealth as TensorHealth
    from casnap.history.average import AverageReport as AverageReport
    from casnap.history.who import Holder as Holder
    from casnap.history.who import WhoReport as WhoReport
    from casnap.maintenance.check import CheckReport as CheckReport
    from casnap.maintenance.repair import RepairReport as RepairReport
    from casnap.maintenance.usage import Usage as Usage
    from casnap.mirror.mirror import Mirror as Mirror
    from casnap.mirror.status import MirrorOptions as MirrorOptions
    from casnap.mirror.status import MirrorStatus as MirrorStatus
    from casnap.pending import PendingSnapshot as PendingSnapshot
    from casnap.pending import PendingTry as PendingTry
    from casnap.preemption import Preemption as Preemption
    from casnap.preemption import on_preemption as on_preemption
    from casnap.restore.entry_handle import Handle as Handle
    from casnap.restore.restore_report import RestoreReport as RestoreReport
    from casnap.runtime.buffers import release_memory as release_memory
    from casnap.serving.handshake import FollowerState as FollowerState
    from casnap.serving.options import FollowEvent as FollowEvent
    from casnap.serving.options import PullReport as PullReport
    from casnap.state.stateful import RNGState as RNGState
    from casnap.state.stateful import StateDict as StateDict
    from casnap.state.stateful import Stateful as Stateful
    from casnap.storage import GcReport as GcReport
    from casnap.storage import PruneReport as PruneReport
    from casnap.storage import Retention as Retention
    from casnap.storage import TagMove as TagMove
    from casnap.take.options import HealthOptions as HealthOptions
    from casnap.transfer.copy_jobs import CopyReport as CopyReport

__getattr__, __all__ = _imported_later(globals())


def __dir__() -> list[str]:
    # Leave out subpackages: they become attributes when they are imported, but are not part of the
    # API.
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
