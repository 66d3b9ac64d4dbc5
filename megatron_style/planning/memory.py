"""Bytes on each rank: what the model and its optimizer hold all the time, the caches, and the peak of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_style.planning.activations import ActivationBytes, activations
from megatron_style.planning.setup import Setup
from megatron_style.planning.sharding import Sharding
from megatron_style.schedule.stages import Stage

_FLOAT, _DOUBLE = 4, 8  # bytes


@dataclass(frozen=True)
class StateBytes:
    weights: float
    gradients: float
    optimizer: float  # its states, and the full-precision weights it updates
    buffers: float  # to reduce gradients and to gather weights; the table of positions
    update: float  # needed beside while the optimizer works, when there are no activations
    host: float  # what is kept in host memory instead


@dataclass(frozen=True)
class MemoryPlan:
    """A stage on one rank, in bytes."""

    states: StateBytes
    caches: float  # the last segment's and the next one's, of all rows
    activations: ActivationBytes
    total: float


def plan_memory(setup: Setup, stage: Stage) -> MemoryPlan:
    D, e = setup.model.hidden_size, setup.sharding.element_bytes
    caches = 2 * stage.rows * stage.cache_length * D * setup.model.layers * e
    positions = (stage.segment_length + stage.cache_length) * D * _FLOAT
    states, active = plan_states(setup, positions), activations(setup, stage)
    held = states.weights + states.gradients + states.optimizer + caches
    total = held + max(states.buffers + active.peak, states.update)
    return MemoryPlan(states, caches, active, total)


def plan_states(setup: Setup, positions: int = 0) -> StateBytes:
    """DeepSpeed's: ZeRO keeps a full-precision copy of the weights for its optimizer, also of weights that are full."""
    zero, e, P = setup.sharding, setup.sharding.element_bytes, setup.parameters
    part = P / setup.data  # what ZeRO leaves to a rank
    weights = e * (part + _never_split(setup) if zero.zero_stage == 3 and setup.data > 1 else P)
    gradients = zero.gradient_bytes * (part if zero.zero_stage >= 2 else P)
    gradients += e * P if zero.keeps_two_gradients else 0
    copies = 1 if zero.zero_stage or zero.precision != "fp32" else 0
    optimizer = _FLOAT * (zero.optimizer_states + copies) * (part if zero.zero_stage else P)
    update = _needed_by_update(setup, part)
    host = 0.0
    if zero.offloads_optimizer:
        host, optimizer, update, gradients = optimizer + _offloaded_with_optimizer(zero, part), 0.0, 0.0, 0.0
    if zero.offloads_weights:
        host, weights = host + weights, 0.0
    return StateBytes(weights, gradients, optimizer, _buffers(setup) + positions, update, host)


def largest_micro_rows(setup: Setup, stage: Stage, memory: float) -> int | None:
    """The most rows at once whose plan fits into so many bytes, of those that divide the rows; None if not one does."""
    fitting = (
        rows
        for rows in range(stage.rows, 0, -1)
        if stage.rows % rows == 0 and plan_memory(setup, replace(stage, micro_rows=rows)).total <= memory
    )
    return next(fitting, None)


def _never_split(setup: Setup) -> int:
    """Small parameters, which ZeRO 3 leaves whole on every rank."""
    return sum(size for size in setup.parameter_sizes if size <= setup.sharding.kept_whole)


def _offloaded_with_optimizer(zero: Sharding, part: float) -> float:
    """Return the host bytes of the gradients of the update and of those that add up before it, and at ZeRO 1 and 2 of
    the updated weights on their way back."""
    weights = zero.element_bytes if zero.zero_stage < 3 else 0
    return (_FLOAT + zero.gradient_bytes + weights) * part


def _buffers(setup: Setup) -> float:
    zero, P = setup.sharding, setup.parameters
    if zero.zero_stage == 0:
        return 0.0
    if zero.keeps_two_gradients:  # no buckets: all are reduced as one tensor, after the activations are gone
        return 0.0
    buckets = zero.bucket * (2 if zero.reduces_in_backward and zero.zero_stage < 3 else 1)
    gathered = min(P, zero.most_gathered) if zero.zero_stage == 3 and setup.data > 1 else 0
    return zero.element_bytes * (buckets + gathered)


def _needed_by_update(setup: Setup, part: float) -> float:
    """Copies of the gradients that an update makes, in full precision, and what the optimizer needs beside."""
    zero = setup.sharding
    if zero.zero_stage == 0:  # the norm is taken in double precision, parameter by parameter
        largest = max(setup.parameter_sizes)
        flat = min(setup.parameters, zero.bucket) if setup.data > 1 else 0  # gradients are laid end to end to be summed
        return max(2.0 * _DOUBLE * largest, zero.element_bytes * flat)
    if zero.zero_stage == 3:
        return _FLOAT * (1 + zero.optimizer_states) * min(part, zero.group)
    if zero.keeps_two_gradients:  # a copy travels in half precision
        return max(zero.element_bytes * setup.parameters, _FLOAT * zero.optimizer_states * part)
    flat = zero.element_bytes if zero.gradient_bytes != _FLOAT else 0
    return (_FLOAT * zero.optimizer_states + flat) * part
