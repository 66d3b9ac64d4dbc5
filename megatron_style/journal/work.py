"""Count the FLOPs of a run by its steps, in integers, so that a resumed run continues the count exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_style.config.model import ModelConfig
from megatron_style.planning.hardware import GPUS
from megatron_style.planning.timing import training_flops_per_token
from megatron_style.schedule.stages import StageSchedule

# The names that the driver gives to the GPUs of the table. Others with the same chip (PCIe, laptops) are slower.
_NAMES = {
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA B200": "b200-180gb",
    "AMD Instinct MI300X": "mi300x-192gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA A10": "a10-24gb",
}


class FlopCounter:
    """Counts model FLOPs over all ranks, without those that recompute repeats."""

    def __init__(self, model: ModelConfig, vocab_size: int, schedule: StageSchedule) -> None:
        self._schedule = schedule
        self.per_token = tuple(
            round(
                training_flops_per_token(
                    model, vocab_size, segment_length=stage.segment_length, cache_length=stage.cache_length
                )
            )
            for stage in schedule.stages
        )

    def before(self, step: int) -> int:
        """Return the FLOPs of all steps before this one."""
        firsts = [self._schedule.first_step_of(stage) for stage in self._schedule.stages]
        tokens = [self._schedule.tokens_before(min(step, first)) for first in (*firsts, self._schedule.total_steps)]
        return sum(cost * (end - begin) for cost, (begin, end) in zip(self.per_token, pairwise(tokens), strict=True))


@dataclass(frozen=True)
class Totals:
    """The totals of a run so far, over all ranks and resumptions. The seconds exclude evaluating and saving."""

    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, flops: int, seconds: float) -> Totals:
        return Totals(self.tokens + tokens, self.flops + flops, self.seconds + seconds)

    def since(self, before: Totals) -> Totals:
        return Totals(self.tokens - before.tokens, self.flops - before.flops, self.seconds - before.seconds)


def peak_flops(device: torch.device, dtype: torch.dtype, *, ranks: int) -> float | None:
    """Return the peak FLOP/s of all ranks' devices; None if it is unknown, never a guess."""
    name = _NAMES.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if name is None:
        return None
    gpu = GPUS[name]
    return ranks * (gpu.half_peak if dtype.itemsize == 2 else gpu.full_peak)
