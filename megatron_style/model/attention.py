"""Self-attention over a segment and the cache before it.

Shape letters: B rows, T segment tokens, C cached tokens, S both, D hidden, H local heads, E head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.kernels import attend, attend_with_cache
from megatron_style.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import uniform, xavier, zeros
from megatron_style.parallel.topology import Axis


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_size = D // config.heads
        self.dropout = config.dropout.attention
        inward = {"axis": axis, "weight": xavier(D, D, gain=2**-0.5), "bias": uniform(D**-0.5)}
        self.query = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.key = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.value = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.out = RowParallelLinear(D, D, axis=axis, weight=xavier(D, D), bias=zeros)

    def forward(self, x_BTD: Tensor, cached_BCD: Tensor, pos_SD: Tensor | None, noise: Noise | None) -> Tensor:
        """With `pos_SD` positions are infused: into queries and keys, never into values, or the cache could not be
        reused at other positions."""
        C = cached_BCD.shape[1]
        placed_BTD = x_BTD if pos_SD is None else x_BTD + pos_SD[C:]
        queries, inside = self._heads(self.query(placed_BTD)), self._keys_and_values(placed_BTD, x_BTD)
        dropout = self.dropout if noise is not None else 0.0
        if C == 0:
            mixed_BHTE = attend(queries, *inside, dropout)
        else:  # projected apart from the segment: no gradient has to find its way back to the cache
            placed_BCD = cached_BCD if pos_SD is None else cached_BCD + pos_SD[:C]
            mixed_BHTE = attend_with_cache(queries, self._keys_and_values(placed_BCD, cached_BCD), inside, dropout)
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out

    def _keys_and_values(self, placed: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return self._heads(self.key(placed)), self._heads(self.value(seen))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)
