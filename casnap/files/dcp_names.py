"""Convert between the names of DCP and the paths of casnap.

DCP flattens nested dicts, and lists that hold tensors or dicts, into a flat dict. It names a value
by the keys above it, joined by dots, and keeps the keys as the value's *object path*. casnap's path
of a value has the same keys, joined by slashes. So each of the two names can be computed from the
other, and a snapshot needs no record about DCP.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from casnap.errors import DamagedError, StateError, UnsupportedTypeError
from casnap.format.entries import ContainerEntry, Entry, TensorEntry, unknown_in
from casnap.format.names import Key, component_of, key_of
from casnap.restore.loading import Loading
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.containers import container_builder
from casnap.state.flatten import MAX_NESTING, containers_of
from casnap.state.numpy_values import is_numpy
from casnap.state.tensors import Leaf, allocate
from casnap.state.values import decode_keys
from casnap.storage import Contents

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_MOST_GAPS = 1 << 16
DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""The version that DCP writes into its metadata."""


class DictKey(msgspec.Struct, frozen=True, array_like=True):
    """A key of a dict that is not a str. DCP has ``str(key)`` in its place.

    Attributes:
        encoded: The key, as casnap's paths encode it.
    """

    encoded: Key

    def __str__(self) -> str:
        return str(self.key)

    @property
    def key(self) -> Any:
        """The key itself, such as an int."""
        return decode_keys([self.encoded])[0]


ObjectPath: TypeAlias = tuple[str | int | DictKey, ...]
"""The keys of dicts and indices of lists that lead to a value."""


def casnap_path(path: ObjectPath) -> str:
    """Return casnap's path of a value.

    Args:
        path: The keys of the dicts, and the indices of the lists, that lead to the value.
    """
    parts = (part.encoded if isinstance(part, DictKey) else part for part in path)
    return "/".join(map(component_of, parts))


def first_keys(paths: Iterable[ObjectPath]) -> dict[ObjectPath, DictKey]:
    """Return the keys that are not str, by their object paths in DCP.

    Ranks may have different keys with the same text at one path. The first that is not a str
    counts.

    Args:
        paths: The object paths of all values; a key that is not a str is a :class:`DictKey`.
    """
    keys: dict[ObjectPath, DictKey] = {}
    for path in paths:
        in_dcp = as_in_dcp(path)
        for i, part in enumerate(path):
            if isinstance(part, DictKey):
                keys.setdefault(in_dcp[: i + 1], part)
    return keys


def with_keys(path: ObjectPath, keys: Mapping[ObjectPath, DictKey]) -> ObjectPath:
    """Replace the texts in an object path of DCP by the original keys.

    Args:
        path: The object path, as DCP has it.
        keys: The keys, as :func:`first_keys` returns them.
    """
    in_dcp = as_in_dcp(path)
    return tuple(keys.get(in_dcp[: i + 1], part) for i, part in enumerate(in_dcp))


def as_in_dcp(path: ObjectPath) -> ObjectPath:
    """Return an object path as DCP has it: keys of dicts are texts."""
    return tuple(str(part) if isinstance(part, DictKey) else part for part in path)


# --- saving -----------------------------------------------------------------------------------


def containers_above(paths: Iterable[ObjectPath]) -> dict[str, list[Leaf]]:
    """Return the leaves of the dicts and lists that hold the values, by the top key.

    Args:
        paths: The object paths of all values, in order.

    Raises:
        StateError: Two values have one path, a value lies below another one, or lists have more
            gaps than values.
    """
    true_paths = list(paths)
    paths = list(map(as_in_dcp, true_paths))
    _check_paths(paths)
    keys = {path: dict_key.key for path, dict_key in first_keys(true_paths).items()}
    root: dict[str, Any] = {}
    with without_torch_modes():
        # A tensor stands for each value: casnap packs a list of plain values into one value.
        value = torch.empty(0)
        for path in paths:
            try:
                set_element(root, path, value)  # type: ignore[arg-type]
            except (TypeError, IndexError, AttributeError, RuntimeError) as e:
                raise StateError(f"{casnap_path(path):.200} lies below another value: {e}") from e
        try:
            return {
                key: list(containers_of(_as_saved(child, (key,), keys), component_of(key)))
                for key, child in root.items()
            }
        except RecursionError as e:
            raise StateError("its values are nested too deeply") from e


def _check_paths(paths: Sequence[ObjectPath]) -> None:
    """Check that no two values clash, and that lists have few gaps.

    Raises:
        StateError: Two values have one path, a value lies below another one, or lists have more
            gaps than values.
    """
    distinct, parents = set(paths), set[ObjectPath]()
    lengths: dict[ObjectPath, int] = {}
    for path in paths:
        if len(path) > MAX_NESTING:
            raise StateError(f"{casnap_path(path):.200}… is nested more than {MAX_NESTING} deep")
        for i, key in enumerate(path):
            parents.add(path[:i])
            if isinstance(key, int):
                lengths[path[:i]] = max(lengths.get(path[:i], 0), key + 1)
    if len(distinct) < len(paths) or not parents.isdisjoint(distinct):
        one = next(iter(parents & distinct), None) or Counter(paths).most_common(1)[0][0]
        raise StateError(f"{casnap_path(one):.200} is the path of several values, or above one")
    # Gaps are allowed: DCP drops an empty dict, which leaves a gap in its list.
    if sum(lengths.values()) > _MOST_GAPS + len(paths):
        raise StateError("its lists have more gaps than values")


