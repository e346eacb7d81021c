"""Import a snapshot of TorchSnapshot, as one of its ranks sees it."""

from __future__ import annotations

import base64
import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch

from casnap.errors import FileFormatError, UnsupportedTypeError
from casnap.files.sources import MappedFolder, SourceFiles, joined_leaf
from casnap.format.decoding import json_decoder
from casnap.format.names import component_of, rank_names
from casnap.format.region import Region
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import containers_of, flatten
from casnap.state.pickles import RefusedError
from casnap.state.tensors import TENSOR_DTYPES, Leaf
from casnap.state.torch_save import tensor_in
from casnap.state.values import decode_value, encode_keys

_MOST_METADATA, _MOST_DEPTH = 1 << 30, 32
_NUMBER = re.compile(r"[0-9]{1,9}")
_CONTAINERS = ("dict", "OrderedDict", "list")
_PRIMITIVES = ("int", "str", "bool", "bytes", "float")


class _Tensor(msgspec.Struct):
    location: str
    serializer: str
    dtype: str
    shape: tuple[int, ...]
    byte_range: tuple[int, int] | None = None


class _Shard(msgspec.Struct):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: _Tensor


class _ManifestEntry(msgspec.Struct):
    """An entry of TorchSnapshot's manifest. Each type of entry has only some of the fields."""

    type: str
    keys: list[str | int] = []
    location: str = ""
    serializer: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    byte_range: tuple[int, int] | None = None
    shards: list[_Shard] = []
    chunks: list[_Shard] = []
    serialized_value: str = ""
    replicated: bool = False


class _Metadata(msgspec.Struct):
    world_size: int
    manifest: dict[str, _ManifestEntry]


def read_torchsnapshot(folder: Path, key: str | None, rank: int | None) -> SourceFiles:
    """Return what a rank restores: its own entries, replicated ones, and sharded tensors whole.

    Args:
        folder: The snapshot.
        key: Must be None, since the keys of the snapshot are used.
        rank: The rank; None for rank 0, if no other rank has entries of its own.

    Raises:
        FileFormatError: The metadata are malformed, or a file is missing; or several ranks have
            entries of their own, and ``rank`` is None.
    """
    snapshot = _read_metadata(folder / ".snapshot_metadata")
    if key is not None:
        raise FileFormatError(f"{folder} has keys of its own; leave key= out")
    entries = _seen_by(folder, snapshot, rank)
    reader = _Reader(folder, entries)
    with without_torch_modes(), python_gc_paused():
        leaves = {top: list(reader.leaves_of(top)) for top in entries if "/" not in top}
    if len(orphans := entries.keys() - reader.seen):
        raise FileFormatError(f"{folder}: {min(orphans)!r:.200} is in no container")
    return SourceFiles("torchsnapshot", len(reader.folder.files) + 1, leaves)


def _read_metadata(file: Path) -> _Metadata:
    if file.stat().st_size > _MOST_METADATA:
        raise FileFormatError(f"{file} is too long for the metadata of TorchSnapshot")
    data = file.read_bytes()
    try:
        return json_decoder(_Metadata).decode(data)
    except msgspec.ValidationError as e:
        raise FileFormatError(f"{file} is not as TorchSnapshot writes it: {e}") from e
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        import yaml
    except ImportError as e:
        raise FileFormatError(f"{file} is not JSON; to read YAML, pip install pyyaml") from e
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        _check_yaml(yaml.parse(data, loader))
        document = yaml.load(data, loader)
        return json_decoder(_Metadata).decode(msgspec.json.encode(document))
    except (yaml.YAMLError, msgspec.MsgspecError, RecursionError, TypeError, ValueError) as e:
        reason = " ".join(str(e).split())
        raise FileFormatError(f"{file} is not as TorchSnapshot writes it: {reason:.200}") from e


def _check_yaml(events: Iterable[object]) -> None:
    """Check the events of a document before yaml builds it.

    Deep nesting crashes yaml, and aliases can fill the memory.

    Raises:
        ValueError: The document has aliases or deep nesting, which TorchSnapshot does not write.
    """
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _MOST_DEPTH or kind == "AliasEvent":
            raise ValueError("it has aliases, or is nested too deeply")


