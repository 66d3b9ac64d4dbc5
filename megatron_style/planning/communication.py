"""Bytes that each rank sends in one step. Rings: of a message of n bytes a rank sends n (r - 1)/r, twice in a reduction
that leaves the result everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage

_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Traffic:
    """Of one step and rank, over all its micro-batches."""

    gradients: float  # bytes sent to data-parallel ranks
    weights: float  # likewise, to bring ZeRO's weights together
    tensor: float  # bytes sent to tensor-parallel ranks
    data_messages: int
    tensor_messages: int


def plan_traffic(setup: Setup, stage: Stage) -> Traffic:
    zero, micros = setup.sharding, stage.accumulation
    whole = setup.parameters * zero.element_bytes
    around = (setup.data - 1) / setup.data
    reductions = micros if zero.zero_stage >= 2 else 1  # ZeRO 2 keeps no whole gradient until the last micro-batch
    gradients = reductions * whole * around * (1 if zero.zero_stage == 3 else 2)
    gathers = {0: 0, 1: 1, 2: 1, 3: micros * (1 if setup.parameters <= zero.most_gathered else 2)}[zero.zero_stage]
    buckets = max(1, setup.parameters // max(1, zero.bucket))
    return Traffic(
        gradients=gradients,
        weights=gathers * whole * around,
        tensor=2 * (setup.tensor - 1) / setup.tensor * micros * _tensor_bytes(setup, stage),
        data_messages=(reductions * buckets + gathers) if setup.data > 1 else 0,
        tensor_messages=micros * _tensor_messages(setup) if setup.tensor > 1 else 0,
    )


def _tensor_messages(setup: Setup) -> int:
    """Return the number of reductions of one micro-batch, as `_tensor_bytes` and `_vocabulary_bytes` list them."""
    blocks = setup.model.layers * (5 if setup.recompute else 4)
    bands = len(setup.bands)
    projections = bands if setup.model.vocabulary.kind == "adaptive" else 0
    return blocks + 1 + projections + 4 * bands  # 1: the embedding; of a band its input's gradient and three numbers


def _tensor_bytes(setup: Setup, stage: Stage) -> float:
    """Of the partial sums of one micro-batch."""
    tokens = stage.micro_rows * stage.segment_length
    forward = 2 * tokens  # behind attention and feed-forward; the second is not needed when a block is computed again
    backward = 2 * tokens  # before attention and feed-forward; none of the cache
    rows = setup.model.layers * (forward + backward + (tokens if setup.recompute else 0))
    hidden = setup.model.hidden_size * setup.sharding.element_bytes
    return (rows + 2 * tokens) * hidden + _vocabulary_bytes(setup, tokens)  # and behind the embedding, before the head


def _vocabulary_bytes(setup: Setup, tokens: int) -> float:
    """Of each band the greatest score, the sum and the score picked; of an adaptive one also narrow inputs."""
    bands, D, e = setup.bands, setup.model.hidden_size, setup.sharding.element_bytes
    total = 3.0 * tokens * _FLOAT
    if setup.model.vocabulary.kind != "adaptive":
        return total
    total += sum(D * band.width for band in bands) * e  # the gradients of the projections
    for band, share in zip(bands[1:], setup.band_shares[1:], strict=True):
        total += tokens * share * (3 * _FLOAT + band.width * e)
    return total
