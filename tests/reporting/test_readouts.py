"""Every value of a short line can be read from a chart, and of a long one those nearest to the columns' middles."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_style.base.units import MEMORY, TIME
from megatron_style.reporting.comparison import scatter
from megatron_style.reporting.history import read_run
from megatron_style.reporting.page import page
from megatron_style.reporting.readouts import MOST_COLUMNS, Area, Readout, Row, columns, nearest, overlay
from megatron_style.reporting.tables import in_one_unit
from tests.support.written_runs import write_run


def test_few_places_have_a_column_each() -> None:
    middles, edges = columns([3.0, 1.0, 2.0, 2.0])
    assert (middles, edges) == ([1.0, 2.0, 3.0], [1.5, 2.5])
    assert nearest([1.0, 3.0], middles, edges) == {0: 0, 2: 1}


def test_many_places_share_columns_and_the_nearest_to_the_middle_is_shown() -> None:
    places = [float(place) for place in range(1000)]
    middles, edges = columns(places)
    assert len(middles) == len(edges) + 1 == MOST_COLUMNS
    found = nearest(places, middles, edges)
    assert sorted(found) == list(range(MOST_COLUMNS))
    assert all(abs(places[index] - middles[column]) <= 0.5 for column, index in found.items())


def test_a_line_without_values_has_no_columns() -> None:
    assert columns([]) == ([], [])
    assert overlay("key", "Loss", Area(0, 0, 1, 1), []) == ""


def test_what_a_column_says_is_escaped_and_in_one_group_of_buttons() -> None:
    said = overlay("key", "Loss", Area(0, 0, 1, 1), [Readout(0, 0.5, 0.2, "step <1>", (Row("run-1", "a<b: 1"),))] * 2)
    assert said.count('type="radio" name="read-key"') == 2
    assert "step &lt;1&gt;" in said
    assert "a&lt;b: 1" in said


@pytest.mark.parametrize(
    ("quantity", "values", "head", "cells"),
    [
        (TIME, [30.0, 5400.0, None], "x, h", ["0.00833", "1.5", "-"]),
        (MEMORY, [2**20, 2**30], "x, GiB", ["0.000977", "1"]),
        (TIME, [None], "x, s", ["-"]),
    ],
)
def test_a_column_has_one_unit(quantity: object, values: list[float | None], head: str, cells: list[str]) -> None:
    assert in_one_unit("x", quantity, values) == (head, cells)  # type: ignore[arg-type]


def test_the_chance_in_a_point_by_position_follows_from_the_tokens_that_were_scored(tmp_path: Path) -> None:
    run = read_run("short", write_run(tmp_path / "run"))
    last = replace(run.held_out[-1], scored_tokens=1464.0)
    words = page([replace(run, held_out=(last,))])
    assert "A point is the mean of about 92 tokens" in words
    assert "differ by up to 0.9 nats by chance" in words
    assert "A point is the mean" not in page([replace(run, held_out=(replace(last, scored_tokens=None),))])


def test_the_chance_in_a_curve_is_found_under_its_trend_and_its_jumps() -> None:
    chance = random.Random(1)
    trend = [8 / (1 + step / 50) + (2 if step > 300 else 0) for step in range(600)]
    assert scatter([value + chance.gauss(0, 0.05) for value in trend]) == pytest.approx(0.05, rel=0.15)
    assert scatter(trend) == pytest.approx(0, abs=1e-3)
    assert scatter([None, math.nan, *trend[:10]]) is None
