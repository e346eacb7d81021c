"""``casnap report``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from casnap.backends.local_files import is_folder
from casnap.cli.arguments import open_store, reading_options, snapshots_of, store_fields
from casnap.cli.garbage import disk_fields
from casnap.cli.output import (
    CommandError,
    emit,
    json_time,
    print_requests,
    progress_bars,
    quote,
    report_fields,
    say,
)
from casnap.comparing.diff import diff
from casnap.errors import DamagedError
from casnap.format.entries import ContainerEntry
from casnap.maintenance.usage import DiskUsage, Usage, disk_usage, usage
from casnap.report.facts import Facts, RunFacts, SnapshotFacts, Space, gather, metrics_in
from casnap.report.page import HEAD, page
from casnap.runtime.environment import local_path
from casnap.runtime.sizes import amount
from casnap.storage import Contents, GcOptions, Repository, collect
from casnap.view import repository_of


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
@reading_options
def report(store: str | None, prefix: str | None, output: Path, last: int, as_json: bool) -> None:
    """Write a page about a store: snapshots over time, what changed where, and what takes up space.

    The page is one HTML file that loads nothing. The command reads sizes, digests and metadata, and
    no tensor. --json prints the facts of the page, and writes no page.
    """
    output = Path(local_path(output))
    if not as_json:
        _check_replaceable(output)
    place = open_store(store)
    contents = [snapshot.contents for snapshot in snapshots_of(place, prefix)]
    repository = repository_of(place)
    with progress_bars(lambda: place.requests) as progress:
        usages = usage(contents, repository, progress)
        # A dry run of a collection counts the bytes that are needed, and changes nothing.
        live = collect(repository, GcOptions(grace=0, dry_run=True), progress).live_bytes
        disk = disk_usage(repository)
        space = Space(disk.nbytes, live, disk.saved_bytes)
        facts = gather(
            repository.backend.uri,
            repository.config.chunk_size,
            [(c, _facts_of(c, use)) for c, use in zip(contents, usages, strict=True)],
            space,
            _sizes_in,
            diff,
            last,
            progress,
        )
    if as_json:
        emit({**store_fields(place), **_document(repository, facts, disk)}, place)
        return
    _write(output, page(facts, time.time()))
    say(f"{output!s}: {amount(len(contents), 'snapshot')}")
    print_requests(place.requests)


def _facts_of(contents: Contents, use: Usage) -> SnapshotFacts:
    row, stats = contents.row, contents.row.stats
    marks = (("rewound", row.is_rewound), ("thinned", row.is_thinned))
    try:
        metrics = metrics_in(contents.metadata)
    except DamagedError:
        metrics = {}
    return SnapshotFacts(
        contents.name,
        row.time,
        stats.seconds,
        stats.entries,
        stats.logical_bytes,
        stats.new_bytes,
        use.stored_bytes,
        use.unique_bytes,
        metrics,
        (*row.tags, *(note for note, is_so in marks if is_so), *row.awaited),
    )


def _sizes_in(contents: Contents) -> Iterator[tuple[str, int]]:
    """Yield the path and the bytes of each tensor and value of a snapshot."""
    manifest = contents.manifest
    of_ranks = ((f"{rank}/", trees) for rank, trees in manifest.ranks.items())
    for prefix, trees in (("", manifest.shared), *of_ranks):
        for key, digest in trees.items():
            for path, entry in contents.tree(digest).items():
                if not isinstance(entry, ContainerEntry):
                    yield prefix + key + path, entry.payload.nbytes


def _document(repository: Repository, facts: Facts, disk: DiskUsage) -> dict[str, Any]:
    return {
        "chunk_size_bytes": facts.chunk_size,
        "snapshot_count": facts.snapshots,
        "logical_bytes": facts.logical_bytes,
        **disk_fields(repository, disk),
        "live_bytes": facts.space.live_bytes,
        "runs": list(map(_run_fields, facts.runs)),
        "more_run_count": facts.more_runs,
    }


def _run_fields(run: RunFacts) -> dict[str, Any]:
    return {
        "folder": run.folder,
        "snapshots": list(map(_snapshot_fields, run.snapshots)),
        "changes": {
            "names": run.changes.snapshots,
            "modules": run.changes.modules,
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
