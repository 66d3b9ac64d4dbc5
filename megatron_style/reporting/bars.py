"""A bar chart as inline SVG: groups side by side, with one bar per run in each."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.base.units import Quantity
from megatron_style.reporting.markup import Markup, join, tag, text
from megatron_style.reporting.scale import Scale
from megatron_style.reporting.svg import LEFT, TOP, Field, base_line, frame, y_axis

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
    highest = max(max(bar.value for bar in group.bars) for group in chart.groups)
    y = Scale(0.0, highest * 1.08 or 1.0, field.bottom, field.top)
    width = (field.right - field.left) / len(chart.groups)
    groups = join(
        _group(group, chart.quantity, y, field.left + index * width, width) for index, group in enumerate(chart.groups)
    )
    return frame(
        chart.key, chart.title, chart.about, (_WIDTH, field.bottom + _BOTTOM),
        y_axis(y, chart.quantity, field), groups, base_line(field),
    )  # fmt: skip


def _group(group: Group, quantity: Quantity, y: Scale, left: float, width: float) -> Markup:
    wide = min(_WIDEST, width * 0.8 / len(group.bars))
    first = left + (width - wide * len(group.bars)) / 2
    drawn = []
    for index, bar in enumerate(group.bars):
        x = first + index * wide
        top = y.place(bar.value)
        title = tag("title", text(f"{bar.name}, {group.label}: {quantity.text(bar.value)}"))
        path = f"M{x + 1:.1f} {y.start:g}V{top:.1f}h{wide - 2:.1f}V{y.start:g}z"
        drawn.append(tag("path", title, d=path, class_=f"bar {bar.style}"))
    middle = f"{left + width / 2:.1f}"
    drawn.append(tag("text", text(group.label), x=middle, y=y.start + 19, class_="tick", text_anchor="middle"))
    return join(drawn)
