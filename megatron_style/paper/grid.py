"""What a table is: what each row trains or plans, what each column measures, and the paper's figure for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_style.paper.measures import Evaluation, Measure
from megatron_style.paper.memory import LargestBatch, PlannedStage
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.scale import Scale

Subject = RunSpec | PlannedStage
Measured = Measure | LargestBatch


@dataclass(frozen=True)
class Row:
    label: str
    subject: Subject | None  # None: of other work, not reproduced
    paper: tuple[float | None, ...]  # one for each column
    measures: tuple[Measured | None, ...]  # one for each column; None: nothing to measure


@dataclass(frozen=True)
class Table:
    number: int
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: RunSpec | None = None  # what shares are shares of

    def at(self, scale: Scale) -> Table:
        """Only the rows that the scale has."""
        kept = (row for row in self.rows if not isinstance(row.subject, RunSpec) or row.subject.is_in(scale))
        return replace(self, rows=tuple(kept))

    def needs(self) -> Mapping[RunSpec, frozenset[Evaluation]]:
        """Every run, without seeds, and how its model is evaluated."""
        found: dict[RunSpec, frozenset[Evaluation]] = {self.baseline: frozenset()} if self.baseline else {}
        for row in self.rows:
            if isinstance(row.subject, RunSpec):
                needed = (each for each in row.measures if each and not isinstance(each, LargestBatch))
                evaluations = frozenset(evaluation for measure in needed for evaluation in measure.needs)
                found[row.subject] = found.get(row.subject, frozenset()) | evaluations
        return found
