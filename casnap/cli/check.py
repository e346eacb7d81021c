"""``casnap check``."""

from __future__ import annotations

import random
from typing import Any

import click

from casnap.backends.uris import store_uri
from casnap.cli.arguments import (
    check_folder,
    open_snapshot,
    open_store,
    open_whole_store,
    reading_options,
)
from casnap.cli.option_types import positive_share
from casnap.cli.output import (
    CommandError,
    emit,
    print_requests,
    print_warnings,
    progress_bars,
    report_fields,
    safe,
    say,
    size,
)
from casnap.errors import NotAStoreError, nearest, shell_word
from casnap.maintenance.check import CheckReport
from casnap.maintenance.check import check as check_store
from casnap.maintenance.damage import ALL, Damage, Hurt
from casnap.runtime.sizes import amount
from casnap.store import Store
from casnap.view import repository_of

MOST_DAMAGES = 20
_ALL = "all snapshots of the newest root"
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
@click.option("--history", metavar="RUN", help="Also list its steps whose weights are equal.")
@reading_options
def check(
    store: str | None,
    data: bool,
    sample: float | None,
    seed: int | None,
    history: str | None,
    as_json: bool,
) -> None:
    """Check that a store, or one snapshot, is whole.

    The exit status is 1 if anything is damaged, or if a newer casnap has written something that
    this one does not know.

    Reads every root, index segment and tree, and looks up every pack. --data also reads every
    chunk, at each of its places. To check one snapshot, it reads only what that needs. It changes
    nothing, and takes may run meanwhile.

    --history RUN also asks whether the training went on: it lists the snapshots of a folder whose
    weights are all equal.
    """
    if sample is None and seed is not None:
        raise click.UsageError("--seed chooses what --sample reads; give both")
    if sample is not None and data:
        raise click.UsageError("--data reads everything, --sample a share; give one of them")
    place, name = _place(store)
    if history is not None:
        if name is not None:
            raise click.UsageError("--history compares all snapshots of a run; name the store")
        check_folder(place, history)
    if sample is not None and seed is None:
        seed = random.SystemRandom().randrange(1 << 32)
    with progress_bars(lambda: place.requests) as progress:
        report = check_store(
            repository_of(place),
            data=data,
            sample=sample,
            seed=seed,
            name=name,
            progress=progress,
        )
    # Without all trees, equal weights cannot be told; the damages say what is wrong.
    groups = place.equal_weights(history) if history is not None and report.ok else None
    uri = repository_of(place).backend.uri
    if as_json:
        emit({**_document(uri, report), "name": name, "equal_names": groups or []}, place)
    else:
        _print(uri, report)
        if history is not None:
            print_equal_weights(groups)
        print_requests(place.requests)
    if not report.ok or report.unsupported:
        raise click.exceptions.Exit(1)


def _place(text: str | None) -> tuple[Store, str | None]:
    """Return the store to check, and the full name of the snapshot to check; None for all.

    Args:
        text: The argument of the command.
    """
    try:
        place = open_store(text)
    except NotAStoreError:
        if text is None or store_uri(text) is None:
            raise
        snapshot = open_snapshot(text)
        return snapshot.store, snapshot.contents.name
    if text and place.prefix:
        whole_store = place.whole()
        if place.prefix in whole_store:
            return place, place.prefix
        try:
            place = open_whole_store(text)
        except CommandError as e:  # the folder does not exist
            advice = nearest(place.prefix, (s.name for s in whole_store.snapshots()))
            raise CommandError(f"{e.message}{advice}") from e
    return place, None


def _document(uri: str, report: CheckReport) -> dict[str, Any]:
    numbers = ("snapshots", "packs", "chunks", "orphans", "orphan_segments", "temporary")
    return {
        "store": uri,
        "ok": report.ok,
        "hurts": list(map(_hurt_fields, report.hurts)),
        **report_fields(report, *numbers),
        "damages": list(map(damage_fields, report.damages)),
        "unsupported": list(map(damage_fields, report.unsupported)),
        "history": list(map(damage_fields, report.history)),
    }


