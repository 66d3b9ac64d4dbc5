"""A folder of runs: one scale, one corpus, the runs of any tables, and their measurements.

OUTPUT/reproduction.json       the scale and the corpus, which may not change
OUTPUT/corpus/  held_out/      the text, unless it was given prepared, and the parts of it that are scored
OUTPUT/runs/NAME/              an ordinary run: run.yaml, metrics.jsonl, checkpoints/, model/
OUTPUT/runs/NAME/evaluations/  what `evaluate --json` printed, with digests of the model and the text
OUTPUT/speeds.json             speeds that were measured apart, if there are any
OUTPUT/results.md  results/    tables, charts, claims, and the records they were made from
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError
from megatron_style.base.events import TrainEvent, parse_event
from megatron_style.base.files import write_atomic
from megatron_style.base.model_files import has_weights
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.paper.corpus import Source, check_test_split, corpus_of, find_source, held_out
from megatron_style.paper.measures import (
    Evaluated,
    Evaluation,
    Figures,
    Findings,
    Measure,
    Measured,
    RunResult,
    Subject,
    Table,
)
from megatron_style.paper.memory import LargestBatch, PlannedStage
from megatron_style.paper.runs import PreparedText, RunSpec, run_config, run_name
from megatron_style.paper.scale import ExperimentScale
from megatron_style.paper.speeds import Speeds, at_speeds, read_speeds
from megatron_style.paper.tables import all_tables
from megatron_style.reporting.history import RunHistory, read_run

RECORD = "reproduction.json"


@dataclass(frozen=True)
class Experiment:
    scale: ExperimentScale
    source: Source
    output: Path
    seeds: int

    @cached_property
    def corpus(self) -> PreparedText:
        """Return the corpus, which must be prepared unless the scale is the paper's."""
        return corpus_of(self.source, self.scale, self.output)

    @cached_property
    def speeds(self) -> Speeds | None:
        return read_speeds(self.output)

    def folder(self, spec: RunSpec) -> Path:
        return self.output / "runs" / run_name(spec, self.scale)

    def config(self, spec: RunSpec) -> RunConfig:
        return run_config(spec, self.scale, self.corpus, self.folder(spec))

    def has_model(self, spec: RunSpec) -> bool:
        return has_weights(RunFolder(self.folder(spec)).model)

    def is_finished(self, spec: RunSpec) -> bool:
        """True if the run was trained to its end: its model is there, or records up to the last step."""
        return self.has_model(spec) or self.is_recorded(self.folder(spec))

    def is_recorded(self, folder: Path) -> bool:
        """True if the records of a run reach its last step, which is known unless the scale is the paper's."""
        if self.scale.is_paper or not (metrics := RunFolder(folder).metrics).is_file():
            return False
        lines = reversed(metrics.read_bytes().splitlines())
        trained = (event for line in lines if isinstance(event := parse_event(line), TrainEvent))
        last = next(trained, None)
        return last is not None and last.step == self.scale.steps

    def evaluation_file(self, spec: RunSpec, evaluation: Evaluation) -> Path:
        return evaluation_file(self.folder(spec), evaluation)

    def scored(self, evaluation: Evaluation) -> Path:
        return held_out(self.source, self.scale, self.output, evaluation.split)

    def tables(self) -> tuple[Table, ...]:
        return tuple(table.at(self.scale) for table in all_tables())

    def runs_of(self, tables: Sequence[Table], only_seed: int | None = None) -> list[RunSpec]:
        """Return every run of the tables, with all seeds or with one."""
        specs = list(chain.from_iterable(table.needs() for table in tables))
        return list(self._seeded(specs, self.seeds_or(only_seed)))

    def seeds_or(self, only_seed: int | None) -> Sequence[int]:
        return [only_seed] if only_seed else range(1, self.seeds + 1)

    def _seeded(self, specs: Sequence[RunSpec], seeds: Sequence[int]) -> Iterator[RunSpec]:
        """Yield each run once, although specs of two texts may be the same run at this scale."""
        seen = set()
        for seed in seeds:
            for spec in specs:
                if (folder := self.folder(spec.with_seed(seed))) not in seen:
                    seen.add(folder)
                    yield spec.with_seed(seed)


def open_experiment(
    scale: ExperimentScale, tables: Sequence[Table], *, corpus: Path | None, output: Path, seeds: int | None
) -> Experiment:
    """Return the experiment. Tables that could not be measured are refused before anything is written."""
    texts = {spec.text for spec in chain.from_iterable(table.needs() for table in tables)}
    if scale.is_paper and len(texts) > 1:
        raise UserError(
            "--table: 11 and 12 use Toronto Books, the others WikiText-103; give each text an --output of its own"
        )
    source = find_source(corpus, scale, sorted(texts), output)
    if any(table.needs_test_split for table in tables):
        check_test_split(source)
    experiment = Experiment(scale, source, output, seeds or scale.seeds)
    check_record(experiment)
    return experiment


