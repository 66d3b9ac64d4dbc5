"""Runs compared: their settings, their results, and when each became as good as another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_style.reporting.history import HeldOut, RunHistory


@dataclass(frozen=True)
class Difference:
    key: str
    values: tuple[str | None, ...]  # one per run; None: not set


@dataclass(frozen=True)
class Match:
    """The place at which a run's held-out loss reached a goal."""

    tokens: float | None
    seconds: float | None
    at_most: bool  # the first validation was below the goal, so that it may have been reached earlier


def differences(runs: Sequence[RunHistory]) -> tuple[Difference, ...]:
    """Return the keys whose values differ between the run files, in the order of the files."""
    files = [dict(run.settings) for run in runs]
    found = []
    for key in dict.fromkeys(chain.from_iterable(files)):
        values = tuple(file.get(key) for file in files)
        if len(set(values)) > 1:
            found.append(Difference(key, values))
    return tuple(found)


def compares(run: RunHistory, other: RunHistory) -> bool:
    """True unless the losses of the two were measured on different text or with different vocabularies."""
    return run.text_digest == other.text_digest or not (run.text_digest and other.text_digest)


def by_text(runs: Sequence[RunHistory]) -> dict[str, list[RunHistory]]:
    """Return the validated runs by the digest of their held-out text; those that did not record it are under ""."""
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
    """Return the first place at which the run's held-out loss was not above the goal; None if it never was.

    Between two validations, tokens and time are interpolated linearly over the loss."""
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
