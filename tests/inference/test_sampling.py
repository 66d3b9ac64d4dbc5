"""Text is continued with the context that training gave, and chosen as the sampler says."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor

from megatron_style.inference.perplexity import Protocol, score
from megatron_style.inference.sampling import Sampler, generate
from megatron_style.model.shortformer import Shortformer
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model

EOS = 2
GREEDY = Sampler(temperature=0)
KINDS = ["adaptive", "tied", "untied"]


def continuation(
    model: Shortformer,
    prompt: list[int],
    sampler: Sampler = GREEDY,
    tokens: int = 30,
    *,
    L: int = 4,
    C: int = 4,
    seed: int = 1,
) -> list[int]:
    stream = generate(model, prompt, sampler, segment_length=L, cache_length=C, eos=EOS, seed=seed)
    return list(islice(stream, tokens))


@torch.no_grad()
def recomputed(model: Shortformer, text: list[int], L: int, C: int) -> Tensor:
    """The distribution behind a text, all caches made anew from its beginning."""
    cache = model.empty_cache(1, C)
    inputs = [EOS, *text]
    for start in range(0, len(inputs), L):
        features, cache = model.features(torch.tensor([inputs[start : start + L]]), cache)
    log_probs: Tensor = model.vocabulary.log_probs(features[:, -1])[0]
    return log_probs


@pytest.mark.parametrize("prompt", [[], [7], [5, 9, 30], [5, 9, 30, 11], [5, 9, 30, 11, 4, 36, 20, 19, 8, 3]])
@pytest.mark.parametrize(("L", "C"), [(4, 4), (4, 0), (4, 2), (4, 6), (1, 1)])
def test_greedy_text_is_what_recomputing_everything_gives(prompt: list[int], L: int, C: int) -> None:
    model = tiny_model(tiny_config())
    text = list(prompt)
    for _ in range(18):
        text.append(int(recomputed(model, text, L, C).argmax()))
    assert continuation(model, prompt, tokens=18, L=L, C=C) == text[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_scored_as_the_likeliest(kind: str) -> None:
    """Generation and evaluation walk through a text in the same way."""
    model, prompt = tiny_model(tiny_config(kind)), [5, 9, 30]
    text = prompt + continuation(model, prompt, tokens=20)
    nll = score(model, torch.tensor(text).numpy(), Protocol("cached", 4, 4), eos=EOS).nll
    for i in range(len(prompt), len(text)):
        assert nll[i] == pytest.approx(-recomputed(model, text[:i], 4, 4).max().item(), abs=1e-9)


def test_a_seed_repeats_and_another_seed_does_not() -> None:
    model = tiny_model(tiny_config())
    first, again, other = (continuation(model, [5], Sampler(), seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_sampling_leaves_the_random_state_of_others_alone() -> None:
    state = torch.get_rng_state()
    continuation(tiny_model(tiny_config()), [5], Sampler())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(top_k=1),
        Sampler(top_p=1e-9),
        Sampler(temperature=1e-4),
        Sampler(temperature=1e-320),
        Sampler(temperature=5.0, top_k=1, top_p=0.5),
    ],
    ids=str,
)
def test_the_narrowest_choice_is_greedy(sampler: Sampler) -> None:
    model = tiny_model(tiny_config())
    assert continuation(model, [5, 9], sampler) == continuation(model, [5, 9])


def test_text_goes_on_through_many_segments() -> None:
    tokens = continuation(tiny_model(tiny_config()), [5], Sampler(), tokens=150)
    assert len(tokens) == 150
    assert set(tokens) <= set(range(VOCAB_SIZE))
    assert len(set(tokens)) > 10


# The choice alone


def drawn(sampler: Sampler, log_probs: Tensor, draws: int = 4000) -> Tensor:
    """How often each token is chosen."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([sampler.choose(log_probs, generator) for _ in range(draws)])
    return torch.bincount(chosen, minlength=len(log_probs)) / draws


P = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(), P),
        (Sampler(temperature=0.5), P**2 / (P**2).sum()),
        (Sampler(top_k=2), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
        (Sampler(top_k=99), P),
        (Sampler(top_p=0.71), torch.tensor([0, 0.4, 0.15, 0.3, 0]) / 0.85),
        (Sampler(top_p=0.69), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
        (Sampler(top_p=1.0), P),
        (Sampler(top_k=3, top_p=0.5), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_the_cut_distribution_says(sampler: Sampler, expected: Tensor) -> None:
    frequency = drawn(sampler, P.log())
    assert torch.equal(frequency > 0, expected > 0)
    torch.testing.assert_close(frequency.double(), expected.double(), atol=0.03, rtol=0)


# The distribution it is drawn from


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_sums_to_one_and_agrees_with_the_loss(kind: str) -> None:
    config = tiny_config(kind)
    model = tiny_model(config)
    x_ND = torch.randn(5, config.model.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        log_probs = model.vocabulary.log_probs(x_ND)
        everything = torch.arange(VOCAB_SIZE).repeat(5)
        nll = model.vocabulary.nll(x_ND.repeat_interleave(VOCAB_SIZE, 0), everything, None)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(log_probs, -nll.view(5, VOCAB_SIZE))
