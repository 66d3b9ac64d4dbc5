"""Cross entropy and argmax over logits whose columns are split over the tensor axis. Logits are never communicated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_style.parallel.collectives import largest_over_shards
from megatron_style.parallel.topology import Axis


def sharded_logsumexp(logits: Tensor, axis: Axis) -> Tensor:
    """Return the log-sum-exp over all columns of all ranks, without gradient."""
    local = logits.detach().logsumexp(-1)
    peak = largest_over_shards(local, axis)
    return peak + axis.sum((local - peak).exp()).log()


def sharded_total_and_pick(logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return for each row i the log-sum-exp over all columns of all ranks, and the logit in column `columns[i]`, or
    zero if no rank owns that column. The logits are overwritten: their memory holds what the backward pass needs."""
    return _TotalAndPick.apply(logits, columns, owned, axis)  # type: ignore[no-untyped-call, no-any-return]


class _TotalAndPick(torch.autograd.Function):
    """Cross entropy in place: the logits become exp(logit - peak), and these the gradient. This is the largest tensor
    of a step, and autograd would make six of it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> tuple[Tensor, Tensor]:
        is_owned = (columns >= owned.start) & (columns < owned.stop)
        # All rows are looked up, owned or not: selecting some would make the host wait for their number.
        local = (columns - owned.start).clamp(0, max(0, len(owned) - 1))[:, None]
        weights = logits.detach()
        if len(owned):
            picked = weights.gather(-1, local)[:, 0] * is_owned
            peak = weights.amax(-1)
        else:
            picked = weights.new_zeros(len(columns))
            peak = weights.new_full((len(columns),), -torch.inf)
        peak = largest_over_shards(peak, axis)
        total = axis.sum(weights.sub_(peak[:, None]).exp_().sum(-1))
        ctx.save_for_backward(weights, total, is_owned, local)
        return peak + total.log(), axis.sum(picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_picked: Tensor) -> tuple[Tensor, None, None, None]:
        weights, total, is_owned, local = ctx.saved_tensors
        gradient = weights.mul_((grad_total / total)[:, None])
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, local, (grad_picked * is_owned)[:, None])
        return gradient, None, None, None


def sharded_best(scores: Tensor, ids: Tensor, axis: Axis) -> Tensor:
    """Return each row's id with the highest score on any rank, the lowest id of a tie: the same on every rank."""
    peak = largest_over_shards(scores.max(-1).values, axis)
    candidates = ids.masked_fill(scores < peak[..., None], torch.iinfo(ids.dtype).max).min(-1).values
    return -largest_over_shards(-candidates, axis)
