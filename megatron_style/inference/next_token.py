"""The distribution of the next token. Tails of an adaptive vocabulary are computed only if a choice needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.base.errors import RunFailed
from megatron_style.inference.decoder import Reading
from megatron_style.model.shortformer import Shortformer
from megatron_style.model.vocabulary import AdaptiveVocabulary, PlainVocabulary

Floats = NDArray[np.floating]
Ids = NDArray[np.integer]


@dataclass(frozen=True)
class Tail:
    """A band whose tokens have a known upper bound, so that it need not be computed."""

    first: int  # its first token id
    log_prob: float  # of the band
    inside: Callable[[], Floats]  # the log-probabilities of its tokens, given the band


class NextToken:
    """The distribution of one next token. No token is likelier than its band, so a tail band is computed only when it
    could hold a candidate. Everything here is in NumPy: a choice is many small steps, which cost torch ten times as
    much to begin as they take."""

    def __init__(self, words_V: Floats, tails: Sequence[Tail] = ()) -> None:
        self._words = words_V
        self._tails = tails
        self._open = {0: words_V}  # log-probabilities by the first id of the band
        self._closed = sorted(tails, key=lambda tail: tail.log_prob)

    def likeliest(self, count: int) -> tuple[Floats, Ids]:
        """Return log-probabilities and ids of the `count` likeliest tokens in descending order; ties by id."""
        log_probs, ids = self._ahead(lambda ahead: len(ahead) >= count)
        if count < len(ids):
            kept = np.flatnonzero(log_probs >= np.partition(log_probs, -count)[-count])  # sorting a few is cheaper
            log_probs = log_probs[kept]
            ids = ids[kept]
        order = np.argsort(-log_probs, kind="stable")[:count]
        return log_probs[order], ids[order]

    def nucleus(self, mass: float) -> tuple[Floats, Ids]:
        """Return all tokens above some probability, by id, with a total probability of at least `mass`."""
        return self._ahead(lambda ahead: bool(np.exp(ahead, dtype=np.float64).sum() >= mass))

    def everything(self) -> tuple[Floats, Ids]:
        return self._ahead(lambda _: False)

    def draw(self, u: float) -> int:
        """Return the token at u in [0, 1] of the cumulative distribution: one of band 0, or one in a tail."""
        clusters = np.array([tail.log_prob for tail in self._tails], self._words.dtype)
        index, rest = pick(np.exp(np.concatenate([self._words, clusters])), u)
        if index < len(self._words):
            return index
        tail = self._tails[index - len(self._words)]
        return tail.first + pick(np.exp(tail.inside()), rest)[0]

    def mixed(self, ids: Ids, log_probs: Floats, weight: float) -> NextToken:
        """Return the mixture with a distribution over a few ids, which has the probability `weight`; without ids, this
        distribution. A tail stays closed, whether it holds some of the ids or not."""
        possible = np.flatnonzero(log_probs > -np.inf)
        if not len(possible):
            return self
        starts = [0, *(tail.first for tail in self._tails)]
        band = np.searchsorted(starts, ids, side="right") - 1
        held = [possible[band[possible] == number] for number in range(len(starts))]
        few = [(ids[index] - start, log_probs[index]) for start, index in zip(starts, held, strict=True)]
        words = _mix(self._words, *few[0], weight).astype(self._words.dtype)
        tails = [_mix_tail(tail, *part, weight) for tail, part in zip(self._tails, few[1:], strict=True)]
        return NextToken(words, tails)

    def _ahead(self, enough: Callable[[Floats], bool]) -> tuple[Floats, Ids]:
        """Return log-probabilities and ids, by id, of the tokens that are likelier than any in a closed band. The
        likeliest closed band is opened until they are enough, or none is closed."""
        while True:
            log_probs = np.concatenate(list(self._open.values()))
            ids = np.concatenate([np.arange(first, first + len(band)) for first, band in self._open.items()])
            if not self._closed:
                return log_probs, ids
            ahead = np.flatnonzero(log_probs > self._closed[-1].log_prob)
            if enough(log_probs[ahead]):
                return log_probs[ahead], ids[ahead]
            tail = self._closed.pop()
            # A float32 model's sum stays float32: a Python number has no precision of its own.
            self._open = dict(sorted({**self._open, tail.first: tail.inside() + tail.log_prob}.items()))


Predict = Callable[[Reading], Sequence[NextToken]]  # gives one distribution per row


def by_model(model: Shortformer) -> Predict:
    """Return the prediction of the model alone."""
    return lambda reading: next_tokens(model.vocabulary, reading.x)


def _mix(log_probs: Floats, index: Ids, others: Floats, weight: float) -> Floats:
    """Return log((1 - weight) p + weight q) in float64, for q that is zero except at some indices."""
    mixed = _log(1 - weight) + log_probs.astype(np.float64)
    mixed[index] = np.logaddexp(mixed[index], _log(weight) + others)
    return mixed


def _mix_tail(tail: Tail, index: Ids, others: Floats, weight: float) -> Tail:
    if not len(index):
        return Tail(tail.first, _log(1 - weight) + tail.log_prob, tail.inside)
    of_few = _log(weight) + float(np.logaddexp.reduce(others))
    band = float(np.logaddexp(_log(1 - weight) + tail.log_prob, of_few))

    def inside() -> Floats:
        given = tail.inside()
        mixed = _mix(given.astype(np.float64) + tail.log_prob, index, others, weight) - band
        return mixed.astype(given.dtype)

    return Tail(tail.first, band, inside)


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def pick(probs: Floats, u: float) -> tuple[int, float]:
    """Return the index at u in [0, 1] of the cumulative distribution, and how far into it u is, from 0 to 1."""
    ends = np.cumsum(probs, dtype=np.float64)
    goal = u * ends[-1]
    last = np.searchsorted(ends, ends[-1])  # rounding must not lead beyond it, to probability 0
    index = int(min(np.searchsorted(ends, goal, side="right"), last))
    rest = float(1 - (ends[index] - goal) / probs[index])
    return index, min(max(rest, 0.0), 1.0)


def next_tokens(vocabulary: AdaptiveVocabulary | PlainVocabulary, features_BD: Tensor) -> list[NextToken]:
    """Return one distribution per row. Tail bands stay closed until a choice needs them, and are then computed for all
    rows: a product for 32 rows costs as much as five for one."""
    if features_BD.isnan().any():
        raise RunFailed("the model's predictions are not numbers; its weights are damaged, or its training diverged")

    @cache
    def inside(tail: int) -> Floats:
        return _numbers(vocabulary.tail_log_probs(tail, features_BD))

    words, clusters = map(_numbers, vocabulary.head_log_probs(features_BD))
    starts = list(enumerate(vocabulary.tail_starts))
    rows = []
    for row, bounds in enumerate(clusters.tolist()):
        tails = [
            Tail(first, bound, partial(_row_of, inside, tail, row))
            for (tail, first), bound in zip(starts, bounds, strict=True)
        ]
        rows.append(NextToken(words[row], tails))
    return rows


def _row_of(inside: Callable[[int], Floats], tail: int, row: int) -> Floats:
    row_V: Floats = inside(tail)[row]
    return row_V


def _numbers(log_probs: Tensor) -> Floats:
    numbers: Floats = log_probs.detach().cpu().numpy()
    return numbers
