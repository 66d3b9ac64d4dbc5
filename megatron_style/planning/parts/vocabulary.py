"""Embedding and loss, of one band or several."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.planning.parts.micro_batch import FLOAT, LONG, MicroBatch, Sent


@dataclass(frozen=True)
class Vocabulary:
    """Embedding and loss, with one band of full width."""

    batch: MicroBatch

    def products(self) -> float:
        (band,) = self.batch.setup.bands
        return float(self.batch.model.hidden_size * band.tokens)

    @property
    def kept_by_embedding(self) -> float:
        batch = self.batch
        looked_up = batch.tokens / batch.setup.tensor * batch.model.hidden_size
        elements = looked_up + self._narrow_elements
        return elements * batch.element_bytes + 4 * batch.tokens * LONG  # where each token is, here and in the loss

    @property
    def kept(self) -> float:
        return self.kept_by_embedding + self._scored + sum(self._kept_by_bands)

    @property
    def needed(self) -> float:
        """Return the peak bytes of the loss, where bands are scored one after another."""
        kernels = self.batch.setup.kernels
        widened = kernels.widened_scores if self.batch.element_bytes < FLOAT else 0
        kept = self._kept_by_bands
        return self._scored + max(
            sum(kept[: i + 1]) + n * kernels.bytes_needed_per_score + min(n, widened) * FLOAT
            for i, n in enumerate(self._scores)
        )

    @property
    def sent(self) -> Sent:
        """Return the vectors after the embedding, the gradient of the scored ones, and three numbers per token: the
        largest logit, the sum of exponentials and the target's logit."""
        tokens = self.batch.tokens
        return self._sent_between_layers.plus(Sent(messages=4, vectors=tokens, other=3.0 * tokens * FLOAT))

    @property
    def _sent_between_layers(self) -> Sent:
        """Return the vectors after the embedding. Split ones are scattered there, their gradients are gathered, and
        they themselves before the loss."""
        tokens = self.batch.tokens
        return Sent(messages=3, moved=3 * tokens) if self.batch.is_split else Sent(messages=1, vectors=tokens)

    @property
    def _narrow_elements(self) -> float:
        """Return the number of elements that are looked up and then projected to the hidden size."""
        return 0.0

    @property
    def _scored(self) -> int:
        """Return the bytes of the vectors that are scored."""
        return self.batch.tokens * self.batch.vector_bytes

    @property
    def _scores(self) -> tuple[float, ...]:
        """Return the number of logits of each band: the head has one per token, a tail for its own tokens only."""
        setup = self.batch.setup
        tokens = self.batch.tokens
        head, *tails = setup.bands
        of_head = tokens * (head.tokens / setup.tensor + len(tails))
        shares = zip(tails, setup.band_shares[1:], strict=True)
        return of_head, *(tokens * share * band.tokens / setup.tensor for band, share in shares)

    @property
    def _kept_by_bands(self) -> tuple[float, ...]:
        each = self.batch.setup.kernels.bytes_kept_per_score or self.batch.element_bytes
        return tuple(scores * each for scores in self._scores)


@dataclass(frozen=True)
class AdaptiveVocabulary(Vocabulary):
    """Several bands, of which the tails are narrow: projected on input and output, scored for their own tokens only."""

    def products(self) -> float:
        D = self.batch.model.hidden_size
        shares = self.batch.setup.band_shares
        head, *tails = self.batch.setup.bands
        products = float(D * (head.tokens + len(tails)))
        for band, share in zip(tails, shares[1:], strict=True):
            products += share * band.width * band.tokens
        projections = self.batch.model.vocabulary.projections
        if projections != "none":  # every band on input, and the tails on output
            products += shares[0] * D * head.width
            products += sum(2 * share * band.width * D for band, share in zip(tails, shares[1:], strict=True))
        if projections == "both":
            products += D * head.width
        return products

    @property
    def sent(self) -> Sent:
        """Return in addition the gradients of the projections and those of each tail's narrow inputs."""
        setup = self.batch.setup
        tokens = self.batch.tokens
        D = setup.model.hidden_size
        e = self.batch.element_bytes
        other = 3.0 * tokens * FLOAT + sum(D * band.width for band in setup.bands) * e
        for band, share in zip(setup.bands[1:], setup.band_shares[1:], strict=True):
            other += tokens * share * (3 * FLOAT + band.width * e)
        return self._sent_between_layers.plus(Sent((4 + 1) * len(setup.bands), vectors=tokens, other=other))

    @property
    def _narrow_elements(self) -> float:
        setup = self.batch.setup
        shares = zip(setup.bands, setup.band_shares, strict=True)
        return sum(self.batch.tokens * share / setup.tensor * band.width for band, share in shares)

    @property
    def _kept_by_bands(self) -> tuple[float, ...]:
        setup = self.batch.setup
        head, *tails = super()._kept_by_bands
        kept = [head]
        for band, share, scores in zip(setup.bands[1:], setup.band_shares[1:], tails, strict=True):
            inputs = (setup.model.hidden_size + band.width) * self.batch.element_bytes
            kept.append(self.batch.tokens * share * inputs + scores)
        return tuple(kept)
