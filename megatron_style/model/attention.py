"""Self-attention over a segment and the cache before it.

Shape letters: B rows, T segment tokens, S cached + segment tokens, D hidden, H local heads, E head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
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
        T, S = x_BTD.shape[1], cached_BCD.shape[1] + x_BTD.shape[1]
        seen_BSD = x_BTD if S == T else torch.cat([cached_BCD, x_BTD], dim=1)
        q_in, k_in = (x_BTD, seen_BSD) if pos_SD is None else (x_BTD + pos_SD[S - T :], seen_BSD + pos_SD)
        mixed_BHTE = F.scaled_dot_product_attention(
            self._heads(self.query(q_in)),
            self._heads(self.key(k_in)),
            self._heads(self.value(seen_BSD)),
            attn_mask=None if S == T else causal_mask(T, S, x_BTD.device),
            is_causal=S == T,  # aligned to the top left, so it is wrong as soon as there is a cache
            dropout_p=self.dropout if noise is not None else 0.0,
        )
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """All cached tokens are visible; inside the segment each token sees itself and those before it."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
