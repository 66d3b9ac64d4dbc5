"""Attention with a compressed memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.config.model import CompressionConfig
from megatron_style.planning.parts.attention import Attention, InfusedAttention, RelativeAttention
from megatron_style.planning.parts.micro_batch import FLOAT, PASSES, Sent


@dataclass(frozen=True)
class _Compressive(Attention):
    """Tokens that leave the cache are compressed. A convolution is trained by a loss that compares attention to them
    with attention to their slots."""

    def products(self, *, causal_once: bool) -> float:
        memory = self._memory
        base = super().products(causal_once=causal_once)
        if memory.function != "convolution":
            return base
        D = self.batch.model.hidden_size
        L = self.batch.stage.segment_length
        # The tokens that leave have no gradient: attention to them is computed once, and the convolution has one
        # gradient. Keys and values of slots have one too, as their weights learn nothing here.
        once = self._projected_again * D * D + 2 * L * D
        twice = D * D + 2 * D * D / memory.rate
        return base + (once + 2 * twice) / PASSES + 2 * L / memory.rate * D

    @property
    def kept(self) -> float:
        """Return in addition the inputs of the convolution, and for its loss the queries, the keys and values of slots,
        attention to them, and the difference."""
        if self._memory.function != "convolution":
            return super().kept
        D = self.batch.model.hidden_size / self.batch.setup.tensor
        vectors = (3 + 2 / self._memory.rate) * self.batch.tokens
        sums = self.batch.tokens * self.batch.model.heads / self.batch.setup.tensor
        difference = self.batch.tokens * D * FLOAT
        return super().kept + vectors * D * self.batch.element_bytes + difference + sums * FLOAT

    @property
    def sent(self) -> Sent:
        """Return in addition the slots, their gradients and the loss. A recomputed block repeats slots and loss."""
        base = super().sent
        if self._memory.function != "convolution":
            return base
        times = 2 if self.batch.setup.recompute else 1
        vectors = (times + 1) * self.batch.tokens // self._memory.rate
        return base.plus(Sent(2 * times + 1, vectors, other=times * FLOAT))

    @property
    def _projected_again(self) -> int:
        """Return the projections of each token for the loss, in addition to those of attention."""
        return 0

    @property
    def _memory(self) -> CompressionConfig:
        assert self.batch.model.memory is not None
        return self.batch.model.memory

    @property
    def _next_cache_is_the_input(self) -> bool:
        return False


@dataclass(frozen=True)
class CompressiveInfusedAttention(_Compressive, InfusedAttention):
    """Compressed slots have positions, as tokens have. The loss needs queries and keys without them."""

    @property
    def _projected_again(self) -> int:
        return 2


@dataclass(frozen=True)
class CompressiveRelativeAttention(_Compressive, RelativeAttention):
    """Compressed slots have distances of their own."""

    has_output_bias = True

    def products(self, *, causal_once: bool) -> float:
        C = self.batch.slots
        distances = C + self.batch.stage.segment_length
        return super().products(causal_once=causal_once) + self._by_distance(distances, C if causal_once else distances)
