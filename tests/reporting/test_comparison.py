"""Comparisons, against numbers computed by hand: when a run reached another's loss, and which settings differ."""

from __future__ import annotations

import math

import pytest

from megatron_style.reporting.comparison import Difference, Match, best, differences, final, match
from megatron_style.reporting.history import HeldOut, Place, RunHistory


def run_with(*validations: tuple[float, float, float], settings: tuple[tuple[str, str], ...] = ()) -> RunHistory:
    """Validations as (tokens, seconds, loss)."""
    held_out = tuple(
        HeldOut(Place(step, tokens, seconds), loss, None, ())
        for step, (tokens, seconds, loss) in enumerate(validations, start=1)
    )
    return RunHistory("a run", "", settings, stages=(), trained=(), held_out=held_out, samples=())


FALLING = run_with((100, 10, 5.0), (200, 30, 4.0), (300, 40, 3.5))


@pytest.mark.parametrize(
    ("goal", "tokens", "seconds"),
    [(4.0, 200, 30), (4.25, 175, 25), (4.5, 150, 20), (3.75, 250, 35), (3.5, 300, 40)],
)
def test_between_validations_tokens_and_time_grow_evenly(goal: float, tokens: float, seconds: float) -> None:
    found = match(FALLING, goal)
    assert found is not None
    assert (found.tokens, found.seconds) == (pytest.approx(tokens), pytest.approx(seconds))
    assert not found.at_most


def test_a_goal_below_the_lowest_loss_is_never_met() -> None:
    assert match(FALLING, 3.49) is None
    assert match(run_with(), 3.0) is None


def test_a_first_validation_below_the_goal_is_a_bound() -> None:
    assert match(FALLING, 6.0) == Match(100, 10, at_most=True)
    assert match(FALLING, 5.0) == Match(100, 10, at_most=False)


def test_the_first_time_counts_when_a_loss_rises_again() -> None:
    found = match(run_with((100, 1, 5.0), (200, 2, 3.0), (300, 3, 4.5), (400, 4, 2.0)), 4.0)
    assert found == Match(150, 1.5, at_most=False)


def test_validations_that_are_not_finite_are_passed_over() -> None:
    run = run_with((100, 1, 5.0), (200, 2, math.nan), (300, 3, math.inf), (500, 5, 3.0), (600, 6, math.nan))
    assert match(run, 4.0) == Match(300, 3, at_most=False)
    assert final(run) == best(run) == run.held_out[3]


def test_time_that_was_not_recorded_stays_unknown() -> None:
    held_out = tuple(HeldOut(Place(1, tokens), loss, None, ()) for tokens, loss in ((100.0, 5.0), (200.0, 4.0)))
    run = RunHistory("old", "", (), (), (), held_out, ())
    assert match(run, 4.5) == Match(150, None, at_most=False)


def test_the_best_need_not_be_the_last() -> None:
    run = run_with((100, 1, 5.0), (200, 2, 3.0), (300, 3, 4.5))
    assert (best(run), final(run)) == (run.held_out[1], run.held_out[2])


def test_only_what_differs_is_listed() -> None:
    same = ("model.layers", "4")
    runs = [
        run_with(settings=(same, ("seed", "1"))),
        run_with(settings=(same, ("seed", "2"))),
        run_with(settings=(same, ("model.cache", "false"))),
    ]
    assert differences(runs) == (
        Difference("seed", ("1", "2", None)),
        Difference("model.cache", (None, None, "false")),
    )
    assert differences(runs[:1] * 2) == ()
