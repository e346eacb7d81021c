"""Decoders for closed types, made by one thread at a time.

msgspec looks at a type when it first makes a decoder for it. Two threads that do that at once crash
the interpreter (seen with 0.22), so decoders are made here alone. They can be used by any thread.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making = threading.Lock()
# A thread of the parent may hold it at a fork.
os.register_at_fork(after_in_child=_making._at_fork_reinit)  # type: ignore[attr-defined]
_decoders: dict[tuple[type[Any], Any], Any] = {}


def decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder that makes a value of a type from msgpack."""
    return _make_decoder(msgspec.msgpack.Decoder, kind)  # type: ignore[no-any-return]


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder that makes a value of a type from JSON."""
    return _make_decoder(msgspec.json.Decoder, kind)  # type: ignore[no-any-return]


def decode_keeping(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Return a struct from a map. Fields that it lacks are kept, and encoded with it again.

    Args:
        data: The map, in msgpack.
        kind: A struct that forbids unknown fields.

    Raises:
        msgspec.DecodeError: It is malformed, or has very many fields.
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


@lru_cache(maxsize=64)
def _keeping_decoder(kind: type[Any], later: tuple[str, ...]) -> Any:
    """Return a decoder for a struct with some more fields, whose values stay as they are."""
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
