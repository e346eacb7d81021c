"""``casnap average``."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from math import fsum

import click

from casnap.cli.arguments import open_store, store_fields, writing_options
from casnap.cli.output import CommandError, emit, progress_bars, safe, say
from casnap.runtime.sizes import amount, size
from casnap.store import Store

EXAMPLES = """\
\b
Examples:
  casnap average /ckpts 'run1/*' --last 8 --into means/run1
  casnap average /ckpts 'run1/*' --ema 0.99 --into means/run1-ema
  casnap average /ckpts base tuned --weights=-0.5,1.5 --into further
"""


class _Numbers(click.ParamType[list[float]]):
    name = "numbers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        try:
            return [float(number) for number in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is no list of numbers, such as 0.5,0.5", param, ctx)


@click.command(epilog=EXAMPLES)
@click.argument("store")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--into", metavar="NAME", required=True, help="The name of the new snapshot.")
@click.option(
    "--last", type=click.IntRange(min=1), metavar="N", help="Only the last N of these snapshots."
)
@click.option(
    "--weights", type=_Numbers(), metavar="W,W,...", help="A number for each; equal by default."
)
@click.option(
    "--ema", type=click.FloatRange(0, 1), metavar="DECAY", help="A moving average, of this decay."
)
@click.option("--exact", is_flag=True, help="Sum in float64, not in float32.")
@click.option("--overwrite", is_flag=True, help="Replace a snapshot of this name.")
@writing_options
def average(
    store: str,
    names: tuple[str, ...],
    into: str,
    last: int | None,
    weights: list[float] | None,
    ema: float | None,
    exact: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the mean of snapshots as a new snapshot: of their weights, element by element.

    NAME may be a pattern, such as 'run1/*', for all snapshots that match, in the order in which
    they were taken; but neither for averages nor for what `casnap rewind` has moved aside. A
    snapshot that is named twice counts once. Everything but the weights, such as moments and
    buffers, comes from the last snapshot named. The new snapshot is restored, pulled and exported
    as any other.
    """
    place = open_store(store)
    chosen = _chosen(place, names, into)[-last if last else 0 :]
    try:
        with progress_bars() as progress:
            report = place.average(
                chosen,
                into,
                weights=weights,
                decay=ema,
                exact=exact,
                overwrite=overwrite,
                progress=progress,
            )
    except ValueError as e:
        raise click.UsageError(safe(str(e))) from e
    if as_json:
        facts = {
            "name": report.name,
            "of": report.of,
            "weights": report.weights,
            "averaged_count": report.averaged,
            "equal_count": report.equal,
            "kept": [{"entry": path, "why": why} for path, why in report.kept.items()],
            "new_bytes": report.new_bytes,
            "seconds": report.seconds,
        }
        emit({**store_fields(place), **facts}, place)
        return
    for name, weight in zip(report.of, report.weights, strict=True):
        say(safe(f"{weight:8.4g}  {name}"))
    if abs(fsum(report.weights) - 1) > 1e-6:
        say(f"the weights sum to {fsum(report.weights):.4g}")
    say(safe(f"{report.name}: the mean of {amount(report.averaged, 'tensor')}"))
    if report.equal:
        say(f"{amount(report.equal, 'tensor')} equal in all snapshots")
    for why, count in Counter(report.kept.values()).most_common():
        say(safe(f"{amount(count, 'tensor')} of the last snapshot: {why}"))
    say(f"{size(report.new_bytes)} new")


def _chosen(store: Store, names: tuple[str, ...], into: str) -> list[str]:
    """Return the names of the snapshots that the arguments select, each once.

    Args:
        store: The store.
        names: Names and patterns.
        into: The name of the new snapshot. Patterns match neither this name nor averages, nor what
            a rewind has moved aside.

    Raises:
        CommandError: A pattern matches no snapshot.
    """
    known = {snapshot.name: snapshot for snapshot in store.snapshots()}
    chosen: list[str] = []
    for name in names:
        found = [name] if name in known or not set(name) & set("*?[") else []
        found = found or [
            each
            for each, snapshot in known.items()
            if fnmatchcase(each, name)
            and each != into
            and not snapshot.row.is_rewound
            and "average_of" not in snapshot.metadata.user
        ]
        if not found:
            raise CommandError(
                f"no snapshot of {store.uri} matches {name!r}, but for averages and what a rewind "
                "has moved aside"
            )
        chosen += [each for each in found if each not in chosen]
    return chosen
