"""The distribution of a next token, of an adaptive vocabulary computed no further than a choice needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_style.base.errors import RunFailed
from megatron_style.model.vocabulary import AdaptiveVocabulary, PlainVocabulary


@dataclass(frozen=True)
class Tail:
    """A band that need not be computed to know how likely its tokens are at most."""

    first: int  # its first token id
    log_prob: float  # of the band as a whole
    inside: Callable[[], Tensor]  # the log-probabilities of its tokens, given the band


class NextToken:
    """The distribution of one next token. No token is likelier than its band, so a tail band is computed only when it
    could hold what is asked for. Everything here is on the CPU, where choosing is as quick and always the same."""

    def __init__(self, words_V: Tensor, tails: Sequence[Tail] = ()) -> None:
        self._words, self._tails = words_V, tails
        self._open = {0: words_V}  # log-probabilities by the first id of the band
        self._closed = sorted(tails, key=lambda tail: tail.log_prob)

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of so many tokens in falling order; where they are equal, the lower id first."""
        log_probs, ids = self._ahead(lambda ahead: len(ahead) >= count)
        if count < len(ids):
            (kept,) = torch.where(log_probs >= log_probs.topk(count).values[-1])  # sorting a few is cheaper
            log_probs, ids = log_probs[kept], ids[kept]
        order = log_probs.argsort(descending=True, stable=True)[:count]
        return log_probs[order], ids[order]

    def nucleus(self, mass: float) -> tuple[Tensor, Tensor]:
        """All tokens above some probability, by id: as many as hold this much of it together, and perhaps more."""
        return self._ahead(lambda ahead: bool(ahead.double().exp().sum() >= mass))

    def everything(self) -> tuple[Tensor, Tensor]:
        return self._ahead(lambda _: False)

    def draw(self, u: float) -> int:
        """The token at u, from 0 to 1, of the cumulative distribution: a word of band 0, or a tail and a word there."""
        clusters = self._words.new_tensor([tail.log_prob for tail in self._tails])
        index, rest = pick(torch.cat([self._words, clusters]).exp(), u)
        if index < len(self._words):
            return index
        tail = self._tails[index - len(self._words)]
        return tail.first + pick(tail.inside().cpu().exp(), rest)[0]

    def _ahead(self, enough: Callable[[Tensor], bool]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids, by id, of the tokens likelier than any in a closed band. The likeliest band is
        opened until they are enough, or nothing is closed."""
        while True:
            log_probs = torch.cat(list(self._open.values()))
            ids = torch.cat([torch.arange(first, first + len(band)) for first, band in self._open.items()])
            if not self._closed:
                return log_probs, ids
            (ahead,) = torch.where(log_probs > self._closed[-1].log_prob)
            if enough(log_probs[ahead]):
                return log_probs[ahead], ids[ahead]
            tail = self._closed.pop()
            self._open = dict(sorted({**self._open, tail.first: tail.log_prob + tail.inside().cpu()}.items()))


def pick(probs: Tensor, u: float) -> tuple[int, float]:
    """Laid end to end and scaled to 1, which one holds u, and how far into it u lies, from 0 to 1."""
    ends = probs.double().cumsum(-1)
    goal = u * ends[-1]
    last = torch.searchsorted(ends, ends[-1])  # rounding must not lead beyond it, to something impossible
    index = int(torch.searchsorted(ends, goal, right=True).minimum(last))
    rest = float(1 - (ends[index] - goal) / probs[index])
    return index, min(max(rest, 0.0), 1.0)


def next_tokens(vocabulary: AdaptiveVocabulary | PlainVocabulary, features_BD: Tensor) -> list[NextToken]:
    """One distribution a row; tail bands are left closed until a choice needs them."""
    if features_BD.isnan().any():
        raise RunFailed("the model's predictions are not numbers; its weights are damaged, or its training diverged")
    words, clusters = (part.cpu() for part in vocabulary.head_log_probs(features_BD))
    return [
        NextToken(
            words[row],
            [
                Tail(first, log_prob, partial(vocabulary.tail_log_probs, tail, features_BD[row]))
                for tail, (first, log_prob) in enumerate(
                    zip(vocabulary.tail_starts, clusters[row].tolist(), strict=True)
                )
            ],
        )
        for row in range(len(features_BD))
    ]
