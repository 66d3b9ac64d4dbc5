"""Bytes on each rank: the states of model and optimizer, the caches, and the peak of a step.

Tensors are counted; what the allocator adds is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_style.model.shape import units
from megatron_style.planning.parts.model import parts_of
from megatron_style.planning.setup import Setup, Sharding
from megatron_style.schedule.stages import Stage

_FLOAT, _DOUBLE = 4, 8  # bytes


@dataclass(frozen=True)
class StateBytes:
    weights: float
    gradients: float
    optimizer: float  # its states, and the full-precision weights it updates
    buffers: float  # to reduce gradients and to gather weights; the table of positions
    update: float  # needed in addition while the optimizer works, when there are no activations
    host: float  # what is kept in host memory instead


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one micro-batch's activations, without the caches, which outlive the step."""

    blocks: float  # kept by the blocks; with recompute their inputs only
    vocabulary: float  # kept by embedding and loss, logits among them
    peak: float  # the most at once, with what backward needs in addition


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a stage needs on one rank."""

    states: StateBytes
    caches: float  # on the device: the last segment's and the next one's, of all rows or of those that are computed
    host_caches: float
    activations: ActivationBytes
    total: float


def estimate_memory(setup: Setup, stage: Stage) -> MemoryEstimate:
    attention = parts_of(setup, stage).attention
    caches = setup.model.layers * attention.caches
    states = estimate_states(setup, attention.position_table)
    active = estimate_activations(setup, stage)
    held = states.weights + states.gradients + states.optimizer + caches
    total = held + max(states.buffers + active.peak, states.update)
    return MemoryEstimate(states, caches, setup.model.layers * attention.host_caches, active, total)


def estimate_activations(setup: Setup, stage: Stage) -> ActivationBytes:
    parts = parts_of(setup, stage)
    kept = parts.attention.kept + parts.feed_forward.kept
    needed = max(parts.attention.needed, parts.feed_forward.needed)
    blocks = parts.layers * kept
    if setup.recompute:  # a unit keeps its input only, and everything else while it is recomputed
        stream = parts.attention.batch.stream
        needed += kept - stream
        blocks = len(units(setup.model)) * stream
    held_for_cache = parts.layers * parts.attention.held_for_cache
    busiest = max(parts.vocabulary.needed, needed, held_for_cache)
    return ActivationBytes(blocks, parts.vocabulary.kept, blocks + parts.vocabulary.kept_by_embedding + busiest)


def estimate_states(setup: Setup, positions: int = 0) -> StateBytes:
    """Return what DeepSpeed keeps. Its ZeRO optimizers copy the weights in full precision even if they are fp32."""
    zero = setup.sharding
    e = zero.element_bytes
    P = setup.parameters
    part = P / setup.data  # a rank's shard under ZeRO
    weights = e * (part + _never_split(setup) if zero.zero_stage == 3 and setup.data > 1 else P)
    gradients = zero.gradient_bytes * (part if zero.zero_stage >= 2 else P)
    gradients += e * P if zero.keeps_two_gradients else 0
    copies = 1 if zero.zero_stage or zero.precision != "fp32" else 0
    optimizer = _FLOAT * (zero.optimizer_states + copies) * (part if zero.zero_stage else P)
    update = _needed_by_update(setup, part)
    host = 0.0
    if zero.offloads_optimizer:
        host = optimizer + _offloaded_with_optimizer(zero, part)
        optimizer = 0.0
        update = 0.0
        gradients = 0.0
    if zero.offloads_weights:
        host += weights
        weights = 0.0
    return StateBytes(weights + setup.centroid_bytes, gradients, optimizer, _buffers(setup) + positions, update, host)


def largest_micro_rows(setup: Setup, stage: Stage, memory: float) -> int | None:
    """Return the largest divisor of `rows` that fits into the memory as `micro_rows`; None if no divisor does."""
    fitting = (
        rows
        for rows in range(stage.rows, 0, -1)
        if stage.rows % rows == 0 and estimate_memory(setup, replace(stage, micro_rows=rows)).total <= memory
    )
    return next(fitting, None)


def _never_split(setup: Setup) -> int:
    """Return the elements of the small parameters, which ZeRO 3 keeps unsharded on every rank."""
    return sum(size for size in setup.parameter_sizes if size <= setup.sharding.kept_whole)


def _offloaded_with_optimizer(zero: Sharding, part: float) -> float:
    """Return the host bytes of the gradients, both those of the update and those accumulated before it, and at ZeRO 1
    and 2 of the updated weights that are copied back to the GPU."""
    weights = zero.element_bytes if zero.zero_stage < 3 else 0
    return (_FLOAT + zero.gradient_bytes + weights) * part


def _buffers(setup: Setup) -> float:
    zero = setup.sharding
    if zero.zero_stage == 0:
        return 0.0
    if zero.keeps_two_gradients:  # no buckets: all are reduced as one tensor, after the activations are gone
        return 0.0
    buckets = zero.bucket * (2 if zero.reduces_in_backward and zero.zero_stage < 3 else 1)
    gathered = min(setup.parameters, zero.most_gathered) if zero.zero_stage == 3 and setup.data > 1 else 0
    return zero.element_bytes * (buckets + gathered)


def _needed_by_update(setup: Setup, part: float) -> float:
    """Return the bytes of the gradient copies that an update makes and of the optimizer's temporary tensors."""
    zero = setup.sharding
    if zero.zero_stage == 0:  # the norm is taken in double precision, parameter by parameter
        largest = max(setup.parameter_sizes)
        flat = min(setup.parameters, zero.bucket) if setup.data > 1 else 0  # gradients are flattened to be summed
        return max(2.0 * _DOUBLE * largest, zero.element_bytes * flat)
    if zero.zero_stage == 3:
        return _FLOAT * (1 + zero.optimizer_states) * min(part, zero.group)
    if zero.keeps_two_gradients:  # a copy is reduced in half precision
        return max(zero.element_bytes * setup.parameters, _FLOAT * zero.optimizer_states * part)
    flat = zero.element_bytes if zero.gradient_bytes != _FLOAT else 0
    return (_FLOAT * zero.optimizer_states + flat) * part
