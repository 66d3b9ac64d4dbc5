"""Search and mixture against brute force and recorded probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_style.datastore.mixture import by_token, log_prob_of, log_weights, mix, neighbour_scores, recent_scores
from megatron_style.datastore.search import nearest
from tests.support.oracle import ORACLE, oracle_is_here

CONFIGS = range(5)


@pytest.fixture(scope="module")
def arrays() -> Mapping[str, NDArray[Any]]:
    with np.load(ORACLE / "systems" / "knn_lm.npz") as file:
        return dict(file)


def tensors(arrays: Mapping[str, NDArray[Any]], *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(arrays[name]) for name in names]


@oracle_is_here
@pytest.mark.parametrize("number", CONFIGS)
def test_recorded_neighbours_and_losses(arrays: Mapping[str, NDArray[Any]], number: int) -> None:
    queries, targets, values, model = tensors(arrays, "queries", "targets", "values", "lm_log_probs")
    k, temperature, weight = arrays["configs"][number]
    found = nearest(arrays["keys"], queries, int(k))
    weights = log_weights(neighbour_scores(found.distances_Qk, temperature))
    tokens = values[found.rows_Qk]
    mixed = mix(model[range(len(targets)), targets], log_prob_of(targets, tokens, weights), weight, weights)
    np.testing.assert_allclose(-mixed, arrays[f"nll.{number}"], atol=1e-12, rtol=0)
    if f"neighbours.{number}" not in arrays:
        return
    np.testing.assert_array_equal(found.rows_Qk, arrays[f"neighbours.{number}"])
    for row, wanted in enumerate(arrays[f"knn_probs.{number}"]):
        ids, log_probs = by_token(tokens[row], weights[row])
        dense = np.zeros_like(wanted)
        dense[ids] = log_probs.exp()
        np.testing.assert_allclose(dense, wanted, atol=1e-12, rtol=0)


@oracle_is_here
def test_recorded_continuous_cache(arrays: Mapping[str, NDArray[Any]]) -> None:
    queries, targets, model = tensors(arrays, "queries", "targets", "lm_log_probs")
    size, theta, weight = (arrays[f"cache_{name}"].item() for name in ("size", "theta", "lambda"))
    for first in (0, 20):  # the last predictions alone are the same as among all
        weights = log_weights(recent_scores(queries, len(queries) - first, size, theta))
        remembered = targets.expand(len(weights), -1)
        other = log_prob_of(targets[first:], remembered, weights)
        mixed = mix(model[range(len(targets)), targets][first:], other, weight, weights)
        np.testing.assert_allclose(-mixed, arrays["nll_cache"][first:], atol=1e-12, rtol=0)
    for row, wanted in enumerate(arrays["cache_probs"][first:]):
        ids, log_probs = by_token(remembered[row], weights[row])
        np.testing.assert_allclose(log_probs.exp(), wanted[ids], atol=1e-12, rtol=0)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=5), st.floats(1e-3, 1e3), st.integers(0, 4))
def test_a_weight_of_zero_is_the_model_and_of_one_the_neighbours(
    distances: list[float], temperature: float, target: int
) -> None:
    weights = log_weights(-torch.tensor([distances], dtype=torch.float64) / temperature)
    other = log_prob_of(torch.tensor([target]), torch.arange(len(distances))[None], weights)
    model = torch.tensor([-3.25], dtype=torch.float64)
    assert torch.equal(mix(model, other, 0.0, weights), model)
    assert torch.equal(mix(model, other, 1.0, weights), other)
    assert weights.exp().sum().item() == pytest.approx(1)


def test_where_nothing_is_remembered_the_model_alone_counts() -> None:
    weights = log_weights(torch.full((1, 3), -torch.inf, dtype=torch.float64))
    other = log_prob_of(torch.tensor([5]), torch.full((1, 3), 5), weights)
    assert other.item() == -torch.inf
    assert mix(torch.tensor([-2.0], dtype=torch.float64), other, 1.0, weights).item() == -2.0
