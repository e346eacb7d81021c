"""Turn the plan of a save into leaves of a take.

DCP has divided the state already: each item of a plan is a whole value or a box of a tensor, and
only one rank has the item. So each leaf is global, and the ranks need not compare replicas.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from casnap.errors import StateError, UnsupportedTypeError
from casnap.extending import (
    Comm,
    DividedLeaves,
    Leaf,
    ObjectPath,
    Region,
    casnap_path,
    containers_above,
    decode_value,
    describe,
    flatten,
    leaf_of_parts,
    without_torch_modes,
)
from casnap.files.dcp_names import DictKey, as_in_dcp, first_keys, with_keys
from casnap.format.entries import Payload, ValueEntry
from casnap.runtime.threads import python_gc_paused
from casnap.state.parts import holds_parts, said_of_parts
from casnap.state.sharded import shards_of, without_torch_function
from casnap.state.tensors import ORDINARY_TYPES
from casnap.state.values import encode_key, encode_object


class _Paths(msgspec.Struct, array_like=True):
    """A message between ranks: object paths of DCP, in order."""

    paths: list[tuple[str | int | DictKey, ...]]


_set_up_planner = DefaultSavePlanner.set_up_planner


@functools.wraps(_set_up_planner)
def _keep_state(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Set up a planner as DCP does, and keep the original state as its ``casnap_state``.

    DCP's flattened state turns each key into a str; the original one has the true keys. This
    replaces ``DefaultSavePlanner.set_up_planner``.
    """
    self.casnap_state = state_dict
    _set_up_planner(self, state_dict, *args, **kwargs)


DefaultSavePlanner.set_up_planner = _keep_state  # type: ignore[method-assign]


def planned(
    comm: Comm, plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool
) -> DividedLeaves:
    """Return the values in the plan of this rank, as leaves. All ranks call this.

    Args:
        comm: The ranks.
        plan: The plan of this rank.
        planner: The planner, which has the values.
        allow_pickle: Whether values without a safe encoding may be pickled.

    Raises:
        StateError: A value cannot be stored, or contradicts the plan.
    """
    mapping = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    state, true_keys = getattr(planner, "casnap_state", None), TrueKeys()
    paths = {
        item.index.fqn: _with_keys(_path_of(mapping, item.index.fqn), state, true_keys)
        for item in plan.items
    }
    leaves: dict[str, list[Leaf]] = {}
    leading = agreed_paths(comm, dict.fromkeys(paths.values()))
    for path in leading:
        leaves.setdefault(str(path[0]), [])
    if comm.rank == 0:
        for key, containers in containers_above(leading).items():
            leaves[key] += containers
    reader, keys = _PlanReader(planner, bool(mapping), allow_pickle), first_keys(leading)
    with torch.no_grad(), without_torch_modes(), python_gc_paused():
        for name, items in _by_name(plan).items():
            path = with_keys(paths[name], keys)
            leaves[str(path[0])] += reader.leaves(casnap_path(path), items)
    return DividedLeaves(leaves)


def _path_of(mapping: Mapping[str, Any], name: str) -> ObjectPath:
    """Return the object path of a value. It is the name alone if the planner flattens no states.

    Args:
        mapping: Name → object path, as the planner gives them.
        name: The name of the value.
    """
    path = mapping.get(name)
    return path if isinstance(path, tuple) and path else (name,)


class TrueKeys:
    """Finds the original keys that DCP has turned into texts.

    The dicts must not change while this object is in use.
    """

    def __init__(self) -> None:
        self._by_text: dict[int, dict[str, Any]] = {}

    def key(self, container: Any, part: object) -> Any:
        """Return the original key or index for one part of an object path of DCP.

        Args:
            container: The dict or list that the part leads into.
            part: The part.
        """
        if not isinstance(container, Mapping):
            return part
        if id(container) not in self._by_text:
            others = {str(key): key for key in container if not isinstance(key, str)}
            self._by_text[id(container)] = others
        return self._by_text[id(container)].get(str(part), part)

    def container(self, state: Any, path: Sequence[object]) -> Any:
        """Return the value at an object path of DCP; None if there is none."""
        for part in path:
            try:
                state = state[self.key(state, part)]
            except (LookupError, TypeError):
                return None
        return state


