"""Turn values other than tensors and containers into bytes, and back; also the keys of dicts.

Types are matched exactly, since an instance of a subclass would come back as something else. A
value without an encoding here is written by ``torch.save``, if ``torch.load(weights_only=True)``
reads it back.
"""

from __future__ import annotations

import datetime
import enum
import io
import pathlib
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from msgspec import Struct
from torch.torch_version import TorchVersion

from casnap.errors import CasnapError, DamagedError, UnsupportedFormatError, UnsupportedTypeError
from casnap.format.names import Key, Tagged
from casnap.format.plain_values import PLAIN_CODECS, ValueCodec, decode_text, encode_text
from casnap.format.records import decode, encode
from casnap.state.pickles import RefusedError
from casnap.state.stateful import is_generator
from casnap.state.torch_save import checked_archive

PACKED_FROM = 1001
"""From this length on, a list, tuple or set of plain values is stored as one entry."""

# The errors that hostile bytes cause in the decoders below.
DECODE_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    RuntimeError,
    struct.error,
)

PLAIN_TYPES = {bool, int, float, str, bytes, type(None)}
"""Values of these types are never containers."""
PLAIN_BY_TYPE = {codec.type: codec for codec in PLAIN_CODECS}


# --- keys -------------------------------------------------------------------------------------


def encode_key(key: object) -> Key:
    """Return the form in which a key of a dict is stored.

    Raises:
        UnsupportedTypeError: Keys of this type cannot be stored.
    """
    kind = type(key)
    if kind is str and (key.isascii() or _is_utf8(key)):  # type: ignore[attr-defined]
        return key  # type: ignore[return-value]
    if kind is int and -(1 << 63) <= key < 1 << 63:  # type: ignore[operator]
        return key  # type: ignore[return-value]
    codec = _BY_TYPE.get(kind)
    if kind is tuple:
        return Tagged("tuple", encode(encode_keys(key)))  # type: ignore[arg-type]
    if codec is None or codec.kind not in _KEY_KINDS:
        raise UnsupportedTypeError(f"{kind.__module__}.{kind.__qualname__}")
    return Tagged(codec.kind, codec.encode(key) or b"")


def encode_keys(keys: Iterable[object]) -> list[Key]:
    """Return the forms in which keys of a dict are stored; errors as for :func:`encode_key`."""
    return [encode_key(key) for key in keys]


def decode_keys(keys: Iterable[Key]) -> list[Any]:
    """Return the keys that some stored forms stand for; the inverse of :func:`encode_keys`.

    Raises:
        DamagedError: A key is malformed.
        UnsupportedFormatError: A newer version wrote a key of this kind.
    """
    return [_decode_tagged(key) if type(key) is Tagged else key for key in keys]


def _decode_tagged(key: Tagged) -> object:
    if key.kind == "tuple":
        return tuple(decode_keys(decode(key.data, list[Key], "a key")))
    if key.kind not in _KEY_KINDS:
        raise UnsupportedFormatError(
            f"a key is of the unknown kind {key.kind[:40]!r}; update casnap"
        )
    return decode_value("a key", key.kind, key.data)


def _is_utf8(text: Any) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- values with an encoding of their own -----------------------------------------------------


def _integers(values: Sequence[object]) -> bytes | None:
    if any(type(v) not in (int, type(None)) for v in values):
        return None
    return encode(encode_keys(values))


def _from_integers(build: Callable[..., object]) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        values = decode_keys(decode(data, list[Key], "a value"))
        if len(values) != 3:
            raise ValueError("not three numbers")
        return build(*values)

    return read


def _datetime_to_bytes(value: datetime.datetime) -> bytes | None:
    text = value.isoformat()
    is_exact = repr(datetime.datetime.fromisoformat(text)) == repr(value)
    return text.encode() if is_exact else None


# A trainer may keep the output of torch.save in a state: torchtitan's TrainState keeps losses so.
_POSITION = struct.Struct("<Q")


def _encode_bytes_io(value: io.BytesIO) -> bytes | None:
    if value.closed or vars(value) or value.tell() > len(value.getbuffer()):
        return None
    return _POSITION.pack(value.tell()) + value.getbuffer()


