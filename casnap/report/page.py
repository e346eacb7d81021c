"""Make the page of a report: one file, without scripts and without anything to load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from casnap import __version__
from casnap.extending import amount, size
from casnap.report.changes import Module, modules_of, named_by_counts
from casnap.report.charts import MISSING, Point, can_draw, chart
from casnap.report.facts import Facts, Plan, RunFacts, SnapshotFacts
from casnap.report.markup import Markup, element, joined, text

HEAD = "<!DOCTYPE html>\n<!-- casnap report -->\n"
"""The beginning of each page. The command overwrites only files that begin with it."""
_MOST_METRICS = 12
_MOST_GROUPS = 6
_MOST_LISTED = 200
_MOST_NAMED = 6
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --faint: #5a6572; --line: #d9dee5; --paper: #fff;
  --accent: #2f6bbd; --bad: #b3261e; --light: 36%; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --faint: #9aa7b5; --line: #38424e; --paper: #161b22;
    --accent: #62a0f0; --bad: #ff8a80; --light: 66%; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 0 auto; padding: 20px 16px 48px; overflow-wrap: anywhere; }
h1 { font-size: 22px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 6px; }
h3 { font-size: 15px; margin: 16px 0 2px; } p { margin: 4px 0; } ul { padding: 0; margin: 4px 0; }
.faint, figcaption, caption, dt { color: var(--faint); }
.bad { color: var(--bad); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr));
  gap: 12px 28px; margin: 12px 0; }
figure { margin: 0; min-width: 0; } figcaption { font-size: 13px; font-weight: 600; }
figure svg { display: block; max-width: 100%; } figure div svg { width: 100%; height: auto; }
.keys { list-style: none; font-size: 13px; }
.keys li { display: flex; align-items: center; gap: 8px; } .keys svg { flex: none; }
.keys line { stroke: hsl(var(--hue), 65%, var(--light)); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px;
  margin: 12px 0; }
dl div { border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
dt { font-size: 13px; } dd { margin: 0; font-size: 19px; font-weight: 600; }
table { border-collapse: collapse; font-size: 13px; width: 100%; margin: 8px 0; }
caption { text-align: left; padding: 2px 0; }
th, td { padding: 4px 10px 4px 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { vertical-align: bottom; overflow-wrap: normal; }
tbody th { font-weight: 400; min-width: 6em; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; padding: 2px 0; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.modules { list-style: none; font-size: 14px; } .modules .modules { padding-left: 16px; }
.modules li { border-top: 1px solid var(--line); } .modules li li:first-child { border-top: 0; }
.leaf { padding: 2px 0 2px 1.1em; }
.module { display: inline-flex; flex-wrap: wrap; gap: 0 12px; width: calc(100% - 1.3em);
  vertical-align: top; }
.leaf .module { width: 100%; } .module b { flex: 1 1 160px; font-weight: 400; }
.module span { font-size: 13px; } .module .nbytes { flex: 0 0 64px; text-align: right; }
.module .changed { flex: 0 1 190px; }
.changed::after { content: ""; display: block; height: 2px; margin-bottom: 1px; width: var(--share);
  background: var(--accent); }
@media (max-width: 600px) { .wide { display: none; } th, td { padding-right: 6px; } }
@media print { details::details-content { content-visibility: visible; } }
"""


