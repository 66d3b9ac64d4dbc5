"""Shortformer: a decoder whose positions can enter queries and keys only, so that a segment can be attended to again.

Without the cache and with positions added to the embeddings it is the Baevski & Auli language model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_style.config.model import ModelConfig
from megatron_style.model.block import Block
from megatron_style.model.cache import SegmentCache
from megatron_style.model.positions import SinusoidalPositions
from megatron_style.model.vocabulary import make_vocabulary
from megatron_style.parallel.randomness import Noise, replicated_dropout
from megatron_style.parallel.topology import Axis


class Shortformer(nn.Module):
    def __init__(
        self, config: ModelConfig, vocab_size: int, axis: Axis | None = None, *, recompute: bool = False
    ) -> None:
        super().__init__()
        axis = axis or Axis()
        self.config, self.vocab_size, self.recompute = config, vocab_size, recompute
        self.vocabulary = make_vocabulary(config, vocab_size, axis)
        self.positions = SinusoidalPositions(config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, axis) for _ in range(config.layers))

    def empty_cache(self, rows: int, capacity: int) -> SegmentCache:
        return SegmentCache.empty(
            layers=self.config.layers,
            rows=rows,
            hidden_size=self.config.hidden_size,
            capacity=capacity,
            like=next(self.parameters()),
        )

    def forward(
        self, ids_BT: Tensor, targets_BT: Tensor | None, cache: SegmentCache, noise: Noise | None = None
    ) -> tuple[Tensor, SegmentCache]:
        """Negative log-likelihood of each target, and the cache that the next segment of these rows needs.

        Both may be on the host, whatever the model's device. Fewer targets than tokens are those of the last tokens.
        Without targets, the likeliest next token of each row: asked for here, because ZeRO 3 has the weights together
        only inside `forward`. `noise` is where dropout masks come from; without it nothing is dropped."""
        x_BTD, cache = self.features(ids_BT, cache, noise)
        if targets_BT is None:
            return self.vocabulary.likeliest(x_BTD[:, -1]), cache
        wanted_ND = x_BTD[:, -targets_BT.shape[1] :].flatten(0, 1)
        nll_N = self.vocabulary.nll(wanted_ND, targets_BT.reshape(-1), noise and noise.at("vocabulary"))
        return nll_N.view(targets_BT.shape), cache

    def features(self, ids_BT: Tensor, cache: SegmentCache, noise: Noise | None = None) -> tuple[Tensor, SegmentCache]:
        """The last block's output [B, T, D]; there is no final norm."""
        x = self.vocabulary.embed(ids_BT) * self.config.hidden_size**0.5
        pos: Tensor | None = None
        if self.config.positions == "infused":
            pos = self.positions(cache.length + ids_BT.shape[1]).to(x.dtype)  # a bf16 engine keeps buffers in float32
        else:
            x = x + self.positions(ids_BT.shape[1]).to(x.dtype)
        x = replicated_dropout(x, self.config.dropout.hidden, noise and noise.at("embedding"))
        seen = []
        for i, (block, cached) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            x, attention_input = self._run(block, x, cached, pos, noise and noise.at(i))
            seen.append(attention_input)
        return x, cache.advance(seen)

    def _run(
        self, block: nn.Module, x: Tensor, cached: Tensor, pos: Tensor | None, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, x, cached, pos, noise, use_reentrant=False)  # type: ignore[no-any-return]
        return block(x, cached, pos, noise)  # type: ignore[no-any-return]
