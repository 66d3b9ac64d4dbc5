"""What a row may see of its lane, against a walk that goes back token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_style.data.batch import ages_in_lanes
from megatron_style.schedule.stages import StageSchedule
from tests.support.runs import tiny_run

END = 0


def age_by_walking(tokens: np.ndarray, lane: list[int]) -> int:
    """Return how many inputs before the last one of a lane belong to the same document and follow one another."""
    age = 0
    while tokens[lane[-1 - age] - 1] != END and age + 1 < len(lane) and lane[-2 - age] == lane[-1 - age] - 1:
        age += 1
    return age


@settings(max_examples=40)
@given(st.data())
def test_ages_follow_documents_and_jumps_of_the_text(data: st.DataObject) -> None:
    data_parallel = data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=1, max_size=3))
    stages = [
        {"segment_length": length, "micro_rows": 1, **data.draw(st.sampled_from([{"steps": 3}, {"steps": 14}]))}
        for length in lengths
    ]
    cache = data.draw(st.booleans())
    if cache:
        stages = [{**stage, "cache_length": data.draw(st.integers(1, 9))} for stage in stages]
    blend = data.draw(st.booleans())
    sources = {"train": [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]} if blend else {}
    run = tiny_run(stages=stages, tokens_per_batch=24, cache=cache, data=sources)
    counts = [data.draw(st.integers(60, 300)) for _ in range(2 if blend else 1)]
    words = data.draw(st.sampled_from([2, 5, 30]))
    streams = [np.random.default_rng(count).integers(0, words, count) for count in counts]
    schedule = StageSchedule(run, corpus_tokens=counts, data_parallel=data_parallel)
    lanes: dict[tuple[int, int], list[int]] = {}
    for step in range(min(schedule.total_steps, 40)):
        plan = schedule.plan(step)
        cache_length = plan.stage.cache_length
        if plan.opens_lanes or not cache:
            lanes.clear()
        for rank in range(data_parallel):
            for micro in range(plan.stage.accumulation):
                reading = plan.read(data_rank=rank, micro=micro)
                ages = ages_in_lanes(streams, reading, END, cache_length)
                tokens = streams[reading.sources[0]]
                lane = lanes.setdefault((rank, micro), [])
                for t in range(int(reading.lengths[0])):
                    lane.append(int(reading.places[0, t]))
                    visible = min(len(lane) - 1, cache_length + t)
                    assert min(int(ages[0, t]), visible) == min(age_by_walking(tokens, lane), visible)
