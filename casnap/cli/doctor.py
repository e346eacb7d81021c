"""``casnap doctor``."""

from __future__ import annotations

import sys
import textwrap

import click

from casnap.cli.arguments import options_for, reading_options
from casnap.cli.option_types import duration_or_none
from casnap.cli.output import emit, say
from casnap.diagnosis.doctor import doctor as diagnose
from casnap.diagnosis.report import DoctorRow

_WIDTH = 80
_NAME, _VERDICT = 21, 9


@click.command()
@click.argument("place", metavar="FOLDER|URI")
@click.option(
    "--wait",
    type=duration_or_none,
    metavar="TIME",
    help="How long to look for another host that runs this, too [20s; on a disk of this host: 0].",
)
@reading_options
def doctor(place: str, wait: float | None, as_json: bool) -> None:
    """Find out whether a folder or a bucket can hold a store, and how fast it is.

    The exit status is 1 if no store is safe there. "fair" means that something works at a cost; the
    advice says at which.

    Run it on two hosts at once, with the same folder: they find each other there, and try together
    what one host alone cannot.

    It takes a minute at most; a --wait of more than 20 seconds adds to that. It writes into the
    folder .casnap-doctor there, and deletes it at the end. If it is killed, delete that folder.
    """
    report = diagnose(
        place,
        wait=wait,
        storage_options=options_for(place),
        progress=_say_what_is_tried if sys.stderr.isatty() else None,
    )
    if as_json:
        emit(
            {
                "place": report.place,
                "verdict": report.verdict,
                "summary": report.summary,
                "other_host": report.other_host,
                "seconds": report.seconds,
                "rows": [row._asdict() for row in report.rows],
            }
        )
    else:
        for row in report.rows:
            _print(row)
        _say(report.summary, "", "")
    if not report.ok:
        raise click.exceptions.Exit(1)


def _say_what_is_tried(name: str) -> None:
    click.echo(f"\r\x1b[Ktrying: {name}\r", err=True, nl=False)


def _print(row: DoctorRow) -> None:
    """Print a row in lines that fit a terminal: the finding, and below it the advice."""
    indent = " " * (_NAME + _VERDICT)
    head = f"{row.name:{_NAME}}{row.verdict:{_VERDICT}}"
    _say(row.finding, head, indent)
    _say(row.advice, indent, indent)


def _say(text: str, first: str, indent: str) -> None:
    """Print a text in lines, broken between words; an empty text prints nothing.

    Args:
        text: The text.
        first: The beginning of the first line.
        indent: The beginning of all others.
    """
    for line in textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
    ):
        say(line)
