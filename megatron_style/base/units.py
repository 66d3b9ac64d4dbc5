"""Amounts as people read them: 1.84M tokens, 12.5 min, 3.2 TFLOP/s, 1.5 GiB. All number formats are here."""

from __future__ import annotations

import math
from dataclasses import dataclass

NOT_RECORDED = "-"
_METRIC = ("", "k", "M", "G", "T", "P", "E", "Z")
_PREFIXES = ("", "K", "M", "G", "T", "P", "E")  # on the console


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
        """Return the unit for amounts up to this one."""
        return next((unit for unit in reversed(self.units) if largest >= unit.size), self.units[0])

    def text(self, value: float | None) -> str:
        if value is None:
            return NOT_RECORDED
        if not math.isfinite(value):
            return "not finite"
        unit = self.unit(abs(value))
        return f"{three_digits(value / unit.size)}{unit.long}"


def three_digits(value: float) -> str:
    if value and abs(value) < 0.1:
        return plain(float(f"{value:.3g}"))
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return plain(round(value, decimals))


def plain(value: float) -> str:
    """Return the number without noise in the last digits, and with a short exponent where it needs one."""
    digits = f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    mantissa, exponent, power = digits.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else digits


def size(count: float) -> str:
    """Return the size of memory or of a file, given in bytes."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"


def perplexity_text(value: float) -> str:
    """Return a perplexity with two decimals, or with three digits if it is so large that only its size matters."""
    if value < 1e5:
        return f"{value:,.2f}"
    return COUNT.text(value) if value < 1e15 else f"{value:.3g}"


def with_prefix(value: float) -> str:
    """Return `1.23 M` for 1234567, to be followed by the unit."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value /= 1000
        power += 1
    return f"{value:.3g} {_PREFIXES[power]}"


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
