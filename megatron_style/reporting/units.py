"""Amounts as people read them: 1.84M tokens, 12.5 min, 3.2 TFLOP/s, 1.5 GiB."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_style.reporting.scale import Scale

NOT_RECORDED = "-"
_METRIC = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True)
class Unit:
    size: float
    short: str  # on an axis, where the caption says what is counted
    long: str  # in a sentence


@dataclass(frozen=True)
class Quantity:
    name: str
    units: tuple[Unit, ...]  # from small to large

    def unit(self, largest: float) -> Unit:
        """The unit to tell amounts up to this one in."""
        return next((unit for unit in reversed(self.units) if largest >= unit.size), self.units[0])

    def text(self, value: float | None) -> str:
        if value is None:
            return NOT_RECORDED
        if not math.isfinite(value):
            return "not finite"
        unit = self.unit(abs(value))
        return f"{three_digits(value / unit.size)}{unit.long}"

    def ticks(self, scale: Scale, most: int) -> tuple[tuple[float, str], ...]:
        """Round values of one unit, with their labels: an axis of 25 minutes is cut at minutes, not at 500 seconds."""
        unit = self.unit(scale.high)
        rounds = replace(scale, low=scale.low / unit.size, high=scale.high / unit.size).ticks(most)
        return tuple((value * unit.size, f"{_plain(value)}{unit.short}" if value else "0") for value in rounds)


def three_digits(value: float) -> str:
    if value and abs(value) < 0.1:
        return _plain(float(f"{value:.3g}"))
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return _plain(round(value, decimals))


def _plain(value: float) -> str:
    """Without noise in the last digits, and with a short exponent where there must be one."""
    digits = f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    mantissa, exponent, power = digits.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else digits


def _metric(after: str) -> tuple[Unit, ...]:
    return tuple(Unit(1000.0**power, prefix, f" {prefix}{after}") for power, prefix in enumerate(_METRIC))


COUNT = Quantity(
    "count", tuple(Unit(1000.0**power, short, short) for power, short in enumerate(("", "k", "M", "B", "T")))
)
TIME = Quantity("time", tuple(Unit(size, word, word) for size, word in ((1.0, " s"), (60.0, " min"), (3600.0, " h"))))
FLOPS = Quantity("FLOPs", _metric("FLOP"))
FLOPS_PER_SECOND = Quantity("FLOP/s", _metric("FLOP/s"))
MEMORY = Quantity(
    "memory",
    tuple(Unit(1024.0**power, f" {word}", f" {word}") for power, word in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
)
RATE = Quantity(
    "rate", (*(Unit(float(f"1e{power}"), f"e{power}", f"e{power}") for power in range(-9, 0)), Unit(1.0, "", ""))
)
PERCENT = Quantity("percent", (Unit(1.0, "%", "%"),))
NUMBER = Quantity("number", (Unit(1.0, "", ""),))
