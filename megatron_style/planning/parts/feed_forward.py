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
        vectors = 2 * batch.tokens  # its input, before and after the norm
        vectors += batch.tokens if batch.model.dropout.hidden else 0  # a mask
        norm = 2 * batch.tokens * FLOAT
        inner = batch.element_bytes
        if batch.model.dropout.activation:
            inner = 2 * batch.element_bytes + batch.mask_bytes(batch.element_bytes)  # before, after, and the mask
        return vectors * batch.vector_bytes + norm + batch.tokens * self._inner_size * inner

    @property
    def needed(self) -> float:
        """Return the bytes of the gradients that are alive at once in its backward pass."""
        inner = 1 if self.batch.model.dropout.activation else 2  # a dropped copy is gone when the second one is made
        wide = inner * self._inner_size
        return self.batch.tokens * (wide + self.batch.model.hidden_size) * self.batch.element_bytes

    @property
    def sent(self) -> Sent:
        """Return one sum after the second matrix, which recompute does not need, and one gradient before the first."""
        return Sent(messages=2, vectors=2 * self.batch.tokens)

    @property
    def _inner_size(self) -> float:
        return self.batch.model.ffn_size / self.batch.setup.tensor
