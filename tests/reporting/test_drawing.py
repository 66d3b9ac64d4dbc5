"""Ticks are round numbers, thinned lines keep their extremes, and text is escaped."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_style.base.units import COUNT, MEMORY, NUMBER, RATE, TIME, Quantity
from megatron_style.reporting.markup import tag, text
from megatron_style.reporting.scale import Scale, even_ticks, labelled_ticks, padded, ratio_ticks
from megatron_style.reporting.svg import Chart, ChartAxis, Line, Point, StageBand, draw, spread, thin


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (0, 10, 6, (0, 2, 4, 6, 8, 10)),
        (0, 10, 5, (0, 5, 10)),
        (3.02, 3.61, 6, (3.1, 3.2, 3.3, 3.4, 3.5, 3.6)),
        (-1, 1, 4, (-1, 0, 1)),
        (0, 18.4e6, 6, (0, 5e6, 10e6, 15e6)),
    ],
)
def test_even_ticks_are_round(low: float, high: float, most: int, ticks: tuple[float, ...]) -> None:
    assert even_ticks(low, high, most) == ticks


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e9), st.integers(3, 8))
def test_even_ticks_are_in_range_few_and_evenly_spaced(low: float, span: float, most: int) -> None:
    high = low + span
    ticks = even_ticks(low, high, most)
    assert 1 <= len(ticks) <= most
    room = span * 1e-6
    assert all(low - room <= tick <= high + room for tick in ticks)
    steps = [after - before for before, after in pairwise(ticks)]
    for step in steps:
        assert step == pytest.approx(steps[0], rel=1e-3)
        assert f"{step:.0e}"[0] in "125"


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (8, 1200, 7, (10, 20, 50, 100, 200, 500, 1000)),
        (0.15, 9, 4, (0.3, 1, 3)),
        (1, 1e6, 7, (1, 10, 100, 1e3, 1e4, 1e5, 1e6)),
        (1, 1e6, 4, (1, 100, 1e4, 1e6)),
        (31, 48, 7, (35, 40, 45)),
    ],
)
def test_ratio_ticks_are_round(low: float, high: float, most: int, ticks: tuple[float, ...]) -> None:
    assert ratio_ticks(low, high, most) == ticks


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e9), st.integers(3, 8))
def test_ratio_ticks_are_in_range_and_neither_one_nor_many(low: float, ratio: float, most: int) -> None:
    high = low * ratio
    ticks = ratio_ticks(low, high, most)
    assert 1 <= len(ticks) <= most
    assert len(ticks) > 1 or ratio < 10
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)


def test_a_scale_maps_its_ends_to_its_ends() -> None:
    for logarithmic in (False, True):
        scale = Scale(2, 32, 100, 200, logarithmic)
        assert (scale.place(2), scale.place(32)) == (100, 200)
    assert Scale(2, 32, 100, 200).place(17) == 150
    assert Scale(2, 32, 100, 200, logarithmic=True).place(8) == pytest.approx(150)
    assert not Scale(2, 32, 100, 200, logarithmic=True).has(0)
    assert not Scale(2, 32, 100, 200).has(math.nan)


@pytest.mark.parametrize("value", [0.0, 4.5, 1e-7, -2.0])
def test_a_single_value_has_a_range(value: float) -> None:
    low, high = padded(value, value)
    assert low < value < high


@pytest.mark.parametrize(
    ("quantity", "high", "labels"),
    [
        (TIME, 1500, ["0", "5 min", "10 min", "15 min", "20 min", "25 min"]),
        (TIME, 3 * 3600, ["0", "1 h", "2 h", "3 h"]),
        (MEMORY, 5 * 2**30, ["0", "1 GiB", "2 GiB", "3 GiB", "4 GiB", "5 GiB"]),
        (COUNT, 1.6e6, ["0", "0.5M", "1M", "1.5M"]),
        (RATE, 6e-3, ["0", "1e-3", "2e-3", "3e-3", "4e-3", "5e-3", "6e-3"]),
    ],
)
def test_an_axis_is_cut_at_round_values_of_its_unit(quantity: Quantity, high: float, labels: list[str]) -> None:
    scale = Scale(0, high, 0, 100)
    most = max(4, len(labels))
    assert [label for _, label in labelled_ticks(quantity, scale, most)] == labels
    assert all(0 <= tick <= high * 1.000001 for tick, _ in labelled_ticks(quantity, scale, most))


def test_each_label_of_a_logarithmic_axis_has_its_own_unit() -> None:
    scale = Scale(0.5, 2e6, 0, 100, logarithmic=True)
    assert [label for _, label in labelled_ticks(COUNT, scale, 4)] == ["1", "100", "10k", "1M"]


def test_a_thinned_line_is_short_and_keeps_ends_extremes_and_gaps() -> None:
    values = [math.sin(step / 500) for step in range(20_000)]
    values[7777], values[12_345], values[15_000] = 9.0, -9.0, math.nan
    points = [Point(float(step), value, step) for step, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= 600
    assert {0, 7777, 12_345, 15_000, 19_999} <= {point.step for point in kept}
    assert [point.x for point in kept] == sorted(point.x for point in kept)
    assert thin(points[:600]) == tuple(points[:600])


def test_a_line_that_is_all_gaps_can_be_thinned() -> None:
    points = [Point(float(step), math.nan, step) for step in range(5000)]
    assert 2 <= len(thin(points)) <= 600


@pytest.mark.parametrize("count", [0, 1, 59, 60, 61, 1000])
def test_spread_points_end_at_the_last(count: int) -> None:
    points = [Point(float(step), 0.0, step) for step in range(count)]
    kept = spread(points, 60)
    assert len(kept) == min(count, 60)
    assert kept[-1:] == tuple(points[-1:])


def chart(*values: float, name: str = "a run") -> str:
    points = tuple(Point(float(step), value, step) for step, value in enumerate(values))
    bands = (StageBand(0, len(values) - 1, "L=128", "even"),)
    axis = ChartAxis(NUMBER, 0.0, float(len(values)))
    return draw(Chart("key", f"about {name}", name, axis, axis, (Line(name, "run-1", points, has_marks=True),), bands))


def line_of(drawing: str) -> str:
    found = re.search(r'<path d="([^"]*)" class="line run-1">', drawing)
    assert found
    return found[1]


def test_what_is_not_finite_is_a_gap() -> None:
    assert line_of(chart(1, 2, 3, 4)).count("M") == 1
    path = line_of(chart(1, math.nan, 3, math.inf, 4, 5))
    assert (path.count("M"), path.count("L")) == (3, 1)
    drawing = chart(1, math.nan, 3)
    assert drawing.count("<circle") == 2
    assert "nan" not in drawing


def test_a_drawing_is_named_and_described_and_labels_its_stages() -> None:
    drawing = chart(1, 2)
    for part in ('<title id="key-title">about a run', '<desc id="key-desc">', ">L=128</text>", 'role="img"'):
        assert part in drawing


@pytest.mark.parametrize("name", ["<script>", '"&"', "$x_{$", "größer"])
def test_names_are_text_and_nothing_else(name: str) -> None:
    for drawing in (chart(1, 2, name=name), tag("p", text(name), title=name)):
        assert "<script" not in drawing
        assert text(name) in drawing
        assert '"&"' not in drawing
