"""Bytes that each rank sends in one step. Collectives are rings: for a message of n bytes each of r ranks sends
n (r - 1)/r bytes, and twice as many in an all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.planning.parts.model import parts_of
from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank in one step, over all its micro-batches."""

    gradients: float  # bytes sent to data-parallel ranks, with the tallies of centroids
    weights: float  # bytes sent to data-parallel ranks to gather ZeRO's weights
    tensor: float  # bytes sent to tensor-parallel ranks
    data_messages: int
    tensor_messages: int


@dataclass(frozen=True)
class _Sums:
    """The messages of one micro-batch over the tensor axis."""

    bytes: float  # that are reduced, or as much work
    messages: int


def estimate_traffic(setup: Setup, stage: Stage) -> Traffic:
    zero = setup.sharding
    micros = stage.accumulation
    sent = _sent_over_tensor_axis(setup, stage)
    parameter_bytes = setup.parameters * zero.element_bytes
    around = (setup.data - 1) / setup.data
    reductions = micros if zero.zero_stage >= 2 else 1  # from ZeRO 2 on, no unsharded gradient is kept between them
    gradients = reductions * parameter_bytes * around * (1 if zero.zero_stage == 3 else 2)
    gathers = {0: 0, 1: 1, 2: 1, 3: micros * (1 if setup.parameters <= zero.most_gathered else 2)}[zero.zero_stage]
    gradients += 2 * around * setup.centroid_bytes  # a tally is as large as what it moves
    tallies = 1 if setup.centroid_bytes else 0
    buckets = max(1, setup.parameters // max(1, zero.bucket))
    return Traffic(
        gradients=gradients,
        weights=gathers * parameter_bytes * around,
        tensor=2 * (setup.tensor - 1) / setup.tensor * micros * sent.bytes,
        data_messages=(reductions * buckets + gathers + tallies) if setup.data > 1 else 0,
        tensor_messages=micros * sent.messages if setup.tensor > 1 else 0,
    )


def _sent_over_tensor_axis(setup: Setup, stage: Stage) -> _Sums:
    parts = parts_of(setup, stage)
    halves = (parts.attention.sent, parts.feed_forward.sent)
    ends = parts.vocabulary.sent
    reduced = parts.layers * sum(half.vectors for half in halves) + ends.vectors
    moved = parts.layers * sum(half.moved for half in halves) + ends.moved
    other = parts.layers * sum(half.other for half in halves) + ends.other
    losses = 1 if setup.model.routing else 0  # a number: the cluster loss of all layers
    return _Sums(
        bytes=(reduced + moved / 2) * setup.model.hidden_size * setup.sharding.element_bytes + other,
        messages=parts.layers * sum(half.messages for half in halves) + ends.messages + losses,
    )
