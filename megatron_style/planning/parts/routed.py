"""Attention of local and routing heads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.config.model import RoutingConfig
from megatron_style.planning.parts.attention import Attention
from megatron_style.planning.parts.micro_batch import FLOAT, LONG, PASSES


@dataclass(frozen=True)
class _Spans:
    """Attention in blocks of tokens, each to itself and, if there are several, to the block before."""

    tokens: int  # of a row
    block: int

    @property
    def rows(self) -> int:
        """Return the number of queries, with those that pad the last block."""
        return -(-self.tokens // self._size) * self._size

    @property
    def times(self) -> int:
        """Return how many blocks read a key."""
        return 2 if self.rows > self._size else 1

    @property
    def keys(self) -> int:
        """Return the number of keys of each query."""
        return self._size * self.times

    @property
    def scores(self) -> float:
        """Return the number of scores that are computed per token."""
        return self.rows * self.keys / self.tokens

    @property
    def _size(self) -> int:
        return min(self.block, self.tokens)


@dataclass(frozen=True)
class RoutedAttention(Attention):
    """Local and routing heads. Costs are the mean over the layers, the first of which may have local heads only."""

    def products(self, *, causal_once: bool) -> float:
        routing = self._routing
        D = self.batch.model.hidden_size
        routed = D * self._routed_share
        local = D - routed
        # Scores of tokens and centroids, and the tally, which are not differentiated. The tally has a feature more.
        E = D // self.batch.model.heads
        clusters = routed * routing.clusters * (1 + (E + 1) / E) / PASSES
        attended = 2 * (local * self._local_scores(causal_once) + routed * self._routed_scores(causal_once))
        return D * (4 * local + 3 * routed) + clusters + attended

    @property
    def is_fused(self) -> bool:
        return False

    @property
    def _routing(self) -> RoutingConfig:
        assert self.batch.model.routing is not None
        return self.batch.model.routing

    @property
    def _routed_share(self) -> float:
        """Return the share of routing heads among the heads of all layers."""
        model = self.batch.model
        return self._routing.heads / model.heads * (1 - self._routing.first_layer / model.layers)

    @property
    def _local(self) -> _Spans:
        return _Spans(self.batch.stage.segment_length, self._routing.local)

    @property
    def _routed(self) -> _Spans:
        return _Spans(self.batch.stage.segment_length, self._routing.window)

    def _local_scores(self, causal_once: bool) -> float:
        L = self.batch.stage.segment_length
        b = self._routing.local
        seen = sum(place % b + 1 + (b if place >= b else 0) for place in range(L))
        return seen / L if causal_once else self._local.scores

    def _routed_scores(self, causal_once: bool) -> float:
        """Return the scores per token; those that a token may see are counted for clusters of equal size."""
        L = self.batch.stage.segment_length
        seen = sum(min(self._routing.window, place // self._routing.clusters + 1) for place in range(L))
        return seen / L if causal_once else self._routed.scores

    @property
    def _kept_by_kernel(self) -> float:
        batch = self.batch
        heads = batch.model.heads / batch.setup.tensor
        routed = heads * self._routed_share
        E = batch.model.hidden_size // batch.model.heads
        # Routing heads also keep the input of their norm, its two numbers, the distance to the centroid and two orders.
        apart = batch.tokens * (2 * E * batch.element_bytes + 2 * FLOAT + 2 * LONG)
        of_local = self._kept_by_head(self._local, masks=0)
        return (heads - routed) * of_local + routed * (self._kept_by_head(self._routed, masks=1) + apart)

    def _kept_by_head(self, spans: _Spans, *, masks: int) -> float:
        """Return the bytes that a head keeps: queries, keys and values, each as often as a block is read, and the
        mixture in blocks and in rows. `masks` counts those that are its own."""
        batch = self.batch
        E = batch.model.hidden_size // batch.model.heads
        rows = batch.stage.micro_rows * spans.rows
        inputs = rows * E * (1 + 2 * spans.times)
        mixed = 2 * rows * E * batch.element_bytes
        if batch.setup.kernels.fused_attention:
            return (inputs + masks * rows * spans.keys) * batch.element_bytes + mixed + rows * FLOAT
        dropped = FLOAT + batch.plain_mask_bytes if batch.model.dropout.attention else 0
        return inputs * FLOAT + mixed + rows * spans.keys * (FLOAT + dropped)
