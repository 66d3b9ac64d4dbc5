"""Runs beside each other: what was set apart, how far each came, and how soon each was as good as another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.reporting.history import HeldOut, RunHistory


@dataclass(frozen=True)
class Difference:
    key: str
    values: tuple[str | None, ...]  # one for each run; None: not set


@dataclass(frozen=True)
class Match:
    """Where a run's held-out loss came down to a goal."""

    tokens: float | None
    seconds: float | None
    at_most: bool  # already the first validation was as good: it may have been there before


def differences(runs: Sequence[RunHistory]) -> tuple[Difference, ...]:
    """The keys of the run files that do not hold the same in all runs, in the order of the files."""
    files = [dict(run.settings) for run in runs]
    keys = dict.fromkeys(key for file in files for key in file)
    rows = (Difference(key, tuple(file.get(key) for file in files)) for key in keys)
    return tuple(row for row in rows if len(set(row.values)) > 1)


def compares(run: RunHistory, other: RunHistory) -> bool:
    """True unless the losses of the two were measured on other text, or in another vocabulary."""
    return run.text_digest == other.text_digest or not (run.text_digest and other.text_digest)


def by_text(runs: Sequence[RunHistory]) -> dict[str, list[RunHistory]]:
    """Return the validated runs by what they were validated on; under "" those that did not record it."""
    groups: dict[str, list[RunHistory]] = {}
    for run in runs:
        if run.held_out:
            groups.setdefault(run.text_digest, []).append(run)
    return groups


def final(run: RunHistory) -> HeldOut | None:
    return next((valid for valid in reversed(run.held_out) if valid.is_finite), None)


def best(run: RunHistory) -> HeldOut | None:
    finite = (valid for valid in run.held_out if valid.is_finite)
    return min(finite, key=loss_of, default=None)


def loss_of(valid: HeldOut) -> float:
    assert valid.loss is not None
    return valid.loss


def match(run: RunHistory, goal: float) -> Match | None:
    """The first place at which the run's held-out loss was not above the goal; None if it never was.

    Between two validations tokens and time are taken to grow evenly while the loss falls from one to the other."""
    finite = [valid for valid in run.held_out if valid.is_finite]
    reached = next((index for index, valid in enumerate(finite) if loss_of(valid) <= goal), None)
    if reached is None:
        return None
    after = finite[reached]
    if reached == 0:
        return Match(after.at.tokens, after.at.seconds, at_most=loss_of(after) < goal)
    before = finite[reached - 1]
    share = (loss_of(before) - goal) / (loss_of(before) - loss_of(after))
    return Match(
        _between(before.at.tokens, after.at.tokens, share),
        _between(before.at.seconds, after.at.seconds, share),
        at_most=False,
    )


def _between(low: float | None, high: float | None, share: float) -> float | None:
    return None if low is None or high is None else low + share * (high - low)
