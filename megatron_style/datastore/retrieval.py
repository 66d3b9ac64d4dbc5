"""Datastore, search and mixture together: for a text whose tokens are scored, and for a text that is generated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.base.errors import RunFailed, UserError
from megatron_style.datastore.mixture import (
    by_token,
    log_prob_of,
    log_weights,
    mix,
    neighbour_scores,
    recent_scores,
)
from megatron_style.datastore.search import DAMAGED, Neighbours, queries_at_once
from megatron_style.datastore.store import Datastore
from megatron_style.inference.decoder import Reading
from megatron_style.inference.next_token import NextToken, Predict, next_tokens
from megatron_style.inference.scoring.reader import Tokens
from megatron_style.inference.scoring.score import Progress
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.topology import Axis

Search = Callable[[Tensor, int, Axis], Neighbours]  # of queries, k and the ranks that share it
_ALONE = Axis()


class Remembered(NamedTuple):
    """What is remembered at each prediction."""

    values_Nk: Tensor
    log_weights_Nk: Tensor

    def mixed(self, log_probs_N: Tensor, targets_N: Tensor, weight: float) -> Tensor:
        """Return the mixture of the targets' log-probabilities with what is remembered."""
        other_N = log_prob_of(targets_N, self.values_Nk, self.log_weights_Nk)
        return mix(log_probs_N, other_N, weight, self.log_weights_Nk)


@dataclass(frozen=True)
class Retrieval:
    """A kNN-LM's datastore, and how it is used."""

    store: Datastore
    search: Search
    k: int
    temperature: float
    weight: float  # the paper's lambda

    def find(self, queries_ND: Tensor, axis: Axis = _ALONE) -> Remembered:
        if not queries_ND.isfinite().all():
            raise RunFailed("the model's keys are not finite; its weights are damaged, or its training diverged")
        found = self.search(queries_ND, self.k, axis)
        if (found.distances_Qk == DAMAGED).any():
            raise UserError(f"{self.store.folder}: holds keys that are not finite; build it again")
        scores_Nk = neighbour_scores(found.distances_Qk, self.temperature)
        return Remembered(self.store.tokens_at(found.rows_Qk), log_weights(scores_Nk))

    def predict_with(self, model: Shortformer) -> Predict:
        """Return the prediction of model and neighbours. The model's tensor ranks share the search."""

        def predict(reading: Reading) -> list[NextToken]:
            found = self.find(reading.key, model.axis)
            rows = zip(next_tokens(model.vocabulary, reading.x), *found, strict=True)
            mixed = []
            for following, values, weights in rows:
                tokens, log_probs = by_token(values, weights)
                mixed.append(following.mixed(tokens.numpy(), log_probs.numpy(), self.weight))
            return mixed

        return predict


@dataclass(frozen=True)
class ContinuousCache:
    """The last `size` tokens of the text itself, as Grave et al. remember them."""

    size: int
    theta: float
    weight: float

    def find(self, keys_SD: Tensor, tokens_S: Tensor, predictions: int) -> Remembered:
        """Return what the last `predictions` tokens can see of the tokens before each."""
        scores_NS = recent_scores(keys_SD.cpu().double(), predictions, self.size, self.theta)
        return Remembered(tokens_S.expand(predictions, -1), log_weights(scores_NS))


class TextMixture:
    """Mixes the model's prediction of each token of a text with neighbours, with a continuous cache, or both.

    The keys of the text come in any order, from all ranks. They are kept in an unnamed temporary file, whose pages need
    not stay in memory; the rows of other ranks are holes in it."""

    def __init__(
        self, tokens: Tokens, model: Shortformer, retrieval: Retrieval | None, continuous: ContinuousCache | None
    ) -> None:
        self._tokens = tokens
        self._retrieval = retrieval
        self._continuous = continuous
        self._device = model.positions.table.device
        dtype = "f8" if next(model.parameters()).dtype == torch.float64 else "f4"
        shape = (len(tokens), model.config.hidden_size)
        with tempfile.TemporaryFile() as file:
            self._keys = np.memmap(file, dtype, mode="w+", shape=shape)

    def keep(self, first: int, keys: Tensor) -> None:
        self._keys[first : first + len(keys)] = keys.cpu().double().numpy()

    def mixed(self, nll: NDArray[np.float64], axis: Axis, progress: Progress) -> NDArray[np.float64]:
        """Return the loss of each token. The text is cut by k alone, so the number of ranks does not change a bit."""
        step = queries_at_once(self._retrieval.k if self._retrieval else 1)
        parts = []
        for first in range(0, len(nll), step):
            log_probs_N = torch.from_numpy(-nll[first : first + step])
            parts.append(self._mix(log_probs_N, first, axis))
            progress(len(log_probs_N))
        return -torch.cat(parts).numpy()

    def _mix(self, log_probs_N: Tensor, first: int, axis: Axis) -> Tensor:
        size = self._continuous.size if self._continuous else 0
        stretch = slice(max(0, first - size), first + len(log_probs_N))
        keys_SD = axis.sum(torch.from_numpy(self._keys[stretch]).to(self._device))
        tokens_S = torch.from_numpy(self._tokens[stretch].astype(np.int64))
        targets_N = tokens_S[-len(log_probs_N) :]
        if self._retrieval:
            found = self._retrieval.find(keys_SD[-len(log_probs_N) :], axis)
            log_probs_N = found.mixed(log_probs_N, targets_N, self._retrieval.weight)
        if self._continuous:
            recent = self._continuous.find(keys_SD, tokens_S, len(log_probs_N))
            log_probs_N = recent.mixed(log_probs_N, targets_N, self._continuous.weight)
        return log_probs_N
