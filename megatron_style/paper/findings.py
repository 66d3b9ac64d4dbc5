"""Measured figures, by what was measured of what: one number a seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_style.paper.grid import Measured, Subject, Table


@dataclass(frozen=True)
class Figures:
    """One number for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; one seed has none."""
        return statistics.stdev(self.values) if len(self.values) > 1 and math.isfinite(self.mean) else None

    def __str__(self) -> str:
        return short(self.mean) if self.spread is None else f"{short(self.mean)} ± {short(self.spread)}"


Findings = Mapping[tuple[Subject, Measured], Figures]


def short(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def papers_findings(tables: Iterable[Table]) -> Findings:
    """The paper's own figures, as if they had been measured."""
    return {
        (row.subject, measure): Figures((float(figure),))
        for table in tables
        for row in table.rows
        for measure, figure in zip(row.measures, row.paper, strict=True)
        if row.subject is not None and measure is not None and figure is not None
    }
