"""The settings of a store. The root holds them, and each commit keeps them."""

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

By ``auto`` takes store them as they are. Later, `gc` makes chunks smaller that only older snapshots
need.
"""


def new_settings(codec: str | None = None, gc: Duration | None = None) -> dict[str, Any]:
    """Return checked settings, in the form in which a root has them.

    Args:
        codec: The word for how chunks are stored; None leaves the setting as it is.
        gc: "auto" or "off": whether processes collect garbage unasked. Or a time: the grace of such
            collections. None leaves the setting as it is.

    Raises:
        TypeError: ``gc`` is neither a word nor a time.
        ValueError: There is no such codec, no such word for ``gc``, or the time is impossible.
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
    """The settings of a store, with their meaning.

    Args:
        root: A root of the store.
        backend: The backend of the store.

    Attributes:
        values: The settings. A setting that was never set has its default.
    """

    def __init__(self, root: Root, backend: Backend) -> None:
        self.values: dict[str, Any] = {_CODEC: "auto", _GC: _GC_WORDS[0], **root.settings}
        self._backend = backend

    @property
    def collects_unasked(self) -> bool:
        """Whether a process that deletes snapshots collects the store's garbage unasked."""
        return bool(self.values[_GC] != "off")

    @property
    def grace(self) -> float | None:
        """How many seconds the store keeps garbage by its settings; None if they do not say."""
        value = self.values[_GC]
        return float(value) if _is_time(value) else None

    @property
    def codec(self) -> Codec:
        """The codec of new chunks.

        Raises:
            UnsupportedFormatError: A newer casnap has set a codec that this one lacks.
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
        """Whether casnap chooses the codecs of the store's chunks."""
        return bool(self.values[_CODEC] == "auto")

    @property
    def of_new_store(self) -> dict[str, Any]:
        """The settings for a new store that is to hold the same snapshots."""
        codec = self.values[_CODEC]
        return new_settings(None if _codec_by(codec) is None else codec)

    @property
    def recodes(self) -> bool:
        """Whether `gc` makes chunks smaller that only older snapshots need."""
        if self.is_auto:
            return self._backend.costs.recodes
        return _codec_by(self.values[_CODEC]) not in (None, Codec.RAW)


def _codec_by(word: object) -> Codec | None:
    """Return the codec that a word means; None for an unknown word, or no word at all."""
    return CODECS.get(word) if isinstance(word, str) else None


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < math.inf
