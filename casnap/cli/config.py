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


@click.command()
@click.argument("store")
@click.argument("settings", metavar="[SETTING=VALUE]...", nargs=-1)
@writing_options
def config(store: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Show the settings of a store, or change them.

    codec says how chunks are stored. With codec=auto, takes store them as they are. On a disk,
    `casnap gc` stores what older snapshots hold as how it differs from the snapshot before, or
    compressed, where that is smaller; mirrors, and copies into a bucket, get that. With codec=zstd,
    takes compress, and both others hold anywhere. With codec=raw, nothing is compressed. A change
    holds for later takes, copies and collections. Stored chunks stay as they are.

    gc=off has no process collect garbage by itself; gc=auto has each one that lets snapshots go do
    so in the background. gc=12h is as auto, and has all collections keep what no snapshot needs for
    12 hours, unless they are given another --grace.

    mirror=none forgets which store is the mirror, and which snapshots it lacks.
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
        # The mirror is known by its id, but people name it by its URI.
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
