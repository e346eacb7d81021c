"""Decoders for closed types, made by one thread at a time.

msgspec looks at a type when it first makes a decoder for it. Two threads that do that at once crash
the interpreter (seen with 0.22), so decoders are made here alone. They can be used by any thread.
"""

from __future__ import annotations

import os
import threading
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


def _make_decoder(of: type[Any], kind: Any) -> Any:
    decoder = _decoders.get((of, kind))
    if decoder is None:
        with _making:
            decoder = _decoders[of, kind] = of(kind)
    return decoder
