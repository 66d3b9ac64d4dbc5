"""A beam search finds the text with the best mean log-probability, and scores it as evaluation does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.shortformer import Shortformer
from tests.support.continuing import EOS, PROMPTS, continuation, model_of_seed, searched
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model

BEST_IS_NOT_GREEDY = [("infused", 10), ("infused", 18), ("infused", 26), ("added", 5), ("added", 6), ("added", 33)]


def log_prob(model: Shortformer, prompt: Sequence[int], text: Sequence[int]) -> float:
    whole = [*prompt, *text]
    nll = score(model, torch.tensor(whole).numpy(), Protocol("cached", 4, 4), eos=EOS).nll
    return float(-nll[len(prompt) :].sum())


@pytest.mark.parametrize("positions", ["infused", "added"])
def test_one_beam_is_greedy(positions: str) -> None:
    model = model_of_seed(tiny_config(positions=positions), 1)
    for prompt in PROMPTS:
        assert list(searched(model, prompt, 1, 25).tokens) == continuation(model, prompt, tokens=25)


@pytest.mark.parametrize(("positions", "seed"), BEST_IS_NOT_GREEDY)
@pytest.mark.parametrize("ends", [(), (0,), (1, 3)], ids=str)
def test_with_enough_beams_the_best_of_all_texts_is_found(positions: str, seed: int, ends: tuple[int, ...]) -> None:
    """In models where greedy choices do not find it."""
    config = tiny_config("untied", positions=positions).model_copy(update={"vocab_size": 5})
    model, prompt = model_of_seed(config, seed, scale=1.5), [4, 3, 1]
    texts = set()
    for text in itertools.product(range(5), repeat=3):
        length = next((n for n, token in enumerate(text, 1) if token in ends), 3)
        texts.add(text[:length])
    means = {text: log_prob(model, prompt, text) / len(text) for text in texts}
    best = max(means, key=lambda text: means[text])
    found = searched(model, prompt, 25, 3, ends)
    assert found.tokens == best
    assert found.score == pytest.approx(means[best], abs=1e-9)
    assert list(best) != continuation(model, prompt, tokens=3)


@pytest.mark.parametrize("beams", [2, 3, 7])
def test_what_the_search_says_of_its_text_is_what_evaluation_says(beams: int) -> None:
    model, prompt = model_of_seed(tiny_config("untied"), 4), [5, 9, 30]
    found = searched(model, prompt, beams, 30)
    assert found.log_prob == pytest.approx(log_prob(model, prompt, found.tokens), abs=1e-8)
    assert found == searched(model, prompt, beams, 30)
    greedy = continuation(model, prompt, tokens=30)
    assert found.log_prob > log_prob(model, prompt, greedy)
    assert len(found.tokens) == 30


def test_more_beams_than_tokens_and_a_text_that_ends_at_once() -> None:
    model = tiny_model(tiny_config())
    assert len(searched(model, [5], 50, 3).tokens) == 3
    assert len(searched(model, [5], 3, 20, range(VOCAB_SIZE)).tokens) == 1
