"""A StorageReader of DCP that reads a snapshot, whether DCP or casnap took it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from casnap import Store
from casnap.errors import CasnapError, NotAStoreError, SnapshotNotFoundError, StateError
from casnap.extending import is_file, local_path, log_remarks, own_rank
from casnap.files.dcp_names import Stored, described
from casnap.integrations.dcp.load import PlanLoad
from casnap.integrations.dcp.place import CheckpointId, SnapshotPath, checked_ranks, ranks_of
from casnap.integrations.notices import is_notice
from casnap.ranks.joining import join_ranks
from casnap.restore.shared_reads import fetch_shared
from casnap.storage import Contents
from casnap.view import find_view

_log = logging.getLogger("casnap")


class _Agreed(msgspec.Struct, array_like=True):
    """Rank 0's message to all ranks: the commit to load, and whether the ranks read together."""

    commit: bytes
    read_once: bool


class CasnapReader(StorageReader):
    """Loads a snapshot as a plan of DCP says.

    Args:
        where: The path of the snapshot, or a store, as for :class:`CasnapWriter`.
        allow_pickle: Unpickle values that were saved with ``allow_pickle=True``. Use this only for
            a store that you trust as you trust code.
        read_once: Whether one rank reads each stored byte, and passes it on to the others.
        reuse: Hash the tensors of the state, and read only the chunks that differ, as
            :meth:`casnap.Snapshot.restore` does.
        storage_options: How to reach a remote store, as :class:`casnap.Store` takes them.
        timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

    Attributes:
        load_id: The id that DCP wants each load to have.
    """

    def __init__(
        self,
        where: CheckpointId | Store | None = None,
        *,
        allow_pickle: bool = False,
        read_once: bool = True,
        reuse: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self._place = SnapshotPath.of(where, storage_options)
        self._allow_pickle = allow_pickle
        self._read_once = read_once
        self._reuse = reuse
        self._timeout = timeout
        self._contents: Contents | None = None
        self._values: dict[str, Stored] = {}
        self.load_id = uuid4().hex

    # --- what DCP calls, in this order ---

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another load; if ``checkpoint_id`` is given, of the snapshot that it names."""
        self._place = self._place.at(checkpoint_id)
        self._contents, self._values = None, {}
        self.load_id = uuid4().hex

    # No parameter may be called "kwargs": DCP would then ask again, for one rank's metadata.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """Find the snapshot, and describe its values to DCP.

        Raises:
            SnapshotNotFoundError: There is no snapshot of this name.
            NotAStoreError: There is no store above the path.
            StateError: DCP itself has written a checkpoint beside the snapshot.
        """
        try:
            metadata = self._find()
        except CasnapError as e:
            if torch.__version__ < "2.13":
                _log.error("dcp.load: %s", e)  # DCP only says that "metadata is None"
            raise
        assert self._contents is not None
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self._place.id,
            save_id=self._contents.row.commit.hex(),
            load_id=self.load_id,
        )
        return metadata

    def _find(self) -> Metadata:
        with _naming_pickles(self._place):
            self._place.id  # noqa: B018 - raises if there is no path
            path, store, storage_options, _ = self._place
            assert path is not None
            view, name = find_view(path, storage_options, store, create=False)
            row = view.row_of(name)
            contents = Contents(view.readable, view.full_of(name), row)
            folder = view.repository.backend.folder
            if folder is not None and _is_dcps_own(folder / contents.name / ".metadata"):
                raise StateError(
                    f"{folder / contents.name} holds a snapshot of casnap, and a checkpoint that "
                    "DCP itself has written there later: move its files away, or remove the "
                    "snapshot by `casnap rm`, and load the one that is left"
                )
        with contents.reading():
            if contents.manifest.thinned:
                # DCP only says which keys are missing.
                _log.warning("%s: %s", contents.label, contents.thinned_text())
            metadata, self._values = described(contents, dict(contents.entries(own_rank())))
        self._contents = contents
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **_: Any
    ) -> None:
        """Do nothing: the metadata already have everything that DCP has to know."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Put this process's rank into its plan, for the coordinator."""
        return replace(plan, storage_data=own_rank())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator, put the ranks that load together into each plan."""
        ranks = ranks_of([plan.storage_data for plan in plans])
        return [replace(plan, storage_data=ranks) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify the items of this rank, and give them to the planner.

        Raises:
            DamagedError: Stored bytes are missing or damaged. Some tensors may hold new values
                already, but the planner has got no other value.
            CasnapError: This rank or another one failed.
        """
        contents = self._contents
        assert contents is not None, "DCP reads the metadata first"
        ranks = checked_ranks(plan.storage_data)
        comm = join_ranks(ranks, self._timeout, f"the dcp.load of {self._place.id!r}")
        fetch = partial(fetch_shared, comm, contents.store)
        with comm, contents.reading():
            agreed = comm.broadcast_message(_Agreed(contents.row.commit, self._read_once), _Agreed)
            commit = contents.row.commit.hex()
            comm.check_same(f"the commit of {contents.label}", commit, agreed.commit.hex())
            comm.check_same("the option read_once=", self._read_once, agreed.read_once)
            loaded = PlanLoad(contents, self._values, planner, self._allow_pickle, self._reuse)
            loaded.run(plan, fetch if comm.size > 1 and self._read_once else None)
            comm.all_gather(b"")
            read = (self._values[item.storage_index.fqn] for item in plan.items)
            log_remarks(contents, read, comm.rank, comm.size)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether a snapshot may have this path: any path will do."""
        return bool(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the snapshot to load; None if none is named yet."""
        return self._place.id if self._place.path is not None else None


def _is_dcps_own(metadata: Path) -> bool:
    return is_file(metadata) and not is_notice(metadata)


@contextmanager
def _naming_pickles(place: SnapshotPath) -> Iterator[None]:
    """Within this ``with`` block, explain a missing snapshot if DCP's own checkpoint is there."""
    try:
        yield
    except (NotAStoreError, SnapshotNotFoundError) as e:
        path = place.id
        metadata = Path(local_path(path), ".metadata")
        if "://" in path or not _is_dcps_own(metadata):
            raise
        raise type(e)(
            f"{path} is a checkpoint of DCP's own FileSystemWriter, not a snapshot. Its .metadata "
            "is a pickle, which may run any code, so it is not loaded here. `casnap import` reads "
            "it without running it; or load it where you trust it, and save it with CasnapWriter"
        ) from e
