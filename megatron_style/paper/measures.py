"""Measures of runs, the tables that show them, and their figures.

Each measure lists the evaluations it needs, and reads its number from the results. A `Table` has what each row trains
or plans, what each column measures and what the paper found. `Findings` are the figures, one number per seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from megatron_style.config.model import EvaluationMode
from megatron_style.paper.memory import LargestBatch, PlannedStage
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.scale import ExperimentScale
from megatron_style.reporting.comparison import final, loss_of, match
from megatron_style.reporting.history import RunHistory

Split = Literal["valid", "test", "short"]  # short: the beginning of valid


@dataclass(frozen=True)
class LongMemory:
    """Lengths with which Transformer-XL is evaluated, in the numbers of its authors. All tokens see equally many."""

    segment_length: int
    cache_length: int
    clamp_distance: int


@dataclass(frozen=True)
class Evaluation:
    """One call of `evaluate` on the trained model, by default at the length it was trained with last."""

    mode: EvaluationMode
    split: Split = "valid"
    stride: int | None = None  # the paper's
    length: int | None = None  # of windows, in the paper's numbers; None: the length of the last stage
    memory: LongMemory | None = None
    neighbours: int | None = None  # of a kNN-LM with a datastore of the training text, as many as its authors use
    by_position: bool = False  # also the mean loss of each position in the segment

    @property
    def name(self) -> str:
        length = f"-L{self.length}" if self.length else ""
        stride = f"-S{self.stride}" if self.stride else ""
        memory = f"-M{self.memory.cache_length}" if self.memory else ""
        neighbours = f"-knn{self.neighbours}" if self.neighbours else ""
        positions = "-positions" if self.by_position else ""
        return f"{self.split}-{self.mode}{length}{stride}{memory}{neighbours}{positions}"


@dataclass(frozen=True)
class RunResult:
    history: RunHistory
    evaluations: Mapping[Evaluation, Mapping[str, Any]]  # as `evaluate --json` printed them


class Measure(Protocol):
    """A number of a run. Measures are compared and used as keys: equal ones measure the same."""

    @property
    def needs(self) -> tuple[Evaluation, ...]: ...

    def read(self, run: RunResult, baseline: RunResult | None) -> float | None:
        """Return the number; None if it is unknown. `baseline` is the table's, with the same seed."""


Figure = Literal["perplexity", "loss", "speed"]


@dataclass(frozen=True)
class Evaluated:
    """Perplexity (per word, whatever the tokens are), loss (nats per token) or speed (tokens per second)."""

    figure: Figure
    evaluation: Evaluation

    @property
    def needs(self) -> tuple[Evaluation, ...]:
        return (self.evaluation,)

    @property
    def is_speed_of_model(self) -> bool:
        """True for the speed of a model alone, which can be measured apart: kNN-LM needs a datastore."""
        return self.figure == "speed" and not self.evaluation.neighbours

    def read(self, run: RunResult, baseline: RunResult | None) -> float | None:  # noqa: ARG002
        found = run.evaluations[self.evaluation]
        if self.figure == "speed":
            return speed_of(found)
        loss = float(found["mixture_loss_nats" if self.evaluation.neighbours else "loss_nats"])
        if self.figure == "loss":
            return loss
        return math.exp(loss * found["tokens"] / (found["words"] or found["tokens"]))


@dataclass(frozen=True)
class TrainSpeed:
    """Tokens per second over all stages, without validations and checkpoints."""

    needs: tuple[Evaluation, ...] = ()

    def read(self, run: RunResult, baseline: RunResult | None) -> float | None:  # noqa: ARG002
        end = run.history.end
        return end.tokens / end.seconds if end.tokens and end.seconds else None


@dataclass(frozen=True)
class TotalTime:
    """Training time as a share of the baseline's."""

    needs: tuple[Evaluation, ...] = ()

    def read(self, run: RunResult, baseline: RunResult | None) -> float | None:
        seconds = run.history.end.seconds
        of_baseline = baseline.history.end.seconds if baseline else None
        return seconds / of_baseline if seconds and of_baseline else None


