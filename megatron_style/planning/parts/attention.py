"""Attention to the segment and the tokens cached before it, with each kind of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_style.planning.parts.micro_batch import FLOAT, PASSES, MicroBatch, Sent


@dataclass(frozen=True)
class Attention:
    """The attention half of one block: norm, attention, dropout. Positions are added to the embeddings."""

    is_placed: ClassVar[bool] = False  # True if queries and keys are projections of vectors with positions
    has_output_bias: ClassVar[bool] = True
    batch: MicroBatch

    def products(self, *, causal_once: bool) -> float:
        """Return the multiplications per token of a forward pass; with `causal_once`, without the masked ones."""
        D = self.batch.model.hidden_size
        L = self.batch.stage.segment_length
        C = self.batch.remembered
        attended = C + (L + 1) / 2 if causal_once else L + C
        # Keys and values of cached tokens are projected again, with the current weights; no gradient flows into the
        # cache, which saves one product.
        projections = D * D * (4 + 2 * C / L * (PASSES - 1) / PASSES)
        return projections + 2 * attended * D

    @property
    def is_fused(self) -> bool:
        """True if the kernel keeps no scores, and does not compute those that are masked."""
        return self.batch.setup.kernels.fused_attention

    @property
    def kept(self) -> float:
        """Return the bytes of the tensors that autograd keeps."""
        batch = self.batch
        vectors = batch.own_tokens  # the block's input
        vectors += self._kept_of_segment + self._kept_of_memory
        norm = 2 * batch.own_tokens * FLOAT
        return vectors * batch.vector_bytes + norm + self._kept_by_kernel

    @property
    def needed(self) -> float:
        """Return the bytes of what is gathered again for the backward pass, with and without positions, and of two
        gradients of it. Otherwise the gradients of this half are smaller than those of the feed-forward half."""
        batch = self.batch
        if not batch.recalls:
            return 0.0
        copies = 2 if self.is_placed else 1
        segment = (copies + 2) * batch.tokens if batch.is_split else 0
        return (segment + copies * batch.cached) * batch.vector_bytes

    @property
    def held_for_cache(self) -> float:
        """Return the bytes of a block's normed input that are held until the next cache is made of it."""
        batch = self.batch
        if self._next_cache_is_the_input:
            return 0.0
        if batch.setup.tensor > 1:  # a copy of the rank's own features
            return batch.tokens * batch.vector_bytes / batch.setup.tensor
        return batch.stream if batch.setup.recompute else 0.0

    @property
    def caches(self) -> float:
        """Return the bytes of the caches on the device: the last segment's and the next one's, of all rows or, if they
        are on the host, of the micro-batch that is computed, and the last segment's of the one after it."""
        stage = self.batch.stage
        if self.batch.setup.cache == "device":
            return 2 * stage.accumulation * self._cache
        return min(3, stage.accumulation + 1) * self._cache

    @property
    def host_caches(self) -> float:
        """Return the bytes of the caches on the host: the last segment's and the next one's, of all rows."""
        return 0.0 if self.batch.setup.cache == "device" else 2 * self.batch.stage.accumulation * self._cache

    @property
    def _cache(self) -> float:
        """Return the bytes of a rank's share of the cache of one micro-batch."""
        return self.batch.cached * self.batch.vector_bytes / self.batch.setup.tensor

    @property
    def position_table(self) -> int:
        """Return the bytes of the table of positions, which all blocks share."""
        length = self.batch.stage.segment_length + self.batch.remembered
        return length * self.batch.model.hidden_size * FLOAT

    @property
    def sent(self) -> Sent:
        """Return one sum after the output projection and one gradient before the input projections, of which a
        recomputed block repeats the first. The memory, which has no gradient, is gathered in both passes."""
        batch = self.batch
        memory = Sent(messages=2, moved=2 * batch.cached) if batch.cached else Sent()
        if batch.is_split:
            return memory.plus(self._sent_if_split)
        times = 3 if batch.setup.recompute else 2
        return memory.plus(Sent(messages=times, vectors=times * batch.tokens))

    @property
    def _sent_if_split(self) -> Sent:
        """Return what is gathered before the input projections, again for the backward pass, and scattered after the
        output projection, with the gradients of both. The norm's gradients are summed, and the bias's."""
        batch = self.batch
        times = 6 if batch.setup.recompute else 5
        bias = 1 if self.has_output_bias else 0
        return Sent(times + 1 + bias, moved=times * batch.tokens, other=(2 + bias) * batch.vector_bytes)

    @property
    def _kept_of_segment(self) -> float:
        """Return the number of vectors that are kept of the segment for the projections."""
        batch = self.batch
        if batch.is_split and batch.recalls:
            return batch.own_tokens
        normed = 0 if self._next_cache_is_the_input and batch.setup.tensor == 1 else batch.tokens
        return normed + (batch.tokens if self.is_placed else 0)

    @property
    def _kept_of_memory(self) -> int:
        """Return the number of vectors that are kept of the memory in addition to the cache itself."""
        batch = self.batch
        if batch.recalls:
            return 0
        gathered = batch.cached if batch.setup.tensor > 1 else 0
        return gathered + (batch.cached if self.is_placed else 0)

    @property
    def _next_cache_is_the_input(self) -> bool:
        """True if the next cache holds the normed input of the block, or its own features of it: it costs nothing."""
        return self.batch.stage.cache_length == self.batch.stage.segment_length

    @property
    def _kept_by_kernel(self) -> float:
        batch = self.batch
        D = batch.model.hidden_size / batch.setup.tensor
        queries = batch.tokens * batch.model.heads / batch.setup.tensor
        inputs = (batch.tokens + 2 * batch.keys) * D
        mixed = batch.tokens * D * batch.element_bytes
        if self.is_fused:
            return inputs * batch.element_bytes + mixed + queries * FLOAT  # one sum per query
        # torch's plain kernel computes in full precision.
        dropped = FLOAT + batch.plain_mask_bytes if batch.model.dropout.attention else 0
        S = batch.stage.segment_length + batch.remembered
        return inputs * FLOAT + mixed + queries * S * (FLOAT + dropped)


