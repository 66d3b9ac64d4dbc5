"""Text from a model, token by token. The cache walks as in training: a segment grows to its length, then becomes the
cache of the next, so that the context grows from one segment to two and drops back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_style.model.shortformer import Shortformer


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen. Temperature 0 is greedy; the cuts are applied in this order."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def choose(self, log_probs_V: Tensor, generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(log_probs_V.argmax())
        # The best has score 0 at any temperature; without the difference, a tiny one would make all scores -inf.
        scores_V = (log_probs_V.double() - log_probs_V.max()) / self.temperature
        scores, order = scores_V.sort(descending=True, stable=True)
        if self.top_k is not None:
            scores, order = scores[: self.top_k], order[: self.top_k]
        probs = scores.softmax(-1)
        if self.top_p is not None:
            before = probs.cumsum(-1) - probs  # the mass ahead of each token: the first is always kept
            probs = probs.masked_fill(before >= self.top_p, 0)
        return int(order[torch.multinomial(probs, 1, generator=generator)])


@torch.no_grad()
def generate(
    model: Shortformer,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    segment_length: int,
    cache_length: int,
    eos: int,
    seed: int,
) -> Iterator[int]:
    """Endless; the caller stops. The prompt is read as if a line had ended before it."""
    generator = torch.Generator().manual_seed(seed)
    cache = model.empty_cache(1, cache_length)
    segment = [eos, *prompt]
    while True:
        while len(segment) > segment_length:
            _, cache = model.features(torch.tensor([segment[:segment_length]]), cache)
            segment = segment[segment_length:]
        features, _ = model.features(torch.tensor([segment]), cache)
        token = sampler.choose(model.vocabulary.log_probs(features[:, -1])[0], generator)
        yield token
        segment.append(token)
