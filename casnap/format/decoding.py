"""Decoding that cannot crash the interpreter: of closed types, and of records of one length.

msgspec looks at a type when it first makes a decoder for it. Two threads that do that at once crash
the interpreter (seen with 0.22), so only this module makes decoders. Any thread can use them.

An iterator of ``struct`` keeps the view in use that it reads. If an error keeps iterator and view
alive, Python before 3.12.4 crashes when it collects them (gh-77894). So only this module unpacks
records.
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
    """Return the decoder from msgpack to values of a type."""
    return _make_decoder(msgspec.msgpack.Decoder, kind)  # type: ignore[no-any-return]


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder from JSON to values of a type."""
    return _make_decoder(msgspec.json.Decoder, kind)  # type: ignore[no-any-return]


def decode_keeping(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Return a struct from a map. It keeps unknown fields, and they are encoded with it again.

    Args:
        data: The map, in msgpack.
        kind: A struct that forbids unknown fields.

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
    """Return a decoder for a struct with more fields, whose values are not decoded."""
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
    """Yield the records that some bytes consist of, like ``layout.iter_unpack``.

    A caller may abandon the iterator before its end: the iterator reads copies of a few records at
    a time, and keeps no view in use.

    Args:
        layout: The layout of a record.
        data: The records, one behind the other.

    Raises:
        struct.error: The last record is cut off; the ones before it were yielded.
    """
    step = _AT_ONCE * layout.size
    if len(data) <= step:
        return layout.iter_unpack(bytes(data))  # a chain costs more time than a few records
    copies = (bytes(data[at : at + step]) for at in range(0, len(data), step))
    return chain.from_iterable(map(layout.iter_unpack, copies))
