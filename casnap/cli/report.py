"""``casnap report``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from casnap.cli.arguments import endpoint_option, open_store, print_requests, snapshots_of
from casnap.cli.output import Failure, counted, phases, quoted, safe
from casnap.report.facts import gather
from casnap.report.page import HEAD, page


@click.command()
@click.argument("store", required=False)
@click.argument("prefix", required=False)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="The file to write. A report that is there is replaced, nothing else.",
)
@click.option(
    "--last",
    type=click.IntRange(min=1, max=1000),
    default=60,
    show_default=True,
    metavar="N",
    help="Compare the last N snapshots of each run with the one before.",
)
@endpoint_option
def report(store: str | None, prefix: str | None, output: Path, last: int) -> None:
    """Write a page that shows snapshots over time, what changed where, and what takes up space.

    The page is one HTML file that loads nothing. It is made from sizes, digests and metadata: no
    tensor is read.
    """
    _check_replaceable(output)
    place = open_store(store)
    found = [snapshot.contents for snapshot in snapshots_of(place, prefix)]
    with phases(lambda: place.requests) as progress:
        facts = gather(place.objects, found, last, progress)
    _write(output, page(facts, time.time()))
    click.echo(f"{safe(str(output))}: {counted(len(found), 'snapshot')}")
    print_requests(place)


def _check_replaceable(output: Path) -> None:
    """Check that nothing but an earlier report would be lost.

    Raises:
        Failure: Another file is there.
    """
    try:
        with output.open("rb") as file:
            begins = file.read(len(HEAD))
    except FileNotFoundError:
        if not output.absolute().parent.is_dir():
            raise Failure(f"{quoted(str(output.parent))} is no folder") from None
        return
    if begins != HEAD.encode():
        raise Failure(f"{quoted(str(output))} exists and is no report; name another file with -o")


def _write(output: Path, content: str) -> None:
    """Put a file in place whole."""
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        beside.write_text(content, encoding="utf-8")
        beside.replace(output)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
