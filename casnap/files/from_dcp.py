"""Import a checkpoint of ``torch.distributed.checkpoint`` (DCP), as FileSystemWriter writes it.

Its ``.metadata`` is a pickle. casnap interprets the pickle without running it: it knows DCP's own
classes of metadata, and refuses all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from casnap.errors import FileFormatError, StateError, UnsupportedTypeError, with_article
from casnap.files.dcp_names import ObjectPath, casnap_path, containers_above
from casnap.files.sources import MappedFile, MappedFolder, SourceFiles, joined_leaf
from casnap.format.notices import HEAD_BYTES, is_notice
from casnap.format.region import Region
from casnap.runtime.threads import python_gc_paused
from casnap.runtime.torch_modes import without_torch_modes
from casnap.state.flatten import flatten
from casnap.state.pickles import PickleMachine, RefusedError, Term, kind_of
from casnap.state.tensors import Leaf
from casnap.state.torch_save import tensor_in
from casnap.state.values import decode_value

_META = "torch.distributed.checkpoint.metadata."
_METADATA, _INDEX = f"{_META}Metadata", f"{_META}MetadataIndex"
_TENSOR, _BYTES = f"{_META}TensorStorageMetadata", f"{_META}BytesStorageMetadata"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
_KNOWN = {
    _METADATA, _INDEX, _TENSOR, _BYTES, _INFO, _SIZE,
    f"{_META}ChunkStorageMetadata", f"{_META}TensorProperties", f"{_META}StorageMeta",
    f"{_META}_MEM_FORMAT_ENCODING", "torch.serialization._get_layout",
    "pathlib.PosixPath", "pathlib._local.PosixPath", "collections.OrderedDict",
}  # fmt: skip


class _FileRange(NamedTuple):
    """Where the bytes of a tensor, of a box of it, or of an object are stored.

    Attributes:
        file: The name of the file.
        offset: The offset in the file, in bytes.
        nbytes: The length in bytes.
    """

    file: str
    offset: int
    nbytes: int


class _DcpTensor(NamedTuple):
    """A tensor in the metadata.

    Attributes:
        dtype: Its dtype, by torch's name.
        shape: Its shape.
        boxes: The boxes of it that the files store.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: list[Region]


class _DcpMetadata(NamedTuple):
    """The metadata of a checkpoint, decoded.

    Attributes:
        values: Name → the tensor; None for an object.
        paths: Name → the object path.
        places: Name and offsets of a box → where its bytes are stored; objects have no offsets.
    """

    values: dict[str, _DcpTensor | None]
    paths: dict[str, ObjectPath]
    places: dict[tuple[str, tuple[int, ...] | None], _FileRange]


def read_dcp(folder: Path, key: str | None) -> SourceFiles:
    """Return the leaves of a checkpoint of DCP, under the keys that it was saved with.

    Args:
        folder: The checkpoint.
        key: A key to put above these keys; None for none.

    Raises:
        FileFormatError: The metadata need code or are damaged, or a file is missing.
    """
    file = folder / ".metadata"
    mapped = MappedFile(file)
    if is_notice(bytes(mapped.view[:HEAD_BYTES])):
        raise FileFormatError(
            f"{folder} is a snapshot of casnap, and its .metadata holds nothing: `casnap cp` "
            "copies it to another store"
        )
    try:
        metadata = _read_metadata(mapped.view)
    except _CodeError as e:
        raise FileFormatError(
            f"{file} is a pickle that asks for {e}, not for a metadata class of DCP, so it "
            "was refused; nothing of it was run. On a machine where you trust it, load it with "
            "dcp.load, and save it with casnap.integrations.dcp.CasnapWriter"
        ) from e
    except (RefusedError, KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise FileFormatError(f"{file} does not hold metadata of DCP: {e}") from e
    paths = {name: (key, *p) if key else p for name, p in metadata.paths.items()}
    reader = _Reader(folder, metadata)
    try:
        by_key = containers_above(paths.values())
    except (StateError, UnsupportedTypeError) as e:
        raise FileFormatError(f"{file}: {e}") from e
    leaves: dict[str, list[Leaf]] = {str(path[0]): [] for path in paths.values()}
    for top, containers in by_key.items():
        leaves[top] += containers
    with without_torch_modes(), python_gc_paused():
        for name, path in paths.items():
            leaves[str(path[0])] += reader.leaves(name, casnap_path(path))
    return SourceFiles("dcp", len(reader.folder.files) + 1, leaves)


# --- the metadata -----------------------------------------------------------------------------


class _CodeError(ValueError):
    """The metadata name a class or function that is not one of DCP's metadata classes."""


def _only_known(step: str, term: Term) -> None:
    if step == "storage" or term.name not in _KNOWN:
        raise _CodeError(term.name or "a storage")


def _read_metadata(data: memoryview) -> _DcpMetadata:
    top = PickleMachine(data, _only_known, newest=5).run()
    fields = _fields(top, _METADATA)
    described = _pairs(fields["state_dict_metadata"])
    values = {_text(name): _value(term) for name, term in described}
    paths: dict[str, ObjectPath] = {name: (name,) for name in values}
    planner_data = fields.get("planner_data")
    if kind_of(planner_data) == "dict":
        for name, path in _pairs(planner_data):
            if name in paths and kind_of(path) == "tuple":
                paths[name] = tuple(_component(part) for part in path.parts) or (name,)
                _text(paths[name][0])
    places: dict[tuple[str, tuple[int, ...] | None], _FileRange] = {}
    for index, info in _pairs(fields["storage_data"]):
        place = _fields(index, _INDEX)
        offset = place.get("offset")
        key = _text(place["fqn"]), None if offset is None else _sizes(offset)
        places[key] = _file_range(_fields(info, _INFO))
    return _DcpMetadata(values, paths, places)


def _fields(term: object, name: str = "") -> dict[str, Any]:
    """Return the attributes of an object in an interpreted pickle.

    Args:
        term: The object.
        name: The class that it must have; empty for any class.

    Raises:
        ValueError: It is no object of this class.
    """
    if not isinstance(term, Term) or term.kind != "call" or (name and term.name != name):
        raise ValueError(
            f"{with_article(getattr(term, 'name', kind_of(term)))} in place of {with_article(name)}"
        )
    return {_text(key): value for key, value in _pairs(term.state)}


def _pairs(term: object) -> list[tuple[Any, Any]]:
    if not isinstance(term, Term) or term.kind != "dict":
        raise ValueError(f"{with_article(kind_of(term))} in place of a dict")
    return list(zip(term.parts[::2], term.parts[1::2], strict=True))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{with_article(kind_of(value))} in place of a name")
    return value


def _component(value: object) -> str | int:
    if type(value) not in (str, int):
        raise TypeError(f"{with_article(kind_of(value))} in the path of a value")
    return value  # type: ignore[return-value]


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} in place of a number")
    return value


