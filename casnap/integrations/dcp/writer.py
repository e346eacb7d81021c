"""A StorageWriter of DCP that takes a snapshot.

DCP plans which rank writes which tensor or box. ``write_data`` passes the plan to a take of all
ranks, which commits: when ``write_data`` returns, the snapshot is durable; if any rank fails, there
is no snapshot. ``finish``, which DCP calls on one rank, only completes the returned metadata.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from casnap import Retention, Snapshot, Store
from casnap.errors import StateError, UnsupportedTypeError
from casnap.extending import TakeOptions, own_rank
from casnap.files.dcp_names import DCP_VERSION
from casnap.integrations.dcp.place import CheckpointId, SnapshotPath, checked_ranks, ranks_of
from casnap.integrations.dcp.plan import planned
from casnap.integrations.dcp.staging import KeptStager
from casnap.integrations.trainers import Notices, Save
from casnap.ranks.joining import join_ranks

_NOTICE = (
    "This is a snapshot of casnap; .metadata and *.distcp only stand there for code that looks for "
    "them. Load it after casnap.integrations.dcp.install(store), or by "
    "dcp.load(..., storage_reader=casnap.integrations.dcp.CasnapReader(path))"
)
_WITH_LIGHTNING = (
    ". With a sharded strategy of Lightning, its handler that saves before SLURM requeues the job "
    "does so: pass SLURMEnvironment(auto_requeue=False), and save and requeue in "
    "on_train_batch_end, once a handler of your own has set a flag"
)


class _SaveState:
    """The state of one save of a writer.

    Attributes:
        place: The place of the new snapshot.
        ident: The id that DCP wants each save to have.
        plans: On the coordinator, how many ranks save.
        snapshot: The snapshot, once it is saved.
    """

    def __init__(self, place: SnapshotPath) -> None:
        self.place = place
        self.ident = uuid4().hex
        self.plans: int | None = None
        self.snapshot: Snapshot | None = None


class CasnapWriter(KeptStager, StorageWriter):
    """Saves a state as a snapshot, as a plan of DCP says.

    Beside the marker of the snapshot it puts files with the names of DCP's own (``.metadata``,
    ``__0_0.distcp``), for code that looks for these to find its last checkpoint. They hold no
    tensor. Reading them without casnap raises an error that says so.

    Args:
        where: The path of the snapshot, as for :meth:`casnap.Snapshot.take`. Or a store; then
            ``checkpoint_id=`` names the snapshot. ``checkpoint_id=`` also replaces a path.
        metadata: Anything that JSON can hold, up to 64 KiB, kept with the snapshot.
        overwrite: Replace a snapshot of this name, unless it has a tag. The old one stays until the
            new one is whole.
        allow_pickle: Store values that have no safe encoding by pickle. To load them,
            ``CasnapReader(allow_pickle=True)`` is needed.
        retention: After the save, delete the snapshots of the same folder that these rules do not
            keep.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.
        timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

    Attributes:
        snapshot: The last snapshot that this process has saved with this object.
    """

    _has_files = True
    """Whether to put files with DCP's names."""

    def __init__(
        self,
        where: CheckpointId | Store | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        allow_pickle: bool = False,
        retention: Retention | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self._place = SnapshotPath.of(where, storage_options)
        self._options = TakeOptions(
            metadata=metadata, overwrite=overwrite, allow_pickle=allow_pickle, retention=retention
        )
        self._timeout = timeout
        self._own = threading.local()
        self.snapshot: Snapshot | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in another process, where this object has no running save."""
        vars(self).update(state, _own=threading.local())

    @property
    def _save(self) -> _SaveState:
        """The save of this thread. ``dcp.async_save`` may run several saves, each in a thread."""
        if not hasattr(self._own, "save"):
            self._own.save = _SaveState(self._place)
        save: _SaveState = self._own.save
        return save

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another save; if ``checkpoint_id`` is given, under the name that it gives."""
        place = self._place = self._place.at(checkpoint_id)
        self._own.save = _SaveState(place)

    def storage_meta(self) -> StorageMeta:
        """Return the place of the checkpoint, in DCP's form."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save.

        Raises:
            StateError: DCP asks each rank to save for itself, or there is no path.
            UnsupportedTypeError: Tensors that were sent to another process have lost the attribute
                that says that they are parts of larger ones.
        """
        self._save.place.id  # noqa: B018 - raises if there is no path
        if self._lost_parts is not None:
            raise UnsupportedTypeError(
                f"{self._lost_parts} holds parts of a larger tensor (CheckpointableTensor), and "
                "torch does not say so to another process; save with AsyncCheckpointerType.THREAD"
            )
        if not kwargs.get("use_collectives", True):
            raise StateError(
                "casnap makes one snapshot of all ranks, which use_collectives=False does not "
                "allow; leave it out, or save with no_dist=True under another name on each rank"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Put this process's rank into its plan, for the coordinator."""
        return replace(plan, storage_data=own_rank())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, put the ranks that save together into each plan."""
        self._save.plans = len(plans)
        if not any(plan.usable for plan in plans):
            return plans  # each rank replays its last plan, which names the ranks
        ranks = ranks_of([plan.storage_data for plan in plans])
        return [replace(plan, storage_data=ranks) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Take the snapshot; it is durable when this returns.

        Raises:
            CasnapError: This rank or another one failed; nothing was committed.
        """
        ranks = checked_ranks(plan.storage_data, self._save.plans)
        try:
            self._take(ranks, plan, planner)
        finally:
            self._give_back(getattr(planner, "state_dict", {}).values())
        future: Future[list[WriteResult]] = Future()
        # Empty: DCP would gather the results of all ranks, only to pass them to finish().
        future.set_result([])
        return future

    def _take(self, ranks: tuple[int, ...], plan: SavePlan, planner: SavePlanner) -> None:
        place = self._save.place
        path, store, storage_options, root = place
        assert path is not None
        number = ranks.index(own_rank())
        names = [f"__{number}_0.distcp", *([".metadata"] if number == 0 else [])]
        save = Save(
            path,
            self._options,
            Notices(_NOTICE, names if self._has_files else []),
            comm=partial(join_ranks, ranks, self._timeout, f"the dcp.save of {place.id!r}"),
            store=store,
            storage_options=storage_options,
            root=root,
            advice=_WITH_LIGHTNING,
        )
        allow_pickle = self._options.allow_pickle
        self.snapshot = self._save.snapshot = save.take(
            lambda: planned(save.comm, plan, planner, allow_pickle=allow_pickle)
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the metadata that ``dcp.save`` returns. The snapshot is durable already."""
        snapshot = self._save.snapshot
        assert snapshot is not None
        metadata.storage_data = {"snapshot": snapshot.path, "commit": snapshot.commit_id}
        metadata.storage_meta = self.storage_meta()
        metadata.version = DCP_VERSION

    # --- other calls of DCP ---

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the snapshot to save; None if none is named yet."""
        place = self._own.save.place if hasattr(self._own, "save") else self._place
        return place.id if place.path is not None else None

    @property
    def save_id(self) -> str:
        """The id of the save; once the save has ended, the commit id, which readers see as well."""
        snapshot = self._own.save.snapshot if hasattr(self._own, "save") else self.snapshot
        return self._save.ident if snapshot is None else snapshot.commit_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether a snapshot may have this path: any path will do."""
        return bool(checkpoint_id)
