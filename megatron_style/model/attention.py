"""Self-attention over a segment and the memory before it, in the kinds that a model's `positions` names.

Shape letters: B rows, T segment tokens, C remembered tokens, S both, D hidden, H local heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron_style.config.model import ModelConfig, Positions
from megatron_style.model.compression import KeysValues, leaving, reconstruction_loss
from megatron_style.model.kernels.attend import (
    attend,
    attend_masked,
    attend_with_distances,
    causal_mask,
    score_distances,
)
from megatron_style.model.memory import UNLIMITED, Reach, Replaced
from megatron_style.model.positions import SinusoidalPositions, distance_sinusoids, sinusoids
from megatron_style.parallel.collectives import copy_to_shards
from megatron_style.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import Layout, normal, parameter, uniform, xavier, zeros
from megatron_style.parallel.stream import Read, Stream
from megatron_style.parallel.topology import Axis


class Distances(NamedTuple):
    """What relative positions pass to every block."""

    table_SD: Tensor  # the sinusoids of the distances S-1 to 0
    hidden_TS: Tensor  # True where a token of the segment does not see one of the memory and the segment


class Side(NamedTuple):
    """What the clusters of a routing layer give in addition to its output."""

    loss: Tensor  # a scalar: this rank's share, to be summed over the tensor axis
    tally: Tensor  # by which the centroids of this rank's heads are moved after the update


class Mixed(NamedTuple):
    """The result of an attention layer."""

    x: Tensor
    side: Side | None = None
    loss: Tensor | None = None  # of what the tokens that leave the memory are compressed to


class Separated(NamedTuple):
    """What added and infused positions pass to every block of a model whose documents do not see each other."""

    pos_SD: Tensor | None
    hidden_B1TS: Tensor  # True where a token of the segment does not see one of the memory and the segment


Places = Tensor | Distances | Separated | None  # what a kind of positions passes to every block


def separate(pos: Places, hidden_B1TS: Tensor) -> Places:
    """Return the positions with what documents hide from each other."""
    if isinstance(pos, Distances):
        return pos._replace(hidden_TS=pos.hidden_TS | hidden_B1TS)
    assert not isinstance(pos, Separated)
    return Separated(pos, hidden_B1TS)


class Attention(nn.Module):
    """Attention for positions that are added to the token vectors: the layer itself does not see them."""

    can_decode: ClassVar[bool] = False  # an added position cannot be removed from a cached token when the token moves
    has_biases: ClassVar[bool] = True
    has_output_bias: ClassVar[bool] = True
    projects_positions: ClassVar[bool] = False  # True if queries and keys are projections of tokens with positions

    def __init__(self, config: ModelConfig, axis: Axis, heads: int | None = None) -> None:
        """Make all heads of a model, or the first `heads` of them."""
        super().__init__()
        D = config.hidden_size
        self.head_size = D // config.heads
        width = self.head_size * (heads or config.heads)
        self.axis = axis
        self.dropout = config.dropout.attention
        self.slots = 0 if config.memory is None else config.memory.compressed
        self.rate = 1 if config.memory is None else config.memory.rate
        bias = uniform(D**-0.5) if self.has_biases else None
        inward = {"axis": axis, "weight": xavier(D, D, gain=2**-0.5), "bias": bias}
        self.query = ColumnParallelLinear(D, width, **inward)  # type: ignore[arg-type]
        self.key = ColumnParallelLinear(D, width, **inward)  # type: ignore[arg-type]
        self.value = ColumnParallelLinear(D, width, **inward)  # type: ignore[arg-type]
        out_bias = zeros if self.has_output_bias else None
        self.out = RowParallelLinear(width, D, axis=axis, weight=xavier(D, D), bias=out_bias)

    @staticmethod
    def positions(size: int) -> SinusoidalPositions:
        """Return the table from which `enter` takes its positions."""
        return SinusoidalPositions(size, sinusoids)

    @staticmethod
    def enter(
        x_BTD: Tensor, positions: SinusoidalPositions, remembered: int, reach: Reach, stream: Stream
    ) -> tuple[Tensor, Places]:
        """Return the input of the first block, and the positions that are passed to every block."""
        del remembered
        assert reach == UNLIMITED, "only relative positions have a reach"
        return x_BTD + stream.own(positions(stream.length(x_BTD))).to(x_BTD.dtype), None

    def forward(
        self, x: Read, cached: Read, pos: Places, noise: Noise | None, stream: Stream, replaced: Replaced | None = None
    ) -> Mixed:
        mixture_BTD, loss = self.mixture(x, cached, pos, noise, replaced)
        return Mixed(self.out(mixture_BTD, stream), loss=loss)

    def mixture(
        self, x: Read, cached: Read, pos: Places, noise: Noise | None, replaced: Replaced | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what this rank's heads give the output projection [B, T, H x E] and, if what tokens are replaced by is
        trained, the loss of that."""
        placed, placed_cached = self.placed(x, cached, pos)
        slots: tuple[Tensor, ...] = ()
        if replaced is not None and replaced[1].requires_grad:
            slots = (copy_to_shards(replaced[1], self.axis),)
        # A loss without positions needs queries and keys without them, of the segment and of the tokens that leave.
        unplaced = (x.now.detach(), replaced[0]) if replaced and slots and self.projects_positions else ()
        queries, *own_queries = self._projected(self.query, placed, frozen=unplaced[:1])
        # The memory is projected apart from the segment: no gradient has to flow back to it.
        keys, cached_keys, *own_keys = self._projected(self.key, placed, placed_cached, frozen=(*slots, *unplaced[1:]))
        values, cached_values, *own_values = self._projected(self.value, x, cached, frozen=slots)
        dropout = self.dropout if noise is not None else 0.0
        mixed_BHTE = self.mixed(queries, (cached_keys, cached_values), (keys, values), pos, dropout)
        mixture_BTD = mixed_BHTE.transpose(1, 2).flatten(2)
        if not slots:
            return mixture_BTD, None
        slot_keys, slot_values = own_keys[0], own_values[0]
        tokens = slot_keys.shape[2] * self.rate
        left_keys = own_keys[1] if unplaced else leaving(cached_keys, keys, self.slots, tokens)
        left_values = leaving(cached_values, values, self.slots, tokens)
        own = own_queries[0] if unplaced else queries.detach()
        return mixture_BTD, reconstruction_loss(own, (left_keys, left_values), (slot_keys, slot_values), self.axis)

    def placed(self, x: Read, cached: Read, pos: Places) -> tuple[Read, Read]:
        """Return the segment and the memory with the positions that the projections of queries and keys see."""
        del pos  # added already, or not part of a vector
        return x, cached

    def mixed(self, queries: Tensor, cached: KeysValues, inside: KeysValues, pos: Places, dropout: float) -> Tensor:
        """Return the mixture of values for each query [B, H, T, E]."""
        if isinstance(pos, Separated):
            return attend_masked(queries, cached, inside, pos.hidden_B1TS, dropout=dropout)
        return attend(queries, cached, inside, dropout=dropout)

    def _projected(self, layer: ColumnParallelLinear, *inputs: Read, frozen: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return projections by heads; those of `frozen` inputs give the layer no gradient."""
        outputs = layer(*inputs, *frozen, frozen=len(frozen))
        return tuple(map(self._heads, outputs if isinstance(outputs, tuple) else (outputs,)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], x.shape[2] // self.head_size, self.head_size).transpose(1, 2)


class InfusedAttention(Attention):
    """Position-infused attention: every block adds positions to queries and keys, never to values, so that remembered
    tokens can be attended to at other positions."""

    can_decode = True
    projects_positions = True

    @staticmethod
    def enter(
        x_BTD: Tensor, positions: SinusoidalPositions, remembered: int, reach: Reach, stream: Stream
    ) -> tuple[Tensor, Places]:
        assert reach == UNLIMITED, "only relative positions have a reach"
        # A bf16 engine keeps buffers in float32.
        return x_BTD, positions(remembered + stream.length(x_BTD)).to(x_BTD.dtype)

    def placed(self, x: Read, cached: Read, pos: Places) -> tuple[Read, Read]:
        pos = pos.pos_SD if isinstance(pos, Separated) else pos
        assert isinstance(pos, Tensor), "there are no positions to infuse"
        C = cached.now.shape[1]
        return x.plus(pos[C:]), cached.plus(pos[:C])


class RelativeAttention(Attention):
    """Transformer-XL's attention. Token i sees token j by (q_i + u) k_j + (q_i + v) r_{i-j}, where r is a projection of
    the sinusoid of their distance. Its projections have no biases. u and v belong to each block, as in the authors'
    best model; where their code shares them, all blocks hold the same."""

    can_decode = True
    has_biases = False
    has_output_bias = False

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__(config, axis)
        D = config.hidden_size
        self.bias_scale = 1.0  # of u and v before scores are divided by the root of E
        layout = Layout((config.heads, self.head_size), 0, draw=normal(0.02))
        self.content_bias = parameter(layout, axis)  # u
        self.distance_bias = parameter(layout, axis)  # v
        self.distance = ColumnParallelLinear(D, D, axis=axis, weight=xavier(D, D, gain=2**-0.5), bias=None)

    @staticmethod
    def positions(size: int) -> SinusoidalPositions:
        return SinusoidalPositions(size, distance_sinusoids)

    @staticmethod
    def enter(
        x_BTD: Tensor, positions: SinusoidalPositions, remembered: int, reach: Reach, stream: Stream
    ) -> tuple[Tensor, Places]:
        T = stream.length(x_BTD)
        S = remembered + T
        farthest = S - 1 if reach.clamp is None else reach.clamp
        distance_S = torch.arange(S - 1, -1, -1, device=x_BTD.device).clamp(max=farthest)
        table_SD = positions(S)[distance_S].to(x_BTD.dtype)
        return x_BTD, Distances(table_SD, ~causal_mask(T, S, x_BTD.device, window=reach.window))

    def mixed(self, queries: Tensor, cached: KeysValues, inside: KeysValues, pos: Places, dropout: float) -> Tensor:
        assert isinstance(pos, Distances), "there are no distances"
        keys, values = (torch.cat(part, dim=2) for part in zip(cached, inside, strict=True))
        content = queries + self._scaled(self.content_bias)
        scores_HBTS = self._distance_scores(queries, pos.table_SD)
        return attend_with_distances(content, keys, values, scores_HBTS, pos.hidden_TS, dropout=dropout)

    def _distance_scores(self, queries: Tensor, table_SD: Tensor) -> Tensor:
        distances_HSE = self._heads(self.distance(table_SD[None]))[0]
        return score_distances(queries + self._scaled(self.distance_bias), distances_HSE)

    def _scaled(self, bias_HE: Tensor) -> Tensor:
        return bias_HE[:, None] * self.bias_scale if self.bias_scale != 1 else bias_HE[:, None]


class CompressiveRelativeAttention(RelativeAttention):
    """The Compressive Transformer's attention. Compressed slots have a projection of distances and a v of their own,
    and the distances that they would have directly before the segment. u and v are not divided by the root of E."""

    has_output_bias = True

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__(config, axis)
        assert config.memory is not None
        D = config.hidden_size
        self.bias_scale = self.head_size**0.5
        self.slot_bias = parameter(Layout((config.heads, self.head_size), 0, draw=normal(0.02)), axis)
        self.slot_distance = ColumnParallelLinear(D, D, axis=axis, weight=xavier(D, D, gain=2**-0.5), bias=None)

    def _distance_scores(self, queries: Tensor, table_SD: Tensor) -> Tensor:
        C = self.slots
        near_SD = table_SD[-(C + queries.shape[2]) :]
        slots_HSE = self._heads(self.slot_distance(near_SD[None]))[0]
        of_slots = score_distances(queries + self._scaled(self.slot_bias), slots_HSE)[..., :C]
        return torch.cat([of_slots, super()._distance_scores(queries, table_SD[C:])], dim=-1)


ATTENTIONS: Mapping[Positions, type[Attention]] = {
    "added": Attention,
    "infused": InfusedAttention,
    "relative": RelativeAttention,
}
COMPRESSIVE_ATTENTIONS: Mapping[Positions, type[Attention]] = {
    "infused": InfusedAttention,  # slots have the first positions, and the tokens of the memory those after them
    "relative": CompressiveRelativeAttention,
}


def attention_of(config: ModelConfig) -> type[Attention]:
    """Return the kind of a model's attention."""
    kinds = ATTENTIONS if config.memory is None else COMPRESSIVE_ATTENTIONS
    return kinds[config.positions]
