"""``casnap cp``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import click
from click.core import ParameterSource

from casnap.backends import Backend
from casnap.backends.uris import store_uri
from casnap.cli.arguments import (
    is_exclusive,
    open_or_above,
    options_for,
    options_of,
    writing_options,
)
from casnap.cli.option_types import duration
from casnap.cli.output import (
    CommandError,
    emit,
    print_requests,
    progress_bars,
    report_fields,
    say,
    size,
)
from casnap.cli.shell_command import EndingSignals
from casnap.errors import NotAStoreError
from casnap.format.names import check_name
from casnap.runtime.sizes import amount
from casnap.storage import Location
from casnap.store import NewStore, Store
from casnap.transfer.continuous import ContinuousCopier, Pair
from casnap.transfer.copy_jobs import CopyJob, CopyOptions, CopyReport
from casnap.transfer.copy_selection import check_pair, choose
from casnap.view import repository_of, view_of

EXAMPLES = """\
\b
Examples:
  casnap cp /ckpts s3://bucket/ckpts                      all snapshots
  casnap cp /ckpts/run1 s3://bucket/ckpts --dry-run       those of one run
  casnap cp s3://bucket/ckpts/step_100 /scratch/ckpts     one
  casnap cp /ckpts/run1/step_100 /scratch/ckpts/best      one, as best of that store, if it exists
  casnap cp /ckpts/run1 s3://bucket/ckpts --follow        and each that is taken from now on
