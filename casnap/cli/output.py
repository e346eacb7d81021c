"""Print the output of commands: tables for people, JSON for programs, progress bars on terminals.

Names, paths and metadata come from a store, and could contain control sequences for the terminal.
So they are printed escaped.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import IO, TYPE_CHECKING, Any

import click

from casnap.runtime.progress import Progress, ProgressBars
from casnap.runtime.sizes import amount
from casnap.runtime.sizes import size as size
from casnap.view import repository_of

if TYPE_CHECKING:
    from casnap.store import Store

JSON_VERSION = 1
"""The version of the output of ``--json``: docs/json.md. It grows if a key goes or changes."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


class CommandError(click.ClickException):
    """An error with a message; ends the command with status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"casnap: {safe(self.message)}", file=file, err=True)


def say(line: str = "", *, err: bool = False) -> None:
    """Print one line, escaped, on stdout or stderr. All text of commands goes through this.

    Args:
        line: The line.
        err: Whether it goes to stderr.
    """
    click.echo(safe(line), err=err)


# --- text -------------------------------------------------------------------------------------


def safe(text: str) -> str:
    """Return a text with all unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def quote(text: str) -> str:
    """Return a text in quotes, with all unprintable characters escaped."""
    return f"'{safe(text)}'"


def moment(seconds: float) -> str:
    """Return a time as text: local date and time, and the time zone's offset from UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def requests_text(requests: Mapping[str, int]) -> str:
    """Return the number of requests of each kind as one line of text; empty if there are none."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(requests.items()))


def summary(
    metadata: dict[str, Any] | None,
    tags: Sequence[str] = (),
    *,
    holds: Sequence[str] = (),
    thinned: bool = False,
    unhealthy: int | None = None,
    unknown_features: Sequence[str] = (),
    brief: bool = False,
) -> str:
    """Return the tags, the metadata and the state of a snapshot in one line.

    Args:
        metadata: The metadata; None if they are damaged.
        tags: The tags.
        holds: Why no rule may delete the snapshot, in words.
        thinned: Whether it is thinned.
        unhealthy: How many of its tensors have NaN or infinite elements; None if that is unknown.
        unknown_features: Features of it that this version does not know.
        brief: Whether to leave out the metadata about speed.
    """
    words = [f"#{tag}" for tag in tags]
    if unknown_features:
        words.append(f"(update casnap to read it: {', '.join(unknown_features)})")
    if thinned:
        words.append("(thinned)")
    if unhealthy:
        words.append(f"(NaN or infinite: {amount(unhealthy, 'tensor')})")
    words += [f"({hold})" for hold in holds]
    if metadata is None:
        words.append("(metadata damaged)")
    for key, value in sorted((metadata or {}).items(), key=_asked_first):
        if brief and key.endswith(_LAST):
            words.append("…")
            break
        text = f"{value:.6g}" if isinstance(value, float) else str(json_values(value, json=False))
        words.append(f"{key}={text}")
    return safe(" ".join(words))


MUST = ("step", "epoch", "loss", "best_metric")
"""The keys of metadata that a table shows also on a narrow terminal."""
_FIRST = (*MUST, "eval_loss")
_LAST = ("_runtime", "_per_second", "total_flos")


def _asked_first(item: tuple[str, Any]) -> tuple[bool, int]:
    """Return a key that sorts metadata: progress and losses first, speeds last."""
    key, _ = item
    return key.endswith(_LAST), _FIRST.index(key) if key in _FIRST else len(_FIRST)


