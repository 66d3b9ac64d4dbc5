"""Shortformer: a decoder whose positions can enter queries and keys only, so that a later segment can attend to it.

Without a memory, and with positions added to the embeddings, it is the language model of Baevski & Auli.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_style.config.model import ModelConfig
from megatron_style.model.attention import ATTENTIONS
from megatron_style.model.block import Block
from megatron_style.model.memory import Memory
from megatron_style.model.positions import SinusoidalPositions
from megatron_style.model.vocabulary import make_vocabulary
from megatron_style.parallel.randomness import Noise, replicated_dropout
from megatron_style.parallel.topology import Axis


class Output(NamedTuple):
    """The result of a forward pass."""

    nll: Tensor  # negative log-likelihood of each target, shaped like the targets
    memory: Memory  # for the next segment of these rows
    auxiliary: Mapping[str, Tensor]  # further losses by name, each a scalar; training adds them up
    likeliest: Tensor | None  # next token of each row, if asked for


class Shortformer(nn.Module):
    def __init__(
        self, config: ModelConfig, vocab_size: int, axis: Axis | None = None, *, recompute: bool = False
    ) -> None:
        super().__init__()
        axis = axis or Axis()
        self.config = config
        self.vocab_size = vocab_size
        self.recompute = recompute
        self.vocabulary = make_vocabulary(config, vocab_size, axis)
        self.positions = SinusoidalPositions(config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, axis) for _ in range(config.layers))

    def empty_memory(self, rows: int, capacity: int) -> Memory:
        return Memory.empty(self.config, rows=rows, capacity=capacity, like=next(self.parameters()))

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        memory: Memory,
        noise: Noise | None = None,
        *,
        likeliest: bool = False,
    ) -> Output:
        """Score the targets: those of all tokens, of the last tokens only, or none.

        Ids and targets may be on the host, whatever the model's device. `noise` is the source of dropout masks; without
        it nothing is dropped. `likeliest` also asks for the next token of each row: here and not in a method of its
        own, because ZeRO 3 gathers the weights only inside `forward`."""
        x_BTD, memory = self.features(ids_BT, memory, noise)
        wanted_ND = x_BTD[:, x_BTD.shape[1] - targets_BT.shape[1] :].flatten(0, 1)
        nll_N = self.vocabulary.nll(wanted_ND, targets_BT.reshape(-1), noise and noise.at("vocabulary"))
        following = self.vocabulary.likeliest(x_BTD[:, -1]) if likeliest else None
        return Output(nll_N.view(targets_BT.shape), memory, auxiliary={}, likeliest=following)

    def features(self, ids_BT: Tensor, memory: Memory, noise: Noise | None = None) -> tuple[Tensor, Memory]:
        """Return the last block's output [B, T, D]; there is no final norm."""
        x, pos = self.enter(ids_BT, memory.length)
        x = replicated_dropout(x, self.config.dropout.hidden, noise and noise.at("embedding"))
        seen = []
        for i, (block, cached) in enumerate(zip(self.blocks, memory.layers, strict=True)):
            x, attention_input = self._run(block, x, cached, pos, noise and noise.at(i))
            seen.append(attention_input)
        return x, memory.advance(seen)

    def enter(self, ids_BT: Tensor, remembered: int) -> tuple[Tensor, Tensor | None]:
        """Return the input of the first block after `remembered` tokens, and the positions passed to every block."""
        return ATTENTIONS[self.config.positions].enter(self.embed(ids_BT), self.positions, remembered)

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the token vectors, without positions."""
        scale: float = self.config.hidden_size**0.5
        return self.vocabulary.embed(ids_BT) * scale

    def _run(
        self, block: nn.Module, x: Tensor, cached: Tensor, pos: Tensor | None, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, x, cached, pos, noise, use_reentrant=False)  # type: ignore[no-any-return]
        return block(x, cached, pos, noise)  # type: ignore[no-any-return]
