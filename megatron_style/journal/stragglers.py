"""Find the ranks that make the others wait."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_style.base.events import TrainEvent, own_seconds
from megatron_style.parallel.device.phase_times import PHASES
from megatron_style.parallel.topology import Topology

_CLEARLY = 1.5  # times the median of all ranks


@dataclass(frozen=True)
class RankTimes:
    """The mean seconds of a rank's steps, by phase."""

    rank: int
    phases: Mapping[str, float]

    @property
    def own(self) -> float:
        return own_seconds(self.phases)


@dataclass(frozen=True)
class Spread:
    """The slowest and the fastest of all ranks by their own work: what they do without waiting for others."""

    slowest: RankTimes
    fastest: RankTimes
    median: float  # seconds of own work

    def added_to(self, event: TrainEvent) -> TrainEvent:
        return replace(
            event,
            slowest_rank=self.slowest.rank,
            slowest=self.slowest.phases,
            fastest_rank=self.fastest.rank,
            fastest=self.fastest.phases,
        )

    @property
    def note(self) -> str:
        """Return a clause for the console; empty unless a rank is clearly slower than most."""
        slowest = self.slowest
        if slowest.own <= _CLEARLY * self.median:
            return ""
        usual = f"most ranks take {self.median:.3g} s"
        return f", rank {slowest.rank} is slow: {slowest.own:.3g} s of its own work per step, {usual}"


def gather_times(own: Sequence[float], steps: int, topology: Topology, device: torch.device) -> Tensor:
    """Return the mean times of all ranks [ranks, phases], given this rank's seconds of `steps` steps. All ranks call it
    together, and none waits for the device."""
    mine = torch.tensor(own, dtype=torch.float64, device=device) / steps
    of_tensor_axis = torch.stack(topology.tensor.gather(mine))
    return torch.cat(topology.data.gather(of_tensor_axis))  # ranks with the same data rank are neighbours


def spread_of(seconds: Sequence[float]) -> Spread | None:
    """Return the spread of several ranks, by the times of all, rank after rank; None for a single one."""
    firsts = range(0, len(seconds), len(PHASES))
    ranks = [RankTimes(rank, dict(zip(PHASES, seconds[first:], strict=False))) for rank, first in enumerate(firsts)]
    if len(ranks) == 1:
        return None
    by_speed = sorted(ranks, key=lambda times: times.own)
    return Spread(by_speed[-1], by_speed[0], statistics.median(times.own for times in ranks))