def _sizes(term: object) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size`` in an interpreted pickle."""
    if not isinstance(term, Term) or term.name != _SIZE or kind_of(term.parts[0]) != "tuple":
        raise ValueError(f"{with_article(kind_of(term))} in place of sizes")
    return tuple(map(_number, term.parts[0].parts))


def _value(term: object) -> _DcpTensor | None:
    if isinstance(term, Term) and term.name == _BYTES:
        return None
    fields = _fields(term, _TENSOR)
    dtype = fields["properties"].state.parts[0]
    boxes = []
    for chunk in fields["chunks"].parts:
        box = _fields(chunk)
        boxes.append(Region(_sizes(box["offsets"]), _sizes(box["sizes"])))
    shape = _sizes(fields["size"])
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        raise ValueError("a box of another number of axes than its tensor")
    return _DcpTensor(_text(dtype.name).removeprefix("torch."), shape, boxes)


def _file_range(fields: dict[str, Any]) -> _FileRange:
    if fields.get("transform_descriptors"):
        raise ValueError("its files are compressed by an extension of DCP, which casnap lacks")
    return _FileRange(
        _text(fields["relative_path"]), _number(fields["offset"]), _number(fields["length"])
    )


# --- the files --------------------------------------------------------------------------------


class _Reader:
    """Reads the tensors and other values of a DCP checkpoint, each once it is asked for."""

    def __init__(self, folder: Path, metadata: _DcpMetadata) -> None:
        self._metadata = metadata
        self._offsets: dict[str, set[tuple[int, ...] | None]] = {}
        for name, offsets in metadata.places:
            self._offsets.setdefault(name, set()).add(offsets)
        self.folder = MappedFolder(folder, ".metadata")

    def leaves(self, name: str, path: str) -> Iterator[Leaf]:
        """Yield the leaves of a value.

        Args:
            name: Its name in DCP.
            path: Its path in casnap.

        Raises:
            FileFormatError: The value is not where the metadata say, or differs from the metadata.
        """
        tensor = self._metadata.values[name]
        try:
            if tensor is None:
                file, at, nbytes = self._place(name, None)
                value = decode_value(path, "object", bytes(file.view[at : at + nbytes]))
                yield from flatten(value, path)
            else:
                self._check_parts(name, tensor)
                parts = [(box, self._part(name, tensor, box)) for box in _regions(tensor)]
                yield joined_leaf(path, tensor.dtype, tensor.shape, parts)
        except (RefusedError, UnsupportedTypeError) as e:
            raise FileFormatError(f"{self.folder.path}: {name} cannot be imported: {e}") from e

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> tuple[MappedFile, int, int]:
        places = self._metadata.places
        file_range = places.get((name, offsets)) or places.get((name, None))
        if file_range is None:
            raise RefusedError("the metadata do not say where it is")
        file = self.folder.file(file_range.file)
        if file_range.offset + file_range.nbytes > len(file.view):
            raise RefusedError(f"{file_range.file} ends before it")
        return file, file_range.offset, file_range.nbytes

    def _check_parts(self, name: str, tensor: _DcpTensor) -> None:
        """Check that the metadata list each stored part of a tensor as one of its boxes.

        Raises:
            RefusedError: A part with elements is not listed.
        """
        described = {None, *(box.offsets for box in _regions(tensor))}
        for offsets in self._offsets.get(name, set()) - described:
            file, at, nbytes = self._place(name, offsets)
            if prod(tensor_in(file.view[at : at + nbytes])[0].shape):
                raise RefusedError(
                    f"its files hold elements at {offsets}, where the metadata have none"
                )

    def _part(self, name: str, tensor: _DcpTensor, box: Region) -> torch.Tensor:
        file, at, nbytes = self._place(name, box.offsets)
        place, raw = tensor_in(file.view[at : at + nbytes])
        dtype = str(place.dtype).removeprefix("torch.")
        if dtype != tensor.dtype or tuple(place.shape) != box.sizes:
            raise RefusedError(
                f"the metadata say {tensor.dtype} of shape {list(box.sizes)}, the file has {dtype} "
                f"of shape {list(place.shape)}"
            )
        itemsize = place.dtype.itemsize
        start = file.offset_of(raw) + place.offset * itemsize
        return file.elements(start, box.sizes, itemsize, place.strides)


def _regions(tensor: _DcpTensor) -> list[Region]:
    """Return the boxes of a tensor that are not empty, each once."""
    return list(dict.fromkeys(box for box in tensor.boxes if box.numel))
