"""Measures from the record of a run, and of its baseline."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_style.base.events import Event, SampleEvent, TrainEvent, ValidEvent
from megatron_style.paper.measures import Evaluated, Evaluation, RunResult, ToMatch, TotalTime, TrainSpeed
from megatron_style.paper.results.keeping import thinned
from megatron_style.reporting.history import HeldOut, Place, RunHistory, StageOpening

EVALUATION = Evaluation("cached")


def result(losses: dict[int, float], *, seconds_per_step: float = 1.0, last_stage_opens: int = 1) -> RunResult:
    """A run of 10 tokens a step, validated at some steps."""
    places = {step: Place(step, 10.0 * step, seconds_per_step * step) for step in losses}
    stages = (StageOpening(Place(1), 4, 0), StageOpening(Place(last_stage_opens), 8, 0))
    held_out = tuple(HeldOut(places[step], loss, None, ()) for step, loss in losses.items())
    return RunResult(RunHistory("run", "", (), stages, (), held_out, ()), {})


BASELINE = result({10: 5.0, 20: 4.0})


@pytest.mark.parametrize(
    ("losses", "share"),
    [
        ({10: 4.5, 20: 3.5}, 15 / 20),  # halfway between two validations
        ({10: 5.0, 20: 4.0}, 1.0),
        ({10: 5.0, 20: 4.1}, math.inf),
    ],
)
def test_tokens_to_match_are_a_share_of_the_baselines(losses: dict[int, float], share: float) -> None:
    run = result(losses, seconds_per_step=0.5)
    assert ToMatch("tokens").read(run, BASELINE) == pytest.approx(share)
    assert ToMatch("seconds").read(run, BASELINE) == pytest.approx(share / 2)


def test_validations_before_the_last_stage_do_not_count() -> None:
    """They may be another run's, by another protocol, or not there at all."""
    with_them, without = ({5: 3.9, 10: 4.5, 20: 3.5}, {10: 4.5, 20: 3.5})
    shares = [ToMatch("tokens").read(result(losses, last_stage_opens=6), BASELINE) for losses in (with_them, without)]
    assert shares == [pytest.approx(15 / 20)] * 2


def test_times_and_speeds() -> None:
    run = result({20: 4.0}, seconds_per_step=0.5)
    assert TotalTime().read(run, BASELINE) == 0.5
    assert TrainSpeed().read(run, None) == 20.0
    assert TotalTime().read(run, None) is None
    assert ToMatch("tokens").read(run, None) is None


@pytest.mark.parametrize(("words", "expected"), [(None, math.exp(2)), (40, math.exp(3))])
def test_perplexity_is_per_word(words: int | None, expected: float) -> None:
    said = {"mode": "cached", "tokens": 60, "words": words, "loss_nats": 2.0, "tokens_per_second": 9.0}
    run = RunResult(BASELINE.history, {EVALUATION: said})
    assert Evaluated("perplexity", EVALUATION).read(run, None) == expected
    assert Evaluated("loss", EVALUATION).read(run, None) == 2.0
    assert Evaluated("speed", EVALUATION).read(run, None) == 9.0


def test_with_neighbours_it_is_the_mixtures() -> None:
    evaluation = replace(EVALUATION, neighbours=1024)
    said = {"tokens": 60, "words": None, "loss_nats": 2.0, "mixture_loss_nats": 1.5}
    run = RunResult(BASELINE.history, {evaluation: said})
    assert Evaluated("perplexity", evaluation).read(run, None) == math.exp(1.5)


@pytest.mark.parametrize(("tokens", "speed"), [(100, 91.0), (10, 10.0), (5, 20.0)])
def test_the_first_of_sliding_windows_does_not_make_them_fast(tokens: int, speed: float) -> None:
    """At 100 tokens a second 91 windows of 10 tokens take 1 s where there are 100 tokens, and one takes 0.1 s of 10."""
    said = {"mode": "sliding", "tokens": tokens, "segment_length": 10, "stride": 1, "tokens_per_second": 100.0}
    run = RunResult(BASELINE.history, {EVALUATION: said})
    assert Evaluated("speed", EVALUATION).read(run, None) == pytest.approx(speed)


def test_kept_records_are_thin_and_have_the_totals(tmp_path: Path) -> None:
    events: list[Event] = [TrainEvent(step=step) for step in range(1, 1001)]
    events += [ValidEvent(step=1000, by_position=(1.0,)), SampleEvent(step=1000)]
    kept = thinned(events)
    assert len([event for event in kept if isinstance(event, TrainEvent)]) <= 60
    assert kept[-2:] == [TrainEvent(step=1000), ValidEvent(step=1000)]
