"""Each token of an epoch is trained exactly once, whatever stages, rows and ranks do to it."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.schedule.random_order import GROUP, RandomOrder
from megatron_style.schedule.stages import StageSchedule, StepPlan
from megatron_style.schedule.unread import Unread
from tests.support.runs import tiny_run


def trained_places(plan: StepPlan, data_parallel: int) -> np.ndarray:
    read = []
    for rank in range(data_parallel):
        for micro in range(plan.stage.accumulation):
            reading = plan.read(data_rank=rank, micro=micro)
            for places, length in zip(reading.places, reading.lengths, strict=True):
                read.append(places[:length])
    return np.concatenate(read)


@st.composite
def runs(draw: st.DrawFn) -> tuple[RunConfig, int, int]:
    data_parallel = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), min_size=1, max_size=4))
    extents = st.one_of(
        st.builds(lambda n: {"epochs": n}, st.integers(1, 3)),
        st.builds(lambda n: {"steps": n}, st.integers(1, 30)),
        st.builds(lambda n: {"tokens": n}, st.integers(1, 2000)),
    )
    stages = [{"segment_length": length, "micro_rows": 1} | draw(extents) for length in lengths]
    cache = draw(st.booleans())
    tokens = draw(st.integers(24 * data_parallel, 700))
    return tiny_run(stages=stages, tokens_per_batch=24, cache=cache), tokens, data_parallel


@pytest.mark.slow
@pytest.mark.parametrize("examples", [60, pytest.param(300, marks=pytest.mark.sweep)])
def test_every_token_of_an_epoch_is_trained_exactly_once(examples: int) -> None:
    @settings(max_examples=examples)
    @given(runs(), st.sampled_from([GROUP, 8]))
    def check(case: tuple[RunConfig, int, int], group: int) -> None:
        with patch("megatron_style.schedule.passes.RandomOrder", partial(RandomOrder, group=group, strip=4)):
            check_exactly_once(*case)

    check()


def check_exactly_once(run: RunConfig, corpus_tokens: int, data_parallel: int) -> None:
    schedule = StageSchedule(run, corpus_tokens=corpus_tokens, data_parallel=data_parallel)
    times_read: dict[int, np.ndarray] = {}
    for step in range(schedule.total_steps):
        plan = schedule.plan(step)
        places = trained_places(plan, data_parallel)
        assert len(places) == plan.tokens > 0
        np.add.at(times_read.setdefault(plan.blend.epochs[0], np.zeros(corpus_tokens, int)), places, 1)
    *complete, last = (times_read[epoch] for epoch in sorted(times_read))
    assert all((times == 1).all() for times in complete)
    assert last.max() == 1  # the last epoch may be cut short by the end of the run, but nothing is read twice


@settings(max_examples=100)
@given(runs())
def test_stages_last_as_long_as_they_say(case: tuple[RunConfig, int, int]) -> None:
    run, corpus_tokens, data_parallel = case
    schedule = StageSchedule(run, corpus_tokens=corpus_tokens, data_parallel=data_parallel)
    plans = [schedule.plan(step) for step in range(schedule.total_steps)]
    for index, extent in enumerate(run.stages):
        mine = [plan for plan in plans if plan.stage.index == index]
        if extent.steps:
            assert len(mine) == extent.steps
        if extent.tokens:
            *but_last, last = (plan.tokens for plan in mine)
            assert sum(but_last) < extent.tokens <= sum(but_last) + last
        if extent.epochs:
            assert len({plan.blend.epochs[0] for plan in mine}) == extent.epochs


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
def test_consecutive_segments_of_a_lane_touch(data_parallel: int) -> None:
    run = tiny_run(stages=[{"segment_length": 4, "epochs": 2}, {"segment_length": 8, "epochs": 1}], tokens_per_batch=24)
    schedule = StageSchedule(run, corpus_tokens=997, data_parallel=data_parallel)
    for step in range(1, schedule.total_steps):
        before, now = schedule.plan(step - 1), schedule.plan(step)
        if now.opens_lanes:
            continue
        for rank in range(data_parallel):
            previous, reading = (plan.read(data_rank=rank, micro=0) for plan in (before, now))
            assert (previous.places[:, -1] + 1 == reading.places[:, 0])[reading.lengths > 0].all()


@pytest.mark.parametrize(("data_parallel", "micro_rows"), [(1, 1), (1, 6), (2, 1), (2, 3), (3, 2)])
def test_the_global_batch_does_not_depend_on_how_it_is_split(data_parallel: int, micro_rows: int) -> None:
    whole = StageSchedule(tiny_run(tokens_per_batch=24 * data_parallel), corpus_tokens=500, data_parallel=1)
    split = StageSchedule(
        tiny_run(tokens_per_batch=24, micro_rows=micro_rows), corpus_tokens=500, data_parallel=data_parallel
    )
    assert whole.total_steps == split.total_steps
    for step in range(whole.total_steps):
        expected = trained_places(whole.plan(step), 1)
        np.testing.assert_array_equal(trained_places(split.plan(step), data_parallel), expected)


def test_only_the_last_step_of_a_pass_is_short() -> None:
    schedule = StageSchedule(tiny_run(tokens_per_batch=24), corpus_tokens=24 * 10 + 7, data_parallel=1)
    tokens = [schedule.plan(step).tokens for step in range(schedule.total_steps)]
    assert tokens == [24] * 10 + [7]


@given(st.data())
def test_what_is_kept_of_the_unread_is_what_was_asked_for(data: st.DataObject) -> None:
    edges = data.draw(st.lists(st.integers(0, 100), min_size=2, max_size=12, unique=True).map(sorted))
    edges = edges[: len(edges) // 2 * 2]
    unread = Unread(np.array(edges[::2]), np.array(edges[1::2]))
    stream = unread.in_stream(np.arange(unread.tokens))
    places = data.draw(st.lists(st.integers(0, unread.tokens), max_size=8).map(sorted))
    places = places[: len(places) // 2 * 2]
    kept = unread.keep(np.array(places[::2], int), np.array(places[1::2], int))
    expected = [p for a, b in zip(places[::2], places[1::2], strict=True) for p in stream[a:b]]
    assert [p for a, b in zip(kept.starts, kept.stops, strict=True) for p in range(a, b)] == expected


@settings(max_examples=60)
@given(runs())
def test_tokens_and_places_are_those_of_the_steps_before(case: tuple[RunConfig, int, int]) -> None:
    """Computed without looking at every segment; the place as earlier versions wrote it is understood, too."""
    run, corpus_tokens, data_parallel = case
    schedule = StageSchedule(run, corpus_tokens=corpus_tokens, data_parallel=data_parallel)
    total, places = 0, []
    for step in range(schedule.total_steps):
        assert schedule.tokens_before(step) == total
        assert schedule.is_at(step, schedule.place_of(step))
        assert schedule.is_at(step, schedule._unread_at(step))
        places.append(tuple(schedule.place_of(step).values()))
        total += schedule.plan(step).tokens
    assert schedule.tokens_before(schedule.total_steps) == total
    assert len(set(places)) == len(places)  # no two steps are at the same place


@pytest.mark.parametrize("extent", [{"epochs": 2**40}, {"steps": 2**63}, {"tokens": 2**80}])
def test_a_run_without_end_is_refused_before_it_is_laid_out(
    extent: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_style.schedule.stages.MOST_PASSES", 100)
    run = tiny_run(stages=[{"segment_length": 4, "epochs": 1}, {"segment_length": 8, **extent}])
    with pytest.raises(UserError, match=r"stages\.1: the run would read its 1200 tokens more than 100 times"):
        StageSchedule(run, corpus_tokens=1200, data_parallel=1)
