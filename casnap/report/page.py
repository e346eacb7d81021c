"""Make the page of a report: one file, without scripts and without anything to load."""

from __future__ import annotations

import time
from collections.abc import Sequence

from casnap import __version__
from casnap.extending import size
from casnap.report import charts
from casnap.report.facts import Facts, RunFacts, SnapshotFacts
from casnap.report.markup import Markup, element, joined, text

HEAD = "<!DOCTYPE html>\n<!-- casnap report -->\n"
"""The beginning of each page. The command overwrites only files that begin with it."""
_MOST_METRICS = 12
_MOST_LISTED = 200
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --faint: #6b7683; --line: #d9dee5; --paper: #fff;
  --accent: 47, 107, 189; --tile: 47, 107, 189; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --faint: #93a0ae; --line: #38424e; --paper: #161b22;
    --accent: 98, 160, 240; --tile: 98, 160, 240; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1000px; margin: 0 auto; padding: 24px; }
h1 { font-size: 22px; overflow-wrap: anywhere; } h2 { font-size: 18px; margin: 40px 0 4px;
  overflow-wrap: anywhere; }
h3 { font-size: 14px; margin: 20px 0 0; font-weight: 600; } p { margin: 4px 0; }
.faint, svg text { color: var(--faint); fill: var(--faint); }
svg { display: block; margin: 2px 0 10px; min-width: 760px; }
svg text { font: 11px ui-monospace, monospace; }
svg .label { fill: var(--ink); }
.axis { stroke: var(--line); } .bar { fill: rgba(var(--accent), .75); }
.curve { stroke: rgb(var(--accent)); stroke-width: 1.5; } .dot { fill: rgb(var(--accent)); }
.heat { fill: rgba(var(--accent), var(--share)); stroke: var(--line); stroke-width: .4; }
.run { fill: none; stroke: hsl(var(--hue), 65%, 50%); stroke-width: 1.5; }
.key::before { content: ""; display: inline-block; width: 18px; height: 3px; margin: 0 8px 3px 0;
  background: hsl(var(--hue), 65%, 50%); }
