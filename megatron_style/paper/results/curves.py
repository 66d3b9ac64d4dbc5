"""The curves of the charts, read from the records of an experiment."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_style.paper.experiment import Experiment, kept_evaluation, read_history
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.tables import BY_POSITION, SYSTEMS
from megatron_style.reporting.history import HeldOut


@dataclass(frozen=True)
class Curve:
    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


def perplexity_by_time(experiment: Experiment) -> list[Curve]:
    """Return the held-out perplexity of every system of table 5 against its training time in minutes, the mean over
    the seeds that are finished."""
    curves = []
    for label, spec in SYSTEMS.items():
        seeds = _finished(experiment, spec)
        runs = [[valid for valid in read_history(experiment, seed).held_out if valid.is_finite] for seed in seeds]
        points = [_mean_point(valids) for valids in zip(*runs, strict=False)]
        if points:
            curves.append(Curve(label, *map(tuple, zip(*points, strict=True))))
    return curves


def _mean_point(valids: Iterable[HeldOut]) -> tuple[float, float]:
    """Return the minutes and the perplexity of the same validation of several seeds."""
    found = list(valids)
    minutes = statistics.fmean((valid.at.seconds or 0.0) / 60 for valid in found)
    return minutes, statistics.fmean(valid.perplexity or 0.0 for valid in found)


def loss_by_position(experiment: Experiment) -> list[Curve]:
    """Return the mean loss at each position of a segment, over seeds; without the curves that were not measured."""
    curves = []
    for label, (spec, evaluation) in BY_POSITION.items():
        files = [experiment.evaluation_file(seed, evaluation) for seed in _finished(experiment, spec)]
        kept = [found["result"]["by_position"] for found in map(kept_evaluation, files) if found is not None]
        if kept:
            losses = tuple(statistics.fmean(each) for each in zip(*kept, strict=True))
            curves.append(Curve(label, tuple(range(1, len(losses) + 1)), losses))
    return curves


def _finished(experiment: Experiment, spec: RunSpec) -> Sequence[RunSpec]:
    """Return the run with every seed with which it is finished."""
    if not spec.is_in(experiment.scale):
        return []
    return [run for seed in range(1, experiment.seeds + 1) if experiment.is_finished(run := spec.with_seed(seed))]
