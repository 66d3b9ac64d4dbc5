"""Where a value stands on an axis, and which round values are named there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_style.base.units import Quantity, plain


@dataclass(frozen=True)
class Scale:
    """Maps low..high to start..end, in even steps or in even ratios."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def has(self, value: float) -> bool:
        """False: the value has no place, for it is not finite, or not positive on a logarithmic axis."""
        return math.isfinite(value) and (value > 0 or not self.logarithmic)

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int) -> tuple[float, ...]:
        return ratio_ticks(self.low, self.high, most) if self.logarithmic else even_ticks(self.low, self.high, most)


def labelled_ticks(quantity: Quantity, scale: Scale, most: int) -> tuple[tuple[float, str], ...]:
    """Return round values of one unit and their labels: an axis of 25 minutes is cut at minutes, not at 500 seconds."""
    unit = quantity.unit(scale.high)
    rounds = replace(scale, low=scale.low / unit.size, high=scale.high / unit.size).ticks(most)
    return tuple((value * unit.size, f"{plain(value)}{unit.short}" if value else "0") for value in rounds)


def even_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten, at most so many of them."""
    step = _round_up((high - low) / most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last - first + 1 > most:  # both ends fell on a tick
        step = _round_up(step * 1.5)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def ratio_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... or 1, 3, 10, ... or powers of ten alone; a range with too few of them gets even ticks."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        every = (float(f"{digit}e{power}") for power in powers for digit in digits)
        ticks = [tick for tick in every if low <= tick <= high]
        if len(ticks) <= most:
            return tuple(ticks) if len(ticks) > 2 or len(digits) < 3 else even_ticks(low, high, most)
    return tuple(ticks[:: -(-len(ticks) // most)])


def padded(low: float, high: float, *, logarithmic: bool = False) -> tuple[float, float]:
    """A little room on both sides, so that no line runs along the frame; a single value gets a range around it."""
    if logarithmic:
        ratio = (high / low) ** 0.05 if high > low else 1.5
        return low / ratio, high * ratio
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * (1 - 1e-9))
