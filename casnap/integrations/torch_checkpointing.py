"""Checkpoints of torch_checkpointing as snapshots.

::

    from casnap.integrations.torch_checkpointing import CasnapCheckpointManager

    manager = CasnapCheckpointManager(CasnapCheckpointManager.Config.with_async_save())
    manager.save("/ckpts/run1/step_100", {"model": model.state_dict(), "step": 100})
    manager.load("/ckpts/run1/step_100", into={"model": model.state_dict(), "step": 0})
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from casnap import Retention, Snapshot
from casnap.errors import StateError
from casnap.extending import (
    ContainerEntry,
    Entry,
    ForeignCheckpoints,
    LiveState,
    TakeOptions,
    TensorEntry,
    check_fit,
    component_of,
    live_components,
    local_path,
    map_leaves,
    own_rank,
    why_unfit,
)
from casnap.integrations.trainers import (
    Save,
    Value,
    check_alone,
    load_own,
    snapshot_at,
    step_in,
)
from casnap.integrations.versions import check_version

check_version("torch_checkpointing")

from torch_checkpointing import schema  # noqa: E402
from torch_checkpointing.checkpoint_manager import CheckpointManager  # noqa: E402
from torch_checkpointing.config import SyncCheckpointSaverConfig  # noqa: E402
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402
from torch_checkpointing.types import CheckpointPath  # noqa: E402
from torch_checkpointing.walk_utils import walk_checkpoint_structure  # noqa: E402

__all__ = ["CasnapCheckpointManager"]

_LIBRARY = "torch_checkpointing"


class CasnapCheckpointManager(CheckpointManager):
    """torch_checkpointing's CheckpointManager, which saves each checkpoint as a snapshot.

    The parent folder of a checkpoint is the store, unless there is a store above it; a path in an
    object store works too. Items are loaded on any number of ranks, in any sharding, whether or not
    their spec has a resharder. Checkpoints that torch_checkpointing has written are still loaded.
    All ranks save and load together.

    Raises:
        StateError: The configuration has an option that snapshots do not support.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of torch_checkpointing's CheckpointManager, and some of casnap's.

        Attributes:
            allow_pickle: Store values that have no safe encoding by pickle, and load them.
            retention: After each save, delete the snapshots of the same folder that these rules do
                not keep.
        """

        allow_pickle: bool = False
        retention: Retention | None = None

        def build(self) -> CasnapCheckpointManager:
            """Return a manager with these settings."""
            return CasnapCheckpointManager(self)

    def __init__(self, config: CheckpointManager.Config | None = None) -> None:
        self._config = config or self.Config()
        _check_supported(self._config)
        self._schema = schema._CheckpointSchema(self._config.items, self._config.default)
        self._allow_pickle = getattr(self._config, "allow_pickle", False)
        self._retention = getattr(self._config, "retention", None)
        self._is_async = not isinstance(self._config.save, SyncCheckpointSaverConfig)
        self._thread = ThreadPoolExecutor(1, "casnap-save")
        self._saving: Future[Snapshot] | None = None
        self._of_files: CheckpointManager | None = None
        self._closed = False

    def save(self, checkpoint_id: str, checkpoint: Mapping[str, Any]) -> Future[Any] | None:
        """Save items as a snapshot. It replaces one of the same name, unless that one has a tag.

        An item ``step``, ``global_step`` or ``iteration`` becomes the ``step`` of the metadata.

        Args:
            checkpoint_id: The path of the snapshot.
            checkpoint: The items. They may change as soon as this returns.

        Returns:
            Without async saves, None: the snapshot is durable. With async saves, a future of the
            durable snapshot.

        Raises:
            CasnapError: This save, or the one before it, failed; nothing was committed.
            SnapshotExistsError: torch_checkpointing itself has written a checkpoint there, or the
                snapshot there has a tag.
            KeyError: A required item is missing, or has no spec.
        """
        self._check_open("save")
        self._wait()
        ForeignCheckpoints(Path(local_path(checkpoint_id))).check_none(_LIBRARY)
        items = self._schema.build_items(checkpoint, rank=own_rank())
        state = {key: Value(item.value) for key, item in items.items()}
        options = TakeOptions(
            metadata=step_in({key: item.value for key, item in items.items()}),
            overwrite=True,
            allow_pickle=self._allow_pickle,
            retention=self._retention,
            timeout=self._config.save.wait_timeout_secs,
        )
        save = Save(checkpoint_id, options)
        if not self._is_async:
            save.take(lambda: LiveState(state))
            return None
        self._saving = self._thread.submit(save.begin(lambda: LiveState(state)).wait)
        return self._saving

    def load(
        self,
        checkpoint_id: str | os.PathLike[str],
        into: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
        metadata_format: Any = None,
    ) -> Mapping[str, Any]:
        """Load items, verified; tensors are filled in place.

        Args:
            checkpoint_id: The path of a snapshot, or of a checkpoint of torch_checkpointing.
            into: The items to load, by name, each with the value to fill, or None to load all of
                the item. By default, all items that the configuration names.
            map_location: The device of the items whose value is None; the CPU by default.
            strict: Raise if the snapshot lacks a part of ``into``, or has values in a dict that is
                empty in ``into``, as the state of a fresh optimizer is.
            metadata_format: The format of a checkpoint of torch_checkpointing.

        Returns:
            The items.

        Raises:
            FileNotFoundError: There is no checkpoint, or the checkpoint lacks an item.
            StateError: The folder has both a snapshot and another checkpoint.
            MismatchError: A tensor of ``into`` has another shape in the snapshot, or is no tensor
                there; nothing was loaded.
            RuntimeError: With ``strict``, the snapshot lacks a part of an item, or has more; or a
                plain value has another type in it.
            DamagedError: Stored bytes are missing or damaged.
        """
        self._check_open("load")
        self._wait()
        snapshot = None if metadata_format is not None else snapshot_at(checkpoint_id)
        if snapshot is None:
            loaded: Mapping[str, Any] = self._files().load(
                local_path(checkpoint_id),
                into,
                map_location=map_location,
                strict=strict,
                # 0.1.0 has no such argument.
                **({} if metadata_format is None else {"metadata_format": metadata_format}),
            )
            return loaded
        check_alone(checkpoint_id, _LIBRARY)
        if into is None:
            into = dict.fromkeys(self._schema.items)
            if not into:
                raise ValueError("load needs into=, or items in the configuration")
        specs = self._schema.build_items(into, rank=own_rank())
        items = {key: _Item(key, spec.value) for key, spec in specs.items()}
        filled = {key: item for key, item in items.items() if item.template is not None}
        _check_fits(snapshot, filled, strict=strict)
        if filled:
            snapshot.restore(
                filled,
                strict=False,
                allow_pickle=self._allow_pickle,
                timeout=self._config.save.wait_timeout_secs,
            )
        for key, item in items.items():
            if item.template is None:
                load_own(snapshot, key, item, allow_pickle=self._allow_pickle)
                item.value = _moved(item.value, map_location)
        _check_whole(snapshot, items, strict=strict)
        return {key: item.value for key, item in items.items()}

    def prewarm_staging(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the first save allocates the memory of the copies, and casnap keeps it."""
        self._check_open("prewarm staging")

    def lock(self) -> AbstractContextManager[None]:
        """Return an empty context: once a save has returned, the state may change."""
        return nullcontext()

    def close(self) -> None:
        """Wait for the save in the background.

        Raises:
            CasnapError: The save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            if self._of_files is not None:
                self._of_files.close()

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise RuntimeError(f"cannot {verb} with a closed CasnapCheckpointManager")

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result(self._config.save.wait_timeout_secs)

    def _files(self) -> CheckpointManager:
        """The manager that loads checkpoints which torch_checkpointing itself has written."""
        if self._of_files is None:
            # With a synchronous saver: one in the background would start a process.
            config = replace(self._config, save=SyncCheckpointSaverConfig())
            self._of_files = CheckpointManager(config)
        return self._of_files


class _Item:
    """One item to load, as a value of an app state: a restore fills it in place.

    Attributes:
        template: The value to fill; None to load all of the item.
        value: The loaded value.
        is_loaded: Whether the snapshot has the item.
        missing: The parts of the template that the snapshot lacks.
    """

    def __init__(self, key: str, template: Any) -> None:
        self._key = key
        self.template = self.value = template
        self.is_loaded = False
        self.missing: list[CheckpointPath] = []

    def state_dict(self) -> Any:
        return self.template

    def load_state_dict(self, state: Any) -> None:
        self.is_loaded, self.value = True, state
        if self.template is None:
            return  # a walk would make plain dicts, without the versions of modules
        # Tensors that the restore has filled are the same objects on both sides.
        with torch.no_grad():
            self.value, self.missing = walk_checkpoint_structure(
                item_key=self._key, source=state, target=self.template
            )


def _check_supported(config: CheckpointManager.Config) -> None:
    callbacks = ("subprocess_init_fn", "pre_finalize_callback", "finalize_callback")
    unsupported = [name for name in callbacks if getattr(config, name) is not None]
    storage = config.storage_config
    if storage is not None and type(storage) is not LocalFileSystemStorageConfig:
        unsupported.append(f"storage_config={type(storage).__name__}")
    specs = [*config.items.values(), *([] if config.default is None else [config.default])]
    if any(spec.layout is not None for spec in specs):
        unsupported.append("layout= of an ItemSpec")
    if unsupported:
        raise StateError(
            f"CasnapCheckpointManager has no {', '.join(unsupported)}: a snapshot is no folder of "
            "files, and no process writes it. Leave that out; a path such as s3://bucket/step_1 "
            "says where to save"
        )


def _check_fits(snapshot: Snapshot, items: Mapping[str, _Item], *, strict: bool) -> None:
    """Check that the snapshot fits all values to fill, before any of them is filled.

    Args:
        snapshot: The snapshot.
        items: The items to load, by name.
        strict: Whether a dict that is empty here, but not in the snapshot, is an error.

    Raises:
        MismatchError: A tensor does not fit.
        RuntimeError: With ``strict``: a dict is empty here alone.
    """
    with snapshot.contents.reading():
        stored = dict(snapshot.contents.entries(own_rank()))
    wanted = [(item.template, component_of(key)) for key, item in items.items()]
    check_fit(snapshot, [text for pair in wanted for text in _unfit_parts(*pair, stored)])
    empty = [path for pair in wanted for path in _empty_here(*pair, stored)]
    if strict and empty:
        raise RuntimeError(
            f"{snapshot.path} has values of {', '.join(empty)}, which into= has empty, so they "
            "would not be loaded; give None in its place to load all, or a dict with its keys"
        )


def _unfit_parts(wanted: Any, path: str, stored: Mapping[str, Entry]) -> Iterator[str]:
    """Yield a text for each part of a value to fill that does not fit the snapshot.

    Parts that the snapshot lacks, and parts that are None, count as fitting.

    Args:
        wanted: The value: a tensor or plain value, or dicts, lists and tuples of tensors and
            values.
        path: The path of the value.
        stored: The entries of the snapshot, by path.
    """
    entry = stored.get(path)
    if entry is None or wanted is None:
        return
    is_sequence = isinstance(wanted, list | tuple)
    if isinstance(wanted, torch.Tensor):
        # A tensor that consists of other tensors is a container in the snapshot.
        if not isinstance(entry, ContainerEntry) and (
            reason := why_unfit(entry, tuple(wanted.shape), wanted)
        ):
            yield f"{path}: {reason}"
    elif isinstance(wanted, Mapping) or is_sequence:
        if isinstance(entry, TensorEntry):
            yield f"{path}: {type(wanted).__name__} here, a tensor in the snapshot"
        for component, inner in _elements(wanted):
            yield from _unfit_parts(inner, f"{path}/{component}", stored)
    elif isinstance(entry, TensorEntry) and isinstance(wanted, str | bytes | int | float):
        yield f"{path}: {type(wanted).__name__} here, a tensor in the snapshot"


def _empty_here(wanted: Any, path: str, stored: Mapping[str, Entry]) -> Iterator[str]:
    """Yield the paths of dicts that are empty in a value to fill, but not in the snapshot.

    Args:
        wanted: The value.
        path: Its path.
        stored: The entries of the snapshot, by path.
    """
    entry = stored.get(path)
    if not isinstance(entry, ContainerEntry) or not isinstance(wanted, Mapping | list | tuple):
        return
    if isinstance(wanted, Mapping) and not wanted and entry.count:
        yield path
    for component, inner in _elements(wanted):
        yield from _empty_here(inner, f"{path}/{component}", stored)


def _elements(value: Mapping[Any, Any] | Sequence[Any]) -> Iterable[tuple[str, Any]]:
    """Return the elements of a dict, list or tuple by their path components."""
    if isinstance(value, Mapping):
        return zip(live_components(value), value.values(), strict=True)
    return zip(map(str, range(len(value))), value, strict=True)


def _check_whole(snapshot: Snapshot, items: Mapping[str, _Item], *, strict: bool) -> None:
    absent = sorted(key for key, item in items.items() if not item.is_loaded)
    if absent:
        raise FileNotFoundError(
            f"{snapshot.path} has nothing of {', '.join(absent)} for rank {own_rank()}; it has "
            f"{', '.join(sorted(snapshot.contents.keys()))}"
        )
    missing = [str(path) for item in items.values() for path in item.missing]
    if strict and missing:
        raise RuntimeError(f"{snapshot.path} lacks {', '.join(missing)}")


def _moved(value: Any, map_location: Any) -> Any:
    if map_location is None:
        return value
    if not isinstance(map_location, str | torch.device):
        raise TypeError(f"map_location= is a device here, not {map_location!r:.80}")

    def move(part: Any) -> Any:
        return part.to(map_location) if isinstance(part, torch.Tensor) else part

    return map_leaves(value, move)
