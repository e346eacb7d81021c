"""``casnap prune``."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict

import click

from casnap.cli.durations import duration
from casnap.cli.gc import collected, grace_option, show
from casnap.cli.output import (
    Failure,
    counted,
    described,
    emit,
    json_option,
    moment,
    quoted,
    safe,
    table,
)
from casnap.cli.places import open_store, place_of, snapshots_of
from casnap.retention import Best, PruneReport, Retention
from casnap.store import Store

EXAMPLES = """\
\b
Examples:
  casnap prune /ckpts --keep-last 3 --keep-every 1000 --dry-run
  casnap prune /ckpts --prefix run1 --keep-within 7d --keep-best loss:1 --yes
"""

_BEST = re.compile(r"(.+):([0-9]{1,9})(?::(min|max))?", re.DOTALL)


def _best_rule(text: str) -> tuple[str, int, str]:
    found = _BEST.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{quoted(text)} is no rule; write loss:3 or accuracy:3:max")
    return found[1], int(found[2]), found[3] or "min"


@click.command(epilog=EXAMPLES)
@click.argument("store", required=False)
@click.option("--prefix", metavar="FOLDER", help="Only the runs in and below this folder.")
@click.option("--keep-last", type=int, metavar="N", help="Keep the last N of each run.")
@click.option("--keep-every", type=int, metavar="K", help="Keep steps that are multiples of K.")
@click.option("--keep-within", type=duration, metavar="TIME", help="Keep the last 24h, 7d, 2w, ….")
@click.option(
    "--keep-best",
    type=_best_rule,
    multiple=True,
    metavar="METRIC:N[:max]",
    help="Keep the N lowest by a metric of the metadata, or the highest. May be repeated.",
)
@click.option("--gc", "collect", is_flag=True, help="Then collect garbage, as `casnap gc` does.")
@grace_option
@click.option("--dry-run", is_flag=True, help="Only show what would be forgotten.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def prune(
    store: str | None,
    prefix: str | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_within: float | None,
    keep_best: tuple[Best, ...],
    collect: bool,
    grace: float,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget the snapshots that no rule keeps.

    Rules add up: what any of them keeps is kept, and so is what has a tag. Each run, that is each
    folder of snapshots, is judged on its own. What only the forgotten snapshots hold stays on
    disk until the store's garbage is collected, which --gc does.
    """
    try:
        retention = Retention(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_within=keep_within,
            keep_best=keep_best,
        )
    except ValueError as e:
        options = re.sub("keep_([a-z]+)", r"--keep-\1", str(e))
        raise click.UsageError(safe(options)) from e
    place = open_store(store)
    if not (dry_run or yes) and not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on; pass --yes, or --dry-run to look")
    _check_folder(place, prefix)
    if not (dry_run or yes):
        _ask(place.prune(retention, prefix=prefix, dry_run=True))
    report = place.prune(retention, prefix=prefix, dry_run=dry_run)
    if not as_json:
        _show(report)
    garbage = collected(place, grace, dry_run=dry_run) if collect else None
    if as_json:
        found = {} if garbage is None else {"gc": asdict(garbage)}
        emit({**place_of(place), **_facts_of(report), **found})
    elif garbage is not None:
        show(garbage)


def _check_folder(place: Store, prefix: str | None) -> None:
    folder = (prefix or place.prefix).strip("/")
    if snapshots_of(place, prefix) and not place.snapshots(prefix):
        raise Failure(f"{quoted(folder)} is a snapshot, not a folder of them; `casnap rm` deletes")


def _ask(plan: PruneReport) -> None:
    for verdict in plan.forgotten:
        described_row = described(verdict.row.metadata, verdict.row.tags)
        click.echo(f"{safe(verdict.name)}  {described_row}".rstrip(), err=True)
    count = len(plan.forgotten)
    if count and not click.confirm(f"Forget {counted(count, 'snapshot')}?", err=True):
        raise click.exceptions.Exit(1)


def _facts_of(report: PruneReport) -> dict[str, object]:
    snapshots = [
        {
            "name": v.name,
            "commit": v.row.commit.hex(),
            "seq": v.row.seq,
            "time": v.row.time,
            "metadata": v.row.metadata,
            "tags": list(v.row.tags),
            "kept": v.kept,
            "reasons": list(v.reasons),
        }
        for v in report.verdicts
    ]
    return {"dry_run": report.dry_run, "snapshots": snapshots}


def _show(report: PruneReport) -> None:
    rows = [
        (
            safe(v.name),
            moment(v.row.time),
            safe("; ".join(v.reasons)) or "- forgotten",
            described(v.row.metadata, v.row.tags),
        )
        for v in report.verdicts
    ]
    if rows:
        table(("NAME", "TIME", "KEEP", "METADATA"), rows, numbers=set())
    would = "would be " if report.dry_run else ""
    gone = f"{counted(len(report.forgotten), 'snapshot')} {would}forgotten"
    then = "; `casnap gc` frees the bytes" if report.forgotten and not report.dry_run else ""
    click.echo(f"{gone}, {len(report.kept):,} kept{then}")
