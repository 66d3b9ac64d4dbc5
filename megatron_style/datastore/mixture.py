"""The probabilities of a kNN-LM (Khandelwal et al., ICLR 2020) and of a continuous cache (Grave et al., ICLR 2017).

Both give each remembered token a weight and mix the result with the model's distribution. All is in float64 and in log
space, so that a weight of 0 or 1 is exact. Shape letters: N predictions, k remembered tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def neighbour_scores(distances_Nk: Tensor, temperature: float) -> Tensor:
    """Return -distance / temperature. The nearest gets 0, so that a tiny temperature does not make all of them -inf;
    what was not found has the distance inf and gets -inf."""
    nearest_N1 = distances_Nk[:, :1]
    return torch.where(nearest_N1.isfinite(), (nearest_N1 - distances_Nk) / temperature, -torch.inf)


def log_weights(scores_Nk: Tensor) -> Tensor:
    """Return the log-softmax over the remembered tokens; all are -inf where nothing is remembered."""
    total_N1 = scores_Nk.logsumexp(-1, keepdim=True)
    return torch.where(total_N1 > -torch.inf, scores_Nk - total_N1, -torch.inf)


def log_prob_of(targets_N: Tensor, values_Nk: Tensor, log_weights_Nk: Tensor) -> Tensor:
    """Return the log-probability of each target: the sum over the remembered tokens that are equal to it."""
    return torch.where(values_Nk == targets_N[:, None], log_weights_Nk, -torch.inf).logsumexp(-1)


def by_token(values_k: Tensor, log_weights_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens in ascending order, and their log-probabilities."""
    tokens, index = values_k.unique(return_inverse=True)
    probs = torch.zeros(len(tokens), dtype=log_weights_k.dtype).index_add_(0, index, log_weights_k.exp())
    return tokens, probs.log()


def mix(model_N: Tensor, other_N: Tensor, weight: float, log_weights_Nk: Tensor) -> Tensor:
    """Return log((1 - weight) p + weight q). Where nothing is remembered, the model's own p is the result."""
    weight_N = weight * (log_weights_Nk > -torch.inf).any(-1).to(model_N)
    return torch.logaddexp(torch.log1p(-weight_N) + model_N, weight_N.log() + other_N)


def recent_scores(keys_SD: Tensor, predictions: int, size: int, theta: float) -> Tensor:
    """Return theta q.k of the last `predictions` keys with all keys [N, S]; -inf but for the `size` just before q."""
    S = len(keys_SD)
    scores_NS = theta * keys_SD[S - predictions :] @ keys_SD.T
    age_NS = torch.arange(S - predictions, S)[:, None] - torch.arange(S)
    return scores_NS.masked_fill((age_NS < 1) | (age_NS > size), -torch.inf)
