"""``casnap prune``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from casnap.cli.arguments import (
    Command,
    identity,
    open_store,
    snapshots_of,
    store_fields,
    writing_options,
)
from casnap.cli.garbage import show_what_waits
from casnap.cli.gc import collect_garbage, garbage_fields, grace_option, show
from casnap.cli.option_types import duration
from casnap.cli.output import (
    CommandError,
    confirm,
    emit,
    json_time,
    moment,
    quote,
    safe,
    say,
    summary,
    table,
)
from casnap.errors import CasnapError
from casnap.runtime.sizes import amount
from casnap.storage import Best, GcOptions, GcReport, PruneReport, Retention
from casnap.store import Store
from casnap.view import repository_of, view_of

EXAMPLES = """\
\b
Examples:
  casnap prune /ckpts --keep-last 3 --keep-every 1000 --dry-run
  casnap prune /ckpts --prefix run1 --keep-within 7d --keep-best loss:1 --yes
  casnap prune /ckpts --missing-folders --yes
"""

_BEST = re.compile(r"(.+):([0-9]{1,9})(?::(min|max))?", re.DOTALL)


def _best_rule(text: str) -> tuple[str, int, str]:
    match = _BEST.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{quote(text)} is not a rule; write loss:3 or accuracy:3:max")
    return match[1], int(match[2]), match[3] or "min"


_RULES = (
    click.option("--keep-last", type=int, metavar="N", help="Keep the last N of each run."),
    click.option("--keep-every", type=int, metavar="K", help="Keep steps that are multiples of K."),
    click.option(
        "--keep-within", type=duration, metavar="TIME", help="Keep the last 24h, 7d, 2w, …."
    ),
    click.option(
        "--keep-best",
        type=_best_rule,
        multiple=True,
        metavar="METRIC:N[:max]",
        help="Keep the N snapshots with the lowest (or highest) metric. May be repeated.",
    ),
)


def retention_rules(command: Command) -> Command:
    """Add to a command the options that are the rules of a retention."""
    for option in reversed(_RULES):
        command = option(command)
    return command


@click.command(epilog=EXAMPLES)
@click.argument("store", required=False)
@click.option("--prefix", metavar="FOLDER", help="Only runs in and below this folder.")
@retention_rules
@click.option(
    "--missing-folders",
    is_flag=True,
    help="Delete snapshots whose folders were deleted, instead of applying rules.",
)
@click.option("--gc", "collect", is_flag=True, help="Then collect garbage, as `casnap gc` does.")
@grace_option
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@writing_options
def prune(
    store: str | None,
    prefix: str | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_within: float | None,
    keep_best: tuple[Best, ...],
    missing_folders: bool,
    collect: bool,
    grace: float | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the snapshots that no rule keeps.

    A snapshot stays if any rule keeps it, if it has a tag, or if it is not mirrored yet. The rules
    apply to each run, that is each folder of snapshots, on its own. Then the command begins to free
    the bytes, as `casnap rm` does; --gc collects garbage as `casnap gc` does.

    --missing-folders deletes each snapshot whose folder a trainer has deleted, in each run that has
    a marker left.
    """
    rules = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_within": keep_within,
        "keep_best": keep_best,
    }
    retention = _retention(rules, missing_folders=missing_folders)
    options = GcOptions(grace=grace, dry_run=dry_run)
    _check_grace(collect=collect)
    place = open_store(store)
    if collect:
        options.check_allowed(repository_of(place))
    _check_folder(place, prefix)
    prunes = _missing_folders_of(place) if retention is None else partial(place.prune, retention)
    if not (dry_run or yes):
        _ask(prunes(prefix=prefix, dry_run=True))
    report = prunes(prefix=prefix, dry_run=dry_run)
    document = {**store_fields(place), **_facts_of(place, report)}
    if prefix:
        document["prefix"] = view_of(place).full_of(prefix.strip("/"))
    if not as_json:
        _show(report)
    try:
        garbage = _collect_after(report, place, options) if collect else None
    except (CasnapError, OSError, KeyboardInterrupt) as e:
        # The snapshots are deleted already, so print that in JSON too.
        if as_json:
            emit({**document, "error": str(e) or "interrupted"})
        raise
    if as_json:
        if garbage is not None:
            document["gc"] = garbage_fields(garbage)
        emit(document, place)
    else:
        _show_garbage(place, report, garbage)


