"""Differentiable collectives for tensor parallelism, as plain functions, and collectives for JSON values.

function            forward         backward         Megatron's name
copy_to_shards      identity        all-reduce       f
reduce_from_shards  all-reduce      identity         g
gather_positions    all-gather      reduce-scatter   g of sequence parallelism
scatter_positions   reduce-scatter  all-gather       its conjugate
join_positions      all-gather      own share
sum_gradients       identity        all-reduce       of several tensors at once
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_style.parallel.topology import Axis

_POSITIONS = 1  # the dim of positions in [rows, positions, features]


_Operation = Callable[[Tensor, Axis], Tensor]


def _same(x: Tensor, _: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return axis.sum(x.contiguous())


def _gather(x: Tensor, axis: Axis) -> Tensor:
    return axis.gather_along(_POSITIONS, x)


def _sum_share(x: Tensor, axis: Axis) -> Tensor:
    return axis.sum_share(_POSITIONS, x)


def _share(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size, _POSITIONS)[axis.rank]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forth: _Operation, back: _Operation) -> Tensor:
        ctx.axis = axis
        ctx.back = back
        return forth(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.axis), None, None, None


def _applied(x: Tensor, axis: Axis, forth: _Operation, back: _Operation) -> Tensor:
    """Apply one operation in the forward pass, and its counterpart to the gradient."""
    return x if axis.size == 1 else _Collective.apply(x, axis, forth, back)  # type: ignore[no-untyped-call]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.axis.sum(torch.cat([grad.flatten() for grad in grads]))
        parts = total.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True))


def copy_to_shards(x: Tensor, axis: Axis) -> Tensor:
    """Pass replicated `x` into a computation that is split over the axis."""
    return _applied(x, axis, _same, _sum)


def reduce_from_shards(x: Tensor, axis: Axis) -> Tensor:
    """Add up the partial sums of such a computation; the result is the same on all ranks."""
    return _applied(x, axis, _sum, _same)


def gather_positions(x: Tensor, axis: Axis) -> Tensor:
    """Pass `x`, split by position, into a computation that is split over the axis in another way."""
    return _applied(x, axis, _gather, _sum_share)


def scatter_positions(x: Tensor, axis: Axis) -> Tensor:
    """Add up the partial sums of such a computation; each rank gets the result of its own positions."""
    return _applied(x, axis, _sum_share, _gather)


def join_positions(x: Tensor, axis: Axis) -> Tensor:
    """Pass `x`, split by position, into a computation that all ranks do alike."""
    return _applied(x, axis, _gather, _share)


def sum_gradients(tensors: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, ...]:
    """Use replicated tensors in a computation of which each rank does a part, such as its own positions."""
    return tensors if axis.size == 1 else _SumGradients.apply(axis, *tensors)  # type: ignore[no-untyped-call]


def own_features(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's share of the features of a replicated tensor, without the memory of the others."""
    return x if axis.size == 1 else x.chunk(axis.size, dim=-1)[axis.rank].contiguous()


def gather_features(x: Tensor, axis: Axis) -> Tensor:
    """Return all features of a tensor of which each rank has its share, without gradient."""
    return axis.gather_along(x.dim() - 1, x.detach())


def largest_over_shards(x: Tensor, axis: Axis) -> Tensor:
    """Return the element-wise maximum over the ranks, without gradient."""
    largest = x.detach().clone()
    if axis.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    return largest


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order. torch's object collectives would unpickle whatever arrives. A
    `group` is another one of all ranks, for a thread that must not disturb the main one's collectives."""
    own = _bytes_of(value, group)
    lengths = [torch.zeros_like(_length_of(own)) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, _length_of(own), group=group)
    sizes = [int(length) for length in lengths]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [_value_of(data[:size]) for data, size in zip(gathered, sizes, strict=True)]


def broadcast_json(value: Any) -> Any:
    """Return rank 0's value on every rank; the values of the other ranks are ignored."""
    own = _bytes_of(value)
    length = _length_of(own)
    dist.broadcast(length, src=0)
    data = own if dist.get_rank() == 0 else own.new_empty(int(length))
    dist.broadcast(data, src=0)
    return _value_of(data)


def _bytes_of(value: Any, group: dist.ProcessGroup | None = None) -> Tensor:
    """Encode the value. What would not arrive as it was sent, such as a tuple, a numeric key or NaN, is refused."""
    text = json.dumps(value, allow_nan=False)
    if json.loads(text) != value:
        raise TypeError(f"{value!r:.200}: does not survive JSON; send lists, and dictionaries with strings as keys")
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(_device(group))


def _value_of(data: Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def _length_of(data: Tensor) -> Tensor:
    return torch.tensor([len(data)], dtype=torch.int64, device=data.device)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the backend expects tensors: NCCL the rank's current device, gloo the host."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if dist.get_backend(group) == "gloo" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
