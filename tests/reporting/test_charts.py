"""Charts show the figures of the runs they are made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_style.reporting.charts import ALONG, by_position, curves, rank_times, speeds
from megatron_style.reporting.history import RunHistory, read_run
from megatron_style.reporting.svg import Chart
from tests.support.written_runs import BASELINE, LONG, SHORTFORMER, WrittenRun, write_run

TOKENS, TIME, FLOPS = ALONG


def history(folder: Path, name: str, run: WrittenRun) -> RunHistory:
    return read_run(name, write_run(folder / name, run))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunHistory, ...]:
    return tuple(history(tmp_path, name, run) for name, run in (("a", SHORTFORMER), ("b", BASELINE), ("c", LONG)))


def test_a_single_run_has_its_stages_under_every_curve(runs: tuple[RunHistory, ...]) -> None:
    for along in ALONG:
        for chart in curves(runs[:1], along):
            assert [(band.label, band.row) for band in chart.bands] == [("L=128", None), ("L=512", None)]
            first, second = chart.bands
            assert (first.low, first.high, second.high) == (0, second.low, along.of(runs[0].end))


def test_stages_of_several_runs_have_a_row_each_unless_they_are_the_same(tmp_path: Path) -> None:
    runs = [history(tmp_path, name, run) for name, run in (("a", LONG), ("b", replace(LONG, seed=9)), ("c", BASELINE))]
    assert [band.row for band in loss_of(runs[:2]).bands] == [None] * 3
    assert [band.row for band in loss_of(runs).bands] == [0, 0, 0, 1, 1, 1, 2]


def loss_of(runs: list[RunHistory]) -> Chart:
    return curves(runs, TOKENS)[0]


def test_the_axis_of_perplexity_holds_all_that_is_held_out_and_the_lowest(runs: tuple[RunHistory, ...]) -> None:
    axis = curves(runs, TIME)[1].y
    held_out = [valid.perplexity or 0 for run in runs for valid in run.held_out]
    training = [event.perplexity or 0 for run in runs for event in run.trained]
    assert axis.low < min(training) < min(held_out) < max(held_out) < axis.high < max(training)


def test_loss_by_position_is_that_of_the_last_validation_and_of_earlier_stages_ends(
    runs: tuple[RunHistory, ...],
) -> None:
    chart = by_position(runs)
    assert chart is not None
    assert [line.name for line in chart.lines] == [
        "a, step 1200", "a, step 2000", "b, step 2000", "c, step 700", "c, step 1400", "c, step 1900",
    ]  # fmt: skip
    assert [line.has_marks for line in chart.lines] == [False, True, True, False, False, True]
    assert [point.y for point in chart.lines[1].points] == list(runs[0].held_out[-1].by_position)
    assert chart.lines[0].points[0].x == pytest.approx(100 / 32)  # the middle of the first of 16 bands


def test_bars_stand_by_segment_length_and_in_the_order_of_runs(runs: tuple[RunHistory, ...]) -> None:
    for chart in speeds(runs):
        assert {group.label: [bar.name for bar in group.bars] for group in chart.groups} == {
            "L=64": ["c"], "L=128": ["a", "c"], "L=512": ["a", "b"], "L=1024": ["c"],
        }  # fmt: skip
        assert [group.label for group in chart.groups] == ["L=64", "L=128", "L=512", "L=1024"]


def test_a_run_with_several_ranks_shows_the_slowest_and_the_fastest(tmp_path: Path) -> None:
    alone = history(tmp_path, "alone", SHORTFORMER)
    shared = history(tmp_path, "shared", replace(SHORTFORMER, slow_rank=5))
    assert rank_times([alone], TOKENS) is None
    chart = rank_times([alone, shared], TOKENS)
    assert chart is not None
    assert [line.name for line in chart.lines] == ["shared, slowest", "shared, fastest"]
    slowest, fastest = chart.lines
    assert all(0.2 <= point.y <= 0.22 for point in slowest.points)
    assert [point.y for point in fastest.points] == pytest.approx([0.11] * len(slowest.points))
    assert len(slowest.points) == len(shared.trained)
