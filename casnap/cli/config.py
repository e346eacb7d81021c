"""``casnap config``."""

from __future__ import annotations

from typing import Any

import click

from casnap.cli.arguments import open_store, writing_options
from casnap.cli.option_types import duration_or_none
from casnap.cli.output import emit, json_values, quote, safe, say
from casnap.storage import CODECS
from casnap.view import repository_of

SETTINGS = ("codec", "gc", "mirror")


_MEANINGS = """\
\b
Settings:
  codec=auto   takes store chunks as they are; on a disk `casnap gc` makes deltas
               of older ones, or compresses them; mirrors, and copies into a bucket, get deltas
  codec=zstd   takes compress; `casnap gc` and copies make deltas anywhere
  codec=raw    nothing is compressed, and nothing becomes a delta
  gc=auto      processes that delete snapshots collect garbage in the background
  gc=off       no process collects by itself
  gc=12h       as auto; and all collections keep garbage for 12 hours, unless
               they are given another --grace
  mirror=none  forget which store is the mirror, and which snapshots it lacks
"""


@click.command(epilog=_MEANINGS)
@click.argument("store")
@click.argument("settings", metavar="[SETTING=VALUE]...", nargs=-1)
@writing_options
def config(store: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Show the settings of a store, or change them.

    A change holds for later takes, copies and collections. Stored chunks stay as they are. A delta
    is a chunk that is stored as its difference from the snapshot before.
    """
    changes: dict[str, Any] = dict(map(_parsed, settings))
    place = open_store(store)
    if changes:
        try:
            place.configure(**changes)
        except ValueError as e:
            raise click.UsageError(safe(str(e))) from e
    if as_json:
        document = {
            "store": repository_of(place).backend.uri,
            "id": place.id,
            "format": repository_of(place).config.format,
            "chunk_size_bytes": place.chunk_size,
            "settings": place.settings,
        }
        emit(document, place)
        return
    for key, value in sorted(place.settings.items()):
        # A mirror has an id and a URI; people know the URI.
        text = value.get("uri", value) if isinstance(value, dict) else value
        if key == "gc" and isinstance(value, int | float):
            text = f"{value:.15g}s"
        say(f"{key}={json_values(text, json=False)}")


def _parsed(setting: str) -> tuple[str, str | float]:
    key, equals, value = setting.partition("=")
    if not equals or key not in SETTINGS:
        codecs = ", ".join(f"codec={codec}" for codec in CODECS)
        raise click.UsageError(
            f"{quote(setting)} sets nothing; write {codecs}, gc=auto, gc=off, gc=24h or mirror=none"
        )
    if key == "gc" and value[:1].isdigit():
        return key, duration_or_none(value)
    return key, value
