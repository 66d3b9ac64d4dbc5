"""Speeds that were measured apart from the runs and their evaluations, in turns: `benchmarks/tables.py`.

If an experiment has them, times are the tokens of a run divided by the speeds of training, so that other work on the
machine during the runs does not matter. Speeds of inference are there unless the file is of an earlier version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import inf
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError
from megatron_style.paper.runs import Model
from megatron_style.reporting.history import Place, RunHistory

SPEEDS = "speeds.json"
OF_TRAINING = "tokens_per_second"
OF_SCORING = "scored_tokens_per_second"


@dataclass(frozen=True)
class Speeds:
    path: Path
    of_training: Mapping[str, float]
    of_scoring: Mapping[str, float] | None

    def of(self, model: Model, segment_length: int) -> float:
        return self._of(self.of_training, speed_key(model, segment_length))

    def of_evaluation(self, model: Model, segment_length: int, evaluation: str) -> float:
        assert self.of_scoring is not None
        return self._of(self.of_scoring, scoring_key(model, segment_length, evaluation))

    def _of(self, speeds: Mapping[str, float], key: str) -> float:
        if key not in speeds:
            raise UserError(f"{self.path}: has no speed of {key}; measure all of them again, or remove the file")
        return speeds[key]


def speed_key(model: Model, segment_length: int) -> str:
    return f"{model}-L{segment_length}"


def scoring_key(model: Model, segment_length: int, evaluation: str) -> str:
    return f"{speed_key(model, segment_length)} {evaluation}"


def read_speeds(folder: Path) -> Speeds | None:
    """Return the speeds in a folder of runs; None if they were not measured apart."""
    path = folder / SPEEDS
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        of_training = _numbers(found[OF_TRAINING])
        of_scoring = _numbers(found[OF_SCORING]) if OF_SCORING in found else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{path}: is not a record of speeds; measure them again, or remove it") from None
    if not all(0 < speed < inf for speed in chain(of_training.values(), (of_scoring or {}).values())):
        raise UserError(f"{path}: holds a speed that is not positive; measure them again, or remove it")
    return Speeds(path, of_training, of_scoring)


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {str(key): float(speed) for key, speed in found.items()}


def at_speeds(run: RunHistory, model: Model, speeds: Speeds) -> RunHistory:
    """Return the run with the times that it would have had at these speeds."""
    opened = [stage.before.tokens or 0.0 for stage in run.stages]
    stretches = [
        (begin, end, speeds.of(model, stage.segment_length or 0))
        for stage, (begin, end) in zip(run.stages, pairwise([*opened, inf]), strict=True)
    ]

    def timed(place: Place) -> Place:
        tokens = place.tokens or 0.0
        seconds = sum(max(0.0, min(tokens, end) - begin) / speed for begin, end, speed in stretches)
        return replace(place, seconds=seconds)

    return replace(
        run,
        stages=tuple(replace(stage, before=timed(stage.before)) for stage in run.stages),
        trained=tuple(replace(event, at=timed(event.at)) for event in run.trained),
        held_out=tuple(replace(valid, at=timed(valid.at)) for valid in run.held_out),
    )
