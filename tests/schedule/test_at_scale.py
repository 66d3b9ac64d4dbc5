"""The schedule of 10**12 tokens: exact, and known without a walk over them."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_style.schedule.passes import ShuffledSegments, TextLanes
from megatron_style.schedule.random_order import RandomOrder
from megatron_style.schedule.stages import StageSchedule
from megatron_style.schedule.unread import Unread
from tests.support.runs import tiny_run

HUGE = 10**12


@settings(max_examples=200)
@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_random_order_has_every_number_once(count: int, strip: int, strips: int, data: st.DataObject) -> None:
    order = RandomOrder((3, 1), count, group=strip * strips, strip=strip)
    numbers = order.at(np.arange(count))
    assert sorted(numbers) == list(range(count))
    assert numbers[order.place_of_last] == count - 1
    places = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=9)), int)
    assert order.at(places).tolist() == numbers[places].tolist()
    begin = data.draw(st.integers(0, count - 1))
    left = [number for a, b in zip(*order.rest(begin), strict=True) for number in range(a, b)]
    assert left == sorted(numbers[begin:])


def test_a_text_of_one_group_is_shuffled_as_ever() -> None:
    order = RandomOrder((3, 1, 4), 1000)
    assert order.at(np.arange(1000)).tolist() == np.random.default_rng((3, 1, 4)).permutation(1000).tolist()
    assert order.settings == ()


def test_a_checkpoint_of_another_order_is_at_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def place() -> str:
        return ShuffledSegments(Unread.entire(1000), 4, 2, key=(1,)).place(3)

    plain = place()
    monkeypatch.setattr("megatron_style.schedule.passes.RandomOrder", partial(RandomOrder, group=100, strip=10))
    assert place() != plain


@settings(max_examples=100)
@given(st.integers(10**11, 10**14), st.integers(1, 200_000), st.sampled_from([1, 128, 512, 3072]), st.data())
def test_lanes_of_a_huge_text_are_exact(tokens: int, rows: int, length: int, data: st.DataObject) -> None:
    lanes = TextLanes(Unread.entire(tokens), rows, length)
    turn = data.draw(st.integers(0, lanes.steps - 1))
    row = data.draw(st.integers(0, rows - 1))
    first, end = row * tokens // rows, (row + 1) * tokens // rows  # in Python's own integers
    begin = first + turn * length
    firsts, lengths = lanes.extent(turn, np.array([row]))
    assert (int(firsts[0]), int(lengths[0])) == (begin, max(0, min(length, end - begin)))
    assert lanes.tokens_before(turn) + lanes.after(turn).tokens == tokens
    assert lanes.tokens_before(turn) + lanes.tokens_at(turn) == lanes.tokens_before(turn + 1)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(1, HUGE // 3), min_size=1, max_size=3),
    data_parallel=st.sampled_from([1, 8, 512]),
    tokens=st.integers(HUGE - 10**6, HUGE + 10**6),
    data=st.data(),
)
def test_stages_of_a_huge_text_lose_and_repeat_nothing(
    cache: bool, cuts: list[int], data_parallel: int, tokens: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.permutations([128, 512, 3072]))
    stages = [{"segment_length": length, "tokens": cut} for length, cut in zip(lengths, cuts, strict=False)]
    stages.append({"segment_length": 1024, "epochs": 1})
    run = tiny_run(stages=stages, tokens_per_batch=9216, cache=cache)
    with pytest.MonkeyPatch.context() as patch:  # smaller groups than usual, to be quick
        patch.setattr("megatron_style.schedule.passes.RandomOrder", partial(RandomOrder, group=1 << 17, strip=1 << 16))
        schedule = StageSchedule(run, corpus_tokens=tokens, data_parallel=data_parallel)
        assert schedule.tokens_before(schedule.total_steps) == tokens
        for stretch in schedule._stretches:
            unread = stretch.blend.parts[0].reading_pass.unread
            assert (unread.stops[:-1] <= unread.starts[1:]).all()
            assert unread.tokens == tokens - schedule.tokens_before(stretch.first_step)
        step = data.draw(st.integers(0, schedule.total_steps - 1))
        plan = schedule.plan(step)
        reading = plan.read(data_rank=data_parallel - 1, micro=0)
        assert reading.places.dtype == np.int64
        assert 0 <= reading.places.min() <= reading.places.max() < tokens
        assert (np.diff(reading.places[:, : reading.lengths.min()], axis=1) > 0).all()


@pytest.mark.parametrize("cache", [True, False])
def test_the_first_plan_of_a_huge_text_takes_little_memory(cache: bool) -> None:
    run = tiny_run(stages=[{"segment_length": 128, "epochs": 1}], tokens_per_batch=9216, cache=cache)
    tracemalloc.start()
    try:
        schedule = StageSchedule(run, corpus_tokens=HUGE, data_parallel=8)
        reading = schedule.plan(schedule.total_steps // 2).read(data_rank=3, micro=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reading.places.shape[1] == 128
    assert peak < 120e6


@pytest.mark.parametrize("cache", [True, False])
def test_a_blend_of_a_huge_text_and_a_small_one_takes_little_memory(cache: bool) -> None:
    """Of every epoch that the small one begins, the other holds nothing."""
    sources = [{"path": f"{name}/train", "weight": 1} for name in ("small", "huge")]
    run = tiny_run(
        stages=[{"segment_length": 512, "tokens": HUGE}], tokens_per_batch=9216, cache=cache, data={"train": sources}
    )
    tracemalloc.start()
    try:
        schedule = StageSchedule(run, corpus_tokens=(10**9, HUGE), data_parallel=8)
        reading = schedule.plan(schedule.total_steps // 2).read(data_rank=7, micro=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert schedule.plan(schedule.total_steps - 1).blend.epochs == (499, 0)
    assert set(reading.sources) == {1}
    assert peak < 250e6


def test_every_source_of_a_blend_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads all sources: none may drop the order of another, which takes long to make."""
    sources = [{"path": f"{name}/train", "weight": 1} for name in "abcd"]
    run = tiny_run(stages=[{"segment_length": 2, "steps": 9}], cache=False, data={"train": sources}, seed=271828)
    schedule = StageSchedule(run, corpus_tokens=(900, 901, 902, 903), data_parallel=1)
    made = []
    rng = np.random.default_rng
    monkeypatch.setattr(
        "megatron_style.schedule.random_order.np.random.default_rng", lambda key: made.append(key) or rng(key)
    )
    for step in range(9):
        schedule.plan(step).read(data_rank=0, micro=0)
    assert len(made) == len(set(made)) <= 4
