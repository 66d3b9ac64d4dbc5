"""Axis scales: the mapping of values to places on an axis, and round values as its ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from megatron_style.base.units import Quantity, Unit, plain


@dataclass(frozen=True)
class Scale:
    """Maps low..high to start..end, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def has(self, value: float) -> bool:
        """True if the value can be placed: it is finite and, on a logarithmic axis, positive."""
        return math.isfinite(value) and (value > 0 or not self.logarithmic)

    def place(self, value: float) -> float:
        if self.logarithmic:
            share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, most: int) -> tuple[float, ...]:
        return ratio_ticks(self.low, self.high, most) if self.logarithmic else even_ticks(self.low, self.high, most)


def labelled_ticks(quantity: Quantity, scale: Scale, most: int) -> tuple[tuple[float, str], ...]:
    """Return round values of one unit and their labels: an axis of 25 minutes has ticks at full minutes. A logarithmic
    axis from 1 to 1,000,000 would not be readable in one unit: each of its labels has its own."""
    if scale.logarithmic:
        return tuple((value, _label(value, quantity.unit(value))) for value in scale.ticks(most))
    unit = quantity.unit(scale.high)
    rounds = replace(scale, low=scale.low / unit.size, high=scale.high / unit.size).ticks(most)
    return tuple((value * unit.size, _label(value * unit.size, unit)) for value in rounds)


def _label(value: float, unit: Unit) -> str:
    return f"{plain(float(f'{value / unit.size:.12g}'))}{unit.short}" if value else "0"


def even_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return at most `most` multiples of 1, 2 or 5 times a power of ten."""
    step = _round_up((high - low) / most)
    indices = _multiples(step, low, high)
    if len(indices) > most:  # both ends fell on a tick
        step = _round_up(step * 1.5)
        indices = _multiples(step, low, high)
    return tuple(float(f"{index * step:.12g}") for index in indices)


def _multiples(step: float, low: float, high: float) -> range:
    return range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)


def ratio_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, ... or 1, 3, 10, ... or powers of ten only; a range with too few of them gets even ticks."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        every = (float(f"{digit}e{power}") for power, digit in product(powers, digits))
        ticks = [tick for tick in every if low <= tick <= high]
        if len(ticks) <= most:
            return tuple(ticks) if len(ticks) > 2 or len(digits) < 3 else even_ticks(low, high, most)
    return tuple(ticks[:: -(-len(ticks) // most)])


def padded(low: float, high: float, *, logarithmic: bool = False) -> tuple[float, float]:
    """Return the range with a margin on both sides, so that no line runs along the frame; a single value becomes a
    range around it."""
    if logarithmic:
        ratio = (high / low) ** 0.05 if high > low else 1.5
        return low / ratio, high * ratio
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * (1 - 1e-9))
