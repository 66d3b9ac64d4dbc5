"""Self-attention over a segment and the cache before it.

Shape letters: B rows, T segment tokens, C cached tokens, S both, D hidden, H local heads, E head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.kernels import attend
from megatron_style.parallel.collectives import copy_to_shards
from megatron_style.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import uniform, xavier, zeros
from megatron_style.parallel.topology import Axis


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_size = D // config.heads
        self.axis, self.dropout = axis, config.dropout.attention
        inward = {"axis": axis, "weight": xavier(D, D, gain=2**-0.5), "bias": uniform(D**-0.5)}
        self.query = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.key = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.value = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.out = RowParallelLinear(D, D, axis=axis, weight=xavier(D, D), bias=zeros)

    def forward(self, x_BTD: Tensor, cached_BCD: Tensor, pos_SD: Tensor | None, noise: Noise | None) -> Tensor:
        """With `pos_SD` positions are infused: into queries and keys, never into values, or the cache could not be
        reused at other positions."""
        C, x_BTD = cached_BCD.shape[1], copy_to_shards(x_BTD, self.axis)
        placed_BTD, placed_BCD = x_BTD, cached_BCD
        if pos_SD is not None:
            placed_BTD, placed_BCD = x_BTD + pos_SD[C:], cached_BCD + pos_SD[:C]
        queries = self._heads(self.query(placed_BTD))
        # The cache goes apart from the segment: no gradient has to find its way back to it.
        keys, cached_keys = map(self._heads, self.key(placed_BTD, placed_BCD))
        values, cached_values = map(self._heads, self.value(x_BTD, cached_BCD))
        dropout = self.dropout if noise is not None else 0.0
        mixed_BHTE = attend(queries, (cached_keys, cached_values), (keys, values), dropout=dropout)
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], x.shape[2] // self.head_size, self.head_size).transpose(1, 2)
