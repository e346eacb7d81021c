"""Output of commands: tables for people, JSON for programs, progress bars on terminals.

Names, paths and metadata come from a store and could hold control sequences of the terminal, so
they are printed escaped.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import IO, Any

import click

from casnap.runtime.progress import Progress
from casnap.runtime.sizes import size as size

JSON_VERSION = 1
"""The version of what ``--json`` prints: docs/json.md. A key that goes or changes makes another."""

PATIENCE = 0.5
"""Seconds that work may take before a progress bar appears."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class CommandError(click.ClickException):
    """An error with a message; ends the command with status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"casnap: {safe(self.message)}", file=file, err=True)


# --- text -------------------------------------------------------------------------------------


def safe(text: str) -> str:
    """Return a text with all unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def quoted(text: str) -> str:
    """Return a text escaped and in quotes."""
    return f"'{safe(text)}'"


def moment(seconds: float) -> str:
    """Return a time as local date and time, and the zone as hours and minutes from UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def counted(count: int, thing: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    if count != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("ry") else f"{thing}s"
    return f"{count:,} {thing}"


def kinds(requests: Mapping[str, int]) -> str:
    """Return numbers of requests by kind in one line; empty if there are none."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(requests.items()))


def described(
    metadata: dict[str, Any] | None, tags: Sequence[str] = (), *, unmirrored: bool = False
) -> str:
    """Return tags and metadata (None if they are damaged) in one line."""
    words = [f"#{tag}" for tag in tags]
    if unmirrored:
        words.append("(not mirrored yet)")
    if metadata is None:
        words.append("(metadata damaged)")
    for key, value in (metadata or {}).items():
        text = f"{value:.6g}" if isinstance(value, float) else str(plain(value, json=False))
        words.append(f"{key}={text}")
    return safe(" ".join(words))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[str]) -> None:
    """Print rows in columns.

    Args:
        header: The titles of the columns.
        rows: The cells, escaped.
        numbers: The titles of the columns to align right.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    right = [title in numbers for title in header]
    most = _width()

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        text = "  ".join(padded).rstrip()
        return f"{text[: most - 1]}…" if 0 < most < len(text) else text

    click.secho(line(header), bold=True)
    click.echo("\n".join(map(line, rows)))


def _width() -> int:
    """Return the width of the terminal on stdout; 0 if stdout is not a terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def print_rest(count: int, thing: str) -> None:
    """Say how many things were not printed, if any, because of ``--limit``."""
    if count > 0:
        click.echo(f"… and {counted(count, thing)} more (--limit)")


def print_warnings(warnings: Sequence[str]) -> None:
    """Print what is not wrong now, but will hurt."""
    for text in warnings:
        click.echo(f"warning: {safe(text)}")


# --- questions --------------------------------------------------------------------------------


def check_can_ask(instead: str) -> None:
    """Check that there is a terminal to ask on.

    Raises:
        click.UsageError: There is no terminal; the message says what to pass instead.
    """
    if not sys.stdin.isatty():
        raise click.UsageError(f"there is no terminal to ask on; pass {instead}")


def confirm(question: str) -> None:
    """Ask a question, and end the command with status 1 unless the answer is yes."""
    if not click.confirm(question, err=True):
        raise CommandError("nothing was done")


# --- JSON -------------------------------------------------------------------------------------


def emit(document: dict[str, Any]) -> None:
    """Print one JSON document, in ASCII, so that it holds no control sequences.

    docs/json.md lists its keys, and has the rules for their names.
    """
    import json

    import msgspec

    # json's own indentation is several times slower.
    whole = {"version": JSON_VERSION, **plain(document)}
    click.echo(msgspec.json.format(json.dumps(whole), indent=2))


def json_time(seconds: float | None) -> str | None:
    """Return a time as ISO 8601 in UTC, such as ``2026-01-31T12:00:00.250000Z``, for JSON."""
    if seconds is None:
        return None
    try:
        found = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")


def counts(report: object, *things: str) -> dict[str, int]:
    """Return attributes of a report that are numbers of things, for JSON.

    Args:
        report: The report.
        things: The attributes, such as ``packs``, which JSON calls ``pack_count``.
    """
    return {f"{_singular(thing)}_count": getattr(report, thing) for thing in things}


def _singular(thing: str) -> str:
    return f"{thing[:-3]}y" if thing.endswith("ies") else thing.removesuffix("s")


def plain(value: Any, *, json: bool = True) -> Any:
    """Return a value from a store in types that JSON, or else print, can show."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) or not json else None
    if isinstance(value, dict):
        return {str(key): plain(child, json=json) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, json=json) for child in value]
    return value.hex() if isinstance(value, bytes) else repr(value)


# --- progress ---------------------------------------------------------------------------------


@contextmanager
def phases(requests: Callable[[], Mapping[str, int]] = dict) -> Iterator[Progress | None]:
    """Give what long work reports to: on a terminal, a bar on stderr for each phase; else None.

    A bar appears only where the phase is not done within :data:`PATIENCE`.

    Args:
        requests: Returns how many requests were made so far, by kind, for the bars to show.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bars: dict[str, _Bar] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in bars:
            close()
            bars[what] = _Bar(what, requests, of_bytes=what in _OF_BYTES)
        bars[what](done, total)

    def close() -> None:
        while bars:
            bars.popitem()[1].close()

    try:
        yield report
    finally:
        close()


_OF_BYTES = {"copying", "reading", "storing", "writing"}


class _Bar:
    """A progress bar that appears after :data:`PATIENCE`."""

    def __init__(
        self, what: str, requests: Callable[[], Mapping[str, int]], *, of_bytes: bool
    ) -> None:
        self._what = what
        self._requests = requests
        self._of_bytes = of_bytes
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() - self._started < PATIENCE:
                return
            self._open(total)
        made = kinds(self._requests())
        self._bar.update(self._task, completed=done, total=total, requests=made)

    def _open(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import (
            Progress as Bar,
        )

        amount = DownloadColumn() if self._of_bytes else MofNCompleteColumn()
        self._bar = Bar(
            "{task.description}",
            BarColumn(),
            amount,
            TimeRemainingColumn(),
            TextColumn("{task.fields[requests]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._what, total=total, requests="")
        self._bar.start()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
