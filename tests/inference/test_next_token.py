"""The next token is chosen as the sampler says, and only the bands that matter are computed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_style.inference.next_token import Floats, NextToken, Tail, next_tokens
from megatron_style.inference.sampling import Sampler
from megatron_style.model.vocabulary import AdaptiveVocabulary
from tests.support.continuing import GREEDY, KINDS
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model

P = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)


def banded(probs: Tensor, *edges: int) -> NextToken:
    """The distribution with its tokens behind the edges in tail bands."""

    def tail(first: int, last: int) -> Tail:
        mass = probs[first:last].sum()
        return Tail(first, mass.log().item(), lambda: (probs[first:last] / mass).log().numpy())

    return NextToken(
        probs[: edges[0]].log().numpy(), [tail(*edge) for edge in itertools.pairwise([*edges, len(probs)])]
    )


def spread(sampler: Sampler, probs: Tensor, *edges: int, numbers: int = 600) -> Tensor:
    """How much of the numbers from 0 to 1 leads to each token: its probability, up to 2 / numbers."""
    following = banded(probs, *edges)
    chosen = [sampler.choose(following, (i + 0.5) / numbers) for i in range(numbers)]
    return torch.bincount(torch.tensor(chosen), minlength=len(probs)) / numbers


@pytest.mark.parametrize("edges", [[5], [2], [1, 3], [3, 4]], ids=str)
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(), P),
        (Sampler(temperature=0), torch.tensor([0, 1, 0, 0, 0])),
        (Sampler(temperature=0.5), P**2 / (P**2).sum()),
        (Sampler(top_k=2), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
        (Sampler(top_k=99), P),
        (Sampler(temperature=0.5, top_k=2), torch.tensor([0, 16 / 25, 0, 9 / 25, 0])),
        (Sampler(top_p=0.71), torch.tensor([0, 0.4, 0.15, 0.3, 0]) / 0.85),
        (Sampler(top_p=0.69), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
        (Sampler(top_p=1.0), P),
        (Sampler(temperature=0.5, top_p=0.8), torch.tensor([0, 16 / 25, 0, 9 / 25, 0])),
        (Sampler(top_k=3, top_p=0.5), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_the_cut_distribution_says(
    sampler: Sampler, expected: Tensor, edges: list[int]
) -> None:
    frequency = spread(sampler, P, *edges)
    assert torch.equal(frequency > 0, expected > 0)
    torch.testing.assert_close(frequency.double(), expected.double(), atol=2 / 600, rtol=0)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("edges", [[5], [3], [1, 3]], ids=str)
def test_what_is_impossible_is_never_drawn(u: float, edges: list[int]) -> None:
    probs = torch.tensor([0, 0.3, 0, 0.7, 0], dtype=torch.float32)
    for sampler in (Sampler(), Sampler(0.5), Sampler(top_k=4), Sampler(top_p=0.99)):
        assert sampler.choose(banded(probs, *edges), u) in (1, 3)


# Bands that stay closed


def features(rows: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * size


@pytest.fixture
def vocabulary() -> Iterator[AdaptiveVocabulary]:
    """Band sizes 10, 10 and 17. Large vectors, so that the distributions differ in shape."""
    found = tiny_model(tiny_config()).vocabulary
    assert isinstance(found, AdaptiveVocabulary)
    with torch.no_grad():
        found.clusters.mul_(3)
        yield found


@pytest.mark.parametrize("size", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("count", [1, 2, 5, 12, 37, 50])
def test_the_likeliest_are_those_of_the_full_distribution(
    vocabulary: AdaptiveVocabulary, count: int, size: float
) -> None:
    x_ND = features(40, size=size)
    for following, whole in zip(next_tokens(vocabulary, x_ND), vocabulary.log_probs(x_ND), strict=True):
        expected, order = whole.sort(descending=True, stable=True)
        log_probs, ids = map(torch.from_numpy, following.likeliest(count))
        assert ids.tolist() == order[:count].tolist()
        torch.testing.assert_close(log_probs, expected[:count])
        assert GREEDY.choose(following, 0.5) == order[0]


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_nucleus_is_the_likeliest_tokens_that_hold_its_mass(vocabulary: AdaptiveVocabulary, mass: float) -> None:
    x_ND = features(40, size=4.0)
    for following, whole in zip(next_tokens(vocabulary, x_ND), vocabulary.log_probs(x_ND), strict=True):
        log_probs, ids = map(torch.from_numpy, following.nucleus(mass))
        assert set(ids.tolist()) == set(whole.topk(len(ids)).indices.tolist())
        torch.testing.assert_close(log_probs, whole[ids])
        assert log_probs.exp().sum() >= mass - 1e-12


def test_equal_tokens_come_in_the_order_of_their_ids() -> None:
    probs = torch.full((8,), 1 / 8, dtype=torch.float64)
    for edges in ([8], [7], [1, 7], [1, 2]):  # a band of one token is as likely as the token
        assert banded(probs, *edges).likeliest(2)[1].tolist() == [0, 1]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(top_k=6), Sampler(top_p=0.8), Sampler(1.7)], ids=str)
def test_the_hierarchy_draws_from_the_distribution_that_the_loss_knows(
    vocabulary: AdaptiveVocabulary, sampler: Sampler
) -> None:
    x_ND, numbers = features(1, seed=3, size=4.0), 600
    (following,) = next_tokens(vocabulary, x_ND)
    nll = vocabulary.nll(x_ND.expand(VOCAB_SIZE, -1), torch.arange(VOCAB_SIZE), None)
    counts = Counter(sampler.choose(following, (i + 0.5) / numbers) for i in range(numbers))
    found = torch.tensor([counts[i] / numbers for i in range(VOCAB_SIZE)])
    expected = spread(sampler, (-nll).exp(), VOCAB_SIZE, numbers=numbers)
    torch.testing.assert_close(found, expected, atol=2 / numbers, rtol=0)
    if sampler == Sampler():
        torch.testing.assert_close(found.double(), (-nll).exp(), atol=2 / numbers, rtol=0)


def opened(vocabulary: AdaptiveVocabulary, x_ND: Tensor, sampler: Sampler, u: float = 0.5) -> list[list[int]]:
    """Which tail bands are computed when each row chooses."""
    calls: list[int] = []
    inside = AdaptiveVocabulary.tail_log_probs

    def counted(self: AdaptiveVocabulary, tail: int, x: Tensor) -> Tensor:
        calls.append(tail + 1)
        return inside(self, tail, x)

    found = []
    with patch.object(AdaptiveVocabulary, "tail_log_probs", counted):
        for x_D in x_ND:
            calls.clear()
            (following,) = next_tokens(vocabulary, x_D[None])
            sampler.choose(following, u)
            found.append(sorted(calls))
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_a_band_is_opened_only_when_it_could_hold_one_of_the_likeliest(
    vocabulary: AdaptiveVocabulary, count: int
) -> None:
    """Compared with what is known from band 0 and the likelier bands."""
    x_ND = features(200, size=3.0)
    whole, clusters = vocabulary.log_probs(x_ND), vocabulary.head_log_probs(x_ND)[1]
    bands = opened(vocabulary, x_ND, Sampler(top_k=count))
    for row, (first, second) in enumerate(clusters.tolist()):
        parts = whole[row].split([10, 10, 17])
        known = {1: parts[0] if first >= second else torch.cat([parts[0], parts[2]])}
        known[2] = parts[0] if second > first else torch.cat([parts[0], parts[1]])
        could = [band for band, bound in ((1, first), (2, second)) if bound >= known[band].topk(count).values[-1]]
        assert bands[row] == could
    assert Counter(map(tuple, bands)).keys() == {(), (1,), (2,), (1, 2)}


def test_a_drawn_token_opens_at_most_its_own_band(vocabulary: AdaptiveVocabulary) -> None:
    x_ND = features(50, size=1.0)
    for u in (0.1, 0.5, 0.9):
        tokens = [Sampler().choose(following, u) for following in next_tokens(vocabulary, x_ND)]
        bands = [[] if token < 10 else [1] if token < 20 else [2] for token in tokens]
        assert opened(vocabulary, x_ND, Sampler(), u) == bands
        assert Counter(map(tuple, bands)).keys() == {(), (1,), (2,)}


def test_a_small_nucleus_opens_little_and_a_temperature_opens_all(vocabulary: AdaptiveVocabulary) -> None:
    x_ND = features(50, size=6.0)
    small, large = (opened(vocabulary, x_ND, Sampler(top_p=p)) for p in (0.2, 1.0))
    assert sum(map(len, small)) < sum(map(len, large))
    assert opened(vocabulary, x_ND, Sampler(temperature=0.7)) == [[1, 2]] * 50


def test_a_tail_that_one_row_opens_is_computed_once_for_all_rows(vocabulary: AdaptiveVocabulary) -> None:
    x_ND = features(6, size=3.0)
    with patch.object(AdaptiveVocabulary, "tail_log_probs", wraps=vocabulary.tail_log_probs) as inside:
        rows = next_tokens(vocabulary, x_ND)
        assert inside.call_count == 0
        together = [following.everything() for following in rows]
        assert inside.call_count == len(vocabulary.tail_starts)
    for x_D, (log_probs, ids) in zip(x_ND, together, strict=True):
        (alone,) = next_tokens(vocabulary, x_D[None])
        assert np.array_equal(ids, alone.everything()[1])
        np.testing.assert_allclose(log_probs, alone.everything()[0], rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_sums_to_one_and_agrees_with_the_loss(kind: str) -> None:
    model, x_ND = tiny_model(tiny_config(kind)), features(5)
    with torch.no_grad():
        log_probs = model.vocabulary.log_probs(x_ND)
        everything = torch.arange(VOCAB_SIZE).repeat(5)
        nll = model.vocabulary.nll(x_ND.repeat_interleave(VOCAB_SIZE, 0), everything, None)
        following = next_tokens(model.vocabulary, x_ND)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(log_probs, -nll.view(5, VOCAB_SIZE))
    for token, whole in zip(following, log_probs, strict=True):
        found, ids = map(torch.from_numpy, token.everything())
        torch.testing.assert_close(found, whole)
        assert ids.tolist() == list(range(VOCAB_SIZE))


# Mixtures

FEW = torch.tensor([0, 4, 9, 11, 30, 36])
FEW_PROBS = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.25, 0.05], dtype=torch.float64)


def mixture(following: NextToken, weight: float) -> NextToken:
    return following.mixed(FEW.numpy(), FEW_PROBS.log().numpy(), weight)


def dense_mixture(whole: Tensor, weight: float) -> Tensor:
    return ((1 - weight) * whole.exp()).index_add(0, FEW, weight * FEW_PROBS)


@pytest.mark.parametrize("size", [0.5, 4.0])
@pytest.mark.parametrize("weight", [0.0, 0.25, 0.9, 1.0])
def test_a_mixture_is_that_of_the_full_distributions(
    vocabulary: AdaptiveVocabulary, size: float, weight: float
) -> None:
    x_ND = features(20, size=size)
    for following, whole in zip(next_tokens(vocabulary, x_ND), vocabulary.log_probs(x_ND), strict=True):
        mixed = mixture(following, weight)
        expected = dense_mixture(whole, weight)
        log_probs, ids = map(torch.from_numpy, mixed.everything())
        torch.testing.assert_close(log_probs.exp(), expected[ids], atol=1e-14, rtol=0)
        for count in (1, 3, 12):
            log_probs, ids = map(torch.from_numpy, mixture(following, weight).likeliest(count))
            torch.testing.assert_close(log_probs.exp(), expected.sort(descending=True).values[:count])
            torch.testing.assert_close(expected[ids], log_probs.exp())
        log_probs, ids = map(torch.from_numpy, mixture(following, weight).nucleus(0.7))
        assert set(ids.tolist()) == set(expected.topk(len(ids)).indices.tolist())
        assert log_probs.exp().sum() >= 0.7


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_a_mixture_is_drawn_from_as_often_as_it_says(vocabulary: AdaptiveVocabulary, weight: float) -> None:
    (following,), numbers = next_tokens(vocabulary, features(1, seed=3, size=2.0)), 2000
    mixed = mixture(following, weight)
    counts = Counter(mixed.draw((i + 0.5) / numbers) for i in range(numbers))
    found = torch.tensor([counts[i] / numbers for i in range(VOCAB_SIZE)], dtype=torch.float64)
    expected = dense_mixture(vocabulary.log_probs(features(1, seed=3, size=2.0))[0], weight)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_a_weight_of_zero_changes_no_bit_of_a_float32_model(vocabulary: AdaptiveVocabulary) -> None:
    vocabulary.float()
    for following in next_tokens(vocabulary, features(20, size=3.0).float()):
        mixed = mixture(following, 0.0)
        for one, other in zip(following.everything(), mixed.everything(), strict=True):
            assert np.array_equal(one, other)
            assert one.dtype == other.dtype
        assert following.mixed(FEW[:0].numpy(), FEW_PROBS[:0].numpy(), 0.5) is following


def test_a_tail_with_some_of_the_tokens_stays_closed_until_it_is_needed() -> None:
    def opened() -> Floats:
        raise AssertionError("this band holds no candidate")

    tail = Tail(2, math.log(0.2), opened)
    following = NextToken(np.log([0.7, 0.1]), [tail])
    mixed = following.mixed(np.array([0, 5]), np.log([0.75, 0.25]), 0.5)
    assert mixed.likeliest(1)[1].tolist() == [0]
    assert mixed.draw(0.3) == 0
