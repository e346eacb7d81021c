"""Show the entries of a snapshot in commands: types in words, and small values.

Only values that mean the same without torch are decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from casnap.errors import DamagedError
from casnap.format.digest import Digest
from casnap.format.entries import (
    ContainerEntry,
    Entry,
    TensorEntry,
    ValueEntry,
    unknown_in,
)
from casnap.format.names import Key, Tagged, components_of, is_hashed
from casnap.format.plain_values import PLAIN_CODECS, decode_text
from casnap.format.records import decode
from casnap.storage import Contents, Want

SMALL = 1 << 10
_MOST_SPEC_BYTES = 16 << 20


def entry_fields(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry, for JSON."""
    facts: dict[str, Any] = {"kind": entry.kind, "logical_bytes": entry.payload.nbytes}
    if what := unknown_in(entry):
        return {"type": "unknown", **facts, "unknown": what}
    if isinstance(entry, TensorEntry):
        scheme = entry.quantization.scheme if entry.quantization is not None else None
        return {
            "type": "tensor",
            **facts,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "requires_grad": entry.requires_grad,
            "quantization": scheme,
        }
    if isinstance(entry, ContainerEntry):
        return {"type": "container", **facts, "element_count": entry.count}
    return {"type": "value", **facts}


_TEXTS = ("path", "date", "datetime", "device", "dtype", "layout", "memory_format", "qscheme")
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{codec.kind: codec.decode for codec in PLAIN_CODECS},
    **dict.fromkeys(_TEXTS, decode_text),
}


def small_value(contents: Contents, path: str, entry: ValueEntry) -> tuple[bool, Any]:
    """Decode a value if it is small and of a plain kind.

    Returns:
        Whether it was decoded, and the value.

    Raises:
        DamagedError: The bytes of the value are missing or malformed.
    """
    decode = _DECODERS.get(entry.kind)
    if decode is None or entry.payload.nbytes > SMALL:
        return False, None
    try:
        return True, decode(_bytes_of(contents, path, entry))
    except (ValueError, struct.error) as e:
        raise DamagedError(
            f"{contents.label}: {path} is not a valid {entry.kind}: {e}", (path,)
        ) from e


def _bytes_of(contents: Contents, path: str, entry: Entry) -> bytes:
    chunks = contents.chunks(path, entry)
    if not chunks:
        return entry.payload.inline
    parts = [b""] * len(chunks)

    def want(i: int, digest: Digest, nbytes: int) -> Want:
        return Want(digest, nbytes, lambda raw: parts.__setitem__(i, bytes(raw)), path)

    contents.store.fetch([want(i, *chunk) for i, chunk in enumerate(chunks)])
    return b"".join(parts)


# --- keys -------------------------------------------------------------------------------------


class _DictKeys(Struct, array_like=True):
    """The keys in a dict's spec, which describes the stored container; other fields are ignored."""

    keys: list[Key]


def keys_in_words(contents: Contents, path: str, entry: ContainerEntry) -> dict[str, str]:
    """Return the keys of a dict that paths show only as hashes.

    Returns:
        Path component → key, as Python prints it.

    Raises:
        DamagedError: The bytes of the keys are missing or malformed.
    """
    if entry.payload.nbytes > _MOST_SPEC_BYTES:
        return {}
    spec = decode(_bytes_of(contents, path, entry), _DictKeys, f"the spec of {path}")
    try:
        components = zip(components_of(spec.keys), spec.keys, strict=True)
        return {c: _in_words(key) for c, key in components if is_hashed(c)}
    except (ValueError, struct.error, RecursionError) as e:
        raise DamagedError(f"{contents.label}: {path} has malformed keys: {e}", (path,)) from e


def _in_words(key: Key) -> str:
    if not isinstance(key, Tagged):
        return repr(key)
    if key.kind == "tuple":
        words = [_in_words(inner) for inner in decode(key.data, list[Key], "a key")]
        return f"({words[0]},)" if len(words) == 1 else f"({', '.join(words)})"
    if key.kind == "dtype":
        return f"torch.{decode_text(key.data)}"
    decoder = _DECODERS.get(key.kind)
    return f"an unknown {key.kind}" if decoder is None else repr(decoder(key.data))
