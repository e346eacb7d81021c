"""``casnap repair``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from casnap.backends import LocalBackend, backend_at
from casnap.backends.local_files import exists
from casnap.backends.uris import store_uri
from casnap.cli.arguments import open_store, open_whole_store, options_for, writing_options
from casnap.cli.check import damage_fields, print_damages
from casnap.cli.output import (
    CommandError,
    confirm,
    emit,
    print_requests,
    print_warnings,
    progress_bars,
    quote,
    report_fields,
    say,
)
from casnap.errors import DamagedError, NotAStoreError
from casnap.format.records import CONFIG_KEY
from casnap.maintenance.config_repair import lost_config, restore_config
from casnap.maintenance.damage import Damage
from casnap.maintenance.repair import RepairReport
from casnap.runtime.environment import local_path
from casnap.store import Store
from casnap.view import repository_of


def _source(text: str) -> str:
    path = local_path(text)
    if "://" not in path and not exists(path):
        raise click.BadParameter(f"{quote(text)} does not exist")
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
@writing_options
def repair(
    store: str | None, sources: tuple[str, ...], dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Repair a damaged store as far as possible.

    The exit status is 1 if anything stays lost, or if newer roots are given up for an older one.

    Reads every byte. Rebuilds lost parts of the index from the packs, and copies undamaged chunks
    out of damaged packs. Looks for lost chunks in --from: other casnap stores. It deletes nothing;
    a later collection does that.
    """
    made_anew = False
    try:
        place = open_whole_store(store)
    except DamagedError as e:
        made_anew = True
        place = _with_config(store, e, yes=yes, dry_run=dry_run)
    uri = repository_of(place).backend.uri
    if not (yes or dry_run or made_anew):
        _ask(uri)
    places = [open_store(s) if store_uri(s) is not None else s for s in sources]
    with progress_bars(lambda: place.requests) as progress:
        report = place.repair(sources=places, progress=progress, dry_run=dry_run)
    if made_anew:
        report.found.insert(0, Damage("missing", CONFIG_KEY, "made anew from the newest root"))
    if as_json:
        emit({"store": uri, **_document(report)}, place)
    else:
        _print(uri, report)
        print_requests(place.requests)
    if not report.ok or report.restored_root is not None:
        raise click.exceptions.Exit(1)


def _ask(uri: str) -> None:
    confirm(f"Repair {uri}?", "--yes to repair, or --dry-run to look")


def _with_config(store: str | None, error: DamagedError, *, yes: bool, dry_run: bool) -> Store:
    """Rewrite the damaged ``casnap.json`` of a store, then open the store and return it.

    Args:
        store: The folder or URI; None for the current folder.
        error: The error of opening the store.
        yes: Whether not to ask the user.
        dry_run: Whether to change nothing. If so, an error ends the command here.
    """
    uri = store or "."
    remote = store_uri(uri)
    folder = Path(local_path(uri)).resolve()
    backend = LocalBackend(folder) if remote is None else backend_at(remote.store, options_for(uri))
    try:
        config = lost_config(backend)
    except NotAStoreError:
        # The user has named a path below the store; the error names the store itself.
        raise error from None
    if config is None:
        raise error
    if dry_run:
        raise CommandError(f"{error}. A repair would make it anew, and then look at the rest")
    if not yes:
        _ask(backend.uri)
    restore_config(backend, config)
    return open_whole_store(store)


def _document(report: RepairReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        **report_fields(report, *_NUMBERS),
        "found": list(map(damage_fields, report.found)),
        "remaining": list(map(damage_fields, report.remaining)),
    }


_NUMBERS = (
    "dropped_segments",
    "adopted_packs",
    "replaced_packs",
    "saved_chunks",
    "healed_chunks",
    "rescued_packs",
)


def _print(uri: str, report: RepairReport) -> None:
    if not report.found:
        say(f"{uri}: no damage found")
        print_warnings(report.warnings)
        return
    for reason in report.skipped:
        say(f"skipped: {reason}", err=True)
    steps = {
        "unreadable index segments replaced": report.dropped_segments,
        "packs listed in the index again": report.adopted_packs,
        "damaged packs replaced": report.replaced_packs,
        "chunks saved from damaged packs": report.saved_chunks,
        "lost chunks found elsewhere": report.healed_chunks,
        "condemned packs rescued": report.rescued_packs,
    }
    for step, count in steps.items():
        if count:
            say(f"{step}: {count:,}")
    if report.restored_root is not None:
        say(
            f"root {report.restored_root:,}, the newest whole one, "
            f"{'would be' if report.dry_run else 'is'} the last again, since files that the "
            "newest one names are not here. What was committed after it is given up: a collection "
            "deletes its bytes once the grace is over. If you still have the store that this one "
            "is a copy of, copy it again"
        )
    if any(damage.object == CONFIG_KEY for damage in report.found):
        say(f"{CONFIG_KEY} {'would be ' if report.dry_run else ''}made anew")
    if any(damage.object.startswith("roots/") for damage in report.found):
        say("roots are damaged or lost (see `casnap check`): no snapshot needs them")
    if report.ok:
        whole = "all that is listed is whole" if report.restored_root else "everything is whole"
        say("nothing would stay lost" if report.dry_run else whole)
        print_warnings(report.warnings)
        return
    say("what may stay lost:" if report.dry_run else "what stays lost:")
    print_damages(report.remaining)
    say("a take or import of the same bytes, or --from with a store of them, restores the lost;")
    say("`casnap rm` of the hurt snapshots gives it up")