.tile { stroke: var(--paper); fill: rgba(var(--tile), .2); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
.card b { display: block; font-size: 19px; font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; width: 100%;
  min-width: 760px; }
th, td { padding: 3px 10px 3px 0; text-align: left; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; }
"""


def page(facts: Facts, now: float) -> str:
    """Return the page, as HTML.

    Args:
        facts: The facts that it shows.
        now: The time, in seconds since the epoch.
    """
    body = joined(
        [
            element("h1", text(f"casnap store {facts.uri}")),
            element("p", text(_introduction(facts, now)), class_="faint"),
            _cards(facts),
            *_comparison(facts.runs),
            *(_run(run) for run in facts.runs),
            *([] if facts.runs else [element("p", text("There are no snapshots."))]),
            *_more_runs(facts.more_runs),
        ]
    )
    head = joined(
        [
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            # Names in a store are untrusted: this keeps the page from running or loading anything.
            Markup(
                '<meta http-equiv="Content-Security-Policy" '
                "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            ),
            element("title", text(f"casnap: {facts.uri}")),
            element("style", Markup(_STYLE)),
        ]
    )
    return f"{HEAD}{element('html', element('head', head), element('body', body), lang='en')}\n"


def _introduction(facts: Facts, now: float) -> str:
    return (
        f"Made {_moment(now)} by casnap {__version__}, from sizes and digests alone. Chunks of "
        f"{size(facts.chunk_size)}. Point at anything drawn to see its figures."
    )


def _cards(facts: Facts) -> Markup:
    stored = facts.space.stored_bytes
    garbage = max(0, stored - facts.space.live_bytes)
    saved = facts.logical_bytes / stored if stored else 0.0
    figures = [
        (f"{facts.snapshots:,}", "snapshots"),
        (size(facts.logical_bytes), "in their states"),
        (size(stored), "on the disk"),
        (f"{saved:.1f} ×", "states to disk"),
        (size(facts.space.saved_bytes), "saved by deltas and compression"),
        (size(garbage), "garbage, and gaps in packs"),
    ]
    cards = (
        element("div", element("b", text(b)), text(label), class_="card") for b, label in figures
    )
    return element("div", joined(cards), class_="cards")


def _run(run: RunFacts) -> Markup:
    names = [snapshot.name for snapshot in run.snapshots]
    sections = [
        element("h2", text(run.folder or "Snapshots")),
        element("p", text(_summary(run.snapshots)), class_="faint"),
        element("h3", text("Size of the state")),
        charts.bars(names, [snapshot.logical_bytes for snapshot in run.snapshots]),
        element("h3", text("Added by each take")),
        charts.bars(names, [snapshot.new_bytes for snapshot in run.snapshots]),
        element("h3", text("Held by each snapshot alone: what deleting it would free")),
        charts.bars(names, [snapshot.unique_bytes for snapshot in run.snapshots]),
        *_metrics(names, run.snapshots),
    ]
    if run.changes.snapshots:
        oldest, newest = run.changes.snapshots[0], run.changes.snapshots[-1]
        caption = f"{_span(oldest, newest)}, of what {newest} holds; the rest of that stayed equal"
        sections += [
            element("h3", text("What changed: the share of each module, against the one before")),
            element("p", text(caption), class_="faint"),
            charts.heat_map(run.changes),
        ]
    if run.sizes:
        sections += [
            element("h3", text(f"Sizes in {names[-1]}")),
            charts.treemap(run.sizes),
        ]
    return element("section", joined(sections), _table(run.snapshots))


def _summary(snapshots: Sequence[SnapshotFacts]) -> str:
    oldest, newest = snapshots[0], snapshots[-1]
    count = f"{len(snapshots):,} snapshot{'s' * (len(snapshots) > 1)}"
    return f"{count}, {_span(_moment(oldest.time), _moment(newest.time))}"


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _metrics(names: Sequence[str], snapshots: Sequence[SnapshotFacts]) -> list[Markup]:
    keys = dict.fromkeys(key for snapshot in snapshots for key in snapshot.metrics if key != "step")
    drawn: list[Markup] = []
    for key in list(keys)[:_MOST_METRICS]:
        values = [snapshot.metrics.get(key) for snapshot in snapshots]
        # A single number makes no curve.
        if len([value for value in values if value is not None]) > 1:
            drawn += [element("h3", text(f"Metadata: {key}")), charts.curve(names, values)]
    return drawn


def _comparison(runs: Sequence[RunFacts]) -> list[Markup]:
    """Return a chart for each metric that several runs have, with a line for each of these."""
    drawn: list[Markup] = []
    keys = dict.fromkeys(k for run in runs for s in run.snapshots for k in s.metrics if k != "step")
    for key in list(keys)[:_MOST_METRICS]:
        having = (s.metrics for run in runs for s in run.snapshots if key in s.metrics)
        by_step = all("step" in metrics for metrics in having)
        points = {
            run.folder or "Snapshots": [
                (s.metrics["step"] if by_step else float(number), s.metrics[key])
                for number, s in enumerate(run.snapshots)
                if key in s.metrics
            ]
            for run in runs
        }
        lines = {name: line for name, line in points.items() if len(line) > 1}
        if len(lines) > 1:
            over = "over the step" if by_step else "over the number of the snapshot"
            drawn += [element("h3", text(f"{key} of each run, {over}")), charts.curves(lines)]
    return [element("h2", text("All runs")), *drawn] if drawn else []


def _table(snapshots: Sequence[SnapshotFacts]) -> Markup:
    titles = ["Snapshot", "Taken", "State", "New", "Unique", "Entries", "Seconds", "Kept for"]
    numbers = {"State", "New", "Unique", "Entries", "Seconds"}
    header = joined(_cell("th", title, is_number=title in numbers) for title in titles)
    rows = [element("tr", header)]
    for snapshot in reversed(snapshots[-_MOST_LISTED:]):
        cells = [
            snapshot.name,
            _moment(snapshot.time),
            size(snapshot.logical_bytes),
            size(snapshot.new_bytes),
            size(snapshot.unique_bytes),
            f"{snapshot.entries:,}",
            f"{snapshot.seconds:.2f}",
            ", ".join(snapshot.notes),
        ]
        listed = zip(titles, cells, strict=True)
        rows.append(
            element("tr", joined(_cell("td", c, is_number=title in numbers) for title, c in listed))
        )
    more = len(snapshots) - _MOST_LISTED
    end = [element("p", text(f"{more:,} earlier ones are not listed."))] if more > 0 else []
    return joined([element("div", element("table", joined(rows)), class_="scroll"), *end])


def _cell(name: str, content: str, *, is_number: bool) -> Markup:
    if is_number:
        return element(name, text(content), class_="number")
    return element(name, text(content))


def _more_runs(count: int) -> list[Markup]:
    if not count:
        return []
    return [element("p", text(f"{count:,} more runs, with older snapshots, are not shown."))]


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