def _seen_by(folder: Path, snapshot: _Metadata, rank: int | None) -> dict[str, _ManifestEntry]:
    """Return the entries that a rank restores, by path without the rank.

    A sharded tensor has the shards of all ranks.
    """
    world = snapshot.world_size
    of_rank = 0 if rank is None else rank
    if not 0 <= of_rank < max(world, 1):
        raise FileFormatError(f"{folder} was taken by {world} ranks; there is no rank {of_rank}")
    entries: dict[str, _ManifestEntry] = {}
    shards: dict[str, list[_Shard]] = {}
    others: dict[int, str] = {}
    for path, entry in snapshot.manifest.items():
        number, _, inner = path.partition("/")
        if not _NUMBER.fullmatch(number) or not inner or int(number) >= world:
            raise FileFormatError(f"{folder}: {path!r:.200} does not begin with a rank")
        if entry.type == "ShardedTensor":
            shards.setdefault(inner, []).extend(entry.shards)
        if int(number) == of_rank or (number == "0" and entry.replicated):
            entries[inner] = entry
        elif not entry.replicated and entry.type not in (*_CONTAINERS, "ShardedTensor"):
            others.setdefault(int(number), inner)
    if rank is None and others:
        one, path = next(iter(others.items()))
        raise FileFormatError(
            f"{folder}: {rank_names(sorted(others))} of {world} have entries of their own, such as "
            f"{one}/{path}; say which rank to import with rank=0 (--rank 0)"
        )
    for path, entry in entries.items():
        if entry.type == "ShardedTensor":
            entries[path] = msgspec.structs.replace(entry, shards=shards[path])
    return entries


