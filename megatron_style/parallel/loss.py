"""Cross entropy and the best choice over logits whose columns are split over the tensor axis. Logits never travel."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_style.parallel.collectives import largest_over_shards, reduce_from_shards
from megatron_style.parallel.topology import Axis


def sharded_logsumexp(logits: Tensor, axis: Axis) -> Tensor:
    """log sum exp over all columns of all ranks."""
    local = logits.logsumexp(-1)
    if axis.size == 1:
        return local
    peak = largest_over_shards(local, axis)
    return peak + reduce_from_shards((local - peak).exp(), axis).log()


def sharded_pick(logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> Tensor:
    """The logit in column `columns[i]` of row i, wherever it is; zero where no rank owns that column."""
    elsewhere = (columns < owned.start) | (columns >= owned.stop)
    if len(owned) == 0:
        picked = logits.sum(-1)  # of no columns: zero, but part of the graph
    else:
        local = (columns - owned.start).masked_fill(elsewhere, 0)
        picked = torch.gather(logits, -1, local[..., None])[..., 0].masked_fill(elsewhere, 0)
    return reduce_from_shards(picked, axis)


def sharded_best(scores: Tensor, ids: Tensor, axis: Axis) -> Tensor:
    """Of each row the id with the highest score on any rank, the lowest of several: the same on every rank."""
    peak = largest_over_shards(scores.max(-1).values, axis)
    candidates = ids.masked_fill(scores < peak[..., None], torch.iinfo(ids.dtype).max).min(-1).values
    return -largest_over_shards(-candidates, axis)
