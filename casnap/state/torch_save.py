"""Check files of ``torch.save``: where their tensors lie, and whether claimed sizes are true.

``torch.load(weights_only=True)`` calls only functions that torch considers harmless. But a
compressed member, a call of ``bytearray(n)`` or a tensor larger than its storage can still take any
amount of memory.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from casnap.errors import with_article
from casnap.runtime.typing import override
from casnap.state.pickles import BrokenError, PickleMachine, RefusedError, Term, kind_of
from casnap.state.tensors import TENSOR_DTYPES


class Archive:
    """The members of a zip archive of torch.save, as views of the file.

    Args:
        file: The whole file.

    Raises:
        BrokenError: The archive is damaged, or cut off.
        RefusedError: torch.save does not write such an archive: it is compressed, for example, or
            its members are longer than the file.
    """

    def __init__(self, file: bytes | memoryview) -> None:
        if bytes(file[:4]) != b"PK\3\4":
            raise RefusedError("it is not a zip archive of torch.save")
        try:
            with zipfile.ZipFile(io.BufferedReader(_Viewed(memoryview(file)))) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as e:
            raise BrokenError(f"its zip archive is damaged: {e}") from e
        total = 0
        self.by_name: dict[str, memoryview] = {}
        for info in infos:
            total += info.file_size
            is_plain = (
                info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            )
            if not is_plain or total > len(file):
                raise RefusedError("its members are compressed, or longer than the file")
            name = info.filename.partition("/")[2]
            if name in self.by_name:
                raise RefusedError("a member is there twice")
            self.by_name[name] = self._content(memoryview(file), info)

    @staticmethod
    def _content(file: memoryview, info: zipfile.ZipInfo) -> memoryview:
        head = bytes(file[info.header_offset : info.header_offset + 30])
        if len(head) < 30:
            raise BrokenError("a member begins behind the end of the file")
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        content = file[start : start + info.file_size]
        if len(content) < info.file_size:
            raise BrokenError("a member ends behind the end of the file")
        return content


class _Viewed(io.RawIOBase):
    """Memory as a file that ``zipfile`` can read, without a copy."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._at = base + offset
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        run = self._view[self._at : self._at + len(buffer)]
        buffer[: len(run)] = run
        self._at += len(run)
        return len(run)


# --- before torch loads it ----------------------------------------------------------------------

_NAMES = {"data.pkl", "version", "byteorder", ".format_version", ".storage_alignment"}


def checked_archive(data: bytes) -> bytes:
    """Check an archive; return a new archive with the same content.

    The new archive has only the members that were checked here, so torch reads no others.

    Args:
        data: An archive that claims to be from ``torch.save``.

    Raises:
        RefusedError: The pickle in it takes a step that torch.save does not write for values that
            ``weights_only`` knows, or for classes that the user has registered. Or a storage or a
            tensor claims a size that its bytes do not have.
    """
    members = checked_members(data)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            if name in _NAMES or name.startswith("data/"):
                archive.writestr(f"archive/{name}", content)
    return out.getvalue()


def checked_members(data: bytes | memoryview) -> dict[str, memoryview]:
    """Check an archive; return its members, as views of the file, by name.

    Raises:
        RefusedError: As for :func:`checked_archive`.
    """
    members = Archive(data).by_name
    PickleMachine(members.get("data.pkl", b""), _StepCheck(members)).run()
    return members