class _Reader:
    """Reads the entries of a rank from the files of a snapshot.

    Attributes:
        folder: The files of the snapshot.
        seen: The paths of the entries that were read.
    """

    def __init__(self, folder: Path, entries: dict[str, _ManifestEntry]) -> None:
        self.folder = MappedFolder(folder, ".snapshot_metadata")
        self._entries = entries
        self._lengths: dict[str, int] = {}
        for path in entries:
            parent, _, name = path.rpartition("/")
            if parent in entries and entries[parent].type == "list" and _NUMBER.fullmatch(name):
                self._lengths[parent] = max(self._lengths.get(parent, 0), int(name) + 1)
        self.seen: set[str] = set()

    def leaves_of(self, top: str) -> Iterator[Leaf]:
        """Yield the leaves of a key: containers first, then their values."""
        places: list[str] = []
        try:
            yield from containers_of(self._state(top, places), top)
        except RecursionError as e:
            raise FileFormatError(f"{self.folder.path}: {top!r:.200} is nested too deeply") from e
        for path in places:
            try:
                yield from self._leaves(path, self._entries[path])
            except (RefusedError, UnsupportedTypeError, ValueError, struct.error) as e:
                if isinstance(e, FileFormatError):
                    raise
                raise FileFormatError(f"{self.folder.path}: {path} cannot be imported: {e}") from e

    def _state(self, path: str, places: list[str]) -> Any:
        """Return the containers at and below a path, with placeholders for other values.

        Args:
            path: The path.
            places: Gets the path of each placeholder, in order.
        """
        self.seen.add(path)
        entry = self._entries.get(path)
        if entry is None:
            raise FileFormatError(f"{self.folder.path}: {path!r:.200} is missing from the manifest")
        if entry.type == "list":
            count = self._lengths.get(path, 0)
            if count > len(self._entries):
                raise FileFormatError(f"{self.folder.path}: {path!r:.200} lacks elements")
            return [self._state(f"{path}/{i}", places) for i in range(count)]
        if entry.type not in _CONTAINERS:
            places.append(path)
            return _VALUE
        components = list(map(component_of, encode_keys(entry.keys)))
        if len(set(components)) < len(entry.keys):
            raise FileFormatError(f"{self.folder.path}: {path!r:.200} has a key twice")
        mapping: dict[Any, Any] = {} if entry.type == "dict" else OrderedDict()
        for name, component in zip(entry.keys, components, strict=True):
            mapping[name] = self._state(f"{path}/{component}", places)
        return mapping

    def _leaves(self, path: str, entry: _ManifestEntry) -> Iterator[Leaf]:
        if entry.type in _PRIMITIVES:
            yield from flatten(_primitive(entry), path)
        elif entry.type == "object":
            if entry.serializer != "torch_save":
                raise RefusedError(f"it is written by {entry.serializer!r:.40}")
            data = bytes(self.folder.file(entry.location).view)
            yield from flatten(decode_value(path, "object", data), path)
        elif entry.type == "Tensor" and entry.dtype.startswith("torch.q"):
            yield from self._quantized(path, entry)
        elif entry.type == "Tensor":
            fields = entry.location, entry.serializer, entry.dtype, entry.shape, entry.byte_range
            shard = _Shard((0,) * len(entry.shape), entry.shape, _Tensor(*fields))
            yield self._joined(path, entry.dtype, entry.shape, [shard])
        elif entry.type == "ChunkedTensor":
            yield self._joined(path, entry.dtype, entry.shape, entry.chunks)
        elif entry.type == "ShardedTensor" and entry.shards:
            ends = [
                tuple(o + n for o, n in zip(s.offsets, s.sizes, strict=True)) for s in entry.shards
            ]
            shape = tuple(map(max, zip(*ends, strict=True)))
            yield self._joined(path, entry.shards[0].tensor.dtype, shape, entry.shards)
        else:
            raise RefusedError(f"it is of the unknown type {entry.type!r:.40}")

    def _quantized(self, path: str, entry: _ManifestEntry) -> Iterator[Leaf]:
        """Yield the leaf of a quantized tensor: a value of ``torch.save``, with its scales."""
        start, stop = entry.byte_range or (0, None)
        data = bytes(self.folder.file(entry.location).view[start:stop])
        with warnings.catch_warnings():
            # torch itself uses TypedStorage when it reads such a tensor, and warns of it.
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
            value = decode_value(path, "object", data)
        if (str(getattr(value, "dtype", "")), tuple(getattr(value, "shape", ()))) != (
            entry.dtype,
            entry.shape,
        ):
            raise RefusedError(f"{entry.location} holds another tensor")
        yield from flatten(value, path)

    def _joined(self, path: str, dtype: str, shape: tuple[int, ...], shards: list[_Shard]) -> Leaf:
        # Several ranks may hold the same shard: the dict keeps one of them.
        parts = {Region(s.offsets, s.sizes): s.tensor for s in shards}
        if any(t.dtype != dtype or t.shape != box.sizes for box, t in parts.items()):
            raise RefusedError("its parts are of several dtypes, or not of the shapes that it says")
        contents = [(box, self._content(tensor)) for box, tensor in parts.items() if box.numel]
        return joined_leaf(path, dtype.removeprefix("torch."), shape, contents)

    def _content(self, tensor: _Tensor) -> torch.Tensor:
        dtype = TENSOR_DTYPES.get(tensor.dtype.removeprefix("torch."))
        file = self.folder.file(tensor.location)
        start, stop = tensor.byte_range or (0, len(file.view))
        if dtype is None or not 0 <= start <= stop <= len(file.view):
            raise RefusedError(f"{tensor.location} ends before it, or its dtype is unknown")
        if tensor.serializer == "torch_save":
            place, raw = tensor_in(file.view[start:stop])
            if (place.dtype, tuple(place.shape)) != (dtype, tensor.shape):
                raise RefusedError(f"{tensor.location} holds another tensor")
            at = file.offset_of(raw) + place.offset * dtype.itemsize
            return file.elements(at, tensor.shape, dtype.itemsize, place.strides)
        if tensor.serializer != "buffer_protocol":
            raise RefusedError(f"it is written by {tensor.serializer!r:.40}")
        if prod(tensor.shape) * dtype.itemsize != stop - start:
            raise RefusedError(f"{tensor.location} has {stop - start:,} bytes for it")
        return file.elements(start, tensor.shape, dtype.itemsize)


_VALUE = object()


def _primitive(entry: _ManifestEntry) -> object:
    """Return a primitive value, such as a number. It lies in the metadata themselves."""
    text = entry.serialized_value
    if entry.type == "int":
        return int(text)
    if entry.type == "bool":
        if text not in ("True", "False"):
            raise ValueError(f"{text!r:.40} is not a bool")
        return text == "True"
    if entry.type == "str":
        return text
    data = base64.b64decode(text, validate=True)
    return data if entry.type == "bytes" else struct.unpack("<d", data)[0]
