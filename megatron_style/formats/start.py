"""The start of a run that has no checkpoints of its own: step 0, or the model that its `start` names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.checkpoint.origin import Origin, Progress, check_same_model
from megatron_style.config.run import RunConfig
from megatron_style.engine.engine import TrainingEngine
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StageSchedule


def open_start(run: RunConfig, topology: Topology) -> Origin:
    """Return the origin of a run. A model with the state of this run's optimizer resumes at its own step; any other
    gives its weights only, at step 0."""
    if run.start is None:
        return Origin((), lambda *_: Progress())
    source = open_model(run.start)
    training = source.config.training
    resumes = training is not None and training.optimizer == run.optimizer.kind
    start = _Start(run, source, is_first=topology.is_first, resumes=resumes)
    tokens = run.data.tokens_per_batch * topology.data.size
    # A model has no caches, so the run opens its lanes at its first step.
    return Origin(((0, tokens), (start.step, tokens)) if start.step else (), start.load)


@dataclass(frozen=True)
class _Start:
    run: RunConfig
    source: ModelSource
    is_first: bool
    resumes: bool

    @property
    def step(self) -> int:
        return self.source.config.step if self.resumes else 0

    def load(self, engine: TrainingEngine, schedule: StageSchedule) -> Progress:
        where = f"start: {self.run.start}"
        check_same_model(self.source.config.model.as_data(), self.source.config.vocab_size, engine, self.source.path)
        if self.step >= schedule.total_steps:
            raise UserError(f"{where} has done {self.step} steps, but this run's stages end at {schedule.total_steps}")
        engine.state.load_logical(self._read)
        engine.state.load_buffers(self.source.weight)
        if self.is_first:
            log(f"{where}: {'weights and optimizer' if self.resumes else 'weights only'}, at step {self.step}")
        return Progress(self.step)

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        state = self.source.state(name) if self.resumes and self.source.state else {}
        return {"weight": self.source.weight(name), **state}
