"""The settings of a store. They stand in its root, so each commit keeps them."""

from __future__ import annotations

import math
from typing import Any

from casnap.backends import Backend
from casnap.errors import UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.records import Root
from casnap.runtime.units import Duration, seconds_of

CODEC = "codec"
GC = "gc"
_GC_WORDS = ("auto", "off")
CODECS = ("auto", "raw", "zstd")
"""How chunks are stored. ``auto``: as they are, until `gc` makes what history keeps smaller."""


def check_codec(name: str) -> str:
    """Return the name of a codec.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in CODECS:
        names = ", ".join(map(repr, CODECS))
        raise ValueError(f"codec is one of {names}; got {name!r:.80}")
    return name


def settings_of(root: Root) -> dict[str, Any]:
    """Return the settings of a store, with the defaults of those that were never set."""
    return {CODEC: CODECS[0], GC: _GC_WORDS[0], **root.settings}


def gc_settings(gc: Duration) -> dict[str, Any]:
    """Return the setting that says whether garbage is collected unasked, and with which grace.

    Raises:
        TypeError: It is something else than a word or a time.
        ValueError: It is neither a word that is known nor a time.
    """
    is_word = isinstance(gc, str) and gc in _GC_WORDS
    return {GC: gc if is_word else seconds_of("gc, if not 'auto' or 'off',", gc)}


def collects_unasked(root: Root) -> bool:
    """Whether processes that let snapshots go collect the garbage of the store by themselves."""
    return bool(settings_of(root)[GC] != "off")


def grace_of(root: Root) -> float | None:
    """Return for how many seconds a store is set to keep what nobody needs; None if it is not."""
    value = settings_of(root)[GC]
    return float(value) if _is_time(value) else None


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < math.inf


def codec_of(root: Root, uri: str) -> Codec:
    """Return how takes store new chunks.

    Raises:
        UnsupportedFormatError: A newer casnap has set a codec that this one does not know.
    """
    name = settings_of(root)[CODEC]
    try:
        return Codec.PLANES if check_codec(name) == "zstd" else Codec.RAW
    except ValueError:
        raise UnsupportedFormatError(
            f"{uri} stores new chunks with codec {name!r:.80}, which this casnap does not know, "
            "so it takes no snapshot there; update casnap, or set another codec: "
            f"`casnap config {uri} codec=raw`"
        ) from None


def compresses_copies(root: Root, backend: Backend, *, gets_all: bool) -> bool:
    """Whether copies into a store are stored as deltas, or in planes.

    Args:
        root: The newest root of the store.
        backend: Where it is.
        gets_all: Whether it gets each snapshot of another store.
    """
    codec = codec_of(root, backend.uri)
    is_auto = settings_of(root)[CODEC] == "auto"
    return codec is Codec.PLANES or (is_auto and (gets_all or backend.costly_requests))


def recodes(root: Root, backend: Backend) -> bool:
    """Whether `gc` makes what history keeps smaller; it reads that, which a bucket charges."""
    codec = settings_of(root)[CODEC]
    return codec == "zstd" or (codec == "auto" and not backend.costly_requests)