def _with_keys(path: ObjectPath, state: Any, true_keys: TrueKeys) -> ObjectPath:
    """Replace the texts in an object path of DCP by the original keys of a state.

    Args:
        path: The path.
        state: The state, not flattened.
        true_keys: Finds the keys.

    Raises:
        UnsupportedTypeError: A key cannot be stored.
    """
    found = list(path)
    for i, part in enumerate(path):
        key = true_keys.key(state, part)
        if key is not part and i > 0:
            found[i] = _dict_key(casnap_path(path[:i]), key)
        state = true_keys.container(state, path[i : i + 1])
    return tuple(found)


def _dict_key(path: str, key: object) -> DictKey:
    try:
        return DictKey(encode_key(key))
    except UnsupportedTypeError as e:
        raise UnsupportedTypeError(
            f"{path}: the key {key!r:.80} of type {e} cannot be stored, and DCP would make a str "
            "of it; use str, int, bool, float, None, or tuples of those"
        ) from None


def _by_name(plan: SavePlan) -> dict[str, list[WriteItem]]:
    items: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        items.setdefault(item.index.fqn, []).append(item)
    return items


def agreed_paths(comm: Comm, own_paths: Mapping[ObjectPath, None]) -> list[ObjectPath]:
    """Return the paths of all values that any rank stores, in the same order on all ranks.

    Rank 0 knows most of them, so the others send only paths that rank 0 lacks.

    Args:
        comm: The ranks; all call this.
        own_paths: The paths of the values that this rank stores.
    """
    leading = comm.broadcast_message(_Paths(list(own_paths)), _Paths)
    known_paths = set(map(as_in_dcp, leading.paths))
    answers = comm.gather_messages(
        _Paths([path for path in own_paths if as_in_dcp(path) not in known_paths]), _Paths
    )
    further_paths: dict[ObjectPath, ObjectPath] = {}
    for path in (path for each in answers for path in each.paths):
        further_paths.setdefault(as_in_dcp(path), path)
    further = comm.broadcast_message(_Paths(list(further_paths.values())), _Paths)
    return [*leading.paths, *further.paths]


class _PlanReader:
    """Gets the values of a plan's items from the planner, as leaves.

    Args:
        planner: The planner.
        flattens: Whether the planner has flattened the state.
        allow_pickle: Whether values without a safe encoding may be pickled.
    """

    def __init__(self, planner: SavePlanner, flattens: bool, allow_pickle: bool) -> None:
        self._planner = planner
        self._flattens = flattens
        self._allow_pickle = allow_pickle
        kind: Any = type(planner)
        # Whether objects are read as they are, not by torch.save and torch.load.
        self._gives_objects = (
            isinstance(planner, DefaultSavePlanner)
            and kind.resolve_data is DefaultSavePlanner.resolve_data
            and kind.transform_object is DefaultSavePlanner.transform_object
        )
        # The values that the planner returns unchanged.
        self._values: Mapping[str, Any] = {}
        if self._gives_objects and kind.lookup_object is DefaultSavePlanner.lookup_object:
            self._values = getattr(planner, "state_dict", {})

    def leaves(self, path: str, items: list[WriteItem]) -> Iterator[Leaf]:
        """Yield the leaves of one value.

        Args:
            path: The path of the value in casnap.
            items: The items of the plan that have the value, or boxes of it.
        """
        tensor = self._whole_tensor(items)
        if tensor is not None:
            yield describe(path, tensor)
            return
        if items[0].type is WriteItemType.BYTE_IO:
            yield from self._leaves_of_object(path, items[0])
            return
        parts = [self._part(path, item) for item in items]
        shape = parts[0].shape
        self._check_boxes(path, items[0].index.fqn, parts)
        if 0 in shape:
            # A tensor without elements is stored by the rank whose part begins at the offset 0.
            if not all(any(part.box.offsets) for part in parts):
                yield from flatten(parts[0].tensor.new_empty(shape), path)
            return
        if len(parts) == 1 and parts[0].box == Region.whole(shape):
            yield from flatten(parts[0].tensor, path, allow_pickle=self._allow_pickle)
            return
        yield from leaf_of_parts(path, shape, ((part.box, part.tensor) for part in parts))

    def _whole_tensor(self, items: list[WriteItem]) -> torch.Tensor | None:
        """Return the tensor if the items are one ordinary tensor, undivided; else None.

        Most values are such tensors.
        """
        value, data = self._values.get(items[0].index.fqn), items[0].tensor_data
        if type(value) not in ORDINARY_TYPES or data is None or len(items) > 1:
            return None
        if holds_parts(value):
            return None
        assert isinstance(value, torch.Tensor)
        if value.layout is not torch.strided or 0 in value.shape:
            return None
        is_whole = value.shape == data.size and value.shape == data.chunk.sizes
        return value.detach() if is_whole else None

    def _part(self, path: str, item: WriteItem) -> _TensorBox:
        assert item.tensor_data is not None
        value = self._planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        if hasattr(value, "wait"):  # a collective may still be under way
            value = value.wait()
        chunk, shape = item.tensor_data.chunk, tuple(item.tensor_data.size)
        box = Region(tuple(chunk.offsets), tuple(chunk.sizes))
        if tuple(value.shape) != box.sizes:
            raise StateError(
                f"{path}: the plan has a part of shape {box.sizes}, but the planner gives one of "
                f"shape {tuple(value.shape)}"
            )
        return _TensorBox(shape, box, value.detach())

    def _check_boxes(self, path: str, name: str, parts: list[_TensorBox]) -> None:
        value = getattr(self._planner, "state_dict", {}).get(name)
        check_boxes(path, value, parts[0].shape, [part.box for part in parts])

    def _leaves_of_object(self, path: str, item: WriteItem) -> Iterator[Leaf]:
        if self._gives_objects:
            value = self._planner.lookup_object(item.index)  # type: ignore[attr-defined]
        else:
            data = self._planner.resolve_data(item)
            assert isinstance(data, io.BytesIO)
            try:
                value = decode_value(path, "object", data.getvalue())
            except UnsupportedTypeError as e:
                if self._allow_pickle:
                    yield _value_leaf(path, "pickle", data.getvalue())
                    return
                raise UnsupportedTypeError(
                    f"{path}: what the planner gives for it cannot be read by "
                    "torch.load(weights_only=True); give plain values, or pass allow_pickle=True "
                    "to CasnapWriter and CasnapReader"
                ) from e
        if self._flattens or not isinstance(value, Mapping | list):
            yield from flatten(value, path, allow_pickle=self._allow_pickle)
        else:
            # Stored as one value: a reader would flatten its leaves, but this planner has one name.
            yield _value_leaf(path, *encode_object(path, value, self._allow_pickle))


