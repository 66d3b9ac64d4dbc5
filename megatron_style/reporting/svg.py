"""A line chart as inline SVG. Colours come from the page's style sheet, so that one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_style.base.units import Quantity
from megatron_style.reporting.markup import Markup, join, tag, text
from megatron_style.reporting.scale import Scale, labelled_ticks

WIDTH = 480
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 8, 46  # margins around the field
STRIP = 17  # the height of one run's row of stages
_LETTER = 9.0  # the greatest width of a letter, on a small screen, where letters are larger
MOST_POINTS = 600
_SPOTS = 60  # the greatest number of points per line that show their value under the pointer


class Point(NamedTuple):
    x: float
    y: float  # a value that is not finite is a gap in the line
    step: int


@dataclass(frozen=True)
class ChartAxis:
    quantity: Quantity
    low: float
    high: float
    label: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Line:
    name: str
    style: str  # classes of the style sheet, such as "run-1 held-out"
    points: tuple[Point, ...]
    has_marks: bool = False


@dataclass(frozen=True)
class StageBand:
    """A stage: shaded over the full height, or in the row of its run where several runs share the chart."""

    low: float
    high: float
    label: str
    style: str
    row: int | None = None


@dataclass(frozen=True)
class Chart:
    key: str  # unique on the page
    title: str
    about: str
    x: ChartAxis
    y: ChartAxis
    lines: tuple[Line, ...]
    bands: tuple[StageBand, ...] = ()
    height: int = 220  # of the field alone


@dataclass(frozen=True)
class Field:
    """The rectangle in which values are drawn."""

    left: float
    top: float
    right: float
    bottom: float


def draw(chart: Chart) -> Markup:
    rows = 1 + max((band.row for band in chart.bands if band.row is not None), default=-1)
    top = TOP + rows * STRIP
    field = Field(LEFT, top, WIDTH - RIGHT, top + chart.height)
    x = Scale(chart.x.low, chart.x.high, field.left, field.right, chart.x.logarithmic)
    y = Scale(chart.y.low, chart.y.high, field.bottom, field.top, chart.y.logarithmic)
    inside = join(_line(line, x, y) for line in chart.lines)
    spots = join(_spots(line, chart, x, y) for line in chart.lines)
    clip = tag("clipPath", _rectangle(field.left, field.top - 2, field.right, field.bottom + 2), id=f"{chart.key}-clip")
    return frame(
        chart.key, chart.title, chart.about, (WIDTH, field.bottom + BOTTOM),
        join(_band(band, x, field) for band in chart.bands), y_axis(y, chart.y.quantity, field),
        _x_axis(x, chart.x, field), clip, tag("g", inside, clip_path=f"url(#{chart.key}-clip)"), spots,
    )  # fmt: skip


def frame(key: str, title: str, about: str, size: tuple[float, float], *inside: Markup) -> Markup:
    """Return the drawing with a title and a description for screen readers."""
    return tag(
        "svg",
        tag("title", text(title), id=f"{key}-title"),
        tag("desc", text(about), id=f"{key}-desc"),
        *inside,
        viewBox=f"0 0 {size[0]:g} {size[1]:g}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
    )


def y_axis(scale: Scale, quantity: Quantity, field: Field) -> Markup:
    marks = []
    for tick, label in labelled_ticks(quantity, scale, most=round((field.bottom - field.top) / 30)):
        place = scale.place(tick)
        marks.append(tag("path", d=f"M{field.left:g} {place:.1f}H{field.right:g}", class_="grid"))
        marks.append(tag("text", text(label), x=field.left - 7, y=f"{place + 4:.1f}", class_="tick", text_anchor="end"))
    return join(marks)


def _x_axis(scale: Scale, axis: ChartAxis, field: Field) -> Markup:
    marks = [base_line(field)]
    for tick, label in labelled_ticks(axis.quantity, scale, most=6):
        place = f"{scale.place(tick):.1f}"
        marks.append(tag("path", d=f"M{place} {field.bottom:g}v4", class_="axis"))
        marks.append(tag("text", text(label), x=place, y=field.bottom + 19, class_="tick", text_anchor="middle"))
    marks.append(tag("text", text(axis.label), x=field.right, y=field.bottom + 40, class_="tick", text_anchor="end"))
    return join(marks)


def base_line(field: Field) -> Markup:
    return tag("path", d=f"M{field.left:g} {field.bottom:g}H{field.right:g}", class_="axis")


def _band(band: StageBand, x: Scale, field: Field) -> Markup:
    left, right = x.place(band.low), x.place(band.high)
    if right <= left:
        return Markup("")
    if band.row is None:
        shade = _rectangle(left, field.top, right, field.bottom, f"band {band.style}")
        baseline = field.top + 15
    else:
        top = TOP + band.row * STRIP
        shade = _rectangle(left, top, right, top + STRIP - 3, f"strip {band.style}")
        baseline = top + 11
    fitting = (label for label in (band.label, band.label[2:]) if len(label) * _LETTER + 4 <= right - left)
    middle = f"{(left + right) / 2:.1f}"
    words = [tag("text", text(label), x=middle, y=baseline, text_anchor="middle") for label in list(fitting)[:1]]
    return tag("g", tag("title", text(band.label)), shade, *words, class_="stage")


def _rectangle(left: float, top: float, right: float, bottom: float, style: str = "") -> Markup:
    return tag("rect", x=left, y=top, width=right - left, height=bottom - top, class_=style or False)


def _line(line: Line, x: Scale, y: Scale) -> Markup:
    path = []
    pen_is_down = False
    for point in thin(line.points):
        if y.has(point.y):
            # A line of no length has round ends: a point between two gaps stays visible.
            place = f"{x.place(point.x):.1f} {y.place(point.y):.1f}"
            path.append(f"L{place}" if pen_is_down else f"M{place}h0")
        pen_is_down = y.has(point.y)
    return tag("path", d="".join(path), class_=f"line {line.style}") if path else Markup("")


def _spots(line: Line, chart: Chart, x: Scale, y: Scale) -> Markup:
    """Return the places that show their value under the pointer, visible if the line has marks."""
    drawn = []
    inside = [point for point in line.points if y.has(point.y) and chart.y.low <= point.y <= chart.y.high]
    for point in spread(inside, _SPOTS):
        where = f"{chart.x.label} {chart.x.quantity.text(point.x)}, step {point.step}"
        title = f"{line.name}: {point.y:.5g} ({where})"
        place = {"cx": f"{x.place(point.x):.1f}", "cy": f"{y.place(point.y):.1f}"}
        style = f"mark {line.style}" if line.has_marks else "spot"
        drawn.append(tag("circle", tag("title", text(title)), **place, r=3, class_=style))
    return join(drawn)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Return at most `most` points: the lowest, the highest and the first gap of each stretch, and both ends of the
    line, so that no outlier is lost."""
    if len(points) <= most:
        return tuple(points)
    stretches = (most - 2) // 3
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        inside = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        finite = [index for index in inside if math.isfinite(points[index].y)]
        if finite:
            kept |= {choose(finite, key=lambda index: points[index].y) for choose in (min, max)}
        kept |= set(next(([index] for index in inside if not math.isfinite(points[index].y)), []))
    return tuple(points[index] for index in sorted(kept))


def spread(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """Return at most `most` evenly spread points of the line, including its last."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[(index + 1) * len(points) // most - 1] for index in range(most))
