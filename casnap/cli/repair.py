"""``casnap repair``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casnap.backends import LocalBackend, backend_at
from casnap.cli.arguments import (
    endpoint_option,
    exclusive_option,
    open_store,
    open_whole_store,
    options_for,
    print_requests,
    request_fields,
)
from casnap.cli.check import document_of, print_damages
from casnap.cli.output import (
    CommandError,
    check_can_ask,
    confirm,
    counts,
    emit,
    json_option,
    phases,
    print_warnings,
    quoted,
    safe,
)
from casnap.errors import DamagedError, NotAStoreError
from casnap.format.records import CONFIG_KEY
from casnap.maintenance.config_repair import copied_config, restore_config
from casnap.maintenance.damage import Damage
from casnap.maintenance.repair import RepairReport
from casnap.runtime.environment import local_path
from casnap.storage.config import read_config
from casnap.storage.uris import store_uri
from casnap.store import Store


def _source(text: str) -> str:
    path = local_path(text)
    if "://" not in path and not Path(path).exists():
        raise click.BadParameter(f"{quoted(text)} does not exist")
    return text


@click.command()
@click.argument("store", required=False)
@click.option(
    "--from",
    "sources",
    type=_source,
    multiple=True,
    metavar="STORE",
    help="Another store, to look for lost chunks in. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@exclusive_option
@endpoint_option
@json_option
def repair(
    store: str | None, sources: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Repair a damaged store as far as possible; exit with status 1 if anything stays lost.

    Reads every byte. Rebuilds lost parts of the index from the packs, and copies whole chunks
    out of damaged packs. Looks for lost chunks in --from: other casnap stores. Nothing is deleted:
    `casnap gc` does that later.
    """
    made_anew = False
    try:
        place = open_whole_store(store)
    except DamagedError as e:
        made_anew = True
        place = _with_config(store, e, yes=yes, dry_run=dry_run)
    uri = place.objects.backend.uri
    if not (yes or dry_run or made_anew):
        _ask(uri)
    places = [open_store(s) if store_uri(s) is not None else s for s in sources]
    with phases(lambda: place.requests) as report:
        done = place.repair(sources=places, progress=report, dry_run=dry_run)
    if made_anew:
        done.found.insert(0, Damage("missing", CONFIG_KEY, "made anew from the newest root"))
    if as_json:
        emit({"store": uri, **_document(done), **request_fields(place)})
    else:
        _print(uri, done)
        print_requests(place.requests)
    if not done.ok:
        raise click.exceptions.Exit(1)


def _ask(uri: str) -> None:
    check_can_ask("--yes to repair, or --dry-run to look")
    confirm(f"Repair {safe(uri)}?")


def _with_config(store: str | None, error: DamagedError, *, yes: bool, dry_run: bool) -> Store:
    """Make the record of a store anew, without which it cannot be opened; return the store."""
    uri = store or "."
    found = store_uri(uri)
    folder = Path(local_path(uri)).resolve()
    backend = LocalBackend(folder) if found is None else backend_at(found.store, options_for(uri))
    try:
        read_config(backend)
    except DamagedError:
        config = copied_config(backend)
    except NotAStoreError:
        # The path lies below the store, which the error names.
        raise error from None
    else:
        raise error
    if dry_run:
        raise CommandError(f"{error}. A repair would make it anew, and then look at the rest")
    if not yes:
        _ask(backend.uri)
    restore_config(backend, config)
    return open_whole_store(store)


def _document(done: RepairReport) -> dict[str, Any]:
    lists = {key: list(map(document_of, getattr(done, key))) for key in ("found", "remaining")}
    rest = {key: value for key, value in vars(done).items() if key not in _THINGS}
    return {"ok": done.ok, **rest, **counts(done, *_THINGS), **lists}


_THINGS = (
    "dropped_segments",
    "adopted_packs",
    "replaced_packs",
    "saved_chunks",
    "healed_chunks",
    "rescued_packs",
)


def _print(uri: str, done: RepairReport) -> None:
    if not done.found:
        click.echo(f"{safe(uri)}: no damage found")
        print_warnings(done.warnings)
        return
    for why in done.skipped:
        click.echo(f"skipped: {safe(why)}", err=True)
    steps = {
        "unreadable index segments replaced": done.dropped_segments,
        "packs listed in the index again": done.adopted_packs,
        "damaged packs replaced": done.replaced_packs,
        "chunks saved from damaged packs": done.saved_chunks,
        "lost chunks found elsewhere": done.healed_chunks,
        "condemned packs rescued": done.rescued_packs,
    }
    for what, count in steps.items():
        if count:
            click.echo(f"{what}: {count:,}")
    if any(damage.object == CONFIG_KEY for damage in done.found):
        click.echo(f"{CONFIG_KEY} {'would be ' if done.dry_run else ''}made anew")
    if any(damage.object.startswith("roots/") for damage in done.found):
        click.echo("roots are damaged or lost (see `casnap check`): no snapshot needs them")
    if done.ok:
        click.echo("nothing would stay lost" if done.dry_run else "everything is whole")
        print_warnings(done.warnings)
        return
    click.echo("what may stay lost:" if done.dry_run else "what stays lost:")
    print_damages(done.remaining)
    click.echo(
        "a take or import of the same bytes, or --from with a store of them, restores the lost;"
    )
    click.echo("`casnap rm` of the hurt snapshots gives it up")
