"""Judges figures: an outcome holds if a test holds with every seed that has all of its figures. The evidence has mean
and spread over these seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_style.paper.measures import Figures

State = Literal["holds", "does not hold", "not tested"]
Test = Callable[[Sequence[float]], bool]


@dataclass(frozen=True)
class Outcome:
    state: State
    evidence: str


def judge(figures: Mapping[str, Figures | None], test: Test) -> Outcome:
    """Return the outcome of `test`, which is given the figures of one seed in the order of the mapping."""
    found = {name: each for name, each in figures.items() if each is not None}
    missing = [name for name in figures if name not in found]
    if missing or not found:
        return Outcome("not tested", f"not measured: {', '.join(missing) or 'all of it'}")
    by_seed = [_complete(values) for values in zip(*(each.values for each in found.values()), strict=True)]
    seeds = [values for values in by_seed if values is not None]
    if not seeds:
        return Outcome("not tested", f"no seed has all of: {', '.join(found)}")
    held = sum(map(test, seeds))
    columns = zip(found, zip(*seeds, strict=True), strict=True)
    evidence = ", ".join(f"{name} {Figures(values)}" for name, values in columns)
    if 0 < held < len(seeds):
        evidence += f"; holds with {held} of {len(seeds)} seeds"
    if len(seeds) < len(by_seed):
        evidence += f"; measured with {len(seeds)} of {len(by_seed)} seeds"
    return Outcome("holds" if held == len(seeds) else "does not hold", evidence)


def _complete(values: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return the figures of a seed; None if one of them was not measured."""
    measured = tuple(value for value in values if value is not None)
    return measured if len(measured) == len(values) else None


def grows(values: Sequence[float]) -> bool:
    return all(one < next_one for one, next_one in pairwise(values))


def falls(values: Sequence[float]) -> bool:
    return grows(values[::-1])


def falls_from_its_peak(values: Sequence[float]) -> bool:
    """True if the values fall from the largest on. Before it, something other than the length may slow the run."""
    peak = values.index(max(values))
    return peak + 1 < len(values) and falls(values[peak:])


def each_first_is_below(values: Sequence[float]) -> bool:
    """True if the first of each pair is below the second; the values are first, second, first, second, ..."""
    return all(first < second for first, second in zip(values[::2], values[1::2], strict=True))


def first_is_lowest(values: Sequence[float]) -> bool:
    return values[0] < min(values[1:])


def first_is_highest(values: Sequence[float]) -> bool:
    return values[0] > max(values[1:])


def within(share: float) -> Test:
    """Return a test that no value is more than this share above the lowest."""
    return lambda values: max(values) <= (1 + share) * min(values)


def first_is_times(factor: float) -> Test:
    """Return a test that the first value is at least `factor` times the second."""
    return lambda values: values[0] >= factor * values[1]


def all_below(limit: float) -> Test:
    return lambda values: max(values) < limit


def equal_to(tolerance: float) -> Test:
    return lambda values: max(values) - min(values) <= tolerance