class _StepCheck:
    """Refuses steps of a pickle that claim wrong sizes, or that torch.save does not write.

    Args:
        members: The members of the archive, by name.
    """

    def __init__(self, members: Mapping[str, memoryview]) -> None:
        self._members = members
        self._types: dict[str, object] = {}
        self._registered = {
            f[1] if isinstance(f, tuple) else f"{f.__module__}.{f.__qualname__}"
            for f in torch.serialization.get_safe_globals()
        }

    def __call__(self, step: str, term: Term) -> None:
        """Check one step of a pickle.

        Args:
            step: The kind of the step, as :class:`PickleMachine` names it.
            term: The call or storage.

        Raises:
            RefusedError: The step is refused.
        """
        if step == "storage":
            self._check_storage(term)
        elif step == "call":
            self._check_call(term.name, term.parts)
        elif term.name not in self._registered and (step, term.name) not in _CHANGES:
            raise RefusedError(f"its pickle makes or changes {with_article(term.name)}")

    def _check_storage(self, term: Term) -> None:
        key, numel = term.parts[2:5:2] if len(term.parts) == 5 else (None, None)
        member = self._members.get(f"data/{key}") if type(key) is str else None
        nbytes = numel * dtype_of(term).itemsize if type(numel) is int else -1
        if member is None or nbytes != len(member):
            raise RefusedError("a storage has another length than its member")
        # If a storage is used twice, torch reads it with the type of the first use.
        if self._types.setdefault(str(key), term.parts[1].name) != term.parts[1].name:
            raise RefusedError("a storage is of two types")

    def _check_call(self, name: str, args: list[Any]) -> None:
        kinds = tuple(map(kind_of, args))
        if name == _TYPED and kinds[::2] == ("global", "tuple") and len(args) == 4:
            self._check_call(args[0].name, args[2].parts)
        elif name in TENSORS:
            place = TensorPlace.of(name, args)
            length = len(self._members[f"data/{place.storage.parts[2]}"])
            # torch makes a quantized tensor of this size first, then gives it the storage.
            nbytes = place.nbytes // place.per_byte if name == _QUANTIZED else 0
            if max(place.stop, nbytes) > length:
                raise RefusedError("a tensor is larger than its storage")
        elif name == _BYTEARRAY and not _is_text(kinds, args):
            raise RefusedError(f"its pickle calls {name} in a way that torch.save does not")
        elif name not in _CALLS and name not in self._registered:
            raise RefusedError(f"its pickle calls {name}, which is neither torch's nor registered")


def _is_text(kinds: tuple[str, ...], args: list[Any]) -> bool:
    """Whether ``bytearray`` is called as torch.save calls it: with a text, never with a length."""
    return kinds in ((), ("str", "str")) or (kinds == ("call",) and args[0].name == _ENCODE)


_UTILS = "torch._utils._rebuild_"
_ORDERED = "collections.OrderedDict"
_TYPED = "torch._tensor._rebuild_from_type_v2"
_QUANTIZED = f"{_UTILS}qtensor"
_BYTEARRAY = "builtins.bytearray"
_ENCODE = "_codecs.encode"
_CALLS = {
    _ORDERED,
    _BYTEARRAY,
    "collections.Counter",
    "builtins.set",
    "builtins.complex",
    _ENCODE,
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    f"{_UTILS}parameter",
    f"{_UTILS}parameter_with_state",
    f"{_UTILS}sparse_tensor",
    f"{_UTILS}meta_tensor_no_storage",
    f"{_UTILS}wrapper_subclass",
}
"""The functions that torch.save calls, besides :data:`TENSORS`."""
_CHANGES = {("build", _ORDERED), ("item", _ORDERED), ("item", "collections.Counter")}
"""The steps by which torch.save changes an object: kind of step, function that made the object."""


# --- tensors ------------------------------------------------------------------------------------

TENSORS = {f"{_UTILS}tensor", f"{_UTILS}tensor_v2", f"{_UTILS}tensor_v3", _QUANTIZED}
"""The functions that make a tensor from a storage, an offset, sizes and strides."""

# Storages of quantized tensors count as the integers that they hold.
_STORAGES = {
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.QUInt8Storage": torch.uint8,
    "torch.QInt8Storage": torch.int8,
    "torch.QInt32Storage": torch.int32,
    "torch.QUInt4x2Storage": torch.uint8,
    "torch.QUInt2x4Storage": torch.uint8,
}

_SHARED_BYTES = {"torch.QUInt4x2Storage": 2, "torch.QUInt2x4Storage": 4}


