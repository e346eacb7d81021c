"""Where a checkpoint of DCP is, and which ranks save or load it together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from casnap import Store
from casnap.backends.local_files import as_written
from casnap.backends.uris import joined
from casnap.errors import StateError
from casnap.extending import local_path, own_rank
from casnap.runtime.environment import given_path

CheckpointId = str | os.PathLike[str]


class SnapshotPath(NamedTuple):
    """The path of a snapshot, or its name in a store.

    Attributes:
        path: The path; with ``store``, the name.
        store: The store, if the user has given one.
        storage_options: How to reach a remote store.
        root: The path for which the writer or reader was made. It may be a folder above the paths
            that ``checkpoint_id=`` names.
    """

    path: str | None
    store: Store | None
    storage_options: Mapping[str, Any] | None
    root: str | None = None

    @classmethod
    def of(
        cls, where: CheckpointId | Store | None, options: Mapping[str, Any] | None
    ) -> SnapshotPath:
        """Return the place that the arguments of a writer or a reader name.

        Args:
            where: A path or a store; None: ``checkpoint_id=`` names the path later.
            options: How to reach a remote store.
        """
        if isinstance(where, Store):
            return cls(None, where, options)
        path = None if where is None else given_path(where)
        return cls(path, None, options, path)

    def at(self, checkpoint_id: CheckpointId | None) -> SnapshotPath:
        """Return the place that ``checkpoint_id`` names; if that is empty, this place.

        Raises:
            StateError: ``checkpoint_id`` is a path outside of the store.
        """
        if not checkpoint_id:
            return self
        path = given_path(checkpoint_id)
        name = name_below(self.store, path) if self.store is not None else None
        if (
            self.store is not None
            and not name
            and ("://" in path or Path(local_path(path)).is_absolute())
        ):
            raise StateError(
                f"checkpoint_id={path!r} is outside the store {self.store.uri}; give the name of a "
                "snapshot, or a path below the store"
            )
        return self._replace(path=name or path)

    @property
    def id(self) -> str:
        """The path or URI of the snapshot, for messages.

        Raises:
            StateError: The user has given no path.
        """
        if self.path is None:
            lack = "no path" if self.store is None else f"no name of a snapshot in {self.store.uri}"
            raise StateError(
                f"{lack}: give one to CasnapWriter or CasnapReader, or pass checkpoint_id= to DCP"
            )
        return self.path if self.store is None else joined(self.store.uri, self.path)


def name_below(store: Store, path: str) -> str | None:
    """Return the name that a path has as a snapshot of a store.

    Returns:
        The name; "" for the store itself, None for a path elsewhere.
    """
    root = store.uri.rstrip("/")
    if "://" in root:
        return path[len(root) :].strip("/") if f"{path}/".startswith(f"{root}/") else None
    local = local_path(path)
    if "://" in local:
        return None
    root = os.path.realpath(root)
    # Links are followed, as DCP does. A link that leads out of the store counts as a name in it.
    for way in (Path(os.path.realpath(local)), as_written(Path(local))):
        for folder in (way, *way.parents):
            if os.path.realpath(folder) == root:
                return "" if folder == way else str(way.relative_to(folder))
    return None


def ranks_of(answers: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks that save or load together. The coordinator calls this.

    Args:
        answers: One object from each rank, in order: the number of the rank in the world; or
            another object if the planner has dropped the number. Without these numbers, the ranks
            are known only if they are the whole world, or one alone.

    Raises:
        StateError: The ranks are unknown.
    """
    ranks = tuple(rank for rank in answers if isinstance(rank, int))
    if len(ranks) == len(answers):
        return ranks
    if len(answers) == 1:
        return (own_rank(),)
    if len(answers) == dist.get_world_size():
        return tuple(range(len(answers)))
    raise StateError(
        "the plans do not say which ranks of the world this process group has; save without "
        "enable_plan_caching=True, and have planners keep storage_data, as dataclasses.replace does"
    )


def checked_ranks(answer: object, count: int | None = None) -> tuple[int, ...]:
    """Return the ranks that a plan names, after a check.

    Args:
        answer: The object that the coordinator has put into the plan.
        count: On the coordinator, how many ranks there are; else None.

    Raises:
        StateError: The plan names no ranks, or is a plan of other ranks.
    """
    if not isinstance(answer, tuple):
        raise StateError(
            "the planner's finish_plan() has dropped storage_data of the plan; have it keep that, "
            "as dataclasses.replace does"
        )
    if own_rank() not in answer or count not in (None, len(answer)):
        raise StateError(
            "DCP replays a plan that it has cached in a save of other ranks; save without "
            "enable_plan_caching=True"
        )
    return answer
