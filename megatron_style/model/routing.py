"""The Routing Transformer: heads in which a token attends to tokens of its own cluster, and what moves the centroids.

Centroids learn outside the optimizer. A forward pass does not change them: it returns a tally of the tokens that it has
seen, and `moved` makes one step of a moving average of the tallies of an update.
Shape letters: B rows, H local heads, T segment tokens, K clusters, W window, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.config.model import Assignment, ModelConfig
from megatron_style.model.attention import Attention, Mixed, Places, Side
from megatron_style.model.compression import KeysValues
from megatron_style.model.kernels.attend import attend_in_blocks
from megatron_style.model.memory import Replaced
from megatron_style.parallel.layers import ColumnParallelLinear, PartialSumLinear
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import Layout, ones, uniform, xavier
from megatron_style.parallel.stream import Read, Stream
from megatron_style.parallel.topology import Axis

CLUSTER_LOSS = "clusters"  # its name among a model's auxiliary losses
_LOSS_WEIGHT = 1e-4
_EPS = 1e-6
_SMOOTHING = 0.01  # added to the number of clusters that hold a token


def normed(x: Tensor) -> Tensor:
    """Return vectors of mean 0 and variance 1, as tokens and centroids are compared."""
    return F.layer_norm(x, x.shape[-1:], eps=_EPS)


def nearest(x_BHTE: Tensor, means_HKE: Tensor) -> Tensor:
    """Return the number of the nearest centroid of each token [B, H, T]."""
    return _scores(x_BHTE, means_HKE).argmax(-1)


def _scores(x_BHTE: Tensor, means_HKE: Tensor) -> Tensor:
    return x_BHTE.detach() @ means_HKE.transpose(1, 2)


def attend_to_members(x_BHTE: Tensor, v_BHTE: Tensor, member_BHT: Tensor, window: int, *, dropout: float) -> Tensor:
    """Attend from each token to the last `window` members of its cluster up to itself. Sorted by cluster, these are
    neighbours; the sort is stable, so that the members of a cluster stay in the order of the text."""
    order_BHT = member_BHT.argsort(dim=-1, stable=True)
    rank_BHT = order_BHT.argsort(dim=-1)
    x_sorted = _put(x_BHTE, rank_BHT)
    v_sorted = _put(v_BHTE, rank_BHT)
    member_sorted = member_BHT.gather(2, order_BHT)
    mixed = attend_in_blocks(
        x_sorted, x_sorted, v_sorted, block=window, window=window, member=member_sorted, dropout=dropout
    )
    return _put(mixed, order_BHT)


def top_places(scores_BHTK: Tensor, window: int) -> Tensor:
    """Return the places of the `window` tokens with the highest score in each cluster [B, H, K, W], in the order of the
    text. Of equal scores, the earlier place is taken. All tokens of the segment compete, also later ones."""
    best = scores_BHTK.transpose(2, 3).argsort(dim=-1, descending=True, stable=True)
    return best[..., :window].sort(dim=-1).values


def gathered(x_BHTE: Tensor, places_BHKW: Tensor) -> Tensor:
    """Return the vectors at these places [B, H, K, W, E]."""
    index = places_BHKW.flatten(2)[..., None]
    return x_BHTE.gather(2, index.expand(-1, -1, -1, x_BHTE.shape[-1])).view(*places_BHKW.shape, -1)


def scattered(x_BHKWE: Tensor, places_BHKW: Tensor, tokens: int) -> Tensor:
    """Return what the clusters give each token [B, H, T, E]: about the mean for a token in some, 0 for one in none."""
    index = places_BHKW.flatten(2)[..., None]
    flat = x_BHKWE.flatten(2, 3)
    shape = (*flat.shape[:2], tokens)
    total = flat.new_zeros(*shape, flat.shape[-1]).scatter_add(2, index.expand_as(flat), flat)
    held = flat.new_zeros(*shape, 1).scatter_add(2, index, flat.new_ones(index.shape))
    return total / (held + _SMOOTHING)


def tally_of(x_BHTE: Tensor, member_BHT: Tensor, clusters: int) -> Tensor:
    """Return the sum of each cluster's members and, as the last feature, their number [H, K, E + 1]. A product with a
    one-hot matrix adds in the same order every time, which a scatter on a GPU does not."""
    x = x_BHTE.detach()
    full = x.float() if x.dtype.itemsize < 4 else x
    one_hot = F.one_hot(member_BHT, clusters).to(full.dtype)
    return torch.einsum("bhtk,bhtf->hkf", one_hot, F.pad(full, (0, 1), value=1.0))


def cluster_loss(x_BHTE: Tensor, means_HKE: Tensor, member_BHT: Tensor) -> Tensor:
    """Return the mean squared difference between tokens and their centroids, with a gradient to the tokens only."""
    head = torch.arange(len(means_HKE), device=means_HKE.device)[:, None]
    return (x_BHTE - means_HKE[head, member_BHT].detach()).square().mean()


def moved(means: Tensor, counts: Tensor, tally: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Return the centroids and their smoothed counts after one step. A centroid is the average of its members, where
    those of an earlier step count `decay` times as much with each later one, normed so that it stays among them.
    Without members it does not move, however small its count has become."""
    sums, found = tally[..., :-1], tally[..., -1]
    fresh = (1 - decay) * found
    total = decay * counts + fresh
    share = torch.where(found > 0, fresh / total, 0.0)[..., None]
    average = sums / found.clamp(min=1)[..., None]
    return normed(means.lerp(average, share)), total