def dtype_of(storage: Term) -> torch.dtype:
    """Return the dtype of a storage's elements.

    Raises:
        RefusedError: Its type is not known.
    """
    kind = storage.parts[1] if len(storage.parts) > 1 else None
    dtype = _STORAGES.get(kind.name) if isinstance(kind, Term) else None
    if dtype is None:
        raise RefusedError("a storage is of no known type")
    return dtype


class TensorPlace(NamedTuple):
    """Where a tensor lies in a storage.

    Attributes:
        storage: The storage.
        dtype: The dtype of the tensor's elements.
        offset: The offset of the first element, in elements.
        shape: The shape of the tensor.
        strides: Its strides, in elements.
        metadata: The name of each flag, followed by whether it is set.
    """

    storage: Term
    dtype: torch.dtype
    offset: int
    shape: list[int]
    strides: list[int]
    metadata: list[Any]

    @classmethod
    def of(cls, name: str, args: list[Any]) -> TensorPlace:
        """Return the place of the tensor that a call in a pickle makes.

        Args:
            name: The name of the function that is called.
            args: Its arguments.

        Raises:
            RefusedError: The arguments are not those of a tensor.
        """
        if tuple(map(kind_of, args[:4])) != ("storage", "int", "tuple", "tuple"):
            raise RefusedError("a tensor has no storage, sizes and strides")
        storage, offset, shape, strides = args[0], args[1], args[2].parts, args[3].parts
        if len(shape) > _MOST_AXES or len(shape) != len(strides):
            raise RefusedError("a tensor has not as many strides as sizes, or too many")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *shape, *strides)):
            raise RefusedError("a tensor has impossible sizes or strides")
        dtype, more = dtype_of(storage), args[6:]
        if name.endswith("_v3"):
            dtype_term = more.pop(0) if more and kind_of(more[0]) == "global" else Term("global")
            tensor_dtype = TENSOR_DTYPES.get(dtype_term.name.removeprefix("torch."))
            if tensor_dtype is None:
                raise RefusedError("a tensor is of no known type")
            dtype = tensor_dtype
        metadata = more[0].parts if more and kind_of(more[0]) == "dict" else []
        return cls(storage, dtype, offset, shape, strides, metadata)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements together, whatever the strides."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The offset in the storage, in bytes, at which the last element ends; 0 without one."""
        steps = zip(self.shape, self.strides, strict=True)
        last_element = self.offset + sum((n - 1) * stride for n, stride in steps)
        return -(-(last_element + 1) * self.dtype.itemsize // self.per_byte) if self.nbytes else 0

    @property
    def per_byte(self) -> int:
        """How many elements share a byte; 1 if each element has its own bytes."""
        return _SHARED_BYTES.get(self.storage.parts[1].name, 1)


_MOST_AXES = 64


def tensor_in(file: memoryview) -> tuple[TensorPlace, memoryview]:
    """Find the only tensor of a ``torch.save`` file, without unpickling.

    Returns:
        Where the tensor lies in its storage, and the bytes of the storage.

    Raises:
        RefusedError: The file is damaged, or holds something else than one ordinary tensor.
    """
    members = Archive(file).by_name
    _check_byteorder(members)
    value = PickleMachine(members.get("data.pkl", b"")).run()
    if kind_of(value) == "call" and value.name == f"{_UTILS}parameter" and value.parts:
        value = value.parts[0]
    if kind_of(value) != "call" or value.name not in TENSORS - {_QUANTIZED}:
        raise RefusedError(
            f"it holds {with_article(getattr(value, 'name', kind_of(value)))}, no plain tensor"
        )
    place = TensorPlace.of(value.name, value.parts)
    raw = members.get(f"data/{place.storage.parts[2]}", memoryview(b""))
    if any(place.metadata[1::2]) or place.per_byte > 1:
        raise RefusedError("its tensor is a conjugate or negative view, or of a packed dtype")
    if len(raw) < place.stop:
        raise RefusedError("a tensor is larger than its storage")
    return place, raw


def _check_byteorder(members: Mapping[str, memoryview]) -> None:
    if bytes(members.get("byteorder", b"little")) != b"little":
        raise RefusedError("it is from a big-endian machine")
