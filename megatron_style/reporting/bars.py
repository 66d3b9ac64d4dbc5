"""A bar chart as inline SVG: groups side by side, with one bar per run in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_style.base.units import Quantity
from megatron_style.reporting.markup import Markup, tag, text
from megatron_style.reporting.readouts import Readout, Row, overlay
from megatron_style.reporting.scale import Scale
from megatron_style.reporting.svg import LEFT, TOP, Field, base_line, frame, under, y_axis

_WIDTH = 340
_HEIGHT = 150
_BOTTOM = 28
_WIDEST = 56.0


@dataclass(frozen=True)
class Bar:
    name: str
    style: str
    value: float


@dataclass(frozen=True)
class Group:
    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class BarChart:
    key: str
    title: str
    about: str
    quantity: Quantity
    groups: tuple[Group, ...]


def draw_bars(chart: BarChart) -> Markup:
    field = Field(LEFT, TOP, _WIDTH - 4, TOP + _HEIGHT)
    size = (_WIDTH, field.bottom + _BOTTOM)
    highest = max(max(bar.value for bar in group.bars) for group in chart.groups)
    y = Scale(0.0, highest * 1.08 or 1.0, field.bottom, field.top)
    width = (field.right - field.left) / len(chart.groups)
    drawn = []
    readouts = []
    for index, group in enumerate(chart.groups):
        left = field.left + index * width
        middle = f"{left + width / 2:.1f}"
        drawn.append(tag("text", text(group.label), x=middle, y=y.start + 19, class_="tick", text_anchor="middle"))
        for bar, begin, end in _places(group, left, width):
            drawn.append(_bar(bar, y, begin, end))
            readouts.append(_readout(chart, group, bar, (begin, end), field))
    drawing = frame(
        chart.key, chart.title, chart.about, size,
        y_axis(y, chart.quantity, field), *drawn, base_line(field),
    )  # fmt: skip
    return under(drawing, overlay(chart.key, chart.title, field.share_of(size), readouts))


def _places(group: Group, left: float, width: float) -> Iterator[tuple[Bar, float, float]]:
    """Yield each bar of a group with its left and right end."""
    wide = min(_WIDEST, width * 0.8 / len(group.bars))
    first = left + (width - wide * len(group.bars)) / 2
    for index, bar in enumerate(group.bars):
        yield bar, first + index * wide, first + (index + 1) * wide


def _bar(bar: Bar, y: Scale, begin: float, end: float) -> Markup:
    path = f"M{begin + 1:.1f} {y.start:g}V{y.place(bar.value):.1f}H{end - 1:.1f}V{y.start:g}z"
    return tag("path", d=path, class_=f"bar {bar.style}")


def _readout(chart: BarChart, group: Group, bar: Bar, ends: tuple[float, float], field: Field) -> Readout:
    left, right = ((end - field.left) / (field.right - field.left) for end in ends)
    row = Row(bar.style, f"{bar.name}: {chart.quantity.text(bar.value)}")
    return Readout(left, right, (left + right) / 2, group.label, (row,))
