"""The time of a step: arithmetic at a share of the GPU's peak, the update at its memory's speed, and messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.config.model import ModelConfig
from megatron_style.planning.hardware import Gpu
from megatron_style.planning.memory import estimate_states
from megatron_style.planning.parts.micro_batch import PASSES
from megatron_style.planning.parts.model import parts_of
from megatron_style.planning.setup import Setup, Sharding
from megatron_style.planning.text import zipf_shares
from megatron_style.planning.traffic import Traffic, estimate_traffic
from megatron_style.schedule.stages import Stage

# Seconds per message and doubling of the ranks; NCCL's order of magnitude.
_HOST_LATENCY = 5e-6
_NETWORK_LATENCY = 20e-6
_BACKWARD = 2 / 3  # of a step's arithmetic; a reduction can overlap with it


@dataclass(frozen=True)
class Machine:
    gpu: Gpu
    efficiency: float  # the share of its peak that arithmetic reaches


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    update: float  # the optimizer's
    tensor: float  # messages between tensor-parallel ranks, which overlap with nothing
    data: float  # messages between data-parallel ranks
    exposed: float  # the part of those that does not overlap with backward
    total: float
    communication_share: float  # of the total

    @property
    def communication(self) -> float:
        return self.tensor + self.data


def training_flops_per_token(
    model: ModelConfig,
    vocab_size: int,
    *,
    segment_length: int,
    cache_length: int,
    rows: int = 1,
    band_shares: Sequence[float] | None = None,
    causal_once: bool = True,
) -> float:
    """Return `flops_of_token`, which does not depend on the grid. `rows` of a micro-batch share the projections of
    relative positions. `band_shares` is the share of tokens in each band of
    the vocabulary; it defaults to Zipf's law."""
    shares = zipf_shares(model, vocab_size) if band_shares is None else tuple(band_shares)
    stage = Stage(0, segment_length, cache_length, rows=rows, micro_rows=rows)
    return flops_of_token(Setup(model, vocab_size, shares, Sharding()), stage, causal_once=causal_once)


def flops_of_token(setup: Setup, stage: Stage, *, causal_once: bool = True) -> float:
    """Return the FLOPs of forward and backward per trained token with a full cache, without recompute.

    Only matrix products count, as is usual: sums, norms, activations and lookups are a percent of them or less. A
    multiplication with its addition counts as 2. `causal_once` counts only what a token may attend to, which is what
    the model requires. Without it, attention is segment x (cache + segment), which is what a kernel computes that only
    masks."""
    return 2.0 * PASSES * parts_of(setup, stage).products(causal_once=causal_once)


def executed_flops(setup: Setup, stage: Stage) -> float:
    """Return the FLOPs that one rank executes in a step. Fused kernels skip masked tokens, with a cache too; kernels
    that hold the matrix of tokens x tokens skip nothing. Recompute adds a second forward pass, a third of the rest."""
    each = flops_of_token(setup, stage, causal_once=parts_of(setup, stage).attention.is_fused)
    again = 4 / 3 if setup.recompute else 1
    return again * each * stage.rows * stage.segment_length / setup.tensor


def estimate_time(setup: Setup, stage: Stage, machine: Machine) -> StepTime:
    gpu = machine.gpu
    traffic = estimate_traffic(setup, stage)
    compute = executed_flops(setup, stage) / (gpu.peak(setup.sharding.precision) * machine.efficiency)
    states = estimate_states(setup)
    update = (states.weights + states.gradients + 2 * states.optimizer) / gpu.memory_speed
    tensor = _seconds(traffic.tensor, traffic.tensor_messages, setup.tensor, setup.tensor, gpu)
    data = _data_seconds(traffic, setup, gpu)
    exposed = max(0.0, data - _hiding(setup, stage) * compute)
    total = compute + update + tensor + exposed
    return StepTime(compute, update, tensor, data, exposed, total, (tensor + exposed) / total)


def _hiding(setup: Setup, stage: Stage) -> float:
    """Return the share of a step's arithmetic that overlaps with the data-parallel messages, which ZeRO 1 sends in the
    backward pass of the last micro-batch only."""
    if not setup.sharding.reduces_in_backward:
        return 0.0
    return _BACKWARD / (stage.accumulation if setup.sharding.zero_stage == 1 else 1)


def _data_seconds(traffic: Traffic, setup: Setup, gpu: Gpu) -> float:
    """Return the seconds of the data-parallel messages. Tensor-parallel ranks are neighbours, so that data-parallel
    ranks share a host only when all ranks do."""
    sent = traffic.gradients + traffic.weights
    return _seconds(sent, traffic.data_messages, setup.data, setup.data * setup.tensor, gpu)


def _seconds(sent: float, messages: int, ranks: int, spread: int, gpu: Gpu) -> float:
    """Return the seconds of messages among ranks that are spread over `spread` neighbouring GPUs."""
    inside = spread <= gpu.per_host
    latency = messages * math.log2(ranks) * (_HOST_LATENCY if inside else _NETWORK_LATENCY)
    return sent / (gpu.host_speed if inside else gpu.network_speed) + latency