@dataclass(frozen=True)
class InfusedAttention(Attention):
    """Positions are added to the inputs of queries and keys, in every block."""

    is_placed = True


@dataclass(frozen=True)
class RelativeAttention(Attention):
    """Scores have a second part, of queries and projected distances, which no fused kernel computes."""

    has_output_bias = False

    def products(self, *, causal_once: bool) -> float:
        L = self.batch.stage.segment_length
        C = self.batch.stage.cache_length
        attended = C + (L + 1) / 2 if causal_once else L + C
        return super().products(causal_once=causal_once) + self._by_distance(L + C, attended)

    def _by_distance(self, distances: int, attended: float) -> float:
        """Return the products of projecting distances, and of scoring queries by those of what they attend to."""
        stage = self.batch.stage
        D = self.batch.model.hidden_size
        # All rows share the projected distances; no gradient flows to the sinusoids, which saves one product.
        projected = distances / (stage.micro_rows * stage.segment_length) * D * D * (PASSES - 1) / PASSES
        return projected + attended * D

    @property
    def is_fused(self) -> bool:
        return False

    @property
    def needed(self) -> float:
        """Return the bytes of the gradients of weights, scores and bias, and of the bias by distance, twice."""
        batch = self.batch
        S = batch.stage.segment_length + batch.remembered
        scores = 5 * batch.tokens * S * batch.model.heads / batch.setup.tensor * FLOAT
        return max(scores, super().needed)

    @property
    def _kept_by_kernel(self) -> float:
        """Return in addition the queries that distances are scored with, and the projected distances."""
        batch = self.batch
        S = batch.stage.segment_length + batch.stage.cache_length
        vectors = (batch.tokens + S) * batch.model.hidden_size / batch.setup.tensor
        return super()._kept_by_kernel + vectors * batch.element_bytes
