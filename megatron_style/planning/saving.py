"""The size of a checkpoint, and what a crash costs: the work since the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.config.run import OutputConfig
from megatron_style.model.shape import count_parameters
from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage

_FLOAT = 4  # bytes


@dataclass(frozen=True)
class SavingEstimate:
    checkpoint_bytes: int  # of the stage with the largest caches
    lost_seconds: float | None  # by a crash, at most; half of it on average; None: as long as a stage

    @classmethod
    def of(cls, setup: Setup, output: OutputConfig, stages: Sequence[Stage], step_seconds: float) -> SavingEstimate:
        """Estimate for a run whose slowest step takes `step_seconds`."""
        caches = max(cache_bytes(setup, stage) for stage in stages) if output.save_caches else 0
        lost = output.save_seconds
        if output.save_steps is not None:
            lost = output.save_steps * step_seconds
        return cls(state_bytes(setup) + caches, None if lost is None else lost + step_seconds)


def state_bytes(setup: Setup) -> int:
    """Return the bytes of weights and optimizer state on disk, over all ranks. With ZeRO or half precision there are
    full-precision weights in addition to those that the model computes with."""
    sharding = setup.sharding
    has_master = sharding.zero_stage > 0 or sharding.precision != "fp32"
    per_parameter = sharding.element_bytes + _FLOAT * (sharding.optimizer_states + has_master)
    return count_parameters(setup.model, setup.vocab_size) * per_parameter


def cache_bytes(setup: Setup, stage: Stage) -> int:
    """Return the bytes of the caches on disk, over all ranks."""
    memory = setup.model.memory
    slots = stage.cache_length + (memory.compressed if memory and stage.cache_length else 0)
    vectors = setup.data * stage.rows * slots * setup.model.layers
    return vectors * setup.model.hidden_size * setup.sharding.element_bytes