_LEAST_CUT = 24
"""A column keeps at least this many characters when it is cut to make room for others."""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: set[str],
    cut: str = "",
    *,
    least: Callable[[], int] = int,
    wide: bool = False,
) -> None:
    """Print rows in columns; cut lines that are too long for the terminal.

    Args:
        header: The titles of the columns.
        rows: The cells.
        numbers: The titles of the columns to align right.
        cut: The title of the column whose texts are cut first. If that is not enough, the last
            columns are left out.
        least: Returns how many characters of the texts in the ``cut`` column must be shown, even if
            last columns are left out for them.
        wide: Whether to cut nothing.
    """
    rows = [tuple(map(safe, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    right = [title in numbers for title in header]
    most = 0 if wide else _width()
    if most and cut in header:
        i = header.index(cut)
        whole = widths[i]
        room = most + 2 - sum(width + 2 for width in widths) + whole
        if room < whole:
            must = min(whole, max(_LEAST_CUT, least()))
            while room < must and len(widths) > i + 1:
                room += widths.pop() + 2
            widths[i] = min(whole, max(must, room))

    def fitted(cell: str, width: int) -> str:
        return cell if len(cell) <= width else f"{cell[: width - 1]}…"

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if flush else fitted(cell, width).ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=False)
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
    """Print how many things ``--limit`` has left out; nothing if it has left out none."""
    if count > 0:
        say(f"… and {amount(count, thing)} more (--limit)")


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings: facts that do no harm yet."""
    for text in warnings:
        say(f"warning: {text}")


def print_requests(requests: Mapping[str, int]) -> None:
    """Print how many requests were made, by kind; nothing if there were none."""
    if requests:
        say(f"{amount(sum(requests.values()), 'request')}: {requests_text(requests)}")


# --- questions --------------------------------------------------------------------------------


def confirm(question: str, instead: str, lines: Sequence[str] = ()) -> None:
    """Ask a question, and end the command with status 1 unless the answer is yes.

    Args:
        question: The question.
        instead: The options that answer the question, for an error without a terminal.
        lines: The things that the question is about, printed above it.

    Raises:
        click.UsageError: There is no terminal.
    """
    if not sys.stdin.isatty():
        raise click.UsageError(f"there is no terminal to ask on; pass {instead}")
    for line in lines:
        say(line, err=True)
    if not click.confirm(safe(question), err=True):
        raise CommandError("nothing was done")


# --- JSON -------------------------------------------------------------------------------------


def emit(document: dict[str, Any], *stores: Store) -> None:
    """Print one JSON document, in ASCII, so that it holds no control sequences.

    docs/json.md lists its keys, and has the rules for their names.

    Args:
        document: The document.
        stores: The stores that the document is about. If any is remote, the document gets the
            number of requests.
    """
    import json

    import msgspec

    backends = [repository_of(store).backend for store in stores]
    backends = list({id(backend): backend for backend in backends}.values())
    requests = sum((Counter(backend.requests) for backend in backends), Counter[str]())
    if requests:
        document = {**document, "requests": dict(requests)}
    # msgspec indents, since json's own indentation is several times slower.
    versioned = {"version": JSON_VERSION, **json_values(document)}
    click.echo(msgspec.json.format(json.dumps(versioned), indent=2))


def json_time(seconds: float | None) -> str | None:
    """Return a time in ISO 8601 and UTC for JSON, such as ``2026-01-31T12:00:00.250000Z``."""
    if seconds is None:
        return None
    try:
        utc = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return utc.isoformat(timespec="microseconds").replace("+00:00", "Z")


def report_fields(report: object, *numbers: str) -> dict[str, Any]:
    """Return all attributes of a report as fields for JSON.

    Args:
        report: The report.
        numbers: The attributes that count things: ``packs`` becomes ``pack_count`` in JSON.
    """
    names = {name: f"{_singular(name)}_count" for name in numbers}
    return {names.get(name, name): value for name, value in vars(report).items()}


def _singular(thing: str) -> str:
    return f"{thing[:-3]}y" if thing.endswith("ies") else thing.removesuffix("s")


def json_values(value: Any, *, json: bool = True) -> Any:
    """Convert a value from a store to types that JSON can hold.

    Args:
        value: The value.
        json: Whether NaN and infinities become None, since JSON cannot hold them.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) or not json else None
    if isinstance(value, dict):
        return {str(key): json_values(child, json=json) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(child, json=json) for child in value]
    return value.hex() if isinstance(value, bytes) else repr(value)


# --- progress ---------------------------------------------------------------------------------


@contextmanager
def progress_bars(requests: Callable[[], Mapping[str, int]] = dict) -> Iterator[Progress | None]:
    """Yield a callback that shows the progress of long work; None unless stderr is a terminal.

    Args:
        requests: Returns how many requests were made so far, by kind, for the bars to show.
    """
    if not sys.stderr.isatty():
        yield None
        return
    bars = ProgressBars(lambda: requests_text(requests()), leave=False)
    try:
        yield bars
    finally:
        bars.close()
