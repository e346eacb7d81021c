"""Decoders for msgpack, JSON and binary records, made so that they cannot crash the interpreter.

Two threads that make a decoder of msgspec for the same type at once crash the interpreter (seen
with msgspec 0.22). So only this module makes decoders, under a lock. Any thread can use them.

An iterator of ``struct`` holds a view of the bytes that it unpacks. If an exception keeps both the
iterator and the view alive, Python before 3.12.4 crashes when it frees them (gh-77894). So only
this module unpacks records, and it unpacks copies.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making = threading.Lock()
# At a fork, a thread of the parent may hold the lock.
os.register_at_fork(after_in_child=_making._at_fork_reinit)  # type: ignore[attr-defined]
_decoders: dict[tuple[type[Any], Any], Any] = {}


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder that turns msgpack into a value of a type."""
    return _make_decoder(msgspec.msgpack.Decoder, kind)  # type: ignore[no-any-return]


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder that turns JSON into a value of a type."""
    return _make_decoder(msgspec.json.Decoder, kind)  # type: ignore[no-any-return]


def decode_keeping(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Decode a struct, and keep the fields that its type does not have.

    When the result is encoded again, the unknown fields are in it as they were.

    Args:
        data: The struct as a map, in msgpack.
        kind: The type of the struct, which must forbid unknown fields.

    Raises:
        msgspec.DecodeError: The map is malformed, or has more than 256 unknown fields.
    """
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError:
        names = decoder(dict[str, msgspec.Raw]).decode(data).keys()
    later = tuple(sorted(names - set(kind.__struct_encode_fields__)))  # type: ignore[attr-defined]
    if len(later) > _MOST_LATER_FIELDS:
        raise msgspec.ValidationError(f"there are {len(later)} unknown fields")
    record: T = _keeping_decoder(kind, later).decode(data)  # type: ignore[arg-type]
    return record


_MOST_LATER_FIELDS = 256
# The records that are unpacked from one copy.
_AT_ONCE = 1024


@lru_cache(maxsize=64)
def _keeping_decoder(kind: type[Any], later: tuple[str, ...]) -> Any:
    """Return a decoder for a struct type that also keeps unknown fields, as msgpack bytes.

    Args:
        kind: The struct type.
        later: The names of the unknown fields, which a later version of casnap has added.
    """
    names = {f"later_{number}": name for number, name in enumerate(later)}
    fields = [(name, msgspec.Raw) for name in names]
    with _making:
        extended = msgspec.defstruct(
            kind.__name__, fields, bases=(kind,), rename=names, kw_only=True, frozen=True
        )
        return msgspec.msgpack.Decoder(extended)


def _make_decoder(of: type[Any], kind: Any) -> Any:
    decoder = _decoders.get((of, kind))
    if decoder is None:
        with _making:
            decoder = _decoders[of, kind] = of(kind)
    return decoder


def unpacked(
    layout: struct.Struct, data: bytes | bytearray | memoryview
) -> Iterator[tuple[Any, ...]]:
    """Yield binary records of one layout, as ``layout.iter_unpack`` does.

    A caller may stop before the last record: the iterator works on copies of about a thousand
    records, and holds no view of ``data``.

    Args:
        layout: The layout of a record.
        data: The records, without gaps.

    Raises:
        struct.error: The last record is cut off. The records before it were yielded.
    """
    step = _AT_ONCE * layout.size
    if len(data) <= step:
        return layout.iter_unpack(bytes(data))  # a chain costs more time than a few records
    copies = (bytes(data[at : at + step]) for at in range(0, len(data), step))
    return chain.from_iterable(map(layout.iter_unpack, copies))
