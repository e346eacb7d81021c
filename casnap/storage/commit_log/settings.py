"""The settings of a store. Each root holds them, and each commit copies them into the next root."""

from __future__ import annotations

import math
from typing import Any

from casnap.backends import Backend
from casnap.errors import UnsupportedFormatError, shell_word
from casnap.format.codec import Codec
from casnap.format.records import Root
from casnap.runtime.units import Duration, seconds_of

_CODEC, _GC = "codec", "gc"
_GC_WORDS = ("auto", "off")
CODECS = {"auto": Codec.RAW, "raw": Codec.RAW, "zstd": Codec.PLANES}
"""The users' words for codecs, each with the codec by which takes store new chunks.

With ``auto``, takes store chunks raw; later, `gc` makes the chunks smaller that only older
snapshots need.
"""


def new_settings(codec: str | None = None, gc: Duration | None = None) -> dict[str, Any]:
    """Check settings that a user gave, and return them in the form in which a root has them.

    Args:
        codec: The user's word for how to store chunks; None leaves the setting as it is.
        gc: "auto" or "off": whether processes collect garbage without being asked. Or a time: the
            grace of such collections. None leaves the setting as it is.

    Raises:
        TypeError: ``gc`` is neither a word nor a time.
        ValueError: ``codec`` or ``gc`` is an unknown word, or the time is negative or too large.
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
    """The settings of a store, and what follows from them.

    Args:
        root: A root of the store.
        backend: The backend of the store.

    Attributes:
        values: The name of each setting → its value, or its default if it was never set.
    """

    def __init__(self, root: Root, backend: Backend) -> None:
        self.values: dict[str, Any] = {_CODEC: "auto", _GC: _GC_WORDS[0], **root.settings}
        self._backend = backend

    @property
    def collects_unasked(self) -> bool:
        """Whether processes that delete snapshots collect the store's garbage unasked."""
        return bool(self.values[_GC] != "off")

    @property
    def grace(self) -> float | None:
        """The grace in the store's settings, in seconds; None if they have no grace."""
        value = self.values[_GC]
        return float(value) if _is_time(value) else None

    @property
    def codec(self) -> Codec:
        """The codec by which takes store new chunks.

        Raises:
            UnsupportedFormatError: A newer version of casnap has set a codec that this one does not
                know.
        """
        name = self.values[_CODEC]
        codec = _codec_by(name)
        if codec is None:
            uri = self._backend.uri
            raise UnsupportedFormatError(
                f"{uri} stores new chunks with codec {name!r:.80}, which this casnap does not "
                "know, so it takes no snapshot there; update casnap, or set another codec: "
                f"`casnap config {shell_word(uri)} codec=raw`"
            )
        return codec

    @property
    def is_auto(self) -> bool:
        """Whether the user leaves the choice of codecs to casnap."""
        return bool(self.values[_CODEC] == "auto")

    @property
    def of_new_store(self) -> dict[str, Any]:
        """The settings for a new store to which the snapshots of this store will be copied."""
        codec = self.values[_CODEC]
        return new_settings(None if _codec_by(codec) is None else codec)

    @property
    def recodes(self) -> bool:
        """Whether `gc` recodes the chunks that only older snapshots need, to make them smaller."""
        if self.is_auto:
            return self._backend.costs.recodes
        return _codec_by(self.values[_CODEC]) not in (None, Codec.RAW)


def _codec_by(word: object) -> Codec | None:
    """Return the codec that a user's word stands for; None for any other value."""
    return CODECS.get(word) if isinstance(word, str) else None


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < math.inf
