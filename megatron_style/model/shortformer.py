"""Shortformer: a decoder whose positions can enter queries and keys only, so that a later segment can attend to it.

Without a memory, and with positions added to the embeddings, it is the language model of Baevski & Auli.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_style.config.model import ModelConfig
from megatron_style.model.attention import Distances, Places, Side, attention_of, separate
from megatron_style.model.block import Block
from megatron_style.model.documents import hidden_by_age
from megatron_style.model.memory import UNLIMITED, Memory, Reach, Seen, memory_of
from megatron_style.model.routing import CLUSTER_LOSS, RoutedAttention
from megatron_style.model.shape import Unit, units
from megatron_style.model.vocabulary import make_vocabulary
from megatron_style.parallel.collectives import reduce_from_shards
from megatron_style.parallel.dropout import replicated_dropout
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.stream import Stream
from megatron_style.parallel.topology import Axis


class Output(NamedTuple):
    """The result of a forward pass."""

    nll: Tensor  # negative log-likelihood of each target, shaped like the targets
    memory: Memory  # for the next segment of these rows
    auxiliary: Mapping[str, Tensor]  # further losses by name, each a scalar; training adds them up
    likeliest: Tensor | None  # next token of each row, if asked for
    key: Tensor | None  # of each token in a kNN-LM datastore, if asked for
    tally: Tensor | None  # of a routing model, for `move_centroids`: [routing layers, heads, clusters, head size + 1]


class Features(NamedTuple):
    """The result of all blocks."""

    x: Tensor  # output of the last block, [B, T, D]; there is no final norm
    memory: Memory  # for the next segment of these rows
    key: Tensor  # input of the last feed-forward sublayer, after its norm: the key of a kNN-LM datastore
    auxiliary: Mapping[str, Tensor]  # further losses by name
    tally: Tensor | None  # of a routing model, for `move_centroids`: [routing layers, heads, clusters, head size + 1]


class _Ran(NamedTuple):
    """The result of a unit."""

    x: Tensor
    seen: Seen | None  # by its attention sublayer, if it has one
    auxiliary: Mapping[str, Tensor]  # further losses of that sublayer
    fed: Tensor | None  # the input of its feed-forward sublayer, if it has one
    side: Side | None  # of a routing layer


class Shortformer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        axis: Axis | None = None,
        *,
        recompute: bool = False,
        sequence: bool = False,
    ) -> None:
        """Build the shards of one rank of the tensor axis, without weights. With `sequence`, the vectors between layers
        are split over that axis by position."""
        super().__init__()
        axis = axis or Axis()
        self.config = config
        self.vocab_size = vocab_size
        self.recompute = recompute
        self.sequence = sequence
        self.vocabulary = make_vocabulary(config, vocab_size, axis)
        self.axis = axis
        self.positions = attention_of(config).positions(config.hidden_size)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(config, axis, i) for i in range(config.layers)))

    def empty_memory(self, rows: int, capacity: int, reach: Reach = UNLIMITED) -> Memory:
        kind = memory_of(self.config)
        like = next(self.parameters())
        empty = kind.empty(self.config, rows=rows, capacity=capacity, like=like, ways=self.axis.size)
        return replace(empty, reach=reach)

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        memory: Memory,
        noise: Noise | None = None,
        ages_BT: Tensor | None = None,
        *,
        likeliest: bool = False,
        key: bool = False,
    ) -> Output:
        """Score the targets: those of all tokens, of the last tokens only, or none.

        Ids and targets may be on the host, whatever the model's device. `noise` is the source of dropout masks; without
        it nothing is dropped. `ages` are those of the tokens in their documents, for a model with a `document_end`.
        `likeliest` also asks for the next token of each row, `key` for the keys: here and not in
        methods of their own, because ZeRO 3 gathers the weights only inside `forward`."""
        stream = self._stream(ids_BT.shape[1])
        x_BTD, memory, key_BTD, auxiliary, tally = self._blocks(ids_BT, memory, noise, stream, ages_BT)
        x_BTD = stream.join(x_BTD)
        wanted_ND = x_BTD[:, x_BTD.shape[1] - targets_BT.shape[1] :].flatten(0, 1)
        nll_N = self.vocabulary.nll(wanted_ND, targets_BT.reshape(-1), noise and noise.at("vocabulary"))
        following = self.vocabulary.likeliest(x_BTD[:, -1]) if likeliest else None
        nll_BT = nll_N.view(targets_BT.shape)
        keys = stream.join(key_BTD) if key else None
        return Output(nll_BT, memory, auxiliary, likeliest=following, key=keys, tally=tally)

    def move_centroids(self, tally: Tensor) -> None:
        """Move the centroids of a routing model by the tallies of an update, summed over its micro-batches and ranks.
        Nothing else changes a centroid."""
        routed = [block.attention.routed for block in self.blocks if isinstance(block.attention, RoutedAttention)]
        for heads, of_layer in zip(routed, tally, strict=True):
            heads.move(of_layer)

    def _cluster_loss(self, sides: Sequence[Side]) -> dict[str, Tensor]:
        if not sides:
            return {}
        return {CLUSTER_LOSS: reduce_from_shards(torch.stack([side.loss for side in sides]).sum(), self.axis)}

    def features(self, ids_BT: Tensor, memory: Memory, ages_BT: Tensor | None = None) -> Features:
        """Return what the blocks make of a text; nothing is dropped."""
        stream = self._stream(ids_BT.shape[1])
        found = self._blocks(ids_BT, memory, None, stream, ages_BT)
        return found._replace(x=stream.join(found.x), key=stream.join(found.key))

    def _stream(self, length: int) -> Stream:
        """Return how the vectors of a segment are spread over the tensor axis. Those of a segment whose length does not
        divide, such as the last one of a text, are replicated, which gives the same."""
        can_split = self.axis.size > 1 and length % self.axis.size == 0
        return Stream(self.axis, is_split=self.sequence and can_split, recalls=not self.recompute)

    def _blocks(
        self, ids_BT: Tensor, memory: Memory, noise: Noise | None, stream: Stream, ages_BT: Tensor | None
    ) -> Features:
        """Return what the blocks make of a text, spread over the tensor axis as `stream` says."""
        x, pos = self.enter(ids_BT, memory.length, memory.reach, stream)
        assert (ages_BT is None) == (self.config.document_end is None), "ages are for models that separate documents"
        if ages_BT is not None:
            pos = separate(pos, hidden_by_age(ages_BT.to(x.device), memory.length))
        x = stream.dropout(x, self.config.dropout.hidden, noise and noise.at("embedding"))
        if isinstance(pos, Distances):
            table = replicated_dropout(pos.table_SD, self.config.dropout.hidden, noise and noise.at("distances"))
            pos = pos._replace(table_SD=table)
        all_seen = []
        losses = []
        sides = []
        for unit in units(self.config):
            x, seen, auxiliary, fed, side = self._run(unit, x, memory, pos, noise, stream)
            losses.append(auxiliary)
            if seen is not None:
                all_seen.append(seen)
            if side is not None:
                sides.append(side)
        assert fed is not None, "the last sublayer is a feed-forward one"
        auxiliary = _means(losses) | self._cluster_loss(sides)
        tally = torch.stack([side.tally for side in sides]) if sides else None
        return Features(x, memory.advance(all_seen), fed, auxiliary, tally)

    def enter(
        self, ids_BT: Tensor, remembered: int, reach: Reach = UNLIMITED, stream: Stream | None = None
    ) -> tuple[Tensor, Places]:
        """Return the input of the first block after `remembered` tokens, and the positions passed to every block."""
        stream = stream or Stream(self.axis)
        return attention_of(self.config).enter(self.embed(ids_BT, stream), self.positions, remembered, reach, stream)

    def embed(self, ids_BT: Tensor, stream: Stream | None = None) -> Tensor:
        """Return the token vectors, without positions."""
        scale: float = self.config.hidden_size**0.5
        return self.vocabulary.embed(ids_BT, stream or Stream(self.axis)) * scale

    def _run(self, unit: Unit, x: Tensor, memory: Memory, pos: Places, noise: Noise | None, stream: Stream) -> _Ran:
        given = (unit, x, memory, pos, noise, stream)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._sublayers, *given, use_reentrant=False)  # type: ignore[no-any-return]
        return self._sublayers(*given)

    def _sublayers(
        self, unit: Unit, x: Tensor, memory: Memory, pos: Places, noise: Noise | None, stream: Stream
    ) -> _Ran:
        seen = None
        fed = None
        side = None
        auxiliary: Mapping[str, Tensor] = {}
        if (i := unit.attention) is not None:
            recall = partial(memory.recall, i)
            x, seen, auxiliary, side = self.blocks[i].attend(x, recall, pos, noise and noise.at(i), stream)
        if (i := unit.feed_forward) is not None:
            x, fed = self.blocks[i].feed(x, noise and noise.at(i), stream)
        return _Ran(x, seen, auxiliary, fed, side)


def _means(losses: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each loss over the layers that have it."""
    names = dict.fromkeys(name for layer in losses for name in layer)
    return {name: torch.stack([layer[name] for layer in losses if name in layer]).mean() for name in names}
