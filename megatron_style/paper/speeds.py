"""Training speeds that were measured apart from the runs, in turns: `benchmarks/tables.py`.

If an experiment has them, times are the tokens of a run divided by these speeds, so that other work on the machine
during the runs does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.paper.runs import Model
from megatron_style.reporting.history import Place, RunHistory

SPEEDS = "speeds.json"


@dataclass(frozen=True)
class Speeds:
    path: Path
    tokens_per_second: Mapping[str, float]

    def of(self, model: Model, segment_length: int) -> float:
        key = speed_key(model, segment_length)
        if key not in self.tokens_per_second:
            raise UserError(f"{self.path}: has no speed of {key}; measure all of them again, or remove the file")
        return self.tokens_per_second[key]


def speed_key(model: Model, segment_length: int) -> str:
    return f"{model}-L{segment_length}"


def read_speeds(folder: Path) -> Speeds | None:
    """Return the speeds in a folder of runs; None if they were not measured apart."""
    path = folder / SPEEDS
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["tokens_per_second"]
        speeds = {str(key): float(speed) for key, speed in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{path}: is not a record of speeds; measure them again, or remove it") from None
    if not all(0 < speed < inf for speed in speeds.values()):
        raise UserError(f"{path}: holds a speed that is not positive; measure them again, or remove it")
    return Speeds(path, speeds)


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
