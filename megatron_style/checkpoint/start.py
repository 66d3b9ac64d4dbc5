"""Where a run begins: at step 0 with nothing, or with a model that was trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.checkpoint.formats import open_model
from megatron_style.config.run import RunConfig
from megatron_style.engine.engine import TrainingEngine
from megatron_style.model.cache import SegmentCache
from megatron_style.schedule.stages import StageSchedule


@dataclass(frozen=True)
class Progress:
    """What a resumed run needs beside weights and optimizer state: the next step, and one cache per micro-batch."""

    step: int = 0
    caches: tuple[SegmentCache, ...] = ()
    sound: int = 0  # the last step at which the held-out loss was finite


class Start:
    """A model that a run begins with, from wherever it comes. If it has the state of this run's optimizer, the run
    goes on at its step; if not, it begins at step 0 with its weights."""

    def __init__(self, run: RunConfig, *, is_first: bool) -> None:
        assert run.start is not None
        self._run, self._is_first, self._source = run, is_first, open_model(run.start)
        training = self._source.config.training
        self._goes_on = training is not None and training.optimizer == (run.optimizer.name or "nag")
        self.step = self._source.config.step if self._goes_on else 0

    def load(self, engine: TrainingEngine, schedule: StageSchedule) -> Progress:
        source, where = self._source, f"start: {self._run.start}"
        check_same_model(source.config.model.as_data(), source.config.vocab_size, engine, source.path)
        if self.step >= schedule.total_steps:
            raise UserError(f"{where} has done {self.step} steps, and this run's stages end at {schedule.total_steps}")
        engine.load_logical(self._read)
        if self._is_first:
            log(f"{where}: {'weights and optimizer' if self._goes_on else 'weights only'}, at step {self.step}")
        return Progress(self.step)

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        state = self._source.state(name) if self._goes_on and self._source.state else {}
        return {"weight": self._source.weight(name), **state}


def check_same_model(theirs: Mapping[str, Any], vocab_size: int, engine: TrainingEngine, where: Path) -> None:
    """A checkpoint of something else is refused with what differs."""
    ours = engine.model.config.as_data()
    for key in ours:
        if key != "dropout" and theirs.get(key) != ours[key]:
            raise UserError(f"{where}: is of another model: its model.{key} is {theirs.get(key)}, not {ours[key]}")
    if vocab_size != engine.model.vocab_size:
        raise UserError(
            f"{where}: is of another corpus: its vocabulary has {vocab_size} tokens, not {engine.model.vocab_size}"
        )
