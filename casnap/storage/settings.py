"""The settings of a store. They stand in its root, so each commit keeps them."""

from __future__ import annotations

from typing import Any

import msgspec

from casnap.errors import StoreError, UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.records import Root
from casnap.storage.objects import Objects
from casnap.storage.table import change_table

CODEC = "codec"
_CODECS = {codec.name.lower(): codec for codec in Codec}


def codec_named(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        ValueError: There is none of this name.
    """
    try:
        return _CODECS[name]
    except (KeyError, TypeError):
        known = ", ".join(map(repr, _CODECS))
        raise ValueError(f"codec is one of {known}; got {name!r:.80}") from None


def codec_settings(codec: Codec) -> dict[str, Any]:
    """Return the setting that says how new chunks are stored."""
    return {CODEC: codec.name.lower()}


def settings_of(root: Root) -> dict[str, Any]:
    """Return the settings of a store, with the defaults of those that were never set."""
    return {**codec_settings(Codec.RAW), **root.settings}


def codec_of(root: Root, uri: str) -> Codec:
    """Return how new chunks are stored.

    Raises:
        UnsupportedFormatError: A newer casnap has set a codec that this one does not know.
    """
    name = settings_of(root)[CODEC]
    try:
        return codec_named(name)
    except ValueError:
        raise UnsupportedFormatError(
            f"{uri} stores new chunks with codec {name!r:.80}, which this casnap does not know, "
            "so it takes no snapshot there; update casnap, or set another codec: "
            f"`casnap config {uri} codec=raw`"
        ) from None


def change_settings(objects: Objects, settings: dict[str, Any]) -> bool:
    """Change some settings of a store, in one commit; return whether that changed anything.

    Raises:
        StoreError: The store is of format 1, which has no settings.
    """

    def become(root: Root) -> Root:
        changed = {**settings_of(root), **settings}
        if changed == settings_of(root):
            return root
        if root.format == 1:
            uri = objects.backend.uri
            raise StoreError(
                f"{uri} is of format 1, which has no settings; bring it to the newest format first "
                f"with `casnap upgrade {uri}`, once all of its users have this version of casnap"
            )
        return msgspec.structs.replace(root, settings=changed)

    return change_table(objects, lambda _table, _seq: {}, become)
