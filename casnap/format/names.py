"""Rules for the names of snapshots, the components of paths in them, and ranks in messages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from msgspec import Struct

from casnap.errors import InvalidNameError, with_article
from casnap.format.digest import digest_of
from casnap.format.plain_values import decode_text
from casnap.format.records import encode

MARKER = "casnap-snapshot.json"
STORE_FOLDER = "casnap-store"
"""The folder that holds a whole store. The folders of snapshots lie beside it."""

_MOST_CHARS = 1024
_FILE_NAME = re.compile(r"\w[\w .,+=@()-]*")
# Nearly all names match this. Checking any other name takes twenty times as long.
_PLAIN = re.compile(r"(?:[\w-][\w.=+-]{0,200}/){0,4}[\w-][\w.=+-]{0,200}", re.ASCII)


def name_text(name: object) -> str:
    """Return the name of a snapshot, or a path to a snapshot, as a str.

    Raises:
        InvalidNameError: The name is neither a str nor a path-like object of a str.
    """
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str):
        raise InvalidNameError(
            "the name of a snapshot is a str, like 'run1/step_100'; got "
            f"{with_article(type(name).__name__)}"
        )
    return str(text)


def check_name(name: str | os.PathLike[str]) -> str:
    """Check the name of a snapshot, and return it without slashes at its ends.

    Raises:
        InvalidNameError: The name is empty, too long or reserved, has control characters or a
            backslash, or has an empty, '.' or '..' component.
    """
    clean = name_text(name).strip("/")
    parts = clean.split("/")
    problem = None
    if not clean:
        problem = "is empty"
    elif len(clean.encode("utf-8", "surrogatepass")) > _MOST_CHARS:
        problem = "is longer than 1,024 bytes"
    elif any(len(p.encode("utf-8", "surrogatepass")) > 255 for p in parts):
        problem = "has a component longer than 255 bytes"
    elif any(p in ("", ".", "..") for p in parts):
        problem = "has an empty, '.' or '..' component"
    elif any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in clean):
        problem = "has control characters"
    elif "\\" in clean:
        problem = "has a backslash"
    elif reserved := {STORE_FOLDER, MARKER}.intersection(clean.lower().split("/")):
        # Some file systems and gateways do not tell upper from lower case.
        problem = f"has the component {min(reserved)!r}, which a store uses itself"
    if problem:
        raise InvalidNameError(
            f"the snapshot name {name!r:.200} {problem}; choose another, like 'run1/step_100'"
        )
    return clean


def folder_of(name: str) -> str:
    """Return the folder part of a snapshot's name; "" if the name has none."""
    return name.rpartition("/")[0]


def is_deep(name: str) -> bool:
    """Whether the name of a snapshot has a folder part."""
    return "/" in name


def is_row_name(name: str) -> bool:
    """Whether a name that was read from the table of snapshots is a valid snapshot name.

    A table is untrusted input: a name could lead out of the store, or be the name of one of
    the store's own files.
    """
    if _PLAIN.fullmatch(name) and "casnap-" not in name.lower():
        return True
    return len(name) <= _MOST_CHARS and _is_row_name(name)


@lru_cache(1 << 10)
def _is_row_name(name: str) -> bool:
    try:
        return check_name(name) == name
    except InvalidNameError:
        return False


def is_file_name(name: str) -> bool:
    """Whether casnap may create a file with a name that it has read from a store.

    Such a name is shorter than 256 bytes. It consists of letters and digits of any script and of
    ``_ .,+=@()-``, and begins with a letter, a digit or ``_``.
    """
    return _FILE_NAME.fullmatch(name) is not None and len(name.encode()) < 256


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 1``, ``ranks 0, 1 and 2``. At most eight are named."""
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8:,} more"
    *others, last_rank = map(str, ranks)
    return f"ranks {', '.join(others)} and {last_rank}" if others else f"rank {last_rank}"


class Tagged(Struct, frozen=True, array_like=True):
    """A stored key of a dict whose type msgpack does not have.

    Attributes:
        kind: The type of the key, as in ``docs/format.md``.
        data: The encoded key.
    """

    kind: str
    data: bytes


Key: TypeAlias = str | int | Tagged
"""A key of a dict as it is stored."""


def component_of(key: Key) -> str:
    """Return the path component that stands for a key of a dict.

    The component depends only on the stored bytes of the key: another version of Python may print
    the same key in another way. If a dict has both an int and the same digits as a str, the int
    gets another component (:func:`components_of`).
    """
    if type(key) is int:
        return str(key)
    if type(key) is Tagged:
        if key.kind != "str":
            return _hashed(key)
        key = decode_text(key.data)
    assert isinstance(key, str)
    text = key if type(key) is str else str(key)
    if "%" in text or "/" in text:
        text = text.replace("%", "%25").replace("/", "%2F")
    if not text.isascii():
        text = _SURROGATES.sub(lambda m: f"%u{ord(m[0]):04x}", text)
    return text


def components_of(keys: Sequence[Key]) -> list[str]:
    """Return the path components of all keys of a dict, in their order.

    Two keys with equal stored bytes get the same component.
    """
    components = list(map(component_of, keys))
    if len(set(components)) == len(components):
        return components
    of_texts = {c for key, c in zip(keys, components, strict=True) if type(key) is not int}
    return [
        _hashed(key) if type(key) is int and c in of_texts else c
        for key, c in zip(keys, components, strict=True)
    ]


def is_hashed(component: str) -> bool:
    """Whether a path component is a hash of a key.

    A key whose component is a hash stands in full only in the spec of its dict.
    """
    return component.startswith("%k")


def _hashed(key: Key) -> str:
    return f"%k{digest_of(encode(key))[:8].hex()}"


def key_of(component: str) -> str:
    """Return the key that a path component stands for, as a str. A hash is returned unchanged."""
    return _ESCAPED.sub(lambda m: chr(int(m[1].lstrip("u"), 16)), component)


_SURROGATES = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile("%(25|2F|ud[89a-f][0-9a-f]{2})")
