"""Draw the charts of a report, as SVG, with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from math import nan
from typing import NamedTuple

from casnap.report.markup import Markup, element, joined, text

MISSING = "pip install matplotlib"
"""The command that installs matplotlib, which draws the charts."""
# The most points of a curve, besides those that are not finite.
_MOST_POINTS = 400
# Colours that stand for those of the page, which differ in the dark.
_COLOURS = {"#00000a": "currentColor", "#00000b": "var(--line)", "#00000c": "var(--bad)"}
_INK, _LINE, _BAD = _COLOURS
_METADATA = ("Creator", "Date", "Format", "Type")
# How a curve differs from the one before, so that no curve hides another: its dashes and its width.
_DASHES = ((0, ()), (0, (4, 3)), (0, (1, 2)), (0, (7, 2, 1, 2)))
_WIDTHS = (3.0, 2.0, 2.0, 1.5)
_STYLE = {
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.0,
    "grid.color": _LINE,
    "path.simplify_threshold": 0.5,
    "svg.fonttype": "none",
    "text.color": _INK,
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}


class Point(NamedTuple):
    """A point of a curve: the step or the number of a snapshot, and the value, if finite."""

    x: float
    y: float | None


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def chart(
    title: str,
    over: str,
    curves: Mapping[str, Sequence[Point]],
    label: Callable[[float], str] | None = None,
) -> Markup:
    """Draw a curve for each run. Equal curves are drawn once, with the names of all their runs.

    Args:
        title: The name of the value.
        over: The name of the horizontal axis: the step, or the number of the snapshot.
        curves: The curve of each run, by the name of the run; an empty one is left out. A value
            that is not finite makes a gap in the curve; a vertical line marks the first such value.
        label: Returns the text of a value on the axis; by default, matplotlib chooses it.
    """
    merged: dict[tuple[Point, ...], tuple[int, str]] = {}
    for number, (name, points) in enumerate(curves.items()):
        first, names = merged.get(tuple(points), (number, ""))
        if points:
            merged[tuple(points)] = (first, f"{names} = {name}" if names else name)
    keys = [
        element("li", _sample(number), text(names), style=f"--hue:{_hue(number)}")
        for number, names in merged.values()
    ]
    values = "; ".join(_spoken(names, points) for points, (_, names) in merged.items())
    drawn = {number: _thinned(points) for points, (number, _) in merged.items()}
    drawing = _svg(over, drawn, label)
    return element(
        "figure",
        element("figcaption", text(title)),
        element("div", drawing, role="img", aria_label=f"{title} over the {over}: {values}"),
        element("ul", joined(keys), class_="keys")
        if sum(map(bool, curves.values())) > 1
        else text(""),
    )


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return the points to draw of a curve. Its peaks, its lows and its gaps stay."""
    every = max(1, -(-2 * len(points) // _MOST_POINTS))
    drawn: list[Point] = []
    for at in range(0, len(points), every):
        group = points[at : at + every]
        finite = sorted((p for p in group if p.y is not None), key=lambda p: p.y or 0.0)
        ends = (*finite[:1], *finite[-1:])
        drawn += [p for p in group if p.y is None or p in ends]
    return drawn


def _spoken(name: str, points: Sequence[Point]) -> str:
    values = [y for _, y in points if y is not None]
    if not values:
        return f"{name} has no numbers"
    return (
        f"{name} goes from {values[0]:.6g} to {values[-1]:.6g}, between {min(values):.6g} and "
        f"{max(values):.6g}"
    )


def _hue(number: int) -> int:
    # Neighbours in the list differ much, and none is red, the colour of what is not well.
    return (215, 35, 145, 285, 180, 320, 65, 245, 105, 300, 165, 50)[number % 12]


def _sample(number: int) -> Markup:
    """Return a short line in the style of a curve, for the legend."""
    dashes = " ".join(f"{each * _WIDTHS[number % 4]:g}" for each in _DASHES[number % 4][1])
    line = element(
        "line", x1="1", y1="5", x2="33", y2="5",
        stroke_width=_WIDTHS[number % 4], stroke_dasharray=dashes or "none",
    )  # fmt: skip
    return element("svg", line, width="34", height="10", viewBox="0 0 34 10", aria_hidden="true")


def _svg(
    over: str, curves: Mapping[int, Sequence[Point]], label: Callable[[float], str] | None
) -> Markup:
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = StringIO()
    colours = dict(_COLOURS)
    # The user's own style is for other drawings.
    with style.context(["default", _STYLE]):
        axes = (figure := Figure(figsize=(4.6, 2.1), layout="constrained")).subplots()
        axes.grid(axis="y", linewidth=0.6)
        axes.tick_params(length=0)
        axes.margins(x=0.02)
        axes.set_xlabel(over)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if label is not None:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
        for number, points in curves.items():
            # A colour for each curve, which the page replaces.
            colour = f"#0000{number + 16:02x}"
            colours[colour] = f"hsl({_hue(number)}, 65%, var(--light))"
            axes.plot(
                [x for x, _ in points],
                [nan if y is None else y for _, y in points],
                color=colour,
                linewidth=_WIDTHS[number % 4],
                linestyle=_DASHES[number % 4],
                # A point between gaps has no line.
                marker="o" if len(points) < 60 else ".",
                markersize=3.5,
                clip_on=False,
            )
            for x in [x for x, y in points if y is None][:1]:
                axes.axvline(x, color=_BAD, linewidth=1.5, linestyle=":", clip_on=False)
            # The axis reaches the last step even if its value is not finite.
            axes.update_datalim([(x, 0) for x, _ in points], updatey=False)
        figure.savefig(drawn, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return _for_page(drawn.getvalue(), colours)


def _for_page(svg: str, colours: Mapping[str, str]) -> Markup:
    """Return a drawing in the colours and fonts of the page, without ids that nothing uses."""
    svg = re.sub("#[0-9a-f]{6}", lambda m: colours.get(m[0], m[0]), svg[svg.index("<svg") :])
    svg = re.sub('font-family: [^;"]*;?|<style.*?</style>', "", svg)
    used = set(re.findall(r"#([\w.]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    size = r'width="[^"]*" height="[^"]*"'
    return Markup(re.sub(size, 'aria-hidden="true"', svg, count=1).strip())
