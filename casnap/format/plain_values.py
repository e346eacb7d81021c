"""The encoding of values that mean the same without torch: None, numbers, text and bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple


class ValueCodec(NamedTuple):
    """How the values of one Python type are stored.

    Attributes:
        kind: The ``kind`` of the entries.
        type: The Python type. Values of its subclasses do not count.
        encode: Returns the bytes of a value; None if the bytes would lose a part of the value.
        decode: Returns the value that was encoded; may raise ValueError and struct.error.
    """

    kind: str
    type: type
    encode: Callable[[Any], bytes | None]
    decode: Callable[[bytes], object]


def encode_text(text: str) -> bytes:
    """Return the UTF-8 bytes of a text. Lone surrogates in the text are kept."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(data: bytes) -> str:
    """Return the text that bytes encode in UTF-8. Lone surrogates in it are kept.

    Raises:
        ValueError: The bytes are not UTF-8.
    """
    return data.decode("utf-8", "surrogatepass")


def _encode_int(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)


def _decode_bool(data: bytes) -> bool:
    if data not in (b"\0", b"\1"):
        raise ValueError("a bool is one byte, 0 or 1")
    return data == b"\1"


def _decode_none(data: bytes) -> None:
    if data:
        raise ValueError("None has no bytes")


PLAIN_CODECS = (
    ValueCodec("none", type(None), lambda _: b"", _decode_none),
    ValueCodec("bool", bool, lambda v: b"\1" if v else b"\0", _decode_bool),
    ValueCodec("int", int, _encode_int, lambda b: int.from_bytes(b, "little", signed=True)),
    ValueCodec("float", float, struct.Struct("<d").pack, lambda b: struct.unpack("<d", b)[0]),
    ValueCodec(
        "complex",
        complex,
        lambda v: struct.pack("<dd", v.real, v.imag),
        lambda b: complex(*struct.unpack("<dd", b)),
    ),
    ValueCodec("str", str, encode_text, decode_text),
    ValueCodec("bytes", bytes, bytes, bytes),
)