def _missing_folders_of(place: Store) -> Callable[..., PruneReport]:
    from casnap.integrations.folders import prune_missing_folders

    return partial(prune_missing_folders, place)


def _retention(rules: dict[str, Any], *, missing_folders: bool) -> Retention | None:
    if missing_folders:
        if has_rules(rules):
            raise click.UsageError("--missing-folders takes no rules; call prune twice")
        return None
    if not has_rules(rules):
        options = ", ".join(f"--{rule.replace('_', '-')}" for rule in rules)
        raise click.UsageError(
            f"without a rule everything would be deleted; give at least one of {options}, or "
            "--missing-folders"
        )
    return retention_of(rules)


def has_rules(rules: dict[str, Any]) -> bool:
    """Whether the options ask for a rule at all."""
    return any(rule not in (None, ()) for rule in rules.values())


def retention_of(rules: dict[str, Any]) -> Retention:
    """Return the retention that the options ask for.

    Raises:
        click.UsageError: A rule is impossible.
    """
    try:
        return Retention(**rules)
    except ValueError as e:
        message = re.sub("keep_([a-z]+)", r"--keep-\1", str(e))
        raise click.UsageError(safe(message)) from e


def _check_grace(*, collect: bool) -> None:
    source = click.get_current_context().get_parameter_source
    if not collect and source("grace") is not ParameterSource.DEFAULT:
        raise click.UsageError("--grace is for collecting garbage; it needs --gc")


def _collect_after(report: PruneReport, place: Store, options: GcOptions) -> GcReport:
    if options.dry_run:
        names = frozenset(view_of(place).full_of(verdict.name) for verdict in report.deleted)
        options = replace(options, deleted=names)
    return collect_garbage(place, options)


def _show_garbage(place: Store, report: PruneReport, garbage: GcReport | None) -> None:
    if garbage is not None:
        show(place, garbage)
    elif report.deleted and not report.dry_run:
        show_what_waits(place)


def _check_folder(place: Store, prefix: str | None) -> None:
    folder = (prefix or place.prefix).strip("/")
    if snapshots_of(place, prefix) and not place.snapshots(prefix):
        raise CommandError(
            f"{quote(folder)} is a snapshot, not a folder of them; `casnap rm` deletes"
        )


def _ask(plan: PruneReport) -> None:
    if plan.deleted:
        lines = [
            f"{verdict.name}  {summary(verdict.row.metadata, verdict.row.tags)}".rstrip()
            for verdict in plan.deleted
        ]
        confirm(f"Delete {amount(len(lines), 'snapshot')}?", "--yes, or --dry-run to look", lines)


def _facts_of(place: Store, report: PruneReport) -> dict[str, object]:
    snapshots = [
        {
            **identity(
                repository_of(place).backend,
                view_of(place).full_of(v.name),
                v.row.commit.hex(),
            ),
            "root": v.row.seq,
            "time": json_time(v.row.time),
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
            v.name,
            moment(v.row.time),
            "; ".join(v.reasons) or "- deleted",
            summary(v.row.metadata, v.row.tags),
        )
        for v in report.verdicts
    ]
    if rows:
        table(("NAME", "TIME", "KEEP", "METADATA"), rows, numbers=set())
    would = "would be " if report.dry_run else ""
    count_text = f"{amount(len(report.deleted), 'snapshot')} {would}deleted"
    say(f"{count_text}, {len(report.kept):,} kept")
