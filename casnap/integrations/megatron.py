"""Checkpoints of Megatron Core's ``dist_checkpointing`` as snapshots, on any number of ranks.

::

    import casnap.integrations.megatron
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(sharded_state, "/ckpts/run1/iter_0000100", ("casnap", 1))
    state = dist_checkpointing.load(sharded_state, "/ckpts/run1/iter_0000100")

The import registers the strategies with Megatron, by the name of their backend. Megatron itself
writes two small files into the folder of each checkpoint. ``common.pt`` has the state that is not
sharded; the snapshot keeps a copy. ``metadata.json`` comes last; without it Megatron loads nothing.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from casnap import Snapshot
from casnap.errors import CasnapError, DamagedError, StateError
from casnap.extending import (
    Comm,
    DividedLeaves,
    Leaf,
    ObjectPath,
    Region,
    TakeOptions,
    Target,
    TensorEntry,
    allocate,
    boxes_of_run,
    casnap_path,
    containers_above,
    decode_value,
    describe,
    exists,
    flatten,
    join,
    key_of,
    leaf_of_parts,
    load_together,
    own_rank,
    without_torch_modes,
)
from casnap.integrations.dcp.plan import agreed_paths
from casnap.integrations.trainers import (
    Notices,
    Save,
    check_saved_by,
    not_found_error,
    snapshot_at,
    step_in,
)
from casnap.integrations.versions import check_version

check_version("megatron")

from megatron.core.dist_checkpointing.dict_utils import (  # noqa: E402
    dict_list_map_outplace,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest  # noqa: E402
from megatron.core.dist_checkpointing.strategies.base import (  # noqa: E402
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402

__all__ = ["CasnapLoadStrategy", "CasnapSaveStrategy"]

_BACKEND, _VERSION = "casnap", 1
_KEYS = ("tensors", "objects", "common")
_NOTICE = (
    "This is a snapshot of casnap; .metadata only stands there for code that looks for it. Import "
    "casnap.integrations.megatron, and load the folder by megatron.core.dist_checkpointing.load"
)


class CasnapSaveStrategy(AsyncSaveShardedStrategy):
    """Saves a sharded state dict as a snapshot with the path of the checkpoint's folder.

    The keys are ``tensors`` (each ShardedTensor as a whole, by its key), ``objects`` (each
    ShardedObject, by its key and shard) and ``common`` (the bytes of ``common.pt``). The metadata
    have a ``step`` if the common state counts ``step``, ``global_step`` or ``iteration``. A
    snapshot of the same folder is replaced once the new one is whole. If the folder of a snapshot
    is deleted, the next save beside it deletes the snapshot.

    Args:
        allow_pickle: Store objects that have no safe encoding by pickle.
        timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.

    Attributes:
        snapshot: The last snapshot that this process has saved with this object.
    """

    can_handle_sharded_objects = True

    def __init__(self, *, allow_pickle: bool = False, timeout: float | None = None) -> None:
        super().__init__(_BACKEND, _VERSION)
        self._allow_pickle = allow_pickle
        self._timeout = timeout
        self.snapshot: Snapshot | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Take the snapshot; it is durable when this returns. All ranks call this.

        Raises:
            CasnapError: This rank or another one failed; nothing was committed.
        """
        save, divided = self._begin(sharded_state_dict, checkpoint_dir)
        self.snapshot = save.take(divided)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy the state, and begin to store it in the background. All ranks call this.

        The process that Megatron starts for the request only waits for the end of the save.

        Returns:
            The request. Its finalization raises an error that occurred in the background.
        """
        save, divided = self._begin(sharded_state_dict, checkpoint_dir)
        pending = save.begin(divided)
        reader, writer = Pipe(duplex=False)

        def wait() -> Snapshot:
            try:
                return pending.wait()
            finally:
                writer.send_bytes(b"\0")

        thread = ThreadPoolExecutor(1, "casnap-save")
        ended = thread.submit(wait)
        thread.shutdown(wait=False)

        def finalize() -> None:
            try:
                self.snapshot = ended.result()
            finally:
                reader.close()
                writer.close()

        return AsyncRequest(_wait_for_end, (reader, writer, os.getpid()), [finalize])

    def _begin(
        self, state: Mapping[str, Any], folder: str | Path
    ) -> tuple[Save, Callable[[], DividedLeaves]]:
        """Begin a save; return the save, and a function that returns the state of this rank."""
        leads, metadata = own_rank() == 0, dict[str, Any]()
        if leads:
            # If the common state cannot be read safely, its step is unknown.
            with suppress(OSError, CasnapError):
                metadata |= step_in(decode_value("common", "object", _common_of(folder)))
        options = TakeOptions(
            metadata=metadata,
            overwrite=True,
            allow_pickle=self._allow_pickle,
            timeout=self._timeout,
        )
        notices = Notices(_NOTICE, [".metadata"] if leads else [])
        save = Save(os.path.realpath(folder), options, notices)
        return save, lambda: _divided(state, folder, save.comm, allow_pickle=self._allow_pickle)


def _wait_for_end(reader: Connection, writer: Connection, saver: int) -> None:
    """Wait until the saving process reports the end of the save. A process of Megatron runs this.

    Args:
        reader: The end of the pipe from which the report is read.
        writer: The end that the saving process writes to.
        saver: The process id of the saving process.
    """
    if os.getpid() != saver:
        writer.close()  # otherwise a kill of the saving process would not end this wait
    with suppress(EOFError):
        reader.recv_bytes()


def _common_of(checkpoint_dir: str | Path) -> bytes:
    """Return the bytes of ``common.pt``, the file that Megatron itself has written."""
    return Path(checkpoint_dir, COMMON_STATE_FNAME).read_bytes()


def _divided(
    state: Mapping[str, Any], checkpoint_dir: str | Path, comm: Comm, *, allow_pickle: bool
) -> DividedLeaves:
    """Return the leaves that this rank stores: those of each shard whose main replica it has.

    Rank 0 also stores the containers, and the bytes of ``common.pt``.

    Args:
        state: The sharded state dict.
        checkpoint_dir: The folder with ``common.pt``, which rank 0 stores too.
        comm: The ranks; all call this.
        allow_pickle: Whether objects without a safe encoding may be pickled.
    """
    shards: dict[ObjectPath, list[Any]] = {}
    for shard in nested_values(state):
        if is_main_replica(shard.replica_id):
            shards.setdefault(_path_of(shard), []).append(shard)
    paths = agreed_paths(comm, dict.fromkeys(shards))
    leaves: dict[str, list[Leaf]] = {key: [] for key in _KEYS}
    if comm.rank == 0:
        containers = containers_above(paths)
        for key in ("tensors", "objects"):
            leaves[key] += containers.get(key) or flatten({}, key)
        leaves["common"] += flatten(_common_of(checkpoint_dir), "common")
    with torch.no_grad(), without_torch_modes():
        for object_path, group in shards.items():
            leaves[str(object_path[0])] += _leaves_of(
                casnap_path(object_path), group, allow_pickle=allow_pickle
            )
    return DividedLeaves(leaves)


def _leaves_of(path: str, shards: list[Any], *, allow_pickle: bool) -> list[Leaf]:
    first = shards[0]
    if isinstance(first, ShardedObject):
        if len(shards) > 1:
            raise StateError(f"{path} is the key of {len(shards)} objects of this rank")
        return list(flatten(first.data, path, allow_pickle=allow_pickle))
    shape = tuple(first.global_shape)
    if 0 in shape:
        # Only one rank stores a tensor without elements.
        is_first = not any(first.global_offset)
        return [describe(path, first.data.detach().new_empty(shape))] if is_first else []
    parts = chain.from_iterable(_parts(path, shard) for shard in shards)
    return list(leaf_of_parts(path, shape, parts))


def _path_of(shard: Any) -> ObjectPath:
    if isinstance(shard, ShardedObject):
        key, _, number = shard.unique_key.rpartition("/")
        return "objects", key, number
    return "tensors", shard.key


def _parts(path: str, tensor: Any) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the boxes of the global tensor that a ShardedTensor fills, each with its elements.

    In Megatron Core 0.13, a ShardedTensor may have only some consecutive elements of its box.
    """
    if tensor.data is None:
        raise StateError(f"{path} has no data")
    run, memory = getattr(tensor, "flattened_range", None), tensor.data.detach()
    if run is None:
        memory = memory[(None,) * tensor.prepend_axis_num]
        yield Region(tuple(tensor.global_offset), tuple(memory.shape)), memory
        return
    position, ones = 0, (1,) * tensor.prepend_axis_num
    for box in boxes_of_run((*ones, *tensor.local_shape), run.start, run.stop):
        offsets = tuple(map(operator.add, tensor.global_offset, box.offsets))
        elements = memory.narrow(0, position, box.numel)
        yield Region(offsets, box.sizes), elements.view(box.sizes)
        position += box.numel


