"""Read the items of a load plan of DCP."""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from casnap.divided import entries_below
from casnap.errors import MismatchError, StateError
from casnap.extending import Region, TensorEntry, own_rank, without_torch_modes
from casnap.files.dcp_names import Stored
from casnap.integrations.dcp.plan import TrueKeys, check_boxes
from casnap.restore.loading import Fetch, Loading
from casnap.restore.ties import conflict_text
from casnap.state.devices import synchronize
from casnap.state.flatten import inflate
from casnap.state.overlap import can_hold_all, conflicting_groups
from casnap.state.tensors import why_not_writable
from casnap.storage import Contents


class _TensorRead(NamedTuple):
    """One tensor to fill, with a box of a stored tensor.

    Attributes:
        item: DCP's item of the plan.
        value: The tensor in the snapshot.
        box: The box of it to read.
        target: The tensor to fill.
    """

    item: ReadItem
    value: Stored
    box: Region
    target: torch.Tensor


class PlanLoad:
    """Reads the items of this rank's plan.

    Args:
        contents: The snapshot.
        values: The values of the snapshot, by their names in DCP.
        planner: The planner, which gets the values.
        allow_pickle: Whether to unpickle pickled values.
        reuse: Whether to read only chunks that the tensors do not hold already.
    """

    def __init__(
        self,
        contents: Contents,
        values: Mapping[str, Stored],
        planner: LoadPlanner,
        allow_pickle: bool,
        reuse: bool,
    ) -> None:
        self._contents = contents
        self._values = values
        self._planner = planner
        self._allow_pickle = allow_pickle
        self._reuse = reuse

    @torch.no_grad()
    @without_torch_modes()
    def run(self, plan: LoadPlan, fetch: Fetch | None) -> None:
        """Read and verify all items of a plan, and give them to the planner.

        Args:
            plan: The plan.
            fetch: Reads chunks together with other ranks; None: this rank reads for itself.

        Raises:
            MismatchError: Tensors share memory here, but have different values in the snapshot.
            DamagedError: Stored bytes are missing or damaged.
        """
        loading, planner = Loading(self._contents), self._planner
        parts = [self._part(i) for i in plan.items if i.type is LoadItemType.TENSOR]
        objects = [i for i in plan.items if i.type is LoadItemType.BYTE_IO]
        fresh = self._ties(parts)
        by_path: dict[str, list[int]] = {}
        for i, part in enumerate(parts):
            if i not in fresh:
                by_path.setdefault(part.value.path, []).append(i)
        for path, numbers in by_path.items():
            fills = [(parts[i].box, parts[i].target) for i in numbers]
            held = [parts[i].target for i in numbers] if self._reuse else ()
            loading.add(path, parts[numbers[0]].value.entry, fills, held=held)
        trees = self._contents.trees(own_rank())
        for item in objects:
            for path, entry in entries_below(trees, self._values[item.storage_index.fqn].path):
                loading.add(path, entry)
        known = loading.load_values(fetch, allow_pickle=self._allow_pickle)
        synchronize(part.target for part in parts)
        leaves = loading.load(fetch=fetch)
        for i, part in enumerate(parts):
            if i in fresh:
                part.target.copy_(fresh[i])
            planner.commit_tensor(part.item, part.target)
        synchronize(part.target for part in parts)
        true_keys = TrueKeys()
        for item in objects:
            path = self._values[item.storage_index.fqn].path
            value = inflate(path, leaves, known=known)
            _give(planner, item, value, true_keys)

    def _ties(self, parts: list[_TensorRead]) -> dict[int, torch.Tensor]:
        """Read each part whose target shares memory with another target; fill no target yet.

        Args:
            parts: All parts to load.

        Returns:
            The index of the part → the new tensor.

        Raises:
            MismatchError: Targets that share memory have different values in the snapshot.
        """
        groups, loading = _overlapping(parts), Loading(self._contents)
        fresh = {i: torch.empty_like(parts[i].target) for group in groups for i in group}
        for i, memory in fresh.items():
            _, value, box, _ = parts[i]
            loading.add(value.path, value.entry, [(box, memory)])
        loading.load()
        for group in groups:
            if not can_hold_all((parts[i].target, fresh[i]) for i in group):
                paths = sorted({parts[i].value.path for i in group})
                text = conflict_text(paths, "leave some out of the state dict")
                raise MismatchError(f"{self._contents.label}: nothing was loaded: {text}")
        return fresh

    def _part(self, item: ReadItem) -> _TensorRead:
        name = item.storage_index.fqn
        value = self._values[name]
        assert isinstance(value.entry, TensorEntry)
        box = Region(tuple(item.storage_offsets), tuple(item.lengths))
        state = getattr(self._planner, "state_dict", {})
        # DCP sees each tensor of a snapshot as one chunk, so this is the whole box of this rank.
        check_boxes(value.path, state.get(item.dest_index.fqn), value.entry.shape, [box])
        target = self._planner.resolve_tensor(item).detach()
        if tuple(target.shape) != box.sizes:
            raise StateError(
                f"{value.path}: the plan has a part of shape {box.sizes}, but the planner gives "
                f"memory of shape {tuple(target.shape)}"
            )
        if reason := why_not_writable(target):
            raise StateError(f"{value.path} {reason}")
        return _TensorRead(item, value, box, target)


def _overlapping(parts: list[_TensorRead]) -> list[list[int]]:
    """Return groups of parts whose targets overlap in memory, and may have different values.

    A group has the indices of its parts.
    """

    def content(name: tuple[str, int]) -> object:
        _, value, box, _ = parts[name[1]]
        assert isinstance(value.entry, TensorEntry)
        return value.entry.dtype, value.entry.payload, box

    memory = {("", i): part.target for i, part in enumerate(parts)}
    return [[i for _, i in group] for group in conflicting_groups(memory, content)]


def _give(planner: LoadPlanner, item: ReadItem, value: object, true_keys: TrueKeys) -> None:
    """Give a value to the planner: directly if the planner is DCP's own, else as bytes of a pickle.

    Args:
        planner: The planner.
        item: The item of the plan.
        value: The value.
        true_keys: Finds the keys that DCP has turned into texts.
    """
    if (
        isinstance(planner, DefaultLoadPlanner)
        and type(planner).load_bytes is DefaultLoadPlanner.load_bytes
    ):
        name = item.dest_index.fqn
        if planner.flatten_state_dict:
            state, path = planner.original_state_dict, planner.mappings[name]
            container = true_keys.container(state, path[:-1])
            if isinstance(container, MutableMapping):
                # Use the original key: DCP would add a second entry for a key that is no str.
                container[true_keys.key(container, path[-1])] = value
            else:
                set_element(state, path, value)
        else:
            planner.state_dict[name] = value
        return
    # Safe: these bytes are made here, from a value that was decoded safely.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    planner.load_bytes(item, buffer)
