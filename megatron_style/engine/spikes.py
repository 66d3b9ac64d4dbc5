"""Find a loss that is far above those before it, before it becomes an update."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_style.config.run import SpikeConfig
from megatron_style.parallel.topology import Topology


@dataclass(frozen=True)
class Spike:
    loss: float
    median: float  # of the losses before it
    action: str

    def __str__(self) -> str:
        return f"the loss {self.loss:.4f} is {self.loss / self.median:.1f} times its running median {self.median:.4f}"


def look_for_spike(
    config: SpikeConfig | None, before: tuple[float, ...], share: Tensor, topology: Topology
) -> tuple[tuple[float, ...], Spike | None]:
    """Return the losses to compare later ones with, and the spike, if this step's loss is one. A run without
    `optimizer.spike` does not wait for the loss."""
    if config is None:
        return (), None
    loss = loss_of_all_ranks(share, topology)
    return extend_window(config, before, loss), find_spike(config, before, loss)


def find_spike(config: SpikeConfig, before: tuple[float, ...], loss: float) -> Spike | None:
    """Return the spike, if this loss is one. There is none before the window is full, and a loss that is not finite is
    left to the check of the gradients."""
    window = before[-config.window :]  # a resumed run may have a smaller window than before
    if len(window) < config.window or not math.isfinite(loss):
        return None
    median = statistics.median(window)
    return Spike(loss, median, config.action) if loss > config.factor * median else None


def extend_window(config: SpikeConfig, before: tuple[float, ...], loss: float) -> tuple[float, ...]:
    """Return the window with this loss in it. A spike is added too: it hardly moves a median, and a loss that stays
    high becomes the new median after half a window."""
    return (*before, loss)[-config.window :] if math.isfinite(loss) else before


def loss_of_all_ranks(share: Tensor, topology: Topology) -> float:
    """Return the loss of the step, the same number on every rank. Shards of a row may round differently: the first
    tensor rank decides."""
    summed = topology.data.sum(share)
    decides = topology.tensor.rank == 0
    return topology.tensor.sum(summed if decides else torch.zeros_like(summed)).item()
