"""One pre-norm transformer block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.attention import ATTENTIONS
from megatron_style.parallel.collectives import copy_to_shards
from megatron_style.parallel.layers import ColumnParallelLinear, ReplicatedLayerNorm, RowParallelLinear
from megatron_style.parallel.randomness import Noise, replicated_dropout, sharded_dropout
from megatron_style.parallel.sharding import uniform
from megatron_style.parallel.topology import Axis


class Block(nn.Module):
    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        D = config.hidden_size
        ffn = config.ffn_size
        self.axis = axis
        self.rates = config.dropout
        self.attention_norm = ReplicatedLayerNorm(D, axis=axis)
        self.attention = ATTENTIONS[config.positions](config, axis)
        self.ffn_norm = ReplicatedLayerNorm(D, axis=axis)
        self.up = ColumnParallelLinear(D, ffn, axis=axis, weight=uniform(D**-0.5), bias=uniform(D**-0.5))
        self.down = RowParallelLinear(ffn, D, axis=axis, weight=uniform(ffn**-0.5), bias=uniform(ffn**-0.5))

    def forward(self, x: Tensor, cached: Tensor, pos: Tensor | None, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """Return the block's output, and its attention input, which becomes the next segment's memory."""
        seen = self.attention_norm(x)
        mixed = self.attention(seen, cached, pos, noise)
        x = x + replicated_dropout(mixed, self.rates.hidden, noise and noise.at("attention"))
        inner = sharded_dropout(
            F.relu(self.up(copy_to_shards(self.ffn_norm(x), self.axis))), self.rates.activation, noise
        )
        x = x + replicated_dropout(self.down(inner), self.rates.hidden, noise and noise.at("ffn"))
        return x, seen