def _decode_bytes_io(data: bytes) -> io.BytesIO:
    (position,) = _POSITION.unpack_from(data)
    value = io.BytesIO(data[_POSITION.size :])
    if position > len(value.getbuffer()):
        raise ValueError(f"its position, {position}, is beyond its end")
    value.seek(position)
    return value


def _torch_names(kind: type) -> dict[str, Any]:
    constants = (v for v in vars(torch).values() if type(v) is kind)
    return {str(v).removeprefix("torch."): v for v in constants}


def _torch_constant(kind: type) -> ValueCodec:
    names = _torch_names(kind)
    name = kind.__name__

    def decode_name(data: bytes) -> object:
        constant = data.decode()
        if constant not in names:
            raise UnsupportedTypeError(
                f"torch {torch.__version__} has no {name} {constant[:40]!r}; use a newer torch"
            )
        return names[constant]

    return ValueCodec(
        name,
        kind,
        lambda value: str(value).removeprefix("torch.").encode(),
        decode_name,
    )


def _decode_device(data: bytes) -> torch.device:
    text = data.decode()
    try:
        return torch.device(text)
    except RuntimeError as e:
        raise UnsupportedTypeError(
            f"torch {torch.__version__} has no device {text[:40]!r}; use a newer torch"
        ) from e


def stable_order(values: Iterable[Any]) -> list[Any]:
    """Return the elements of a set in an order that depends only on the elements."""
    elements = list(values)
    types = set(map(type, elements))
    if types in ({str}, {int}, {bytes}):
        return sorted(elements)
    return sorted(elements, key=_sort_key)


def _sort_key(element: object) -> bytes:
    kind = type(element)
    codec = _BY_TYPE.get(kind)
    body: bytes | None = b""
    if isinstance(element, tuple | frozenset):
        ranks = [_sort_key(e) for e in element]
        body = encode(sorted(ranks) if isinstance(element, frozenset) else ranks)
    elif codec is not None:
        body = codec.encode(element)
    elif isinstance(element, enum.Enum):
        body = element.name.encode() if element.name else repr(element).encode()
    return f"{kind.__module__}.{kind.__qualname__}\0".encode() + (body or b"")


def is_packable(values: Any) -> bool:
    """Whether a list, tuple or set is stored as one entry: it is long, with plain values only."""
    if len(values) < PACKED_FROM or not set(map(type, values)) <= PLAIN_TYPES:
        return False
    try:
        encode(list(values))
    except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate
        return False
    return True


def _decode_plain(data: bytes) -> list[Any]:
    # msgspec has no type for "str or bytes".
    values = decode(data, list[Any], "a packed list")
    if not set(map(type, values)) <= PLAIN_TYPES:
        raise ValueError("an element is not plain")
    return values


def _packed(kind: type, arrange: Callable[[Any], list[Any]]) -> ValueCodec:
    return ValueCodec(
        f"packed_{kind.__name__}",
        kind,
        lambda values: encode(arrange(values)),
        lambda data: kind(_decode_plain(data)),
    )


_CODECS = (
    *PLAIN_CODECS,
    ValueCodec("bytearray", bytearray, bytes, bytearray),
    ValueCodec("bytes_io", io.BytesIO, _encode_bytes_io, _decode_bytes_io),
    ValueCodec(
        "range", range, lambda v: _integers((v.start, v.stop, v.step)), _from_integers(range)
    ),
    ValueCodec(
        "slice", slice, lambda v: _integers((v.start, v.stop, v.step)), _from_integers(slice)
    ),
    ValueCodec(
        "timedelta",
        datetime.timedelta,
        lambda v: _integers((v.days, v.seconds, v.microseconds)),
        _from_integers(datetime.timedelta),
    ),
    ValueCodec(
        "date",
        datetime.date,
        lambda v: v.isoformat().encode(),
        lambda b: datetime.date.fromisoformat(b.decode()),
    ),
    ValueCodec(
        "datetime",
        datetime.datetime,
        _datetime_to_bytes,
        lambda b: datetime.datetime.fromisoformat(b.decode()),
    ),
    ValueCodec(
        "path",
        type(pathlib.Path()),
        lambda v: encode_text(str(v)),
        lambda b: pathlib.Path(decode_text(b)),
    ),
    ValueCodec("device", torch.device, lambda v: str(v).encode(), _decode_device),
    ValueCodec(
        "torch_version", TorchVersion, lambda v: v.encode(), lambda b: TorchVersion(b.decode())
    ),
    *map(_torch_constant, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)),
    _packed(list, list),
    _packed(tuple, list),
    _packed(set, stable_order),
    _packed(frozenset, stable_order),
)
_BY_TYPE = {codec.type: codec for codec in _CODECS}
_BY_KIND = {codec.kind: codec for codec in _CODECS}
_KEY_KINDS = {"none", "bool", "int", "float", "complex", "str", "bytes", "dtype"}


