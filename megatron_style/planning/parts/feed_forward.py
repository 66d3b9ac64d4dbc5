"""The feed-forward half of a block."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.planning.parts.micro_batch import FLOAT, MicroBatch, Sent


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward half of one block: norm, two matrices, dropout."""

    batch: MicroBatch

    def products(self) -> float:
        return 2 * self.batch.model.hidden_size * self.batch.model.ffn_size

    @property
    def kept(self) -> float:
        batch = self.batch
        is_gathered = batch.is_split and not batch.recalls
        vectors = batch.own_tokens + (batch.tokens if is_gathered else batch.own_tokens)  # before and after the norm
        norm = 2 * batch.own_tokens * FLOAT
        return vectors * batch.vector_bytes + norm + batch.tokens * self._inner_size * batch.element_bytes

    @property
    def needed(self) -> float:
        """Return the bytes of the gradients that are alive at once in its backward pass."""
        D = self.batch.model.hidden_size
        wide = 2 * self._inner_size + D
        if self.batch.is_split:  # the input is gathered again, or its gradient is about to be scattered
            wide = max(wide, self._inner_size + 2 * D)
        return self.batch.tokens * wide * self.batch.element_bytes

    @property
    def sent(self) -> Sent:
        """Return one sum after the second matrix, which recompute does not need, and one gradient before the first; if
        vectors are split, what is gathered and scattered instead, and the gradients of norm and bias."""
        batch = self.batch
        if not batch.is_split:
            return Sent(messages=2, vectors=2 * batch.tokens)
        return Sent(messages=5 + 2, moved=5 * batch.tokens, other=3 * batch.vector_bytes)

    @property
    def _inner_size(self) -> float:
        return self.batch.model.ffn_size / self.batch.setup.tensor
