"""The settings of a store. They stand in its root, so each commit keeps them."""

from __future__ import annotations

import math
from typing import Any

from casnap.backends import Backend
from casnap.errors import UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.records import Root
from casnap.runtime.units import Duration, seconds_of

_CODEC, _GC = "codec", "gc"
_GC_WORDS = ("auto", "off")
CODECS = {"auto": Codec.RAW, "raw": Codec.RAW, "zstd": Codec.PLANES}
"""The words for codecs, each with how takes store new chunks by it.

``auto``: as they are, until `gc` makes what history keeps smaller.
"""


def new_settings(codec: str | None = None, gc: Duration | None = None) -> dict[str, Any]:
    """Return settings as a root has them.

    Args:
        codec: How chunks are stored; None to leave that as it is.
        gc: Whether garbage is collected unasked, and with which grace; None as before.

    Raises:
        TypeError: ``gc`` is something else than a word or a time.
        ValueError: There is no such codec, or ``gc`` is neither a word that is known nor a time.
    """
    settings: dict[str, Any] = {}
    if codec is not None:
        if _codec_by(codec) is None:
            names = ", ".join(map(repr, CODECS))
            raise ValueError(f"codec is one of {names}; got {codec!r:.80}")
        settings[_CODEC] = codec
    if gc is not None:
        is_word = isinstance(gc, str) and gc in _GC_WORDS
        settings[_GC] = gc if is_word else seconds_of("gc, if not 'auto' or 'off',", gc)
    return settings


class Settings:
    """What the settings of a store mean.

    Args:
        root: A root of the store.
        backend: Where it is.

    Attributes:
        values: The settings, with the defaults of those that were never set.
    """

    def __init__(self, root: Root, backend: Backend) -> None:
        self.values: dict[str, Any] = {_CODEC: "auto", _GC: _GC_WORDS[0], **root.settings}
        self._backend = backend

    @property
    def collects_unasked(self) -> bool:
        """Whether processes that let snapshots go collect the store's garbage by themselves."""
        return bool(self.values[_GC] != "off")

    @property
    def grace(self) -> float | None:
        """For how many seconds the store is set to keep what nobody needs; None if it is not."""
        value = self.values[_GC]
        return float(value) if _is_time(value) else None

    @property
    def codec(self) -> Codec:
        """How takes store new chunks.

        Raises:
            UnsupportedFormatError: A newer casnap has set a codec that this one does not know.
        """
        name = self.values[_CODEC]
        codec = _codec_by(name)
        if codec is None:
            uri = self._backend.uri
            raise UnsupportedFormatError(
                f"{uri} stores new chunks with codec {name!r:.80}, which this casnap does not "
                "know, so it takes no snapshot there; update casnap, or set another codec: "
                f"`casnap config {uri} codec=raw`"
            )
        return codec

    @property
    def is_auto(self) -> bool:
        """Whether casnap chooses how the store's chunks are stored."""
        return bool(self.values[_CODEC] == "auto")

    @property
    def of_new_store(self) -> dict[str, Any]:
        """The settings of a new store that is to hold the same."""
        codec = self.values[_CODEC]
        return new_settings(None if _codec_by(codec) is None else codec)

    @property
    def recodes(self) -> bool:
        """Whether `gc` makes what history keeps smaller."""
        if self.is_auto:
            return self._backend.costs.recodes
        return _codec_by(self.values[_CODEC]) not in (None, Codec.RAW)


def _codec_by(word: object) -> Codec | None:
    """Return the codec that a word means; None if a newer casnap has set it, or it is no word."""
    return CODECS.get(word) if isinstance(word, str) else None


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < math.inf