def encode_value(path: str, value: object, *, allow_pickle: bool | None) -> tuple[str, bytes]:
    """Return the kind under which a value is stored, and its encoded bytes.

    Args:
        path: The path of the value, for messages.
        value: The value.
        allow_pickle: Whether to pickle a value that has no safe encoding.

    Raises:
        UnsupportedTypeError: The value cannot be read back safely.
    """
    codec = _BY_TYPE.get(type(value))
    if codec is not None:
        data = codec.encode(value)
        if data is not None:
            return codec.kind, data
    if isinstance(value, enum.Enum):
        data = _encode_enum(value)
        if data is not None:
            return "enum", data
    return encode_object(path, value, allow_pickle)


def decode_value(path: str, kind: str, data: bytes, *, allow_pickle: bool | None = None) -> object:
    """Return the value that was encoded.

    Args:
        path: The path of the value, for messages.
        kind: Its kind, as its entry has it.
        data: The encoded bytes.
        allow_pickle: Whether to unpickle pickled values. Only for a trusted store. None means
            False, for a caller without that option: error messages then do not advise it.

    Raises:
        DamagedError: The bytes are not what was written.
        UnsupportedTypeError: The value needs a class that is not imported, or ``allow_pickle``.
        UnsupportedFormatError: A newer version wrote this kind of value.
    """
    codec = _BY_KIND.get(kind)
    if kind in ("object", "pickle"):
        return _decode_object(path, kind, data, allow_pickle)
    if codec is None and kind != "enum":
        raise UnsupportedFormatError(
            f"{path} is a value of the unknown kind {kind[:40]!r}; update casnap"
        )
    try:
        return codec.decode(data) if codec is not None else _decode_enum(path, data)
    except DamagedError as e:
        raise (e if e.paths else DamagedError(f"{path}: {e}", (path,))) from e
    except CasnapError:
        raise
    except (*DECODE_ERRORS, RecursionError) as e:
        raise DamagedError(f"{path} is not a valid {kind}: {e}", (path,)) from e


def check_pickle_allowed(path: str, kind: str, *, is_option: bool = True) -> None:
    """Check that a value was stored without ``allow_pickle=True``.

    Args:
        path: The path of the value.
        kind: Its kind.
        is_option: Whether the caller has the option ``allow_pickle``, so that the message advises
            it.

    Raises:
        UnsupportedTypeError: The value was pickled.
    """
    if kind == "pickle":
        way = "pass allow_pickle=True here too"
        other_way = f"read_object({path!r}, allow_pickle=True) reads it; leave it out here"
        raise UnsupportedTypeError(
            f"{path} was stored with allow_pickle=True; if you trust the author of this "
            f"snapshot, {way if is_option else other_way}"
        )


# --- enums ------------------------------------------------------------------------------------


class _Member(Struct, frozen=True, array_like=True):
    module: str
    name: str
    member: str | int
    """The name of the enum's member; for a Flag the number, since combinations have no name."""


def find_class(module: str, name: str) -> type | None:
    """Return a class by name from a module that is imported already; None if there is none.

    This imports no module, and runs no code of one.
    """
    value: object = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(value, ModuleType | type):
            return None
        value = vars(value).get(part)
    return value if isinstance(value, type) else None