def _put(x_BHTE: Tensor, places_BHT: Tensor) -> Tensor:
    """Return the vectors in another order: that of token t at `places[t]`. For its gradient, a gather would keep the
    vectors too, and on a GPU add them up in any order."""
    return torch.empty_like(x_BHTE).scatter(2, places_BHT[..., None].expand_as(x_BHTE), x_BHTE)


def _nearest_attention(x: Tensor, v: Tensor, means: Tensor, member: Tensor, window: int, dropout: float) -> Tensor:
    del means
    return attend_to_members(x, v, member, window, dropout=dropout)


def _balanced_attention(x: Tensor, v: Tensor, means: Tensor, member: Tensor, window: int, dropout: float) -> Tensor:
    """Attend as the authors' code does, in clusters of equal size. It does not divide scores by the root of E."""
    del member
    places = top_places(_scores(x, means), window)
    queries = gathered(x, places).flatten(0, 1)
    values = gathered(v, places).flatten(0, 1)
    mixed = F.scaled_dot_product_attention(queries, queries, values, is_causal=True, scale=1.0, dropout_p=dropout)
    return scattered(mixed.view(*places.shape, x.shape[-1]), places, x.shape[2])


ASSIGNMENTS: Mapping[Assignment, Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]] = {
    "nearest": _nearest_attention,
    "balanced": _balanced_attention,
}


class RoutingHeads(nn.Module):
    """Heads whose queries are also their keys. `means` and `counts` are buffers and not parameters, which ZeRO would
    partition and the optimizer update."""

    means: Tensor
    counts: Tensor

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        assert config.routing is not None
        self.routing = config.routing
        self.axis = axis
        D = config.hidden_size
        self.head_size = D // config.heads
        width = self.head_size * config.routing.heads
        inward = xavier(D, D, gain=2**-0.5)
        self.query = ColumnParallelLinear(D, width, axis=axis, weight=inward, bias=uniform(D**-0.5))
        self.value = ColumnParallelLinear(D, width, axis=axis, weight=inward, bias=uniform(D**-0.5))
        self.out = PartialSumLinear(width, D, axis=axis, weight=xavier(D, D))
        clusters = (config.routing.heads, config.routing.clusters)
        self.learning_buffers = {
            "means": Layout((*clusters, self.head_size), 0, draw=_normed_normal),
            "counts": Layout(clusters, 0, draw=ones),
        }
        for name, layout in self.learning_buffers.items():
            self.register_buffer(name, torch.empty(layout.shard_shape(axis.size)), persistent=False)

    def forward(self, x: Read, dropout: float) -> Mixed:
        """Return this rank's part of the output, before the reduction over the ranks."""
        x_BHTE = normed(self._heads(self.query(x)))
        v_BHTE = self._heads(self.value(x))
        means_HKE = self.means.to(x_BHTE.dtype)
        member_BHT = nearest(x_BHTE, means_HKE)
        attend = ASSIGNMENTS[self.routing.assignment]
        mixed_BHTE = attend(x_BHTE, v_BHTE, means_HKE, member_BHT, self.routing.window, dropout)
        loss = _LOSS_WEIGHT * cluster_loss(x_BHTE, means_HKE, member_BHT) / self.axis.size
        tally = tally_of(x_BHTE, member_BHT, self.routing.clusters)
        return Mixed(self.out(mixed_BHTE.transpose(1, 2).flatten(2)), Side(loss, tally))

    @torch.no_grad()
    def move(self, tally_HKF: Tensor) -> None:
        means, counts = moved(self.means, self.counts, tally_HKF.to(self.means.dtype), self.routing.decay)
        self.means.copy_(means)
        self.counts.copy_(counts)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


def _normed_normal(weight: Tensor, generator: torch.Generator) -> object:
    return weight.copy_(normed(weight.normal_(generator=generator)))


class LocalAttention(Attention):
    """Attention in blocks of `routing.local` tokens: each token sees its block up to itself, and the block before."""

    def __init__(self, config: ModelConfig, axis: Axis, heads: int | None = None) -> None:
        super().__init__(config, axis, heads)
        assert config.routing is not None
        self.block = config.routing.local

    def mixed(self, queries: Tensor, cached: KeysValues, inside: KeysValues, pos: Places, dropout: float) -> Tensor:
        del pos
        assert cached[0].shape[2] == 0, "routing has no memory"
        return attend_in_blocks(queries, *inside, block=self.block, dropout=dropout)


class RoutedAttention(LocalAttention):
    """The attention of a routing layer: routing heads first, then local ones. Each kind has projections of its own, so
    that every tensor-parallel rank gets heads of both."""

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        assert config.routing is not None
        super().__init__(config, axis, config.heads - config.routing.heads)
        self.routed = RoutingHeads(config, axis)

    def forward(
        self, x: Read, cached: Read, pos: Places, noise: Noise | None, stream: Stream, replaced: Replaced | None = None
    ) -> Mixed:
        assert replaced is None, "routing has no memory"
        routed = self.routed(x, self.dropout if noise is not None else 0.0)
        local, _ = self.mixture(x, cached, pos, noise)
        return Mixed(self.out(local, stream, routed.x), routed.side)


def routing_attention(config: ModelConfig, layer: int) -> type[LocalAttention]:
    """Return the kind of a layer's attention in a model with routing."""
    assert config.routing is not None
    return LocalAttention if layer < config.routing.first_layer else RoutedAttention