class _TensorBox(NamedTuple):
    """A part of a tensor.

    Attributes:
        shape: The shape of the whole tensor.
        box: The box of the part.
        tensor: Its elements.
    """

    shape: tuple[int, ...]
    box: Region
    tensor: torch.Tensor


def _value_leaf(path: str, kind: str, data: bytes) -> Leaf:
    return Leaf(path, ValueEntry(Payload(len(data)), kind), data)


def check_boxes(path: str, value: object, shape: tuple[int, ...], boxes: list[Region]) -> None:
    """Check the boxes that DCP gives for a tensor: some kinds of tensors get wrong ones.

    Args:
        path: The path of the tensor, for errors.
        value: The tensor that the planner has under its name, if it is known.
        shape: The shape of the whole tensor, by DCP.
        boxes: The boxes of this rank, by DCP.

    Raises:
        UnsupportedTypeError: This rank holds other elements than those of the boxes.
    """
    if not isinstance(value, DTensor):
        _check_said(path, value, shape, boxes)
        return
    if not any(hasattr(placement, "split_factor") for placement in value.placements):
        return
    with without_torch_function():
        shards = shards_of(path, value)
    assert shards is not None
    if set(shards.boxes) != {box for box in boxes if box.numel}:
        raise UnsupportedTypeError(
            f"{path}: torch.distributed.checkpoint takes this DTensor with the placements "
            f"{tuple(value.placements)} for one box at {boxes[0].offsets}, but this rank holds "
            "other elements; redistribute it to Shard or Replicate first, or use casnap.Snapshot"
        )


def _check_said(path: str, value: object, shape: tuple[int, ...], boxes: list[Region]) -> None:
    if not isinstance(value, torch.Tensor) or not holds_parts(value):
        return
    full_shape, held_boxes = said_of_parts(value)
    are_held = (
        any(box == box.intersect(own_paths) for own_paths in held_boxes)
        for box in boxes
        if box.numel
    )
    if shape != full_shape or not all(are_held):
        raise UnsupportedTypeError(
            f"{path}: the planner has this tensor as one of shape {shape}, but it says that it "
            f"holds parts of one of shape {full_shape}. Only torch 2.14 and newer know a "
            f"CheckpointableTensor (this is torch {torch.__version__}), and so must a planner of "
            "your own"
        )
