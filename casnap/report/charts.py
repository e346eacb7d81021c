"""Draw the charts of a report, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from casnap.extending import size
from casnap.report.facts import ModuleChanges, ModulePath
from casnap.report.markup import Markup, element, joined, text

WIDTH = 960.0
_LEFT, _TOP = 84.0, 16.0
_MOST_POINTS = 400
_CELL = 13.0
# The names of some snapshots below a drawing: how many, their height, and the width of a letter.
_MOST_NAMES, _NAMES, _LETTER = 6, 16.0, 7.3


class Box(NamedTuple):
    """A rectangle: its upper left corner, its width and its height."""

    x: float
    y: float
    width: float
    height: float


def bars(names: Sequence[str], values: Sequence[int]) -> Markup:
    """Draw one bar for each snapshot. Its height shows a number of bytes."""
    height = 84.0
    top = max(values, default=0) or 1
    step = (WIDTH - _LEFT) / max(1, len(values))
    drawn = [
        element(
            "rect",
            element("title", text(f"{name}: {size(value)}")),
            x=_LEFT + i * step,
            y=_TOP + height - height * value / top,
            width=max(0.5, step - min(2.0, step / 4)),
            height=height * value / top,
            class_="bar",
        )
        for i, (name, value) in enumerate(zip(names, values, strict=True))
    ]
    below = _names(names, [_LEFT + (i + 0.5) * step for i in range(len(names))], _TOP + height)
    return _drawing(_TOP + height + _NAMES, [*_scale(height, "0", size(top)), *drawn, *below])


def curve(names: Sequence[str], values: Sequence[float | None]) -> Markup:
    """Draw a metric as a curve over the snapshots. Snapshots without the metric leave a gap."""
    height, numbers = 110.0, [value for value in values if value is not None]
    low, high = min(numbers), max(numbers)
    span = (high - low) or 1.0
    every = max(1, -(-len(values) // _MOST_POINTS))
    step = (WIDTH - _LEFT - 12) / max(1, len(values) - 1)
    points = [
        (name, value, _LEFT + 6 + i * step, _TOP + height - height * (value - low) / span)
        for i, (name, value) in enumerate(zip(names, values, strict=True))
        if value is not None and (i % every == 0 or i == len(values) - 1)
    ]
    lines = [
        element("line", x1=a[2], y1=a[3], x2=b[2], y2=b[3], class_="curve")
        for a, b in pairwise(points)
    ]
    dots = [
        element(
            "circle", element("title", text(f"{name}: {value:g}")), cx=x, cy=y, r=3.0, class_="dot"
        )
        for name, value, x, y in points
    ]
    places = [_LEFT + 6 + i * step for i in range(len(names))]
    below = _names(names, places, _TOP + height)
    drawn = [*_scale(height, f"{low:.4g}", f"{high:.4g}"), *lines, *dots, *below]
    return _drawing(_TOP + height + _NAMES, drawn)


def curves(runs: Mapping[str, Sequence[tuple[float, float]]]) -> Markup:
    """Draw a metric of several runs: a line for each run.

    Args:
        runs: The name of each run → its points: the step, or else the number of the snapshot; and
            the value.
    """
    height, points = 150.0, [point for run in runs.values() for point in run]
    first, last = (pick(x for x, _ in points) for pick in (min, max))
    low, high = (pick(y for _, y in points) for pick in (min, max))
    width = WIDTH - _LEFT - 12

    def place(x: float, y: float) -> str:
        across = _LEFT + 6 + width * (x - first) / ((last - first) or 1.0)
        return f"{across:.6g},{_TOP + height - height * (y - low) / ((high - low) or 1.0):.6g}"

    lines, keys = list[Markup](), list[Markup]()
    for number, (name, run) in enumerate(runs.items()):
        # 137 degrees apart, so that neighbours in the list have colours that differ much.
        style = f"--hue:{number * 137 % 360}"
        every = max(1, -(-len(run) // _MOST_POINTS))
        path = " ".join(place(*point) for point in (*run[:-1:every], run[-1]))
        lines.append(
            element(
                "polyline", element("title", text(name)), points=path, class_="run", style=style
            )
        )
        keys.append(element("p", text(name), class_="key", style=style))
    ends = _names([f"{first:g}", f"{last:g}"], [_LEFT + 6, WIDTH - 6], _TOP + height)
    drawn = [*_scale(height, f"{low:.4g}", f"{high:.4g}"), *lines, *ends]
    return joined([_drawing(_TOP + height + _NAMES, drawn), *keys])


def heat_map(changes: ModuleChanges) -> Markup:
    """Draw a grid of modules and snapshots. A cell's colour shows the share that changed."""
    label_width = min(360.0, 12 + 6.4 * max(map(len, changes.modules), default=0))
    width = (WIDTH - label_width) / max(1, len(changes.snapshots))
    rows: list[Markup] = []
    for i, (module, shares) in enumerate(zip(changes.modules, changes.shares, strict=True)):
        y = _TOP + i * _CELL
        label = module if len(module) <= 54 else f"…{module[-53:]}"
        rows.append(
            element(
                "text", element("title", text(module)), text(label),
                x=label_width - 6, y=y + _CELL - 3, text_anchor="end",
            )
        )  # fmt: skip
        rows += [
            element(
                "rect",
                element("title", text(f"{name}: {share:.1%} of {module} changed")),
                x=label_width + j * width,
                y=y,
                width=max(0.5, width - 1),
                height=_CELL - 1,
                class_="heat",
                # Even a small change must be visible.
                style=f"--share:{0.0 if not share else 0.12 + 0.88 * share:.3f}",
            )
            for j, (name, share) in enumerate(zip(changes.snapshots, shares, strict=True))
        ]
    bottom = _TOP + len(changes.modules) * _CELL
    places = [label_width + (j + 0.5) * width for j in range(len(changes.snapshots))]
    rows += _names(changes.snapshots, places, bottom)
    return _drawing(bottom + _NAMES, rows)


