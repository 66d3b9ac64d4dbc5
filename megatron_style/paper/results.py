"""What an experiment has found so far: its runs and evaluations read back into figures."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_style.paper.evaluating import kept_evaluation
from megatron_style.paper.experiment import Experiment
from megatron_style.paper.findings import Figures, Findings
from megatron_style.paper.grid import Measured, Subject, Table
from megatron_style.paper.measures import Evaluation, RunResult
from megatron_style.paper.memory import LargestBatch, PlannedStage
from megatron_style.paper.runs import RunSpec
from megatron_style.reporting.history import read_run


def findings_of(experiment: Experiment, tables: Iterable[Table]) -> Findings:
    """Of what is finished with every seed: figures of seeds can then be compared one by one."""
    read = _Reader(experiment)
    found: dict[tuple[Subject, Measured], Figures] = {}
    for table in tables:
        for row in table.rows:
            for measure in row.measures:
                if row.subject is None or measure is None or (row.subject, measure) in found:
                    continue
                figures = read.figures(row.subject, measure, table.baseline)
                if figures is not None:
                    found[row.subject, measure] = figures
    return found


class _Reader:
    """Reads each run once."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._needed = {each for table in experiment.tables() for needed in table.needs().values() for each in needed}
        self._results: dict[RunSpec, RunResult | None] = {}

    def figures(self, subject: Subject, measure: Measured, baseline: RunSpec | None) -> Figures | None:
        if isinstance(subject, PlannedStage) or isinstance(measure, LargestBatch):
            assert isinstance(subject, PlannedStage)
            assert isinstance(measure, LargestBatch)
            return Figures((float(measure.read(subject)),))
        values = []
        for seed in range(1, self._experiment.seeds + 1):
            run = self._result(subject.with_seed(seed))
            if run is None or not set(measure.needs) <= set(run.evaluations):
                return None
            value = measure.read(run, self._result(baseline.with_seed(seed)) if baseline else None)
            if value is None:
                return None
            values.append(value)
        return Figures(tuple(values))

    def _result(self, spec: RunSpec) -> RunResult | None:
        if spec not in self._results:
            self._results[spec] = self._read(spec) if self._experiment.is_finished(spec) else None
        return self._results[spec]

    def _read(self, spec: RunSpec) -> RunResult:
        folder = self._experiment.folder(spec)
        kept = {each: kept_evaluation(self._experiment.evaluation_file(spec, each)) for each in self._needed}
        evaluations: dict[Evaluation, dict[str, object]] = {
            each: dict(found["result"]) for each, found in kept.items() if found is not None
        }
        return RunResult(read_run(folder.name, folder), evaluations)
