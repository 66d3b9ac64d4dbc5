"""Cross entropy and the best choice over logits whose columns are split over the tensor axis. Logits never travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_style.parallel.collectives import largest_over_shards
from megatron_style.parallel.topology import Axis


def sharded_logsumexp(logits: Tensor, axis: Axis) -> Tensor:
    """log sum exp over all columns of all ranks, without gradient."""
    local = logits.detach().logsumexp(-1)
    peak = largest_over_shards(local, axis)
    return peak + axis.sum((local - peak).exp()).log()


def sharded_total_and_pick(logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> tuple[Tensor, Tensor]:
    """Of each row the log sum exp over all columns of all ranks, and the logit in column `columns[i]`, wherever it is;
    zero where no rank owns that column. The logits are used up: their memory holds what the backward pass needs."""
    return _TotalAndPick.apply(logits, columns, owned, axis)  # type: ignore[no-untyped-call, no-any-return]


class _TotalAndPick(torch.autograd.Function):
    """One matrix from beginning to end: the logits become exp(logit - peak), and these the gradient. It is the largest
    tensor of a step, and left to autograd there would be six of it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> tuple[Tensor, Tensor]:
        mine = (columns >= owned.start) & (columns < owned.stop)
        place = (columns - owned.start).clamp(0, max(0, len(owned) - 1))[:, None]  # a lookup for all rows: no waiting
        weights = logits.detach()
        if len(owned):
            picked, peak = weights.gather(-1, place)[:, 0] * mine, weights.amax(-1)
        else:
            picked, peak = weights.new_zeros(len(columns)), weights.new_full((len(columns),), -torch.inf)
        peak = largest_over_shards(peak, axis)
        total = axis.sum(weights.sub_(peak[:, None]).exp_().sum(-1))
        ctx.save_for_backward(weights, total, mine, place)
        return peak + total.log(), axis.sum(picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_picked: Tensor) -> tuple[Tensor, None, None, None]:
        weights, total, mine, place = ctx.saved_tensors
        gradient = weights.mul_((grad_total / total)[:, None])
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, place, (grad_picked * mine)[:, None])
        return gradient, None, None, None


def sharded_best(scores: Tensor, ids: Tensor, axis: Axis) -> Tensor:
    """Of each row the id with the highest score on any rank, the lowest of several: the same on every rank."""
    peak = largest_over_shards(scores.max(-1).values, axis)
    candidates = ids.masked_fill(scores < peak[..., None], torch.iinfo(ids.dtype).max).min(-1).values
    return -largest_over_shards(-candidates, axis)
