"""Attention to the segment and the tokens cached before it, with each kind of positions."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.planning.parts.micro_batch import FLOAT, PASSES, MicroBatch, Sent


@dataclass(frozen=True)
class Attention:
    """The attention half of one block: norm, attention, dropout. Positions are added to the embeddings."""

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
        vectors = batch.tokens  # the block's input
        vectors += 0 if self._next_cache_is_the_input else batch.tokens  # the same after its norm
        vectors += self._placed_vectors
        vectors += batch.tokens if batch.model.dropout.hidden else 0  # a mask
        norm = 2 * batch.tokens * FLOAT
        return vectors * batch.vector_bytes + norm + self._kept_by_kernel

    @property
    def needed(self) -> float:
        """Return 0: the gradients of this half are smaller than those of the feed-forward half."""
        return 0.0

    @property
    def held_for_cache(self) -> float:
        """Return the bytes of a recomputed block's normed input, which is held until the next cache is made of it."""
        if not self.batch.setup.recompute or self._next_cache_is_the_input:
            return 0.0
        return float(self.batch.stream)

    @property
    def caches(self) -> int:
        """Return the bytes of the last segment's cache and of the next one's, of all rows."""
        return 2 * self.batch.stage.rows * self.batch.remembered * self.batch.vector_bytes

    @property
    def position_table(self) -> int:
        """Return the bytes of the table of positions, which all blocks share."""
        length = self.batch.stage.segment_length + self.batch.remembered
        return length * self.batch.model.hidden_size * FLOAT

    @property
    def sent(self) -> Sent:
        """Return one sum after the output projection and one gradient before the input projections; the cache has
        none. A recomputed block repeats the first."""
        times = 3 if self.batch.setup.recompute else 2
        return Sent(messages=times, vectors=times * self.batch.tokens)

    @property
    def _placed_vectors(self) -> int:
        """Return the number of vectors with positions that are kept in addition to those without."""
        return 0

    @property
    def _next_cache_is_the_input(self) -> bool:
        """True if the next cache holds the normed input of the block, which then costs nothing."""
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
        dropped = FLOAT + batch.mask_bytes(FLOAT) if batch.model.dropout.attention else 0
        S = batch.stage.segment_length + batch.remembered
        return inputs * FLOAT + mixed + queries * S * (FLOAT + dropped)


@dataclass(frozen=True)
class InfusedAttention(Attention):
    """Positions are added to the inputs of queries and keys, in every block."""

    @property
    def _placed_vectors(self) -> int:
        return self.batch.keys


@dataclass(frozen=True)
class RelativeAttention(Attention):
    """Scores have a second part, of queries and projected distances, which no fused kernel computes."""

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
        return 5 * batch.tokens * S * batch.model.heads / batch.setup.tensor * FLOAT

    @property
    def _kept_by_kernel(self) -> float:
        """Return in addition the queries that distances are scored with, and the projected distances."""
        batch = self.batch
        S = batch.stage.segment_length + batch.stage.cache_length
        vectors = (batch.tokens + S) * batch.model.hidden_size / batch.setup.tensor
        return super()._kept_by_kernel + vectors * batch.element_bytes
