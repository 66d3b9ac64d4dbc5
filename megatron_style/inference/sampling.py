"""Text from a model, token by token. The cache walks as in training: a segment grows to its length, then becomes the
cache of the next, so that the context grows from one segment to two and drops back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_style.inference.decoder import Decoder
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
    follow = _decode if model.config.positions == "infused" else _encode_again
    for features in follow(model, text := [eos, *prompt], segment_length, cache_length):
        token = sampler.choose(model.vocabulary.log_probs(features)[0], generator)
        yield token
        text.append(token)


def _decode(model: Shortformer, text: list[int], segment_length: int, cache_length: int) -> Iterator[Tensor]:
    """The features of the last token [1, D], each time it is asked for; the caller appends to the text in between."""
    decoder, read = Decoder(model, rows=1, segment_length=segment_length, cache_length=cache_length), 0
    while True:
        while read < len(text):
            ids = text[read : read + (decoder.room or segment_length)]
            features = decoder.feed(torch.tensor([ids]))
            read += len(ids)
        yield features[:, -1]


def _encode_again(model: Shortformer, text: list[int], segment_length: int, cache_length: int) -> Iterator[Tensor]:
    """Added positions cannot be taken back, so each token encodes its segment anew."""
    cache, begin = model.empty_cache(1, cache_length), 0
    while True:
        while len(text) - begin > segment_length:
            _, cache = model.features(torch.tensor([text[begin : begin + segment_length]]), cache)
            begin += segment_length
        yield model.features(torch.tensor([text[begin:]]), cache)[0][:, -1]
