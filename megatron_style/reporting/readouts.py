"""The values of a chart, shown under the pointer and under the keyboard's focus, without a script.

An invisible column of the chart is a radio button: the buttons of a chart are one stop of the tabulator key, the arrow
keys go from one to the next, and a tap chooses one. The style sheet shows what the chosen column says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_style.reporting.markup import Markup, join, tag, text

MOST_COLUMNS = 48  # of a chart; a pointer finds no narrower ones


@dataclass(frozen=True)
class Row:
    style: str  # the class of its run, such as "run-1"
    words: str


@dataclass(frozen=True)
class Readout:
    """A column of the chart's field and what it says. Places are shares of the field's width."""

    left: float
    right: float
    at: float  # where the line is drawn
    head: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Area:
    """The field within the drawing, in shares of the drawing's size."""

    left: float
    top: float
    width: float
    height: float


def columns(places: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the middles of the columns for values at these places, and the edges between them: a column for each
    place if there are few, else columns of equal width."""
    distinct = sorted(set(places))
    if len(distinct) <= MOST_COLUMNS:
        return distinct, [(before + after) / 2 for before, after in pairwise(distinct)]
    width = (distinct[-1] - distinct[0]) / MOST_COLUMNS
    edges = [distinct[0] + index * width for index in range(MOST_COLUMNS + 1)]
    return [(before + after) / 2 for before, after in pairwise(edges)], edges[1:-1]


def nearest(places: Sequence[float], middles: Sequence[float], edges: Sequence[float]) -> dict[int, int]:
    """Return by column the index of the place that is nearest to its middle, for the columns that have any."""
    found: dict[int, int] = {}
    for index, place in enumerate(places):
        column = bisect_right(edges, place)
        best = found.setdefault(column, index)
        if abs(place - middles[column]) < abs(places[best] - middles[column]):
            found[column] = index
    return found


def overlay(key: str, title: str, area: Area, readouts: Sequence[Readout]) -> Markup:
    """Return the columns, to be laid over the drawing."""
    if not readouts:
        return Markup("")
    place = f"left:{_percent(area.left)};top:{_percent(area.top)};width:{_percent(area.width)};" + (
        f"height:{_percent(area.height)}"
    )
    about = f"{title}: values"
    buttons = join(_column(key, readout) for readout in readouts)
    return tag("div", buttons, class_="readouts", role="radiogroup", aria_label=about, style=place)


def _column(key: str, readout: Readout) -> Markup:
    width = readout.right - readout.left
    line = (readout.at - readout.left) / width if width > 0 else 0.5
    rows = (tag("span", tag("i", class_=f"key {row.style}"), text(row.words)) for row in readout.rows)
    side = "before" if readout.at > 0.5 else "after"
    return tag(
        "label",
        tag("input", type="radio", name=f"read-{key}"),
        tag("u", style=f"left:{_percent(line)}"),
        tag("span", tag("b", text(readout.head)), *rows, class_=f"said {side}"),
        style=f"left:{_percent(readout.left)};width:{_percent(width)}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