def page(facts: Facts, now: float) -> str:
    """Return the page, as HTML.

    Args:
        facts: The facts that it shows.
        now: The time, in seconds since the epoch.
    """
    sections = [
        _section("Is it well?", _health(facts.runs)),
        _section("What does it take up, and why?", _space(facts)),
        _section("What changed?", _changes(facts.runs)),
        _section("Which snapshots go next?", _next(facts)),
        _section("What is owed to the mirror?", _owed(facts)),
        _section("Who serves what?", _services(facts)),
        _section("All snapshots", joined(map(_snapshots, facts.runs))),
    ]
    none = element("p", text("There are no snapshots."))
    body = joined(
        [
            element("h1", text(f"casnap store {facts.uri}")),
            element("p", text(_introduction(facts, now)), class_="faint"),
            *(sections if facts.runs else [none]),
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
    main = element("main", body)
    return f"{HEAD}{element('html', element('head', head), element('body', main), lang='en')}\n"


def _section(title: str, content: Markup) -> Markup:
    return element("section", element("h2", text(title)), content)


def _introduction(facts: Facts, now: float) -> str:
    charts = "" if can_draw() else f" Without charts: {MISSING} brings what draws them."
    return (
        f"{_summary(facts)}. Made {_moment(now)} by casnap {__version__}, from sizes, digests and "
        f"metadata alone.{charts}"
    )


def _summary(facts: Facts) -> str:
    runs = len(facts.runs) + facts.more_runs
    unread = amount(facts.unread, "snapshot")
    more = f", without {unread} that only a newer casnap can read" if facts.unread else ""
    return f"{amount(facts.snapshots, 'snapshot')} of {amount(runs, 'run')}{more}"


# --- is it well? --------------------------------------------------------------------------------


def _health(runs: Sequence[RunFacts]) -> Markup:
    keys = dict.fromkeys(
        k for r in runs for s in r.snapshots for k in (*s.metrics, *s.not_finite) if k != "step"
    )
    # What a training minimizes comes first.
    shown = sorted(keys, key=lambda key: "loss" not in key.lower())[:_MOST_METRICS]
    measured = dict.fromkeys(group for r in runs for s in r.snapshots for group in s.norms)
    # Norms that never change, as those of a frozen base, say nothing.
    jumps = {group: jump for group in measured if (jump := _jump(runs, group)) > 1}
    groups = sorted(jumps, key=lambda group: -jumps[group])[:_MOST_GROUPS]
    advice = [
        "No snapshot has a number in its metadata: store.take(…, metadata={'loss': 0.3})."
    ] * (not shown) + [
        "No take measured norms, NaN and infinities: Store(…, health=True) has takes measure them."
    ] * (not measured)
    rows = [
        (_name_of(run), key, *figures)
        for key in shown
        for run in runs
        if (figures := _figures(run, key))
    ]
    titles = ("Run", "Value", "First", "Newest", "Lowest", "Highest")
    return joined(
        [
            *(_p(line, class_="bad") for line in (*_unhealthy(runs), *_not_finite(runs))),
            *map(_p, advice),
            _charts(runs, [(key, _metric(key), None) for key in shown]),
            _table("Numbers in the metadata of each run", titles, rows, numbers=4, wide=1),
            *([element("h3", text("Norms of tensors, largest jumps first"))] if groups else []),
            _charts(runs, [(group, _norm(group), None) for group in groups]),
            _table(
                "Largest jumps from one snapshot to the next",
                ("Tensors", "Times"),
                [(group, f"{jumps[group]:.4g}") for group in groups],
                numbers=1,
            ),
        ]
    )


def _jump(runs: Sequence[RunFacts], group: str) -> float:
    """Return the largest ratio of a group's norms in two successive snapshots of a run."""
    jumps = [1.0]
    for run in runs:
        # Beside NaN, the norm is of the finite elements alone.
        healthy = [s for s in run.snapshots if group not in s.unhealthy]
        norms = [norm for s in healthy if (norm := s.norms.get(group))]
        jumps += [max(a, b) / min(a, b) for a, b in pairwise(norms)]
    return max(jumps)


def _unhealthy(runs: Sequence[RunFacts]) -> Iterator[str]:
    for run in runs:
        for group in dict.fromkeys(group for s in run.snapshots for group in s.unhealthy):
            having = [s for s in run.snapshots if group in s.unhealthy]
            count = max(s.unhealthy[group] for s in having)
            yield (
                f"{_name_of(run)}: {amount(count, 'tensor')} of {group} with NaN or infinite "
                f"elements in {amount(len(having), 'snapshot')}, first in {having[0].name}"
            )


def _not_finite(runs: Sequence[RunFacts]) -> Iterator[str]:
    for run in runs:
        for key in dict.fromkeys(key for s in run.snapshots for key in s.not_finite):
            having = [s.name for s in run.snapshots if key in s.not_finite]
            yield (
                f"{_name_of(run)}: {key} is NaN or infinite in {amount(len(having), 'snapshot')}, "
                f"first in {having[0]}"
            )


def _figures(run: RunFacts, key: str) -> tuple[str, ...]:
    values = [s.metrics[key] for s in run.snapshots if key in s.metrics]
    if not values:
        return ()
    newest = run.snapshots[-1]
    last = f"{newest.metrics[key]:.4g}" if key in newest.metrics else "–"
    last = "NaN/inf" if key in newest.not_finite else last
    return (f"{values[0]:.4g}", last, f"{min(values):.4g}", f"{max(values):.4g}")


# A value of a snapshot: NaN if it is not finite, None if the snapshot has none.
Value = Callable[[SnapshotFacts], float | None]
Label = Callable[[float], str] | None


def _metric(key: str) -> Value:
    return lambda snapshot: math.nan if key in snapshot.not_finite else snapshot.metrics.get(key)


def _norm(group: str) -> Value:
    return lambda snapshot: math.nan if group in snapshot.unhealthy else snapshot.norms.get(group)


def _charts(runs: Sequence[RunFacts], values: Sequence[tuple[str, Value, Label]]) -> Markup:
    """Return a chart for each value, with a curve for each run that has it more than once."""
    if not can_draw():
        return text("")
    drawn: list[Markup] = []
    for title, value, label in values:
        having = {
            _name_of(run): [
                (number, s, y)
                for number, s in enumerate(run.snapshots, 1)
                if (y := value(s)) is not None
            ]
            for run in runs
        }
        by_step = all("step" in s.metrics for found in having.values() for _, s, _ in found)
        curves = {name: _curve(found, by_step=by_step) for name, found in having.items()}
        if any(y is not None for points in curves.values() for _, y in points):
            over = "step" if by_step else "number of the snapshot"
            drawn.append(chart(title, over, curves, label))
    return element("div", joined(drawn), class_="charts") if drawn else text("")


def _curve(found: Sequence[tuple[int, SnapshotFacts, float]], *, by_step: bool) -> list[Point]:
    """Return the points of a curve; none if there is only one value."""
    points = [
        Point(s.metrics["step"] if by_step else number, y if math.isfinite(y) else None)
        for number, s, y in found
    ]
    return points if len(points) > 1 else []


# --- space --------------------------------------------------------------------------------------


def _space(facts: Facts) -> Markup:
    space = facts.space
    garbage = max(0, space.stored_bytes - space.live_bytes)
    saved = facts.logical_bytes / space.stored_bytes if space.stored_bytes else 0.0
    figures = [
        ("The states", size(facts.logical_bytes)),
        ("Stored", size(space.stored_bytes)),
        ("States to stored", f"{saved:.1f} ×"),
        ("Saved by deltas and compression", size(space.saved_bytes)),
        ("Garbage, gaps, ends of blocks", size(garbage)),
    ]
    cards = (
        element("div", element("dt", text(label)), element("dd", text(b))) for label, b in figures
    )
    titles = ("Run", "Mostly", "State", "First take", "Later takes")
    added = [[s.new_bytes for s in run.snapshots[1:]] for run in facts.runs]
    rows = [
        (
            _name_of(run),
            _mostly(run),
            _range([s.logical_bytes for s in run.snapshots]),
            size(run.snapshots[0].new_bytes),
            _range(later),
        )
        for run, later in zip(facts.runs, added, strict=True)
    ]
    # Sixty equal bars say less than one line.
    has_news = any(_differ(later) for later in added)
    later_runs = [replace(run, snapshots=run.snapshots[1:]) for run in facts.runs]
    values: list[tuple[str, Value, Label]] = [
        ("Added by each take but the first", lambda s: float(s.new_bytes), size)
    ]
    return joined(
        [
            element("dl", joined(cards)),
            *([_p(space.waiting)] if space.waiting else []),
            _table("What each take added, and in which modules most changed", titles, rows,
                   numbers=3),
            _charts(later_runs, values) if has_news else text(""),
        ]
    )  # fmt: skip


def _differ(values: Sequence[int]) -> bool:
    """Whether numbers of bytes differ enough to be told apart."""
    return bool(values) and max(values) > 1.02 * min(values) + 1000


def _range(values: Sequence[int]) -> str:
    if _differ(values):
        return f"{size(min(values))} – {size(max(values))}"
    return size(max(values)) if values else ""


def _mostly(run: RunFacts) -> str:
    """Name the parts of the app state of which the most bytes changed, with their shares."""
    modules = modules_of(run.sizes, run.changes)
    totals = {m.name.partition(".")[0]: sum(m.changed) for m in modules if any(m.changed)}
    most = sorted(totals, key=lambda name: -totals[name])[:2]
    return ", ".join(f"{name} {totals[name] / sum(totals.values()):.0%}" for name in most)


# --- changes ------------------------------------------------------------------------------------


def _changes(runs: Sequence[RunFacts]) -> Markup:
    return joined(map(_changes_in, runs))


def _changes_in(run: RunFacts) -> Markup:
    number, modules = len(run.changes.snapshots), modules_of(run.sizes, run.changes)
    named: dict[str, list[str]] = {}
    for kind, path in named_by_counts(modules, number):
        named.setdefault(kind, []).append(path)
    kinds = [
        (f"changed in each of {amount(number, 'take')}" if number > 1 else "changed", "each"),
        ("in some", "some"),
        ("never", "never"),
    ]
    said = [f"{kind}: {_listed(named[key])}" for kind, key in kinds if key in named]
    newest = run.snapshots[-1].name
    line = "; ".join(said) if number else "there is one snapshot, so nothing to compare"
    about = f"Modules of {newest}, {size(sum(m.nbytes for m in modules))}"
    tree = element(
        "details",
        element("summary", text(about)),
        _tree(modules, number),
    )
    return joined([element("h3", text(_name_of(run))), _p(f"{line[:1].upper()}{line[1:]}."), tree])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _tree(modules: Sequence[Module], number: int) -> Markup:
    rows: list[Markup] = []
    for module in modules:
        row = element(
            "span",
            element("b", text(module.name)),
            element("span", text(size(module.nbytes)), class_="nbytes"),
            _share(module, number),
            class_="module",
        )
        if module.inner:
            below = element("details", element("summary", row), _tree(module.inner, number))
            rows.append(element("li", below))
        else:
            rows.append(element("li", row, class_="leaf"))
    return element("ul", joined(rows), class_="modules")


def _share(module: Module, number: int) -> Markup:
    if not number:
        return text("")
    fewest, most = module.counts
    share = sum(module.changed) / (module.nbytes * number)
    times = f"{most:,}" if fewest == most else f"{fewest:,}–{most:,}"
    times = "each" if fewest == number else times
    said = f"in {times} of {number:,}, {share:.1%} of it" if most else "never changed"
    # Even a small change must be visible.
    width = f"--share:{max(share, 0.01 if most else 0):.1%}"
    return element("span", text(said), class_="changed", style=width)


# --- what goes, what is owed, who serves --------------------------------------------------------


def _next(facts: Facts) -> Markup:
    everything = [s for run in facts.runs for s in run.snapshots]
    held = [s for s in everything if s.notes]
    lines = [f"{amount(len(held), 'snapshot')} of these {len(everything):,} cannot go: "
             "tags or a mirror hold them, as the table below says."] if held else []  # fmt: skip
    if facts.plan is not None:
        return joined([_p(_planned(facts.plan)), *map(_p, lines)])
    lines.append(
        "A store keeps no rules. Give this command those of the training, such as --keep-last 3, "
        "and this says which snapshots go, and what that frees."
    )
    frees = sorted((s for s in everything if not s.notes), key=lambda s: -s.unique_bytes)[:5]
    rows = [(s.name, _moment(s.time), size(s.unique_bytes)) for s in frees if s.unique_bytes]
    table = _table(
        "Deleting one of them alone frees most", ("Snapshot", "Taken", "Frees"), rows, numbers=1
    )
    return joined([*map(_p, lines), table])


def _planned(plan: Plan) -> str:
    if not plan.deleted:
        return f"{plan.rules} keep all."
    return (
        f"With {plan.rules}, {amount(len(plan.deleted), 'snapshot')} go, which frees "
        f"{size(plan.freed_bytes)}: {_listed(plan.deleted)}."
    )


def _owed(facts: Facts) -> Markup:
    owed = facts.owed
    if owed is None:
        return _p("The store has no mirror.")
    if not owed.names:
        return _p(f"Nothing: {owed.mirror} has all.")
    lines = [
        f"{owed.mirror} lacks {amount(len(owed.names), 'snapshot')}, about {size(owed.new_bytes)}: "
        f"{_listed(owed.names)}."
    ]
    return joined([*map(_p, lines), *([_p(owed.trouble, class_="bad")] if owed.trouble else [])])


def _services(facts: Facts) -> Markup:
    if not facts.services:
        return _p("No follower has noted itself in the store.")
    rows = [
        (
            service.label,
            service.follows,
            service.name or "nothing yet",
            f"{_moment(service.noted_time)}{', seems dead' if service.is_doubtful else ''}",
            f"{service.number}" if service.number else "",
        )
        for service in facts.services
    ]
    titles = ("Follower", "Follows", "Serves", "Noted", "Version")
    return _table("Followers, by their last notes", titles, rows, numbers=1)


# --- snapshots ----------------------------------------------------------------------------------


def _snapshots(run: RunFacts) -> Markup:
    listed = run.snapshots[-_MOST_LISTED:]
    titles = ("Snapshot", "Taken", "Kept for", "State", "Added", "Frees", "Entries", "Seconds")
    rows = [
        (
            s.name,
            _moment(s.time),
            ", ".join(s.notes),
            size(s.logical_bytes),
            size(s.new_bytes),
            size(s.unique_bytes),
            f"{s.entries:,}",
            f"{s.seconds:.2f}",
        )
        for s in reversed(listed)
    ]
    more = len(run.snapshots) - len(listed)
    earlier = f"; {more:,} earlier ones are not listed" if more else ""
    caption = f"Newest first. Frees: what deleting it alone frees{earlier}"
    oldest, newest = _moment(run.snapshots[0].time), _moment(run.snapshots[-1].time)
    about = f"{_name_of(run)}: {amount(len(run.snapshots), 'snapshot')}, {_span(oldest, newest)}"
    table = _table(caption, titles, rows, numbers=5, wide=2)
    return element("details", element("summary", text(about)), table)


def _table(
    caption: str,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: int,
    wide: int = 0,
) -> Markup:
    """Return a table; nothing without rows.

    Args:
        caption: Its caption.
        titles: The titles of the columns.
        rows: The cells of each row. The first one heads the row.
        numbers: How many of the last columns are numbers.
        wide: How many of the last columns a narrow page leaves out.
    """
    if not rows:
        return text("")
    last = len(titles) - 1
    classes = [
        " ".join(["number"] * (i > last - numbers) + ["wide"] * (i > last - wide))
        for i in range(len(titles))
    ]

    def cells(row: Sequence[str], *, is_head: bool) -> Markup:
        made: list[Markup] = []
        for i, cell in enumerate(row):
            attributes = {"class_": classes[i]} if classes[i] else {}
            if is_head or not i:
                attributes["scope"] = "col" if is_head else "row"
            made.append(element("th" if is_head or not i else "td", text(cell), **attributes))
        return element("tr", joined(made))

    return element(
        "table",
        element("caption", text(caption)),
        element("thead", cells(titles, is_head=True)),
        element("tbody", joined(cells(row, is_head=False) for row in rows)),
    )


def _p(line: str, **attributes: str) -> Markup:
    return element("p", text(line), **attributes)


def _name_of(run: RunFacts) -> str:
    return run.folder or "Snapshots"


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _more_runs(count: int) -> list[Markup]:
    if not count:
        return []
    return [_p(f"{amount(count, 'more run')}, with older snapshots, are not shown.")]


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