@dataclass(frozen=True)
class ToMatch:
    """Time or tokens until the validations of the last stage are as good as the baseline's last, as a share of the
    baseline's total. Infinite: they never were."""

    what: Literal["seconds", "tokens"]
    needs: tuple[Evaluation, ...] = ()

    def read(self, run: RunResult, baseline: RunResult | None) -> float | None:
        last = final(baseline.history) if baseline else None
        if baseline is None or last is None:
            return None
        reached = match(_in_last_stage(run.history), loss_of(last))
        if reached is None:
            return math.inf
        needed = getattr(reached, self.what)
        of_baseline = getattr(baseline.history.end, self.what)
        return needed / of_baseline if needed and of_baseline else None


def speed_of(found: Mapping[str, Any]) -> float:
    """Return the tokens per second. With sliding windows it is the speed after the first window, which scores all its
    tokens at the cost of one stride: on a short text these would be most of the tokens."""
    speed = float(found["tokens_per_second"])
    if found["mode"] != "sliding":
        return speed
    after_first = max(0, int(found["tokens"]) - int(found["segment_length"]))
    return speed * (after_first + int(found["stride"])) / int(found["tokens"])


def _in_last_stage(run: RunHistory) -> RunHistory:
    """Return the run with the validations of its last stage only: a run that began with another's first stage has no
    others."""
    first = run.stages[-1].before.step if run.stages else 0
    return replace(run, held_out=tuple(valid for valid in run.held_out if valid.at.step >= first))


Subject = RunSpec | PlannedStage
Measured = Measure | LargestBatch


@dataclass(frozen=True)
class Row:
    label: str
    subject: Subject | None  # None: other work, which is not reproduced
    paper: tuple[float | None, ...]  # one per column
    measures: tuple[Measured | None, ...]  # one per column; None: nothing to measure


@dataclass(frozen=True)
class Table:
    number: int
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: RunSpec | None = None  # shares are relative to it
    also: tuple[tuple[RunSpec, Measure], ...] = ()  # what claims and charts use in addition to the rows

    def at(self, scale: ExperimentScale) -> Table:
        """Return the table with only the rows that the scale has."""
        kept = (row for row in self.rows if not isinstance(row.subject, RunSpec) or row.subject.is_in(scale))
        return replace(self, rows=tuple(kept))

    def measured(self) -> Iterator[tuple[Subject, Measured]]:
        """Yield what is measured, and of what: the cells of the table, and what is used in addition to them."""
        for row in self.rows:
            for measure in row.measures:
                if row.subject is not None and measure is not None:
                    yield row.subject, measure
        yield from self.also

    def needs(self) -> Mapping[RunSpec, frozenset[Evaluation]]:
        """Return every run, without seeds, and the evaluations of its model."""
        found: dict[RunSpec, frozenset[Evaluation]] = {self.baseline: frozenset()} if self.baseline else {}
        for subject, measure in self.measured():
            if isinstance(subject, RunSpec) and not isinstance(measure, LargestBatch):
                found[subject] = found.get(subject, frozenset()).union(measure.needs)
        return found

    def evaluations(self) -> frozenset[Evaluation]:
        return frozenset[Evaluation]().union(*self.needs().values())

    @property
    def needs_test_split(self) -> bool:
        return any(evaluation.split == "test" for evaluation in self.evaluations())


@dataclass(frozen=True)
class Figures:
    """One number per seed; None where it was not measured with that seed."""

    values: tuple[float | None, ...]

    @property
    def measured(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if value is not None)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.measured)

    @property
    def spread(self) -> float | None:
        """Return the standard deviation over seeds; None with one seed."""
        return statistics.stdev(self.measured) if len(self.measured) > 1 and math.isfinite(self.mean) else None

    def __str__(self) -> str:
        # Seeds do not differ at all where they share one measurement, such as a speed that was measured apart.
        return f"{short(self.mean)} ± {short(self.spread, digits=2)}" if self.spread else short(self.mean)


Findings = Mapping[tuple[Subject, Measured], Figures]


def short(value: float, digits: int = 4) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