def _as_saved(value: Any, path: ObjectPath, keys: Mapping[ObjectPath, Any]) -> Any:
    """Return nested containers with the keys that they had before DCP made them texts.

    An optimizer has ints as the keys of its parameters, and would ignore the state of a parameter
    ``"0"``. So keys that are numbers become ints in the state of an optimizer, even if no record of
    them is known. DCP also drops empty dicts; an empty ``state`` is put back.

    Args:
        value: A value.
        path: Its object path in DCP.
        keys: The known keys that are not str, by their object paths in DCP.
    """
    if isinstance(value, list):
        return [_as_saved(inner, (*path, i), keys) for i, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    mapping = {
        keys.get((*path, name), name): _as_saved(inner, (*path, name), keys)
        for name, inner in value.items()
    }
    if "param_groups" in mapping and mapping.keys() <= {"state", "param_groups"}:
        state = mapping.get("state", {})
        if isinstance(state, dict) and all(_NUMBER.fullmatch(str(name)) for name in state):
            numbered = {int(name): inner for name, inner in state.items()}
            mapping = {"state": numbered, "param_groups": mapping["param_groups"]}
    return mapping


# --- loading ----------------------------------------------------------------------------------


class Stored(NamedTuple):
    """An entry of a snapshot, with its path in casnap."""

    path: str
    entry: Entry


class _Value:
    """A placeholder for a value that DCP does not flatten, while DCP plans a load."""

    def __init__(self, content: Stored) -> None:
        self.content = content


class _List(list[Any]):
    """A placeholder for a list. DCP flattens a list only if it holds tensors or dicts."""

    content: Stored


def described(
    contents: Contents, entries: Mapping[str, Entry], path: str = ""
) -> tuple[Metadata, dict[str, Stored]]:
    """Return the metadata by which DCP plans a load, and each entry by its name in DCP.

    The metadata are made from the snapshot's entries, so any take can be loaded. In these metadata,
    each tensor is a single chunk, as DCP calls it.

    Args:
        contents: The snapshot.
        entries: Its entries, as one rank sees them, by path.
        path: The path of the dict that is the state; empty for all keys.

    Raises:
        UnsupportedTypeError: DCP has the same name for two values, or no dict is at ``path``.
    """
    loading = Loading(contents)
    for entry_path, entry in entries.items():
        if isinstance(entry, ContainerEntry):
            loading.add(entry_path, entry)
    specs = loading.load()
    try:
        with without_torch_modes():
            if path:
                root = _stand_in(path, entries, specs)
            else:
                keys = dict.fromkeys(entry_path.partition("/")[0] for entry_path in entries)
                root = {key_of(key): _stand_in(key, entries, specs) for key in keys}
        if not isinstance(root, dict):
            raise UnsupportedTypeError(
                f"{contents.label}: {path} is not a dict, so DCP has no names for its values; name "
                "the dict above it"
            )
        flat, mappings = flatten_state_dict(root)
    except (ValueError, RecursionError) as e:
        raise UnsupportedTypeError(
            f"{contents.label} has no names in DCP: {e}; read it with casnap.Snapshot"
        ) from e
    values = {name: value.content for name, value in flat.items()}
    metadata: dict[str, STORAGE_TYPES] = {
        name: _tensor_metadata(value) if isinstance(value, torch.Tensor) else BytesStorageMetadata()
        for name, value in flat.items()
    }
    named = Metadata(metadata, mappings, {})
    named.version = DCP_VERSION  # a field since torch 2.8
    return named, values


def _stand_in(path: str, entries: Mapping[str, Entry], specs: Mapping[str, Leaf]) -> Any:
    """Return a value without contents, which DCP flattens just as it would the entry's value.

    Args:
        path: The path of the entry.
        entries: All entries, by path.
        specs: The leaves of the containers among them, by path.
    """
    entry = entries.get(path)
    if entry is None:
        raise DamagedError(f"{path} is missing from the snapshot", (path,))
    content = Stored(path, entry)
    stand_in: Any = _Value(content)
    if isinstance(entry, TensorEntry):
        if not (is_numpy(entry) or entry.quantization or unknown_in(entry)):
            stand_in = allocate(entry, "meta")
            stand_in.content = content
    elif isinstance(entry, ContainerEntry) and entry.kind in _OPENED:
        spec = specs[path].content
        assert isinstance(spec, bytes)
        components, build = container_builder(path, entry, spec)
        elements = build([_stand_in(f"{path}/{c}", entries, specs) for c in components])
        stand_in = dict(elements) if entry.kind != "list" else _List(elements)
        if entry.kind == "list":
            stand_in.content = content
    return stand_in


_OPENED = ("dict", "OrderedDict", "defaultdict", "Counter", "list")


def _tensor_metadata(tensor: torch.Tensor) -> TensorStorageMetadata:
    start = torch.Size([0] * tensor.dim())
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype),
        tensor.shape,
        [ChunkStorageMetadata(start, tensor.shape)],
    )
