"""Linear and embedding layers whose weights are split over the tensor axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.parallel.collectives import copy_to_shards, gather_features
from megatron_style.parallel.device.products import gradient_of_input, gradient_of_weight, in_blocks, linear
from megatron_style.parallel.sharding import Draw, Layout, layout_of, parameter, tag, zeros
from megatron_style.parallel.stream import Read, Stream
from megatron_style.parallel.topology import Axis


class _FrozenLinear(torch.autograd.Function):
    """A linear layer whose weight and bias get no gradient. It keeps the layer, not the weight: a detached weight would
    hold what ZeRO 3 has gathered until the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ColumnParallelLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gradient_of_input(grad, ctx.layer.weight), None


class _RecalledLinear(torch.autograd.Function):
    """A linear layer that keeps neither its input, which is gathered again in the backward pass, nor its weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnParallelLinear, read: Read
    ) -> Tensor:
        ctx.layer = layer
        ctx.again = read.again
        ctx.added = read.added
        ctx.again.will_read()
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gathered = ctx.again.read()
        x = gathered if ctx.added is None else gathered + ctx.added
        grad_x = gradient_of_input(grad, ctx.layer.weight) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, gradient_of_weight(grad, x), grad_bias, None, None


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features split: each rank computes its own columns of y.

    The caller passes its input through `Stream.enter`, once for all layers that read it, so that the backward pass has
    one reduction."""

    def __init__(self, in_features: int, out_features: int, *, axis: Axis, weight: Draw, bias: Draw | None) -> None:
        super().__init__()
        self.weight = parameter(Layout((out_features, in_features), 0, draw=weight), axis)
        self.bias = parameter(Layout((out_features,), 0, draw=bias), axis) if bias else None

    def forward(self, *inputs: Tensor | Read, frozen: int = 0) -> Tensor | tuple[Tensor, ...]:
        """Apply the layer to each input; the last `frozen` ones give its weight and bias no gradient. One call serves
        several inputs, so that ZeRO 3 gathers the weight once."""
        learning = len(inputs) - frozen
        outputs = tuple(self._learning(x if isinstance(x, Read) else Read(x)) for x in inputs[:learning])
        outputs += tuple(_FrozenLinear.apply(x, self) for x in inputs[learning:])  # type: ignore[no-untyped-call]
        return outputs if len(outputs) > 1 else outputs[0]

    def _learning(self, read: Read) -> Tensor:
        if read.again is None:
            return linear(read.now, self.weight, self.bias)
        return _RecalledLinear.apply(read.now, self.weight, self.bias, self, read)  # type: ignore[no-untyped-call, no-any-return]


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features split: partial sums are reduced, then the bias is added once."""

    def __init__(self, in_features: int, out_features: int, *, axis: Axis, weight: Draw, bias: Draw | None) -> None:
        super().__init__()
        self.axis = axis
        self.weight = parameter(Layout((out_features, in_features), 1, draw=weight), axis)
        self.bias = parameter(Layout((out_features,), draw=bias), axis) if bias else None

    def forward(self, x: Tensor, stream: Stream | None = None, partial: Tensor | None = None) -> Tensor:
        """Apply the layer. The sum of a `PartialSumLinear` is reduced with its own. Without a stream, all ranks get the
        result of all positions."""
        if self.axis.size == 1:
            total = linear(x, self.weight, self.bias)
            return total if partial is None else total + partial
        stream = stream or Stream(self.axis)
        own = linear(x, self.weight)
        total = stream.leave(own if partial is None else own + partial)
        return total if self.bias is None else total + stream.use(self.bias)[0]


class PartialSumLinear(nn.Module):
    """y = x W^T with the input features split, as partial sums that a `RowParallelLinear` reduces with its own."""

    def __init__(self, in_features: int, out_features: int, *, axis: Axis, weight: Draw) -> None:
        super().__init__()
        self.weight = parameter(Layout((out_features, in_features), 1, draw=weight), axis)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class ReplicatedLayerNorm(nn.LayerNorm):
    """A layer norm of which every rank of the tensor axis holds a full copy."""

    def __init__(self, size: int, *, axis: Axis) -> None:
        super().__init__(size)
        for param in self.parameters():
            tag(param, Layout((size,)), axis)

    def forward(self, x: Tensor, stream: Stream | None = None) -> Tensor:
        weight, bias = (self.weight, self.bias) if stream is None else stream.use(self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class VocabParallelTable(nn.Module):
    """Token vectors split by token id: rows are looked up for embeddings, and multiplied by for logits, which may have
    a bias each."""

    def __init__(self, tokens: int, width: int, *, axis: Axis, weight: Draw, biases: bool = False) -> None:
        super().__init__()
        self.axis = axis
        self.tokens = tokens
        self.weight = parameter(Layout((tokens, width), 0, is_table=True, draw=weight), axis)
        self.bias = parameter(Layout((tokens,), 0, draw=zeros), axis) if biases else None

    def owned_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of those ids (relative to this table's first) that this rank holds, and their vectors,
        perhaps followed by others (`in_blocks`). Ids on the host are searched there: a search on the device would make
        the host wait for the count."""
        owned = layout_of(self.weight).owned(self.axis)
        (index,) = torch.where((ids >= owned.start) & (ids < owned.stop))
        found = in_blocks(ids[index] - owned.start, self.weight)
        rows = found.to(self.weight.device, non_blocking=True)
        return index.to(self.weight.device, non_blocking=True), F.embedding(rows, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's columns [..., tokens / tp]; rows that only pad the shard are left out."""
        owned = layout_of(self.weight).owned(self.axis)
        bias = None if self.bias is None else self.bias[: len(owned)]
        return linear(copy_to_shards(x, self.axis), self.weight[: len(owned)], bias)

    def all_logits(self, x: Tensor) -> Tensor:
        """Return the columns of all ranks [..., tokens], the same on each rank. They are gathered without gradient."""
        own = self.logits(x)
        if self.axis.size == 1:
            return own
        missing = self.weight.shape[0] - own.shape[-1]
        return gather_features(F.pad(own, (0, missing)), self.axis)[..., : self.tokens]
