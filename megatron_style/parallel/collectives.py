"""The differentiable collectives of tensor parallelism, as plain functions.

function            forward      backward      Megatron's name
copy_to_shards      identity     all-reduce    f
reduce_from_shards  all-reduce   identity      g
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_style.parallel.topology import Axis


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(grad.contiguous()), None


class _ReduceFromShards(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x.contiguous())

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to_shards(x: Tensor, axis: Axis) -> Tensor:
    """Replicated `x` enters a computation that is split over the axis."""
    return x if axis.size == 1 else _CopyToShards.apply(x, axis)  # type: ignore[no-untyped-call]


def reduce_from_shards(x: Tensor, axis: Axis) -> Tensor:
    """Partial sums leave it; the result is the same on all ranks."""
    return x if axis.size == 1 else _ReduceFromShards.apply(x, axis)  # type: ignore[no-untyped-call]


def largest_over_shards(x: Tensor, axis: Axis) -> Tensor:
    """Element-wise maximum over the ranks, without gradient."""
    largest = x.detach().clone()
    if axis.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    return largest