class CasnapLoadStrategy(LoadShardedStrategy, LoadCommonStrategy):
    """Loads snapshots of :class:`CasnapSaveStrategy`, in place and verified, in any sharding.

    ``dist_checkpointing.load`` finds this strategy by itself. If ``common.pt`` is damaged, pass an
    object of this class as both ``sharded_strategy=`` and ``common_strategy=``: it reads the common
    state from the snapshot.

    Args:
        allow_pickle: Unpickle objects that were stored by pickle.
        timeout: Seconds that a rank waits for another before all ranks raise; 600 by default.
    """

    can_handle_sharded_objects = True

    def __init__(self, *, allow_pickle: bool = False, timeout: float | None = None) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle
        self._timeout = timeout
        self._has_common = False  # whether the present load has read the common state

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Load the sharded part of a state. All ranks call this.

        Raises:
            SnapshotNotFoundError: The folder has no snapshot.
            MismatchError: The state does not fit the snapshot; nothing was loaded.
            DamagedError: Stored bytes are missing or damaged, or ``common.pt`` is not the one that
                was saved with this snapshot.
        """
        comm = join(None, self._timeout, f"loading from {os.fspath(checkpoint_dir)!r}")
        with comm, torch.no_grad():
            snapshot = _snapshot_of(checkpoint_dir)
            if not self._has_common:
                _check_common(snapshot, Path(checkpoint_dir))
            self._has_common = False
            shards = list(nested_values(sharded_state_dict))
            tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
            objects = [_path_of(shard) for shard in shards if isinstance(shard, ShardedObject)]
            with snapshot.contents.reading():
                values = load_together(
                    snapshot,
                    comm,
                    map(_target_of, tensors),
                    objects,
                    allow_pickle=self._allow_pickle,
                )

        def value_of(shard: Any) -> Any:
            if isinstance(shard, ShardedTensor):
                return shard.data
            return values[_path_of(shard)]

        return dict_list_map_outplace(value_of, sharded_state_dict)

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Return the common state (``common.pt``) from the snapshot."""
        data = _snapshot_of(checkpoint_dir).read_object("common")
        self._has_common = True
        return decode_value("common", "object", data)

    def load_sharded_objects(self, *_: Any) -> None:
        """Raise an error: :meth:`load` loads the objects too."""
        raise NotImplementedError

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the shape and dtype of each tensor, by its key."""
        contents = _snapshot_of(checkpoint_dir).contents
        with contents.reading():
            return {
                key: ShardedTensor.from_rank_offsets(key, allocate(entry, "meta")).without_data()
                for path, entry in contents.trees(own_rank())["tensors"].items()
                if isinstance(entry, TensorEntry)
                for key in (key_of(path[1:]),)
            }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return each tensor and object by its key, without data."""
        contents = _snapshot_of(checkpoint_dir).contents
        with contents.reading():
            paths = [path.split("/") for path, _ in contents.trees(own_rank())["objects"].items()]
        objects = [_described(*map(key_of, path[1:])) for path in paths if len(path) == 3]
        return {each.unique_key: each for each in objects} | self.load_tensors_metadata(
            checkpoint_dir
        )

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Raise an error: a snapshot does not change.

        Raises:
            StateError: Always.
        """
        raise StateError(
            f"{os.fspath(checkpoint_dir)} is a snapshot, which does not change; save the state "
            f"without what begins with {key_prefix!r}"
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Check that the folder to load was saved by this backend, or by Megatron's own ("torch").

        Raises:
            StateError: Another backend has saved the folder.
        """
        if loaded_backend not in (_BACKEND, "torch"):
            raise StateError(
                f"this checkpoint was saved by the backend {loaded_backend!r}; load it without "
                "sharded_strategy=, and the next save makes a snapshot"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Do nothing: the snapshot itself says which versions of casnap can read it."""


def _described(key: str, shard: str) -> Any:
    # Use a stand-in for the key: Megatron cannot parse a unique key whose key has a slash.
    return replace(ShardedObject.empty_from_unique_key(f"key/{shard}"), key=key)


def _snapshot_of(checkpoint_dir: str | Path) -> Snapshot:
    snapshot = snapshot_at(checkpoint_dir)
    if snapshot is None:
        raise not_found_error(checkpoint_dir)
    check_saved_by(snapshot, __name__, _KEYS)
    return snapshot


def _check_common(snapshot: Snapshot, folder: Path) -> None:
    """Check that the ``common.pt`` that Megatron has read was saved with the snapshot."""
    file = folder / COMMON_STATE_FNAME
    if exists(file) and file.read_bytes() != snapshot.read_object("common"):
        raise DamagedError(
            f"{file} is damaged, or of a save to this folder that was not completed; give one "
            "CasnapLoadStrategy() to load as sharded_strategy= and as common_strategy=, to read "
            "the snapshot's copy"
        )


def _target_of(tensor: Any) -> Target:
    if tensor.data is None:
        tensor.init_data("cpu")
    path = _path_of(tensor)
    shape = None if tensor.allow_shape_mismatch else tuple(tensor.global_shape)
    return Target(path, shape, [*_parts(casnap_path(path), tensor)])


register_default_strategy(StrategyAction.SAVE_SHARDED, _BACKEND, _VERSION, CasnapSaveStrategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, CasnapLoadStrategy())
