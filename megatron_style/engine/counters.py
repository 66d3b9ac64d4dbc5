"""DeepSpeed's own counters of a run, which a checkpoint holds in addition to weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counters:
    global_steps: int
    global_samples: int
    skipped_steps: int
    loss_scaler: Mapping[str, Any]  # of fp16
    scheduler: Mapping[str, Any]  # of the ds_config, if it has one
    rates: tuple[Mapping[str, Any], ...]  # what such a scheduler sets, for each parameter group
