"""A run of several ranks records the slowest and the fastest one, and names one that is clearly slower."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_style.base.events import TrainEvent, read_events
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.engine.engine import TrainingEngine
from megatron_style.journal.stragglers import gather_times, spread_of
from megatron_style.model.shortformer import Output
from megatron_style.parallel.device.phase_times import PHASES, PhaseTimes
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.topology import Topology
from megatron_style.train import train
from tests.support.resuming import make_run

SLOW = 2
DELAY = 0.3  # seconds of each forward pass
forward = TrainingEngine.forward


def train_with_a_slow_rank(run: RunConfig) -> None:
    def delayed(engine: TrainingEngine, *others: Any) -> Output:
        if dist.get_rank() == SLOW:
            time.sleep(DELAY)
        return forward(engine, *others)

    with patch.object(TrainingEngine, "forward", delayed):
        train(run)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_slow_rank_is_recorded_and_named(folder: Path, capfd: pytest.CaptureFixture[str], tensor: int) -> None:
    """Under tensor parallelism the ranks of its group wait in each of its forward passes, and are as slow."""
    run = make_run(folder, data=4 // tensor, tensor=tensor, steps=4, output={"log_every": 2, "sample_tokens": 0})
    run_ranks(4, train_with_a_slow_rank, run)
    lines = [event for event in read_events(RunFolder(run.output.path).metrics) if isinstance(event, TrainEvent)]
    assert lines
    for line in lines:
        assert line.slowest is not None
        assert line.fastest is not None
        assert set(line.slowest) == set(line.fastest) == set(PHASES)
        assert (line.slowest_rank or 0) // tensor == SLOW // tensor
        assert (line.fastest_rank or 0) // tensor != SLOW // tensor
        assert line.slowest["forward"] > max(DELAY, line.fastest["forward"])
    if tensor == 1:
        assert f", rank {SLOW} is slow: " in capfd.readouterr().err


def times_of(*own: float) -> list[float]:
    """Return the times of ranks whose forward passes take that long."""
    times: list[float] = []
    for seconds in own:
        times += [0.0, seconds, 9.0, 0.0]
    return times


def test_only_a_rank_that_is_clearly_slower_is_named() -> None:
    assert spread_of(times_of(1.0)) is None
    even = spread_of(times_of(1.0, 1.1, 1.4, 0.9))
    assert even is not None
    assert (even.slowest.rank, even.fastest.rank, even.note) == (2, 3, "")
    uneven = spread_of(times_of(1.0, 1.1, 1.0, 2.0))
    assert uneven is not None
    assert uneven.note == ", rank 3 is slow: 2 s of its own work per step, most ranks take 1.05 s"


def gathered() -> Any:
    topology = Topology.of_world(tensor=2)
    own = [float(dist.get_rank() * 8 + phase) for phase in range(len(PHASES))]
    return gather_times(own, 8, topology, torch.device("cpu")).tolist()


def test_times_are_gathered_by_rank_and_per_step() -> None:
    expected = [[rank + phase / 8 for phase in range(len(PHASES))] for rank in range(4)]
    assert run_ranks(4, gathered) == [expected] * 4


def test_phases_add_up_until_they_are_taken() -> None:
    times = PhaseTimes(torch.device("cpu"))
    for _ in range(2):
        with times.measure("forward"):
            time.sleep(0.01)
    data, forward_seconds, *_ = times.take()
    assert data == 0
    assert forward_seconds >= 0.02
    assert times.take() == [0.0] * len(PHASES)
