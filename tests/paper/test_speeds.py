"""Speeds that were measured apart take the place of those of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tables import evaluations_of, stages_of
from megatron_style.base.errors import UserError
from megatron_style.config.run_file import save_run
from megatron_style.paper.corpus import Source
from megatron_style.paper.experiment import Experiment, findings_of
from megatron_style.paper.measures import Evaluated, TrainSpeed
from megatron_style.paper.runs import PreparedText, RunSpec, run_config, run_name
from megatron_style.paper.scale import scale_named
from megatron_style.paper.speeds import OF_SCORING, OF_TRAINING, SPEEDS, read_speeds, scoring_key, speed_key
from megatron_style.paper.tables import NONOVERLAPPING, all_tables, perplexity, speed, table

SCALE = scale_named("miniature")
RUN = RunSpec("baseline", 512)
KEY = f"baseline-L{SCALE.length(512)}"
EVALUATED = f"{KEY} {NONOVERLAPPING.name}"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """A run of 20 steps in 40 seconds, with one evaluation."""
    run = tmp_path / "runs" / run_name(RUN, SCALE)
    (run / "evaluations").mkdir(parents=True)
    text = PreparedText(tmp_path / "train", tmp_path / "valid", vocab_size=8192)
    save_run(run_config(RUN, SCALE, text, run), run / "run.yaml")
    events = [
        {"kind": "stage", "step": 1, "stage": 0, "segment_length": SCALE.length(512), "tokens": 0},
        {"kind": "train", "step": 20, "stage": 0, "loss": 5.0, "tokens": 4000, "seconds": 40.0},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    said = {"mode": "nonoverlapping", "loss_nats": 2.0, "tokens": 9, "words": 9, "tokens_per_second": 50.0}
    kept = {"inputs": {}, "result": said}
    (run / "evaluations" / f"{NONOVERLAPPING.name}.json").write_text(json.dumps(kept))
    return Experiment(SCALE, Source("made up", tmp_path), tmp_path, seeds=1)


def speeds(experiment: Experiment) -> tuple[float, float]:
    found = findings_of(experiment, [table(1).at(SCALE)])
    assert found[RUN, perplexity(NONOVERLAPPING)].values == (pytest.approx(7.389, abs=1e-3),)
    return found[RUN, TrainSpeed()].mean, found[RUN, speed(NONOVERLAPPING)].mean


def write_speeds(folder: Path, **record: object) -> None:
    (folder / SPEEDS).write_text(json.dumps(record))


@pytest.mark.parametrize("number", range(1, 13))
def test_the_benchmark_measures_every_speed_that_is_shown_of_the_tables_runs(number: int) -> None:
    """Other tables may show the speed of an evaluation that this one makes for its perplexity."""
    scale = scale_named("small")
    training = {speed_key(model, scale.length(length)) for model, length in stages_of([number], scale)}
    found = list(evaluations_of([number], scale))
    scoring = {scoring_key(model, scale.length(length), evaluation.name) for model, length, evaluation in found}
    assert len(scoring) == len(found)
    shown = [each for every in all_tables() for each in every.at(scale).measured()]
    for spec, evaluations in table(number).at(scale).needs().items():
        lengths = filter(None, (spec.first_length, spec.length))
        assert {speed_key(spec.model, scale.length(length)) for length in lengths} <= training
        for subject, measure in shown:
            is_of_it = isinstance(subject, RunSpec) and (subject.model, subject.length) == (spec.model, spec.length)
            if is_of_it and isinstance(measure, Evaluated) and measure.figure == "speed":
                evaluation = measure.evaluation
                key = scoring_key(spec.model, scale.length(spec.length), evaluation.name)
                assert (key in scoring) or evaluation not in evaluations or evaluation.neighbours


def test_without_them_speeds_are_those_of_the_run(experiment: Experiment) -> None:
    assert speeds(experiment) == (100.0, 50.0)


def test_speeds_of_training_and_of_evaluations_are_replaced(experiment: Experiment) -> None:
    write_speeds(experiment.output, **{OF_TRAINING: {KEY: 300.0}, OF_SCORING: {EVALUATED: 700.0}})
    assert speeds(experiment) == (pytest.approx(300.0), 700.0)


def test_a_record_without_evaluations_replaces_those_of_training_only(experiment: Experiment) -> None:
    write_speeds(experiment.output, **{OF_TRAINING: {KEY: 300.0}})
    assert speeds(experiment) == (pytest.approx(300.0), 50.0)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({OF_TRAINING: {}, OF_SCORING: {EVALUATED: 7.0}}, f"has no speed of {KEY};"),
        ({OF_TRAINING: {KEY: 3.0}, OF_SCORING: {}}, f"has no speed of {EVALUATED};"),
    ],
)
def test_a_speed_that_is_missing_is_refused_by_name(
    experiment: Experiment, record: dict[str, object], says: str
) -> None:
    write_speeds(experiment.output, **record)
    with pytest.raises(UserError, match=says):
        speeds(experiment)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {OF_TRAINING: []},
        {OF_TRAINING: {KEY: "fast"}},
        {OF_TRAINING: {KEY: 0}},
        {OF_TRAINING: {KEY: 1.0}, OF_SCORING: None},
        {OF_TRAINING: {KEY: 1.0}, OF_SCORING: {EVALUATED: -1}},
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    write_speeds(tmp_path, **record)
    with pytest.raises(UserError, match="measure them again"):
        read_speeds(tmp_path)
