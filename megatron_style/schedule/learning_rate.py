"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from megatron_style.config.run import LearningRateConfig


def learning_rate_at(step: int, config: LearningRateConfig | None, total_steps: int) -> float | None:
    """Return the learning rate: warm-up, then cosine periods, each `period_growth` times longer than the one before,
    with peak and floor multiplied by `shrink`. Without a config it is `None`: the ds_config has its own scheduler."""
    if config is None:
        return None
    if step < config.warmup_steps:
        return config.warmup_from + step * ((config.peak - config.warmup_from) / config.warmup_steps)
    since = step - config.warmup_steps
    first = config.period_steps or max(1, total_steps - config.warmup_steps)
    growth = config.period_growth
    if growth == 1:
        period = since // first
        length = float(first)
        position = float(since - period * first)
    else:
        period = math.floor(math.log(1 - since / first * (1 - growth), growth))
        length = growth**period * first
        position = since - (1 - growth**period) / (1 - growth) * first
    low, high = config.floor * config.shrink**period, config.peak * config.shrink**period
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * position / length))
