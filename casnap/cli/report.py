"""``casnap report``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from casnap.backends.local_files import is_folder
from casnap.cli.arguments import open_store, reading_options, snapshots_of, store_fields
from casnap.cli.garbage import disk_fields, what_frees
from casnap.cli.mirror import mirror_lag
from casnap.cli.output import (
    CommandError,
    emit,
    json_time,
    moment,
    print_requests,
    progress_bars,
    quote,
    report_fields,
    say,
)
from casnap.cli.prune import has_rules, retention_of, retention_rules
from casnap.comparing.diff import diff
from casnap.errors import DamagedError, MirrorError, SnapshotNotFoundError
from casnap.format.entries import ContainerEntry
from casnap.format.health import TensorHealth
from casnap.maintenance.usage import DiskUsage, Usage, disk_usage, usage
from casnap.report.charts import MISSING, can_draw
from casnap.report.facts import (
    Facts,
    Owed,
    Plan,
    RunFacts,
    Service,
    SnapshotFacts,
    Space,
    gather,
    metrics_in,
    norms_of,
    not_finite_in,
)
from casnap.report.page import HEAD, page
from casnap.runtime.environment import local_path
from casnap.runtime.sizes import amount, size
from casnap.snapshot import Snapshot
from casnap.storage import GcOptions, Repository, Retention, collect
from casnap.store import Store
from casnap.view import repository_of, view_of


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="The file to write. An earlier report is replaced, any other file is not.",
)
@click.option(
    "--last",
    type=click.IntRange(min=1, max=1000),
    default=60,
    show_default=True,
    metavar="N",
    help="Compare the last N snapshots of each run with the one before.",
)
@retention_rules
@reading_options
def report(
    store: str | None,
    prefix: str | None,
    output: Path,
    last: int,
    as_json: bool,
    **rules: Any,
) -> None:
    """Write a page about a store: its health, its size, what changed, and what rules would delete.

    The page is one HTML file that loads nothing. The command reads sizes, digests and metadata, and
    no tensor. --json prints the facts of the page, and writes no page. With rules, as those of
    `casnap prune`, the page names the snapshots that no rule keeps; none is deleted. matplotlib
    draws charts, if it is installed.
    """
    output = Path(local_path(output))
    retention = retention_of(rules) if has_rules(rules) else None
    if not as_json:
        _check_replaceable(output)
    place = open_store(store)
    found = snapshots_of(place, prefix)
    snapshots = [each for each in found if not each.contents.row.unknown_features]
    contents = [snapshot.contents for snapshot in snapshots]
    repository = repository_of(place)
    with progress_bars(lambda: place.requests) as progress:
        usages = {use.name: use for use in usage(contents, repository, progress)}

        # A dry run of a collection counts the bytes that are needed, and changes nothing.
        def live_bytes(deleted: frozenset[str] = frozenset()) -> int:
            options = GcOptions(grace=0, dry_run=True, deleted=deleted)
            return collect(repository, options, progress).live_bytes

        live = live_bytes()
        disk = disk_usage(repository)
        waiting = max(0, disk.waiting_bytes)
        frees = what_frees(repository, size(waiting), condemned=True) if waiting else ""
        space = Space(disk.nbytes, live, disk.saved_bytes, frees)
        plan = None
        if retention is not None:
            plan = _plan(place, prefix, retention, lambda deleted: live - live_bytes(deleted))
        facts = gather(
            repository.backend.uri,
            repository.config.chunk_size,
            # One that was deleted meanwhile has no usage.
            [(s.contents.name, s) for s in snapshots if s.contents.name in usages],
            space,
            lambda s, is_recent: _facts_of(s, usages[s.contents.name], is_recent=is_recent),
            _sizes_in,
            lambda before, after: diff(before.contents, after.contents),
            last,
            progress,
        )
    unread = len(found) - len(snapshots)
    facts = replace(facts, unread=unread, plan=plan, owed=_owed(place), services=_services(place))
    if as_json:
        emit({**store_fields(place), **_document(repository, facts, disk)}, place)
        return
    _write(output, page(facts, time.time()))
    without = "" if can_draw() else f", without charts; to get them: {MISSING}"
    say(f"{output!s}: {amount(len(contents), 'snapshot')}{without}")
    if unread:
        say(f"without {amount(unread, 'snapshot')} that only a newer casnap can read")
    print_requests(place.requests)


def _facts_of(snapshot: Snapshot, use: Usage, *, is_recent: bool) -> SnapshotFacts:
    contents = snapshot.contents
    row, stats = contents.row, contents.row.stats
    marks = (("rewound", row.is_rewound), ("thinned", row.is_thinned))
    try:
        metadata = contents.metadata
    except DamagedError:
        metadata = {}
    norms, unhealthy = norms_of(_health_of(snapshot) if is_recent else {})
    return SnapshotFacts(
        contents.name,
        row.time,
        stats.seconds,
        stats.entries,
        stats.logical_bytes,
        stats.new_bytes,
        use.stored_bytes,
        use.unique_bytes,
        metrics_in(metadata),
        not_finite_in(metadata),
        norms,
        # What the take was asked to ignore does not count.
        unhealthy if row.unhealthy else {},
        (*row.tags, *(note for note, is_so in marks if is_so), *row.awaited),
    )


def _health_of(snapshot: Snapshot) -> dict[str, TensorHealth]:
    try:
        return {} if snapshot.unhealthy is None else snapshot.health()
    except (DamagedError, SnapshotNotFoundError):
        return {}


def _plan(
    place: Store,
    prefix: str | None,
    retention: Retention,
    frees: Callable[[frozenset[str]], int],
) -> Plan:
    """Return the snapshots that no rule keeps.

    Args:
        place: The store.
        prefix: The folder of the runs that the rules apply to; None for all.
        retention: The rules.
        frees: Returns how many bytes are freed, given the full names of deleted snapshots.
    """
    names = [
        verdict.name for verdict in place.prune(retention, prefix=prefix, dry_run=True).deleted
    ]
    full = tuple(map(view_of(place).full_of, names))
    words = ("keep_last", "keep_every", "keep_within", "keep_best")
    given = {word: value for word in words if (value := getattr(retention, word))}
    rules = ", ".join(f"{word}={value}" for word, value in given.items())
    return Plan(rules, full, frees(frozenset(full)) if full else 0)


def _owed(place: Store) -> Owed | None:
    try:
        lag = mirror_lag(place)
    except MirrorError as e:
        return Owed("The mirror", (), 0, str(e))
    if lag is None:
        return None
    status = lag.status
    trouble = "No process of this host copies to it." if status is None else ""
    if status is not None and status.error:
        trouble = f"It fails since {moment(status.since)}: {status.error}"
    refused = {} if status is None else status.refused
    trouble = "; ".join([trouble] * bool(trouble) + [f"{n}: {why}" for n, why in refused.items()])
    return Owed(lag.uri, tuple(lag.lacking), lag.new_bytes, trouble)


def _services(place: Store) -> tuple[Service, ...]:
    return tuple(
        Service(
            state.label,
            " ".join(filter(None, (state.folder, f"#{state.tag}" if state.tag else "newest"))),
            state.serving.name if state.serving else "",
            state.serving.number if state.serving else 0,
            state.noted_time,
            state.is_silent or state.is_doubtful,
        )
        for state in place.followers()
    )


def _sizes_in(snapshot: Snapshot) -> Iterator[tuple[str, int]]:
    """Yield the path and the bytes of each tensor and value of a snapshot."""
    contents = snapshot.contents
    for tree in contents.manifest.trees():
        for path, entry in contents.tree(tree.digest).items():
            if not isinstance(entry, ContainerEntry):
                yield tree.label + path, entry.payload.nbytes


def _document(repository: Repository, facts: Facts, disk: DiskUsage) -> dict[str, Any]:
    return {
        "chunk_size_bytes": facts.chunk_size,
        "snapshot_count": facts.snapshots,
        "unread_count": facts.unread,
        "logical_bytes": facts.logical_bytes,
        **disk_fields(repository, disk),
        "live_bytes": facts.space.live_bytes,
        "runs": list(map(_run_fields, facts.runs)),
        "more_run_count": facts.more_runs,
        "plan": facts.plan and asdict(facts.plan),
        "owed": facts.owed and asdict(facts.owed),
        "services": [
            {**asdict(each), "noted_time": json_time(each.noted_time)} for each in facts.services
        ],
    }


def _run_fields(run: RunFacts) -> dict[str, Any]:
    return {
        "folder": run.folder,
        "snapshots": list(map(_snapshot_fields, run.snapshots)),
        "changes": {
            "names": run.changes.snapshots,
            "modules": [".".join(path) for path in run.changes.modules],
            "shares": run.changes.shares,
        },
        "module_bytes": {".".join(path): nbytes for path, nbytes in run.sizes.items()},
    }


def _snapshot_fields(snapshot: SnapshotFacts) -> dict[str, Any]:
    return {**report_fields(snapshot, "entries"), "time": json_time(snapshot.time)}


def _check_replaceable(output: Path) -> None:
    """Check that the output would replace nothing, or an earlier report.

    Raises:
        CommandError: Another file is there, or the folder of the output does not exist.
    """
    try:
        with output.open("rb") as file:
            begins = file.read(len(HEAD))
    except FileNotFoundError:
        if not is_folder(output.absolute().parent):
            raise CommandError(f"{quote(str(output.parent))} is not a folder") from None
        return
    if begins != HEAD.encode():
        raise CommandError(
            f"{quote(str(output))} exists and is not a report; choose another with -o"
        )


def _write(output: Path, content: str) -> None:
    """Write a file under another name, then rename it, so that it appears whole."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
