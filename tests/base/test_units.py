"""Amounts are formatted for people."""

from __future__ import annotations

import math

import pytest

from megatron_style.base.units import (
    COUNT,
    FLOPS_PER_SECOND,
    MEMORY,
    RATE,
    TIME,
    Quantity,
    duration,
    perplexity_text,
    size,
    with_prefix,
)


@pytest.mark.parametrize(
    ("quantity", "value", "words"),
    [
        (COUNT, 0, "0"), (COUNT, 950, "950"), (COUNT, 1_840_000, "1.84M"), (COUNT, 12.5e9, "12.5B"),
        (TIME, 45, "45 s"), (TIME, 750, "12.5 min"), (TIME, 7200, "2 h"), (TIME, 360_000, "100 h"),
        (FLOPS_PER_SECOND, 3.2e12, "3.2 TFLOP/s"), (MEMORY, 1.5 * 2**30, "1.5 GiB"),
        (COUNT, None, "-"), (TIME, math.nan, "not finite"), (RATE, 2.5e-4, "2.5e-4"),
    ],
)  # fmt: skip
def test_amounts_are_shown_in_the_unit_that_fits(quantity: Quantity, value: float | None, words: str) -> None:
    assert quantity.text(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(18.1523, "18.15"), (3841.409, "3,841.41"), (5_175_348.22, "5.18M"), (1e18, "1e+18")]
)
def test_a_huge_perplexity_is_short(value: float, words: str) -> None:
    assert perplexity_text(value) == words


@pytest.mark.parametrize(
    ("value", "told"), [(0, "0 "), (999, "999 "), (999.7, "1 K"), (1.234e9, "1.23 G"), (5e18, "5 E"), (4e21, "4e+03 E")]
)
def test_large_numbers_are_short(value: float, told: str) -> None:
    assert with_prefix(value) == told


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "unknown"),
        (0.01234, "0.0123 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (7199, "120.0 min"),
        (7.2e6, "2,000.0 h"),
    ],
)
def test_durations_have_the_unit_that_fits(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(("count", "words"), [(0, "0.0 MiB"), (2**30 - 1, "1,024.0 MiB"), (1.5 * 2**30, "1.5 GiB")])
def test_sizes_are_binary(count: float, words: str) -> None:
    assert size(count) == words
