"""Linear and embedding layers whose weights are split over the tensor axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.parallel.collectives import copy_to_shards, reduce_from_shards
from megatron_style.parallel.sharding import Draw, Layout, layout_of, parameter, tag
from megatron_style.parallel.topology import Axis


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the output features split: each rank computes its own columns of y.

    Its input has been through `copy_to_shards`, once for all layers that read it: one all-reduce on the way back."""

    def __init__(self, in_features: int, out_features: int, *, axis: Axis, weight: Draw, bias: Draw) -> None:
        super().__init__()
        self.weight = parameter(Layout((out_features, in_features), 0, draw=weight), axis)
        self.bias = parameter(Layout((out_features,), 0, draw=bias), axis)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Of each input, if there are several: ZeRO 3 brings the weight together for one call."""
        outputs = tuple(F.linear(x, self.weight, self.bias) for x in inputs)
        return outputs if len(outputs) > 1 else outputs[0]


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the input features split: partial sums are reduced, then the bias is added once."""

    def __init__(self, in_features: int, out_features: int, *, axis: Axis, weight: Draw, bias: Draw) -> None:
        super().__init__()
        self.axis = axis
        self.weight = parameter(Layout((out_features, in_features), 1, draw=weight), axis)
        self.bias = parameter(Layout((out_features,), draw=bias), axis)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        return reduce_from_shards(F.linear(x, self.weight), self.axis) + self.bias


class ReplicatedLayerNorm(nn.LayerNorm):
    """Every rank of the tensor axis holds it whole."""

    def __init__(self, size: int, *, axis: Axis) -> None:
        super().__init__(size)
        for param in self.parameters():
            tag(param, Layout((size,)), axis)


class VocabParallelTable(nn.Module):
    """Token vectors split by token id. Read it for embeddings, multiply by it for logits."""

    def __init__(self, tokens: int, width: int, *, axis: Axis, weight: Draw) -> None:
        super().__init__()
        self.axis, self.tokens = axis, tokens
        self.weight = parameter(Layout((tokens, width), 0, is_table=True, draw=weight), axis)

    def owned_rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ids (counted from this table's first) this rank holds, and their vectors. Ids on the host are
        searched there: on the device, the host would have to wait for their number."""
        mine = layout_of(self.weight).owned(self.axis)
        (index,) = torch.where((ids >= mine.start) & (ids < mine.stop))
        index, rows = (x.to(self.weight.device, non_blocking=True) for x in (index, ids[index] - mine.start))
        return index, F.embedding(rows, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        """This rank's columns [..., tokens / tp]; rows that only pad the shard are left out."""
        mine = layout_of(self.weight).owned(self.axis)
        return F.linear(copy_to_shards(x, self.axis), self.weight[: len(mine)])
