"""A blend: the rows of the batch are divided among the sources of the training text, and each source has a pass over
its own rows. A run with one source is a blend of one.

A blend ends when the first of its sources is through, and all rows open their lanes again in the next: that source
begins an epoch, the others stay in their passes. A stage or a grid cuts new lanes from what each source has left. So
each source reads each token once per epoch, and caches are empty for all rows or for none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from megatron_style.base.errors import UserError
from megatron_style.config.data import DataConfig, SourceConfig
from megatron_style.schedule.passes import Pass, Reading
from megatron_style.schedule.unread import Indices, Unread


@dataclass(frozen=True)
class Part:
    """A source in a blend: its pass, and the number of turns of it that were over when the blend began."""

    epoch: int  # from 0
    reading_pass: Pass
    begun: int = 0

    @property
    def rows(self) -> int:
        return self.reading_pass.rows

    @property
    def steps(self) -> int:
        return self.reading_pass.steps - self.begun

    def after(self, turns: int) -> Part:
        """Return the rest of the pass."""
        return replace(self, begun=self.begun + turns)

    @property
    def unread(self) -> Unread:
        return self.reading_pass.after(self.begun)

    def tokens_at(self, turn: int) -> int:
        return self.reading_pass.tokens_at(self.begun + turn)

    def tokens_before(self, turn: int) -> int:
        return self.reading_pass.tokens_before(self.begun + turn) - self.reading_pass.tokens_before(self.begun)

    def width(self, turn: int) -> int:
        return self.reading_pass.width(self.begun + turn)

    def read(self, turn: int, rows: Indices, width: int) -> tuple[Indices, Indices, Indices]:
        return self.reading_pass.read(self.begun + turn, rows, width)


@dataclass(frozen=True)
class Blend:
    parts: tuple[Part, ...]  # one for each source; its rows follow those of the source before

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def steps(self) -> int:
        return min(part.steps for part in self.parts)

    @property
    def epochs(self) -> tuple[int, ...]:
        return tuple(part.epoch for part in self.parts)

    def tokens_at(self, turn: int) -> tuple[int, ...]:
        """Return the tokens of each source in this turn."""
        return tuple(part.tokens_at(turn) for part in self.parts)

    def tokens_before(self, turn: int) -> int:
        return sum(part.tokens_before(turn) for part in self.parts)

    def read(self, turn: int, rows: Indices) -> Reading:
        """Return what these rows, in ascending order, read."""
        width = max(part.width(turn) for part in self.parts)  # over all rows, so that it is the same on every rank
        sources = np.searchsorted(self._firsts, rows, side="right") - 1
        places = np.empty((len(rows), width), np.int64)
        lengths = np.empty(len(rows), np.int64)
        stretches = np.empty(len(rows), np.int64)
        for source in range(sources[0], sources[-1] + 1):
            own = slice(*np.searchsorted(sources, [source, source + 1]))
            own_rows = rows[own] - self._firsts[source]
            places[own], lengths[own], stretches[own] = self.parts[source].read(turn, own_rows, width)
        return Reading(places, lengths, sources, stretches)

    @cached_property
    def _firsts(self) -> Indices:
        """Return the first row of each source."""
        rows = np.array([part.rows for part in self.parts])
        firsts: Indices = np.cumsum(rows) - rows
        return firsts


@dataclass(frozen=True)
class Sources:
    """The sources of a training text, in the order of data.train."""

    names: tuple[str, ...]
    tokens: tuple[int, ...]  # of each store
    amounts: tuple[Fraction, ...]  # relative to each other; exact, so that all ranks agree on the rows

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the share of the training text that each source was meant to have."""
        return tuple(float(amount / sum(self.amounts)) for amount in self.amounts)

    @property
    def tokens_by_name(self) -> dict[str, int]:
        return dict(zip(self.names, self.tokens, strict=True))

    def allot(self, rows: int, segment_length: int, where: str) -> tuple[int, ...]:
        """Divide the rows of a batch by the method of the largest remainder, and refuse a source without any."""
        total = sum(self.amounts)
        quotas = [rows * amount / total for amount in self.amounts]
        allotted = [int(quota) for quota in quotas]
        by_remainder = sorted(range(len(quotas)), key=lambda source: allotted[source] - quotas[source])
        for source in by_remainder[: rows - sum(allotted)]:
            allotted[source] += 1
        if 0 in allotted:
            source = allotted.index(0)
            raise UserError(f"{where}: data.train: {self._none(source, rows, segment_length)}")
        return tuple(allotted)

    def _none(self, source: int, rows: int, segment_length: int) -> str:
        """Describe what would give a row to a source that has none."""
        own = self.amounts[source]
        others = sum(self.amounts) - own
        tokens = math.ceil((own + others) / own) * segment_length
        remedy = f"an update of {tokens:,} tokens is enough (data.tokens_per_batch x data-parallel ranks)"
        if rows > len(self.amounts):
            remedy += f", or {math.ceil(others / (rows - 1) / own * 100) / 100:,} times its weight or epochs"
        return f"'{self.names[source]}' would get none of the {rows} rows of an update; {remedy}"

    def describe(self, rows: Sequence[int]) -> str:
        """Say which share of the rows each source has, and which it was meant to have."""
        parts = []
        for name, share, own_rows in zip(self.names, self.shares, rows, strict=True):
            parts.append(f"{name} {own_rows} ({own_rows / sum(rows):.1%}; wanted {share:.1%})")
        return f"{sum(rows)} rows: {', '.join(parts)}"

    def check(self, rows: Sequence[int], segment_length: int, where: str) -> None:
        """Refuse a source that has less than one segment for each of its rows."""
        for name, tokens, own_rows in zip(self.names, self.tokens, rows, strict=True):
            if tokens >= own_rows * segment_length:
                continue
            text, lower = ("the corpus", "") if len(self.names) == 1 else (f"data.train: '{name}'", ", a lower weight")
            raise UserError(
                f"{where}: {text} has {tokens} tokens, {tokens // own_rows} for each of its {own_rows} rows over all "
                f"data-parallel ranks, less than one segment of {segment_length}; use a larger corpus{lower}, fewer "
                f"ranks or a smaller data.tokens_per_batch"
            )


def sources_of(data: DataConfig, tokens: Sequence[int]) -> Sources:
    if len(tokens) != len(data.sources):
        raise UserError(
            f"data.train: has {len(data.sources)} sources, but the sizes of {len(tokens)} are known; the checkpoint is "
            f"damaged or of another run"
        )
    amounts = [_amount(source, size) for source, size in zip(data.sources, tokens, strict=True)]
    return Sources(tuple(source.label for source in data.sources), tuple(tokens), tuple(amounts))


def _amount(source: SourceConfig, tokens: int) -> Fraction:
    if source.weight is not None:
        return Fraction(source.weight)
    assert source.epochs is not None, "a source has either a weight or epochs"
    return Fraction(source.epochs) * tokens
