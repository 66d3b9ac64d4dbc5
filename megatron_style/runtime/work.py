"""The arithmetic of a run by its steps. In whole numbers, so that a resumed run counts on exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_style.config.model import ModelConfig
from megatron_style.planning.flops import training_flops_per_token
from megatron_style.schedule.stages import StageSchedule

# Half precision, dense, as the maker says. Whoever trains on other hardware adds its name here.
_PEAK_FLOPS = {"V100-SXM": 125e12, "A100": 312e12, "H100 80GB HBM3": 989e12}


class Work:
    """Model FLOPs over all ranks, without what recompute repeats."""

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
        """Of all steps before this one."""
        firsts = [self._schedule.first_step_of(stage) for stage in self._schedule.stages]
        tokens = [self._schedule.tokens_before(min(step, first)) for first in (*firsts, self._schedule.total_steps)]
        return sum(cost * (end - begin) for cost, (begin, end) in zip(self.per_token, pairwise(tokens), strict=True))


@dataclass(frozen=True)
class Totals:
    """What a run has done so far, over all ranks and resumptions. Evaluating and saving take none of the seconds."""

    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, flops: int, seconds: float) -> Totals:
        return Totals(self.tokens + tokens, self.flops + flops, self.seconds + seconds)

    def since(self, before: Totals) -> Totals:
        return Totals(self.tokens - before.tokens, self.flops - before.flops, self.seconds - before.seconds)


def peak_flops(device: torch.device, dtype: torch.dtype, *, ranks: int) -> float | None:
    """What so many devices compute in a second at most, where that is known: never a guess."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * ranks for known, peak in _PEAK_FLOPS.items() if known in name), None)
