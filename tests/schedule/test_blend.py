"""A blend reads each token of each source exactly once per epoch of that source, whatever weights, stages, grids and
resumptions do to it."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.schedule.blend import sources_of
from megatron_style.schedule.passes import Reading
from megatron_style.schedule.stages import StageSchedule, StepPlan
from tests.support.runs import tiny_run

TOKENS = 24  # per batch
Case = tuple[RunConfig, tuple[int, ...], list[tuple[int, int]]]


def blended(sources: list[dict[str, Any]], **settings: Any) -> RunConfig:
    named = [{"path": f"source{index}/train", **source} for index, source in enumerate(sources)]
    return tiny_run(**{"tokens_per_batch": TOKENS, "data": {"train": named}} | settings)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a run, the tokens of its sources, and the grids that it has: (ranks, steps)."""
    kind = draw(st.sampled_from(["weight", "epochs"]))
    count = draw(st.integers(1, 4))
    sources = [{kind: draw(st.floats(0.3, 5))} for _ in range(count)]
    extents = st.one_of(
        st.builds(lambda n: {"steps": n}, st.integers(1, 30)),
        st.builds(lambda n: {"tokens": n}, st.integers(1, 2000)),
    )
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    stages = [{"segment_length": length, "micro_rows": 1} | draw(extents) for length in lengths]
    tokens = draw(st.tuples(*[st.integers(24, 400)] * count))
    grids = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 25)), min_size=1, max_size=3))
    return blended(sources, stages=stages, cache=draw(st.booleans())), tokens, grids


def resumed(case: Case) -> StageSchedule:
    """Return the schedule of the last grid. Each resumes where the one before ends, at the same place."""
    run, tokens, grids = case
    schedule = None
    step = 0
    for ranks, steps in grids:
        entry = (step, TOKENS * ranks)
        history = tuple(old for old in schedule.history if old[0] < step) if schedule else ()
        following = StageSchedule(run, corpus_tokens=tokens, data_parallel=ranks, history=(*history, entry))
        if schedule is not None:
            assert following.is_at(step, schedule.place_of(step))
            for earlier in {0, step // 2, step - 1}:
                expect_same(everything(following.plan(earlier)), everything(schedule.plan(earlier)))
        schedule = following
        step = min(step + steps, schedule.total_steps)
    assert schedule is not None
    return schedule


def everything(plan: StepPlan) -> Reading:
    return plan.blend.read(plan.turn, np.arange(plan.blend.rows))


def expect_same(reading: Reading, expected: Reading) -> None:
    for name in ("places", "lengths", "sources"):
        np.testing.assert_array_equal(getattr(reading, name), getattr(expected, name))


@pytest.mark.slow
@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.sweep)])
def test_every_token_of_every_source_is_trained_exactly_once_per_epoch(examples: int) -> None:
    settings(max_examples=examples)(given(cases())(check_exactly_once_per_epoch))()


def check_exactly_once_per_epoch(case: Case) -> None:
    try:
        schedule = resumed(case)
    except UserError:  # a source without rows, or smaller than them
        assume(False)
    _, tokens, _ = case
    times_read: dict[tuple[int, int], np.ndarray] = {}
    last: dict[int, int] = defaultdict(int)
    for step in range(schedule.total_steps):
        plan = schedule.plan(step)
        reading = everything(plan)
        counts = np.zeros(len(tokens), int)
        counted = np.arange(reading.places.shape[1]) < reading.lengths[:, None]
        for source, epoch in enumerate(plan.blend.epochs):
            own = reading.sources == source
            assert reading.places[own].max() < tokens[source]  # also where they are not counted
            places = reading.places[own][counted[own]]
            np.add.at(times_read.setdefault((source, epoch), np.zeros(tokens[source], int)), places, 1)
            counts[source] = len(places)
            last[source] = epoch
        assert plan.source_tokens == tuple(counts)
        assert min(plan.source_tokens) > 0
        assert schedule.tokens_before(step + 1) - schedule.tokens_before(step) == plan.tokens == counts.sum()
    for (source, epoch), times in times_read.items():
        assert times.max() == 1
        assert epoch == last[source] or times.min() == 1  # only the last epoch may be cut short by the end of the run


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
def test_lanes_continue_across_the_epochs_of_other_sources(data_parallel: int) -> None:
    """All rows open their lanes together, but only those of a source that begins an epoch read elsewhere."""
    run = blended([{"weight": 2}, {"weight": 1}, {"weight": 3}], stages=[{"segment_length": 4, "steps": 90}])
    schedule = StageSchedule(run, corpus_tokens=(503, 97, 1009), data_parallel=data_parallel)
    opened = 0
    for step in range(1, schedule.total_steps):
        plan = schedule.plan(step)
        before = schedule.plan(step - 1)
        earlier = everything(before)
        reading = everything(plan)
        ends = earlier.places[np.arange(len(earlier.lengths)), earlier.lengths - 1]
        began = np.array(plan.blend.epochs) > np.array(before.blend.epochs)
        continues = (reading.lengths > 0) & ~began[reading.sources]
        np.testing.assert_array_equal(earlier.sources, reading.sources)
        np.testing.assert_array_equal(reading.places[continues, 0], ends[continues] + 1)
        assert plan.opens_lanes == began.any()
        opened += plan.opens_lanes
    assert opened > 3


