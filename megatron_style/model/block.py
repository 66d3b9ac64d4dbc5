"""One transformer block: an attention and a feed-forward sublayer, between which those of other blocks may come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.attention import Places, Side, attention_of
from megatron_style.model.compression import compression_of
from megatron_style.model.memory import Compress, Recalled, Seen
from megatron_style.model.routing import routing_attention
from megatron_style.parallel.collectives import own_features
from megatron_style.parallel.dropout import sharded_relu
from megatron_style.parallel.layers import ColumnParallelLinear, ReplicatedLayerNorm, RowParallelLinear
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import uniform
from megatron_style.parallel.stream import Stream
from megatron_style.parallel.topology import Axis

Recall = Callable[[Tensor, Compress | None, Stream], Recalled]  # of a memory, for one layer


class Attended(NamedTuple):
    """The result of an attention sublayer."""

    x: Tensor  # its output
    seen: Seen  # for the next segment's memory
    auxiliary: Mapping[str, Tensor]  # further losses by name
    side: Side | None  # of a routing layer


class Block(nn.Module):
    ATTENTION = ("attention_norm", "attention", "compression")  # the modules of each sublayer
    FEED_FORWARD = ("ffn_norm", "up", "down")

    def __init__(self, config: ModelConfig, axis: Axis, layer: int) -> None:
        super().__init__()
        D = config.hidden_size
        ffn = config.ffn_size
        self.axis = axis
        self.rates = config.dropout
        self.norm_before = config.norm == "before"
        self.attention_norm = ReplicatedLayerNorm(D, axis=axis)
        kind = routing_attention(config, layer) if config.routing else attention_of(config)
        self.attention = kind(config, axis)
        self.compression = compression_of(config, axis)
        self._loss_weight = 1.0 if config.memory is None else config.memory.loss_weight
        self.ffn_norm = ReplicatedLayerNorm(D, axis=axis)
        self.up = ColumnParallelLinear(D, ffn, axis=axis, weight=uniform(D**-0.5), bias=uniform(D**-0.5))
        self.down = RowParallelLinear(ffn, D, axis=axis, weight=uniform(ffn**-0.5), bias=uniform(ffn**-0.5))

    def attend(self, x: Tensor, recall: Recall, pos: Places, noise: Noise | None, stream: Stream) -> Attended:
        """Do the attention sublayer. Its attention input becomes the next segment's memory, of which each
        tensor-parallel rank keeps its own features."""
        normed = self.attention_norm(x, stream) if self.norm_before else x
        tokens = stream.enter(normed)
        cached, replaced = recall(tokens.now, self.compression, stream)
        mixed = self.attention(tokens, cached, pos, noise, stream, replaced)
        x = stream.add(x, mixed.x, self.rates.hidden, noise and noise.at("attention"))
        compressed = None if replaced is None else own_features(replaced[1], self.axis)
        seen = Seen(own_features(tokens.now, self.axis), compressed)
        auxiliary = {} if mixed.loss is None else {"compression": self._loss_weight * mixed.loss}
        return Attended(x if self.norm_before else self.attention_norm(x, stream), seen, auxiliary, mixed.side)

    def feed(self, x: Tensor, noise: Noise | None, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the sublayer's output, and its feed-forward input, which is the key of a kNN-LM datastore."""
        fed = self.ffn_norm(x, stream) if self.norm_before else x
        inner = sharded_relu(self.up(stream.enter(fed)), self.rates.activation, noise)
        x = stream.add(x, self.down(inner, stream), self.rates.hidden, noise and noise.at("ffn"))
        return x if self.norm_before else self.ffn_norm(x, stream), fed
