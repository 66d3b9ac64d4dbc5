"""How long a step takes: arithmetic at a share of the GPU's peak, the update at its memory's speed, and messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.config.model import ModelConfig
from megatron_style.planning.hardware import Gpu
from megatron_style.planning.memory import estimate_states
from megatron_style.planning.parts import PASSES, parts_of
from megatron_style.planning.setup import Setup, Sharding
from megatron_style.planning.text import zipf_shares
from megatron_style.planning.traffic import Traffic, estimate_traffic
from megatron_style.schedule.stages import Stage

_HOST_LATENCY, _NETWORK_LATENCY = 5e-6, 20e-6  # seconds a message takes for each doubling of the ranks; NCCL's order
_BACKWARD = 2 / 3  # of a step's arithmetic: what a reduction can hide behind


@dataclass(frozen=True)
class Machine:
    gpu: Gpu
    efficiency: float  # the share of its peak that arithmetic reaches


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    update: float  # the optimizer's
    tensor: float  # messages between tensor-parallel ranks: nothing goes on meanwhile
    data: float  # messages between data-parallel ranks
    exposed: float  # what of those is not hidden behind backward
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
    band_shares: Sequence[float] | None = None,
    causal_once: bool = True,
) -> float:
    """Return `flops_of_token` on whatever grid. `band_shares` is the share of tokens in each band of the vocabulary;
    default: Zipf's law."""
    shares = zipf_shares(model, vocab_size) if band_shares is None else tuple(band_shares)
    stage = Stage(0, segment_length, cache_length, rows=1, micro_rows=1)
    return flops_of_token(Setup(model, vocab_size, shares, Sharding()), stage, causal_once=causal_once)


def flops_of_token(setup: Setup, stage: Stage, *, causal_once: bool = True) -> float:
    """Return the FLOPs of forward and backward of one trained token whose cache is full, without recompute.

    Only matrix products count, as is usual: sums, norms, activations and lookups are a percent of them or less. A
    multiplication with its addition counts as 2. `causal_once` counts only what a token may attend to: the model's own
    work, whatever the kernel. Without it, attention is segment x (cache + segment), what a kernel that only masks
    computes."""
    return 2.0 * PASSES * parts_of(setup, stage).products(causal_once=causal_once)


def executed_flops(setup: Setup, stage: Stage) -> float:
    """Return what one rank computes in a step. Kernels skip what a token may not see, with a cache too; kernels that
    hold the matrix of tokens x tokens skip nothing. Recomputing is a second forward pass, a third of the whole."""
    each = flops_of_token(setup, stage, causal_once=setup.kernels.fused_attention)
    again = 4 / 3 if setup.recompute else 1
    return again * each * stage.rows * stage.segment_length / setup.tensor


def estimate_time(setup: Setup, stage: Stage, machine: Machine) -> StepTime:
    gpu, traffic = machine.gpu, estimate_traffic(setup, stage)
    compute = executed_flops(setup, stage) / (gpu.peak(setup.sharding.precision) * machine.efficiency)
    states = estimate_states(setup)
    update = (states.weights + states.gradients + 2 * states.optimizer) / gpu.memory_speed
    tensor = _seconds(traffic.tensor, traffic.tensor_messages, setup.tensor, setup.tensor, gpu)
    data = _data_seconds(traffic, setup, gpu)
    exposed = max(0.0, data - _hiding(setup, stage) * compute)
    total = compute + update + tensor + exposed
    return StepTime(compute, update, tensor, data, exposed, total, (tensor + exposed) / total)


def _hiding(setup: Setup, stage: Stage) -> float:
    """Return the share of a step's arithmetic that runs during the data-parallel messages: ZeRO 1 sends them in the
    backward pass of the last micro-batch only."""
    if not setup.sharding.reduces_in_backward:
        return 0.0
    return _BACKWARD / (stage.accumulation if setup.sharding.zero_stage == 1 else 1)


def _data_seconds(traffic: Traffic, setup: Setup, gpu: Gpu) -> float:
    """Tensor-parallel ranks are neighbours, so that data-parallel ones share a host only when all ranks do."""
    sent = traffic.gradients + traffic.weights
    return _seconds(sent, traffic.data_messages, setup.data, setup.data * setup.tensor, gpu)


def _seconds(sent: float, messages: int, ranks: int, spread: int, gpu: Gpu) -> float:
    """`spread` is how many GPUs lie between the first and the last of the ranks."""
    inside = spread <= gpu.per_host
    latency = messages * math.log2(ranks) * (_HOST_LATENCY if inside else _NETWORK_LATENCY)
    return sent / (gpu.host_speed if inside else gpu.network_speed) + latency