@settings(max_examples=30, deadline=None)
@given(cases())
def test_no_two_steps_of_a_blend_are_at_the_same_place(case: Case) -> None:
    try:
        schedule = resumed(case)
    except UserError:
        assume(False)
    places = [tuple(schedule.place_of(step).values()) for step in range(schedule.total_steps)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("cache", [True, False])
def test_a_list_of_one_source_is_read_like_a_path(cache: bool) -> None:
    stages = [{"segment_length": 4, "epochs": 2}, {"segment_length": 8, "steps": 9}]
    path = StageSchedule(tiny_run(stages=stages, cache=cache), corpus_tokens=997, data_parallel=2)
    run = blended([{"weight": 0.3}], stages=stages, cache=cache)
    listed = StageSchedule(run, corpus_tokens=(997,), data_parallel=2)
    assert listed.total_steps == path.total_steps
    for step in range(path.total_steps):
        assert listed.place_of(step) == path.place_of(step)
        for rank in range(2):
            expected = path.plan(step).read(data_rank=rank, micro=0)
            expect_same(listed.plan(step).read(data_rank=rank, micro=0), expected)


@pytest.mark.parametrize(("data_parallel", "micro_rows"), [(1, 1), (1, 6), (2, 1), (2, 3), (3, 2)])
def test_the_batch_of_a_blend_does_not_depend_on_how_it_is_split(data_parallel: int, micro_rows: int) -> None:
    sources = [{"weight": 3}, {"weight": 2}]
    stages = [{"segment_length": 4, "steps": 40, "micro_rows": micro_rows}]
    schedule = StageSchedule(blended(sources, stages=stages), corpus_tokens=(500, 200), data_parallel=data_parallel)
    for step in range(schedule.total_steps):
        plan = schedule.plan(step)
        expected = everything(plan)
        parts = []
        for rank in range(data_parallel):
            parts += [plan.read(data_rank=rank, micro=micro) for micro in range(plan.stage.accumulation)]
        assert len({part.places.shape[1] for part in parts}) == 1  # all ranks compute the same shapes
        for name in ("places", "lengths", "sources"):
            together = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(together, getattr(expected, name))


def test_a_blend_reads_as_much_of_each_source_as_its_rows() -> None:
    """And opens a pass when the first of them is through: 400 tokens in 4 rows before 1,000 in 8."""
    run = blended([{"weight": 1}, {"weight": 2}], stages=[{"segment_length": 2, "steps": 60}])
    schedule = StageSchedule(run, corpus_tokens=(400, 1000), data_parallel=1)
    assert schedule.rows_of(schedule.stages[0]) == (4, 8)
    opens = [step for step in range(60) if schedule.plan(step).opens_lanes]
    assert opens == [0, 50]
    assert schedule.plan(50).blend.epochs == (1, 0)
    assert [schedule.plan(step).source_tokens for step in (0, 49, 50)] == [(8, 16)] * 3


@given(st.integers(1, 300), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_rows_are_divided_by_the_largest_remainder(rows: int, weights: list[float]) -> None:
    sources = sources_of(blended([{"weight": w} for w in weights], stages=[{"segment_length": 4, "steps": 1}]).data,
                         [100] * len(weights))  # fmt: skip
    total = sum(map(Fraction, weights))
    quotas = [rows * Fraction(weight) / total for weight in weights]
    try:
        allotted = sources.allot(rows, 4, "here")
    except UserError as error:
        refused = str(error).split("'")[1]
        assert quotas[sources.names.index(refused)] < 1
        return
    assert sum(allotted) == rows
    assert all(abs(quota - got) < 1 for quota, got in zip(quotas, allotted, strict=True))


def test_epochs_are_weights_in_proportion_to_the_size_of_the_store() -> None:
    stages = [{"segment_length": 2, "steps": 1}]
    schedule = StageSchedule(blended([{"epochs": 2}, {"epochs": 1}], stages=stages), corpus_tokens=(100, 400),
                             data_parallel=1)  # fmt: skip
    assert schedule.rows_of(schedule.stages[0]) == (4, 8)


@pytest.mark.parametrize(("sources", "tokens", "words"), [
    ([{"weight": 20}, {"weight": 1}], (900, 900),
     "stages.0: data.train: 'source1' would get none of the 6 rows of an update; an update of 84 tokens is enough "
     "(data.tokens_per_batch x data-parallel ranks), or 4.0 times its weight or epochs"),
    ([{"weight": 1}] * 7, (900,) * 7,
     "stages.0: data.train: 'source6' would get none of the 6 rows of an update; an update of 28 tokens is enough "
     "(data.tokens_per_batch x data-parallel ranks)"),
    ([{"weight": 1}, {"weight": 1}], (900, 11),
     "stages.0: data.train: 'source1' has 11 tokens, 3 for each of its 3 rows over all data-parallel ranks, less than "
     "one segment of 4; use a larger corpus, a lower weight, fewer ranks or a smaller data.tokens_per_batch"),
])  # fmt: skip
def test_a_source_without_rows_or_text_is_refused(
    sources: list[dict[str, Any]], tokens: tuple[int, ...], words: str
) -> None:
    run = blended(sources, stages=[{"segment_length": 4, "steps": 9}])
    with pytest.raises(UserError) as refusal:
        StageSchedule(run, corpus_tokens=tokens, data_parallel=1)
    assert str(refusal.value) == words


def test_what_the_refusal_recommends_works() -> None:
    stages = [{"segment_length": 4, "steps": 9}]
    for sources, size in (([{"weight": 20}, {"weight": 1}], 84), ([{"weight": 20}, {"weight": 4}], TOKENS)):
        run = blended(sources, stages=stages, tokens_per_batch=size)
        assert min(StageSchedule(run, corpus_tokens=(900, 900), data_parallel=1).plan(0).source_tokens) == 4
