"""Self-attention over a segment and the memory before it, in the kinds that a model's `positions` names.

Shape letters: B rows, T segment tokens, C remembered tokens, S both, D hidden, H local heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from megatron_style.config.model import ModelConfig, Positions
from megatron_style.model.kernels import attend
from megatron_style.model.positions import SinusoidalPositions
from megatron_style.parallel.collectives import copy_to_shards
from megatron_style.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import uniform, xavier, zeros
from megatron_style.parallel.topology import Axis


class Attention(nn.Module):
    """Attention for positions that are added to the token vectors: the layer itself does not see them."""

    can_decode: ClassVar[bool] = False  # an added position cannot be removed from a cached token when the token moves

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_size = D // config.heads
        self.axis = axis
        self.dropout = config.dropout.attention
        inward = {"axis": axis, "weight": xavier(D, D, gain=2**-0.5), "bias": uniform(D**-0.5)}
        self.query = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.key = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.value = ColumnParallelLinear(D, D, **inward)  # type: ignore[arg-type]
        self.out = RowParallelLinear(D, D, axis=axis, weight=xavier(D, D), bias=zeros)

    @staticmethod
    def enter(x_BTD: Tensor, positions: SinusoidalPositions, remembered: int) -> tuple[Tensor, Tensor | None]:
        """Return the input of the first block, and the positions that are passed to every block."""
        del remembered
        return x_BTD + positions(x_BTD.shape[1]).to(x_BTD.dtype), None

    def forward(self, x_BTD: Tensor, cached_BCD: Tensor, pos_SD: Tensor | None, noise: Noise | None) -> Tensor:
        x_BTD = copy_to_shards(x_BTD, self.axis)
        placed_BTD, placed_BCD = self.placed(x_BTD, cached_BCD, pos_SD)
        queries = self._heads(self.query(placed_BTD))
        # The memory is projected apart from the segment: no gradient has to flow back to it.
        keys, cached_keys = map(self._heads, self.key(placed_BTD, placed_BCD))
        values, cached_values = map(self._heads, self.value(x_BTD, cached_BCD))
        dropout = self.dropout if noise is not None else 0.0
        mixed_BHTE = attend(queries, (cached_keys, cached_values), (keys, values), dropout=dropout)
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out

    def placed(self, x_BTD: Tensor, cached_BCD: Tensor, pos_SD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the segment and the memory with the positions that queries and keys see."""
        assert pos_SD is None, "positions have been added already"
        return x_BTD, cached_BCD

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], x.shape[2] // self.head_size, self.head_size).transpose(1, 2)


class InfusedAttention(Attention):
    """Position-infused attention: every block adds positions to queries and keys, never to values, so that remembered
    tokens can be attended to at other positions."""

    can_decode = True

    @staticmethod
    def enter(x_BTD: Tensor, positions: SinusoidalPositions, remembered: int) -> tuple[Tensor, Tensor | None]:
        # A bf16 engine keeps buffers in float32.
        return x_BTD, positions(remembered + x_BTD.shape[1]).to(x_BTD.dtype)

    def placed(self, x_BTD: Tensor, cached_BCD: Tensor, pos_SD: Tensor | None) -> tuple[Tensor, Tensor]:
        assert pos_SD is not None, "there are no positions to infuse"
        C = cached_BCD.shape[1]
        return x_BTD + pos_SD[C:], cached_BCD + pos_SD[:C]


ATTENTIONS: Mapping[Positions, type[Attention]] = {"added": Attention, "infused": InfusedAttention}