def damage_fields(damage: Damage) -> dict[str, Any]:
    """Return the fields of a damage, for JSON."""
    return {**vars(damage), "hurts": list(map(_hurt_fields, damage.hurts))}


def _hurt_fields(hurt: Hurt) -> dict[str, Any]:
    return {"name": hurt.snapshot, "entry": hurt.path}


def _print(uri: str, report: CheckReport) -> None:
    print_damages(report.damages)
    print_damages(report.unsupported)
    if report.root >= 0:
        _print_counts(uri, report)
    if report.history:
        older = amount(len(report.history), "older root")
        say(f"{older} damaged or lost (--json): no snapshot needs them")
    print_warnings(report.warnings)
    if report.ok:
        say("no damage found")
        return
    hurt = report.hurts
    names = {h.snapshot for h in hurt}
    snapshots = _ALL if ALL in hurt else amount(len(names), "snapshot")
    say(f"{amount(len(report.damages), 'damage')}; hurt: {snapshots}")
    if report.root >= 0:
        _print_advice(uri, report)


def _print_advice(uri: str, report: CheckReport) -> None:
    kinds = {damage.kind for damage in report.damages}
    if kinds - BEYOND_REPAIR:
        say(f"`casnap repair {shell_word(uri)}` saves what can be saved (--yes in a script)")
    if "lost" in kinds:
        say(f"`casnap repair {shell_word(uri)} --from STORE` heals what that store has")
    if kinds & BEYOND_REPAIR and ALL not in report.hurts:
        say("`casnap rm` of the hurt snapshots gives up what cannot be repaired")


def _print_counts(uri: str, report: CheckReport) -> None:
    # If the table is lost, the number of snapshots is unknown.
    has_table = report.snapshots or ALL not in report.hurts
    snapshots = f"{amount(report.snapshots, 'snapshot')}, " if has_table else ""
    say(
        f"{uri}, root {report.root}: {snapshots}"
        f"{amount(report.chunks, 'chunk')} in {amount(report.packs, 'pack')}, "
        f"{size(report.stored_bytes)}"
    )
    if report.sample is None:
        say("the structure was checked; --data reads every byte too")
    else:
        seed = "" if report.seed is None else f" (--seed {report.seed})"
        share = f"{size(report.read_bytes)} of {size(report.stored_bytes)}"
        say(f"{share} were read and verified{seed}")
    leftover_bytes = report.orphan_bytes + report.temporary_bytes
    if leftover_bytes:
        say(
            f"{amount(report.orphans, 'object')} and {amount(report.temporary, 'temporary file')} "
            f"of {size(leftover_bytes)} are left over, or being written; collections free what "
            "is left over"
        )
    if report.orphan_segments:
        segments = amount(report.orphan_segments, "object")
        say(f"of these, {segments} of the index: takes that merge its segments leave the old ones")


def print_equal_weights(groups: list[list[str]] | None) -> None:
    """Print each group of snapshots with equal weights; for None, that damage hides them."""
    if groups is None:
        say("whether weights are equal can be told once the damage is repaired")
        return
    for names in groups:
        say(safe(f"equal weights: {', '.join(names)}"))
    if not groups:
        say("no two snapshots have equal weights")


def print_damages(damages: list[Damage]) -> None:
    """Print the first damages, each on a line with some snapshots and paths that it hurts."""
    for damage in damages[:MOST_DAMAGES]:
        position = " ".join(
            filter(None, (damage.object, damage.digest and f"chunk {damage.digest}"))
        )
        say(f"{damage.kind}: {position}: {damage.message}" if position else damage.message)
        hurts = list(damage.hurts)
        for hurt in hurts[:_MOST_HURT]:
            name = _ALL if hurt == ALL else f"{hurt.snapshot} {hurt.path}"
            say(f"  hurts {name}".rstrip())
        if len(hurts) > _MOST_HURT:
            say(f"  and {len(hurts) - _MOST_HURT:,} more")
    if len(damages) > MOST_DAMAGES:
        say(f"… and {amount(len(damages) - MOST_DAMAGES, 'damage')} more (--json)")