def treemap(sizes: dict[ModulePath, int]) -> Markup:
    """Draw the bytes of a state as nested rectangles, one for each module."""
    height = 420.0
    drawn = _nested(sizes, Box(0.0, 0.0, WIDTH, height), ())
    return _drawing(height, drawn)


def split_box(box: Box, sizes: Sequence[int]) -> list[Box]:
    """Cut a rectangle into one part for each size, with areas in proportion to the sizes.

    Args:
        box: The rectangle.
        sizes: Positive sizes, the largest first.
    """
    if len(sizes) < 2:
        return [box] * len(sizes)
    total, count, nbytes = sum(sizes), 1, sizes[0]
    while count < len(sizes) - 1 and 2 * nbytes + sizes[count] <= total:
        nbytes += sizes[count]
        count += 1
    width, height = box.width, box.height
    if width >= height:
        width *= nbytes / total
        remainder = Box(box.x + width, box.y, box.width - width, height)
    else:
        height *= nbytes / total
        remainder = Box(box.x, box.y + height, width, box.height - height)
    return [
        *split_box(Box(box.x, box.y, width, height), sizes[:count]),
        *split_box(remainder, sizes[count:]),
    ]


def _nested(sizes: dict[ModulePath, int], box: Box, path: ModulePath) -> list[Markup]:
    """Draw modules as nested rectangles.

    Args:
        sizes: Path below ``path`` → bytes.
        box: The rectangle to draw into.
        path: The path of the rectangle itself.
    """
    by_folder: dict[str, dict[ModulePath, int]] = {}
    for parts, nbytes in sizes.items():
        if parts:
            by_folder.setdefault(parts[0], {})[parts[1:]] = nbytes
    if len(by_folder) == 1:
        # If all paths share their next step, no rectangle is drawn for it.
        ((name, inner),) = by_folder.items()
        return (
            _nested(inner, box, (*path, name)) if any(inner) else _tile(box, (*path, name), inner)
        )
    totals = {name: sum(inner.values()) for name, inner in by_folder.items()}
    order = sorted(totals, key=lambda name: -totals[name])
    boxes = split_box(box, [totals[name] for name in order])
    drawn: list[Markup] = []
    for name, part in zip(order, boxes, strict=True):
        if part.width >= 1.5 and part.height >= 1.5:
            drawn += _tile(part, (*path, name), by_folder[name])
    return drawn


def _tile(box: Box, path: ModulePath, inner: dict[ModulePath, int]) -> list[Markup]:
    nbytes = sum(inner.values())
    name = ".".join(path)
    tile = element(
        "rect",
        element("title", text(f"{name}: {size(nbytes)}")),
        x=box.x, y=box.y, width=max(0.0, box.width - 1), height=max(0.0, box.height - 1),
        class_="tile",
    )  # fmt: skip
    drawn = [tile]
    fits = int((box.width - 8) / 6.4)
    if fits >= 3 and box.height >= 16:
        label = name if len(name) <= fits else f"…{name[1 - fits :]}"
        drawn.append(element("text", text(label), x=box.x + 4, y=box.y + 12, class_="label"))
    if any(inner) and box.width >= 60 and box.height >= 48:
        frame = Box(box.x + 3, box.y + 17, box.width - 7, box.height - 21)
        drawn += _nested({p: n for p, n in inner.items() if p}, frame, ())
    return drawn


def _scale(height: float, low: str, high: str) -> list[Markup]:
    ends = ((low, _TOP + height), (high, _TOP + 8))
    lines = [
        element("line", x1=_LEFT, y1=y, x2=WIDTH, y2=y, class_="axis")
        for y in (_TOP, _TOP + height)
    ]
    return [
        *lines,
        *(element("text", text(label), x=_LEFT - 8, y=y, text_anchor="end") for label, y in ends),
    ]


def _names(names: Sequence[str], places: Sequence[float], y: float) -> list[Markup]:
    """Write the names of some snapshots below a drawing: the first, the last, some in between.

    Args:
        names: The names of all snapshots.
        places: Where each snapshot is, from left to right.
        y: Where the drawing ends.
    """
    count = min(len(names), _MOST_NAMES)
    chosen = sorted({round(i * (len(names) - 1) / max(1, count - 1)) for i in range(count)})
    gap = min((places[b] - places[a] for a, b in pairwise(chosen)), default=WIDTH - places[0])
    fits = max(3, int(gap / _LETTER) - 1)
    written: list[Markup] = []
    for i in chosen:
        name = names[i].rpartition("/")[2]
        label = name if len(name) <= fits else f"…{name[1 - fits :]}"
        is_end = len(chosen) > 1 and i == chosen[-1]
        anchor = "end" if is_end else "start" if i == chosen[0] else "middle"
        written.append(
            element(
                "text", element("title", text(names[i])), text(label),
                x=places[i], y=y + _NAMES - 4, text_anchor=anchor,
            )
        )  # fmt: skip
    return written


def _drawing(height: float, content: Sequence[Markup]) -> Markup:
    drawing = element(
        "svg", joined(content), viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", width="100%"
    )
    return element("div", drawing, class_="scroll")
