"""Cross entropy and argmax over logits whose columns are split over the tensor axis. Logits are never communicated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_style.parallel.collectives import largest_over_shards
from megatron_style.parallel.topology import Axis

WIDENED = 2**24  # half-precision scores that a device computes with in float32 at once: 64 MB


def sharded_logsumexp(logits: Tensor, axis: Axis) -> Tensor:
    """Return the log-sum-exp over all columns of all ranks, without gradient."""
    local = logits.detach().logsumexp(-1)
    peak = largest_over_shards(local, axis)
    return peak + axis.sum((local - peak).exp()).log()


def sharded_total_and_pick(logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return for each row i the log-sum-exp over all columns of all ranks, and the logit in column `columns[i]`, or
    zero if no rank owns that column; both in float32 at least. The memory of the logits is used for their gradient."""
    return _TotalAndPick.apply(logits, columns, owned, axis)  # type: ignore[no-untyped-call, no-any-return]


class _TotalAndPick(torch.autograd.Function):
    """Cross entropy in place: the logits become exp(logit - peak), and these the gradient. This is the largest tensor
    of a step, and autograd would make six of it. Half-precision logits stay as they are until they become the gradient,
    and are widened a few rows at a time: what is computed of them is in float32, but no matrix of it is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, owned: range, axis: Axis) -> tuple[Tensor, Tensor]:
        is_owned = (columns >= owned.start) & (columns < owned.stop)
        # All rows are looked up, owned or not: selecting some would make the host wait for their number.
        local = (columns - owned.start).clamp(0, max(0, len(owned) - 1))[:, None]
        scores = logits.detach()
        wide = torch.promote_types(scores.dtype, torch.float32)
        if len(owned):
            picked = scores.gather(-1, local)[:, 0].to(wide) * is_owned
            peak = scores.amax(-1).to(wide)
        else:
            picked = scores.new_zeros(len(columns), dtype=wide)
            peak = scores.new_full((len(columns),), -torch.inf, dtype=wide)
        peak = largest_over_shards(peak, axis)
        total = torch.cat([_weights(part, of_rows).sum(-1) for part, of_rows in _in_parts(scores, peak)])
        total = axis.sum(total)
        ctx.save_for_backward(scores, peak, total, is_owned, local)
        return peak + total.log(), axis.sum(picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_picked: Tensor) -> tuple[Tensor, None, None, None]:
        scores, peak, total, is_owned, local = ctx.saved_tensors
        if not scores.shape[-1]:
            return scores, None, None, None
        by_row = (grad_total / total)[:, None]
        of_targets = (grad_picked * is_owned)[:, None]
        for part, of_rows, factor, column, of_target in _in_parts(scores, peak, by_row, local, of_targets):
            weights = part if part.dtype == peak.dtype else _weights(part, of_rows)
            weights.mul_(factor).scatter_add_(-1, column, of_target)
            if weights is not part:
                part.copy_(weights)
        return scores, None, None, None


def _weights(scores: Tensor, peak: Tensor) -> Tensor:
    """Return exp(score - peak) in the precision of the peaks; scores of that precision are overwritten."""
    return scores.to(peak.dtype).sub_(peak[:, None]).exp_()


def _in_parts(scores: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield all rows at once or, of half-precision scores, some: on a CPU as many as stay in the cache of a core."""
    rows = len(scores)
    if scores.dtype.itemsize < 4:
        at_once = 2**18 if scores.device.type == "cpu" else WIDENED
        rows = at_once // max(1, scores.shape[1])
    return zip(*(x.split(max(1, rows)) for x in (scores, *by_row)), strict=True)


def sharded_best(scores: Tensor, ids: Tensor, axis: Axis) -> Tensor:
    """Return each row's id with the highest score on any rank, the lowest id of a tie: the same on every rank."""
    peak = largest_over_shards(scores.max(-1).values, axis)
    candidates = ids.masked_fill(scores < peak[..., None], torch.iinfo(ids.dtype).max).min(-1).values
    return -largest_over_shards(-candidates, axis)
