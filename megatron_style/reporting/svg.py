"""A line chart as inline SVG. Colours come from the page's style sheet, so that one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_style.base.units import Quantity
from megatron_style.reporting.markup import Markup, join, tag, text
from megatron_style.reporting.readouts import Area, Readout, Row, columns, nearest, overlay
from megatron_style.reporting.scale import Scale, labelled_ticks

WIDTH = 480
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 8, 46  # margins around the field
STRIP = 17  # the height of one run's row of stages
_LETTER = 9.0  # the greatest width of a letter, on a small screen, where letters are larger
MOST_POINTS = 600
_MOST_MARKS = 60


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

    def share_of(self, size: tuple[float, float]) -> Area:
        width, height = size
        return Area(
            self.left / width, self.top / height, (self.right - self.left) / width, (self.bottom - self.top) / height
        )


def draw(chart: Chart) -> Markup:
    """Return the drawing, under the columns that show its values. Labels of stages have rows of their own above the
    field, so that no curve runs through them."""
    rows = max((1 if band.row is None else band.row + 1 for band in chart.bands), default=0)
    top = TOP + rows * STRIP
    field = Field(LEFT, top, WIDTH - RIGHT, top + chart.height)
    x = Scale(chart.x.low, chart.x.high, field.left, field.right, chart.x.logarithmic)
    y = Scale(chart.y.low, chart.y.high, field.bottom, field.top, chart.y.logarithmic)
    inside = join(_line(line, x, y) for line in chart.lines)
    marks = join(_marks(line, chart, x, y) for line in chart.lines if line.has_marks)
    clip = tag("clipPath", _rectangle(field.left, field.top - 2, field.right, field.bottom + 2), id=f"{chart.key}-clip")
    size = (WIDTH, field.bottom + BOTTOM)
    drawing = frame(
        chart.key, chart.title, chart.about, size,
        join(_band(band, x, field) for band in chart.bands), y_axis(y, chart.y.quantity, field),
        _x_axis(x, chart.x, field), clip, tag("g", inside, clip_path=f"url(#{chart.key}-clip)"), marks,
    )  # fmt: skip
    return under(drawing, overlay(chart.key, chart.title, field.share_of(size), _readouts(chart, x, y, field)))


def under(drawing: Markup, columns: Markup) -> Markup:
    return tag("div", drawing, columns, class_="chart")


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
    top = TOP + (band.row or 0) * STRIP
    if band.row is None:
        shade = _rectangle(left, TOP, right, field.bottom, f"band {band.style}")
    else:
        shade = _rectangle(left, top, right, top + STRIP - 3, f"strip {band.style}")
    fitting = (label for label in (band.label, band.label[2:]) if len(label) * _LETTER + 4 <= right - left)
    middle = f"{(left + right) / 2:.1f}"
    words = [tag("text", text(label), x=middle, y=top + 11, text_anchor="middle") for label in list(fitting)[:1]]
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


def _marks(line: Line, chart: Chart, x: Scale, y: Scale) -> Markup:
    inside = (point for point in line.points if y.has(point.y) and chart.y.low <= point.y <= chart.y.high)
    return join(
        tag("circle", cx=f"{x.place(point.x):.1f}", cy=f"{y.place(point.y):.1f}", r=3, class_=f"mark {line.style}")
        for point in spread(list(inside), _MOST_MARKS)
    )


def _readouts(chart: Chart, x: Scale, y: Scale, field: Field) -> list[Readout]:
    """Return what each column of the chart says: of each line the point that is nearest to the column's middle."""
    lines = [(line, [point for point in line.points if y.has(point.y)]) for line in chart.lines]
    middles, edges = columns([point.x for _, points in lines for point in points])
    said: list[list[tuple[Line, Point]]] = [[] for _ in middles]
    for line, points in lines:
        for column, index in nearest([point.x for point in points], middles, edges).items():
            said[column].append((line, points[index]))
    bounds = [chart.x.low, *edges, chart.x.high]
    places = [(x.place(bound) - field.left) / (field.right - field.left) for bound in bounds]
    found = []
    for index, (middle, rows) in enumerate(zip(middles, said, strict=True)):
        if rows:
            at = (x.place(middle) - field.left) / (field.right - field.left)
            found.append(_readout(chart.x, middle, rows, (places[index], places[index + 1], at)))
    return found


def _readout(
    axis: ChartAxis, middle: float, points: Sequence[tuple[Line, Point]], places: tuple[float, float, float]
) -> Readout:
    """Return a column's words. If its points are of different steps, each says its own."""
    steps = {point.step for _, point in points}
    head = f"{axis.label} {axis.quantity.text(middle)}"
    if len(steps) == 1:
        head += f", step {min(steps):,}"
    rows = []
    for line, point in points:
        own = "" if len(steps) == 1 else f" (step {point.step:,})"
        rows.append(Row(line.style.split()[0], f"{line.name}: {point.y:.5g}{own}"))
    return Readout(*places, head, tuple(rows))


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
