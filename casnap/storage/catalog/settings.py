"""The settings of a store. They stand in its root, so each commit keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from casnap.errors import UnsupportedFormatError
from casnap.format.codec import Codec
from casnap.format.records import Root, Row
from casnap.storage.catalog.table import Table, change_table, snapshots_in
from casnap.storage.chunks.objects import Objects

CODEC = "codec"
GC = "gc"
GC_CHOICES = ("auto", "off")
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
    return {**codec_settings(Codec.RAW), GC: GC_CHOICES[0], **root.settings}


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


def change_settings(
    objects: Objects,
    edit: Callable[[dict[str, Any]], dict[str, Any]],
    edit_rows: Callable[[Iterable[tuple[str, Row]]], dict[str, Row | None]] = lambda _: {},
) -> bool:
    """Change some settings of a store, in one commit; return whether that changed anything.

    Args:
        objects: The store.
        edit: Given the settings, returns the new ones.
        edit_rows: Given the snapshots, returns the rows to change too if the settings change.
    """

    def update_root(root: Root) -> Root:
        before = settings_of(root)
        after = edit(dict(before))
        if after == before:
            return root
        return msgspec.structs.replace(root, settings=after)

    def change(table: Table, seq: int) -> dict[str, Row | None]:
        before = objects.newest()
        stays = before.seq == seq - 1 and update_root(before) is before
        return {} if stays else edit_rows(snapshots_in(table))

    return change_table(objects, change, update_root)