"""


@click.command(epilog=EXAMPLES)
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--dry-run", is_flag=True, help="Only show what would be sent.")
@click.option("--follow", is_flag=True, help="Keep running, and copy each new snapshot.")
@click.option(
    "--interval", type=duration, default="5s", metavar="TIME", help="How often to look [5s]."
)
@click.option(
    "--give-up-after",
    type=duration,
    metavar="TIME",
    help="End --follow when it has failed for so long; by default never.",
)
@writing_options
def cp(
    source: str,
    destination: str,
    dry_run: bool,
    follow: bool,
    interval: float,
    give_up_after: float | None,
    as_json: bool,
) -> None:
    """Copy snapshots into another store, and send only the chunks that it lacks.

    SRC is a store, a snapshot in it, or a folder of snapshots. DST is a store, or the new name of
    the snapshot or folder in one. Snapshots keep their metadata, tags and commit ids. A snapshot
    that DST has already is not copied again. Repeat an interrupted copy to resume it.

    If there is no store, DST becomes one. But if SRC is one snapshot, and DST ends in its name, the
    folder above DST becomes the store, as in a take.

    With --follow, the command copies the snapshots of SRC, and then each new one, until SIGINT,
    SIGTERM or SIGHUP. It logs and retries failures of either side. A copy that is deleted at DST is
    not made again.
    """
    _check_usage(follow=follow, dry_run=dry_run)
    if store_uri(source) is None and store_uri(destination) is None:
        options_for(destination)  # raises if --endpoint-url is given and both are local
    if follow:
        _follow(source, destination, interval, give_up_after, as_json=as_json)
        return
    sources, destinations = list[Backend](), list[Backend]()
    origin, name = open_or_above(source, sources)
    single = name if name in origin else None
    place, rename, is_new = _destination(destination, destinations, single, origin.chunk_size)
    with progress_bars() as progress:
        report = origin.copy(name, to=place, rename=rename, dry_run=dry_run, progress=progress)
    by_side = [_requests(backends) for backends in (sources, destinations)]
    if as_json:
        requests = dict(sum(map(Counter, by_side), Counter[str]()))
        counts = {"requests": requests} if requests else {}
        about = {"source": origin.uri, "destination": place.uri, "made_store": is_new}
        emit({**about, **_facts_of(report), **counts})
        return
    if is_new:
        _show_new(place.uri, single, dry_run=dry_run)
    _show(report, place.uri)
    for requests in by_side:
        print_requests(requests)


def _check_usage(*, follow: bool, dry_run: bool) -> None:
    source = click.get_current_context().get_parameter_source
    for option in ("interval", "give_up_after"):
        if not follow and source(option) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{option.replace('_', '-')} is for --follow")
    if follow and dry_run:
        raise click.UsageError("--dry-run shows what one copy would send; --follow copies for ever")


def _follow(
    source: str, destination: str, interval: float, give_up_after: float | None, *, as_json: bool
) -> None:
    """Copy new snapshots until a signal comes; then print how many were copied."""

    def open_pair() -> Pair:
        origin, name = open_or_above(source, [])
        single = name if name in origin else None
        to, rename, is_new = _destination(destination, [], single, origin.chunk_size)
        place = to.make()
        if is_new and not as_json:
            _show_new(place.uri, single, dry_run=False)
        check_pair(repository_of(origin), repository_of(place))

        def jobs() -> list[CopyJob]:
            snapshots = choose(repository_of(origin), origin.prefix, name, rename)
            full_of = view_of(place).full_of
            return [s._replace(new_name=check_name(full_of(s.new_name))) for s in snapshots]

        copy_options = CopyOptions(hooks=view_of(place).hooks, gets_all=True)
        return Pair(repository_of(origin), repository_of(place), jobs, copy_options)

    names: list[str] = []
    copier = ContinuousCopier(open_pair)
    EndingSignals()
    try:
        for report in copier.follow(interval, give_up_after):
            names += report.copied
            if not as_json:
                say(f"copied {', '.join(report.copied)}: {_sent_text(report)}")
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    refused = copier.refused
    result = {"copied": names, "refused": refused}
    if as_json:
        emit({"source": source, "destination": destination, **result})
    else:
        say(f"{amount(len(names), 'snapshot')} copied")
    if refused:
        raise CommandError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))


def _facts_of(report: CopyReport) -> dict[str, Any]:
    return report_fields(report, "sent_chunks", "present_chunks")


def _requests(backends: list[Backend]) -> dict[str, int]:
    """Return how many requests the backends made, by kind, also those that looked for a store."""
    return dict(sum((Counter(backend.requests) for backend in backends), Counter[str]()))


def _destination(
    uri: str, backends: list[Backend], name: str | None, chunk_size: int
) -> tuple[Store, str | None, bool]:
    """Return the store to copy to, the new name or None, and whether the store is new.

    Args:
        uri: The destination.
        backends: A list that gets the backends in use, so that the caller can count their requests.
        name: The name of the snapshot, if only one is copied; else None.
        chunk_size: The chunk size of a store that is made.
    """
    try:
        return *open_or_above(uri, backends, is_destination=True), False
    except NotAStoreError:
        place, rename = _new_destination(uri, name)
    backend = Location.of_store(place, options_of(place)).backend
    backends.append(backend)
    # The store gets the backend, so that the requests that make it are counted.
    to = place if backend.folder is not None else backend
    return Store(to, create=NewStore(chunk_size=chunk_size), exclusive=is_exclusive()), rename, True


def _new_destination(uri: str, name: str | None) -> tuple[str, str | None]:
    """Return where to make the store to copy to, and the name that DST gives the snapshot, or None.

    Args:
        uri: The destination, at which there is no store.
        name: The name of the snapshot, if only one is copied; else None.
    """
    remote = store_uri(uri)
    if remote is not None and remote.name:
        return remote.store, remote.name
    base_name = PurePosixPath(uri).name
    if name is None or base_name != PurePosixPath(name).name:
        return uri, None
    # As for a take, the path names the snapshot, and its parent becomes the store.
    place = str(Path(uri).parent) if remote is None else remote.as_snapshot().store
    return place, base_name


def _show_new(uri: str, name: str | None, *, dry_run: bool) -> None:
    """Print that a store is made. For a single snapshot, also print how to copy it by another name.

    Args:
        uri: The store.
        name: The name of the snapshot, if only one is copied; else None.
        dry_run: Whether nothing is copied.
    """
    would = "would become" if dry_run else "is"
    advice = f"; to copy it into {Path(uri).parent} by another name, make that a store first"
    is_renamed = name is not None and "://" not in uri
    say(f"{uri} {would} a new store{advice if is_renamed else ''}")


def _show(report: CopyReport, uri: str) -> None:
    would = "would be " if report.dry_run else ""
    for name in report.copied:
        say(f"{would}copied {name}")
    for name in report.gone:
        say(f"{name} was deleted meanwhile, so it was not copied", err=True)
    snapshots = amount(len(report.copied), "snapshot")
    present_text = f", {len(report.present):,} there already" if report.present else ""
    say(f"{uri}: {snapshots} {would}copied{present_text}")
    say(_sent_text(report))


def _sent_text(report: CopyReport) -> str:
    would = "would be " if report.dry_run else ""
    text = f"{size(report.sent_bytes)} in {amount(report.sent_chunks, 'chunk')} {would}sent"
    shared = f"{size(report.present_bytes)} in {amount(report.present_chunks, 'chunk')}"
    return f"{text}, {shared} there already"