def _encode_enum(value: enum.Enum) -> bytes | None:
    kind = type(value)
    member = value.value if isinstance(value, enum.Flag) else value.name
    is_importable = find_class(kind.__module__, kind.__qualname__) is kind
    if not is_importable or encode_key(member) is not member:
        return None
    return encode(_Member(kind.__module__, kind.__qualname__, member))


def _decode_enum(path: str, data: bytes) -> object:
    record = decode(data, _Member, path)
    kind = find_class(record.module, record.name)
    if kind is None or not issubclass(kind, enum.Enum):
        raise UnsupportedTypeError(
            f"{path} is a member of {record.module}.{record.name}; import {record.module} first"
        )
    members = kind.__members__
    if isinstance(record.member, str) and record.member in members:
        return members[record.member]
    if isinstance(record.member, int) and issubclass(kind, enum.Flag):
        return kind(record.member)
    raise UnsupportedTypeError(
        f"{path} is the member {record.member!r} of {record.module}.{record.name}, "
        "which the class of that name does not have here"
    )


# --- anything else ----------------------------------------------------------------------------


PICKLE_ADVICE = ", or pass allow_pickle=True, here and when it is read"


def encode_object(path: str, value: object, allow_pickle: bool | None) -> tuple[str, bytes]:
    """Encode a value by ``torch.save``; return its kind, ``object`` or ``pickle``, and the bytes.

    Args:
        path: The path of the value, for messages.
        value: The value.
        allow_pickle: Whether to accept a value that ``weights_only`` does not read back.

    Raises:
        UnsupportedTypeError: The value cannot be read back safely.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as e:  # a class may raise anything
        raise UnsupportedTypeError(
            f"{path}: a value of type {name} cannot be stored, not even by torch.save: {e}; "
            "leave it out of the state, or store plain values instead"
        ) from e
    data = buffer.getvalue()
    try:
        again = _load(checked_archive(data))
    except Exception as e:
        if allow_pickle:
            return "pickle", data
        advice = "store plain values instead"
        if is_generator(value):
            advice = "give it a key of its own in the app state, as {'generator': generator}"
        raise UnsupportedTypeError(
            f"{path}: a value of type {name} has no safe encoding; {advice}"
            f"{PICKLE_ADVICE if allow_pickle is False else ''}"
        ) from e
    if type(again) is not kind:
        raise UnsupportedTypeError(
            f"{path}: a value of type {name} would come back as {type(again).__qualname__}; "
            "store plain values instead"
        )
    return "object", data


def _load(data: bytes) -> object:
    return _torch_load(data, weights_only=True)


def _torch_load(data: bytes, *, weights_only: bool) -> object:
    # mmap=False overrides the user's default in torch: there is no file to map.
    return torch.load(  # noqa: TID251
        io.BytesIO(data), map_location="cpu", weights_only=weights_only, mmap=False
    )


def _decode_object(path: str, kind: str, data: bytes, allow_pickle: bool | None) -> object:
    if kind == "pickle":
        if not allow_pickle:
            check_pickle_allowed(path, kind, is_option=allow_pickle is False)
        try:
            return _torch_load(data, weights_only=False)
        except Exception as e:  # the code of any class may run
            raise UnsupportedTypeError(
                f"{path} was stored by pickle and cannot be unpickled here: {type(e).__name__}: "
                f"{e}. Its class must be there under the module and name that it was stored with"
            ) from e
    try:
        return _load(data if allow_pickle else checked_archive(data))
    except RefusedError as e:
        raise UnsupportedTypeError(
            f"{path} is not read without permission: {e}; if you trust its author, register its "
            "class first, by torch.serialization.add_safe_globals"
            f"{', or pass allow_pickle=True' if allow_pickle is False else ''}"
        ) from e
    except Exception as e:  # torch.load raises errors of many types
        reason = str(e).partition("\n")[0]
        raise UnsupportedTypeError(
            f"{path} cannot be read by torch.load(weights_only=True): {reason}; if its class was "
            "registered with torch.serialization.add_safe_globals, do so here too"
        ) from e
