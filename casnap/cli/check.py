"""``casnap check``."""

from __future__ import annotations

import random
from typing import Any

import click

from casnap.cli.arguments import (
    endpoint_option,
    open_snapshot,
    open_store,
    open_whole_store,
    print_requests,
    request_fields,
)
from casnap.cli.option_types import positive_share
from casnap.cli.output import (
    CommandError,
    counted,
    counts,
    emit,
    json_option,
    phases,
    print_warnings,
    safe,
    size,
)
from casnap.errors import NotAStoreError, nearest
from casnap.maintenance.check import CheckReport
from casnap.maintenance.check import check as check_store
from casnap.maintenance.damage import ALL, Damage, Hurt
from casnap.storage.uris import store_uri
from casnap.store import Store

MOST_DAMAGES = 20
_MOST_HURT = 5
BEYOND_REPAIR = {"lost", "malformed"}
"""Kinds of damage that a repair cannot mend without a copy of the data."""


@click.command()
@click.argument("store", metavar="[STORE[/NAME]]", required=False)
@click.option("--data", is_flag=True, help="Read and verify every byte.")
@click.option(
    "--sample", type=positive_share, metavar="SHARE", help="Read a random share, like 5%."
)
@click.option("--seed", type=int, help="Choose the same share as an earlier check.")
@endpoint_option
@json_option
def check(
    store: str | None, data: bool, sample: float | None, seed: int | None, as_json: bool
) -> None:
    """Check that a store, or one snapshot, is whole; exit with status 1 if anything is damaged.

    Reads every root, index segment and tree, and looks up every pack. --data also reads every
    chunk, at each of its places. Nothing is changed, and takes may run meanwhile. Of a snapshot,
    only what it needs is looked at.
    """
    if sample is None and seed is not None:
        raise click.UsageError("--seed chooses what --sample reads; give both")
    if sample is not None and data:
        raise click.UsageError("--data reads everything, --sample a share; give one of them")
    place, name = _place(store)
    if sample is not None and seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    with phases(lambda: place.requests) as report:
        found = check_store(
            place.objects, data=data, sample=sample, seed=seed, name=name, progress=report
        )
    uri = place.objects.backend.uri
    if as_json:
        emit({**_document(uri, found), "name": name, **request_fields(place)})
    else:
        _print(uri, found)
        print_requests(place.requests)
    if not found.ok:
        raise click.exceptions.Exit(1)


def _place(text: str | None) -> tuple[Store, str | None]:
    """Return the store to check, and the full name of the one snapshot to check, if it is one."""
    try:
        place = open_store(text)
    except NotAStoreError:
        if text is None or store_uri(text) is None:
            raise
        snapshot = open_snapshot(text)
        return snapshot.store, snapshot.store.outer_name(snapshot.name)
    if text and place.prefix:
        whole = place.whole()
        if place.prefix in whole:
            return place, place.prefix
        try:
            place = open_whole_store(text)
        except CommandError as e:  # there is no such folder
            hint = nearest(place.prefix, (s.name for s in whole.snapshots()))
            raise CommandError(f"{e.message}{hint}") from e
        uri = safe(place.objects.backend.uri)
        click.echo(f"{safe(text)} is a folder of {uri}: the whole store is checked", err=True)
    return place, None


def _document(uri: str, found: CheckReport) -> dict[str, Any]:
    rest = {key: value for key, value in vars(found).items() if key not in _THINGS}
    return {
        "store": uri,
        "ok": found.ok,
        "hurts": list(map(_hurt_fields, found.hurts)),
        **rest,
        **counts(found, *_THINGS),
        **{key: list(map(document_of, getattr(found, key))) for key in ("damages", "history")},
    }


_THINGS = ("snapshots", "packs", "chunks", "orphans", "orphan_segments", "temporary")


def document_of(damage: Damage) -> dict[str, Any]:
    """Return a damage for JSON."""
    return {**vars(damage), "hurts": list(map(_hurt_fields, damage.hurts))}


def _hurt_fields(hurt: Hurt) -> dict[str, Any]:
    return {"name": hurt.snapshot, "entry": hurt.path}


def _print(uri: str, found: CheckReport) -> None:
    print_damages(found.damages)
    if found.root >= 0:
        _print_counts(uri, found)
    if found.history:
        older = counted(len(found.history), "older root")
        click.echo(f"{older} damaged or lost (--json): no snapshot needs them")
    print_warnings(found.warnings)
    if found.ok:
        click.echo("no damage found")
        return
    hurt = found.hurts
    what = "all snapshots" if ALL in hurt else counted(len({h.snapshot for h in hurt}), "snapshot")
    click.echo(f"{counted(len(found.damages), 'damage')}; hurt: {what}")
    if found.root >= 0:
        _print_advice(safe(uri), found)


def _print_advice(uri: str, found: CheckReport) -> None:
    kinds = {damage.kind for damage in found.damages}
    if kinds - BEYOND_REPAIR:
        click.echo(f"`casnap repair {uri}` saves what can be saved (--yes in a script)")
    if "lost" in kinds:
        click.echo(f"`casnap repair {uri} --from STORE` heals what that store has")
    if kinds & BEYOND_REPAIR and ALL not in found.hurts:
        click.echo("`casnap rm` of the hurt snapshots gives up what cannot be repaired")


def _print_counts(uri: str, found: CheckReport) -> None:
    # Without the table the number of snapshots is not known.
    known = found.snapshots or ALL not in found.hurts
    snapshots = f"{counted(found.snapshots, 'snapshot')}, " if known else ""
    click.echo(
        f"{safe(uri)}, root {found.root}: {snapshots}"
        f"{counted(found.chunks, 'chunk')} in {counted(found.packs, 'pack')}, "
        f"{size(found.stored_bytes)}"
    )
    if found.sample is None:
        click.echo("the structure was checked; --data reads every byte too")
    else:
        seed = "" if found.seed is None else f" (--seed {found.seed})"
        what = f"{size(found.read_bytes)} of {size(found.stored_bytes)}"
        click.echo(f"{what} were read and verified{seed}")
    left = found.orphan_bytes + found.temporary_bytes
    if left:
        click.echo(
            f"{counted(found.orphans, 'object')} and {counted(found.temporary, 'temporary file')} "
            f"of {size(left)} are left over, or being written; `casnap gc` frees what is left over"
        )
    if found.orphan_segments:
        segments = counted(found.orphan_segments, "object")
        click.echo(
            f"of these, {segments} of the index: takes that merge its segments leave the old ones"
        )


def print_damages(damages: list[Damage]) -> None:
    """Print damages, one on a line, with some of what each hurts; at most a screen of them."""
    for damage in damages[:MOST_DAMAGES]:
        where = " ".join(filter(None, (damage.object, damage.digest and f"chunk {damage.digest}")))
        click.echo(safe(f"{damage.kind}: {where}: {damage.message}" if where else damage.message))
        hurts = list(damage.hurts)
        for hurt in hurts[:_MOST_HURT]:
            name = "all snapshots" if hurt == ALL else f"{hurt.snapshot} {hurt.path}"
            click.echo(safe(f"  hurts {name}".rstrip()))
        if len(hurts) > _MOST_HURT:
            click.echo(f"  and {counted(len(hurts) - _MOST_HURT, 'entry')} more")
    if len(damages) > MOST_DAMAGES:
        click.echo(f"… and {counted(len(damages) - MOST_DAMAGES, 'damage')} more (--json)")
