"""The distribution of the next token. Tails of an adaptive vocabulary are computed only if a choice needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_style.base.errors import RunFailed
from megatron_style.inference.decoder import Reading
from megatron_style.model.shortformer import Shortformer
from megatron_style.model.vocabulary import AdaptiveVocabulary, PlainVocabulary


@dataclass(frozen=True)
class Tail:
    """A band whose tokens have a known upper bound, so that it need not be computed."""

    first: int  # its first token id
    log_prob: float  # of the band
    inside: Callable[[], Tensor]  # the log-probabilities of its tokens, given the band


class NextToken:
    """The distribution of one next token. No token is likelier than its band, so a tail band is computed only when it
    could hold a candidate. Everything here is on the CPU, where a choice is as fast, and deterministic."""

    def __init__(self, words_V: Tensor, tails: Sequence[Tail] = ()) -> None:
        self._words = words_V
        self._tails = tails
        self._open = {0: words_V}  # log-probabilities by the first id of the band
        self._closed = sorted(tails, key=lambda tail: tail.log_prob)

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids of the `count` likeliest tokens in descending order; ties by id."""
        log_probs, ids = self._ahead(lambda ahead: len(ahead) >= count)
        if count < len(ids):
            (kept,) = torch.where(log_probs >= log_probs.topk(count).values[-1])  # sorting a few is cheaper
            log_probs = log_probs[kept]
            ids = ids[kept]
        order = log_probs.argsort(descending=True, stable=True)[:count]
        return log_probs[order], ids[order]

    def nucleus(self, mass: float) -> tuple[Tensor, Tensor]:
        """Return all tokens above some probability, by id, with a total probability of at least `mass`."""
        return self._ahead(lambda ahead: bool(ahead.double().exp().sum() >= mass))

    def everything(self) -> tuple[Tensor, Tensor]:
        return self._ahead(lambda _: False)

    def draw(self, u: float) -> int:
        """Return the token at u in [0, 1] of the cumulative distribution: one of band 0, or one in a tail."""
        clusters = self._words.new_tensor([tail.log_prob for tail in self._tails])
        index, rest = pick(torch.cat([self._words, clusters]).exp(), u)
        if index < len(self._words):
            return index
        tail = self._tails[index - len(self._words)]
        return tail.first + pick(tail.inside().cpu().exp(), rest)[0]

    def mixed(self, ids: Tensor, log_probs: Tensor, weight: float) -> NextToken:
        """Return the mixture with a distribution over a few ids, which has the probability `weight`; without ids, this
        distribution. A tail stays closed, whether it holds some of the ids or not."""
        (possible,) = torch.where(log_probs > -torch.inf)
        if not len(possible):
            return self
        starts = torch.tensor([0, *(tail.first for tail in self._tails)])
        band = torch.searchsorted(starts, ids, right=True) - 1
        held = [possible[band[possible] == number] for number in range(len(starts))]
        few = [(ids[index] - start, log_probs[index]) for start, index in zip(starts, held, strict=True)]
        words = _mix(self._words, *few[0], weight).to(self._words.dtype)
        tails = [_mix_tail(tail, *part, weight) for tail, part in zip(self._tails, few[1:], strict=True)]
        return NextToken(words, tails)

    def _ahead(self, enough: Callable[[Tensor], bool]) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids, by id, of the tokens that are likelier than any in a closed band. The
        likeliest closed band is opened until they are enough, or none is closed."""
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


Predict = Callable[[Reading], Sequence[NextToken]]  # gives one distribution per row


def by_model(model: Shortformer) -> Predict:
    """Return the prediction of the model alone."""
    return lambda reading: next_tokens(model.vocabulary, reading.x)


def _mix(log_probs: Tensor, index: Tensor, others: Tensor, weight: float) -> Tensor:
    """Return log((1 - weight) p + weight q) in float64, for q that is zero except at some indices."""
    mixed = _log(1 - weight) + log_probs.double()
    mixed[index] = torch.logaddexp(mixed[index], _log(weight) + others)
    return mixed


def _mix_tail(tail: Tail, index: Tensor, others: Tensor, weight: float) -> Tail:
    if not len(index):
        return Tail(tail.first, _log(1 - weight) + tail.log_prob, tail.inside)
    first = torch.zeros(1, dtype=torch.long)
    band = float(_mix(torch.tensor([tail.log_prob]), first, others.logsumexp(0, keepdim=True), weight))

    def inside() -> Tensor:
        given = tail.inside().cpu()
        return (_mix(tail.log_prob + given.double(), index, others, weight) - band).to(given.dtype)

    return Tail(tail.first, band, inside)


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def pick(probs: Tensor, u: float) -> tuple[int, float]:
    """Return the index at u in [0, 1] of the cumulative distribution, and how far into it u is, from 0 to 1."""
    ends = probs.double().cumsum(-1)
    goal = u * ends[-1]
    last = torch.searchsorted(ends, ends[-1])  # rounding must not lead beyond it, to probability 0
    index = int(torch.searchsorted(ends, goal, right=True).minimum(last))
    rest = float(1 - (ends[index] - goal) / probs[index])
    return index, min(max(rest, 0.0), 1.0)


def next_tokens(vocabulary: AdaptiveVocabulary | PlainVocabulary, features_BD: Tensor) -> list[NextToken]:
    """Return one distribution per row; tail bands stay closed until a choice needs them."""
    if features_BD.isnan().any():
        raise RunFailed("the model's predictions are not numbers; its weights are damaged, or its training diverged")
    words, clusters = (part.cpu() for part in vocabulary.head_log_probs(features_BD))
    rows = []
    for row, features_D in enumerate(features_BD):
        bands = zip(vocabulary.tail_starts, clusters[row].tolist(), strict=True)
        tails = [
            Tail(first, log_prob, partial(vocabulary.tail_log_probs, tail, features_D))
            for tail, (first, log_prob) in enumerate(bands)
        ]
        rows.append(NextToken(words[row], tails))
    return rows