def check_record(experiment: Experiment) -> None:
    """Refuse a folder of runs at another scale or on another corpus: their figures cannot share a table."""
    found = _read_record(experiment.output / RECORD)
    if found is None:
        return
    if found["scale"] != experiment.scale.name:
        raise UserError(
            f"--output {experiment.output}: holds runs at scale {found['scale']}, not {experiment.scale.name}; "
            f"choose another folder, or use --scale {found['scale']}"
        )
    if found["corpus"] != experiment.source.identity:
        raise UserError(
            f"--output {experiment.output}: holds runs on another corpus; "
            f"choose another folder, or give the --corpus that it was started with"
        )


def write_record(experiment: Experiment) -> None:
    record = {"scale": experiment.scale.name, "corpus": experiment.source.identity}
    experiment.output.mkdir(parents=True, exist_ok=True)
    write_atomic(experiment.output / RECORD, json.dumps(record) + "\n")


def _read_record(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"scale": found["scale"], "corpus": found["corpus"]}
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{path}: is not the record of an experiment; choose another folder, or remove it") from None


def evaluation_file(folder: Path, evaluation: Evaluation) -> Path:
    return folder / "evaluations" / f"{evaluation.name}.json"


def kept_evaluation(path: Path) -> Mapping[str, Any] | None:
    try:
        kept: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept if {"inputs", "result"} <= kept.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def findings_of(experiment: Experiment, tables: Iterable[Table]) -> Findings:
    """Return the figures of what is finished with any seed, by seed, so that they can be compared seed by seed."""
    read = _Reader(experiment)
    found: dict[tuple[Subject, Measured], Figures] = {}
    for table in tables:
        for subject, measure in table.measured():
            if (subject, measure) not in found:
                figures = read.figures(subject, measure, table.baseline)
                if figures is not None:
                    found[subject, measure] = figures
    return found


def read_history(experiment: Experiment, spec: RunSpec) -> RunHistory:
    """Return the record of a run, timed by the speeds that were measured apart if there are any."""
    folder = experiment.folder(spec)
    found = read_run(folder.name, folder)
    return at_speeds(found, spec.model, experiment.speeds) if experiment.speeds else found


class _Reader:
    """Reads each run once."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        needed = (table.evaluations() for table in experiment.tables())
        self._needed = frozenset[Evaluation]().union(*needed)
        self._results: dict[RunSpec, RunResult | None] = {}

    def figures(self, subject: Subject, measure: Measured, baseline: RunSpec | None) -> Figures | None:
        if isinstance(subject, PlannedStage) or isinstance(measure, LargestBatch):
            assert isinstance(subject, PlannedStage)
            assert isinstance(measure, LargestBatch)
            return Figures((float(measure.read(subject)),))
        seeds = range(1, self._experiment.seeds + 1)
        figures = Figures(tuple(self._figure(subject, measure, baseline, seed) for seed in seeds))
        return figures if figures.measured else None

    def _figure(self, spec: RunSpec, measure: Measure, baseline: RunSpec | None, seed: int) -> float | None:
        run = self._result(spec.with_seed(seed))
        if run is None or not set(measure.needs) <= set(run.evaluations):
            return None
        if (apart := self._speed_apart(spec, measure)) is not None:
            return apart
        return measure.read(run, self._result(baseline.with_seed(seed)) if baseline else None)

    def _speed_apart(self, spec: RunSpec, measure: Measure) -> float | None:
        """Return the speed of an evaluation if it was measured apart."""
        speeds = self._experiment.speeds
        if speeds is None or speeds.of_scoring is None:
            return None
        if not isinstance(measure, Evaluated) or not measure.is_speed_of_model:
            return None
        return speeds.of_evaluation(spec.model, self._experiment.scale.length(spec.length), measure.evaluation.name)

    def _result(self, spec: RunSpec) -> RunResult | None:
        if spec not in self._results:
            self._results[spec] = self._read(spec) if self._experiment.is_finished(spec) else None
        return self._results[spec]

    def _read(self, spec: RunSpec) -> RunResult:
        kept = {each: kept_evaluation(self._experiment.evaluation_file(spec, each)) for each in self._needed}
        evaluations: dict[Evaluation, dict[str, object]] = {
            each: dict(found["result"]) for each, found in kept.items() if found is not None
        }
        return RunResult(read_history(self._experiment, spec), evaluations)
