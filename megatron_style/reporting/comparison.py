"""The figures of runs and of their stages, and runs compared: their settings, their results, and when each became as
good as another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_style.reporting.history import HeldOut, Place, RunHistory

_SHORT_CURVE = 20  # points
_MEDIAN_DEVIATION = 0.6745  # of a normal distribution, in standard deviations


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


def scatter(values: Sequence[float | None]) -> float | None:
    """Return the standard deviation of the chance in a curve; None if the curve is short. What is left of a smooth
    curve after two differences is its chance, with six times the variance; the median ignores jumps."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < _SHORT_CURVE:
        return None
    bends = [abs(before - 2 * here + after) for before, here, after in zip(known, known[1:], known[2:], strict=False)]
    return statistics.median(bends) / (6**0.5 * _MEDIAN_DEVIATION)


@dataclass(frozen=True)
class StageFigures:
    label: str
    segment_length: int | None
    cache_length: int | None
    steps: int
    tokens: float | None
    seconds: float | None
    tokens_per_second: float | None
    flops_per_second: float | None
    memory_bytes: float | None


def stage_spans(run: RunHistory) -> tuple[tuple[Place, Place], ...]:
    """Return for each stage the totals before its first step and after its last."""
    begins = [stage.before for stage in run.stages]
    return tuple(zip(begins, [*begins[1:], run.end], strict=True)) if begins else ()


def stage_figures(run: RunHistory) -> tuple[StageFigures, ...]:
    """Return each stage's figures. Labels of equal segment lengths are numbered: L=128, then L=128 (2)."""
    spans = stage_spans(run)
    labels = [stage.label for stage in run.stages]
    counts = [labels[: index + 1].count(label) for index, label in enumerate(labels)]
    return tuple(
        _figures(run, index, label if count == 1 else f"{label} ({count})", *spans[index])
        for index, (label, count) in enumerate(zip(labels, counts, strict=True))
    )


def _figures(run: RunHistory, index: int, label: str, begin: Place, end: Place) -> StageFigures:
    is_last = index + 1 == len(run.stages)
    inside = [event for event in run.trained if begin.step <= event.at.step and (is_last or event.at.step < end.step)]
    tokens, seconds, flops = (
        _difference(getattr(begin, name), getattr(end, name)) for name in ("tokens", "seconds", "flops")
    )
    if seconds is None:  # older records have the time of the stage only
        seconds = inside[-1].stage_seconds if inside else None
    memory = [event.memory_bytes for event in inside if event.memory_bytes is not None]
    return StageFigures(
        label,
        run.stages[index].segment_length,
        run.stages[index].cache_length,
        steps=max(0, end.step - begin.step + is_last),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=_rate(tokens, seconds) or _median(event.tokens_per_second for event in inside),
        flops_per_second=_rate(flops, seconds),
        memory_bytes=max(memory, default=None),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None
